"""The registry of variants: spaces, constraints, defaults, and who serves what."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fa_autotune.errors import UnsupportedError
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import FUSED_BACKWARD, Access, AttentionFamily, DType, Pass
from fa_autotune.problem.problem import MAX_EXTENT, AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import PortableFwdConfig
from fa_autotune.space.constraints import ShapeNeeds
from fa_autotune.space.estimates import head_dim_pieces, padded_head_dim, whole_smem_bytes
from fa_autotune.space.registry import (
    VARIANTS,
    VariantSpec,
    compile_form,
    problem_candidates,
    rejection,
    supported_variants,
    variant_spec,
)
from fa_autotune.space.seeds import default_config, seed_configs
from kit.strategies import candidates, devices, families, problems, shapes, specs_and_families

H200 = KNOWN_DEVICES["h200"]
LLAMA = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
BASE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


def portable(config: PortableFwdConfig, family: AttentionFamily = LLAMA.family) -> Candidate:
    return Candidate(family=family, variant=Variant.PORTABLE, config=config)


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


@given(specs_and_families(), devices())
def test_the_default_passes_every_constraint_of_every_gpu(
    pair: tuple[VariantSpec, AttentionFamily], device: DeviceSpec
) -> None:
    spec, family = pair
    assume(not spec.variant.is_gluon or spec.supports(family, device.arch, (3, 7)) is None)
    candidate = Candidate(family=family, variant=spec.variant, config=default_config(spec, family, device.arch))
    rejected = rejection(candidate, None, device)
    # The smallest tile of gradients above head_dim 256 is too much for some GPUs; others serve.
    assert rejected is None or (rejected.constraint == "operands" and spec.kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ))


@given(specs_and_families(), devices())
def test_the_default_fits_64_kilobytes_or_what_the_gpus_of_its_variant_have(
    pair: tuple[VariantSpec, AttentionFamily], device: DeviceSpec
) -> None:
    spec, family = pair
    assume(not spec.variant.is_gluon or spec.supports(family, H200.arch, (3, 7)) is None)
    backward_by_descriptors = spec.variant is Variant.TMA and spec.kernel_pass is not Pass.FWD
    large = backward_by_descriptors or spec.variant.is_gluon
    wide = max(family.head_dim, family.head_dim_v) > 256
    large = large or (wide and (spec.kernel_pass is not Pass.FWD or spec.variant is Variant.TMA))
    limit = H200.smem_optin_bytes if large else 99 * 1024 if wide or family.tf32 else 64 * 1024
    assert whole_smem_bytes(family, default_config(spec, family, device.arch)) <= limit


@given(specs_and_families())
def test_seeds_lie_in_the_search_space(pair: tuple[VariantSpec, AttentionFamily]) -> None:
    spec, family = pair
    for config in seed_configs(spec, family, H200.arch):
        rejected = spec.rejection(config, family=family, shape=None, device=H200)
        assert rejected is None or rejected.constraint != "search_space"


@given(st.integers(8, 512), st.sampled_from([32, 64, 128, 256]))
def test_head_dim_pieces_cover_the_head_dim_with_powers_of_two(head_dim: int, widest: int) -> None:
    pieces = head_dim_pieces(head_dim, widest)
    assert all(16 <= width <= widest and width.bit_count() == 1 for width in pieces)
    assert sum(pieces[:-1]) < head_dim <= sum(pieces)


@pytest.mark.parametrize(
    ("head_dim", "widest", "pieces"),
    [
        (8, 256, (16,)),
        (16, 256, (16,)),
        (40, 256, (32, 16)),
        (64, 256, (64,)),
        (96, 256, (64, 32)),
        (128, 256, (128,)),
        (128, 64, (64, 64)),
        (192, 256, (128, 64)),
        (200, 256, (256,)),
        (80, 32, (32, 32, 16)),
        (59, 32, (32, 32)),
        (300, 256, (256, 32, 16)),
        (512, 256, (256, 256)),
        (512, 128, (128, 128, 128, 128)),
    ],
)
def test_head_dim_pieces_are_the_narrowest_cover(head_dim: int, widest: int, pieces: tuple[int, ...]) -> None:
    assert (head_dim_pieces(head_dim, widest), padded_head_dim(head_dim, widest)) == (pieces, sum(pieces))


@given(families(), devices())
def test_some_variant_serves_every_family_but_bfloat16_and_tf32_where_nothing_multiplies_them(
    family: AttentionFamily, device: DeviceSpec
) -> None:
    assume(family.kernel_pass not in FUSED_BACKWARD)  # the split backward serves instead
    unserved = device.arch == "sm_75" and family.dtype is DType.BFLOAT16
    unserved |= family.tf32 and device.arch in ("sm_75", "gfx942")
    assert bool(supported_variants(family, device.arch, (3, 6))) != unserved


@pytest.mark.parametrize(
    ("arch", "triton", "says"),
    [
        ("sm_75", (3, 6), "bfloat16 matrix products need sm_80"),
        ("sm_70", (3, 6), "sm_75 and newer"),
        ("sm_90", (3, 5), r"needs Triton 3\.6"),
        ("gfx1030", (3, 6), "not a GPU that Triton compiles for"),
    ],
)
def test_portable_says_why_it_does_not_serve(arch: str, triton: tuple[int, int], says: str) -> None:
    reason = variant_spec(Pass.FWD, Variant.PORTABLE).supports(LLAMA.family, arch, triton)
    assert reason is not None
    assert re.search(says, reason)


@pytest.mark.parametrize("access", [Access.ALIGNED, Access.ANY])
def test_tma_serves_its_own_access_only(access: Access) -> None:
    reason = variant_spec(Pass.FWD, Variant.TMA).supports(replace(LLAMA.family, access=access), "sm_90", (3, 6))
    assert reason is not None
    assert access.value in reason


def test_the_most_specialised_variant_comes_first() -> None:
    assert [spec.variant for spec in supported_variants(LLAMA.family, "sm_90", (3, 7))] == [
        Variant.HOPPER_WS,
        Variant.TMA,
        Variant.PORTABLE,
    ]


def test_the_interpreter_serves_all_but_gluon() -> None:
    served = {spec.variant for spec in supported_variants(LLAMA.family, INTERPRETER.arch, (3, 7))}
    assert served == {Variant.PORTABLE, Variant.TMA}


@given(families())
def test_only_families_with_any_access_compile_in_the_general_form(family: AttentionFamily) -> None:
    assert (compile_form(family) is CompileForm.GENERAL) == (family.access is Access.ANY)


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no wgmma variant of the fwd pass"):
        variant_spec(Pass.FWD, "wgmma")
