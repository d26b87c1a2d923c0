"""Named constraints on candidates, and the estimates that they rest on.

A constraint answers with a reason, so a sweep can explain itself. Estimates are lower bounds: they reject what cannot
work before it is compiled; the compiled kernel's own figures are checked later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa_autotune.config import (
    ROWS_PER_WARPGROUP,
    BackwardConfig,
    BwdDeltaConfig,
    ForwardConfig,
    FusedConfig,
    HopperWideBwdConfig,
    HopperWsBwdConfig,
    HopperWsFwdConfig,
    KernelConfig,
    Schedule,
    TiledConfig,
    TmaBwdDkDvConfig,
    UntiledConfig,
)
from fa_autotune.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.fused_workspace import NARROW_HEAD_DIM, PART_COLUMNS, PART_ROWS, dq_acc_size, fused_tile
from fa_autotune.problem import AttentionFamily, AttentionShape, DType, Pass

MAX_REGISTERS_PER_THREAD = 255
WIDEST_TOGETHER = 128  # head dims of dk and dv tiles that one program holds well
BARRIER_BYTES = 640  # at most, of a `hopper_ws` kernel, forward or backward
WIDE_BARRIER_BYTES = 896  # of a `hopper_wide` kernel
MAX_DESCRIPTOR_EXTENT = 2**31 - 1
RESERVED_SMEM_BYTES = 1024  # of each program, by CUDA
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


# --- tiles ------------------------------------------------------------------------------------------------------------


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


def multiplies_in_tensor_memory(arch: str) -> bool:
    """True where accumulators lie in tensor memory (tcgen05), so that they may cost no registers."""
    return arch in ("sm_100", "sm_101", "sm_103", "sm_110")


def canonical_piece(family: AttentionFamily, widest: int) -> int:
    """The HEAD_DIM_PIECE that stands for `widest`: 256 where it cuts both head dims into the same pieces."""
    dims = (family.head_dim, family.head_dim_v)
    return 256 if all(head_dim_pieces(dim, widest) == head_dim_pieces(dim) for dim in dims) else widest


def owned_and_streamed(family: AttentionFamily, config: TiledConfig) -> tuple[int, int]:
    """Rows of the tiles that a program keeps, and of those that its loop brings in: queries and keys or the reverse."""
    if family.kernel_pass is Pass.BWD_DKDV:
        return config.BLOCK_N, config.BLOCK_M
    return config.BLOCK_M, config.BLOCK_N


def in_flight_smem_bytes(family: AttentionFamily, config: TiledConfig) -> int:
    """Lower bound of shared memory: the pairs of tiles (K and V, or Q and dO) that a pipeline has in flight."""
    _, streamed = owned_and_streamed(family, config)
    return (config.num_stages - 1) * streamed * _row_bytes(family, config)


def whole_smem_bytes(family: AttentionFamily, config: KernelConfig) -> int:
    """What a kernel takes where every tile that it loads lies in shared memory (Hopper): its own and those of every
    stage."""
    if isinstance(config, UntiledConfig):
        return 0
    if isinstance(config, FusedConfig):
        return fused_smem_bytes(family, config)
    if isinstance(config, HopperWsFwdConfig):
        return hopper_smem_bytes(family, config)
    owned, streamed = owned_and_streamed(family, config)
    row_bytes = _row_bytes(family, config)
    own_bytes = row_bytes
    if family.kernel_pass is Pass.FWD:  # Q alone
        own_bytes = padded_head_dim(family.head_dim, config.HEAD_DIM_PIECE) * family.dtype.itemsize
    return owned * own_bytes + config.num_stages * streamed * row_bytes


def _row_bytes(family: AttentionFamily, config: TiledConfig) -> int:
    """Bytes of one row of a pair of tiles, one of head_dim and one of head_dim_v, padded."""
    return sum(_padded_head_dims(family, config)) * family.dtype.itemsize


def _padded_head_dims(family: AttentionFamily, config: TiledConfig) -> tuple[int, int]:
    widest = config.HEAD_DIM_PIECE
    return padded_head_dim(family.head_dim, widest), padded_head_dim(family.head_dim_v, widest)


def forward_registers(family: AttentionFamily, config: ForwardConfig, device: DeviceSpec) -> int:
    """Lower bound of the forward's registers per thread: the accumulator, the scores, and P as the next operand."""
    scores = config.BLOCK_M * config.BLOCK_N
    accumulator = config.BLOCK_M * _padded_head_dims(family, config)[1]
    words = accumulator + scores + scores * family.dtype.itemsize // 4
    return words // (config.num_warps * device.warp_size)


