"""Constraints: named, with a reason, and true of what they let pass."""

from dataclasses import replace

import pytest
from hypothesis import given

from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from fa_autotune.space.registry import (
    rejection,
    variant_spec,
)
from kit.strategies import candidates, devices, problems

H200 = KNOWN_DEVICES["h200"]
LLAMA = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
BASE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


def portable(config: PortableFwdConfig, family: AttentionFamily = LLAMA.family) -> Candidate:
    return Candidate(family=family, variant=Variant.PORTABLE, config=config)


@given(candidates(), problems(), devices())
def test_a_rejection_names_a_constraint_and_a_reason(
    candidate: Candidate, problem: AttentionProblem, device: DeviceSpec
) -> None:
    spec = variant_spec(candidate.family.kernel_pass, candidate.variant)
    if rejected := rejection(candidate, problem.shape, device):
        assert rejected.constraint in dict(spec.constraints)
        assert rejected.reason


@given(candidates(), problems(), devices())
def test_what_passes_on_a_shape_passes_on_the_family(
    candidate: Candidate, problem: AttentionProblem, device: DeviceSpec
) -> None:
    assert rejection(candidate, problem.shape, device) is not None or rejection(candidate, None, device) is None


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ({"HEADS_PER_GROUP": 64}, "search_space"),
        ({"maxnreg": 64}, "search_space"),
        ({"num_stages": 8}, "search_space"),
        ({"num_warps": 8}, "rows_per_warp"),
        ({"BLOCK_N": 256, "num_stages": 4}, "shared_memory"),
        ({"BLOCK_M": 256, "BLOCK_N": 256}, "registers"),
        ({"BLOCK_N": 16, "ROW_SUM_LANES": 8}, "row_sums"),
    ],
)
def test_the_constraint_that_fails_is_named(change: dict[str, int], constraint: str) -> None:
    rejected = rejection(portable(replace(BASE, **change)), LLAMA.shape, H200)
    assert rejected is not None
    assert rejected.constraint == constraint


@pytest.mark.parametrize(
    ("shape", "change", "constraint"),
    [
        ("1x8x8x4096x4095x128", {"EXACT_LENGTHS": True}, "exact_lengths"),
        ("1x8x8x4095x4096x128", {"EXACT_LENGTHS": True}, "exact_lengths"),
        ("1x8x8x32x4096x128", {}, "tile_fits_problem"),
        ("1x8x8x4096x32x128", {}, "tile_fits_problem"),
    ],
)
def test_a_constraint_on_the_shape_is_named(shape: str, change: dict[str, bool], constraint: str) -> None:
    problem = AttentionProblem.parse(shape)
    rejected = rejection(portable(replace(BASE, **change), problem.family), problem.shape, H200)
    assert rejected is not None
    assert rejected.constraint == constraint


def test_a_register_cap_is_refused_where_the_compiler_has_none() -> None:
    config = replace(BASE, BLOCK_M=128, maxnreg=168)
    rejected = rejection(portable(config), LLAMA.shape, KNOWN_DEVICES["mi300x"])
    assert rejected is not None
    assert rejected.constraint == "register_cap"


def test_a_boolean_is_no_integer_knob_value() -> None:
    config = replace(BASE)
    object.__setattr__(config, "ROW_SUM_LANES", True)  # as a foreign row might hold it
    rejected = rejection(portable(config), LLAMA.shape, H200)
    assert rejected is not None
    assert rejected.constraint == "search_space"


def test_kernels_for_exact_lengths_do_not_serve_sequences_in_a_row() -> None:
    """Whose lengths blocks may happen to divide."""
    config = replace(BASE, EXACT_LENGTHS=True)
    problem = AttentionProblem.parse("2x2x2x64x64x32,causal,varlen")
    found = rejection(portable(config, problem.family), problem.shape, H200)
    assert found is not None
    assert (found.constraint, "has any" in found.reason) == ("exact_lengths", True)
