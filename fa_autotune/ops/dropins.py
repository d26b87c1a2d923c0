"""Functions with the signatures and the meaning of what models call today: flash-attn 2.8's, and PyTorch's.

Replacing the import is the whole port. What is not served raises UnsupportedError before any kernel runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.api import attention
from fa_autotune.ops.arguments import (
    FULL,
    GENERATED,
    OPEN,
    TOP_LEFT,
    Extras,
    as_dropout,
    as_extras,
    as_flash_attn_softcap,
    as_scale,
    check_kinds,
    check_tensor,
    mask_of,
)
from fa_autotune.ops.autograd import attend, attend_packed, parts_of
from fa_autotune.ops.kernel_plan import CallArguments
from fa_autotune.ops.memory import BHSD, BHSD_STORED_AS_BSHD, BSHD, heads_first
from fa_autotune.reference.attention import signed_probabilities
from fa_autotune.reference.dropout import draw_seed


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

    causal and window_size are bottom-right aligned. return_attn_probs gives (out, softmax_lse, S_dmask), softmax_lse
    fp32 (batch, heads, seqlen_q) in natural log, without dropout; S_dmask is None without dropout, and else the
    probabilities (batch, heads, seqlen_q, seqlen_k), negative where they were dropped: plain torch, for tests.
    Gradients are always deterministic; softmax_lse has one too.
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        check_kinds(q, k, v)
        return _flash(
            q, (k, v), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
        )
    results = attention(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=as_flash_attn_softcap(softcap),
        alibi_slopes=alibi_slopes,
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
    return _flash(q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


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
    return _flash(None, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def _check_packed(name: str, packed: Any, count: int) -> None:
    if isinstance(packed, Tensor):
        check_tensor(name, packed)
    if not isinstance(packed, Tensor) or packed.ndim != 5 or packed.shape[2] != count:
        what = f"has shape {tuple(packed.shape)}" if isinstance(packed, Tensor) else f"is a {type(packed).__name__}"
        raise InvalidProblemError(
            f"{name} {what}; it is (batch, seqlen, {count}, heads, head_dim): stack its parts along dimension 2"
        )


def _flash(
    q: Tensor | None,
    rest: Tensor | tuple[Tensor, Tensor],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Any:
    dropout_p = as_dropout(dropout_p)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_scale(softmax_scale)
    mask, left, right = mask_of(causal, window_size)
    cap = as_flash_attn_softcap(softcap)
    """A call of q and (k, v), or of one that is packed."""
    parts: Any = (q, *rest) if isinstance(rest, tuple) else parts_of(q, rest)
    extras: Extras = ()
    if alibi_slopes is not None or dropout_p != 0.0:
        check_kinds(*parts)
        seed = draw_seed(parts[0].device) if dropout_p != 0.0 else None
        extras = as_extras(parts[0], BSHD, alibi_slopes, None, None, seed)
    call = (softmax_scale, mask, BSHD, GENERATED, left, right, cap, dropout_p)
    results: Any
    if isinstance(rest, tuple):
        results = attend(parts[0], *rest, call, return_attn_probs, extras)
    else:
        results = attend_packed(q, rest, call, return_attn_probs, extras)
    if not return_attn_probs:
        return results
    return (*results, None if dropout_p == 0.0 else _dropped_probabilities(parts, CallArguments(*call), extras))


@torch.no_grad()
def _dropped_probabilities(parts: tuple[Tensor, Tensor, Tensor], arguments: CallArguments, extras: Extras) -> Tensor:
    q, k, _ = (heads_first(tensor, BSHD) for tensor in parts)
    scale = q.shape[3] ** -0.5 if arguments.softmax_scale is None else arguments.softmax_scale
    features, diagonal = arguments.features(q.shape[2], k.shape[2], extras)
    return signed_probabilities(q, k, softmax_scale=scale, diagonal=diagonal, features=features)


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
    a query that sees no key gives 0. dropout_p drops attention weights as PyTorch does, by other random bits. The
    output lies in memory as query does.
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = as_dropout(dropout_p)
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
        call = (scale, mask, layout, GENERATED, OPEN, OPEN, 0.0, dropout_p)
        seed = draw_seed(query.device) if dropout_p != 0.0 else None
        extras = as_extras(query, BHSD, None, None, attn_mask, seed)
        out: Tensor = attend(query, key, value, call, False, extras)
        return out
    return _broadcast(query, key, value, attn_mask, dropout_p, scale, mask, enable_gqa)


def _is_batch(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True for tensors of 4 dimensions and one batch size."""
    return key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]


def _broadcast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    scale: float | None,
    mask: int,
    enable_gqa: bool,
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
    seed = draw_seed(q.device) if dropout_p != 0.0 else None
    extras = as_extras(q, BHSD, None, None, _with_batch(attn_mask, batch), seed)
    out: Tensor = attend(q, k, v, (scale, mask, BHSD, GENERATED, OPEN, OPEN, 0.0, dropout_p), False, extras)
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
