"""The registry of variants: spaces, constraints, defaults, and who serves what."""

import pytest
from hypothesis import given

from fa_autotune.errors import UnsupportedError
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import CompileForm
from fa_autotune.space.registry import (
    VARIANTS,
    VariantSpec,
    compile_form,
    problem_candidates,
    rejection,
    variant_spec,
)
from kit.strategies import families

H200 = KNOWN_DEVICES["h200"]


every_spec = pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: f"{spec.kernel_pass}-{spec.variant}")


@every_spec
def test_candidates_of_a_problem_pass_their_own_constraints(spec: VariantSpec) -> None:
    problem = AttentionProblem.parse("1x2x2x64x64x64").for_pass(spec.kernel_pass)
    found = problem_candidates(problem, spec, H200)
    assert found
    assert all(rejection(candidate, problem.shape, H200) is None for candidate in found)


@every_spec
def test_the_space_has_as_many_points_as_it_says(spec: VariantSpec) -> None:
    assert len(set(spec.configs())) == spec.size()


@given(families())
def test_only_families_with_any_access_compile_in_the_general_form(family: AttentionFamily) -> None:
    assert (compile_form(family) is CompileForm.GENERAL) == (family.access is Access.ANY)


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no wgmma variant of the fwd pass"):
        variant_spec(Pass.FWD, "wgmma")
