"""How far shapes are apart for a kernel."""

import pytest
from hypothesis import given

from fa_autotune.problem.distance import shape_distance
from fa_autotune.problem.problem import AttentionProblem
from kit.strategies import served_everywhere


@given(served_everywhere(), served_everywhere())
def test_distance_is_symmetric_and_zero_to_itself(first: AttentionProblem, second: AttentionProblem) -> None:
    assert shape_distance(first, first, 132) == 0.0
    assert shape_distance(first, second, 132) == shape_distance(second, first, 132) >= 0.0


def test_dk_and_dv_are_near_where_their_keys_have_as_many_queries() -> None:
    """Their programs own keys and loop over queries: as the forward does with the two exchanged."""
    few, many = "4x8x8x512x4096x64", "4x8x8x8192x4096x64"
    exchanged_few, exchanged_many = "4x8x8x4096x512x64", "4x8x8x4096x8192x64"
    dkdv = [AttentionProblem.parse(f"{text},bwd_dkdv") for text in (few, many)]
    forward = [AttentionProblem.parse(text) for text in (exchanged_few, exchanged_many)]
    assert shape_distance(*dkdv, 132) == shape_distance(*forward, 132) > 0


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("4x8x8x4096x1024x64", "4x8x8x4096x2048x64", 1.0),  # a loop of twice the keys
        ("4x8x8x4096x4096x64,causal", "4x8x8x4096x4096x64", 1.0),  # of which a mask hides half
        ("64x32x8x1024x16384x64", "64x32x8x1024x65536x64", 0.0),  # where more keys no longer matter
        ("1x132x132x64x512x64", "1x132x132x128x512x64", 1.5),  # rows of a tile, and the GPU filled twice
        ("16x132x132x1024x512x64", "16x132x132x2048x512x64", 0.0),  # a full GPU either way
        ("64x8x8x4096x1024x64", "64x8x2x4096x1024x64", 0.5),  # heads that share K and V
    ],
)
def test_a_doubling_counts_as_much_as_it_changes_the_best_tile(one: str, other: str, distance: float) -> None:
    first, second = map(AttentionProblem.parse, (one, other))
    assert shape_distance(first, second, 132) == pytest.approx(distance, abs=1e-3)
