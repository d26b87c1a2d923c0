"""Plain-torch attention and seeded inputs: what every kernel is compared with, and what CPU tensors run.

Tensors are (batch, heads, seqlen, head_dim) throughout. `diagonal` is None (no bound) or the offset by which query row
i sees keys j <= i + diagonal; all else that a call may do to its scores is in `features`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference.features import NO_FEATURES, Features, seen_keys

MAX_SCORES = 2**25  # of one part of a large call: 128 MiB in fp32
TORCH_DTYPES = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the reference: fp64 for fp32 inputs, fp32 otherwise."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def hidden_keys(
    seqlen_q: int,
    seqlen_k: int,
    diagonal: int | None,
    device: torch.device,
    first_row: int = 0,
    left_diagonal: int | None = None,
) -> Tensor:
    """(seqlen_q, seqlen_k) mask, true where query row first_row + i must not see key j."""
    rows = torch.arange(first_row, first_row + seqlen_q, device=device)[:, None]
    keys = torch.arange(seqlen_k, device=device)[None, :]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if diagonal is not None:
        hidden |= keys > rows + diagonal
    if left_diagonal is not None:
        hidden |= keys < rows + left_diagonal
    return hidden


def _hidden(
    scores: Tensor, diagonal: int | None, features: Features, first_row: int = 0, first_key: int = 0
) -> Tensor | None:
    """Which scores of stretches of rows and keys do not count, of each head where a mask says so; None for none."""
    left = features.left_diagonal
    mask = _mask_of(scores, features, first_row, first_key)
    hidden = None
    if diagonal is not None or left is not None:
        right, left = (side if side is None else side - first_key for side in (diagonal, left))
        hidden = hidden_keys(scores.shape[2], scores.shape[3], right, scores.device, first_row, left)
    if mask is None:
        return hidden
    masked = ~mask if mask.dtype is torch.bool else mask == float("-inf")
    return masked if hidden is None else masked | hidden


def _weights(scores: Tensor, lse: Tensor, features: Features) -> Tensor:
    """The softmax of scores whose log-sum-exp is known."""
    mask = features.attn_mask
    if mask is None or mask.dtype is torch.bool:
        return torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    # A mask's numbers may be so large that lse, rounded, has lost how many keys share a row.
    highest = scores.max(-1, keepdim=True).values
    if features.sinks is not None:
        highest = torch.maximum(highest, features.sinks.to(scores.dtype)[..., None, None])
    highest = torch.where(highest == float("-inf"), 0.0, highest)
    weights, total = (
        torch.exp(scores - highest),
        torch.exp(_log_sum_exp(scores - highest, replace(features, sinks=None))),
    )
    if features.sinks is not None:
        total = total + torch.exp(features.sinks.to(scores.dtype)[..., None] - highest[..., 0])
    return weights / torch.where(total == 0.0, 1.0, total)[..., None]


def _scored(
    products: Tensor, features: Features, first_row: int = 0, first_key: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Scores of scaled products, and their derivative by those; None where it is 1."""
    scores, slope = products, None
    if features.softcap:
        bent = torch.tanh(products / features.softcap)
        scores, slope = features.softcap * bent, 1.0 - bent.square()
    if features.alibi_slopes is not None:
        rows = torch.arange(first_row, first_row + products.shape[2], device=products.device)[:, None]
        keys = torch.arange(first_key, first_key + products.shape[3], device=products.device)[None, :]
        distance = (rows + features.key_offset - keys).abs().to(products.dtype)
        scores = scores - features.alibi_slopes.to(products.dtype)[:, :, None, None] * distance
    mask = _mask_of(products, features, first_row, first_key)
    if mask is not None and mask.dtype is not torch.bool:
        scores = scores + mask.to(products.dtype)
    return scores, slope


def _mask_of(scores: Tensor, features: Features, first_row: int, first_key: int) -> Tensor | None:
    """A call's mask for stretches of rows and keys."""
    _, _, rows, keys = scores.shape
    return features.mask_of(slice(first_row, first_row + rows), slice(first_key, first_key + keys))


def _log_sum_exp(scores: Tensor, features: Features) -> Tensor:
    lse = torch.logsumexp(scores, dim=-1)
    if features.sinks is None:
        return lse
    return torch.logaddexp(lse, features.sinks.to(lse.dtype)[..., None])


