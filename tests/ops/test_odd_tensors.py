"""Tensors that are not what they seem, and gradients that come in other ways: each was once a wrong result in silence.

One tensor in several places, views of the opposite sign, what hooks and transforms give back, tangents. Kernels run on
the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from kit.attention_calls import (
    DEVICE,
    gradient_of,
    make_small,
    of_torch,
    requiring,
    runs_kernels,
)


@runs_kernels
@pytest.mark.parametrize("attend", ["attention", "sdpa"])
def test_a_call_on_one_tensor_leaves_later_calls_of_its_shape_right(attend: str) -> None:
    """Kernels are bound once for a kind of call, and must not take one argument's place for another's."""
    call = {
        "attention": lambda *x: attention(*x, causal=True, layout="bhsd"),
        "sdpa": lambda *x: scaled_dot_product_attention(*x, is_causal=True),
    }[attend]
    one = torch.randn(1, 2, 24, 16, device=DEVICE, requires_grad=True)
    call(one, one, one).sum().backward()
    given = [torch.randn(1, 2, 24, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    d_out = torch.randn(1, 2, 24, 16, device=DEVICE)
    out = call(*given)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    found, wanted = (torch.autograd.grad(result, given, d_out) for result in (out, expected))
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


@runs_kernels
@pytest.mark.parametrize("part", ["packed", "q"])
def test_packed_gradients_see_the_opposite_sign_of_a_view(part: str) -> None:
    negated = torch.randn(1, 20, 3, 2, 16, dtype=torch.complex64, device=DEVICE).conj().imag
    assert negated.is_neg()
    if part == "packed":
        qkv = negated.requires_grad_()
        assert torch.equal(flash_attn_qkvpacked_func(qkv), attention(*qkv.resolve_neg().unbind(2)))
    else:
        q, kv = negated[:, :, 0], torch.randn(1, 20, 2, 2, 16, device=DEVICE, requires_grad=True)
        assert torch.equal(flash_attn_kvpacked_func(q, kv), attention(q.resolve_neg(), *kv.unbind(2)))


def zeros_of(like: Tensor) -> Tensor:
    """Zeros that have no memory, as torch's own derivatives give them."""
    zeros: Tensor = torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
    return zeros


X = torch.ones(1, 8, 2, 16, device=DEVICE).cumsum(1)
STARTS = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
ONE_OF_THEM: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "q": (lambda x: attention(x, X, X), X),
    "k": (lambda x: scaled_dot_product_attention(X, x, X), X),
    "v": (lambda x: attention_varlen(X[0], X[0], x, STARTS, STARTS), X[0]),
    "cu_seqlens": (lambda x: attention_varlen(X[0], X[0], X[0], x, x), STARTS),
    "sinks": (lambda x: attention(X, X, X, sinks=x), X[0, 0, :, 0]),
    "alibi_slopes": (lambda x: attention(X, X, X, alibi_slopes=x), X[0, 0, :, 0]),
    "attn_mask": (lambda x: attention(X, X, X, attn_mask=x), X[0, 0, :, :8].repeat(4, 1)),
    "a bool attn_mask": (lambda x: attention(X, X, X, attn_mask=x), torch.ones(8, 8, dtype=torch.bool, device=DEVICE)),
    "qkv": (flash_attn_qkvpacked_func, torch.stack([X, X, X], 2).requires_grad_()),
    "kv": (lambda x: flash_attn_kvpacked_func(X, x), torch.stack([X, X], 2)),
}


@runs_kernels
@pytest.mark.parametrize("name", ONE_OF_THEM)
def test_zeros_that_have_no_memory_count_as_zeros(name: str) -> None:
    call, like = ONE_OF_THEM[name]
    found = call(zeros_of(like).requires_grad_(like.requires_grad))
    assert torch.equal(found, call(torch.zeros_like(like)))


