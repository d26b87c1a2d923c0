"""flash-attn 2.8's functions for sequences in a row: replacing the import is the whole port.

What is not served raises UnsupportedError before any kernel runs.
"""

from typing import Any

from torch import Tensor

from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.arguments import GENERATED, as_flash_attn_softcap, check_tensor
from fa_autotune.ops.varlen import attend_varlen_packed, attention_varlen, check_lengths, varlen_call


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: q is (total_q, heads, head_dim), k and v (total_k, …) may have fewer heads.

    cu_seqlens are int32 (batch + 1,). The maxima are never read, so they may be numbers or tensors, and cause neither a
    wait nor a recompilation. return_attn_probs gives (out, softmax_lse, None), softmax_lse fp32 (heads, total_q).
    Gradients are always deterministic. Dropout keeps what `fa_autotune.dropout_mask` says of a padded batch.
    Paged keys (block_table) are not served.
    """
    if block_table is not None:
        raise UnsupportedError(
            "block_table (paged keys) is not served by this release of fa_autotune; gather the pages and leave it out"
        )
    results = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=as_flash_attn_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        return_lse=return_attn_probs,
    )
    return (*results, None) if return_attn_probs else results


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func: `flash_attn_varlen_func` of kv (total_k, 2, heads_k, head_dim).

    The gradient of kv is written in one piece, without slopes and dropout.
    """
    check_tensor("q", q)
    _check_packed("kv", kv, 2)
    check_lengths(max_seqlen_q, max_seqlen_k)
    call = varlen_call(softmax_scale, causal, window_size, as_flash_attn_softcap(softcap), GENERATED, dropout_p)
    results = attend_varlen_packed(q, kv, cu_seqlens_q, cu_seqlens_k, call, return_attn_probs, alibi_slopes)
    return (*results, None) if return_attn_probs else results


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func: `flash_attn_varlen_func` of qkv (total, 3, heads, head_dim).

    The gradient of qkv is written in one piece, without slopes and dropout.
    """
    _check_packed("qkv", qkv, 3)
    check_lengths(max_seqlen, max_seqlen)
    call = varlen_call(softmax_scale, causal, window_size, as_flash_attn_softcap(softcap), GENERATED, dropout_p)
    results = attend_varlen_packed(None, qkv, cu_seqlens, cu_seqlens, call, return_attn_probs, alibi_slopes)
    return (*results, None) if return_attn_probs else results


def _check_packed(name: str, packed: Any, count: int) -> None:
    check_tensor(name, packed)
    if packed.ndim != 4 or packed.shape[1] != count:
        raise InvalidProblemError(
            f"{name} has shape {tuple(packed.shape)}; it is (total, {count}, heads, head_dim): stack its parts along "
            "dimension 1"
        )
