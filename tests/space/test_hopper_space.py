"""The search space of the warp-specialised forward: who is served, which schedules may run, and what a search draws."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.database import SessionKind, TuningDatabase
from fa_autotune.dispatch.winners import load_snapshot
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule
from fa_autotune.space.registry import rejection, variant_spec
from fa_autotune.space.seeds import search_domain
from fa_autotune.space.support import TESTED_TRITONS
from kit.tuning_samples import begin, confirmed, ok_record

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
CAUSAL = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
FULL = AttentionProblem.parse("4x32x8x4096x4096x128")
NARROW = AttentionProblem.parse("4x32x8x4096x4096x64,causal")
WIDE = AttentionProblem.parse("4x8x8x4096x4096x256,causal")
BASE = HopperWsFwdConfig(SCHEDULE=Schedule.TILE, CONSUMERS=2, BLOCK_N=64)


def rejected(problem: AttentionProblem, **change: object) -> tuple[str, str]:
    """(constraint, reason) of a config that breaks one."""
    config = replace(BASE, **change)  # type: ignore[arg-type]
    candidate = Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)
    found = rejection(candidate, problem.shape, H200)
    assert found is not None
    return found.constraint, found.reason


def family_of(head_dim: str, words: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x1x1x64x64x{head_dim},{words}").family


# --- who is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("triton", [*TESTED_TRITONS, (3, 10), (4, 0)])
def test_hopper_with_a_known_triton_or_a_newer_one_is_served(triton: tuple[int, int]) -> None:
    assert SPEC.supports(CAUSAL.family, "sm_90", triton) is None


@pytest.mark.parametrize(
    ("change", "arch", "triton", "says"),
    [
        ({}, "sm_100", (3, 7), r"wgmma\) are sm_90's alone, sm_100 has none"),
        ({}, "sm_89", (3, 7), r"wgmma\) are sm_90's alone, sm_89 has none"),
        ({}, "gfx942", (3, 7), "gfx942 has none"),
        ({}, INTERPRETER.arch, (3, 7), f"{INTERPRETER.arch} has none"),
        ({}, "sm_90", (3, 5), r"needs Triton 3\.6 or newer, not 3\.5"),
        ({"access": Access.ALIGNED}, "sm_90", (3, 7), r"can't read these pointers and strides \(access=aligned\)"),
        ({"access": Access.ANY}, "sm_90", (3, 7), r"\(access=any\)"),
        ({"dtype": DType.FLOAT32}, "sm_90", (3, 7), "multiplies no float32"),
    ],
)
def test_what_is_not_served_gets_a_reason(change: dict, arch: str, triton: tuple[int, int], says: str) -> None:
    reason = SPEC.supports(replace(CAUSAL.family, **change), arch, triton)
    assert reason is not None
    assert re.search(says, reason)


@pytest.mark.parametrize(
    ("head_dim", "words", "says"),
    [
        ("128", "dropout,left=9", "dropout wants whole 16 keys"),
        ("256", "wide_bias", "head_dim_v=256 leaves no registers for a mask in fp32, 192 does"),
        ("256", "bias,dropout", "no registers for attn_mask and dropout at once"),
        ("256", "causal,dropout,softcap", "no registers for dropout and softcap at once"),
        ("192", "bool_mask,loose_mask", "no registers for a mask that is read by elements, 128 does"),
        ("160", "bool_mask,left=9", "no registers for a mask that is read by elements, 128 does"),
    ],
)
def test_what_leaves_no_registers_gets_a_reason(head_dim: str, words: str, says: str) -> None:
    reason = SPEC.supports(family_of(head_dim, words), "sm_90", (3, 7))
    assert reason is not None
    assert says in reason


# --- which schedules may run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "change", "constraint", "says"),
    [
        (CAUSAL, {"CONSUMERS": 1}, "warpgroups", "tile does not go with CONSUMERS=1"),
        (CAUSAL, {"SCHEDULE": Schedule.SINGLE}, "warpgroups", "single does not go with CONSUMERS=2"),
        (CAUSAL, {"CONSUMERS": 3}, "third_consumer", "head_dim_v up to 64, not 128"),
        (NARROW, {"SCHEDULE": Schedule.SINGLE, "CONSUMERS": 1, "PING_PONG": True}, "ping_pong", "two warpgroups"),
        (CAUSAL, {"num_stages": 4}, "stages_in_flight", "num_stages=4 is for head dims up to 64"),
        (CAUSAL, {"PACK_P": False}, "packed_probabilities", "between the loops of a causal kernel"),
        (CAUSAL, {"OWN_OUT": True}, "own_out", "is for SCHEDULE=persistent"),
        (
            FULL,
            {"SCHEDULE": Schedule.PIPELINED, "PACK_P": False},
            "packed_across_tiles",
            "between the loops of a pipelined kernel",
        ),
        (WIDE, {"SCHEDULE": Schedule.PIPELINED}, "shared_memory", "needs 328320 bytes of shared memory"),
        (WIDE, {"SCHEDULE": Schedule.SINGLE, "CONSUMERS": 1}, "programs_per_sm", "two programs on an SM"),
        (NARROW, {"BLOCK_N": 32}, "search_space", "BLOCK_N=32 is not one of"),
        (CAUSAL, {"HEADS_PER_GROUP": 1}, "search_space", "HEADS_PER_GROUP=1 is not one of"),
        (
            AttentionProblem.parse("4x32x8x4095x4096x128"),
            {"EXACT_LENGTHS": True},
            "exact_lengths",
            "BLOCK_M=128 to divide 4095",
        ),
        (AttentionProblem.parse("4x32x8x64x4096x128"), {}, "tile_fits_problem", "BLOCK_M=128 is at least twice"),
    ],
)
def test_the_constraint_that_fails_is_named_with_its_reason(
    problem: AttentionProblem, change: dict, constraint: str, says: str
) -> None:
    name, reason = rejected(problem, **change)
    assert name == constraint
    assert says in reason


def test_what_a_consumer_holds_must_fit_its_registers() -> None:
    family = replace(CAUSAL.family, head_dim=16, head_dim_v=256)
    problem = replace(CAUSAL, family=family)
    assert rejected(problem, BLOCK_N=128) == (
        "registers",
        "accumulators, scores and P take 224 registers per thread, CONSUMERS=2 leaves 208",
    )


def test_three_consumers_have_no_registers_for_them() -> None:
    config = HopperWsFwdConfig(SCHEDULE=Schedule.TILE, CONSUMERS=3, BLOCK_N=64)
    for words in ("bias", "dropout"):
        rejected = SPEC.rejection(config, family=family_of("64", words), shape=None, device=H200)
        assert rejected is not None
        assert rejected.reason == "CONSUMERS=3 leaves no registers for a mask or for random bits"


# --- what a search draws ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [CAUSAL, FULL, NARROW, WIDE])
def test_a_config_that_passes_is_its_own_canonical_one(problem: AttentionProblem) -> None:
    for config in SPEC.configs():
        canonical = SPEC.canonical(config)
        assert SPEC.canonical(canonical) == canonical
        if SPEC.rejection(config, family=problem.family, shape=None, device=H200) is None:
            assert canonical == config


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", ["", ",causal"])
def test_few_draws_are_rejected(head_dim: int, causal: str) -> None:
    problem = AttentionProblem.parse(f"4x8x8x6144x6144x{head_dim}{causal}")  # which every block divides
    knobs, rng = search_domain(SPEC, problem.family, H200), random.Random(0)
    drawn = [SPEC.canonical(SPEC.config(**{knob.name: rng.choice(knob.values) for knob in knobs})) for _ in range(400)]
    passed = [
        SPEC.rejection(config, family=problem.family, shape=problem.shape, device=H200) is None for config in drawn
    ]
    assert sum(passed) > 0.75 * len(passed)


def test_a_domain_has_exactly_the_values_that_can_pass() -> None:
    values = {knob.name: knob.values for knob in search_domain(SPEC, WIDE.family, H200)}
    assert values["SCHEDULE"] == (Schedule.TILE, Schedule.PERSISTENT)
    assert (values["CONSUMERS"], values["BLOCK_N"], values["num_stages"], values["PACK_P"]) == (
        (2,),
        (64,),
        (2,),
        (True,),
    )


# --- where winners are kept -------------------------------------------------------------------------------------------


def test_a_winner_comes_back_from_a_database(tmp_path: Path) -> None:
    winner = Candidate(family=CAUSAL.family, variant=Variant.HOPPER_WS, config=replace(BASE, PING_PONG=True))
    with TuningDatabase(tmp_path / "tuning.db") as database:
        tune = begin(database)
        database.save_trial(tune, replace(ok_record(), candidate=winner, problem=CAUSAL))
        confirm = begin(database, SessionKind.CONFIRM, parent_id=tune)
        database.save_trial(confirm, replace(confirmed(0.9, 1), candidate=winner, problem=CAUSAL))
    (row,) = load_snapshot(tmp_path / "tuning.db", []).rows
    assert (row.candidate, row.problem) == (winner, CAUSAL)
