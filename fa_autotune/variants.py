"""The registry of variants: (pass, variant) → template, config dataclass, search space, and what it supports.

What a config must keep is in `constraints`, and what a variant serves in `support`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from fa_autotune.config import (
    BwdDeltaConfig,
    BwdPostprocessConfig,
    HopperWideBwdConfig,
    HopperWsBwdConfig,
    HopperWsFwdConfig,
    KernelConfig,
    PortableBwdDkDvConfig,
    PortableBwdDqConfig,
    PortableFwdConfig,
    Schedule,
    TmaBwdDkDvConfig,
    TmaBwdDqConfig,
    TmaFwdConfig,
)
from fa_autotune.constraints import (
    BACKWARD_CONSTRAINTS,
    DELTA_CONSTRAINTS,
    FORWARD_CONSTRAINTS,
    FUSED_CONSTRAINTS,
    HOPPER_CONSTRAINTS,
    ONE_KNOB_CHECKS,
    POSTPROCESS_CONSTRAINTS,
    PREPROCESS_CONSTRAINTS,
    WIDE_CONSTRAINTS,
    Check,
    Rejected,
)
from fa_autotune.device import DeviceSpec
from fa_autotune.errors import UnsupportedError
from fa_autotune.estimates import (
    canonical_piece,
    multiplies_by_fma,
    multiplies_by_warp,
    multiplies_in_tensor_memory,
    padded_head_dim,
    whole_smem_bytes,
)
from fa_autotune.family import Access, AttentionFamily, Pass
from fa_autotune.hopper_seeds import forward_seeds, fused_seeds, wide_seeds
from fa_autotune.problem import AttentionProblem, AttentionShape
from fa_autotune.records import Candidate, CompileForm, Variant
from fa_autotune.support import (
    beside_fused_supports,
    fused_supports,
    hopper_forward_supports,
    portable_supports,
    tma_backward_supports,
    tma_supports,
    wide_supports,
)
from fa_autotune.tiles import (
    BACKWARD_SEEDS,
    BACKWARD_SEEDS_BY_WARP,
    PORTABLE_SMEM_BYTES,
    TMA_SMEM_BYTES,
    Tile,
    is_wide_head,
    tf32_tiles,
    wide_default_tiles,
    wide_seed_tiles,
)

_MOST_SPECIALISED_FIRST = (Variant.HOPPER_WIDE, Variant.HOPPER_WS, Variant.TMA, Variant.PORTABLE)
_SMALL_SPACE = 16_384  # points that a search may look at one by one before it starts
_DEFAULT_SMEM_BYTES = 62 * 1024  # 64 KB less what the compiler adds: barriers, layout changes

KnobValue = int | bool | Schedule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One dimension of a search space. `ordinal` values are powers of two, searched by their exponent."""

    name: str
    values: tuple[KnobValue, ...]
    ordinal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSpec:
    """One (pass, variant): how it is rendered, searched and what it serves.

    `supports(family, arch, triton_version)` gives the reason why this variant can't serve, or None.
    `canonical(config)` is what a config stands for whose knobs were drawn apart: where one has no meaning beside the
    others, it has one value.
    """

    kernel_pass: Pass
    variant: Variant
    template: str
    config_type: type[KernelConfig]
    knobs: tuple[Knob, ...]
    constraints: tuple[tuple[str, Check], ...]
    supports: Callable[[AttentionFamily, str, tuple[int, int]], str | None]
    canonical: Callable[[Any], KernelConfig] = lambda config: config

    def rejection(
        self, config: KernelConfig, *, family: AttentionFamily, shape: AttentionShape | None, device: DeviceSpec
    ) -> Rejected | None:
        """The first constraint that a config breaks, its own search space included; None if it may run."""
        for knob in self.knobs:
            value = getattr(config, knob.name)
            if not any(
                value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in knob.values
            ):
                return Rejected(
                    constraint="search_space", reason=f"{knob.name}={value} is not one of {list(knob.values)}"
                )
        for name, check in self.constraints:
            if reason := check(family, shape, config, device):
                return Rejected(constraint=name, reason=reason)
        return None

    def domain(self, family: AttentionFamily, device: DeviceSpec) -> tuple[Knob, ...]:
        """The knobs with the values that can ever pass on a family and device: what a search should draw from.

        Exactly those in a small space; in a large one, all that pass the constraints on one knob alone.
        """
        if self.size() <= _SMALL_SPACE:
            return self._exact_domain(family, device)
        base = default_config(self, family, device.arch)
        checks = [check for _, check in self.constraints if check in ONE_KNOB_CHECKS]

        def usable(knob: Knob, value: KnobValue) -> bool:
            config = replace(base, **{knob.name: value})  # type: ignore[arg-type]
            return all(check(family, None, config, device) is None for check in checks)

        return tuple(replace(knob, values=tuple(v for v in knob.values if usable(knob, v))) for knob in self.knobs)

    def _exact_domain(self, family: AttentionFamily, device: DeviceSpec) -> tuple[Knob, ...]:
        passing = [c for c in self.configs() if self.rejection(c, family=family, shape=None, device=device) is None]
        if not passing:
            return self.knobs
        used = {knob.name: {getattr(config, knob.name) for config in passing} for knob in self.knobs}
        return tuple(replace(knob, values=tuple(v for v in knob.values if v in used[knob.name])) for knob in self.knobs)

    def size(self) -> int:
        """Number of points in the search space, before constraints."""
        return prod(len(knob.values) for knob in self.knobs)

    def configs(self) -> Iterator[KernelConfig]:
        """Every point of the search space, before constraints."""
        names = [knob.name for knob in self.knobs]
        for values in product(*(knob.values for knob in self.knobs)):
            yield self.config(**dict(zip(names, values, strict=True)))

    def config(self, **knobs: KnobValue) -> KernelConfig:
        """A config of this variant; the fields that are not named have their default."""
        return self.config_type(**knobs)  # type: ignore[arg-type]


