"""The drop-in functions beside what they replace: signatures, meaning, what is refused."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops import call_kernels
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    causal_or_not,
    gradient_of,
    make,
    requiring,
    runs_kernels,
)

CPU = torch.device("cpu")
FLASH_ATTN_2_8 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)


def results_and_gradients(function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """All results of a function, and the gradients of its inputs for fixed gradients of all results."""
    inputs = requiring(*tensors)
    found = function(*inputs)
    outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if out is not None]
    given = [gradient_of(out.shape, out.dtype) for out in outputs]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, given)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# --- flash-attn -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "tensors"),
    [(flash_attn_func, "q, k, v"), (flash_attn_kvpacked_func, "q, kv"), (flash_attn_qkvpacked_func, "qkv")],
)
def test_the_parameters_are_those_of_flash_attn_2_8(function: Callable[..., Any], tensors: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(plain)) == f"({tensors}, {FLASH_ATTN_2_8})"


@runs_kernels
@causal_or_not
def test_flash_attn_func_is_attention(causal: bool) -> None:
    tensors = make(20, 30, batch=1)
    expected = results_and_gradients(lambda *x: attention(*x, causal=causal, softmax_scale=0.3), *tensors)
    found = results_and_gradients(lambda *x: flash_attn_func(*x, 0.0, 0.3, causal), *tensors)
    assert all(map(torch.equal, found, expected))


@runs_kernels
def test_asking_for_probabilities_gives_out_lse_and_none() -> None:
    q, k, v = make(20, 30)
    out, lse, probabilities = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert probabilities is None


@runs_kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_selects_nothing_else(deterministic: bool) -> None:
    q, k, v = make(20, 30, batch=1)
    assert torch.equal(flash_attn_func(q, k, v, deterministic=deterministic), attention(q, k, v))


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("with_lse", [False, True])
def test_packed_qkv_is_its_parts(with_lse: bool, causal: bool) -> None:
    qkv = torch.stack(make(30, 30, batch=1, heads=2), dim=2)
    options = {"causal": causal, "return_attn_probs": with_lse}
    found = results_and_gradients(lambda x: flash_attn_qkvpacked_func(x, **options), qkv)
    expected = results_and_gradients(lambda x: flash_attn_func(*x.unbind(2), **options), qkv)
    assert all(map(torch.equal, found, expected))


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("which", ["q", "kv", "q and kv"])
def test_packed_kv_is_its_parts(which: str, causal: bool) -> None:
    q, k, v = make(20, 30, batch=1)
    tensors = {"q": q, "kv": torch.stack([k, v], dim=2)}
    found: list[list[Tensor]] = []
    for function in (flash_attn_kvpacked_func, lambda q, kv, causal: flash_attn_func(q, *kv.unbind(2), causal=causal)):
        inputs = {name: t.clone().requires_grad_(name in which.split(" and ")) for name, t in tensors.items()}
        out = function(**inputs, causal=causal)
        out.backward(gradient_of(out.shape))
        found.append([out.detach(), *(t.grad for t in inputs.values() if t.grad is not None)])
    assert len(found[0]) == 1 + len(which.split(" and "))
    assert all(map(torch.equal, *found))


@runs_kernels
def test_the_gradient_of_a_packed_tensor_is_written_in_one_piece(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = torch.stack(make(30, 30, batch=1, heads=2), dim=2).requires_grad_()
    monkeypatch.setattr(torch, "stack", None)  # not to be called
    flash_attn_qkvpacked_func(qkv).sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.is_contiguous()


@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
def test_packed_gradients_of_the_reference(scale: float | None, reference_only: None) -> None:
    qkv = torch.stack(make(30, 30, heads=2, device=CPU), dim=2)
    found = results_and_gradients(lambda x: flash_attn_qkvpacked_func(x, softmax_scale=scale, causal=True), qkv)
    expected = results_and_gradients(lambda x: flash_attn_func(*x.unbind(2), softmax_scale=scale, causal=True), qkv)
    assert all(map(torch.equal, found, expected))


def test_a_second_derivative_of_a_packed_tensor_is_refused(reference_only: None) -> None:
    qkv = torch.stack(make(30, 30, heads=2, device=CPU), dim=2).requires_grad_()
    (gradient,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv).square().sum(), qkv, create_graph=True)
    assert gradient.shape == qkv.shape
    with pytest.raises(UnsupportedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("shape", [(2, 30, 2, 4, 16), (2, 30, 4, 3, 16), (2, 30, 3, 16)])
def test_a_tensor_that_is_not_packed_as_it_should_be_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InvalidProblemError, match=r"qkv has shape .* it is \(batch, seqlen, 3, heads, head_dim\): stack"
    ):
        flash_attn_qkvpacked_func(torch.ones(shape))


def test_a_list_of_parts_is_an_error() -> None:
    with pytest.raises(InvalidProblemError, match=r"kv is a list; it is \(batch, seqlen, 2, heads, head_dim\)"):
        flash_attn_kvpacked_func(torch.ones(2, 30, 4, 16), [torch.ones(2, 30, 4, 16)] * 2)  # type: ignore[arg-type]


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


def test_the_parameters_are_those_of_sdpa() -> None:
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    rest = "attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert str(inspect.Signature(plain)) == f"(query, key, value, {rest})"


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "square": ((2, 3, 20, 16), (2, 3, 20, 16), (2, 3, 20, 16)),
    "more keys": ((2, 3, 5, 16), (2, 3, 20, 16), (2, 3, 20, 24)),
    "more queries": ((2, 3, 20, 16), (2, 3, 5, 16), (2, 3, 5, 16)),
    "3 dimensions": ((3, 5, 16), (3, 7, 16), (3, 7, 16)),
    "2 dimensions": ((5, 16), (7, 16), (7, 16)),
    "5 dimensions": ((2, 2, 3, 5, 16), (2, 2, 3, 7, 16), (2, 2, 3, 7, 16)),
    "one batch of keys": ((2, 3, 5, 16), (1, 3, 7, 16), (1, 3, 7, 16)),
    "one head of keys": ((2, 3, 5, 16), (2, 1, 7, 16), (2, 1, 7, 16)),
    "one head of keys, many of values": ((2, 3, 5, 16), (2, 1, 7, 16), (2, 3, 7, 16)),
    "one head of queries": ((2, 1, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
    "fewer dimensions of queries": ((3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
    "no queries": ((2, 3, 0, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
    "no batch": ((0, 3, 5, 16), (0, 3, 7, 16), (0, 3, 7, 16)),
}


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("case", SHAPES)
def test_sdpa_has_the_results_and_gradients_of_pytorch(case: str, causal: bool) -> None:
    tensors = [randn(*shape) for shape in SHAPES[case]]
    expected = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), *tensors)
    assert_close(
        results_and_gradients(lambda *x: scaled_dot_product_attention(*x, is_causal=causal), *tensors), expected
    )


@runs_kernels
@pytest.mark.parametrize("shape", [(1, 4, 5, 16), (4, 5, 16), (2, 1, 4, 5, 16)])
def test_sdpa_shares_kv_heads_where_it_is_told_to(shape: tuple[int, ...]) -> None:
    query, key, value = randn(*shape), *(randn(*shape[:-3], 2, 7, 16) for _ in range(2))
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    expected = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), query, key, value)
    found = results_and_gradients(lambda *x: scaled_dot_product_attention(*x, **options), query, key, value)
    assert_close(found, expected)


@runs_kernels
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1])
def test_sdpa_takes_any_scale(scale: float) -> None:
    tensors = [randn(1, 2, 9, 16) for _ in range(3)]
    expected = results_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, scale=scale), *tensors)
    assert_close(results_and_gradients(lambda *x: scaled_dot_product_attention(*x, scale=scale), *tensors), expected)


@runs_kernels
def test_sdpa_of_a_rectangle_is_top_left_where_attention_is_bottom_right() -> None:
    q, k, v = make(5, 9, batch=1, dtype=FLOAT32)
    top_left = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    seen = attention(q, k[:, :5], v[:, :5], causal=True)
    torch.testing.assert_close(top_left.transpose(1, 2), seen, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(top_left.transpose(1, 2), attention(q, k, v, causal=True), atol=1e-2)


@runs_kernels
def test_the_output_of_sdpa_lies_in_memory_as_the_query_does() -> None:
    heads_first = [randn(1, 2, 9, 16) for _ in range(3)]
    rows_first = [randn(1, 9, 2, 16).transpose(1, 2) for _ in range(3)]
    assert scaled_dot_product_attention(*heads_first).is_contiguous()
    out = scaled_dot_product_attention(*requiring(*rows_first))
    assert out.transpose(1, 2).is_contiguous()
    copies = results_and_gradients(scaled_dot_product_attention, *(tensor.contiguous() for tensor in rows_first))
    assert_close(results_and_gradients(scaled_dot_product_attention, *rows_first), copies)


@runs_kernels
def test_one_kv_head_for_all_is_not_repeated(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    kernel_for = call_kernels.kernel_for
    monkeypatch.setattr(
        call_kernels, "kernel_for", lambda problem, index: asked.append(problem) or kernel_for(problem, index)
    )
    scaled_dot_product_attention(randn(1, 4, 5, 16), randn(1, 1, 7, 16), randn(1, 1, 7, 16))
    assert [problem.shape.num_kv_heads for problem in asked] == [1]


@runs_kernels
def test_sdpa_under_autocast_casts_as_pytorch_does() -> None:
    tensors = [randn(1, 2, 9, 16) for _ in range(3)]
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        assert (
            scaled_dot_product_attention(*tensors).dtype == F.scaled_dot_product_attention(*tensors).dtype == BFLOAT16
        )


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (
            ((1, 4, 5, 16), (1, 2, 7, 16)),
            {},
            r"head dimensions \(4,\), \(2,\), \(2,\), which do not broadcast; enable_gqa",
        ),
        (((3, 4, 5, 16), (2, 4, 7, 16)), {}, r"batch dimensions \(3,\), \(2,\), \(2,\), which do not broadcast"),
        (((1, 3, 5, 16), (1, 2, 7, 16)), {"enable_gqa": True}, "3 heads, which is no multiple of the 2 kv heads"),
        (((5, 16), (7, 16)), {"enable_gqa": True}, r"2, 2 and 2 dimensions; each takes at least 3"),
        (((16,), (7, 16)), {}, "1, 2 and 2 dimensions; each takes at least 2"),
        (((1, 2, 5, 16), (1, 2, 7, 32)), {}, "head_dim 16 and k 32; they must be equal"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(shapes: Any, options: dict[str, Any], message: str) -> None:
    query, key = (torch.ones(shape) for shape in shapes)
    with pytest.raises(InvalidProblemError, match=message):
        scaled_dot_product_attention(query, key, key, **options)
