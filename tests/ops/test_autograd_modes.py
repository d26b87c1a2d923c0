"""Gradients of `attention` in autograd's other modes: checkpoints, autocast, forward mode, torch.func, vmap."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fa_autotune import (
    attention,
)
from fa_autotune.errors import UnsupportedError
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    gradient_of,
    gradients,
    make_small,
    of_torch,
    requiring,
    runs_kernels,
)


@runs_kernels
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    q, k, v = make_small()
    inputs = requiring(q, k, v)
    out = checkpoint(lambda *x: attention(*x, causal=True), *inputs, use_reentrant=use_reentrant)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape)) if not use_reentrant else None
    if found is None:
        out.backward(gradient_of(out.shape))
        found = tuple(tensor.grad for tensor in inputs)
    assert all(map(torch.equal, found, gradients(q, k, v, causal=True)))


@runs_kernels
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_gradients_under_autocast_come_in_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = make_small(dtype=dtype)
    inputs = requiring(q, k, v)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        out = attention(*inputs, causal=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    cast = gradients(*(tensor.bfloat16() for tensor in (q, k, v)), causal=True)
    assert all(torch.equal(gradient, expected.to(dtype)) for gradient, expected in zip(found, cast, strict=True))


@runs_kernels
def test_a_second_derivative_is_refused_not_wrong() -> None:
    inputs = requiring(*make_small())
    first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    plain = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, first, plain))
    with pytest.raises(UnsupportedError, match=r"no second derivative.*SDPBackend\.MATH"):
        first[0].sum().backward()


@runs_kernels
@of_torch
def test_forward_mode_is_refused_not_lost() -> None:
    q, k, v = make_small()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"no forward-mode derivative.* reverse mode"):
        attention(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"no forward-mode derivative.* reverse mode"):
        attention(forward_ad.make_dual(q, q), k.requires_grad_(), v)


@runs_kernels
@of_torch
def test_a_level_of_forward_mode_without_tangents_is_served() -> None:
    q, k, v = make_small()
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), attention(q, k, v))


@of_torch
def test_jvp_of_torch_func_is_refused_not_lost(reference_only: None) -> None:
    tensors = make_small(device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        torch.func.jvp(attention, tensors, tensors)


def test_grad_of_torch_func_is_the_gradient(reference_only: None) -> None:
    tensors = make_small(dtype=FLOAT32, device=torch.device("cpu"))
    found = torch.func.grad(lambda *x: attention(*x, causal=True).square().sum(), argnums=(0, 1, 2))(*tensors)
    inputs = requiring(*tensors)
    expected = torch.autograd.grad(attention(*inputs, causal=True).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, 0)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], reference_only: None) -> None:
    tensors = [
        tensor if dim is None else torch.stack([tensor, tensor * 2, -tensor], dim)
        for tensor, dim in zip(make_small(dtype=FLOAT32, device=torch.device("cpu")), in_dims, strict=True)
    ]

    def values(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *y: attention(*y, causal=True).square().sum(), argnums=(0, 1, 2))(*x)

    for function in (lambda *x: (attention(*x, causal=True),), values):
        mapped = torch.vmap(function, in_dims=in_dims)(*tensors)
        for number in range(3):
            one = function(
                *(t if dim is None else t.select(dim, number) for t, dim in zip(tensors, in_dims, strict=True))
            )
            for whole, part in zip(mapped, one, strict=True):
                torch.testing.assert_close(whole[number], part, atol=1e-5, rtol=1e-5)


def test_a_second_derivative_of_torch_func_is_refused(reference_only: None) -> None:
    q, k, v = make_small(device=torch.device("cpu"))

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: attention(y, k, v).square().sum())(x).sum()

    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.func.grad(slope)(q)