def compile_form(family: AttentionFamily) -> CompileForm:
    """The form in which a family's kernels are compiled."""
    return CompileForm.GENERAL if family.access is Access.ANY else CompileForm.ALIGNED


def variant_spec(kernel_pass: Pass, variant: Variant) -> VariantSpec:
    """Look a registered variant up; UnsupportedError if there is none."""
    for spec in VARIANTS:
        if (spec.kernel_pass, spec.variant) == (kernel_pass, variant):
            return spec
    known = ", ".join(spec.variant for spec in VARIANTS if spec.kernel_pass is kernel_pass)
    raise UnsupportedError(f"there is no {variant} variant of the {kernel_pass} pass; it has: {known}")


def supported_variants(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> list[VariantSpec]:
    """The variants that can serve a family, the most specialised first."""
    served = [
        s for s in VARIANTS if s.kernel_pass is family.kernel_pass and s.supports(family, arch, triton_version) is None
    ]
    return sorted(served, key=lambda spec: _MOST_SPECIALISED_FIRST.index(spec.variant))


def rejection(candidate: Candidate, shape: AttentionShape | None, device: DeviceSpec) -> Rejected | None:
    """The first constraint that a candidate breaks on a device (and a shape, if given)."""
    spec = variant_spec(candidate.family.kernel_pass, candidate.variant)
    return spec.rejection(candidate.config, family=candidate.family, shape=shape, device=device)


# --- where a search starts --------------------------------------------------------------------------------------------


def default_config(spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """An untuned config. It fits 64 KB of shared memory, or what their GPUs have: kernels in Gluon, a backward's
    through descriptors, and forwards of head dims above 256 or in tf32."""
    if spec.kernel_pass in _UNTILED_SEEDS:
        return spec.config(**_UNTILED_SEEDS[spec.kernel_pass][0])
    if spec.variant.is_gluon:
        return _gluon_seeds(spec, family)[0]
    columns = padded_head_dim(family.head_dim) + padded_head_dim(family.head_dim_v)
    if is_wide_head(family) or family.tf32:
        return _wide_default(spec, family, arch)
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


def _wide_default(spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """For rows of so many bytes that a forward's fill 64 KB."""
    by_descriptors = spec.variant is Variant.TMA and is_wide_head(family)
    if is_wide_head(family):
        tiles, piece = wide_default_tiles(family, arch, by_descriptors=by_descriptors)
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
    if is_wide_head(family):
        return [default, *(_tiled(spec, family, tile, piece) for tile, piece in wide_seed_tiles(family, arch))]
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


# --- knobs, and the registry ------------------------------------------------------------------------------------------


_FORWARD_KNOBS = (
    Knob(name="BLOCK_M", values=(16, 32, 64, 128, 256), ordinal=True),
    Knob(name="BLOCK_N", values=(16, 32, 64, 128, 256), ordinal=True),
    Knob(name="num_warps", values=(1, 2, 4, 8), ordinal=True),
    Knob(name="num_stages", values=(1, 2, 3, 4)),
    Knob(name="maxnreg", values=(None, 96, 128, 168)),
    Knob(name="HEADS_PER_GROUP", values=(1, 4, 8, 16), ordinal=True),
    Knob(name="ROW_SUM_LANES", values=(1, 8)),
    Knob(name="HEAD_DIM_PIECE", values=(32, 64, 128, 256), ordinal=True),
    Knob(name="EXACT_LENGTHS", values=(False, True)),
)

_HOPPER_KNOBS = (
    Knob(name="SCHEDULE", values=tuple(Schedule)),
    Knob(name="CONSUMERS", values=(1, 2, 3)),
    Knob(name="BLOCK_N", values=(64, 128), ordinal=True),
    Knob(name="num_stages", values=(2, 3, 4)),
    Knob(name="PING_PONG", values=(False, True)),
    Knob(name="PACK_P", values=(False, True)),
    Knob(name="HEADS_PER_GROUP", values=(4, 8, 16, 32), ordinal=True),
    Knob(name="ROW_SUM_LANES", values=(1, 8)),
    Knob(name="EXACT_LENGTHS", values=(False, True)),
    Knob(name="OWN_OUT", values=(False, True)),
)


def _canonical_hopper(config: HopperWsFwdConfig) -> HopperWsFwdConfig:
    if config.SCHEDULE is Schedule.SINGLE:
        return replace(config, CONSUMERS=1, PING_PONG=False, OWN_OUT=False)
    return replace(
        config,
        CONSUMERS=max(2, config.CONSUMERS),
        PACK_P=config.PACK_P or config.SCHEDULE is Schedule.PIPELINED,
        OWN_OUT=config.OWN_OUT and config.SCHEDULE is Schedule.PERSISTENT,
    )


_FUSED_KNOBS = (
    Knob(name="HEADS_PER_GROUP", values=(1, 2, 4, 8, 16, 32), ordinal=True),
    Knob(name="DIAGONAL_FIRST", values=(False, True)),
    Knob(name="SCORES_EARLY", values=(False, True)),
    Knob(name="EXACT_LENGTHS", values=(False, True)),
)

_WIDE_KNOBS = (
    Knob(name="HEADS_PER_GROUP", values=(1, 2, 4, 8, 16, 32), ordinal=True),
    Knob(name="DIAGONAL_FIRST", values=(False, True)),
    Knob(name="DO_STAGES", values=(1, 2)),
    Knob(name="DQ_STAGES", values=(1, 2, 3)),
    Knob(name="EXACT_LENGTHS", values=(False, True)),
)

_BACKWARD_KNOBS = tuple(knob for knob in _FORWARD_KNOBS if knob.name != "ROW_SUM_LANES")
_SPLIT_OUTPUTS = Knob(name="SPLIT_OUTPUTS", values=(False, True))


def _backward(kernel_pass: Pass, variant: Variant, config_type: type[KernelConfig]) -> VariantSpec:
    return VariantSpec(
        kernel_pass=kernel_pass,
        variant=variant,
        template=f"{kernel_pass}_{variant}.py.jinja",
        config_type=config_type,
        knobs=(*_BACKWARD_KNOBS, _SPLIT_OUTPUTS) if config_type is TmaBwdDkDvConfig else _BACKWARD_KNOBS,
        constraints=BACKWARD_CONSTRAINTS,
        supports=tma_backward_supports if variant is Variant.TMA else portable_supports,
    )


VARIANTS: tuple[VariantSpec, ...] = (
    VariantSpec(
        kernel_pass=Pass.FWD,
        variant=Variant.PORTABLE,
        template="fwd_portable.py.jinja",
        config_type=PortableFwdConfig,
        knobs=_FORWARD_KNOBS,
        constraints=FORWARD_CONSTRAINTS,
        supports=portable_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.FWD,
        variant=Variant.TMA,
        template="fwd_tma.py.jinja",
        config_type=TmaFwdConfig,
        knobs=(*_FORWARD_KNOBS, Knob(name="STORE_BY_TMA", values=(False, True))),
        constraints=FORWARD_CONSTRAINTS,
        supports=tma_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.FWD,
        variant=Variant.HOPPER_WS,
        template="fwd_hopper_ws.py.jinja",
        config_type=HopperWsFwdConfig,
        knobs=_HOPPER_KNOBS,
        constraints=HOPPER_CONSTRAINTS,
        supports=hopper_forward_supports,
        canonical=_canonical_hopper,
    ),
    VariantSpec(
        kernel_pass=Pass.BWD_DELTA,
        variant=Variant.PORTABLE,
        template="bwd_delta_portable.py.jinja",
        config_type=BwdDeltaConfig,
        knobs=(
            Knob(name="BLOCK_M", values=(16, 32, 64, 128), ordinal=True),
            Knob(name="num_warps", values=(1, 2, 4, 8), ordinal=True),
        ),
        constraints=DELTA_CONSTRAINTS,
        supports=portable_supports,
    ),
    _backward(Pass.BWD_DKDV, Variant.PORTABLE, PortableBwdDkDvConfig),
    _backward(Pass.BWD_DKDV, Variant.TMA, TmaBwdDkDvConfig),
    _backward(Pass.BWD_DQ, Variant.PORTABLE, PortableBwdDqConfig),
    _backward(Pass.BWD_DQ, Variant.TMA, TmaBwdDqConfig),
    VariantSpec(
        kernel_pass=Pass.BWD_PREPROCESS,
        variant=Variant.PORTABLE,
        template="bwd_preprocess_portable.py.jinja",
        config_type=BwdDeltaConfig,
        knobs=(
            Knob(name="BLOCK_M", values=(32, 64, 128), ordinal=True),
            Knob(name="num_warps", values=(1, 2, 4, 8), ordinal=True),
        ),
        constraints=PREPROCESS_CONSTRAINTS,
        supports=beside_fused_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.BWD_FUSED,
        variant=Variant.HOPPER_WS,
        template="bwd_fused_hopper_ws.py.jinja",
        config_type=HopperWsBwdConfig,
        knobs=_FUSED_KNOBS,
        constraints=FUSED_CONSTRAINTS,
        supports=fused_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.BWD_FUSED,
        variant=Variant.HOPPER_WIDE,
        template="bwd_fused_hopper_wide.py.jinja",
        config_type=HopperWideBwdConfig,
        knobs=_WIDE_KNOBS,
        constraints=WIDE_CONSTRAINTS,
        supports=wide_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.BWD_POSTPROCESS,
        variant=Variant.PORTABLE,
        template="bwd_postprocess_portable.py.jinja",
        config_type=BwdPostprocessConfig,
        knobs=(Knob(name="num_warps", values=(2, 4, 8), ordinal=True),),
        constraints=POSTPROCESS_CONSTRAINTS,
        supports=beside_fused_supports,
    ),
)

for _spec in VARIANTS:  # a knob without a field, or a field without a knob, is a mistake of ours
    assert {knob.name for knob in _spec.knobs} == {field.name for field in fields(_spec.config_type)}


def problem_candidates(problem: AttentionProblem, spec: VariantSpec, device: DeviceSpec) -> list[Candidate]:
    """Every candidate of a variant that passes all constraints on a problem."""
    return [
        Candidate(family=problem.family, variant=spec.variant, config=config)
        for config in spec.configs()
        if spec.rejection(config, family=problem.family, shape=problem.shape, device=device) is None
    ]
