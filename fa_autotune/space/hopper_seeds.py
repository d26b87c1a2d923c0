"""Where a search starts among the kernels in Gluon: configs that were fast on Hopper, the untuned default first."""

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.space.config import HopperWideBwdConfig, HopperWsBwdConfig, HopperWsFwdConfig, Schedule
from fa_autotune.space.constraints import holds_tile
from fa_autotune.space.estimates import WIDEST_BUSY, fused_smem_bytes, hopper_smem_bytes, padded_head_dim

SMEM_BYTES = 227 * 1024  # that a program on sm_90 may have

# SCHEDULE, CONSUMERS, BLOCK_N, num_stages, PING_PONG, OWN_OUT for head dims up to a width, long sequences first.
_FORWARD: list[tuple[int, list[tuple[Schedule, int, int, int, bool, bool]]]] = [
    (
        64,
        [
            (Schedule.SINGLE, 1, 128, 2, False, False),
            (Schedule.SINGLE, 1, 64, 2, False, False),
            (Schedule.PERSISTENT, 3, 128, 2, True, True),
            (Schedule.TILE, 3, 128, 2, True, False),
            (Schedule.PIPELINED, 3, 128, 2, True, False),
            (Schedule.PIPELINED, 2, 128, 3, False, False),
        ],
    ),
    (
        128,
        [
            (Schedule.PIPELINED, 2, 128, 2, False, False),
            (Schedule.PIPELINED, 2, 128, 2, True, False),
            (Schedule.PERSISTENT, 2, 128, 2, False, True),
            (Schedule.PERSISTENT, 2, 128, 2, True, True),
            (Schedule.TILE, 2, 128, 2, False, False),
            (Schedule.SINGLE, 1, 64, 2, False, False),
        ],
    ),
    (
        256,
        [
            (Schedule.TILE, 2, 64, 2, True, False),
            (Schedule.PERSISTENT, 2, 64, 2, True, False),
            (Schedule.TILE, 2, 64, 2, False, False),
            (Schedule.PERSISTENT, 2, 64, 2, False, False),
        ],
    ),
]

# The same where a mask or dropout keep warps busy beside the products, and take registers and shared memory.
_BUSY_FORWARD: list[tuple[int, list[tuple[Schedule, int, int, int, bool, bool]]]] = [
    (
        64,
        [
            (Schedule.SINGLE, 1, 64, 2, False, False),
            (Schedule.PERSISTENT, 2, 128, 2, False, True),
            (Schedule.SINGLE, 1, 128, 2, False, False),
            (Schedule.PIPELINED, 2, 128, 2, False, False),
            (Schedule.TILE, 2, 128, 2, False, False),
            (Schedule.PIPELINED, 2, 64, 3, False, False),
        ],
    ),
    (
        128,
        [
            (Schedule.PERSISTENT, 2, 128, 2, False, True),
            (Schedule.PIPELINED, 2, 128, 2, False, False),
            (Schedule.PERSISTENT, 2, 128, 2, True, True),
            (Schedule.TILE, 2, 128, 2, False, False),
            (Schedule.PIPELINED, 2, 64, 2, False, False),
            (Schedule.PERSISTENT, 2, 64, 3, False, True),
            (Schedule.SINGLE, 1, 64, 2, False, False),
        ],
    ),
    (
        256,
        [
            (Schedule.TILE, 2, 64, 2, False, False),
            (Schedule.TILE, 2, 64, 2, True, False),
            (Schedule.PERSISTENT, 2, 64, 2, False, False),
            (Schedule.PERSISTENT, 2, 64, 2, True, False),
        ],
    ),
]

# HEADS_PER_GROUP and DIAGONAL_FIRST of the fused backward. The order that no length is slow in is first; the other one
# is faster where few or short key blocks make a head.
_FULL = [(8, False), (4, False), (16, False), (2, False)]
_CAUSAL = [(8, False), (2, True), (4, False), (2, False), (8, True)]
_WIDE_FULL = [(4, False), (2, False), (8, False)]
_WIDE_CAUSAL = [(4, False), (2, True), (8, False), (8, True)]

_WIDE_STAGES = [(2, 3), (2, 2), (1, 3)]  # DO_STAGES and DQ_STAGES, the fastest first


def forward_seeds(family: AttentionFamily) -> list[HopperWsFwdConfig]:
    """Of `hopper_ws`, forward."""
    widest = max(padded_head_dim(family.head_dim), padded_head_dim(family.head_dim_v))
    is_busy = family.has_mask or family.dropout
    lists = _BUSY_FORWARD if is_busy else _FORWARD
    tiles = next((tiles for limit, tiles in lists if widest <= limit), lists[-1][1])
    seeds = [
        HopperWsFwdConfig(
            SCHEDULE=schedule,
            CONSUMERS=consumers,
            BLOCK_N=block_n,
            num_stages=stages,
            PING_PONG=ping_pong,
            HEADS_PER_GROUP=16,
            ROW_SUM_LANES=1 if consumers == 2 else 8,
            OWN_OUT=own_out,
        )
        for schedule, consumers, block_n, stages, ping_pong, own_out in tiles
    ]
    if not is_busy:
        return seeds
    if widest > _FORWARD[1][0]:
        # Of accumulators so wide, one keeps an address in memory in one kind of kernel, and one in the other.
        schedule = Schedule.PERSISTENT if family.dropout and not family.bounded_right else Schedule.TILE
        seeds = [one for one in seeds if one.SCHEDULE is schedule or family.head_dim_v <= WIDEST_BUSY]
    return [one for one in seeds if hopper_smem_bytes(family, one) <= SMEM_BYTES and holds_tile(family, one)]


def fused_seeds(family: AttentionFamily) -> list[HopperWsBwdConfig]:
    """Of `hopper_ws`, fused backward."""
    return [
        HopperWsBwdConfig(HEADS_PER_GROUP=heads, DIAGONAL_FIRST=first, EXACT_LENGTHS=exact)
        for exact in (False, True)
        for heads, first in (_CAUSAL if family.bounded_right or family.bounded_left else _FULL)
    ]


def wide_seeds(family: AttentionFamily) -> list[HopperWideBwdConfig]:
    """Of `hopper_wide`: a second tile of do where two parts of dq fit beside it, else as many parts as fit."""
    stages = [HopperWideBwdConfig(DO_STAGES=do_stages, DQ_STAGES=parts) for do_stages, parts in _WIDE_STAGES]
    fitting = next((one for one in stages if fused_smem_bytes(family, one) <= SMEM_BYTES), stages[-1])
    return [
        HopperWideBwdConfig(
            HEADS_PER_GROUP=heads,
            DIAGONAL_FIRST=first,
            DO_STAGES=fitting.DO_STAGES,
            DQ_STAGES=fitting.DQ_STAGES,
            EXACT_LENGTHS=exact,
        )
        for exact in (False, True)
        for heads, first in (_WIDE_CAUSAL if family.bounded_right or family.bounded_left else _WIDE_FULL)
    ]
