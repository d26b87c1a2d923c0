"""Named constraints on candidates: each answers with a reason, so that a sweep can explain itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fa_autotune.problem.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.space.config import (
    ROWS_PER_WARPGROUP,
    BackwardConfig,
    BwdDeltaConfig,
    ForwardConfig,
    FusedConfig,
    HopperWsBwdConfig,
    HopperWsFwdConfig,
    KernelConfig,
    Schedule,
    TiledConfig,
)
from fa_autotune.space.estimates import (
    WIDEST_PIECE,
    backward_registers,
    canonical_piece,
    consumer_registers,
    forward_registers,
    fused_smem_bytes,
    head_dim_pieces,
    hopper_smem_bytes,
    in_flight_smem_bytes,
    multiplies_by_fma,
    multiplies_by_warp,
    operand_bytes,
    out_fits_query_rows,
    padded_head_dim,
    part_columns,
    splits_outputs,
)
from fa_autotune.space.workspace import NARROW_HEAD_DIM, fused_dq_acc_size, fused_tile, packed_statistics_size

MAX_REGISTERS_PER_THREAD = 255
WIDEST_TOGETHER = 128  # head dims of dk and dv tiles that one program holds well
MAX_DESCRIPTOR_EXTENT = 2**31 - 1
RESERVED_SMEM_BYTES = 1024  # of each program, by CUDA
OPERAND_OVERHEAD_BYTES = 2048  # lse, delta and what changes of layout take beside a backward's operands
# What `hopper_ws` kernels leave to all but accumulators, scores and P: addresses, statistics, masks. Less spills.
OTHER_REGISTERS = 32
CONSUMER_REGISTERS = {1: 255, 2: 240, 3: 160}  # per thread; the producer has what is left of the SM's
MIN_SCORES_PER_WARP = 64  # half of a matrix instruction's smallest tile: wide head dims have other work for a warp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Why a candidate can't be used: the constraint's name and a reason for people."""

    constraint: str
    reason: str


# A constraint gives a reason, or None if it holds. The config is of the type that the constrained variant takes; the
# shape is None where only the family is known.
BlockedConfig = TiledConfig | HopperWsFwdConfig | FusedConfig | BwdDeltaConfig  # all that take rows in blocks
Check = Callable[[AttentionFamily, AttentionShape | None, Any, DeviceSpec], str | None]


# --- constraints on any kernel ----------------------------------------------------------------------------------------


def threads(
    family: AttentionFamily, shape: AttentionShape | None, config: KernelConfig, device: DeviceSpec
) -> str | None:
    """A program is one block of threads."""
    count = config.num_warps * device.warp_size
    return None if count <= 1024 else f"{count} threads in a program, a GPU runs at most 1024"


def tile_fits_problem(
    family: AttentionFamily, shape: AttentionShape | None, config: BlockedConfig, device: DeviceSpec
) -> str | None:
    """A tile is not mostly padding."""
    for name, block, length in _blocks_and_lengths(family, shape, config):
        if length < _least_length(block):
            return f"{name}={block} is at least twice the length {length}: half of the tile would be padding"
    return None


def _least_length(block: int) -> int:
    """More than half a block, but for blocks that can't be smaller."""
    return block // 2 + 1 if block >= 32 else 1


def _blocks_and_lengths(
    family: AttentionFamily, shape: AttentionShape | None, config: BlockedConfig
) -> list[tuple[str, int, int]]:
    if shape is None:
        return []
    return list(zip(("BLOCK_M", "BLOCK_N"), _blocks(family, config), (shape.seqlen_q, shape.seqlen_k), strict=True))


def _blocks(family: AttentionFamily, config: BlockedConfig) -> tuple[int, int]:
    """Rows of queries and of keys in a tile; 1 where a kernel has none."""
    if isinstance(config, FusedConfig):
        tile = fused_tile(family)
        return tile.block_m, tile.block_n
    return config.BLOCK_M, 1 if isinstance(config, BwdDeltaConfig) else config.BLOCK_N