def cut_to_tf32(tensor: Tensor) -> Tensor:
    """What tensor cores read of a float32 operand in tf32: 10 bits of its mantissa, the others cut off."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
    first_row: int = 0,
    features: Features = NO_FEATURES,
) -> tuple[Tensor, Tensor]:
    """Attention in the reference precision: (out, lse), out still in that precision.

    A row that sees no key gives out 0 and lse −inf. Keys hidden from a row never reach it, NaN or not. `first_row` is
    the position of q's first row, for checking a slice of the rows. O(seqlen_q · seqlen_k) memory per head.
    """
    precise = reference_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.to(precise).repeat_interleave(group, dim=1) for tensor in (k, v))
    scores, _ = _scored(q.to(precise) @ k.transpose(-1, -2) * softmax_scale, features, first_row)
    hidden = _hidden(scores, diagonal, features, first_row)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = _log_sum_exp(scores, features)
    weights = features.dropped(_weights(scores, lse, features), first_row)
    out = weights @ v
    if hidden is not None and not torch.isfinite(v).all():
        out = _without_hidden_nan(weights, v, hidden)
    return out, lse.to(torch.float32)


def signed_probabilities(
    q: Tensor, k: Tensor, *, softmax_scale: float, diagonal: int | None = None, features: Features = NO_FEATURES
) -> Tensor:
    """The softmax of a call's scores (batch, num_q_heads, seqlen_q, seqlen_k) in q's dtype, negative where dropped."""
    precise = reference_dtype(q.dtype)
    keys = k.to(precise).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores, _ = _scored(q.to(precise) @ keys.transpose(-1, -2) * softmax_scale, features)
    hidden = _hidden(scores, diagonal, features)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = _weights(scores, _log_sum_exp(scores, features), features)
    kept = features.dropped(torch.ones_like(weights)) > 0
    return torch.where(kept, weights, -weights).to(q.dtype)


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor | None = None, **call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that `attention_backward` gives."""
    return attention_backward(q, k, v, d_out, d_lse, **call)[:3]


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
    features: Features = NO_FEATURES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of what a mask adds, in the reference precision, from those of out and (if any) of lse.

    The last is (batch, num_q_heads, seqlen_q, seqlen_k).

    Written out, so that it also works where nothing is recorded. Rows that see no key and keys that no row sees get 0,
    and those keys are never read. O(seqlen_q · seqlen_k) memory per head.
    """
    precise = reference_dtype(q.dtype)
    _, num_q_heads, seqlen_q, _ = q.shape
    group = num_q_heads // k.shape[1]
    first, end = seen_keys(seqlen_q, k.shape[2], diagonal, features.left_diagonal)
    q, d_out = q.to(precise), d_out.to(precise)
    keys, values = (tensor[:, :, first:end].to(precise).repeat_interleave(group, dim=1) for tensor in (k, v))
    scores, slope = _scored(q @ keys.transpose(-1, -2) * softmax_scale, features, first_key=first)
    hidden = _hidden(scores, diagonal, features, first_key=first)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = _weights(scores, _log_sum_exp(scores, features), features)
    delta = ((features.dropped(weights, 0, first) @ values) * d_out).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse.to(precise)
    dk, dv = k.new_zeros(k.shape, dtype=precise), v.new_zeros(v.shape, dtype=precise)
    d_bias = q.new_zeros((*q.shape[:3], k.shape[2]))
    seen = (slice(None), slice(None), slice(first, end))
    dq, dk[seen], dv[seen], d_bias[..., first:end] = _gradients(
        q, keys, values, d_out, weights, delta, softmax_scale, group, slope, features, 0, first
    )
    return dq, dk, dv, d_bias


def gradients_from_statistics(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, **call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that `backward_from_statistics` gives."""
    return backward_from_statistics(q, k, v, d_out, lse, delta, **call)[:3]


