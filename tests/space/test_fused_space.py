"""The search space of the fused backward: who is served, what may run where, and where a search starts."""

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
    FusedConfig,
    HopperWideBwdConfig,
    HopperWsBwdConfig,
    config_from_key,
    config_key,
    config_label,
)
from fa_autotune.space.estimates import fused_smem_bytes
from fa_autotune.space.registry import VariantSpec, rejection, supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs

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


@pytest.mark.parametrize("triton", [(3, 6), (3, 7)])
@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize(("problem", "spec"), [(CAUSAL, SPEC), (WIDE_CAUSAL, WIDE_SPEC)], ids=["narrow", "wide"])
def test_hopper_with_a_known_triton_is_served(
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
        ({}, "sm_90", (3, 8), r"written for Triton 3\.6 and 3\.7, not 3\.8"),
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
    spec = spec_of(problem)
    candidate = Candidate(family=problem.family, variant=spec.variant, config=spec.config(**change))
    found = rejection(candidate, problem.shape, H200)
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
def test_seeds_pass_and_the_default_is_the_first(problem: AttentionProblem) -> None:
    spec = spec_of(problem)
    seeds = seed_configs(spec, problem.family, "sm_90")
    assert seeds[0] == default_config(spec, problem.family, "sm_90")
    assert len(set(seeds)) == len(seeds) >= 4
    own_keys = replace(problem.shape, num_kv_heads=problem.shape.num_q_heads)
    for config in seeds:
        assert spec.rejection(config, family=problem.family, shape=own_keys, device=H200) is None, config


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


@given(st.integers(1, 32), st.integers(1, 32))
def test_the_default_of_every_family_fits_a_hopper(eighth: int, eighth_v: int) -> None:
    family = replace(CAUSAL.family, head_dim=8 * eighth, head_dim_v=8 * eighth_v)
    (spec,) = supported_variants(family, "sm_90", (3, 7))
    config = default_config(spec, family, "sm_90")
    assert isinstance(config, FusedConfig)
    assert fused_smem_bytes(family, config) <= H200.smem_optin_bytes


@pytest.mark.parametrize(
    ("head_dims", "stages"),
    [("256", (1, 3)), ("192", (2, 3)), ("192x128", (2, 3)), ("256x128", (2, 3)), ("256x192", (2, 2)), ("224", (1, 3))],
)
def test_a_second_tile_of_do_is_taken_where_two_parts_of_dq_fit_beside_it(
    head_dims: str, stages: tuple[int, int]
) -> None:
    family = AttentionProblem.parse(f"4x16x8x4096x4096x{head_dims},causal,bwd_fused").family
    for config in seed_configs(WIDE_SPEC, family, "sm_90"):
        assert isinstance(config, HopperWideBwdConfig)
        assert stages == (config.DO_STAGES, config.DQ_STAGES)


def test_the_order_that_was_fastest_on_a_causal_problem_is_a_seed() -> None:
    assert HopperWideBwdConfig() == default_config(WIDE_SPEC, WIDE_CAUSAL.family, "sm_90")
    fastest = HopperWideBwdConfig(HEADS_PER_GROUP=2, DIAGONAL_FIRST=True)
    assert fastest in seed_configs(WIDE_SPEC, WIDE_CAUSAL.family, "sm_90")


def test_a_config_without_blocks_has_a_name_and_a_key() -> None:
    for config in (HopperWsBwdConfig(), HopperWideBwdConfig(DQ_STAGES=2), BwdPostprocessConfig(num_warps=8)):
        assert config_label(config).strip()
        assert config_from_key(type(config), config_key(config)) == config
    assert config_label(HopperWsBwdConfig(DIAGONAL_FIRST=True)) == "diagonal_first=True"
