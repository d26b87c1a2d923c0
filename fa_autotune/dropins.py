"""Functions with the signatures and the meaning of what models call today: flash-attn 2.8's, and PyTorch's.

Replacing the import is the whole port. What is not served raises UnsupportedError before any kernel runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_autotune.differentiable import attend, attend_packed
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops import attention, check_features
from fa_autotune.tensors import (
    BHSD,
    BHSD_STORED_AS_BSHD,
    BSHD,
    FULL,
    GENERATED,
    OPEN,
    TOP_LEFT,
    Extras,
    as_extras,
    as_scale,
    as_softcap,
    check_kinds,
    check_tensor,
    mask_of,
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func: q is (batch, seqlen_q, heads, head_dim), k and v may have fewer heads (GQA, MQA).

    causal and window_size are bottom-right aligned. return_attn_probs gives (out, softmax_lse, None), softmax_lse fp32
    (batch, heads, seqlen_q) in natural log. Gradients are always deterministic; softmax_lse has one too.
    """
    results = attention(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=_as_flash_attn_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        return_lse=return_attn_probs,
    )
    return (*results, None) if return_attn_probs else results


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_kvpacked_func: `flash_attn_func` of kv (batch, seqlen_k, 2, heads_k, head_dim).

    The gradient of kv is written in one piece.
    """
    check_tensor("q", q)
    _check_packed("kv", kv, 2)
    return _packed(q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: `flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim).

    The gradient of qkv is written in one piece.
    """
    _check_packed("qkv", qkv, 3)
    return _packed(None, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def _as_flash_attn_softcap(softcap: Any) -> float:
    """What is not above 0 means none there."""
    number = as_softcap(softcap)
    return number if number > 0.0 or number != number else 0.0


def _check_packed(name: str, packed: Any, count: int) -> None:
    if isinstance(packed, Tensor):
        check_tensor(name, packed)
    if not isinstance(packed, Tensor) or packed.ndim != 5 or packed.shape[2] != count:
        what = f"has shape {tuple(packed.shape)}" if isinstance(packed, Tensor) else f"is a {type(packed).__name__}"
        raise InvalidProblemError(
            f"{name} {what}; it is (batch, seqlen, {count}, heads, head_dim): stack its parts along dimension 2"
        )


def _packed(
    q: Tensor | None,
    packed: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Any:
    check_features(dropout_p=dropout_p)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_scale(softmax_scale)
    mask, left, right = mask_of(causal, window_size)
    cap = _as_flash_attn_softcap(softcap)
    extras: Extras = ()
    if alibi_slopes is not None:
        q_like = packed.select(2, 0) if q is None else q
        check_kinds(q_like, packed.select(2, 0), packed.select(2, 0))
        extras = as_extras(q_like, BSHD, alibi_slopes, None)
    call = (softmax_scale, mask, BSHD, GENERATED, left, right, cap)
    results = attend_packed(q, packed, call, return_attn_probs, extras)
    return (*results, None) if return_attn_probs else results


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: query (…, heads, L, E), key (…, heads, S, E), value (…, S, Ev).

    is_causal is top-left aligned: query i sees keys j ≤ i, also where L ≠ S. Batch and head dimensions broadcast; with
    enable_gqa the query heads may be a multiple of those of key and value instead. attn_mask broadcasts to (…, heads,
    L, S): bool, True where a query sees a key, or of query's dtype or float32 and added to the scores, differentiable;
    a query that sees no key gives 0. The output lies in memory as query does.
    """
    if dropout_p != 0.0:
        raise UnsupportedError(
            "dropout_p is not served by this release of fa_autotune; leave it out or call "
            "torch.nn.functional.scaled_dot_product_attention there"
        )
    if attn_mask is not None and is_causal:
        raise InvalidProblemError(
            "attn_mask and is_causal=True are given; PyTorch takes one of them: leave is_causal out and put it into "
            "the mask, or call fa_autotune.attention, which takes both"
        )
    if scale is not None and type(scale) is not float:
        scale = as_scale(scale)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    mask = TOP_LEFT if is_causal else FULL
    lead = query.shape[:-2]
    if len(lead) == 2 and (lead == key.shape[:-2] == value.shape[:-2] or (enable_gqa and _is_batch(query, key, value))):
        layout = BHSD_STORED_AS_BSHD if query.stride(1) < query.stride(2) else BHSD
        call = (scale, mask, layout, GENERATED, OPEN, OPEN, 0.0)
        extras = () if attn_mask is None else as_extras(query, BHSD, None, None, attn_mask)
        out: Tensor = attend(query, key, value, call, False, extras)
        return out
    return _broadcast(query, key, value, attn_mask, scale, mask, enable_gqa)


def _is_batch(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True for tensors of 4 dimensions and one batch size."""
    return key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, scale: float | None, mask: int, enable_gqa: bool
) -> Tensor:
    ndim = max(query.ndim, key.ndim, value.ndim)
    least = 3 if enable_gqa else 2
    if min(query.ndim, key.ndim, value.ndim) < least:
        raise InvalidProblemError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dimensions; each takes at least "
            f"{least}: (…{', heads' if enable_gqa else ''}, length, head_dim)"
        )
    q, k, v = (tensor[(None,) * (max(ndim, 4) - tensor.ndim)] for tensor in (query, key, value))
    batch = _common((q.shape[:-3], k.shape[:-3], v.shape[:-3]), "batch")
    heads = [q.shape[-3], k.shape[-3], v.shape[-3]]
    if not enable_gqa:
        (count,) = _common([(number,) for number in heads], "head")
        one_for_all = heads[1] == heads[2] == 1  # shared, not repeated
        heads = [count, 1, 1] if one_for_all else [count, count, count]
    q, k, v = (
        tensor.expand(*batch, number, *tensor.shape[-2:]).flatten(0, -4)
        for tensor, number in zip((q, k, v), heads, strict=True)
    )
    extras = () if attn_mask is None else as_extras(q, BHSD, None, None, _with_batch(attn_mask, batch))
    out: Tensor = attend(q, k, v, (scale, mask, BHSD, GENERATED, OPEN, OPEN, 0.0), False, extras)
    return out.reshape((*batch, *out.shape[1:])[-ndim:])


def _with_batch(attn_mask: Any, batch: tuple[int, ...]) -> Any:
    """A mask whose leading dimensions are one batch; copied only where it has some of several of them."""
    if not isinstance(attn_mask, Tensor) or attn_mask.ndim < 4:
        return attn_mask
    lead, rest = attn_mask.shape[:-3], attn_mask.shape[-3:]
    if all(size == 1 for size in lead):
        return attn_mask.reshape(1, *rest)
    if len(lead) > len(batch) or any(
        have not in (1, want) for have, want in zip(lead, batch[len(batch) - len(lead) :], strict=True)
    ):
        raise InvalidProblemError(
            f"attn_mask has batch dimensions {tuple(lead)}, which do not broadcast to {batch} of query, key and value"
        )
    return attn_mask.expand(*batch, *rest).flatten(0, -4)


def _common(shapes: Sequence[Sequence[int]], what: str) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise InvalidProblemError(
            f"query, key and value have {what} dimensions {', '.join(str(tuple(shape)) for shape in shapes)}, which do "
            "not broadcast; enable_gqa=True lets query have a multiple of the others' heads"
        ) from None
