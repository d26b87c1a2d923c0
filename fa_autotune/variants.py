"""The registry of variants: (pass, variant) → template, config dataclass, search space, and what it supports.

Constraints have names and answer with a reason, so a sweep can explain itself. Estimates here are lower bounds: they
reject what cannot work before it is compiled; the compiled kernel's own figures are checked later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from math import prod

from fa_autotune.config import KernelConfig, PortableFwdConfig, TmaFwdConfig
from fa_autotune.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.errors import UnsupportedError
from fa_autotune.problem import Access, AttentionFamily, AttentionProblem, AttentionShape, DType, Pass
from fa_autotune.records import Candidate, CompileForm, Variant

MIN_TRITON = (3, 6)
MAX_REGISTERS_PER_THREAD = 255

KnobValue = int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One dimension of a search space. `ordinal` values are powers of two, searched by their exponent."""

    name: str
    values: tuple[KnobValue, ...]
    ordinal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Why a candidate can't be used: the constraint's name and a reason for people."""

    constraint: str
    reason: str


# A constraint gives a reason, or None if it holds. The shape is None where only the family is known.
Check = Callable[[AttentionFamily, AttentionShape | None, KernelConfig, DeviceSpec], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSpec:
    """One (pass, variant): how it is rendered, searched and what it serves.

    `supports(family, arch, triton_version)` gives the reason why this variant can't serve, or None.
    """

    kernel_pass: Pass
    variant: Variant
    template: str
    config_type: type[KernelConfig]
    knobs: tuple[Knob, ...]
    constraints: tuple[tuple[str, Check], ...]
    supports: Callable[[AttentionFamily, str, tuple[int, int]], str | None]

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

    def size(self) -> int:
        """Number of points in the search space, before constraints."""
        return prod(len(knob.values) for knob in self.knobs)

    def configs(self) -> Iterator[KernelConfig]:
        """Every point of the search space, before constraints."""
        names = [knob.name for knob in self.knobs]
        for values in product(*(knob.values for knob in self.knobs)):
            yield self.config_type(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]


def compile_form(family: AttentionFamily) -> CompileForm:
    """The form in which a family's kernels are compiled."""
    return CompileForm.GENERAL if family.access is Access.ANY else CompileForm.ALIGNED


def variant_spec(kernel_pass: Pass, variant: Variant) -> VariantSpec:
    """Look a registered variant up; UnsupportedError if there is none."""
    for spec in VARIANTS:
        if (spec.kernel_pass, spec.variant) == (kernel_pass, variant):
            return spec
    raise UnsupportedError(f"there is no {variant} variant of the {kernel_pass} pass")


def supported_variants(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> list[VariantSpec]:
    """The variants that can serve a family, the most specialised first."""
    served = [
        s for s in VARIANTS if s.kernel_pass is family.kernel_pass and s.supports(family, arch, triton_version) is None
    ]
    return sorted(served, key=lambda spec: spec.variant is Variant.PORTABLE)


def rejection(candidate: Candidate, shape: AttentionShape | None, device: DeviceSpec) -> Rejected | None:
    """The first constraint that a candidate breaks on a device (and a shape, if given)."""
    spec = variant_spec(candidate.family.kernel_pass, candidate.variant)
    return spec.rejection(candidate.config, family=candidate.family, shape=shape, device=device)


def head_dim_pieces(head_dim: int) -> tuple[int, ...]:
    """Power-of-two widths that cover a head dim, at least 16 each: (128,) for 128, (64, 32) for 96, (128, 64) for 192.

    Tiles are powers of two per dimension. Two pieces are used where they are narrower than the next power of two.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (head_dim - half - 1).bit_length()) if head_dim > half >= 16 else half
    return (whole,) if half + rest >= whole else (half, rest)


def padded_head_dim(head_dim: int) -> int:
    """Columns that a head dim takes in shared memory and registers."""
    return sum(head_dim_pieces(head_dim))


def default_config(spec: VariantSpec, family: AttentionFamily) -> KernelConfig:
    """An untuned config that fits 64 KB of shared memory on every supported GPU."""
    wide = max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v)) * family.dtype.itemsize
    block_m, block_n = (64, 64) if wide <= 128 else (64, 32) if wide <= 256 else (32, 16)
    stages = 2 if wide <= 256 else 1
    return spec.config_type(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4 if block_m >= 64 else 2, num_stages=stages)


def seed_configs(spec: VariantSpec, family: AttentionFamily) -> list[KernelConfig]:
    """Configs worth trying first: the default and what was found fast on Hopper, Ampere and Ada for such head dims."""
    wide = max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v)) * family.dtype.itemsize
    if wide <= 128:
        tiles = [(64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3)]
    elif wide <= 256:
        tiles = [(64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 4, 3)]
    else:
        tiles = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3)]
    seeds = [spec.config_type(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in tiles]
    return [default_config(spec, family), *seeds]


# --- constraints ------------------------------------------------------------------------------------------------------


def _threads(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    threads = config.num_warps * device.warp_size
    return None if threads <= 1024 else f"{threads} threads in a program, a GPU runs at most 1024"


def _rows_per_warp(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    need = 16 * config.num_warps
    return (
        None
        if need <= config.BLOCK_M
        else f"BLOCK_M={config.BLOCK_M} gives a warp under 16 rows; {config.num_warps} warps need {need}"
    )


def _shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    need, limit = forward_smem_bytes(family, config), device.smem_optin_bytes
    return None if need <= limit else f"needs at least {need} bytes of shared memory, {device.arch} offers {limit}"


def _registers(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    need, limit = forward_registers(family, config, device), config.maxnreg or MAX_REGISTERS_PER_THREAD
    if need > limit:
        return f"needs at least {need} registers per thread, {limit} are allowed"
    if config.maxnreg and config.maxnreg * config.num_warps * device.warp_size > device.regs_per_sm:
        return (
            f"maxnreg={config.maxnreg} for {config.num_warps} warps passes the {device.regs_per_sm} registers of an SM"
        )
    return None


def _register_cap(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    if config.maxnreg is not None and not device.arch.startswith(("sm_", INTERPRETER_ARCH)):
        return f"maxnreg={config.maxnreg} is an NVIDIA option, {device.arch} has none"
    return None


def _tile_fits_problem(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    if shape is None:
        return None
    for name, block, length in (
        ("BLOCK_M", config.BLOCK_M, shape.seqlen_q),
        ("BLOCK_N", config.BLOCK_N, shape.seqlen_k),
    ):
        if block >= 2 * max(16, length):
            return f"{name}={block} is at least twice the length {length}: half of the tile would be padding"
    return None


def _exact_lengths(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    if not config.EXACT_LENGTHS or shape is None:
        return None
    for name, block, length in (
        ("BLOCK_M", config.BLOCK_M, shape.seqlen_q),
        ("BLOCK_N", config.BLOCK_N, shape.seqlen_k),
    ):
        if length % block:
            return f"EXACT_LENGTHS needs {name}={block} to divide {length}"
    return None


def _row_sums(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    if config.ROW_SUM_LANES > 1 and config.BLOCK_N < 32:
        return f"ROW_SUM_LANES={config.ROW_SUM_LANES} needs BLOCK_N of at least 32, not {config.BLOCK_N}"
    return None


_FORWARD_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("threads", _threads),
    ("rows_per_warp", _rows_per_warp),
    ("register_cap", _register_cap),
    ("shared_memory", _shared_memory),
    ("registers", _registers),
    ("row_sums", _row_sums),
    ("exact_lengths", _exact_lengths),
    ("tile_fits_problem", _tile_fits_problem),
)


def forward_smem_bytes(family: AttentionFamily, config: KernelConfig) -> int:
    """Lower bound of the forward's shared memory: the K and V tiles in flight (and Q where a pipeline holds it)."""
    k_row, v_row = padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v)
    in_flight = max(1, config.num_stages - 1)
    return in_flight * config.BLOCK_N * (k_row + v_row) * family.dtype.itemsize if config.num_stages > 1 else 0


