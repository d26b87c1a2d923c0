"""The memory that the kernels of the fused backward hand to each other: sizes, and the order of registers."""

from dataclasses import replace
from itertools import accumulate
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.workspace import (
    ROWS_PER_TURN,
    STATISTIC_ROWS,
    dq_acc_size,
    dq_padding,
    fused_tile,
    is_wide,
    packed_dq_acc_size,
    packed_turns_size,
    row_blocks,
    statistics_size,
    turns_size,
    whole_mask_rows,
)

SHAPE = AttentionProblem.parse("1x1x1x64x64x64").shape


def family_of(head_dim: int, head_dim_v: int) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=Pass.BWD_FUSED, dtype=DType.BFLOAT16, head_dim=head_dim, head_dim_v=head_dim_v, bounded_right=False
    )


def test_workspaces_have_room_for_every_sequence_and_one_more() -> None:
    call = AttentionProblem.parse("8x4x2x1024x1024x64,varlen")
    padded = replace(call, family=replace(call.family, varlen=False))
    assert packed_turns_size(4, 8, 8 * 1024) == (4, (64 + 8 + 1) * 2)
    assert packed_dq_acc_size(call.family, 4, 8, 8192)[0] == 4 * (64 + 9) * (128 * 64 // 256)
    assert dq_padding(call.family, call.shape) == 73 / 64
    assert dq_padding(padded.family, padded.shape) == 1.0
    assert dq_acc_size(padded.family, padded.shape)[0] == 4 * 64 * 32


@pytest.mark.parametrize(
    ("head_dims", "tile"),
    [
        ((64, 64), (128, 128, 64, 64)),
        ((8, 40), (128, 128, 64, 64)),
        ((64, 72), (64, 128, 128, 128)),
        ((128, 128), (64, 128, 128, 128)),
        ((136, 64), (64, 64, 192, 64)),
        ((64, 256), (64, 64, 64, 256)),
    ],
)
def test_a_familys_tile_is_padded_to_whole_parts(head_dims: tuple[int, int], tile: tuple[int, int, int, int]) -> None:
    family = family_of(*head_dims)
    found = fused_tile(family)
    assert (found.block_m, found.block_n, found.columns, found.v_columns) == tile
    assert is_wide(family) is (max(head_dims) > 128)


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 64)])
def test_every_value_of_a_tile_has_one_place_in_registers(head_dims: tuple[int, int]) -> None:
    tile = fused_tile(family_of(*head_dims))
    assert prod(tile.register_axes) == tile.block_m * tile.columns == tile.parts * 64 * 64
    assert sorted(tile.register_order) == list(range(len(tile.register_axes)))
    sizes = [tile.register_axes[axis] for axis in tile.register_order]
    split = 4 if tile.block_m > 64 else 3  # axes of rows, then those of columns
    assert (prod(sizes[:split]), prod(sizes[split:])) == (tile.block_m, tile.columns)


@given(st.integers(1, 4000), st.integers(1, 40), st.integers(1, 8))
def test_statistics_turns_and_dq_cover_every_row_of_a_batch(seqlen_q: int, batch_size: int, heads: int) -> None:
    shape = replace(SHAPE, batch_size=batch_size, num_q_heads=heads, num_kv_heads=1, seqlen_q=seqlen_q)
    _, batch_heads, rows = statistics_size(shape)
    assert batch_heads == batch_size * heads
    assert 0 <= rows - seqlen_q < STATISTIC_ROWS
    assert turns_size(shape) == (batch_heads, rows // ROWS_PER_TURN)
    family = family_of(64, 64)
    lines, lanes = dq_acc_size(family, shape)
    values = lines * lanes // batch_heads
    assert 0 <= values - seqlen_q * 64 < 128 * 64
    assert dq_padding(family, shape) == values / (seqlen_q * 64)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.sampled_from([64, 128]))
def test_blocks_of_sequences_fit_whatever_their_lengths(lengths: list[int], block: int) -> None:
    starts = list(accumulate(lengths, initial=0))
    owned = [
        range(first // block + number, first // block + number + -(-length // block))
        for number, (first, length) in enumerate(zip(starts, lengths, strict=False))
    ]
    taken = [place for places in owned for place in places]
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < row_blocks(starts[-1], len(lengths), block)


@pytest.mark.parametrize(("seqlen_k", "elements"), [(1, 16), (16, 16), (17, 32), (4096, 4096)])
def test_a_row_of_a_masks_gradient_is_written_by_whole_stores(seqlen_k: int, elements: int) -> None:
    assert whole_mask_rows(seqlen_k) == elements
