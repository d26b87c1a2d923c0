"""The tiles that cover a head dim, or a part of one: tiles are powers of two, head dims need not be."""

from collections.abc import Sequence
from dataclasses import dataclass

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.estimates import WIDEST_PIECE, head_dim_pieces, part_columns, value_parts
from fa_autotune.space.workspace import fused_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDimPiece:
    """Columns start … end−1 of a head dim, covered by a tile of `width` columns."""

    start: int
    end: int
    width: int

    @property
    def padded(self) -> bool:
        """True if the tile is wider than the columns it covers."""
        return self.end - self.start < self.width


def pieces(head_dim: int, widest: int) -> tuple[HeadDimPiece, ...]:
    """The tiles that cover a head dim."""
    covered, start = [], 0
    for width in head_dim_pieces(head_dim, widest):
        covered.append(HeadDimPiece(start=start, end=min(start + width, head_dim), width=width))
        start += width
    return tuple(covered)


def part_pieces(family: AttentionFamily, widest: int) -> tuple[HeadDimPiece, ...]:
    """The tiles that cover a part of head_dim_v; `end` as in the last part, which may end before its tiles do."""
    columns = part_columns(family)
    last = family.head_dim_v - (value_parts(family) - 1) * columns
    return tuple(
        HeadDimPiece(start=piece.start, end=max(piece.start, min(piece.end, last)), width=piece.width)
        for piece in pieces(columns, widest)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnBlock:
    """Columns that a product gives: `width` of them, from column `offset` of piece number `piece`, which has `of`."""

    piece: int
    of: int
    offset: int
    width: int


def column_blocks(tiles: Sequence[HeadDimPiece], widest: int) -> tuple[ColumnBlock, ...]:
    """The blocks, none wider than `widest`, that cover the tiles of a head dim."""
    return tuple(
        ColumnBlock(piece=number, of=tile.width, offset=offset, width=min(tile.width, widest))
        for number, tile in enumerate(tiles)
        for offset in range(0, tile.width, min(tile.width, widest))
    )


def pieces_of(candidate: Candidate) -> tuple[tuple[HeadDimPiece, ...], tuple[HeadDimPiece, ...]]:
    """The tiles that a kernel covers head_dim with, and head_dim_v or a part of it."""
    family, widest = candidate.family, getattr(candidate.config, "HEAD_DIM_PIECE", WIDEST_PIECE)
    if family.kernel_pass is Pass.BWD_FUSED:  # which pads them to columns that its tile says
        tile = fused_tile(family)
        return pieces(tile.columns, widest), pieces(tile.v_columns, widest)
    of_values = pieces(family.head_dim_v, widest) if value_parts(family) == 1 else part_pieces(family, widest)
    return pieces(family.head_dim, widest), of_values
