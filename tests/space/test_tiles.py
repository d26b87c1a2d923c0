"""Tiles worth trying first: by pass, head dim and what multiplies them."""

import pytest

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import BackwardConfig
from fa_autotune.space.constraints import min_scores_per_warp
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.tiles import (
    BACKWARD_SEEDS,
    BACKWARD_SEEDS_BY_WARP,
    Tile,
    default_tiles_in_pieces,
    is_in_pieces,
    seed_tiles_in_pieces,
    tf32_tiles,
)

TILED = (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def family_of(words: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x2x2x64x64x{words}").family


def knobs_of(kernel_pass: Pass, tile: Tile) -> dict[str, int]:
    """A tile by the names of its knobs: a program of dk and dv owns keys."""
    owned, streamed, num_warps, num_stages = tile
    rows = (streamed, owned) if kernel_pass is Pass.BWD_DKDV else (owned, streamed)
    return {"BLOCK_M": rows[0], "BLOCK_N": rows[1], "num_warps": num_warps, "num_stages": num_stages}


def assert_in_the_space(kernel_pass: Pass, tile: Tile) -> None:
    knobs = {knob.name: knob.values for knob in variant_spec(kernel_pass, Variant.PORTABLE).knobs}
    assert all(value in knobs[name] for name, value in knobs_of(kernel_pass, tile).items()), (kernel_pass, tile)


@pytest.mark.parametrize("seeds", [BACKWARD_SEEDS, BACKWARD_SEEDS_BY_WARP], ids=["by warpgroup", "by warp"])
def test_tiles_of_the_backward_lie_in_its_space_each_once_and_shrink_as_heads_widen(
    seeds: dict[Pass, list[list[Tile]]],
) -> None:
    assert set(seeds) == {Pass.BWD_DKDV, Pass.BWD_DQ}
    for kernel_pass, by_width in seeds.items():
        assert len(by_width) == 3  # head dims up to 64, up to 128, and wider
        for tiles in by_width:
            assert len(set(tiles)) == len(tiles) >= 3
            for tile in tiles:
                assert_in_the_space(kernel_pass, tile)
        largest = [max(owned * streamed for owned, streamed, *_ in tiles) for tiles in by_width]
        assert largest == sorted(largest, reverse=True)


@pytest.mark.parametrize(
    ("words", "is_wide"), [("256", False), ("264", True), ("64x264", True), ("512x64", True), ("8", False)]
)
def test_a_head_is_wide_where_one_of_its_dims_takes_several_tiles(words: str, is_wide: bool) -> None:
    assert is_in_pieces(family_of(words)) is is_wide


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel_pass", TILED)
def test_tiles_for_tf32_lie_in_the_space_and_give_every_warp_scores(
    kernel_pass: Pass, head_dim: int, arch: str
) -> None:
    family = family_of(f"{head_dim},fp32,tf32,{kernel_pass}")
    tiles, piece = tf32_tiles(family, arch)
    assert piece == (64 if kernel_pass is Pass.FWD else 256)
    assert tiles
    for tile in tiles:
        assert_in_the_space(kernel_pass, tile)
        config = variant_spec(kernel_pass, Variant.PORTABLE).config(**knobs_of(kernel_pass, tile))
        if isinstance(config, BackwardConfig):
            assert min_scores_per_warp(family) * config.num_warps <= config.BLOCK_M * config.BLOCK_N
        else:
            assert 16 * config.num_warps <= config.BLOCK_M


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize("words", ["320", "512", "64x512", "300,any"])
def test_tiles_of_wide_heads_lie_in_the_space_and_their_pieces_fit_what_multiplies(
    words: str, kernel_pass: Pass, arch: str
) -> None:
    family = family_of(f"{words},{kernel_pass}" + (",fp16" if arch == "sm_75" else ""))
    pieces = set()
    for by_descriptors in (False, True):
        tiles, piece = default_tiles_in_pieces(family, arch, by_descriptors=by_descriptors)
        pieces.add(piece)
        for tile in tiles:
            assert_in_the_space(kernel_pass, tile)
    found = list(seed_tiles_in_pieces(family, arch))
    assert len(set(found)) == len(found) >= 3
    for tile, piece in found:
        assert_in_the_space(kernel_pass, tile)
        pieces.add(piece)
    widest = 32 if arch == "sm_75" else 64 if arch in ("sm_80", "sm_120") else 256
    assert max(pieces) <= widest
