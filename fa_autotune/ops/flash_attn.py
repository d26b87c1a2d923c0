"""flash-attn 2.8's functions, with their signatures and meaning: replacing the import is the whole port.

What is not served raises UnsupportedError before any kernel runs.
"""

from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.api import check_max_seqlens
from fa_autotune.ops.arguments import as_extras, as_flag, as_flash_attn_softcap, call_of
from fa_autotune.ops.autograd import (
    attend,
    attend_stacked,
    cast_as_autocast,
    is_autocast,
    is_seen_by_others,
    parts_of,
)
from fa_autotune.ops.call import BSHD, GENERATED, NO_EXTRAS, PACKED, Call, Extras
from fa_autotune.ops.library import probabilities_of, probabilities_op
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.tensor_kinds import check_tensor, refuse_proxy
from fa_autotune.reference.scripting import keep_out_of_scripts


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_func: q is (batch, seqlen_q, heads, head_dim), k and v may have fewer heads (GQA, MQA).

    causal and window_size are bottom-right aligned. return_attn_probs gives (out, softmax_lse, S_dmask), softmax_lse
    fp32 (batch, heads, seqlen_q) in natural log, without dropout; S_dmask is None without dropout, and else the
    probabilities (batch, heads, seqlen_q, seqlen_k), negative where they were dropped: plain torch, for tests.
    Gradients are always deterministic; softmax_lse has one too. learnable_sink, or s_aux, (heads,): one more score for
    each row, whose value is 0; differentiable.
    """
    call = _call(BSHD, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_parts((q, k, v), NO_EXTRAS, call, alibi_slopes, sinks, return_attn_probs)


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_kvpacked_func: `flash_attn_func` of kv (batch, seqlen_k, 2, heads_k, head_dim).

    The gradient of kv is written in one piece.
    """
    check_tensor("q", q)
    _check_stacked("kv", kv, 2, BSHD)
    call = _call(BSHD, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_stacked(q, kv, NO_EXTRAS, call, alibi_slopes, sinks, return_attn_probs)


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: `flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim).

    The gradient of qkv is written in one piece.
    """
    _check_stacked("qkv", qkv, 3, BSHD)
    call = _call(BSHD, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_stacked(None, qkv, NO_EXTRAS, call, alibi_slopes, sinks, return_attn_probs)


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: q is (total_q, heads, head_dim), k and v (total_k, …) may have fewer heads.

    cu_seqlens are int32 (batch + 1,). The maxima are never read, so they may be numbers or tensors, and cause neither a
    wait nor a recompilation. return_attn_probs gives (out, softmax_lse, S_dmask), softmax_lse fp32 (heads, total_q);
    S_dmask is None without dropout, and else the probabilities of each sequence (batch, heads, max_seqlen_q,
    max_seqlen_k), negative where they were dropped and 0 behind a sequence's end: plain torch that waits for the
    device, for tests; maxima that are no integers are those of cu_seqlens. Gradients are always deterministic. Dropout
    keeps what `fa_autotune.dropout_mask` says of a padded batch. learnable_sink and s_aux as in `flash_attn_func`.
    Paged keys (block_table) are not served.
    """
    if block_table is not None:
        raise UnsupportedError(
            "block_table (paged keys) is not served by this release of fa_autotune; gather the pages and leave it out"
        )
    check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    call = _call(PACKED, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    starts = Extras(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_parts((q, k, v), starts, call, alibi_slopes, sinks, return_attn_probs, (max_seqlen_q, max_seqlen_k))


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func: `flash_attn_varlen_func` of kv (total_k, 2, heads_k, head_dim).

    The gradient of kv is written in one piece.
    """
    check_tensor("q", q)
    _check_stacked("kv", kv, 2, PACKED)
    check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    call = _call(PACKED, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    starts = Extras(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_stacked(q, kv, starts, call, alibi_slopes, sinks, return_attn_probs, (max_seqlen_q, max_seqlen_k))


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func: `flash_attn_varlen_func` of qkv (total, 3, heads, head_dim).

    The gradient of qkv is written in one piece.
    """
    _check_stacked("qkv", qkv, 3, PACKED)
    check_max_seqlens(max_seqlen=max_seqlen)
    call = _call(PACKED, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    starts = Extras(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    sinks = learnable_sink if s_aux is None else _sinks_of(learnable_sink, s_aux)
    return _of_stacked(None, qkv, starts, call, alibi_slopes, sinks, return_attn_probs, (max_seqlen, max_seqlen))


def _call(
    layout: int, dropout_p: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, deterministic: Any
) -> Call:
    if deterministic is not False and deterministic is not True:
        as_flag("deterministic", deterministic)
    return call_of(layout, GENERATED, softmax_scale, causal, window_size, as_flash_attn_softcap(softcap), dropout_p)


def _sinks_of(learnable_sink: Tensor | None, s_aux: Tensor) -> Tensor:
    """Sinks by the second of the names that flash-attn's successors gave them."""
    if learnable_sink is not None:
        raise InvalidProblemError("learnable_sink and s_aux are given; both name the sinks: leave one of them out")
    return s_aux


def _check_stacked(name: str, stacked: Any, count: int, layout: int) -> None:
    axis = rows_of(layout).stack_axis
    if isinstance(stacked, Tensor):
        check_tensor(name, stacked)
        if stacked.ndim == axis + 3 and stacked.shape[axis] == count:
            return
    refuse_proxy(name, stacked)
    size = f"(total, {count}, heads, head_dim)" if layout == PACKED else f"(batch, seqlen, {count}, heads, head_dim)"
    what = f"has shape {tuple(stacked.shape)}" if isinstance(stacked, Tensor) else f"is a {type(stacked).__name__}"
    raise InvalidProblemError(f"{name} {what}; it is {size}: stack its parts along dimension {axis}")


def _with_extras(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Extras,
    call: Call,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Extras:
    if alibi_slopes is sinks is None and call.dropout_p == 0.0:
        return starts
    rows_of(call.layout).check_kinds(q, k, v, starts)
    cu_seqlens: Any = None if starts is NO_EXTRAS else (starts.cu_seqlens_q, starts.cu_seqlens_k)
    return as_extras(q, call, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens=cu_seqlens)


def _of_parts(
    parts: tuple[Tensor, Tensor, Tensor],
    starts: Extras,
    call: Call,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    with_probs: bool,
    maxima: tuple[Any, Any] = (None, None),
) -> Any:
    if with_probs is not False and with_probs is not True:
        with_probs = as_flag("return_attn_probs", with_probs)
    extras = _with_extras(*parts, starts, call, alibi_slopes, sinks)
    results = attend(*parts, extras, call, with_probs)
    return (*results, _probabilities(*parts, extras, call, maxima)) if with_probs else results


def _of_stacked(
    q: Tensor | None,
    stacked: Tensor,
    starts: Extras,
    call: Call,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    with_probs: bool,
    maxima: tuple[Any, Any] = (None, None),
) -> Any:
    if with_probs is not False and with_probs is not True:
        with_probs = as_flag("return_attn_probs", with_probs)
    parts = parts_of(q, stacked, rows_of(call.layout).stack_axis)
    extras = _with_extras(*parts, starts, call, alibi_slopes, sinks)
    results = attend_stacked(q, stacked, extras, call, with_probs)
    return (*results, _probabilities(*parts, extras, call, maxima)) if with_probs else results


@torch.no_grad()
def _probabilities(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call, maxima: tuple[Any, Any]
) -> Tensor | None:
    """S_dmask: the probabilities of a call with dropout, negative where they were dropped."""
    if call.dropout_p == 0.0:
        return None
    if is_autocast(q):
        q, k, v, extras = cast_as_autocast(q, k, v, extras)
    if is_seen_by_others() and not rows_of(call.layout).is_packed:
        return probabilities_op(q, k, extras, call)
    return probabilities_of(q, k, extras, call, maxima)


for _function in (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
):
    keep_out_of_scripts(_function)