def splits_outputs(config: BackwardConfig) -> bool:
    """Whether dk and dv are computed by different programs."""
    return isinstance(config, TmaBwdDkDvConfig) and config.SPLIT_OUTPUTS


def out_fits_query_rows(family: AttentionFamily) -> bool:
    """Whether the pieces of O are as wide as the first ones of Q, so that it can be staged in their place."""
    qk_widths, v_widths = head_dim_pieces(family.head_dim), head_dim_pieces(family.head_dim_v)
    return qk_widths[: len(v_widths)] == v_widths


def hopper_smem_bytes(family: AttentionFamily, config: HopperWsFwdConfig) -> int:
    """Shared memory of a `hopper_ws` kernel: query rows, the ring, and rows of O that do not go through the former."""
    qk_widths, v_widths = head_dim_pieces(family.head_dim), head_dim_pieces(family.head_dim_v)
    pipelined = config.SCHEDULE is Schedule.PIPELINED
    columns = sum(qk_widths) * (2 if pipelined else 1)
    if pipelined or config.OWN_OUT or not out_fits_query_rows(family):
        columns += sum(v_widths)
    ring = config.num_stages * config.BLOCK_N * (sum(qk_widths) + sum(v_widths))
    return (config.BLOCK_M * columns + ring) * family.dtype.itemsize + BARRIER_BYTES


def fused_smem_bytes(family: AttentionFamily, config: FusedConfig) -> int:
    """Shared memory of the fused backward: keys and values, query rows, do, dS, the staged dq, lse and delta."""
    tile = fused_tile(family)
    do_stages, delta_stages, parts, barriers = tile.do_stages, tile.q_stages, tile.parts, BARRIER_BYTES
    if isinstance(config, HopperWideBwdConfig):
        do_stages = delta_stages = config.DO_STAGES
        parts, barriers = config.DQ_STAGES, WIDE_BARRIER_BYTES
    rows, v_rows = tile.block_n + tile.q_stages * tile.block_m, tile.block_n + do_stages * tile.block_m
    values = rows * tile.columns + v_rows * tile.v_columns + tile.ds_stages * tile.block_m * tile.block_n
    floats = parts * PART_ROWS * PART_COLUMNS + (tile.q_stages + delta_stages) * tile.block_m
    return values * family.dtype.itemsize + 4 * floats + barriers


def consumer_registers(family: AttentionFamily, config: HopperWsFwdConfig) -> int:
    """Registers per thread for the accumulators, the scores, and P as the next operand."""
    values = padded_head_dim(family.head_dim_v) + config.BLOCK_N + config.BLOCK_N * family.dtype.itemsize // 4
    return ROWS_PER_WARPGROUP * values // 128


def backward_registers(family: AttentionFamily, config: BackwardConfig, device: DeviceSpec) -> int:
    """Lower bound of a backward's registers per thread: its accumulators, and P and dP, both needed for dS."""
    owned, _ = owned_and_streamed(family, config)
    qk_columns, v_columns = _padded_head_dims(family, config)
    columns = qk_columns
    if family.kernel_pass is Pass.BWD_DKDV:
        columns = max(qk_columns, v_columns) if splits_outputs(config) else qk_columns + v_columns
    accumulators = 0 if multiplies_in_tensor_memory(device.arch) else owned * columns
    words = accumulators + 2 * config.BLOCK_M * config.BLOCK_N
    return words // (config.num_warps * device.warp_size)


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
        if block >= 2 * max(16, length):
            return f"{name}={block} is at least twice the length {length}: half of the tile would be padding"
    return None


