"""What a kernel's tiles take: pieces of a head dim, shared memory, registers.

Estimates are lower bounds, so that what they rule out can't work; the compiled kernel's own figures are checked later.
"""

from fa_autotune.problem.device import DeviceSpec
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.space.config import (
    ROWS_PER_WARPGROUP,
    BackwardConfig,
    ForwardConfig,
    FusedConfig,
    HopperWideBwdConfig,
    HopperWsFwdConfig,
    KernelConfig,
    Schedule,
    TiledConfig,
    TmaBwdDkDvConfig,
    UntiledConfig,
)
from fa_autotune.space.workspace import PART_COLUMNS, PART_ROWS, fused_tile

WIDEST_PIECE = 256  # columns of a tile, by what a descriptor takes; of a row's accumulator, by a warpgroup's registers
WIDEST_BUSY = 192  # head_dim_v that leaves registers for nearly all that may go with a mask or dropout
BARRIER_BYTES = 640  # at most, of a `hopper_ws` kernel, forward or backward
WIDE_BARRIER_BYTES = 896  # of a `hopper_wide` kernel
PLACE_BYTES = 128  # that it keeps of where a sequence's keys lie, at most


def head_dim_pieces(head_dim: int, widest: int = WIDEST_PIECE) -> tuple[int, ...]:
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


def padded_head_dim(head_dim: int, widest: int = WIDEST_PIECE) -> int:
    """Columns that a head dim takes in shared memory and registers."""
    return sum(head_dim_pieces(head_dim, widest))


