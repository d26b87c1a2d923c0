"""Configs: keys, domains and labels."""

import json
from dataclasses import MISSING, asdict, fields, replace
from typing import get_args

import pytest
from hypothesis import given

from fa_autotune.errors import InvalidConfigError
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import (
    BwdDeltaConfig,
    HopperWsFwdConfig,
    KernelConfig,
    PortableBwdDkDvConfig,
    PortableBwdDqConfig,
    PortableFwdConfig,
    Schedule,
    TmaBwdDkDvConfig,
    config_from_key,
    config_key,
    config_label,
    with_knobs,
)
from kit.strategies import candidates, json_values

PORTABLE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=2)
HOPPER = HopperWsFwdConfig(SCHEDULE=Schedule.TILE, CONSUMERS=3, BLOCK_N=128)


@given(candidates())
def test_a_config_survives_its_key(candidate: Candidate) -> None:
    config = candidate.config
    assert config_from_key(type(config), config_key(config)) == config


@given(candidates(), candidates())
def test_keys_of_one_kind_are_equal_exactly_where_configs_are(one: Candidate, other: Candidate) -> None:
    same_kind = type(one.config) is type(other.config)
    assert not same_kind or (config_key(one.config) == config_key(other.config)) == (one.config == other.config)


def test_the_key_is_this_text_for_ever() -> None:
    assert config_key(PORTABLE) == (
        '{"BLOCK_M":64,"BLOCK_N":128,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,'
        '"HEAD_DIM_PIECE":256,"ROW_SUM_LANES":1,"maxnreg":null,'
        '"num_stages":2,"num_warps":4,"schema":1}'
    )


def test_the_key_of_a_schedule_is_this_text_for_ever() -> None:
    assert config_key(HOPPER) == (
        '{"BLOCK_N":128,"CONSUMERS":3,"EXACT_LENGTHS":false,"HEADS_PER_GROUP":8,"PACK_P":true,"PING_PONG":false,'
        '"ROW_SUM_LANES":1,"SCHEDULE":"tile","num_stages":2,"schema":1}'
    )


@pytest.mark.parametrize("value", ["tiles", "", 1, None, True, ["tile"], {"tile": 1}])
def test_a_key_with_another_schedule_is_refused(value: object) -> None:
    key = json.dumps({**json.loads(config_key(HOPPER)), "SCHEDULE": value})
    with pytest.raises(InvalidConfigError, match="is not one of: single, tile, persistent, pipelined"):
        config_from_key(HopperWsFwdConfig, key)


@given(candidates(), candidates())
def test_a_config_takes_knobs_as_json_has_them(one: Candidate, other: Candidate) -> None:
    if type(one.config) is type(other.config):
        assert with_knobs(one.config, json.loads(json.dumps(asdict(other.config)))) == other.config


def test_a_schedule_is_taken_by_its_word() -> None:
    config = with_knobs(HOPPER, {"SCHEDULE": "persistent", "OWN_OUT": True})
    assert config == replace(HOPPER, SCHEDULE=Schedule.PERSISTENT, OWN_OUT=True)
    assert with_knobs(HOPPER, {"SCHEDULE": "PERSISTENT", "OWN_OUT": True}) == config


@pytest.mark.parametrize("value", ["tiles", None, ["tile"]])
def test_a_word_that_is_no_schedule_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfigError, match="is not one of: single, tile, persistent, pipelined"):
        with_knobs(HOPPER, {"SCHEDULE": value})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SCHEDULE", "tile", "one of: single, tile, persistent, pipelined"),
        ("CONSUMERS", 4, "1, 2 or 3"),
        ("CONSUMERS", True, "1, 2 or 3"),
        ("PING_PONG", 1, "true or false"),
        ("PACK_P", 0, "true or false"),
        ("BLOCK_N", 96, "a power of two"),
    ],
)
def test_a_value_outside_the_domain_of_a_schedule_is_refused(name: str, value: object, says: str) -> None:
    with pytest.raises(InvalidConfigError, match=says):
        replace(HOPPER, **{name: value})


