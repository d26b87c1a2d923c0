"""What PyTorch documents of `scaled_dot_product_attention`, sentence by sentence, of the drop-in."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import InvalidProblemError, scaled_dot_product_attention
from kit.attention_calls import DEVICE, runs_kernels


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def softmax_of(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """By the definition."""
    scores = query @ key.transpose(-2, -1) * scale
    return torch.softmax(scores if bias is None else scores + bias, dim=-1) @ value


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
