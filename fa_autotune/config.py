"""One frozen dataclass per (pass, variant): a point of that variant's search space.

Fields in upper case become constants of the generated module, those in lower case are Triton launch options.
"""

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from typing import TypeVar

from fa_autotune.errors import InvalidConfigError
from fa_autotune.problem import canonical_json

SCHEMA_VERSION = 1


def _is_power_of_two(low: int, high: int, value: int) -> bool:
    return low <= value <= high and value & (value - 1) == 0


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
        _check_forward(self)


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
        _check_forward(self)


KernelConfig = PortableFwdConfig | TmaFwdConfig
ConfigT = TypeVar("ConfigT", PortableFwdConfig, TmaFwdConfig)


def config_key(config: KernelConfig) -> str:
    """Canonical JSON of a config, with the schema version. Its (pass, variant) is stored beside it."""
    return canonical_json({"schema": SCHEMA_VERSION, **asdict(config)})


def config_from_key(kind: type[ConfigT], key: str) -> ConfigT:
    """Parse `config_key`'s text; InvalidConfigError if it is not exactly a config of that kind."""
    try:
        values = json.loads(key)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidConfigError(f"{key!r} is not JSON: {error}") from None
    schema = values.pop("schema", None) if isinstance(values, dict) else None
    if type(schema) is not int or schema != SCHEMA_VERSION:  # JSON's true equals 1
        raise InvalidConfigError(f"{key!r} is not a JSON object of schema {SCHEMA_VERSION}")
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        raise InvalidConfigError(
            f"{key!r} has missing or unknown entries: {', '.join(sorted(values.keys() ^ expected))}"
        )
    return kind(**values)


def config_label(config: KernelConfig) -> str:
    """Short name for people, such as `64x128 w4 s2`; fields away from their default are named."""
    words = [f"{config.BLOCK_M}x{config.BLOCK_N}", f"w{config.num_warps}", f"s{config.num_stages}"]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is not MISSING and value != field.default:
            words.append(f"{field.name.lower()}={value}")
    return " ".join(words)


def _check_forward(config: PortableFwdConfig | TmaFwdConfig) -> None:
    for name, low, high in (
        ("BLOCK_M", 16, 256),
        ("BLOCK_N", 16, 256),
        ("num_warps", 1, 16),
        ("HEADS_PER_GROUP", 1, 64),
        ("HEAD_DIM_PIECE", 16, 256),
    ):
        rule = f"a power of two from {low} to {high}"
        _check(name, getattr(config, name), rule, partial(_is_power_of_two, low, high))
    _check("num_stages", config.num_stages, "an integer from 1 to 8", lambda v: 1 <= v <= 8)
    _check("ROW_SUM_LANES", config.ROW_SUM_LANES, "1 or 8", lambda v: v in (1, 8))
    if config.maxnreg is not None:
        _check(
            "maxnreg",
            config.maxnreg,
            "None or a multiple of 8 from 24 to 255 (or 255)",
            lambda v: 24 <= v <= 255 and (v % 8 == 0 or v == 255),
        )
    for field in fields(config):
        if field.type in (bool, "bool") and type(getattr(config, field.name)) is not bool:
            raise InvalidConfigError(f"{field.name}={getattr(config, field.name)!r} is not true or false")


def _check(name: str, value: object, rule: str, holds: Callable[[int], bool]) -> None:
    if type(value) is not int or not holds(value):
        raise InvalidConfigError(f"{name}={value!r} is not {rule}")