def backward_from_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
    first_row: int = 0,
    first_key: int = 0,
    dtype: torch.dtype | None = None,
    features: Features = NO_FEATURES,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of what a mask adds, from what a backward kernel gets: lse, and delta = rowsum(d_out ∘
    out) − d_lse.

    The last is (batch, num_q_heads, seqlen_q, seqlen_k).

    Products are computed and rounded in `dtype`, by default the reference precision; in the inputs' own, the result has
    the error that plain torch makes, and with `tf32` that of products in tf32. `first_row` and `first_key` are the
    positions of q's first row and k's first key: dq of some rows needs all keys, dk and dv of some keys all rows.
    """
    dtype = dtype or reference_dtype(q.dtype)
    precise = torch.promote_types(dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    operand = cut_to_tf32 if tf32 else _as_is
    q, d_out = operand(q.to(dtype)), operand(d_out.to(dtype))
    keys, values = (operand(tensor.to(dtype)).repeat_interleave(group, dim=1) for tensor in (k, v))
    products = (q @ (keys * softmax_scale).transpose(-1, -2)).to(precise)
    scores, slope = _scored(products, features, first_row, first_key)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), float("inf"), lse)[..., None])
    hidden = _hidden(scores, diagonal, features, first_row, first_key)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return _gradients(
        q, keys, values, d_out, weights, delta, softmax_scale, group, slope, features, first_row, first_key, operand
    )


def _gradients(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    d_out: Tensor,
    weights: Tensor,
    delta: Tensor,
    softmax_scale: float,
    group: int,
    slope: Tensor | None,
    features: Features,
    first_row: int,
    first_key: int,
    operand: Callable[[Tensor], Tensor] = _as_is,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of what is added to the scores; keys and values are repeated for the heads of a group,
    their gradients are summed.

    `operand` is done to what is computed here and multiplied again.
    """
    d_weights = features.dropped((d_out @ values.transpose(-1, -2)).to(weights.dtype), first_row, first_key)
    d_bias = weights * (d_weights - delta[..., None])
    d_scores = d_bias * softmax_scale
    d_scores = operand((d_scores if slope is None else d_scores * slope).to(q.dtype))
    dk = d_scores.transpose(-1, -2) @ q
    dv = operand(features.dropped(weights, first_row, first_key).to(q.dtype)).transpose(-1, -2) @ d_out
    heads = (keys.shape[0], keys.shape[1] // group, group)
    return d_scores @ keys, dk.view(*heads, *dk.shape[2:]).sum(2), dv.view(*heads, *dv.shape[2:]).sum(2), d_bias


def backward_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
    features: Features = NO_FEATURES,
) -> tuple[Tensor, Tensor]:
    """(lse, delta), fp32 (batch, num_q_heads, seqlen_q): what the forward and the delta kernel leave for a backward.

    Computed part by part, so that calls of any size fit memory.
    """
    batch_size, num_q_heads, seqlen_q, _ = q.shape
    group = num_q_heads // k.shape[1]
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    delta = torch.empty_like(lse)
    heads = max(1, MAX_SCORES // (group * seqlen_q * k.shape[2]))
    rows = min(seqlen_q, max(1, MAX_SCORES // (group * k.shape[2])))
    for batch, kv_head, start in product(range(batch_size), range(0, k.shape[1], heads), range(0, seqlen_q, rows)):
        kv_part = (batch, slice(kv_head, kv_head + heads))
        part = (batch, slice(kv_head * group, (kv_head + heads) * group), slice(start, start + rows))
        out, lse_part = attention_reference(
            q[part][None], k[kv_part][None], v[kv_part][None],
            softmax_scale=softmax_scale, diagonal=diagonal, first_row=start,
            features=features.of_heads(slice(batch, batch + 1), part[1]),
        )  # fmt: skip
        lse[part] = lse_part[0]
        delta[part] = (out[0] * d_out[part].to(out.dtype)).sum(-1)
    return lse, delta


def _without_hidden_nan(weights: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """weights @ v where a hidden 0 · NaN counts as 0: NaN reaches only the rows that see it."""
    finite = torch.isfinite(v)
    clean = weights @ torch.where(finite, v, 0.0)
    seen = (~hidden.expand(weights.shape)).to(v.dtype) @ (~finite).to(v.dtype) > 0
    return torch.where(seen, float("nan"), clean)


def attention_same_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
    first_row: int = 0,
    features: Features = NO_FEATURES,
    tf32: bool = False,
) -> Tensor:
    """The same computation in the inputs' own precision, scale applied to k: the error plain torch makes, or with
    `tf32` that of products in tf32."""
    group, operand = q.shape[1] // k.shape[1], cut_to_tf32 if tf32 else _as_is
    q, k, v = operand(q), *(operand(tensor).repeat_interleave(group, dim=1) for tensor in (k, v))
    scores, _ = _scored(q @ (k * softmax_scale).transpose(-1, -2), features, first_row)
    hidden = _hidden(scores, diagonal, features, first_row)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if features.sinks is not None:
        sinks = features.sinks.to(scores.dtype)[:, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    if hidden is not None:
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return operand(features.dropped(weights, first_row)) @ v


def seeded_inputs(
    family: AttentionFamily, shape: AttentionShape, *, device: torch.device, seed: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal q, k, v of a shape with the family's dtype, dims and access: same seed, same values.

    Access `any` gives tensors whose last stride is 2 and whose storage starts one element late.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = (
        (shape.num_q_heads, shape.seqlen_q, family.head_dim),
        (shape.num_kv_heads, shape.seqlen_k, family.head_dim),
        (shape.num_kv_heads, shape.seqlen_k, family.head_dim_v),
    )
    q, k, v = (_random((shape.batch_size, *size), family, generator, device, scale) for size in sizes)
    return q, k, v


def seeded_output(
    family: AttentionFamily, shape: AttentionShape, *, device: torch.device, seed: int, scale: float = 1.0
) -> Tensor:
    """A random normal tensor with the sizes of out, and dtype and access as in `seeded_inputs`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (shape.batch_size, shape.num_q_heads, shape.seqlen_q, family.head_dim_v)
    return _random(size, family, generator, device, scale)


def _random(
    size: tuple[int, ...], family: AttentionFamily, generator: torch.Generator, device: torch.device, scale: float
) -> Tensor:
    values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
    tensor = (values * scale).to(TORCH_DTYPES[family.dtype])
    if family.access is not Access.ANY:
        return tensor
    padded = torch.empty(2 * tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
    strided = padded.view(*size, 2)[..., 0]
    return strided.copy_(tensor)
