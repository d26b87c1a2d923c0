"""The registry of variants: (pass, variant) → template, config dataclass, search space, and what it supports.

Constraints have names and answer with a reason, so a sweep can explain itself. Estimates here are lower bounds: they
reject what cannot work before it is compiled; the compiled kernel's own figures are checked later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from fa_autotune.config import KernelConfig, PortableFwdConfig, TmaFwdConfig
from fa_autotune.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.errors import UnsupportedError
from fa_autotune.problem import Access, AttentionFamily, AttentionProblem, AttentionShape, DType, Pass
from fa_autotune.records import Candidate, CompileForm, Variant

MIN_TRITON = (3, 6)
MAX_REGISTERS_PER_THREAD = 255
_DEFAULT_SMEM_BYTES = 62 * 1024  # 64 KB less what the compiler adds: barriers, layout changes

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

    def domain(self, family: AttentionFamily, device: DeviceSpec) -> tuple[Knob, ...]:
        """The knobs with the values that can ever pass on a family and device: what a search should draw from."""
        base = default_config(self, family, device.arch)

        def usable(knob: Knob, value: KnobValue) -> bool:
            config = replace(base, **{knob.name: value})  # type: ignore[arg-type]
            return all(check(family, None, config, device) is None for check in _ONE_KNOB_CHECKS)

        return tuple(replace(knob, values=tuple(v for v in knob.values if usable(knob, v))) for knob in self.knobs)

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


def head_dim_pieces(head_dim: int, widest: int = 256) -> tuple[int, ...]:
    """Power-of-two widths that cover a head dim, 16 to `widest` each: (128,) for 128, (64, 32) for 96.

    Tiles are powers of two per dimension. What is left after pieces of the widest is covered by two where they are
    narrower than the next power of two.
    """
    full, left = divmod(head_dim, widest)
    pieces = (widest,) * full
    if not left:
        return pieces
    whole = max(16, 1 << (left - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << (left - half - 1).bit_length()) if left > half >= 16 else half
    return (*pieces, whole) if half + rest >= whole else (*pieces, half, rest)


def padded_head_dim(head_dim: int, widest: int = 256) -> int:
    """Columns that a head dim takes in shared memory and registers."""
    return sum(head_dim_pieces(head_dim, widest))


def multiplies_by_fma(family: AttentionFamily, arch: str) -> bool:
    """True where Triton computes matrix products on the FMA units: fp32 in ieee precision, and all of sm_75."""
    return family.dtype is DType.FLOAT32 or arch == "sm_75"


def multiplies_by_warp(arch: str) -> bool:
    """True where a matrix instruction belongs to one warp (mma.sync), not to four (wgmma) or an SM (tcgen05)."""
    return arch in ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")


def default_config(spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """An untuned config that fits 64 KB of shared memory."""
    if multiplies_by_fma(family, arch):
        return spec.config_type(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1, HEAD_DIM_PIECE=_piece(family, 32))
    widest = 32 if family.access is Access.ANY else 64  # a pointer for each element leaves fewer registers
    piece = _piece(family, 64 if multiplies_by_warp(arch) else 256)
    for num_stages, block_n in product((2, 1), (64, 32, 16)):
        config = spec.config_type(BLOCK_M=64, BLOCK_N=block_n, num_warps=4, num_stages=num_stages, HEAD_DIM_PIECE=piece)
        if block_n <= widest and whole_smem_bytes(family, config) <= _DEFAULT_SMEM_BYTES:
            return config
    raise AssertionError(f"no default tile fits {family}")  # 64×16 in one stage fits head dim 256


def seed_configs(spec: VariantSpec, family: AttentionFamily, arch: str) -> list[KernelConfig]:
    """Configs worth trying first: the default, and tiles that were fast for such head dims."""
    wide = 2 * max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v))
    piece = 256
    if multiplies_by_fma(family, arch):
        piece = 32
        tiles = [(32, 32, 8, 1), (32, 16, 8, 1), (64, 32, 8, 1), (16, 16, 4, 1)]
    elif multiplies_by_warp(arch):
        piece = 64
        tiles = [(64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2), (128, 32, 4, 2), (64, 32, 4, 3)]
    elif wide <= 128:
        tiles = [(64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2), (128, 64, 8, 3)]
    elif wide <= 256:
        tiles = [(64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 4, 3)]
    else:
        tiles = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3)]
    seeds = [
        spec.config_type(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s, HEAD_DIM_PIECE=_piece(family, piece))
        for m, n, w, s in tiles
    ]
    return [default_config(spec, family, arch), *seeds]


def _piece(family: AttentionFamily, widest: int) -> int:
    """The HEAD_DIM_PIECE that stands for `widest`: 256 where it cuts both head dims into the same pieces."""
    dims = (family.head_dim, family.head_dim_v)
    return 256 if all(head_dim_pieces(dim, widest) == head_dim_pieces(dim) for dim in dims) else widest


# --- constraints ------------------------------------------------------------------------------------------------------


def _threads(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    threads = config.num_warps * device.warp_size
    return None if threads <= 1024 else f"{threads} threads in a program, a GPU runs at most 1024"


def _rows_per_warp(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    per_warp = (
        4 if multiplies_by_fma(family, device.arch) else 16
    )  # a matrix instruction covers 16 rows; FMA units any number
    need = per_warp * config.num_warps
    if need <= config.BLOCK_M:
        return None
    return f"BLOCK_M={config.BLOCK_M} gives a warp under {per_warp} rows; {config.num_warps} warps need {need}"


def _head_dim_piece(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    narrow_products = multiplies_by_warp(device.arch) or multiplies_by_fma(family, device.arch)
    if config.HEAD_DIM_PIECE < 128 and not narrow_products:
        return f"HEAD_DIM_PIECE={config.HEAD_DIM_PIECE} would leave {device.arch}'s wide matrix instructions half empty"
    if _piece(family, config.HEAD_DIM_PIECE) != config.HEAD_DIM_PIECE:
        return (
            f"HEAD_DIM_PIECE={config.HEAD_DIM_PIECE} cuts {family.label} into the same pieces as 256: the same kernel"
        )
    return None


def _score_rows(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    widest = max(head_dim_pieces(family.head_dim_v, config.HEAD_DIM_PIECE))
    if multiplies_by_warp(device.arch) and config.num_warps > 1 and widest > config.BLOCK_M:
        return (
            f"an output tile of {config.BLOCK_M} rows and {widest} columns makes Triton split columns over the warps, "
            "which then share rows of scores; a smaller HEAD_DIM_PIECE or a larger BLOCK_M avoids it"
        )
    return None


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


# Checks that look at one knob only: a value that fails them never passes on that family and device.
_ONE_KNOB_CHECKS: tuple[Check, ...] = (_register_cap, _head_dim_piece)

_FORWARD_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("threads", _threads),
    ("rows_per_warp", _rows_per_warp),
    ("register_cap", _register_cap),
    ("head_dim_piece", _head_dim_piece),
    ("score_rows", _score_rows),
    ("shared_memory", _shared_memory),
    ("registers", _registers),
    ("row_sums", _row_sums),
    ("exact_lengths", _exact_lengths),
    ("tile_fits_problem", _tile_fits_problem),
)


def forward_smem_bytes(family: AttentionFamily, config: KernelConfig) -> int:
    """Lower bound of the forward's shared memory: the K and V tiles in flight (and Q where a pipeline holds it)."""
    in_flight = config.num_stages - 1
    return in_flight * config.BLOCK_N * _row_bytes(family, config)


