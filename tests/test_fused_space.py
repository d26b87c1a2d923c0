"""The search space of the fused backward: who is served, what may run where, and where a search starts."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.config import BwdPostprocessConfig, HopperWsBwdConfig, config_from_key, config_key, config_label
from fa_autotune.constraints import fused_smem_bytes
from fa_autotune.device import KNOWN_DEVICES
from fa_autotune.problem import Access, AttentionFamily, AttentionProblem, DType, Pass
from fa_autotune.records import Candidate, Variant
from fa_autotune.render import render
from fa_autotune.variants import default_config, rejection, seed_configs, supported_variants, variant_spec

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WS)
CAUSAL = AttentionProblem.parse("4x32x8x4096x4096x128,causal,bwd_fused")
FULL = AttentionProblem.parse("4x32x8x4096x4096x128,bwd_fused")
NARROW = AttentionProblem.parse("4x32x8x4096x4096x64,causal,bwd_fused")


@pytest.mark.parametrize("triton", [(3, 6), (3, 7)])
@pytest.mark.parametrize("unordered", [False, True])
def test_hopper_with_a_known_triton_is_served(triton: tuple[int, int], unordered: bool) -> None:
    assert SPEC.supports(replace(CAUSAL.family, unordered=unordered), "sm_90", triton) is None


@pytest.mark.parametrize(
    ("change", "arch", "triton", "says"),
    [
        ({}, "sm_100", (3, 7), r"wgmma\) are sm_90's alone, sm_100 has none"),
        ({}, "gfx942", (3, 7), "gfx942 has none"),
        ({}, "sm_90", (3, 8), r"written for Triton 3\.6 and 3\.7, not 3\.8"),
        ({"access": Access.ALIGNED}, "sm_90", (3, 7), r"\(access=aligned\)"),
        ({"dtype": DType.FLOAT32}, "sm_90", (3, 7), "multiplies no float32"),
        ({"head_dim": 136}, "sm_90", (3, 7), "up to head_dim 128, not 136"),
        ({"head_dim_v": 192}, "sm_90", (3, 7), "up to head_dim 128, not 192"),
    ],
)
def test_what_is_not_served_gets_a_reason(change: dict, arch: str, triton: tuple[int, int], says: str) -> None:
    reason = SPEC.supports(replace(CAUSAL.family, **change), arch, triton)
    assert reason is not None
    assert re.search(says, reason)


@given(
    dims=st.tuples(st.integers(1, 16), st.integers(1, 16)),
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
    ],
)
def test_the_constraint_that_fails_is_named_with_its_reason(
    problem: AttentionProblem, change: dict, constraint: str, says: str
) -> None:
    candidate = Candidate(
        family=problem.family, variant=Variant.HOPPER_WS, config=replace(HopperWsBwdConfig(), **change)
    )
    found = rejection(candidate, problem.shape, H200)
    assert found is not None
    assert found.constraint == constraint
    assert says in found.reason


def test_a_length_of_any_size_may_run() -> None:
    problem = AttentionProblem.parse("1x1x1x1x1x64,bwd_fused")
    candidate = Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=HopperWsBwdConfig())
    assert rejection(candidate, problem.shape, H200) is None


@pytest.mark.parametrize("problem", [CAUSAL, FULL, NARROW])
def test_seeds_pass_and_the_default_is_the_first(problem: AttentionProblem) -> None:
    seeds = seed_configs(SPEC, problem.family, "sm_90")
    assert seeds[0] == default_config(SPEC, problem.family, "sm_90")
    assert len(set(seeds)) == len(seeds) >= 4
    own_keys = replace(problem.shape, num_kv_heads=problem.shape.num_q_heads)
    for config in seeds:
        candidate = Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)
        assert rejection(candidate, own_keys, H200) is None, config


@pytest.mark.parametrize("problem", [CAUSAL, FULL, NARROW])
def test_every_config_that_passes_is_another_kernel(problem: AttentionProblem) -> None:
    """A knob that changed nothing would have the same kernel searched twice."""
    found = [
        Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)
        for config in SPEC.configs()
        if SPEC.rejection(config, family=problem.family, shape=None, device=H200) is None
    ]
    assert len({render(candidate).digest for candidate in found}) == len(found) >= 24


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_family_that_is_served_fits_a_hopper(eighth: int, eighth_v: int) -> None:
    family = replace(CAUSAL.family, head_dim=8 * eighth, head_dim_v=8 * eighth_v)
    assert fused_smem_bytes(family) <= H200.smem_optin_bytes


def test_a_config_without_blocks_has_a_name_and_a_key() -> None:
    for config in (HopperWsBwdConfig(), BwdPostprocessConfig(num_warps=8)):
        assert config_label(config).strip()
        assert config_from_key(type(config), config_key(config)) == config
    assert config_label(HopperWsBwdConfig(DIAGONAL_FIRST=True)) == "diagonal_first=True"