def _blocks_and_lengths(
    family: AttentionFamily, shape: AttentionShape | None, config: BlockedConfig
) -> list[tuple[str, int, int]]:
    if shape is None:
        return []
    if isinstance(config, FusedConfig):
        tile = fused_tile(family)
        return [("BLOCK_M", tile.block_m, shape.seqlen_q), ("BLOCK_N", tile.block_n, shape.seqlen_k)]
    found = [("BLOCK_M", config.BLOCK_M, shape.seqlen_q)]
    if not isinstance(config, BwdDeltaConfig):
        found.append(("BLOCK_N", config.BLOCK_N, shape.seqlen_k))
    return found


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
    if config.HEAD_DIM_PIECE < 128 and not narrow_products:
        return f"HEAD_DIM_PIECE={config.HEAD_DIM_PIECE} would leave {device.arch}'s wide matrix instructions half empty"
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
    widest = max(head_dim_pieces(family.head_dim_v, config.HEAD_DIM_PIECE))
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
    need, has = MIN_SCORES_PER_WARP * config.num_warps, config.BLOCK_M * config.BLOCK_N
    if need <= has:
        return None
    return f"{has} scores in a tile give a warp under {MIN_SCORES_PER_WARP}; {config.num_warps} warps need {need}"


def registers_of_gradients(
    family: AttentionFamily, shape: AttentionShape | None, config: BackwardConfig, device: DeviceSpec
) -> str | None:
    """What the loop holds fits the register file."""
    return _registers_suffice(backward_registers(family, config, device), config, device)


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


def turns(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsFwdConfig, device: DeviceSpec
) -> str | None:
    """Taking turns takes two."""
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
    need, limit = consumer_registers(family, config), CONSUMER_REGISTERS[config.CONSUMERS] - OTHER_REGISTERS
    if need > limit:
        return (
            f"accumulators, scores and P take {need} registers per thread, CONSUMERS={config.CONSUMERS} leaves {limit}"
        )
    return None


# --- constraints on the fused backward --------------------------------------------------------------------------------


def diagonal_first(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """Only a diagonal can be visited first, and not where a program visits each tile in several heads: its neighbours
    then read the same rows so much later that the L2 cache has lost them (28 measurements on an H200: 1.2 to 1.6 ×).
    """
    if config.DIAGONAL_FIRST and not family.bounded_right:
        return "DIAGONAL_FIRST needs a diagonal, a full family has none"
    if config.DIAGONAL_FIRST and shape is not None and shape.gqa_group_size > 1:
        return f"DIAGONAL_FIRST makes {shape.gqa_group_size} query heads of a kv head miss the L2 cache"
    return None


def scores_early(
    family: AttentionFamily, shape: AttentionShape | None, config: HopperWsBwdConfig, device: DeviceSpec
) -> str | None:
    """Scores beside dS need registers that narrow head dims, with twice the rows in a tile, don't have."""
    rows = fused_tile(family).block_m
    if config.SCORES_EARLY and rows > ROWS_PER_WARPGROUP:
        return f"SCORES_EARLY makes a tile of {rows} query rows spill; it is for head dims above {NARROW_HEAD_DIM}"
    return None


def addressable_dq(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """Descriptors count rows in 32 bits."""
    rows = dq_acc_size(family, shape)[0] if shape else 0
    if rows > MAX_DESCRIPTOR_EXTENT:
        return f"dq_acc has {rows} rows, a descriptor addresses {MAX_DESCRIPTOR_EXTENT}: split the batch"
    return None


def fused_shared_memory(
    family: AttentionFamily, shape: AttentionShape | None, config: FusedConfig, device: DeviceSpec
) -> str | None:
    """The tiles of every stage fit."""
    need, limit = fused_smem_bytes(family, config), device.smem_optin_bytes
    return None if need <= limit else f"needs {need} bytes of shared memory, {device.arch} offers {limit}"


# Constraints that look at one knob only: a value that fails them never passes on that family and device.
ONE_KNOB_CHECKS: tuple[Check, ...] = (register_cap, head_dim_piece, split_outputs, diagonal_first, scores_early)

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
    ("turns", turns),
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
    ("shared_memory", fused_shared_memory),
    ("addressable_dq", addressable_dq),
    ("exact_lengths", exact_lengths),
)

WIDE_CONSTRAINTS = tuple((name, check) for name, check in FUSED_CONSTRAINTS if check is not scores_early)

POSTPROCESS_CONSTRAINTS: tuple[tuple[str, Check], ...] = (("threads", threads),)
