"""The memory that the three kernels of the fused backward hand to each other.

It is fixed by the head dims and the shape, so that each of them is tuned apart: the statistics and turns that the
preprocessing gives, and dq as the fused kernel adds it up, in fp32 and in the order of its registers.
"""

from dataclasses import dataclass

from fa_autotune.problem import AttentionFamily, AttentionShape

STATISTIC_ROWS = 128  # lse and delta of a head are padded to whole blocks of so many rows, whatever a tile has
ROWS_PER_TURN = 64  # one counter for each so many query rows: a tile uses that of its first rows
DQ_LANES = 256  # fp32 values in a row of dq_acc
WIDEST_HEAD_DIM = 128
NARROW_HEAD_DIM = 64
# Of a tile in dq_acc: part (a half of the rows, or of the columns), group of 8 columns, group of 16 rows, row of 8,
# pair of columns, half of the 16 rows, column of the pair.
REGISTER_AXES = (2, 8, 4, 8, 4, 2, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTile:
    """Rows of queries and of keys in a step of the fused backward, the columns that head dims are padded to, and how
    many of its tiles of queries, of do and of dS are in shared memory."""

    block_m: int
    block_n: int
    columns: int
    q_stages: int = 3  # query rows are held to the end of the step after their own
    do_stages: int = 2
    ds_stages: int = 2

    @property
    def register_order(self) -> tuple[int, ...]:
        """The axes of REGISTER_AXES by rows, then columns: two warpgroups share out the rows, or the columns."""
        return (0, 2, 5, 3, 1, 4, 6) if self.block_m == 128 else (2, 5, 3, 0, 1, 4, 6)


def fused_tile(family: AttentionFamily) -> FusedTile:
    """The tile of a family, whose wider head dim is at most WIDEST_HEAD_DIM; both are padded to the same columns."""
    if max(family.head_dim, family.head_dim_v) <= NARROW_HEAD_DIM:
        return FusedTile(block_m=128, block_n=128, columns=64)
    return FusedTile(block_m=64, block_n=128, columns=128)


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

    Tile number (batch_head · query tiles + query tile) holds block_m · columns values in the order in which the
    accumulators of its two warpgroups lie in registers. As plain tensors, a tile [block_m, columns] is

        values.reshape(REGISTER_AXES).permute(tile.register_order).reshape(block_m, columns)

    A tile that no key block adds to is never written: one whose rows all see no key.
    """
    tile = fused_tile(family)
    tiles = shape.batch_size * shape.num_q_heads * -(-shape.seqlen_q // tile.block_m)
    return tiles * (tile.block_m * tile.columns // DQ_LANES), DQ_LANES


def dq_padding(family: AttentionFamily, shape: AttentionShape) -> float:
    """How many times as many values dq_acc holds as dq has."""
    rows, lanes = dq_acc_size(family, shape)
    return rows * lanes / (shape.batch_size * shape.num_q_heads * shape.seqlen_q * family.head_dim)
