"""The registry of variants: (pass, variant) → template, config dataclass, search space, and what it supports.

What a config must keep is in `constraints`, and what a variant serves in `support`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from fa_autotune.errors import UnsupportedError
from fa_autotune.problem.device import DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import (
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
from fa_autotune.space.constraints import (
    BACKWARD_CONSTRAINTS,
    DELTA_CONSTRAINTS,
    FORWARD_CONSTRAINTS,
    FUSED_CONSTRAINTS,
    HOPPER_CONSTRAINTS,
    POSTPROCESS_CONSTRAINTS,
    PREPROCESS_CONSTRAINTS,
    WIDE_CONSTRAINTS,
    Check,
    Rejected,
    ShapeNeeds,
    shape_needs,
)
from fa_autotune.space.support import (
    beside_fused_supports,
    fused_supports,
    hopper_forward_supports,
    portable_supports,
    tma_backward_supports,
    tma_supports,
    wide_supports,
)

_MOST_SPECIALISED_FIRST = (Variant.HOPPER_WIDE, Variant.HOPPER_WS, Variant.TMA, Variant.PORTABLE)

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

    def shape_needs(
        self, config: KernelConfig, *, family: AttentionFamily, device: DeviceSpec
    ) -> ShapeNeeds | Rejected:
        """What a config asks of a shape, or what it breaks on any: `rejection` of every shape at once."""
        rejected = self.rejection(config, family=family, shape=None, device=device)
        return rejected or shape_needs(self.constraints, family, config)

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
