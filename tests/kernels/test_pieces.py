"""Tiles that cover a head dim: every column once, and as wide as the constraints count them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.kernels.pieces import HeadDimPiece, column_blocks, pieces
from fa_autotune.space.estimates import head_dim_pieces


@pytest.mark.parametrize("head_dim", [8, 16, 59, 64, 96, 192, 255, 256])
def test_pieces_cover_every_column_once(head_dim: int) -> None:
    covered = [column for piece in pieces(head_dim, 64) for column in range(piece.start, piece.end)]
    assert covered == list(range(head_dim))


def test_pieces_are_as_wide_as_the_constraints_count_them() -> None:
    assert [piece.width for piece in pieces(96, 256)] == list(head_dim_pieces(96, 256)) == [64, 32]


@given(st.integers(8, 512), st.sampled_from([16, 32, 64, 128, 256]), st.sampled_from([16, 32, 64]))
def test_blocks_cover_the_columns_of_all_tiles(head_dim: int, widest: int, most: int) -> None:
    tiles = pieces(head_dim, widest)
    blocks = column_blocks(tiles, most)
    covered = [(block.piece, column) for block in blocks for column in range(block.offset, block.offset + block.width)]
    assert covered == [(number, column) for number, tile in enumerate(tiles) for column in range(tile.width)]
    assert all(block.width <= most and block.of == tiles[block.piece].width for block in blocks)


@pytest.mark.parametrize(("end", "padded"), [(64, False), (63, True)])
def test_a_tile_wider_than_its_columns_is_padded(end: int, padded: bool) -> None:
    assert HeadDimPiece(start=0, end=end, width=64).padded is padded
