"""One frozen dataclass per (pass, variant): a point of that variant's search space.

Fields in upper case become constants of the generated module, those in lower case are Triton launch options.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from fa_autotune.errors import InvalidConfigError
from fa_autotune.problem.family import canonical_json, parse_json

SCHEMA_VERSION = 1
ADDED_LATER = "added later"  # marks a field that rows of older releases lack
ROWS_PER_WARPGROUP = 64  # of Hopper's matrix instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableFwdConfig:
    """Forward through plain pointers.

    BLOCK_M query rows per program and BLOCK_N key columns per step, powers of two from 16 to 256.
    HEADS_PER_GROUP: heads whose blocks are scheduled side by side, so that their K and V share the L2 cache.
    ROW_SUM_LANES: partial row sums kept per row (1, or 8 summed once at the end).
    HEAD_DIM_PIECE: columns of a head dim in one matrix product, at most; wider head dims are covered by several.
    EXACT_LENGTHS: no ragged masking; only valid where the blocks divide both lengths.
    maxnreg: registers per thread the assembler may use; None leaves it free.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    HEADS_PER_GROUP: int = 8
    ROW_SUM_LANES: int = 1
    HEAD_DIM_PIECE: int = 256
    EXACT_LENGTHS: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaFwdConfig:
    """Forward through tensor descriptors; fields as in `PortableFwdConfig`, and

    STORE_BY_TMA: write O through its descriptor rather than through pointers.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    HEADS_PER_GROUP: int = 8
    ROW_SUM_LANES: int = 1
    HEAD_DIM_PIECE: int = 256
    EXACT_LENGTHS: bool = False
    STORE_BY_TMA: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)


class Schedule(StrEnum):
    """Which warps of a `hopper_ws` program do what, and which query tiles it takes."""

    SINGLE = "single"  # one warpgroup loads for itself, one tile per program, several programs per SM
    TILE = "tile"  # a producer warp feeds the consumer warpgroups, one tile per program
    PERSISTENT = "persistent"  # the same, and a program takes tiles from a counter until there are none
    PIPELINED = "pipelined"  # the same, and tiles overlap: the next one's first scores beside this one's last product


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperWsFwdConfig:
    """Forward in Gluon, warp-specialised, on Hopper; BLOCK_N, HEADS_PER_GROUP, ROW_SUM_LANES and EXACT_LENGTHS as in
    `PortableFwdConfig`, and

    SCHEDULE: see `Schedule`.
    CONSUMERS: warpgroups of 64 query rows each; 1 where a warpgroup loads for itself, else 2 or 3.
    num_stages: blocks of keys and values in shared memory; Triton is not told.
    PING_PONG: consumers issue their matrix products in turns.
    PACK_P: P crosses the loop's back edge as pairs of values in one register.
    OWN_OUT: O is staged in shared memory of its own, not in the query rows', so that the next tile's rows arrive while
    this tile ends; for a persistent program.
    """

    SCHEDULE: Schedule
    CONSUMERS: int
    BLOCK_N: int
    num_stages: int = 2
    PING_PONG: bool = False
    PACK_P: bool = True
    HEADS_PER_GROUP: int = 8
    ROW_SUM_LANES: int = 1
    EXACT_LENGTHS: bool = False
    OWN_OUT: bool = dataclasses.field(default=False, metadata={ADDED_LATER: True})

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def BLOCK_M(self) -> int:
        """Query rows per tile."""
        return ROWS_PER_WARPGROUP * self.CONSUMERS

    @property
    def num_warps(self) -> int:
        """Warps that compute or load; Triton is told of the first warpgroup only."""
        return 4 if self.SCHEDULE is Schedule.SINGLE else 4 * self.CONSUMERS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackwardConfig:
    """What both kernels over (query, key) tiles and all of their variants have.

    BLOCK_M query rows and BLOCK_N keys in a tile; the other fields as in `PortableFwdConfig`.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    HEADS_PER_GROUP: int = 8
    HEAD_DIM_PIECE: int = 256
    EXACT_LENGTHS: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableBwdDkDvConfig(_BackwardConfig):
    """dk and dv through plain pointers: BLOCK_N keys per program, BLOCK_M query rows per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaBwdDkDvConfig(_BackwardConfig):
    """dk and dv through tensor descriptors: BLOCK_N keys per program, BLOCK_M query rows per step.

    SPLIT_OUTPUTS: dk and dv of a key block in two programs, which leaves each the registers for a larger tile.
    """

    SPLIT_OUTPUTS: bool = dataclasses.field(default=False, metadata={ADDED_LATER: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableBwdDqConfig(_BackwardConfig):
    """dq through plain pointers: BLOCK_M query rows per program, BLOCK_N keys per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TmaBwdDqConfig(_BackwardConfig):
    """dq through tensor descriptors: BLOCK_M query rows per program, BLOCK_N keys per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BwdDeltaConfig:
    """delta, alone or as one of the statistics: BLOCK_M query rows per program, no loop over keys."""

    BLOCK_M: int
    num_warps: int

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperWsBwdConfig:
    """dk, dv and dq in one kernel, in Gluon, warp-specialised, on Hopper; its tile is `workspace.fused_tile`'s.

    HEADS_PER_GROUP and EXACT_LENGTHS as in `PortableFwdConfig`, the heads being those of keys, and
    DIAGONAL_FIRST: key blocks are launched from the last to the first, and visit query tiles from the diagonal on; else
    from the first to the last, and the tiles from the last one back.
    SCORES_EARLY: the scores of the next step are issued before dS is stored.
    """

    HEADS_PER_GROUP: int = 8
    DIAGONAL_FIRST: bool = False
    SCORES_EARLY: bool = False
    EXACT_LENGTHS: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def num_warps(self) -> int:
        """Warps that compute, load or store; Triton is told of the first warpgroup only."""
        return 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperWideBwdConfig:
    """The same for head dims above 128, with a warpgroup for each gradient; HEADS_PER_GROUP, DIAGONAL_FIRST and
    EXACT_LENGTHS as in `HopperWsBwdConfig`, and

    DO_STAGES: tiles of do in shared memory.
    DQ_STAGES: parts of dq, 64 rows by 64 columns, that may lie in shared memory until they are added.
    """

    HEADS_PER_GROUP: int = 4
    DIAGONAL_FIRST: bool = False
    DO_STAGES: int = 1
    DQ_STAGES: int = 3
    EXACT_LENGTHS: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def num_warps(self) -> int:
        """Warps that compute, load or store; Triton is told of the first warpgroup only."""
        return 14


FusedConfig = HopperWsBwdConfig | HopperWideBwdConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BwdPostprocessConfig:
    """dq of what the fused kernel added up: a program per tile of it."""

    num_warps: int

    def __post_init__(self) -> None:
        _check_fields(self)


ForwardConfig = PortableFwdConfig | TmaFwdConfig
BackwardConfig = PortableBwdDkDvConfig | TmaBwdDkDvConfig | PortableBwdDqConfig | TmaBwdDqConfig
TiledConfig = ForwardConfig | BackwardConfig  # those with BLOCK_M and BLOCK_N
UntiledConfig = BwdDeltaConfig | BwdPostprocessConfig  # of passes without matrix products
KernelConfig = TiledConfig | HopperWsFwdConfig | FusedConfig | UntiledConfig
ConfigT = TypeVar("ConfigT", bound=KernelConfig)


def config_key(config: KernelConfig) -> str:
    """Canonical JSON of a config, with the schema version. Its (pass, variant) is stored beside it.

    A field that was added later is left out where it has its default, so that the text is that of older rows.
    """
    values = asdict(config)
    for entry in fields(config):
        if ADDED_LATER in entry.metadata and values[entry.name] == entry.default:
            del values[entry.name]
    return canonical_json({"schema": SCHEMA_VERSION, **values})


def config_from_key(kind: type[ConfigT], key: str) -> ConfigT:
    """Parse `config_key`'s text; InvalidConfigError if it is not exactly a config of that kind.

    A field that was added later may be missing: its default keeps what older rows meant.
    """
    try:
        values = parse_json(key)
    except (ValueError, TypeError) as error:
        raise InvalidConfigError(f"{key!r} is not JSON: {error}") from None
    schema = values.pop("schema", None) if isinstance(values, dict) else None
    if type(schema) is not int or schema != SCHEMA_VERSION:  # JSON's true equals 1
        raise InvalidConfigError(f"{key!r} is not a JSON object of schema {SCHEMA_VERSION}")
    known = {entry.name for entry in fields(kind)}
    needed = {entry.name for entry in fields(kind) if ADDED_LATER not in entry.metadata}
    if not needed <= values.keys() <= known:
        wrong = sorted((values.keys() - known) | (needed - values.keys()))
        raise InvalidConfigError(f"{key!r} has missing or unknown entries: {', '.join(wrong)}")
    return kind(**_typed(values))


def with_knobs(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """A config with other values of some of its fields, as JSON has them; InvalidConfigError."""
    return replace(config, **_typed(values, by_people=True))


def _typed(values: Mapping[str, Any], *, by_people: bool = False) -> dict[str, Any]:
    """Values of fields as JSON has them, and its word for a schedule as one; where people typed it also its name."""
    if "SCHEDULE" not in values:
        return dict(values)
    given = values["SCHEDULE"]
    for schedule in Schedule:
        if given in (schedule.value, schedule.name) if by_people else given == schedule.value:
            return {**values, "SCHEDULE": schedule}
    raise InvalidConfigError(f"SCHEDULE={given!r} is not one of: {', '.join(Schedule)}")


_LAUNCH_LETTERS = (("w", "num_warps"), ("s", "num_stages"))


def config_label(config: KernelConfig) -> str:
    """Short name for people, such as `64x128 w4 s2`; fields away from their default are named."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    blocks = [str(getattr(config, name)) for name in ("BLOCK_M", "BLOCK_N") if hasattr(config, name)]
    words = ["x".join(blocks)] if blocks else []
    words += [str(values["SCHEDULE"])] if "SCHEDULE" in values else []
    words += [f"{letter}{values[name]}" for letter, name in _LAUNCH_LETTERS if name in values]
    named = {name for _, name in _LAUNCH_LETTERS}
    for field in fields(config):
        if field.name not in named and field.default is not MISSING and values[field.name] != field.default:
            words.append(f"{field.name.lower()}={values[field.name]}")
    return " ".join(words) or "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a field may hold, in words and as a test. A bool is no int here."""

    kind: type
    words: str
    holds: Callable[[Any], bool]


