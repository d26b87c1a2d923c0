"""Calls of `attention_varlen` on small sequences, and what must hold of their results and gradients."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fa_autotune import attention_varlen
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.features import Features
from fa_autotune.reference.packed import (
    PackedCall,
    packed_gradients,
    packed_gradients_from_statistics,
    packed_reference,
    packed_same_precision,
    packed_statistics,
)
from kit.attention_calls import BFLOAT16, DEVICE, requiring

LENGTHS = [(5, 9), (0, 4), (37, 41), (1, 1), (20, 0), (33, 16)]
NAN = float("nan")


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    """Where sequences of these lengths start, and where the last one ends."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=DEVICE)


def make_packed(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    *,
    unused: int = 0,
    fill: float = 0.0,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: torch.dtype = BFLOAT16,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random q, k and v, cu_seqlens_q and cu_seqlens_k; `unused` rows of each, after the last sequence, hold `fill`."""
    starts_q, starts_k = (cu_seqlens([pair[side] for pair in lengths]) for side in (0, 1))
    used_q, used_k = (sum(pair[side] for pair in lengths) for side in (0, 1))
    generator = torch.Generator().manual_seed(used_q + 1000 * used_k)
    sizes = (
        (used_q, heads, head_dim),
        (used_k, kv_heads, head_dim),
        (used_k, kv_heads, head_dim if head_dim_v is None else head_dim_v),
    )
    q, k, v = (
        torch.cat([torch.randn(size, generator=generator), torch.full((unused, *size[1:]), fill)]).to(DEVICE, dtype)
        for size in sizes
    )
    return q, k, v, starts_q, starts_k


def told(q: Tensor, lengths: Sequence[tuple[int, int]], unused: int = 0, **arguments: Any) -> PackedCall:
    """What the reference is told of a call of `attention_varlen` with these arguments."""
    left, right = arguments.get("window_size", (-1, -1))
    right = 0 if arguments.get("causal") else right
    slopes, sinks = arguments.get("alibi_slopes"), arguments.get("sinks")
    size = (len(lengths), q.shape[1])
    scale = arguments.get("softmax_scale")
    lengths_q, lengths_k = zip(*lengths, strict=True)
    return PackedCall(
        sequences=Sequences(lengths_q=lengths_q, lengths_k=lengths_k, unused_q=unused, unused_k=unused),
        softmax_scale=q.shape[2] ** -0.5 if scale is None else scale,
        diagonal=None if right < 0 else right,
        features=Features(
            left_diagonal=None if left < 0 else -left,
            softcap=arguments.get("softcap", 0.0),
            alibi_slopes=None if slopes is None else slopes.float().expand(size),
            sinks=None if sinks is None else sinks.detach().float().expand(size),
        ),
    )


def rows_last(*tensors: Tensor) -> list[Tensor]:
    """The views (1, heads, total, head_dim) that the reference takes."""
    return [tensor.transpose(0, 1)[None] for tensor in tensors]


def assert_packed_right(
    tensors: Sequence[Tensor], lengths: Sequence[tuple[int, int]] = LENGTHS, unused: int = 0, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Call attention_varlen, hold out and lse to the numerics rule, and give them."""
    out, lse = attention_varlen(*tensors, **arguments, return_lse=True)
    q, k, v = tensors[:3]
    call = told(q, lengths, unused, **arguments)
    ref, ref_lse = packed_reference(*rows_last(q, k, v), call)
    pt = packed_same_precision(*rows_last(q, k, v), call)
    assert out.dtype == q.dtype
    assert_follows_rule(rows_last(out)[0], ref, pt)
    torch.testing.assert_close(lse, ref_lse[0], atol=1e-5, rtol=1e-5)
    return out, lse


def assert_follows_rule(value: Tensor, ref: Tensor, pt: Tensor, factor: float = 2.0) -> None:
    """The numerics rule: errors beside those of plain torch in the same precision."""
    rounded = ref.to(value.dtype)
    roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
    error, pt_error = (value.to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
    assert error.max() <= factor * pt_error.max() + roundings.max()
    assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean()


def varlen_gradients_of(tensors: Sequence[Tensor], d_out: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd gives for q, k and v."""
    inputs = requiring(*tensors[:3])
    out = attention_varlen(*inputs, *tensors[3:5], **arguments)
    dq, dk, dv = torch.autograd.grad(out, inputs, d_out)
    return dq, dk, dv


def gradient_like(tensors: Sequence[Tensor], unused: int = 0, fill: float = 0.0) -> Tensor:
    """A random gradient of out, `fill` in the unused rows."""
    q, _, v = tensors[:3]
    d_out = torch.randn(*q.shape[:2], v.shape[2], generator=torch.Generator().manual_seed(7)).to(DEVICE, q.dtype)
    d_out[q.shape[0] - unused :] = fill
    return d_out


def assert_packed_gradients_right(
    tensors: Sequence[Tensor],
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    unused: int = 0,
    *,
    fill: float = 0.0,
    factor: float = 2.0,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hold the gradients to the numerics rule, and give them."""
    d_out = gradient_like(tensors, unused, fill)
    found = varlen_gradients_of(tensors, d_out, **arguments)
    q, k, v, d_rows = rows_last(*tensors[:3], d_out)
    call = told(tensors[0], lengths, unused, **arguments)
    refs = packed_gradients(q, k, v, d_rows, None, call)
    lse, delta = packed_statistics(q, k, v, d_rows, call)
    if arguments.get("sinks") is not None:  # as in `attention_calls.assert_gradients_right`
        out = packed_reference(q, k, v, call)[0].to(q.dtype)
        delta = (out.float() * d_rows.float()).sum(-1)
    pts = packed_gradients_from_statistics(q, k, v, d_rows, lse, delta, call, dtype=q.dtype)
    for tensor, gradient, ref, pt in zip(tensors[:3], found, refs, pts, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert_follows_rule(rows_last(gradient)[0], ref, pt, factor)
    return found
