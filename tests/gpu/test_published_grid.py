"""flash-attention's published test grid, forward and backward, on a GPU: every dtype and head dim with a sample of the
features (`published_grid.sample`), at every pair of lengths. `-m "gpu and slow"` walks all 23,040 points.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.errors import InvalidProblemError
from kit.attention_calls import BFLOAT16, assert_gradients_right, assert_right
from kit.published_grid import (
    CAUSAL_PAIRS,
    COMBINATIONS,
    DTYPES,
    HEAD_DIMS,
    KV_HEADS,
    LATER_PAIRS,
    PAIRS,
    Combination,
    check,
    sample,
)

pytestmark = pytest.mark.gpu

Case = tuple[tuple[int, int], str, bool]  # lengths, heads, deterministic


def named(dtype: torch.dtype, head_dim: int, combination: Combination) -> str:
    return f"{str(dtype).removeprefix('torch.')}-d{head_dim}-{combination.label}"


SAMPLE = [pytest.param(*one, id=named(*one)) for one in sample()]
WHOLE = [pytest.param(*one, id=named(*one)) for one in product(DTYPES, HEAD_DIMS, COMBINATIONS)]


def wrong(dtype: torch.dtype, head_dim: int, combination: Combination, cases: Iterable[Case]) -> dict[Case, str]:
    """The cases that break the rule, and how; all of them run, with one set of kernels."""
    found: dict[Case, str] = {}
    for lengths, heads, deterministic in cases:
        try:
            check(dtype, head_dim, combination, lengths, kv_heads=KV_HEADS[heads], deterministic=deterministic)
        except AssertionError as error:
            found[lengths, heads, deterministic] = str(error).splitlines()[0]
    return found


def rotated(pairs: Iterable[tuple[int, int]]) -> list[Case]:
    """Each pair once: with kinds of heads and determinism in turn, so that each kind meets both."""
    return [(pair, ("mha", "mqa", "gqa")[n % 3], n % 2 == 0) for n, pair in enumerate(pairs)]


@pytest.mark.parametrize(("dtype", "head_dim", "combination"), SAMPLE)
def test_a_sample_of_the_grid(dtype: torch.dtype, head_dim: int, combination: Combination) -> None:
    """48 of 384 kernels' families, each at the 10 pairs of lengths."""
    assert wrong(dtype, head_dim, combination, rotated(PAIRS)) == {}


@pytest.mark.parametrize(("dtype", "head_dim", "combination"), [one for one in SAMPLE if one.values[2].causal])
def test_a_sample_of_the_grid_of_causal_lengths(dtype: torch.dtype, head_dim: int, combination: Combination) -> None:
    """24 families, each at the 20 pairs of the causal test."""
    assert wrong(dtype, head_dim, combination, rotated(CAUSAL_PAIRS)) == {}


@pytest.mark.parametrize(("dtype", "head_dim", "combination"), SAMPLE[::4])
def test_a_sample_of_later_versions_lengths(dtype: torch.dtype, head_dim: int, combination: Combination) -> None:
    assert wrong(dtype, head_dim, combination, rotated(LATER_PAIRS)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim", "combination"), WHOLE)
def test_the_whole_grid(dtype: torch.dtype, head_dim: int, combination: Combination) -> None:
    """384 families, each at 60 points: 23,040."""
    assert wrong(dtype, head_dim, combination, product(PAIRS, KV_HEADS, (False, True))) == {}


@pytest.mark.parametrize("head_dim", [8, 16, 32])
def test_small_head_dims_of_later_versions(head_dim: int) -> None:
    for combination in (COMBINATIONS[0], COMBINATIONS[1]):
        cases = rotated([(113, 203), (1, 1), (64, 128), (1024, 1023)])
        assert wrong(BFLOAT16, head_dim, combination, cases) == {}


@pytest.mark.parametrize("head_dim", [4, 520])
def test_head_dims_out_of_range_are_refused_as_later_versions_do(head_dim: int) -> None:
    q = torch.zeros(1, 8, 1, head_dim, device="cuda", dtype=BFLOAT16)
    with pytest.raises(InvalidProblemError, match="kernels serve 8 to 512"):
        attention(q, q, q)


@pytest.mark.parametrize("lengths", [(1, 5), (2, 2), (5, 128), (17, 17), (128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_do_not_overflow_a_backward(
    causal: bool, dtype: torch.dtype, lengths: tuple[int, int]
) -> None:
    """Its test of overflow: q · 5 and k · 3, and a window of gradients five times as wide."""
    seqlen_q, seqlen_k = lengths
    generator = torch.Generator(device="cuda").manual_seed(seqlen_q)

    def randn(seqlen: int, scale: float) -> Tensor:
        return (scale * torch.randn(2, seqlen, 5, 128, generator=generator, device="cuda")).to(dtype)

    tensors: Any = randn(seqlen_q, 5.0), randn(seqlen_k, 3.0), randn(seqlen_k, 3.0)
    with torch.no_grad():
        assert_right(*tensors, causal=causal)
    assert_gradients_right(*tensors, causal=causal, factor=5.0)