# --- constraints on kernels that loop over tiles ----------------------------------------------------------------------


def register_cap(
    family: AttentionFamily, shape: AttentionShape | None, config: TiledConfig, device: DeviceSpec
) -> str | None:
    """Only NVIDIA's assembler takes a cap."""
    if config.maxnreg is not None and not device.arch.startswith(("sm_", INTERPRETER_ARCH)):
        return f"maxnreg={config.maxnreg} is an NVIDIA option, {device.arch} has none"
    return None


def head_dim_piece(
    family: AttentionFamily, shape: AttentionShape | None, config: TiledConfig, device: DeviceSpec
) -> str | None:
    """Pieces fill the matrix instructions, and each way to cut the head dims has one name."""
    narrow_products = multiplies_by_warp(device.arch) or multiplies_by_fma(family, device.arch)
    least, piece = 64 if family.tf32 else 128, config.HEAD_DIM_PIECE  # as many bytes
    if piece < least and not narrow_products:
        return f"HEAD_DIM_PIECE={piece} would leave {device.arch}'s wide matrix instructions half empty"
    if canonical_piece(family, config.HEAD_DIM_PIECE) != config.HEAD_DIM_PIECE:
        return (
            f"HEAD_DIM_PIECE={config.HEAD_DIM_PIECE} cuts {family.label} into the same pieces as 256: the same kernel"
        )
    return None


def shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: TiledConfig, device: DeviceSpec
) -> str | None:
    """The tiles in flight fit."""
    need, limit = in_flight_smem_bytes(family, config), device.smem_optin_bytes
    return None if need <= limit else f"needs at least {need} bytes of shared memory, {device.arch} offers {limit}"


def exact_lengths(
    family: AttentionFamily, shape: AttentionShape | None, config: TiledConfig | FusedConfig, device: DeviceSpec
) -> str | None:
    """A kernel without ragged masking gets whole blocks."""
    if not config.EXACT_LENGTHS:
        return None
    if family.varlen:
        return "EXACT_LENGTHS needs lengths that blocks divide, a varlen family has any"
    for name, block, length in _blocks_and_lengths(family, shape, config):
        if length % block:
            return f"EXACT_LENGTHS needs {name}={block} to divide {length}"
    return None


def _registers_suffice(need: int, config: TiledConfig, device: DeviceSpec) -> str | None:
    limit = config.maxnreg or MAX_REGISTERS_PER_THREAD
    if need > limit:
        return f"needs at least {need} registers per thread, {limit} are allowed"
    if config.maxnreg and config.maxnreg * config.num_warps * device.warp_size > device.regs_per_sm:
        return (
            f"maxnreg={config.maxnreg} for {config.num_warps} warps passes the {device.regs_per_sm} registers of an SM"
        )
    return None


# --- constraints on the forward ---------------------------------------------------------------------------------------


def rows_per_warp(
    family: AttentionFamily, shape: AttentionShape | None, config: ForwardConfig, device: DeviceSpec
) -> str | None:
    """Warps split the query rows, so that the softmax needs no merge."""
    # A matrix instruction covers 16 rows, FMA units any number.
    per_warp = 4 if multiplies_by_fma(family, device.arch) else 16
    need = per_warp * config.num_warps
    if need <= config.BLOCK_M:
        return None
    return f"BLOCK_M={config.BLOCK_M} gives a warp under {per_warp} rows; {config.num_warps} warps need {need}"


def score_rows(
    family: AttentionFamily, shape: AttentionShape | None, config: ForwardConfig, device: DeviceSpec
) -> str | None:
    """Triton does not split the columns of scores over the warps."""
    widest = max(head_dim_pieces(part_columns(family), config.HEAD_DIM_PIECE))
    if multiplies_by_fma(family, device.arch):
        return None
    if multiplies_by_warp(device.arch) and config.num_warps > 1 and widest > config.BLOCK_M:
        return (
            f"an output tile of {config.BLOCK_M} rows and {widest} columns makes Triton split columns over the warps, "
            "which then share rows of scores; a smaller HEAD_DIM_PIECE or a larger BLOCK_M avoids it"
        )
    return None


