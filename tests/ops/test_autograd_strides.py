"""Gradients of `attention` where inputs, results and their gradients have any strides.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa_autotune import (
    attention,
)
from kit.attention_calls import (
    FLOAT32,
    assert_gradients_right,
    gradient_of,
    gradients,
    make_small,
    requiring,
    runs_kernels,
)
from kit.views import VIEWS, one_element_late


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_tensor_gives_the_gradients_of_its_copy(view: Callable[[Tensor], Tensor], which: str) -> None:
    q, k, v = make_small(kv_heads=2)
    q, k, v = (view(tensor) if name in which else tensor for name, tensor in zip("qkv", (q, k, v), strict=True))
    assert_gradients_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize("view", [*VIEWS, lambda tensor: tensor[:, ::2].repeat_interleave(2, 1)[:, :37]])
def test_a_strided_gradient_of_out_gives_the_gradients_of_its_copy(view: Callable[[Tensor], Tensor]) -> None:
    q, k, v = make_small()
    assert_gradients_right(q, k, v, causal=True, d_out=view(gradient_of(q.shape)))


@runs_kernels
def test_the_gradient_of_a_sum_has_stride_zero() -> None:
    inputs = requiring(*make_small())
    attention(*inputs, causal=True).sum().backward()
    expected = gradients(*inputs, torch.ones_like(inputs[0]), causal=True)
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, expected, strict=True))


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_an_expanded_gradient_of_out_is_read_with_stride_zero(dim: int) -> None:
    q, k, v = make_small(batch=2)
    d_out = gradient_of(q.shape)
    assert_gradients_right(q, k, v, causal=True, d_out=d_out.narrow(dim, 0, 1).expand(d_out.shape))


@runs_kernels
def test_gradients_through_views_of_out() -> None:
    q, k, v = make_small(38, 38)
    for view in (lambda out: out[:, ::2], lambda out: out.transpose(1, 2), lambda out: out[..., 1:], torch.diagonal):
        inputs, copies = requiring(q, k, v), requiring(q, k, v)
        view(attention(*inputs, causal=True)).square().sum().backward()
        view(attention(*copies, causal=True) * 1).square().sum().backward()
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(inputs, copies, strict=True))


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_expanded_keys_and_values_collect_the_gradients_of_their_copies(dim: int) -> None:
    q, k, v = make_small(batch=2, kv_heads=2, dtype=FLOAT32)
    whole = gradients(q, *(tensor.narrow(dim, 0, 1).expand(tensor.shape).contiguous() for tensor in (k, v)))
    inputs = requiring(q, *(tensor.narrow(dim, 0, 1) for tensor in (k, v)))
    out = attention(inputs[0], *(tensor.expand(k.shape) for tensor in inputs[1:]))
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape, FLOAT32))
    torch.testing.assert_close(found[0], whole[0], atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(found[1:], whole[1:], strict=True):
        torch.testing.assert_close(gradient, expected.sum(dim, keepdim=True), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_real_strides_after_expanded_ones_of_the_same_shape() -> None:
    q, k, v = make_small(batch=2)
    gradients(q, k[:1].expand(k.shape), v[:1].expand(v.shape))
    assert_gradients_right(q, k, v)


@runs_kernels
def test_unaligned_tensors_after_aligned_ones_of_the_same_shape() -> None:
    q, k, v = make_small()
    d_out = gradient_of(q.shape)
    aligned = gradients(q, k, v, d_out)
    assert_gradients_right(q, k, v, d_out=one_element_late(d_out))
    assert_gradients_right(*map(one_element_late, (q, k, v)), d_out=one_element_late(d_out))
    assert all(map(torch.equal, gradients(q, k, v, d_out), aligned))


@runs_kernels
def test_q_k_and_v_may_be_one_tensor() -> None:
    q, _, _ = make_small(dtype=FLOAT32)
    (x,) = requiring(q)
    out = attention(x, x, x, causal=True)
    d_out = gradient_of(out.shape, FLOAT32)
    (found,) = torch.autograd.grad(out, x, d_out)
    torch.testing.assert_close(found, sum(gradients(q, q, q, d_out, causal=True)), atol=1e-6, rtol=1e-6)


@runs_kernels
def test_the_callers_tensors_are_never_written() -> None:
    tensors = make_small()
    d_out = gradient_of(tensors[0].shape)
    before = [tensor.clone() for tensor in (*tensors, d_out)]
    for softmax_scale in (None, -0.5, 0.0):
        gradients(*tensors, d_out, causal=True, softmax_scale=softmax_scale)
    assert all(map(torch.equal, (*tensors, d_out), before))
