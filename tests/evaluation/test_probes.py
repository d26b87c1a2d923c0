"""The small calls on which a kernel is checked."""

from dataclasses import replace

import pytest

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.problem.sequences import Sequences

BLOCK = 16


def make_family(dtype: DType = DType.BFLOAT16, *, causal: bool = True, access: Access = Access.TMA) -> AttentionFamily:
    return AttentionFamily(dtype=dtype, head_dim=16, head_dim_v=32, bounded_right=causal, access=access)


def shapes(*, exact_lengths: bool, block_m: int = 32, block_n: int = 16) -> list[AttentionShape]:
    probe_list = probes(make_family(), block_m=block_m, block_n=block_n, exact_lengths=exact_lengths)
    return [probe.shape for probe in probe_list]


def test_ragged_probes_divide_by_no_block() -> None:
    assert any(shape.seqlen_q % 32 and shape.seqlen_k % 16 for shape in shapes(exact_lengths=False))


def test_exact_probes_divide_by_both_blocks() -> None:
    assert all(shape.seqlen_q % 32 == shape.seqlen_k % 16 == 0 for shape in shapes(exact_lengths=True))


@pytest.mark.parametrize("blocks", [(16, 16), (128, 16), (16, 128), (64, 128)])
@pytest.mark.parametrize("exact_lengths", [False, True])
def test_probes_have_blocks_with_more_queries_than_keys_and_the_reverse(
    exact_lengths: bool, blocks: tuple[int, int]
) -> None:
    several = [s for s in shapes(exact_lengths=exact_lengths, block_m=blocks[0], block_n=blocks[1]) if s.seqlen_q > 1]
    assert {s.seqlen_q > s.seqlen_k for s in several if s.seqlen_q != s.seqlen_k} == {True, False}


@pytest.mark.parametrize("exact_lengths", [False, True])
@pytest.mark.parametrize("blocks", [(16, 16), (128, 16), (16, 128)])
def test_a_probe_has_keys_that_no_row_sees(blocks: tuple[int, int], exact_lengths: bool) -> None:
    probe_list = probes(make_family(), block_m=blocks[0], block_n=blocks[1], exact_lengths=exact_lengths)
    assert any(probe.top_left and probe.shape.seqlen_k > probe.shape.seqlen_q for probe in probe_list)


@pytest.mark.parametrize("exact_lengths", [False, True])
def test_probes_have_grouped_heads_and_several_batches(exact_lengths: bool) -> None:
    assert any(s.gqa_group_size > 1 and s.batch_size > 1 for s in shapes(exact_lengths=exact_lengths))


def test_a_probe_of_a_full_family_has_no_diagonal() -> None:
    family = make_family(causal=False)
    probe_list = probes(family, block_m=BLOCK, block_n=BLOCK, exact_lengths=False)
    assert {probe.diagonal(family) for probe in probe_list} == {None}


def test_probes_of_a_causal_family_have_both_alignments() -> None:
    family = make_family()
    probe_list = probes(family, block_m=BLOCK, block_n=BLOCK, exact_lengths=False)
    assert {probe.diagonal(family) == 0 for probe in probe_list} == {True, False}


