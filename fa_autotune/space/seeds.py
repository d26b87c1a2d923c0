"""Where a search starts, and what runs untuned."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from fa_autotune.problem.device import DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import (
    BwdDeltaConfig,
    BwdPostprocessConfig,
    FusedConfig,
    HopperWsFwdConfig,
    KernelConfig,
    TmaBwdDkDvConfig,
)
from fa_autotune.space.constraints import ONE_KNOB_CHECKS, min_scores_per_warp
from fa_autotune.space.estimates import (
    canonical_piece,
    multiplies_by_fma,
    multiplies_by_warp,
    multiplies_in_tensor_memory,
    padded_head_dim,
    whole_smem_bytes,
)
from fa_autotune.space.hopper_seeds import forward_seeds, fused_seeds, wide_seeds
from fa_autotune.space.registry import Knob, KnobValue, VariantSpec
from fa_autotune.space.tiles import (
    BACKWARD_SEEDS,
    BACKWARD_SEEDS_BY_WARP,
    PORTABLE_SMEM_BYTES,
    TMA_SMEM_BYTES,
    Tile,
    default_tiles_in_pieces,
    is_in_pieces,
    seed_tiles_in_pieces,
    tf32_tiles,
)

_SMALL_SPACE = 16_384  # points that a search may look at one by one before it starts
_DEFAULT_SMEM_BYTES = 62 * 1024  # 64 KB less what the compiler adds: barriers, layout changes


def default_config(spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """An untuned config. It fits 64 KB of shared memory, or what their GPUs have: kernels in Gluon, a backward's
    through descriptors, and forwards of head dims above 256 or in tf32."""
    if spec.kernel_pass in _UNTILED_SEEDS:
        return spec.config(**_UNTILED_SEEDS[spec.kernel_pass][0])
    if spec.variant.is_gluon:
        return _gluon_seeds(spec, family)[0]
    columns = padded_head_dim(family.head_dim) + padded_head_dim(family.head_dim_v)
    if is_in_pieces(family) or family.tf32:
        return _default_in_pieces(spec, family, arch)
    if multiplies_by_fma(family, arch):
        # What hardly spills with 32 rows.
        widest = 96 if (family.bounded_left or family.varlen) and family.access is Access.ANY else 256
        owned = 16 if spec.kernel_pass is not Pass.FWD and columns > widest else 32
        return _tiled(spec, family, (owned, 16, 4, 1), 32)
    if spec.kernel_pass is not Pass.FWD:
        return _tiled(spec, family, _backward_default(spec, family, arch, columns), 256)
    widest = 64
    if family.access is Access.ANY or family.loose_mask:
        is_heavy = family.alibi or (family.access is Access.ANY and (family.has_mask or family.dropout))
        widest = 16 if is_heavy else 32  # a pointer for each element leaves fewer registers, and a bias takes some
    piece = 64 if multiplies_by_warp(arch) else 256
    for num_stages, block_n in product((2, 1), (64, 32, 16)):
        config = _tiled(spec, family, (64, block_n, 4, num_stages), piece)
        if block_n <= widest and whole_smem_bytes(family, config) <= _DEFAULT_SMEM_BYTES:
            return config
    raise AssertionError(f"no default tile fits {family}")  # 64×16 in one stage fits head dim 256


def _default_in_pieces(spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """For rows of so many bytes that a forward's fill 64 KB."""
    by_descriptors = spec.variant is Variant.TMA and is_in_pieces(family)
    if is_in_pieces(family):
        tiles, piece = default_tiles_in_pieces(family, arch, by_descriptors=by_descriptors)
    else:
        tiles, piece = tf32_tiles(family, arch)
    configs = [_tiled(spec, family, tile, piece) for tile in tiles]
    limit = TMA_SMEM_BYTES if by_descriptors else PORTABLE_SMEM_BYTES
    return next((config for config in configs if whole_smem_bytes(family, config) <= limit), configs[-1])


