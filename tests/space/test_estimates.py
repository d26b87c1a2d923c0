"""What tiles take: pieces of a head dim, shared memory, registers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.space.estimates import head_dim_pieces, padded_head_dim


@given(st.integers(8, 512), st.sampled_from([32, 64, 128, 256]))
def test_head_dim_pieces_cover_the_head_dim_with_powers_of_two(head_dim: int, widest: int) -> None:
    pieces = head_dim_pieces(head_dim, widest)
    assert all(16 <= width <= widest and width.bit_count() == 1 for width in pieces)
    assert sum(pieces[:-1]) < head_dim <= sum(pieces)


@pytest.mark.parametrize(
    ("head_dim", "widest", "pieces"),
    [
        (8, 256, (16,)),
        (16, 256, (16,)),
        (40, 256, (32, 16)),
        (64, 256, (64,)),
        (96, 256, (64, 32)),
        (128, 256, (128,)),
        (128, 64, (64, 64)),
        (192, 256, (128, 64)),
        (200, 256, (256,)),
        (80, 32, (32, 32, 16)),
        (59, 32, (32, 32)),
        (300, 256, (256, 32, 16)),
        (512, 256, (256, 256)),
        (512, 128, (128, 128, 128, 128)),
    ],
)
def test_head_dim_pieces_are_the_narrowest_cover(head_dim: int, widest: int, pieces: tuple[int, ...]) -> None:
    assert (head_dim_pieces(head_dim, widest), padded_head_dim(head_dim, widest)) == (pieces, sum(pieces))
