"""The memory that the three kernels of the fused backward hand to each other.

It is fixed by the head dims and the shape, so that each of them is tuned apart: the statistics and turns that the
preprocessing gives, and dq as the fused kernel adds it up, in fp32 and in the order of its registers.
"""

from dataclasses import dataclass
from functools import lru_cache

from fa_autotune.problem.family import MAX_REMEMBERED_FAMILIES, AttentionFamily
from fa_autotune.problem.problem import AttentionShape

STATISTIC_ROWS = 128  # lse and delta of a head are padded to whole blocks of so many rows, whatever a tile has
ROWS_PER_TURN = 64  # one counter for each so many query rows: a tile uses that of its first rows
DQ_LANES = 256  # fp32 values in a row of dq_acc
PART_ROWS = PART_COLUMNS = 64  # of a tile's dq, as one warpgroup holds it and one copy writes it
NARROW_HEAD_DIM = 64
WIDEST_SHARED = 128  # head dims up to which two warpgroups share out dk and dv; wider ones have a warpgroup each


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTile:
    """Rows of queries and of keys in a step of the fused backward, the columns that head_dim and head_dim_v are padded
    to, and how many of its tiles of queries, of do and of dS are in shared memory (do: unless a knob says it)."""

    block_m: int
    block_n: int
    columns: int
    v_columns: int
    q_stages: int = 3  # query rows are held to the end of the step after their own
    do_stages: int = 2
    ds_stages: int = 2

    @property
    def parts(self) -> int:
        """How many parts the dq of a tile has."""
        return self.block_m * self.columns // (PART_ROWS * PART_COLUMNS)

    @property
    def register_axes(self) -> tuple[int, ...]:
        """Of a tile in dq_acc: part, group of 8 columns, group of 16 rows, row of 8, pair of columns, half of the 16
        rows, column of the pair."""
        return (self.parts, 8, 4, 8, 4, 2, 2)

    @property
    def register_order(self) -> tuple[int, ...]:
        """The axes of a tile by rows, then columns: parts are made of the rows of a tile, or of its columns."""
        return (0, 2, 5, 3, 1, 4, 6) if self.block_m > PART_ROWS else (2, 5, 3, 0, 1, 4, 6)


def is_wide(family: AttentionFamily) -> bool:
    """Whether dk and dv each take the registers of a warpgroup."""
    return max(family.head_dim, family.head_dim_v) > WIDEST_SHARED


@lru_cache(maxsize=MAX_REMEMBERED_FAMILIES)
def fused_tile(family: AttentionFamily) -> FusedTile:
    """The tile of a family. Up to WIDEST_SHARED both head dims are padded to the same columns, above it each to whole
    parts."""
    if is_wide(family):
        columns, v_columns = (-(-dim // PART_COLUMNS) * PART_COLUMNS for dim in (family.head_dim, family.head_dim_v))
        return FusedTile(block_m=64, block_n=64, columns=columns, v_columns=v_columns, q_stages=2, do_stages=1)
    if max(family.head_dim, family.head_dim_v) <= NARROW_HEAD_DIM:
        return FusedTile(block_m=128, block_n=128, columns=64, v_columns=64)
    return FusedTile(block_m=64, block_n=128, columns=128, v_columns=128)


def row_blocks(total_q: int, num_sequences: int, block: int) -> int:
    """Blocks of rows that a head of packed sequences has, whatever their lengths: sequence b, whose first row is
    `first`, owns those from first // block + b on, as many as its rows take. What lies behind the last is one more."""
    return total_q // block + num_sequences + 1


def packed_statistics_size(num_q_heads: int, num_sequences: int, total_q: int) -> tuple[int, int, int]:
    """`statistics_size` of packed sequences: each sequence's rows are padded to whole blocks."""
    return 2, num_q_heads, row_blocks(total_q, num_sequences, STATISTIC_ROWS) * STATISTIC_ROWS


def packed_turns_size(num_q_heads: int, num_sequences: int, total_q: int) -> tuple[int, int]:
    """`turns_size` of packed sequences."""
    _, heads, rows = packed_statistics_size(num_q_heads, num_sequences, total_q)
    return heads, rows // ROWS_PER_TURN


def packed_dq_acc_size(family: AttentionFamily, num_q_heads: int, num_sequences: int, total_q: int) -> tuple[int, int]:
    """`dq_acc_size` of packed sequences: tile number head · `row_blocks` + block."""
    tile = fused_tile(family)
    tiles = num_q_heads * row_blocks(total_q, num_sequences, tile.block_m)
    return tiles * (tile.block_m * tile.columns // DQ_LANES), DQ_LANES


def statistics_size(shape: AttentionShape) -> tuple[int, int, int]:
    """(2, batch · q heads, padded rows): lse in base 2, then delta; fp32, contiguous."""
    rows = -(-shape.seqlen_q // STATISTIC_ROWS) * STATISTIC_ROWS
    return 2, shape.batch_size * shape.num_q_heads, rows


def turns_size(shape: AttentionShape) -> tuple[int, int]:
    """(batch · q heads, padded rows / ROWS_PER_TURN): whose turn it is to add to dq; int32, 0 between launches."""
    _, batch_heads, rows = statistics_size(shape)
    return batch_heads, rows // ROWS_PER_TURN


def dq_acc_size(family: AttentionFamily, shape: AttentionShape) -> tuple[int, int]:
    """(rows, DQ_LANES): dq / softmax_scale tile by tile, fp32.

    Tile number (batch_head · query tiles + query tile) holds block_m · columns values, part by part in the order in
    which a warpgroup's accumulators lie in registers. As plain tensors, a tile [block_m, columns] is

        values.reshape(tile.register_axes).permute(tile.register_order).reshape(block_m, columns)

    A tile that no key block adds to is never written: one whose rows all see no key.
    """
    tile = fused_tile(family)
    tiles = shape.batch_size * shape.num_q_heads * -(-shape.seqlen_q // tile.block_m)
    return tiles * (tile.block_m * tile.columns // DQ_LANES), DQ_LANES


def fused_dq_acc_size(family: AttentionFamily, shape: AttentionShape) -> tuple[int, int]:
    """Of a problem, whether its sequences are packed or a batch."""
    if not family.varlen:
        return dq_acc_size(family, shape)
    return packed_dq_acc_size(family, shape.num_q_heads, shape.batch_size, shape.batch_size * shape.seqlen_q)


def dq_padding(family: AttentionFamily, shape: AttentionShape) -> float:
    """How many times as many values dq_acc holds as dq has."""
    rows, lanes = fused_dq_acc_size(family, shape)
    return rows * lanes / (shape.batch_size * shape.num_q_heads * shape.seqlen_q * family.head_dim)


def whole_mask_rows(seqlen_k: int) -> int:
    """Elements of a row of a mask's gradient as kernels write it: whole stores of 16 elements."""
    return -(-seqlen_k // 16) * 16