def value_parts(family: AttentionFamily) -> int:
    """Programs that share out the columns of O, and each compute the scores: one up to the widest accumulator."""
    return -(-family.head_dim_v // WIDEST_PIECE) if family.kernel_pass is Pass.FWD else 1


def part_columns(family: AttentionFamily) -> int:
    """Columns of V that a program computes with; where there are parts, whole tiles of them."""
    parts = value_parts(family)
    return family.head_dim_v if parts == 1 else padded_head_dim(-(-family.head_dim_v // parts))


def multiplies_by_fma(family: AttentionFamily, arch: str) -> bool:
    """True where Triton computes matrix products on the FMA units: fp32 in ieee precision, and all of sm_75."""
    return (family.dtype is DType.FLOAT32 and not family.tf32) or arch == "sm_75"


def multiplies_by_warp(arch: str) -> bool:
    """True where a matrix instruction belongs to one warp (mma.sync), not to four (wgmma) or an SM (tcgen05)."""
    return arch in ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")


def multiplies_in_tensor_memory(arch: str) -> bool:
    """True where accumulators lie in tensor memory (tcgen05), so that they may cost no registers."""
    return arch in ("sm_100", "sm_101", "sm_103", "sm_110")


def canonical_piece(family: AttentionFamily, widest: int) -> int:
    """The HEAD_DIM_PIECE that stands for `widest`: 256 where it cuts both head dims into the same pieces."""
    dims = (family.head_dim, part_columns(family))
    return WIDEST_PIECE if all(head_dim_pieces(dim, widest) == head_dim_pieces(dim) for dim in dims) else widest


def owned_and_streamed(family: AttentionFamily, config: TiledConfig) -> tuple[int, int]:
    """Rows of the tiles that a program keeps, and of those that its loop brings in: queries and keys or the reverse."""
    if family.kernel_pass.spec.owns_keys:
        return config.BLOCK_N, config.BLOCK_M
    return config.BLOCK_M, config.BLOCK_N


def in_flight_smem_bytes(family: AttentionFamily, config: TiledConfig) -> int:
    """Lower bound of shared memory: the pairs of tiles (K and V, or Q and dO) that a pipeline has in flight."""
    _, streamed = owned_and_streamed(family, config)
    return (config.num_stages - 1) * streamed * _row_bytes(family, config)


def operand_bytes(family: AttentionFamily, config: TiledConfig) -> int:
    """The tiles of one step of a loop and those that its program keeps, each once."""
    return (config.BLOCK_M + config.BLOCK_N) * _row_bytes(family, config)


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
    # A mask's tile goes through shared memory only where its loads are pipelined: no product reads it.
    has_mask_tile = family.has_mask and config.num_stages > 1
    mask_bytes = config.BLOCK_M * config.BLOCK_N * family.mask_itemsize if has_mask_tile else 0
    return owned * own_bytes + config.num_stages * (streamed * row_bytes + mask_bytes)


def _row_bytes(family: AttentionFamily, config: TiledConfig) -> int:
    """Bytes of one row of a pair of tiles, one of head_dim and one of head_dim_v, padded."""
    return sum(_padded_head_dims(family, config)) * family.dtype.itemsize


def _padded_head_dims(family: AttentionFamily, config: TiledConfig) -> tuple[int, int]:
    widest = config.HEAD_DIM_PIECE
    return padded_head_dim(family.head_dim, widest), padded_head_dim(part_columns(family), widest)


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


def copies_mask(family: AttentionFamily) -> bool:
    """Whether `hopper_ws` copies a mask's tiles to shared memory, 16 bytes at a time, or reads them by elements."""
    return family.has_mask and not (family.loose_mask or family.bounded_left)


def hopper_smem_bytes(family: AttentionFamily, config: HopperWsFwdConfig) -> int:
    """Shared memory of a `hopper_ws` kernel: query rows, the ring, rows of O that do not go through the former, and the
    tile of a mask."""
    qk_widths, v_widths = head_dim_pieces(family.head_dim), head_dim_pieces(family.head_dim_v)
    pipelined = config.SCHEDULE is Schedule.PIPELINED
    columns = sum(qk_widths) * (2 if pipelined else 1)
    if pipelined or config.OWN_OUT or not out_fits_query_rows(family):
        columns += sum(v_widths)
    ring = config.num_stages * config.BLOCK_N * (sum(qk_widths) + sum(v_widths))
    mask_bytes = config.BLOCK_M * config.BLOCK_N * family.mask_itemsize if copies_mask(family) else 0
    return (config.BLOCK_M * columns + ring) * family.dtype.itemsize + mask_bytes + BARRIER_BYTES


def fused_smem_bytes(family: AttentionFamily, config: FusedConfig) -> int:
    """Shared memory of the fused backward: keys and values, query rows, do, dS, the staged dq, lse and delta."""
    tile = fused_tile(family)
    do_stages, delta_stages, parts, barriers = tile.do_stages, tile.q_stages, tile.parts, BARRIER_BYTES
    if isinstance(config, HopperWideBwdConfig):
        do_stages = delta_stages = config.DO_STAGES
        parts, barriers = config.DQ_STAGES, WIDE_BARRIER_BYTES
        barriers += PLACE_BYTES if family.varlen else 0
    rows, v_rows = tile.block_n + tile.q_stages * tile.block_m, tile.block_n + do_stages * tile.block_m
    values = rows * tile.columns + v_rows * tile.v_columns + tile.ds_stages * tile.block_m * tile.block_n
    floats = parts * PART_ROWS * PART_COLUMNS + (tile.q_stages + delta_stages) * tile.block_m
    return values * family.dtype.itemsize + 4 * floats + barriers


def consumer_registers(family: AttentionFamily, config: HopperWsFwdConfig) -> int:
    """Registers per thread for the accumulators, the scores, P as the next operand, and what a mask takes."""
    values = padded_head_dim(family.head_dim_v) + config.BLOCK_N + config.BLOCK_N * family.dtype.itemsize // 4
    return ROWS_PER_WARPGROUP * values // 128 + (_mask_registers(family, config) if family.has_mask else 0)


def _mask_registers(family: AttentionFamily, config: HopperWsFwdConfig) -> int:
    """Registers per thread for a mask's tile, to find it, and for what else is then too much, as kernels showed."""
    elements = ROWS_PER_WARPGROUP * config.BLOCK_N // 128
    if not copies_mask(family):  # each in a register, and where it is
        return 2 * elements
    tile = elements * max(2, family.mask_itemsize) // 4  # two in a register at most
    pointers = 2 * elements * family.mask_itemsize // 16
    is_counted = config.SCHEDULE in (Schedule.PERSISTENT, Schedule.PIPELINED)
    others = (family.softcap, family.alibi, family.dropout, family.bounded_right and is_counted)
    return tile + pointers + 4 * sum(others)


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
