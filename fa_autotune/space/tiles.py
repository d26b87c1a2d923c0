"""Tiles worth trying first: of the backward, and of all passes for head dims above 256, where what a tile is computed
with is as much as what it gives."""

from collections.abc import Iterator
from itertools import product

from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.space.estimates import WIDEST_PIECE, multiplies_by_fma, multiplies_by_warp, padded_head_dim

Tile = tuple[int, int, int, int]  # rows that a program owns, rows that its loop brings in, num_warps, num_stages

# Backward tiles for head dims up to 64, up to 128, and wider; dk and dv together hold twice dq's accumulators.
BACKWARD_SEEDS: dict[Pass, list[list[Tile]]] = {
    Pass.BWD_DKDV: [
        [(64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 64, 8, 2), (128, 128, 8, 2)],
        [(64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 1), (64, 32, 8, 2), (64, 64, 4, 2)],
        [(64, 32, 8, 2), (64, 16, 8, 2), (64, 32, 8, 1), (32, 32, 8, 2)],
    ],
    Pass.BWD_DQ: [
        [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 4, 2)],
        [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3), (64, 64, 4, 1)],
        [(64, 32, 8, 2), (64, 32, 4, 2), (128, 32, 8, 1), (64, 64, 8, 1)],
    ],
}
# The same where a matrix instruction belongs to one warp and every operand passes through its registers.
BACKWARD_SEEDS_BY_WARP: dict[Pass, list[list[Tile]]] = {
    Pass.BWD_DKDV: [
        [(64, 32, 4, 2), (64, 32, 8, 2), (32, 64, 4, 2), (64, 64, 8, 1), (32, 64, 8, 2)],
        [(64, 32, 8, 1), (64, 16, 8, 2), (32, 32, 4, 2), (32, 64, 8, 1)],
        [(32, 32, 8, 2), (16, 64, 8, 1), (16, 32, 4, 1)],
    ],
    Pass.BWD_DQ: [
        [(64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3)],
        [(64, 32, 4, 1), (64, 32, 8, 2), (64, 64, 8, 1), (64, 16, 4, 2)],
        [(32, 32, 8, 2), (64, 16, 8, 2), (16, 32, 4, 1)],
    ],
}

# Of a default, whose query rows alone may take 64 KB: what sm_86 has, or what has tensor descriptors.
PORTABLE_SMEM_BYTES, TMA_SMEM_BYTES = 96 * 1024, 200 * 1024


def is_in_pieces(family: AttentionFamily) -> bool:
    """Whether a head dim takes several of the widest tiles."""
    return max(family.head_dim, family.head_dim_v) > WIDEST_PIECE


def tf32_tiles(family: AttentionFamily, arch: str) -> tuple[list[Tile], int]:
    """Tiles for float32 in tf32, of which the first that fits is the default, and the piece for them."""
    columns = padded_head_dim(family.head_dim) + padded_head_dim(family.head_dim_v)
    if family.kernel_pass is Pass.FWD:
        # In more than one stage Hopper's products read V, transposed, four bytes at a time.
        stages = 2 if multiplies_by_warp(arch) else 1
        tiles = [(64, 32, 4, 1), (64, 16, 4, stages), (64, 16, 4, 1), (128, 32, 8, 1), (128, 32, 8, 2), (64, 64, 4, 1)]
        return tiles[columns > 128 :], 64
    if columns <= 128:
        return [(32, 32, 4, 1), (16, 32, 8, 1), (32, 16, 8, 1), (64, 32, 8, 1)], 256
    holds_two = family.kernel_pass is Pass.BWD_DKDV and columns > 256
    return [(16, 16, 8 if holds_two else 4, 1), (16, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)], 256


def default_tiles_in_pieces(family: AttentionFamily, arch: str, *, by_descriptors: bool) -> tuple[list[Tile], int]:
    """Tiles that hardly spill, of which the first that fits is the default, and the piece (a product's columns)."""
    is_fma, kernel_pass = multiplies_by_fma(family, arch), family.kernel_pass
    piece = 32 if is_fma else 64 if multiplies_by_warp(arch) else 128
    if kernel_pass is Pass.FWD and not is_fma:
        most = 32 if by_descriptors else 16
        return [(64, block_n, 4, stages) for stages in (2, 1) for block_n in (most, 16)], piece
    is_large = kernel_pass is Pass.BWD_DKDV or (family.access is Access.ANY and kernel_pass is Pass.BWD_DQ)
    is_wave = arch.startswith("gfx")  # of twice the threads that a warp has
    return [(16, 16, 8 if is_large and not is_wave else 4, 1)], piece


def seed_tiles_in_pieces(family: AttentionFamily, arch: str) -> Iterator[tuple[Tile, int]]:
    """Tiles worth trying first, each with a piece."""
    tiles = [(64, 32, 4, 2), (64, 32, 4, 1), (128, 32, 8, 1), (128, 32, 8, 2), (64, 16, 4, 2)]
    pieces = (64,) if multiplies_by_warp(arch) else (128, 256)
    if family.kernel_pass is not Pass.FWD:
        tiles = [(16, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 4, 1)]
    if multiplies_by_fma(family, arch):
        tiles, pieces = [(32, 16, 4, 1), (32, 16, 8, 1), (16, 32, 4, 1)], (32,)
    for piece, tile in product(pieces, tiles):
        yield tile, piece