def forward_registers(family: AttentionFamily, config: KernelConfig, device: DeviceSpec) -> int:
    """Lower bound of the forward's registers per thread: the accumulator, the scores, and P as the next operand."""
    threads = config.num_warps * device.warp_size
    scores = config.BLOCK_M * config.BLOCK_N
    words = config.BLOCK_M * padded_head_dim(family.head_dim_v) + scores + scores * family.dtype.itemsize // 4
    return words // threads


# --- what serves what -------------------------------------------------------------------------------------------------


def _portable_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    if triton_version < MIN_TRITON:
        return f"needs Triton {'.'.join(map(str, MIN_TRITON))} or newer, not {'.'.join(map(str, triton_version))}"
    if arch.startswith("sm_"):
        capability = int(arch.removeprefix("sm_"))
        if capability < 75:
            return f"Triton compiles for sm_75 and newer, not {arch}"
        if capability < 80 and family.dtype is DType.BFLOAT16:
            return f"bfloat16 matrix products need sm_80, not {arch}; use float16"
        return None
    return (
        None if arch.startswith("gfx9") or arch == INTERPRETER_ARCH else f"{arch} is not a GPU that Triton compiles for"
    )


def _tma_supports(family: AttentionFamily, arch: str, triton_version: tuple[int, int]) -> str | None:
    if arch != INTERPRETER_ARCH and not (arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90):
        return f"tensor descriptors need sm_90 or newer, not {arch}"
    if family.access is not Access.TMA:
        return f"tensor descriptors can't read these pointers and strides (access={family.access.value})"
    return _portable_supports(family, arch, triton_version)


_FORWARD_KNOBS = (
    Knob(name="BLOCK_M", values=(16, 32, 64, 128, 256), ordinal=True),
    Knob(name="BLOCK_N", values=(16, 32, 64, 128, 256), ordinal=True),
    Knob(name="num_warps", values=(1, 2, 4, 8), ordinal=True),
    Knob(name="num_stages", values=(1, 2, 3, 4)),
    Knob(name="maxnreg", values=(None, 96, 128, 168)),
    Knob(name="HEADS_PER_GROUP", values=(1, 4, 8, 16), ordinal=True),
    Knob(name="ROW_SUM_LANES", values=(1, 8)),
    Knob(name="EXACT_LENGTHS", values=(False, True)),
)

VARIANTS: tuple[VariantSpec, ...] = (
    VariantSpec(
        kernel_pass=Pass.FWD,
        variant=Variant.PORTABLE,
        template="fwd_portable.py.jinja",
        config_type=PortableFwdConfig,
        knobs=_FORWARD_KNOBS,
        constraints=_FORWARD_CONSTRAINTS,
        supports=_portable_supports,
    ),
    VariantSpec(
        kernel_pass=Pass.FWD,
        variant=Variant.TMA,
        template="fwd_tma.py.jinja",
        config_type=TmaFwdConfig,
        knobs=(*_FORWARD_KNOBS, Knob(name="STORE_BY_TMA", values=(False, True))),
        constraints=_FORWARD_CONSTRAINTS,
        supports=_tma_supports,
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