def _power_of_two(low: int, high: int) -> _Rule:
    return _Rule(
        kind=int,
        words=f"a power of two from {low} to {high}",
        holds=lambda value: low <= value <= high and value & (value - 1) == 0,
    )


_TRUE_OR_FALSE = _Rule(kind=bool, words="true or false", holds=lambda value: True)
_RULES = {
    "BLOCK_M": _power_of_two(16, 256),
    "BLOCK_N": _power_of_two(16, 256),
    "num_warps": _power_of_two(1, 16),
    "num_stages": _Rule(kind=int, words="an integer from 1 to 8", holds=lambda value: 1 <= value <= 8),
    "maxnreg": _Rule(
        kind=int,
        words="None or a multiple of 8 from 24 to 255 (or 255)",
        holds=lambda value: 24 <= value <= 255 and (value % 8 == 0 or value == 255),
    ),
    "HEADS_PER_GROUP": _power_of_two(1, 64),
    "ROW_SUM_LANES": _Rule(kind=int, words="1 or 8", holds=lambda value: value in (1, 8)),
    "HEAD_DIM_PIECE": _power_of_two(16, 256),
    "EXACT_LENGTHS": _TRUE_OR_FALSE,
    "STORE_BY_TMA": _TRUE_OR_FALSE,
    "SPLIT_OUTPUTS": _TRUE_OR_FALSE,
    "DIAGONAL_FIRST": _TRUE_OR_FALSE,
    "DO_STAGES": _Rule(kind=int, words="an integer from 1 to 8", holds=lambda value: 1 <= value <= 8),
    "DQ_STAGES": _Rule(kind=int, words="an integer from 1 to 8", holds=lambda value: 1 <= value <= 8),
    "SCORES_EARLY": _TRUE_OR_FALSE,
    "SCHEDULE": _Rule(kind=Schedule, words=f"one of: {', '.join(Schedule)}", holds=lambda value: True),
    "CONSUMERS": _Rule(kind=int, words="1, 2 or 3", holds=lambda value: value in (1, 2, 3)),
    "PING_PONG": _TRUE_OR_FALSE,
    "PACK_P": _TRUE_OR_FALSE,
    "OWN_OUT": _TRUE_OR_FALSE,
}


def _check_fields(config: Any) -> None:
    """Every field against the rule of its name; a field whose default is None may be None."""
    for field in fields(config):
        value, rule = getattr(config, field.name), _RULES[field.name]
        if value is None and field.default is None:
            continue
        if type(value) is not rule.kind or not rule.holds(value):
            raise InvalidConfigError(f"{field.name}={value!r} is not {rule.words}")
