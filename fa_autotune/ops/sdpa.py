"""PyTorch's scaled_dot_product_attention, with its signature and meaning: replacing the import is the whole port."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.arguments import as_dropout, as_extras, as_flag, as_scale
from fa_autotune.ops.autograd import Attended, attend
from fa_autotune.ops.call import BHSD, BHSD_STORED_AS_BSHD, BOTTOM_RIGHT, FULL, GENERATED, TOP_LEFT, Call
from fa_autotune.ops.tensor_kinds import PLAIN, causal_bias_of, check_tensor
from fa_autotune.reference.scripting import keep_out_of_scripts


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
    if is_causal is not False and is_causal is not True:
        is_causal = as_flag("is_causal", is_causal)
    if enable_gqa is not False and enable_gqa is not True:
        enable_gqa = as_flag("enable_gqa", enable_gqa)
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
    if attn_mask is not None and type(attn_mask) not in PLAIN and min(query.ndim, key.ndim) >= 2:
        top_left = causal_bias_of(attn_mask, query.shape[-2], key.shape[-2])
        if top_left is not None:
            mask, attn_mask = TOP_LEFT if top_left else BOTTOM_RIGHT, None
    lead = query.shape[:-2]
    if len(lead) == 2 and (lead == key.shape[:-2] == value.shape[:-2] or (enable_gqa and _is_batch(query, key, value))):
        layout = BHSD_STORED_AS_BSHD if query.stride(1) < query.stride(2) else BHSD
        call = Call(scale, mask, layout, GENERATED, dropout_p=dropout_p)
        return _out_of(attend(query, key, value, as_extras(query, call, attn_mask=attn_mask), call, False))
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
    heads, k_heads, v_heads = q.shape[-3], k.shape[-3], v.shape[-3]
    if not enable_gqa:
        (heads,) = _common([(heads,), (k_heads,), (v_heads,)], "head")
        if not k_heads == v_heads == 1:  # one for all is shared, not repeated
            k_heads = v_heads = heads
    q, k, v = (
        tensor.expand(*batch, number, *tensor.shape[-2:]).flatten(0, -4)
        for tensor, number in ((q, heads), (k, k_heads), (v, v_heads))
    )
    call = Call(scale, mask, BHSD, GENERATED, dropout_p=dropout_p)
    out = _out_of(attend(q, k, v, as_extras(q, call, attn_mask=_with_batch(attn_mask, batch)), call, False))
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


def _out_of(results: Attended) -> Tensor:
    assert isinstance(results, Tensor)  # none asked for lse
    return results


for _function in (scaled_dot_product_attention,):
    keep_out_of_scripts(_function)
