"""Attention sinks: one more score in the softmax of each row, whose value is 0; its gradient, and its edges.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.call import BSHD, FULL, GENERATED, Call
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    MINUS_INF,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    make,
    make_small,
    requiring,
    runs_kernels,
)

SINKS = torch.tensor([0.0, 1.5, -3.0, 6.0], device=DEVICE)


def by_definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch and fp64, for autograd: a column of sinks beside the scores."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[3] ** 0.5
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, MINUS_INF)
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    return (torch.softmax(scores, -1)[..., :-1] @ v).transpose(1, 2), torch.logsumexp(scores, -1)


class Swallow(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> None:
        return None


@runs_kernels
def test_no_gradient_at_all_comes_back_from_the_operator() -> None:
    q, k, v = requiring(*make_small())
    (sinks,) = requiring(SINKS[: q.shape[2]].expand(q.shape[0], -1).clone())
    out, _ = torch.ops.fa_autotune.forward(q, k, v, *Call(None, FULL, BSHD, GENERATED), sinks=sinks)
    Swallow.apply(out).sum().backward()
    assert [tensor.grad for tensor in (q, k, v, sinks)] == [None] * 4


@runs_kernels
@pytest.mark.parametrize("backend", ["generated", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(37, 41), (41, 20), (1, 50)])
def test_sinks_are_what_their_definition_is(seqlen_q: int, seqlen_k: int, causal: bool, backend: str) -> None:
    """Results and gradients, those of the sinks and those through lse too; also of rows that see no key."""
    tensors = requiring(*make(seqlen_q, seqlen_k, head_dim=16, dtype=FLOAT32), SINKS)
    *qkv, sinks = tensors
    out, lse = attention(*qkv, sinks=sinks, causal=causal, return_lse=True, backend=backend)
    expected, expected_lse = by_definition(*qkv, sinks, causal=causal)
    torch.testing.assert_close(lse, expected_lse.to(FLOAT32), atol=1e-5, rtol=1e-5)
    d_out, d_lse = gradient_of(out.shape, FLOAT32), gradient_of(lse.shape, FLOAT32)
    found = [out, *torch.autograd.grad([out, lse], tensors, [d_out, d_lse])]
    exact = [expected, *torch.autograd.grad([expected, expected_lse], tensors, [d_out.double(), d_lse.double()])]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(FLOAT32), atol=2e-5, rtol=2e-5)


@runs_kernels
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (20, 0)}, {"softcap": 3.0}])
def test_sinks_follow_the_numerics_rule(arguments: dict[str, Any]) -> None:
    assert_right(*make(90, 100), sinks=SINKS, **arguments)
    assert_gradients_right(*make_small(90, 100), sinks=SINKS[:2], **arguments, factor=3.0)


@runs_kernels
def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = make(50, 20)
    plain = attention(q, k, v, causal=True, return_lse=True)
    sinks = torch.full((4,), MINUS_INF, device=DEVICE).requires_grad_()
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert torch.equal(out, plain[0])
    torch.testing.assert_close(lse, plain[1])
    (gradient,) = torch.autograd.grad(out, sinks, gradient_of(out.shape))
    assert (gradient == 0).all()


@runs_kernels
@pytest.mark.parametrize("sink", [-1e30, -80.0, 80.0, 1e4, 1e30])
def test_sinks_of_any_size_neither_overflow_nor_turn_to_nan(sink: float) -> None:
    q, k, v = make_small(40, 50)
    sinks = torch.full((2,), sink, device=DEVICE).requires_grad_()
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    (gradient,) = torch.autograd.grad(out, sinks, gradient_of(out.shape))
    assert all(torch.isfinite(tensor).all() for tensor in (out, lse, gradient))
    if sink > 1e3:
        assert (out == 0).all()
        assert (lse == sink).all()


@runs_kernels
def test_rows_without_a_visible_key_give_zero_and_their_sink() -> None:
    q, k, v = requiring(*make_small(50, 20))
    out, lse = attention(q, k, v, causal=True, sinks=SINKS[:2], return_lse=True)
    assert (out[:, :30] == 0).all()
    torch.testing.assert_close(lse[:, :, :30], SINKS[:2, None].expand(1, 2, 30))
    dq, *others = torch.autograd.grad(out, (q, k, v), gradient_of(out.shape))
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, *others))


def test_without_keys_lse_is_the_sink_and_takes_its_gradient() -> None:
    q, k, v = make(5, 0, device=torch.device("cpu"))
    sinks = SINKS.cpu().clone().requires_grad_()
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[None, :, None].expand(2, 4, 5))
    (gradient,) = torch.autograd.grad(lse.sum(), sinks)
    assert gradient.tolist() == [10.0] * 4


@runs_kernels
def test_the_gradient_has_the_dtype_and_shape_of_the_sinks() -> None:
    q, k, v = make()
    sinks = SINKS.to(BFLOAT16).requires_grad_()
    attention(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    assert (sinks.grad.dtype, sinks.grad.shape) == (BFLOAT16, (4,))


@runs_kernels
def test_sinks_alone_may_need_a_gradient(loads: list[Candidate]) -> None:
    """Then the kernels of dq, dk and dv are not even loaded."""
    q, k, v = make_small()
    sinks = SINKS[:2].clone().requires_grad_()
    out = attention(q, k, v, sinks=sinks)
    out.backward(gradient_of(out.shape))
    assert Counter(candidate.family.kernel_pass for candidate in loads) == {Pass.FWD: 1, Pass.BWD_DELTA: 1}


@runs_kernels
def test_a_backward_with_sinks_runs_the_kernels_without_them(loads: list[Candidate]) -> None:
    q, k, v = make_small(dtype=FLOAT32)  # whose backward is split on every GPU
    gradients(q, k, v)
    before = len(loads)
    gradients(q, k, v, sinks=SINKS[:2])
    assert [candidate.family.kernel_pass for candidate in loads[before:]] == [Pass.FWD]
    assert {candidate.family.kernel_pass for candidate in loads[:before]} == {Pass.FWD, *SPLIT_BACKWARD}


@runs_kernels
def test_gradients_of_sinks_repeat_to_the_bit() -> None:
    q, k, v = make()
    sinks = SINKS.clone().requires_grad_()

    def gradient() -> Tensor:
        out = attention(q, k, v, sinks=sinks)
        (found,) = torch.autograd.grad(out, sinks, gradient_of(out.shape))
        return found

    assert torch.equal(gradient(), gradient())


@runs_kernels
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive_goes_with_sinks(scale: float) -> None:
    q, k, v = make()
    assert_right(q, k, v, sinks=SINKS, softmax_scale=scale)
    sinks = SINKS.clone().requires_grad_()
    out = attention(q, k, v, sinks=sinks, softmax_scale=scale)
    (gradient,) = torch.autograd.grad(out, sinks, gradient_of(out.shape))
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("sinks", [torch.ones(3), torch.ones(2, 4), torch.ones(())])
def test_sinks_that_do_not_fit_are_an_error(sinks: Tensor) -> None:
    with pytest.raises(InvalidProblemError, match=r"sinks has shape .*; it is \(4,\), a number for each query head"):
        attention(*make(device=torch.device("cpu")), sinks=sinks)


@pytest.mark.parametrize("which", ["grad", "vmap"])
def test_transforms_see_sinks(which: str, reference_only: None) -> None:
    q, k, v = make(20, 30, dtype=FLOAT32, device=torch.device("cpu"))
    sinks = SINKS.cpu()

    def loss(sinks: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, sinks=sinks)
        return out.square().sum()

    leaf = sinks.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    if which == "grad":
        torch.testing.assert_close(torch.func.grad(loss)(sinks), expected)
    else:
        mapped = torch.func.vmap(torch.func.grad(loss))(torch.stack([sinks, sinks]))
        torch.testing.assert_close(mapped, expected.expand(2, 4))