def tiles_of(probe: Probe, block_m: int, block_n: int) -> set[tuple[bool, int, int]]:
    """(sees no key, masked blocks after the first, blocks without a mask after these) of a causal probe's query tiles.

    As `hopper_ws` kernels count: one block is visited even where there is none, and the first is always masked.
    """
    diagonal = probe.diagonal(make_family())
    assert diagonal is not None
    seqlen_q, seqlen_k = probe.shape.seqlen_q, min(probe.shape.seqlen_k, max(0, probe.shape.seqlen_q + diagonal))
    found = set()
    for start_m in range(0, seqlen_q, block_m):
        key_end = max(0, min(seqlen_k, min(start_m + block_m, seqlen_q) + diagonal))
        full_end = max(0, min(seqlen_k, start_m + diagonal + 1))
        blocks = -(-key_end // block_n)
        whole = min(full_end // block_n, max(blocks, 1) - 1)
        found.add((blocks == 0, max(blocks, 1) - 1 - whole, whole))
    return found


@pytest.mark.parametrize("exact_lengths", [False, True])
@pytest.mark.parametrize("blocks", [(128, 64), (128, 128), (192, 64), (192, 128)])
def test_persistent_probes_give_each_program_tiles_of_every_kind(blocks: tuple[int, int], exact_lengths: bool) -> None:
    """A compiler took the addresses of one loop over blocks from the loop before it, which some tiles skip."""
    programs = 132
    probe_list = probes(
        make_family(), block_m=blocks[0], block_n=blocks[1], exact_lengths=exact_lengths, programs=programs
    )
    long = [
        one
        for one in probe_list
        if -(-one.shape.seqlen_q // blocks[0]) * one.shape.batch_size * one.shape.num_q_heads >= 3 * programs
    ]
    tiles = set().union(*(tiles_of(probe, *blocks) for probe in long))
    assert any(edge == 0 and whole for _, edge, whole in tiles)  # the loop with masks is skipped, the other is not
    assert {empty for empty, _, _ in tiles} == {True, False}
    if not exact_lengths:
        assert any(edge and whole for _, edge, whole in tiles)
        assert any(edge and not whole for _, edge, whole in tiles)


def test_a_kernel_with_a_program_for_each_tile_needs_no_such_probes() -> None:
    sizes = [shape.batch_size * shape.num_q_heads for shape in shapes(exact_lengths=False)]
    assert max(sizes) < 32


FEATURES: dict[str, dict[str, bool]] = {
    "full": {},
    "causal": {"bounded_right": True},
    "left": {"bounded_left": True},
    "window alibi softcap": {"bounded_left": True, "bounded_right": True, "alibi": True, "softcap": True},
    "alibi sinks": {"alibi": True, "sinks": True},
    "window dropout": {"bounded_left": True, "bounded_right": True, "dropout": True},
}


# --- of packed sequences --------------------------------------------------------------------------------------------


def test_sequences_are_long_empty_and_many_and_leave_rows_over() -> None:
    family = AttentionProblem.parse("1x2x2x64x64x32,causal,varlen").family
    found = [probe.sequences for probe in probes(family, block_m=64, block_n=64, exact_lengths=False)]
    assert None not in found
    assert any(0 in one.lengths_q and 0 in one.lengths_k and one.unused_q for one in found if one)
    assert any(len(one.lengths_q) > 128 for one in found if one)


def test_programs_that_wait_for_one_another_are_more_than_run_together() -> None:
    family = AttentionProblem.parse("1x2x1x64x64x64,varlen,bwd_fused").family
    found = probes(family, block_m=128, block_n=128, exact_lengths=False, programs=132)
    last = found[-1]
    assert last.sequences == Sequences(lengths_q=(513, 0, 383), lengths_k=(639, 3, 515))
    lengths = zip(last.sequences.lengths_q, last.sequences.lengths_k, strict=True)
    busy_blocks = sum(-(-keys // 128) for rows, keys in lengths if rows)
    assert busy_blocks * last.shape.num_kv_heads > 132


# --- in windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_lengths", [False, True])
@pytest.mark.parametrize("words", ["left=1", "causal,left=1", "causal,left=1,varlen"])
def test_windows_hold_whole_blocks_cross_edges_and_leave_keys_before_them(words: str, exact_lengths: bool) -> None:
    family = AttentionProblem.parse(f"1x2x2x64x64x32,{words}").family
    found = probes(family, block_m=32, block_n=16, exact_lengths=exact_lengths)
    lefts = {probe.shape.window_left for probe in found}
    assert {left > 32 + 16 for left in lefts} == {True, False}
    assert any(probe.shape.window_right > 0 for probe in found) is family.bounded_right
    first_keys = [probe.offset - probe.shape.window_left for probe in found if probe.sequences is None]
    first_keys += [  # of sequences: the diagonal counts from bottom-right
        probe.shape.seqlen_k - probe.shape.seqlen_q - probe.shape.window_left for probe in found if probe.sequences
    ]
    assert any(first > 0 for first in first_keys)  # keys that no row sees
    plain = probes(replace(family, bounded_left=False), block_m=32, block_n=16, exact_lengths=exact_lengths)
    assert len(found) == len(plain) + 2