def whole_smem_bytes(family: AttentionFamily, config: KernelConfig) -> int:
    """What the forward takes where everything lies in shared memory (Hopper): Q, and K and V of every stage."""
    q_bytes = config.BLOCK_M * padded_head_dim(family.head_dim, config.HEAD_DIM_PIECE) * family.dtype.itemsize
    return q_bytes + config.num_stages * config.BLOCK_N * _row_bytes(family, config)


def _row_bytes(family: AttentionFamily, config: KernelConfig) -> int:
    """Bytes of one row of K and one of V, padded."""
    columns = sum(padded_head_dim(dim, config.HEAD_DIM_PIECE) for dim in (family.head_dim, family.head_dim_v))
    return columns * family.dtype.itemsize


def forward_registers(family: AttentionFamily, config: KernelConfig, device: DeviceSpec) -> int:
    """Lower bound of the forward's registers per thread: the accumulator, the scores, and P as the next operand."""
    threads = config.num_warps * device.warp_size
    scores = config.BLOCK_M * config.BLOCK_N
    words = (
        config.BLOCK_M * padded_head_dim(family.head_dim_v, config.HEAD_DIM_PIECE)
        + scores
        + scores * family.dtype.itemsize // 4
    )
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
    if family.dtype is DType.FLOAT32:
        return "float32 products run on the FMA units, where tiles from descriptors spill; the portable variant serves"
    return _portable_supports(family, arch, triton_version)


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