def registers(
    family: AttentionFamily, shape: AttentionShape | None, config: ForwardConfig, device: DeviceSpec
) -> str | None:
    """What the loop holds fits the register file."""
    return _registers_suffice(forward_registers(family, config, device), config, device)


def row_sums(
    family: AttentionFamily, shape: AttentionShape | None, config: ForwardConfig, device: DeviceSpec
) -> str | None:
    """Partial row sums have keys to share out."""
    if config.ROW_SUM_LANES > 1 and config.BLOCK_N < 32:
        return f"ROW_SUM_LANES={config.ROW_SUM_LANES} needs BLOCK_N of at least 32, not {config.BLOCK_N}"
    return None


# --- constraints on the backward --------------------------------------------------------------------------------------


def tile_per_warp(
    family: AttentionFamily, shape: AttentionShape | None, config: BackwardConfig, device: DeviceSpec
) -> str | None:
    """Every warp has a part of the scores; nothing is reduced along them, so warps may split rows or columns."""
    least, has = min_scores_per_warp(family), config.BLOCK_M * config.BLOCK_N
    need = least * config.num_warps
    if need <= has:
        return None
    return f"{has} scores in a tile give a warp under {least}; {config.num_warps} warps need {need}"


def min_scores_per_warp(family: AttentionFamily) -> int:
    """Half as many where the gradients of a tile take eight warps to hold."""
    is_large = family.tf32 or max(family.head_dim, family.head_dim_v) > WIDEST_PIECE
    return MIN_SCORES_PER_WARP // (2 if is_large else 1)


def registers_of_gradients(
    family: AttentionFamily, shape: AttentionShape | None, config: BackwardConfig, device: DeviceSpec
) -> str | None:
    """What the loop holds fits the register file."""
    return _registers_suffice(backward_registers(family, config, device), config, device)


def operands_in_shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: BackwardConfig, device: DeviceSpec
) -> str | None:
    """Above WIDEST_PIECE columns the operands of a tile's products do not stay in registers."""
    if max(family.head_dim, family.head_dim_v) <= WIDEST_PIECE or not device.arch.startswith("sm_"):
        return None
    need, limit = operand_bytes(family, config) + OPERAND_OVERHEAD_BYTES, device.smem_optin_bytes
    return None if need <= limit else f"its operands take {need} bytes of shared memory, {device.arch} offers {limit}"


def split_outputs(
    family: AttentionFamily, shape: AttentionShape | None, config: BackwardConfig, device: DeviceSpec
) -> str | None:
    """dk and dv are computed apart only where a tile of both is too much for a program."""
    widest = max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v))
    if splits_outputs(config) and widest <= WIDEST_TOGETHER:
        return f"SPLIT_OUTPUTS computes P twice; up to head_dim {WIDEST_TOGETHER} dk and dv fit one program"
    return None


def rows_in_registers(
    family: AttentionFamily, shape: AttentionShape | None, config: BwdDeltaConfig, device: DeviceSpec
) -> str | None:
    """The tiles of out and do give every thread a value and fit the register file."""
    count = config.num_warps * device.warp_size
    values = config.BLOCK_M * max(head_dim_pieces(family.head_dim_v))
    if values < count:
        return f"BLOCK_M={config.BLOCK_M} gives {values} values to {count} threads"
    need = 2 * values * family.dtype.itemsize // 4 // count
    if need > MAX_REGISTERS_PER_THREAD:
        return f"needs at least {need} registers per thread, {MAX_REGISTERS_PER_THREAD} are allowed"
    return None


# --- constraints on hopper_ws -----------------------------------------------------------------------------------------