def seed_configs(spec: VariantSpec, family: AttentionFamily, arch: str) -> Sequence[KernelConfig]:
    """Configs worth trying first: the default, and tiles that were fast for such head dims."""
    if spec.kernel_pass in _UNTILED_SEEDS:
        return [spec.config(**knobs) for knobs in _UNTILED_SEEDS[spec.kernel_pass]]
    if spec.variant.is_gluon:
        return _gluon_seeds(spec, family)
    default = default_config(spec, family, arch)
    wide = 2 * max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v))
    piece = 256
    if is_in_pieces(family):
        return [default, *(_tiled(spec, family, tile, piece) for tile, piece in seed_tiles_in_pieces(family, arch))]
    if family.tf32:
        tiles, piece = tf32_tiles(family, arch)
        return [default, *(_tiled(spec, family, tile, piece) for tile in tiles)]
    if multiplies_by_fma(family, arch):
        piece = 32
        tiles = [(32, 32, 8, 1), (32, 16, 8, 1), (64, 32, 8, 1), (16, 16, 4, 1)]
    elif spec.kernel_pass is not Pass.FWD:
        seeds = BACKWARD_SEEDS_BY_WARP if multiplies_by_warp(arch) else BACKWARD_SEEDS
        tiles = seeds[spec.kernel_pass][0 if wide <= 128 else 1 if wide <= 256 else 2]
    elif multiplies_by_warp(arch):
        piece = 64
        tiles = [(64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2), (128, 32, 4, 2), (64, 32, 4, 3)]
    elif wide <= 128:
        tiles = [(64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3)]
    elif wide <= 256:
        tiles = [(64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 4, 3)]
    else:
        tiles = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3)]
    configs = [default, *(_tiled(spec, family, tile, piece) for tile in tiles)]
    if isinstance(default, TmaBwdDkDvConfig) and wide > 256:
        splits = [(128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)]
        configs += [
            replace(_tiled(spec, family, tile, piece), SPLIT_OUTPUTS=True, EXACT_LENGTHS=exact)  # type: ignore[arg-type]
            for tile in splits
            for exact in (True, False)
        ]
    return configs


_UNTILED_SEEDS: dict[Pass, list[dict[str, KnobValue]]] = {  # the default first
    Pass.BWD_DELTA: [{"BLOCK_M": m, "num_warps": warps} for m, warps in ((32, 4), (16, 4), (64, 4), (64, 8))],
    Pass.BWD_PREPROCESS: [{"BLOCK_M": m, "num_warps": warps} for m, warps in ((32, 4), (64, 4), (64, 8), (128, 8))],
    Pass.BWD_POSTPROCESS: [{"num_warps": warps} for warps in (4, 8)],
}


def _gluon_seeds(spec: VariantSpec, family: AttentionFamily) -> Sequence[KernelConfig]:
    if spec.variant is Variant.HOPPER_WIDE:
        return wide_seeds(family)
    return fused_seeds(family) if spec.kernel_pass is Pass.BWD_FUSED else forward_seeds(family)


