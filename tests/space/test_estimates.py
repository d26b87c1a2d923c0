"""What tiles take: pieces of a head dim, shared memory, registers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import HopperWsFwdConfig, PortableFwdConfig, Schedule
from fa_autotune.space.estimates import (
    backward_registers,
    canonical_piece,
    consumer_registers,
    copies_mask,
    forward_registers,
    head_dim_pieces,
    hopper_smem_bytes,
    in_flight_smem_bytes,
    multiplies_by_fma,
    multiplies_by_warp,
    multiplies_in_tensor_memory,
    operand_bytes,
    out_fits_query_rows,
    owned_and_streamed,
    padded_head_dim,
    part_columns,
    splits_outputs,
    value_parts,
    whole_smem_bytes,
)
from fa_autotune.space.registry import variant_spec

H200 = KNOWN_DEVICES["h200"]


def family_of(words: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x2x2x64x64x{words}").family


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


# --- who multiplies, and what a tile takes ----------------------------------------------------------------------------


def test_what_multiplies_follows_from_dtype_and_arch() -> None:
    plain, exact, cut = (family_of(words) for words in ("64", "64,fp32", "64,fp32,tf32"))
    assert [multiplies_by_fma(family, "sm_90") for family in (plain, exact, cut)] == [False, True, False]
    assert multiplies_by_fma(plain, "sm_75")
    archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
    assert [multiplies_by_warp(arch) for arch in archs] == [True, True, False, False, True, False]
    assert [multiplies_in_tensor_memory(arch) for arch in archs] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("words", "widest", "piece"),
    [("64", 64, 256), ("64", 32, 32), ("128", 64, 64), ("96", 64, 256), ("64x128", 64, 64), ("512", 256, 256)],
)
def test_one_way_to_cut_head_dims_has_one_name(words: str, widest: int, piece: int) -> None:
    assert canonical_piece(family_of(words), widest) == piece


def test_a_program_of_dk_and_dv_owns_keys_and_brings_queries_in() -> None:
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)
    assert owned_and_streamed(family_of("64"), config) == (64, 32)
    backward = variant_spec(Pass.BWD_DKDV, Variant.PORTABLE).config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)
    assert owned_and_streamed(family_of("64,bwd_dkdv"), backward) == (32, 64)


def test_shared_memory_counts_the_tiles_of_every_stage_and_a_masks_own() -> None:
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3)
    k_and_v = 32 * (64 + 128) * 2
    assert in_flight_smem_bytes(family_of("64x128"), config) == 2 * k_and_v
    assert whole_smem_bytes(family_of("64x128"), config) == 64 * 64 * 2 + 3 * k_and_v
    for words, itemsize in (("bool_mask", 1), ("bias", 2), ("wide_bias", 4)):
        masked = whole_smem_bytes(family_of(f"64x128,{words}"), config)
        assert masked == 64 * 64 * 2 + 3 * (k_and_v + 64 * 32 * itemsize)
    unpipelined = replace(config, num_stages=1)
    assert whole_smem_bytes(family_of("64x128,bias"), unpipelined) == whole_smem_bytes(family_of("64x128"), unpipelined)
    assert operand_bytes(family_of("64x128"), config) == (64 + 32) * (64 + 128) * 2


def test_registers_hold_the_accumulator_the_scores_and_their_next_use() -> None:
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1)
    words = 64 * 128 + 64 * 32 + 64 * 32 * 2 // 4
    assert forward_registers(family_of("64x128"), config, H200) == words // 128
    spec = variant_spec(Pass.BWD_DKDV, Variant.TMA)
    both = spec.config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1)
    family = family_of("64x128,bwd_dkdv")
    assert backward_registers(family, both, H200) == (32 * (64 + 128) + 2 * 64 * 32) // 128
    apart = replace(both, SPLIT_OUTPUTS=True)
    assert splits_outputs(apart)
    assert backward_registers(family, apart, H200) == (32 * 128 + 2 * 64 * 32) // 128
    assert backward_registers(family, both, KNOWN_DEVICES["b200"]) == 2 * 64 * 32 // 128  # the rest lies elsewhere


@pytest.mark.parametrize(
    ("words", "parts", "columns"),
    [("64x256", 1, 256), ("64x264", 2, 144), ("64x512", 2, 256), ("64x512,bwd_dq", 1, 512)],
)
def test_programs_share_out_the_columns_of_a_wide_v(words: str, parts: int, columns: int) -> None:
    assert (value_parts(family_of(words)), part_columns(family_of(words))) == (parts, columns)


def test_a_mask_takes_registers_and_shared_memory_where_it_is_copied() -> None:
    config = HopperWsFwdConfig(SCHEDULE=Schedule.TILE, CONSUMERS=2, BLOCK_N=64)
    plain, copied, read = (family_of(words) for words in ("128", "128,bias", "128,bias,loose_mask"))
    assert [copies_mask(family) for family in (plain, copied, read)] == [False, True, False]
    assert hopper_smem_bytes(copied, config) - hopper_smem_bytes(plain, config) == 128 * 64 * 2
    assert hopper_smem_bytes(read, config) == hopper_smem_bytes(plain, config)
    assert consumer_registers(plain, config) == 64 * (128 + 64 + 32) // 128
    assert consumer_registers(plain, config) < consumer_registers(copied, config) < consumer_registers(read, config)


def test_rows_of_o_go_through_those_of_q_only_where_they_are_as_wide() -> None:
    assert [out_fits_query_rows(family_of(words)) for words in ("128", "192x128", "128x64", "64x128", "96x64")] == [
        *(True, True, False, False, True)
    ]