def warpgroups(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """One warpgroup loads for itself; a producer pays where two or more consume."""
    if (config.SCHEDULE is Schedule.SINGLE) != (config.CONSUMERS == 1):
        return (
            f"SCHEDULE={config.SCHEDULE} does not go with CONSUMERS={config.CONSUMERS}: single has 1, the others more"
        )
    return None


def third_consumer(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """Three consumers have 160 registers per thread: enough for narrow accumulators."""
    if config.CONSUMERS == 3 and padded_head_dim(family.head_dim_v) > NARROW_HEAD_DIM:
        return (
            f"CONSUMERS=3 leaves registers for head_dim_v up to {NARROW_HEAD_DIM}, not {family.head_dim_v}: with "
            "blocks of keys small enough to fit beside more it was slower than 2"
        )
    if config.CONSUMERS == 3 and (family.has_mask or family.dropout):
        return "CONSUMERS=3 leaves no registers for a mask or for random bits"
    return None


def stages_in_flight(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """More stages than hide the loads' latency only take shared memory."""
    widest = max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v))
    if config.num_stages > 3 and widest > NARROW_HEAD_DIM:
        return (
            f"num_stages={config.num_stages} is for head dims up to {NARROW_HEAD_DIM}: wider blocks take longer to use"
        )
    return None


def packed_probabilities(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """Unpacked P is for kernels with one loop, which the compiler leaves paired in registers by itself."""
    if family.bounded_right and not config.PACK_P:
        return (
            "PACK_P=False makes the compiler take P apart between the loops of a causal kernel, half a register a time"
        )
    return None


def packed_across_tiles(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """The same where P crosses from one tile into the next."""
    if config.SCHEDULE is Schedule.PIPELINED and not config.PACK_P:
        return "PACK_P=False makes the compiler take P apart between the loops of a pipelined kernel"
    return None


def ping_pong(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """It takes two."""
    if config.PING_PONG and config.SCHEDULE is Schedule.SINGLE:
        return "PING_PONG needs two warpgroups that consume"
    return None


def own_out(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """Query rows that nobody waits for can hold O, and a pipelined program has rows for O in any case."""
    if config.OWN_OUT and config.SCHEDULE is not Schedule.PERSISTENT:
        return f"OWN_OUT is for SCHEDULE=persistent, whose next tile waits for the query rows, not {config.SCHEDULE}"
    if config.OWN_OUT and not out_fits_query_rows(family):
        return f"OWN_OUT changes nothing: {family.head_dim_v} columns of O never fit query rows of {family.head_dim}"
    return None


def programs_per_sm(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """A warpgroup that does everything itself has another program on its SM to run beside it."""
    need = hopper_smem_bytes(family, config) + RESERVED_SMEM_BYTES
    if config.SCHEDULE is Schedule.SINGLE and 2 * need > device.smem_per_sm_bytes:
        return (
            f"SCHEDULE=single needs two programs on an SM to overlap; {need} bytes of shared memory each pass the "
            f"{device.smem_per_sm_bytes} that {device.arch} has"
        )
    return None


def hopper_shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """Query rows and ring fit."""
    need, limit = hopper_smem_bytes(family, config), device.smem_optin_bytes
    return None if need <= limit else f"needs {need} bytes of shared memory, {device.arch} offers {limit}"


def hopper_registers(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """A consumer's accumulators, scores and P fit what setmaxnreg gives its threads, and leave it some."""
    if holds_tile(family, config):
        return None
    what = "accumulators, scores, P and a mask" if family.has_mask else "accumulators, scores and P"
    return (
        f"{what} take {consumer_registers(family, config)} registers per thread, CONSUMERS={config.CONSUMERS} leaves "
        f"{_left_to_tile(config)}"
    )


def holds_tile(family: AttentionFamily, config: HopperWsFwdConfig) -> bool:
    """Whether a consumer's threads have the registers that a tile takes."""
    return consumer_registers(family, config) <= _left_to_tile(config)


def _left_to_tile(config: HopperWsFwdConfig) -> int:
    return CONSUMER_REGISTERS[config.CONSUMERS] - OTHER_REGISTERS


# --- constraints on the fused backward --------------------------------------------------------------------------------


def diagonal_first(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """Only a diagonal can be visited first, and not where a program visits each tile in several heads: its neighbours
    then read the same rows so much later that the L2 cache has lost them (28 measurements on an H200: 1.2 to 1.6 ×).
    """
    if config.DIAGONAL_FIRST and not (family.bounded_right or family.bounded_left):
        return "DIAGONAL_FIRST needs a diagonal, a full family has none"
    if config.DIAGONAL_FIRST and shape is not None and shape.gqa_group_size > 1:
        return f"DIAGONAL_FIRST makes {shape.gqa_group_size} query heads of a kv head miss the L2 cache"
    return None


def scores_early(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsBwdConfig, device: DeviceSpec
) -> str | None:
    """Scores beside dS need registers that narrow head dims (twice the rows in a tile), caps and dropout don't have."""
    rows = fused_tile(family).block_m
    if config.SCORES_EARLY and rows > ROWS_PER_WARPGROUP:
        return f"SCORES_EARLY makes a tile of {rows} query rows spill; it is for head dims above {NARROW_HEAD_DIM}"
    if config.SCORES_EARLY and (family.softcap or family.dropout):
        return f"SCORES_EARLY makes kernels of {'capped scores' if family.softcap else 'dropout'} spill"
    return None


def exact_cap(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """Where a branch for masks separates tanh from the exponentials, the compiler holds fewer values at a time; without
    it capped kernels spill in many combinations, and no mask at all gains them next to nothing."""
    if config.EXACT_LENGTHS and (family.softcap or family.dropout):
        return f"EXACT_LENGTHS makes kernels of {'capped scores' if family.softcap else 'dropout'} spill"
    return None


def addressable_dq(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """Descriptors count rows in 32 bits."""
    rows, numbers = _dq_extents(family, shape) if shape else (0, 0)
    if rows > MAX_DESCRIPTOR_EXTENT:
        return f"dq_acc has {rows} rows, a descriptor addresses {MAX_DESCRIPTOR_EXTENT}: split the batch"
    if numbers > MAX_DESCRIPTOR_EXTENT:
        return f"{numbers} lse and delta in a row, a descriptor addresses {MAX_DESCRIPTOR_EXTENT}: split the batch"
    return None


def _dq_extents(family: AttentionFamily, shape: AttentionShape) -> tuple[int, int]:
    """Rows of dq_acc; and lse and delta of packed sequences, which lie in one for a descriptor."""
    rows, _ = fused_dq_acc_size(family, shape)
    if not family.varlen:
        return rows, 0
    total_q = shape.batch_size * shape.seqlen_q
    return rows, prod(packed_statistics_size(shape.num_q_heads, shape.batch_size, total_q))


def fused_shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """The tiles of every stage fit."""
    need, limit = fused_smem_bytes(family, config), device.smem_optin_bytes
    return None if need <= limit else f"needs {need} bytes of shared memory, {device.arch} offers {limit}"


# Constraints that look at one knob only: a value that fails them never passes on that family and device.
ONE_KNOB_CHECKS: tuple[Check, ...] = (
    register_cap,
    head_dim_piece,
    split_outputs,
    diagonal_first,
    scores_early,
    exact_cap,
)

FORWARD_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("threads", threads),
    ("rows_per_warp", rows_per_warp),
    ("register_cap", register_cap),
    ("head_dim_piece", head_dim_piece),
    ("score_rows", score_rows),
    ("shared_memory", shared_memory),
    ("registers", registers),
    ("row_sums", row_sums),
    ("exact_lengths", exact_lengths),
    ("tile_fits_problem", tile_fits_problem),
)

HOPPER_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("warpgroups", warpgroups),
    ("third_consumer", third_consumer),
    ("ping_pong", ping_pong),
    ("stages_in_flight", stages_in_flight),
    ("packed_probabilities", packed_probabilities),
    ("packed_across_tiles", packed_across_tiles),
    ("own_out", own_out),
    ("shared_memory", hopper_shared_memory),
    ("programs_per_sm", programs_per_sm),
    ("registers", hopper_registers),
    ("exact_lengths", exact_lengths),
    ("tile_fits_problem", tile_fits_problem),
)

BACKWARD_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("threads", threads),
    ("tile_per_warp", tile_per_warp),
    ("register_cap", register_cap),
    ("head_dim_piece", head_dim_piece),
    ("shared_memory", shared_memory),
    ("operands", operands_in_shared_memory),
    ("split_outputs", split_outputs),
    ("registers", registers_of_gradients),
    ("exact_lengths", exact_lengths),
    ("tile_fits_problem", tile_fits_problem),
)

DELTA_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("threads", threads),
    ("rows_in_registers", rows_in_registers),
    ("tile_fits_problem", tile_fits_problem),
)

# Its rows are padded to whole blocks whatever their number.
PREPROCESS_CONSTRAINTS = DELTA_CONSTRAINTS[:2]

# Short lengths may run in this tile, however much of it is padding: there is no smaller one.
FUSED_CONSTRAINTS: tuple[tuple[str, Check], ...] = (
    ("diagonal_first", diagonal_first),
    ("scores_early", scores_early),
    ("exact_cap", exact_cap),
    ("shared_memory", fused_shared_memory),
    ("addressable_dq", addressable_dq),
    ("exact_lengths", exact_lengths),
)

WIDE_CONSTRAINTS = tuple(pair for pair in FUSED_CONSTRAINTS if pair[1] is not scores_early)

POSTPROCESS_CONSTRAINTS: tuple[tuple[str, Check], ...] = (("threads", threads),)


# --- what is left to ask of a shape -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeNeeds:
    """What constraints ask of a shape, in numbers, of a config that passes them on its family and device: what they
    answer to shapes, without reasons, for those who ask of many.

    `least_q`, `least_k`: the shortest lengths. `block_q`, `block_k`: what divides them. `ungrouped`: each query head
    has its own kv head. `dq_family`: the family whose dq descriptors must address.
    """

    least_q: int = 1
    least_k: int = 1
    block_q: int = 1
    block_k: int = 1
    ungrouped: bool = False
    dq_family: AttentionFamily | None = None

    def are_met_by(self, shape: AttentionShape) -> bool:
        """Whether a config may run on a shape."""
        seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
        return (
            seqlen_q >= self.least_q
            and seqlen_k >= self.least_k
            and not seqlen_q % self.block_q
            and not seqlen_k % self.block_k
            and (not self.ungrouped or shape.num_q_heads == shape.num_kv_heads)
            and (self.dq_family is None or max(_dq_extents(self.dq_family, shape)) <= MAX_DESCRIPTOR_EXTENT)
        )


def shape_needs(constraints: Sequence[tuple[str, Check]], family: AttentionFamily, config: Any) -> ShapeNeeds:
    """What is left to ask of a shape of a config that keeps constraints where only the family is known."""
    checks = {check for _, check in constraints}
    needs: dict[str, Any] = {}
    if tile_fits_problem in checks:
        needs["least_q"], needs["least_k"] = map(_least_length, _blocks(family, config))
    if exact_lengths in checks and config.EXACT_LENGTHS:
        needs["block_q"], needs["block_k"] = _blocks(family, config)
    if diagonal_first in checks:
        needs["ungrouped"] = config.DIAGONAL_FIRST
    if addressable_dq in checks:
        needs["dq_family"] = family
    return ShapeNeeds(**needs)