@runs_kernels
@pytest.mark.parametrize(
    "call",
    [
        lambda x: attention(x, x, x),
        lambda x: attention_varlen(x[0], x[0], x[0], STARTS, STARTS),
        lambda x: flash_attn_qkvpacked_func(torch.stack([x, x, x], 2)),
    ],
    ids=["attention", "varlen", "stacked"],
)
def test_a_gradient_that_has_no_memory_counts_as_zeros(call: Callable[[Tensor], Tensor]) -> None:
    x = X.clone().requires_grad_()
    out = call(x)
    (gradient,) = torch.autograd.grad(out, x, zeros_of(out))
    assert torch.equal(gradient, torch.zeros_like(x))


@runs_kernels
@of_torch
def test_a_jacobian_at_batch_size_1_is_that_of_pytorch() -> None:
    q, k, v = (torch.randn(1, 2, 3, 8, device=DEVICE) for _ in range(3))
    ours = torch.func.jacrev(lambda x: attention(x, k, v, layout="bhsd"))(q)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = torch.func.jacrev(lambda x: torch.nn.functional.scaled_dot_product_attention(x, k, v))(q)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@runs_kernels
@pytest.mark.parametrize("batch_size", [1, 2])
def test_many_gradients_at_once_are_those_one_by_one(batch_size: int) -> None:
    inputs = requiring(*make_small(10, 12, batch=batch_size))
    out = attention(*inputs)
    d_outs = torch.stack([gradient_of(out.shape), 2 * gradient_of(out.shape)])
    together_ = torch.autograd.grad(out, inputs, d_outs, is_grads_batched=True, retain_graph=True)
    for number, d_out in enumerate(d_outs):
        one = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
        for many, single in zip(together_, one, strict=True):
            torch.testing.assert_close(many[number], single)


@runs_kernels
def test_saved_statistics_may_come_back_with_other_strides() -> None:
    inputs = requiring(*make_small())
    plain = torch.autograd.grad(attention(*inputs), inputs, gradient_of(inputs[0].shape))
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.mT.contiguous(), lambda kept: kept.mT):
        out = attention(*inputs)
    for found, expected in zip(torch.autograd.grad(out, inputs, gradient_of(out.shape)), plain, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)  # kernels for other strides round otherwise


@runs_kernels
@pytest.mark.parametrize("changed", [lambda kept: kept[:1], lambda kept: kept.double()], ids=["shape", "dtype"])
def test_saved_tensors_that_come_back_as_others_are_refused(changed: Callable[[Tensor], Tensor]) -> None:
    inputs = requiring(*make_small(batch=2))
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, changed):
        out = attention(*inputs)
    with pytest.raises(InvalidProblemError, match="must give back what it was given"):
        out.sum().backward()


@runs_kernels
@of_torch
def test_a_tangent_is_refused_where_a_mode_looks_on() -> None:
    q, k, v = make_small()
    with (
        forward_ad.dual_level(),
        FlopCounterMode(display=False),
        pytest.raises(UnsupportedError, match="no forward-mode derivative"),
    ):
        attention(forward_ad.make_dual(q, q), k, v)


@runs_kernels
def test_tensors_that_outlived_a_transform_are_served() -> None:
    kept: list[Tensor] = []
    q, k, v = make_small()

    def keep(x: Tensor) -> Tensor:
        kept.append(x * 1)
        return x.sum()

    torch.func.grad(keep)(q)
    assert torch.equal(attention(kept[0], k, v), attention(q, k, v))


def test_a_scale_that_wants_a_gradient_is_refused() -> None:
    scale = torch.nn.Parameter(torch.tensor(0.3))
    with pytest.raises(InvalidProblemError, match=r"multiply q by it and pass softmax_scale=1\.0"):
        attention(*make_small(), softmax_scale=scale)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_number_that_could_want_a_gradient_is_served_where_nothing_is_recorded(name: str) -> None:
    number = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(InvalidProblemError, match=f"{name} requires a gradient"):
        attention(*make_small(), backend="reference", **{name: number})
    with torch.no_grad():
        found = attention(*make_small(), backend="reference", **{name: number})
    assert torch.equal(found, attention(*make_small(), backend="reference", **{name: 0.5}))
