"""`scaled_dot_product_attention` beside PyTorch's: what it documents, sentence by sentence, and what is refused."""

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import InvalidProblemError, attention, scaled_dot_product_attention
from fa_autotune.ops import call_kernels
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT32,
    causal_or_not,
    make,
    requiring,
    results_and_gradients,
    runs_kernels,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def assert_close(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def softmax_of(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """By the definition."""
    scores = query @ key.transpose(-2, -1) * scale
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ value


# --- what PyTorch documents -------------------------------------------------------------------------------------------


@runs_kernels
def test_the_default_scale_is_one_by_the_root_of_the_querys_last_dimension_whatever_the_values_is() -> None:
    query, key, value = randn(2, 3, 9, 16), randn(2, 3, 11, 16), randn(2, 3, 11, 40)
    out = scaled_dot_product_attention(query, key, value)
    assert out.shape == (2, 3, 9, 40)
    assert_close(out, softmax_of(query, key, value, 1 / math.sqrt(16)))


@runs_kernels
def test_a_scale_takes_the_place_of_the_default() -> None:
    query, key, value = (randn(2, 3, 9, 16) for _ in range(3))
    assert_close(scaled_dot_product_attention(query, key, value, scale=0.7), softmax_of(query, key, value, 0.7))


@runs_kernels
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (5, 12), (12, 5), (1, 7), (7, 1)])
def test_is_causal_is_the_lower_triangle_from_the_upper_left_corner(rows: int, keys: int) -> None:
    query, key, value = randn(1, 2, rows, 16), randn(1, 2, keys, 16), randn(1, 2, keys, 16)
    hidden = ~torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril(diagonal=0)
    bias = torch.zeros(rows, keys, device=DEVICE).masked_fill(hidden, float("-inf"))
    assert_close(
        scaled_dot_product_attention(query, key, value, is_causal=True), softmax_of(query, key, value, 0.25, bias)
    )


@runs_kernels
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_enable_gqa_repeats_each_head_of_keys_for_the_query_heads_that_follow_one_another(rank: int) -> None:
    lead = (2, 3)[: rank - 3]
    query, key, value = randn(*lead, 6, 9, 16), randn(*lead, 2, 11, 16), randn(*lead, 2, 11, 16)
    repeated = [tensor.repeat_interleave(3, dim=-3) for tensor in (key, value)]
    assert_close(scaled_dot_product_attention(query, key, value, enable_gqa=True), softmax_of(query, *repeated, 0.25))


def test_enable_gqa_needs_a_multiple_of_the_heads_of_keys() -> None:
    with pytest.raises(InvalidProblemError, match="5 heads, which is no multiple of the 2 kv heads"):
        scaled_dot_product_attention(randn(1, 5, 3, 16), randn(1, 2, 3, 16), randn(1, 2, 3, 16), enable_gqa=True)


@runs_kernels
def test_any_number_of_batch_dimensions_broadcasts() -> None:
    query, key, value = randn(2, 1, 3, 9, 16), randn(4, 1, 11, 16), randn(1, 4, 3, 11, 24)
    out = scaled_dot_product_attention(query, key, value)
    assert out.shape == (2, 4, 3, 9, 24)
    assert_close(out, softmax_of(query, key, value, 0.25))


@runs_kernels
@pytest.mark.parametrize(("heads", "rows"), [(0, 5), (3, 0)], ids=["no heads", "no rows"])
def test_what_is_empty_gives_what_is_empty(heads: int, rows: int) -> None:
    query, key = randn(2, heads, rows, 16), randn(2, heads, 7, 16)
    out = scaled_dot_product_attention(query, key, key)
    assert out.shape == F.scaled_dot_product_attention(query, key, key).shape == (2, heads, rows, 16)


@runs_kernels
def test_without_keys_the_result_is_zero_as_in_pytorch() -> None:
    query, nothing = randn(2, 3, 5, 16), randn(2, 3, 0, 16)
    out = scaled_dot_product_attention(query, nothing, nothing)
    assert torch.equal(out, F.scaled_dot_product_attention(query, nothing, nothing))
    assert torch.equal(out, torch.zeros_like(query))


@runs_kernels
def test_the_inputs_are_left_as_they_were() -> None:
    tensors = [randn(1, 2, 9, 16) for _ in range(3)]
    copies = [tensor.clone() for tensor in tensors]
    scaled_dot_product_attention(*tensors, is_causal=True)
    assert all(map(torch.equal, tensors, copies))


# --- beside PyTorch's own ---------------------------------------------------------------------------------------------


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
