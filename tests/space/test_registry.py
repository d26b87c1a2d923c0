"""The registry of variants: spaces, constraints, defaults, and who serves what."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.errors import UnsupportedError
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import MAX_EXTENT, AttentionProblem, AttentionShape
from fa_autotune.space.candidate import CompileForm
from fa_autotune.space.constraints import ShapeNeeds
from fa_autotune.space.registry import (
    VARIANTS,
    VariantSpec,
    compile_form,
    problem_candidates,
    rejection,
    variant_spec,
)
from fa_autotune.space.seeds import seed_configs
from kit.strategies import devices, families, shapes, specs_and_families

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


@given(specs_and_families(), shapes(max_seqlen=600), devices(), st.data())
def test_needs_are_met_by_the_shapes_that_are_not_rejected(
    served: tuple[VariantSpec, AttentionFamily], shape: AttentionShape, device: DeviceSpec, data: st.DataObject
) -> None:
    spec, family = served
    seeds = list(seed_configs(spec, family, device.arch))
    config = data.draw(st.sampled_from([*seeds, next(spec.configs())]))
    for name in ("EXACT_LENGTHS", "DIAGONAL_FIRST"):
        if hasattr(config, name):
            config = replace(config, **{name: data.draw(st.booleans())})  # type: ignore[arg-type]
    needs = spec.shape_needs(config, family=family, device=device)
    lengths = st.sampled_from([16, 31, 32, 33, 64, 128, 192, 256])
    heads, batches = data.draw(st.sampled_from([(1, 1), (8, 1), (8, 8)])), [1, MAX_EXTENT // 8]
    shape = replace(shape, num_q_heads=heads[0], num_kv_heads=heads[1], batch_size=data.draw(st.sampled_from(batches)))
    for asked in (shape, replace(shape, seqlen_q=data.draw(lengths), seqlen_k=data.draw(lengths))):
        rejected = spec.rejection(config, family=family, shape=asked, device=device)
        is_met = isinstance(needs, ShapeNeeds) and needs.are_met_by(asked)
        assert is_met is (rejected is None)
