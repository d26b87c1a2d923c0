"""Calls of `attention` on small tensors, and what must hold of their results and gradients."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.evaluation.numerics import TANH_ERROR
from fa_autotune.ops import plans
from fa_autotune.paths import interpreting
from fa_autotune.reference.attention import (
    attention_gradients,
    attention_reference,
    attention_same_precision,
    backward_statistics,
    gradients_from_statistics,
)
from fa_autotune.reference.features import Features

DEVICE = torch.device("cpu" if interpreting() else "cuda")
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MINUS_INF = float("-inf")
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
interpreted = pytest.mark.skipif(not interpreting(), reason="a winner of Triton's interpreter needs TRITON_INTERPRET=1")
of_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # its forward mode needs that


def forget_plans(patch: pytest.MonkeyPatch) -> None:
    """Have calls make their plans anew."""
    for name in ("_plans", "_siblings"):
        patch.setattr(plans, name, {})


def runs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs generated kernels."""
    return pytest.mark.kernel(pytest.mark.usefixtures("kernels_can_run")(test))


def make(
    seqlen_q: int = 37,
    seqlen_k: int = 41,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: torch.dtype = BFLOAT16,
    device: torch.device = DEVICE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v; the same sizes give the same values."""
    generator = torch.Generator().manual_seed(seqlen_q + 1000 * seqlen_k)
    sizes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim if head_dim_v is None else head_dim_v),
    )
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return q, k, v


def make_small(seqlen_q: int = 37, seqlen_k: int = 41, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `make`, but smaller: the interpreter takes its time for a backward."""
    return make(seqlen_q, seqlen_k, **{"batch": 1, "heads": 2, "kv_heads": 1, **sizes})


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views with heads and seqlen exchanged."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def referred(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    deterministic: bool = True,
) -> dict[str, Any]:
    """What the reference is told of a call of `attention` with these arguments; not all of them concern it."""
    left, right = window_size
    right, offset = 0 if causal else right, k.shape[1] - q.shape[1]
    return {
        "softmax_scale": q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        "diagonal": None if right < 0 else offset + right,
        "features": Features(
            left_diagonal=None if left < 0 else offset - left,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.float().expand(q.shape[0], q.shape[2]),
            sinks=None if sinks is None else sinks.detach().float().expand(q.shape[0], q.shape[2]),
            attn_mask=None if attn_mask is None else attn_mask.detach()[(None,) * (4 - attn_mask.ndim)],
            key_offset=offset,
        ),
    }


def assert_right(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Call attention, hold out and lse to the numerics rule, and give them."""
    out, lse = attention(q, k, v, **arguments, return_lse=True)
    call = referred(q, k, **arguments)
    ref, ref_lse = attention_reference(*swapped(q, k, v), **call)
    pt = attention_same_precision(*swapped(q, k, v), **call)
    (got,) = swapped(out)
    rounded = ref.to(q.dtype)
    roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
    error, pt_error = (got.to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
    assert out.dtype == q.dtype
    assert error.max() <= 2 * pt_error.max() + roundings.max()
    assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean()
    capped = TANH_ERROR * arguments.get("softcap", 0.0)
    torch.testing.assert_close(lse, ref_lse, atol=1e-5 + capped, rtol=1e-5)
    return out, lse


def requiring(*tensors: Tensor) -> list[Tensor]:
    """The same tensors as leaves that require a gradient; views stay views."""
    return [tensor.detach().requires_grad_() for tensor in tensors]


def gradient_of(shape: torch.Size, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """A random gradient of a result."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd gives for q, k and v."""
    inputs = requiring(q, k, v)
    out = attention(*inputs, **arguments)
    dq, dk, dv = torch.autograd.grad(out, inputs, gradient_of(out.shape, out.dtype) if d_out is None else d_out)
    return dq, dk, dv


def results_and_gradients(function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """All results of a function, and the gradients of its inputs for fixed gradients of all results."""
    inputs = requiring(*tensors)
    found = function(*inputs)
    outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if out is not None]
    given = [gradient_of(out.shape, out.dtype) for out in outputs]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, given)]


def assert_gradients_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    d_out: Tensor | None = None,
    factor: float = 2.0,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hold the gradients to the numerics rule, and give them."""
    if d_out is None:
        d_out = gradient_of(torch.Size((*q.shape[:3], v.shape[3])), q.dtype)
    found = gradients(q, k, v, d_out, **arguments)
    call = referred(q, k, **arguments)
    tensors = swapped(q, k, v, d_out)
    refs = attention_gradients(*tensors, **call)
    lse, delta = backward_statistics(*tensors, **call)
    if arguments.get("sinks") is not None:
        # A sink's share makes out differ from every value even where a row sees one key: dp − delta then cancels no
        # more, and what is left is the rounding of out, from which a kernel computes delta.
        out = attention_reference(*tensors[:3], **call)[0].to(q.dtype)
        delta = (out.float() * tensors[3].float()).sum(-1)
    pts = gradients_from_statistics(*tensors, lse, delta, **call, dtype=q.dtype)
    for name, tensor, gradient, ref, pt in zip("qkv", (q, k, v), found, refs, pts, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        rounded = ref.to(q.dtype)
        roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
        error, pt_error = (swapped(gradient)[0].to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
        assert error.max() <= factor * pt_error.max() + roundings.max(), f"d{name}"
        assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean(), f"d{name}"
    return found


def in_larger_buffers(*tensors: Tensor, fill: float) -> list[Tensor]:
    """The same values at the start of longer and wider tensors."""
    views = []
    for tensor in tensors:
        batch, seqlen, heads, head_dim = tensor.shape
        buffer = tensor.new_full((batch, seqlen + 70, heads, head_dim + 32), fill)
        views.append(buffer[:, :seqlen, :, :head_dim].copy_(tensor))
    return views


def together(call: Callable[[], Any], count: int = 8) -> list[Any]:
    """Results of threads that start at one moment."""
    barrier = threading.Barrier(count)

    def run(_: int) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