@pytest.mark.parametrize(
    ("schedule", "consumers", "rows", "warps"),
    [(Schedule.SINGLE, 1, 64, 4), (Schedule.TILE, 2, 128, 9), (Schedule.PIPELINED, 3, 192, 13)],
)
def test_a_schedule_has_64_rows_for_each_consumer_and_a_warp_that_loads(
    schedule: Schedule, consumers: int, rows: int, warps: int
) -> None:
    config = HopperWsFwdConfig(SCHEDULE=schedule, CONSUMERS=consumers, BLOCK_N=64)
    assert (config.BLOCK_M, config.num_warps) == (rows, warps)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("BLOCK_M", 48, "a power of two from 16 to 256"),
        ("BLOCK_M", 8, "a power of two from 16 to 256"),
        ("BLOCK_N", 512, "a power of two from 16 to 256"),
        ("BLOCK_N", True, "a power of two from 16 to 256"),
        ("BLOCK_N", 64.0, "a power of two from 16 to 256"),
        ("BLOCK_N", "64", "a power of two from 16 to 256"),
        ("num_warps", 3, "a power of two from 1 to 16"),
        ("num_stages", 0, "an integer from 1 to 8"),
        ("maxnreg", 100, "a multiple of 8"),
        ("maxnreg", 0, "a multiple of 8"),
        ("HEADS_PER_GROUP", -1, "a power of two from 1 to 64"),
        ("ROW_SUM_LANES", 2, "1 or 8"),
        ("EXACT_LENGTHS", 1, "true or false"),
        ("EXACT_LENGTHS", "x; import os", "true or false"),
    ],
)
def test_a_value_outside_its_domain_is_refused_with_the_rule(name: str, value: object, says: str) -> None:
    with pytest.raises(InvalidConfigError, match=says) as caught:
        replace(PORTABLE, **{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@given(json_values())
def test_no_json_raises_anything_but_our_error(value: object) -> None:
    with pytest.raises(InvalidConfigError):
        config_from_key(PortableFwdConfig, json.dumps(value))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_text_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        config_from_key(PortableFwdConfig, text)


@pytest.mark.parametrize("change", [{"schema": 2}, {"schema": True}, {"STORE_BY_TMA": True}])
def test_a_key_of_another_kind_or_schema_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidConfigError, match=r"schema|STORE_BY_TMA"):
        config_from_key(PortableFwdConfig, json.dumps({**json.loads(config_key(PORTABLE)), **change}))


def test_a_label_names_what_is_away_from_its_default() -> None:
    assert config_label(PORTABLE) == "64x128 w4 s2"
    assert config_label(BwdDeltaConfig(BLOCK_M=32, num_warps=4)) == "32 w4"
    assert config_label(replace(PORTABLE, maxnreg=128, EXACT_LENGTHS=True)) == (
        "64x128 w4 s2 maxnreg=128 exact_lengths=True"
    )
    assert config_label(replace(HOPPER, PING_PONG=True, num_stages=3)) == "192x128 tile s3 ping_pong=True"


@pytest.mark.parametrize("kind", get_args(KernelConfig))
def test_every_field_is_a_constant_or_a_launch_option(kind: type[KernelConfig]) -> None:
    names = {field.name for field in fields(kind)}
    assert {name for name in names if not name.isupper()} <= {"num_warps", "num_stages", "maxnreg"}


@pytest.mark.parametrize("kind", get_args(KernelConfig))
@pytest.mark.parametrize("value", ["64", 63.5, -1, 0, 2**40])
def test_every_field_of_every_config_has_a_rule(kind: type[KernelConfig], value: object) -> None:
    right = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "SCHEDULE": Schedule.TILE, "CONSUMERS": 2}
    required = {field.name: right[field.name] for field in fields(kind) if field.default is MISSING}
    for field in fields(kind):
        with pytest.raises(InvalidConfigError, match=f"{field.name}="):
            kind(**{**required, field.name: value})


def test_configs_of_two_kinds_are_never_equal() -> None:
    values = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    assert PortableBwdDqConfig(**values) != PortableBwdDkDvConfig(**values)


def test_a_config_holds_plain_json_values_only() -> None:
    assert {type(value) for value in asdict(PORTABLE).values()} <= {int, bool, type(None)}


def test_a_field_that_was_added_later_leaves_older_rows_as_they_are() -> None:
    old = TmaBwdDkDvConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    assert "SPLIT_OUTPUTS" not in config_key(old)
    assert config_from_key(TmaBwdDkDvConfig, config_key(old)) == old
    assert '"SPLIT_OUTPUTS":true' in config_key(replace(old, SPLIT_OUTPUTS=True))
