"""The search space of the fused backward: who is served, and what may run where."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import (
    BwdPostprocessConfig,
    HopperWideBwdConfig,
    HopperWsBwdConfig,
    config_from_key,
    config_key,
    config_label,
)
from fa_autotune.space.registry import KnobValue, VariantSpec, rejection, supported_variants, variant_spec
from fa_autotune.space.support import TESTED_TRITONS, wide_supports

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WS)
WIDE_SPEC = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WIDE)
CAUSAL = AttentionProblem.parse("4x32x8x4096x4096x128,causal,bwd_fused")
FULL = AttentionProblem.parse("4x32x8x4096x4096x128,bwd_fused")
NARROW = AttentionProblem.parse("4x32x8x4096x4096x64,causal,bwd_fused")
WIDE_CAUSAL = AttentionProblem.parse("4x16x8x4096x4096x256,causal,bwd_fused")
WIDE_FULL = AttentionProblem.parse("4x16x8x4096x4096x192,bwd_fused")


def spec_of(problem: AttentionProblem) -> VariantSpec:
    """Of the variant that serves a problem."""
    (spec,) = supported_variants(problem.family, "sm_90", (3, 7))
    return spec


def candidate_of(problem: AttentionProblem, **knobs: KnobValue) -> Candidate:
    """A point of the space of the variant that serves a problem."""
    spec = spec_of(problem)
    return Candidate(family=problem.family, variant=spec.variant, config=spec.config(**knobs))


@pytest.mark.parametrize("triton", [*TESTED_TRITONS, (3, 10), (4, 0)])
@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize(("problem", "spec"), [(CAUSAL, SPEC), (WIDE_CAUSAL, WIDE_SPEC)], ids=["narrow", "wide"])
def test_hopper_with_a_known_triton_or_a_newer_one_is_served(
    problem: AttentionProblem, spec: VariantSpec, triton: tuple[int, int], unordered: bool
) -> None:
    assert supported_variants(replace(problem.family, unordered=unordered), "sm_90", triton) == [spec]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(136, 136), (64, 136), (136, 64), (192, 128), (256, 256)])
def test_one_head_dim_above_128_makes_a_family_wide(head_dim: int, head_dim_v: int) -> None:
    family = replace(CAUSAL.family, head_dim=head_dim, head_dim_v=head_dim_v)
    assert supported_variants(family, "sm_90", (3, 7)) == [WIDE_SPEC]


@pytest.mark.parametrize(
    ("change", "arch", "triton", "says"),
    [
        ({}, "sm_100", (3, 7), r"wgmma\) are sm_90's alone, sm_100 has none"),
        ({}, "gfx942", (3, 7), "gfx942 has none"),
        ({}, "sm_90", (3, 5), r"needs Triton 3\.6 or newer, not 3\.5"),
        ({"access": Access.ALIGNED}, "sm_90", (3, 7), r"\(access=aligned\)"),
        ({"dtype": DType.FLOAT32}, "sm_90", (3, 7), "multiplies no float32"),
    ],
)
@pytest.mark.parametrize("problem", [CAUSAL, WIDE_CAUSAL], ids=["narrow", "wide"])
def test_what_is_not_served_gets_a_reason(
    problem: AttentionProblem, change: dict, arch: str, triton: tuple[int, int], says: str
) -> None:
    reason = spec_of(problem).supports(replace(problem.family, **change), arch, triton)
    assert reason is not None
    assert re.search(says, reason)


@pytest.mark.parametrize(
    ("spec", "change", "says"),
    [
        (SPEC, {"head_dim": 136}, "up to head_dim 128, not 136; hopper_wide serves"),
        (SPEC, {"head_dim_v": 192}, "up to head_dim 128, not 192; hopper_wide serves"),
        (WIDE_SPEC, {}, "for head dims above 128; hopper_ws serves"),
    ],
)
def test_what_the_other_fused_kernel_serves_gets_its_name(spec: VariantSpec, change: dict, says: str) -> None:
    reason = spec.supports(replace(CAUSAL.family, **change), "sm_90", (3, 7))
    assert reason is not None
    assert says in reason


@given(
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    dtype=st.sampled_from([DType.FLOAT16, DType.BFLOAT16]),
    causal=st.booleans(),
    unordered=st.booleans(),
    triton=st.sampled_from([(3, 6), (3, 7)]),
)
def test_what_the_fused_kernel_serves_the_kernels_round_it_serve_too(
    dims: tuple[int, int], dtype: DType, causal: bool, unordered: bool, triton: tuple[int, int]
) -> None:
    family = AttentionFamily(
        kernel_pass=Pass.BWD_FUSED, dtype=dtype, head_dim=8 * dims[0], head_dim_v=8 * dims[1],
        bounded_right=causal, unordered=unordered,
    )  # fmt: skip
    after = replace(family, kernel_pass=Pass.BWD_POSTPROCESS, unordered=False)
    before = replace(after, kernel_pass=Pass.BWD_PREPROCESS, head_dim=family.head_dim_v, bounded_right=False)
    for one in (family, before, after):
        assert supported_variants(one, "sm_90", triton)
        assert not [spec for spec in supported_variants(one, "sm_80", triton)]


@pytest.mark.parametrize(
    ("problem", "change", "constraint", "says"),
    [
        (FULL, {"DIAGONAL_FIRST": True}, "diagonal_first", "a full family has none"),
        (
            AttentionProblem.parse("4x32x8x4096x4096x128,causal,bwd_fused"),
            {"DIAGONAL_FIRST": True},
            "diagonal_first",
            "4 query heads of a kv head miss the L2 cache",
        ),
        (NARROW, {"SCORES_EARLY": True}, "scores_early", "a tile of 128 query rows spill"),
        (CAUSAL, {"HEADS_PER_GROUP": 64}, "search_space", "HEADS_PER_GROUP=64 is not one of"),
        (
            AttentionProblem.parse("1x1x1x4000x4096x128,bwd_fused"),
            {"EXACT_LENGTHS": True},
            "exact_lengths",
            "BLOCK_M=64 to divide 4000",
        ),
        (
            AttentionProblem.parse("1x1x1x4096x4032x128,bwd_fused"),
            {"EXACT_LENGTHS": True},
            "exact_lengths",
            "BLOCK_N=128 to divide 4032",
        ),
        (
            AttentionProblem.parse("1x1x1x4032x4096x64,bwd_fused"),
            {"EXACT_LENGTHS": True},
            "exact_lengths",
            "BLOCK_M=128 to divide 4032",
        ),
        (
            AttentionProblem.parse("64x1024x8x65536x128x128,bwd_fused"),
            {},
            "addressable_dq",
            "dq_acc has 2147483648 rows",
        ),
        (WIDE_FULL, {"DIAGONAL_FIRST": True}, "diagonal_first", "a full family has none"),
        (WIDE_FULL, {"DQ_STAGES": 4}, "search_space", "DQ_STAGES=4 is not one of"),
        (WIDE_CAUSAL, {"DO_STAGES": 2}, "shared_memory", "needs 264064 bytes of shared memory, sm_90 offers 232448"),
        (
            WIDE_CAUSAL,
            {"DO_STAGES": 2, "DQ_STAGES": 2},
            "shared_memory",
            "needs 247680 bytes of shared memory, sm_90 offers 232448",
        ),
        (
            AttentionProblem.parse("1x1x1x4096x4000x256,bwd_fused"),
            {"EXACT_LENGTHS": True},
            "exact_lengths",
            "BLOCK_N=64 to divide 4000",
        ),
    ],
)
def test_the_constraint_that_fails_is_named_with_its_reason(
    problem: AttentionProblem, change: dict, constraint: str, says: str
) -> None:
    found = rejection(candidate_of(problem, **change), problem.shape, H200)
    assert found is not None
    assert found.constraint == constraint
    assert says in found.reason


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_length_of_any_size_may_run(head_dim: int) -> None:
    problem = AttentionProblem.parse(f"1x1x1x1x1x{head_dim},bwd_fused")
    spec = spec_of(problem)
    assert spec.rejection(spec.config(), family=problem.family, shape=problem.shape, device=H200) is None


PROBLEMS = pytest.mark.parametrize(
    "problem", [CAUSAL, FULL, NARROW, WIDE_CAUSAL, WIDE_FULL], ids=lambda problem: problem.family.label
)


@PROBLEMS
def test_every_config_that_passes_is_another_kernel(problem: AttentionProblem) -> None:
    """A knob that changed nothing would have the same kernel searched twice."""
    spec = spec_of(problem)
    found = [
        Candidate(family=problem.family, variant=spec.variant, config=config)
        for config in spec.configs()
        if spec.rejection(config, family=problem.family, shape=None, device=H200) is None
    ]
    assert len({render(candidate).digest for candidate in found}) == len(found) >= 24


def test_a_config_without_blocks_has_a_name_and_a_key() -> None:
    for config in (HopperWsBwdConfig(), HopperWideBwdConfig(DQ_STAGES=2), BwdPostprocessConfig(num_warps=8)):
        assert config_label(config).strip()
        assert config_from_key(type(config), config_key(config)) == config
    assert config_label(HopperWsBwdConfig(DIAGONAL_FIRST=True)) == "diagonal_first=True"


@pytest.mark.parametrize("triton", [(3, 6), (3, 7)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("flags", ["left=9", "causal,left=9", "fp16,softcap", "left=9,right=3,softcap,unordered"])
def test_windows_and_caps_are_served_on_hopper(flags: str, head_dim: int, triton: tuple[int, int]) -> None:
    text = f"4x16x16x4096x4096x{head_dim},bwd_fused,{flags}"
    (spec,) = supported_variants(AttentionProblem.parse(text).family, "sm_90", triton)
    assert spec.variant is (Variant.HOPPER_WIDE if head_dim > 128 else Variant.HOPPER_WS)


@pytest.mark.parametrize(("knob", "constraint"), [("EXACT_LENGTHS", "exact_cap"), ("SCORES_EARLY", "scores_early")])
def test_knobs_that_make_capped_scores_spill_are_refused(knob: str, constraint: str) -> None:
    capped = AttentionProblem.parse("4x16x16x4096x4096x128,left=9,softcap,bwd_fused")
    found = rejection(candidate_of(capped, **{knob: True}), capped.shape, H200)
    assert found is not None
    assert found.constraint == constraint
    plain = AttentionProblem.parse("4x16x16x4096x4096x128,left=9,bwd_fused")
    assert rejection(candidate_of(plain, **{knob: True}), plain.shape, H200) is None
    wide = AttentionProblem.parse("4x16x16x4096x4096x256,left=9,softcap,bwd_fused")
    assert rejection(candidate_of(wide, EXACT_LENGTHS=True), wide.shape, H200) is not None


def test_the_one_combination_that_spills_is_refused_with_its_reason() -> None:
    spilling = AttentionProblem.parse("4x16x16x4096x4096x64,fp16,left=9,softcap,bwd_fused,unordered").family
    assert "in float16 spills where dq is added in any order" in str(SPEC.supports(spilling, "sm_90", (3, 7)))
    for change in ({"unordered": False}, {"softcap": False}, {"bounded_left": False}, {"head_dim": 128}):
        assert SPEC.supports(replace(spilling, **change), "sm_90", (3, 7)) is None


@pytest.mark.parametrize(("flags", "is_refused"), [("softcap", True), ("left=9", False), ("causal,left=9", False)])
def test_the_other_order_of_key_blocks_needs_an_edge(flags: str, is_refused: bool) -> None:
    problem = AttentionProblem.parse(f"4x16x16x4096x4096x128,{flags},bwd_fused")
    found = rejection(candidate_of(problem, DIAGONAL_FIRST=True), problem.shape, H200)
    assert (found is not None and found.constraint == "diagonal_first") is is_refused


def test_statistics_that_a_descriptor_does_not_address_are_refused() -> None:
    candidate = candidate_of(AttentionProblem.parse("1x1x1x64x64x8,varlen,bwd_fused"))
    shapes = [AttentionProblem.parse(f"{batch}x128x128x4096x64x8").shape for batch in (64, 2048)]
    small, large = (rejection(candidate, shape, H200) for shape in shapes)
    assert small is None
    assert large is not None
    assert (large.constraint, "lse and delta in a row" in large.reason) == ("addressable_dq", True)


def test_a_window_that_spills_in_the_wide_kernel_is_refused_with_the_reason() -> None:
    window = AttentionProblem.parse("1x2x1x64x64x256,causal,left=9,varlen,bwd_fused").family
    reason = wide_supports(window, "sm_90", (3, 6))
    assert reason is not None
    assert "both edges of a window spill above head_dim 192" in reason
    assert wide_supports(replace(window, varlen=False), "sm_90", (3, 6)) is None