def _backward_default(spec: VariantSpec, family: AttentionFamily, arch: str, columns: int) -> Tile:
    """A large tile among those that hardly spill on their archs, for head dims of so many columns together."""
    is_dkdv = spec.kernel_pass is Pass.BWD_DKDV
    is_heavy = family.dropout or family.has_mask  # random bits and a mask's tile take registers beside the products
    stages = 1 if multiplies_in_tensor_memory(arch) and is_dkdv else 2
    if spec.variant is Variant.TMA:
        if columns <= 128 and (is_heavy or (stages == 1 and (family.mask_word == "window" or family.softcap))):
            return (64, 64, 8, stages)  # both edges in one loop, and the cap's slope, take more registers
        if columns <= 128 or (columns <= 256 and not is_dkdv and not is_heavy):
            return (64, 64, 4, stages)
        return (64, 32, 8, stages)
    if not arch.startswith("sm_"):
        return (64, 16, 4, 1) if columns <= 400 else (32, 16, 2, 1)
    if family.access is Access.ANY:  # a pointer for each element leaves fewer registers
        return (32, 32, 8, 1) if columns <= 128 else (16, 32, 8, 1) if columns <= 256 else (16, 16, 4, 1)
    if columns <= 128 and is_heavy and is_dkdv and (multiplies_by_warp(arch) or stages == 1):
        return (32, 32, 8, 2)
    if columns <= 128:
        return (64, 32, 8 if is_heavy or ((family.alibi or family.varlen) and stages == 1) else 4, 2)
    if columns <= 256:
        return (32, 32, 8, 2) if is_heavy else (64, 16, 8, stages)
    return (32, 32, 8, 2) if columns <= 320 else (16, 32, 4, 1)


def _tiled(spec: VariantSpec, family: AttentionFamily, tile: Tile, widest: int) -> KernelConfig:
    """A config by what a program owns and what its loop brings in: queries and keys, or for dk and dv the reverse."""
    owned, streamed, num_warps, num_stages = tile
    block_m, block_n = (streamed, owned) if spec.kernel_pass is Pass.BWD_DKDV else (owned, streamed)
    return spec.config(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        HEAD_DIM_PIECE=canonical_piece(family, widest),
    )


def fallback_configs(spec: VariantSpec, family: AttentionFamily, arch: str) -> Iterator[KernelConfig]:
    """The variant's default, then the same with ever smaller tiles, for shapes and devices that it does not fit."""
    base = default_config(spec, family, arch)
    if isinstance(
        base, HopperWsFwdConfig | FusedConfig | BwdPostprocessConfig
    ):  # one tile alone; other kernels have smaller ones
        yield base
        return
    least = min_scores_per_warp(family)
    for block_m in _halvings(base.BLOCK_M):
        if isinstance(base, BwdDeltaConfig):
            yield replace(base, BLOCK_M=block_m)
            continue
        for block_n in _halvings(base.BLOCK_N):
            rows_or_scores = block_m // 16 if spec.kernel_pass is Pass.FWD else block_m * block_n // least
            warps = min(base.num_warps, rows_or_scores)
            for stages in range(base.num_stages, 0, -1):
                yield replace(base, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages)


def _halvings(block: int) -> list[int]:
    return [block >> shift for shift in range(block.bit_length()) if block >> shift >= 16]


# --- what a search draws from -----------------------------------------------------------------------------------------


def search_domain(spec: VariantSpec, family: AttentionFamily, device: DeviceSpec) -> tuple[Knob, ...]:
    """The knobs with the values that can ever pass on a family and device: what a search should draw from.

    Exactly those in a small space; in a large one, all that pass the constraints on one knob alone.
    """
    if spec.size() <= _SMALL_SPACE:
        return _exact_domain(spec, family, device)
    base = default_config(spec, family, device.arch)
    checks = [check for _, check in spec.constraints if check in ONE_KNOB_CHECKS]

    def usable(knob: Knob, value: KnobValue) -> bool:
        config = replace(base, **{knob.name: value})  # type: ignore[arg-type]
        return all(check(family, None, config, device) is None for check in checks)

    return tuple(replace(knob, values=tuple(v for v in knob.values if usable(knob, v))) for knob in spec.knobs)


def _exact_domain(spec: VariantSpec, family: AttentionFamily, device: DeviceSpec) -> tuple[Knob, ...]:
    passing = [c for c in spec.configs() if spec.rejection(c, family=family, shape=None, device=device) is None]
    if not passing:
        return spec.knobs
    used = {knob.name: {getattr(config, knob.name) for config in passing} for knob in spec.knobs}
    return tuple(replace(knob, values=tuple(v for v in knob.values if v in used[knob.name])) for knob in spec.knobs)
