"""Where a search starts among the kernels in Gluon."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import (
    FusedConfig,
    HopperWideBwdConfig,
)
from fa_autotune.space.estimates import fused_smem_bytes
from fa_autotune.space.registry import rejection, supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.strategies import head_dims

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
WIDE_SPEC = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WIDE)
CAUSAL = AttentionProblem.parse("4x32x8x4096x4096x128,causal,bwd_fused")
FULL = AttentionProblem.parse("4x32x8x4096x4096x128,bwd_fused")
NARROW = AttentionProblem.parse("4x32x8x4096x4096x64,causal,bwd_fused")
WIDE_CAUSAL = AttentionProblem.parse("4x16x8x4096x4096x256,causal,bwd_fused")
WIDE_FULL = AttentionProblem.parse("4x16x8x4096x4096x192,bwd_fused")


# --- the fused backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem", [CAUSAL, FULL, NARROW, WIDE_CAUSAL, WIDE_FULL], ids=lambda problem: problem.family.label
)
def test_seeds_pass_and_the_default_is_the_first(problem: AttentionProblem) -> None:
    (spec,) = supported_variants(problem.family, "sm_90", (3, 7))
    seeds = seed_configs(spec, problem.family, "sm_90")
    assert seeds[0] == default_config(spec, problem.family, "sm_90")
    assert len(set(seeds)) == len(seeds) >= 4
    own_keys = replace(problem.shape, num_kv_heads=problem.shape.num_q_heads)
    for config in seeds:
        assert spec.rejection(config, family=problem.family, shape=own_keys, device=H200) is None, config


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


# --- the forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", ["16", "64", "96", "128", "192", "256", "192x128", "128x256"])
@pytest.mark.parametrize(
    "words",
    [
        "dropout",
        "causal,dropout,softcap,alibi,sinks",
        "bool_mask",
        "causal,bias",
        "wide_bias,alibi",
        "bias,dropout",
        "causal,wide_bias,softcap,alibi,sinks,dropout",
        "bias,loose_mask",
        "causal,left=9,bool_mask",
    ],
)
def test_every_seed_of_what_is_served_passes_the_constraints(head_dim: str, words: str) -> None:
    family = AttentionProblem.parse(f"1x1x1x64x64x{head_dim},{words}").family
    if SPEC.supports(family, "sm_90", (3, 7)):
        assert family.head_dim_v > 128
        return
    seeds = seed_configs(SPEC, family, "sm_90")
    assert seeds[0] == default_config(SPEC, family, "sm_90")
    assert [SPEC.rejection(one, family=family, shape=None, device=H200) for one in seeds] == [None] * len(seeds)


@given(head_dims(256), head_dims(256), st.booleans(), st.sampled_from([DType.FLOAT16, DType.BFLOAT16]))
def test_every_family_that_is_served_has_a_default_that_passes(
    head_dim: int, head_dim_v: int, causal: bool, dtype: DType
) -> None:
    family = AttentionFamily(
        dtype=dtype,
        head_dim=head_dim - head_dim % 8,
        head_dim_v=head_dim_v - head_dim_v % 8,
        bounded_right=causal,
        access=Access.TMA,
    )
    candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=default_config(SPEC, family, "sm_90"))
    assert rejection(candidate, None, H200) is None


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", ["", ",causal"])
def test_every_seed_passes(head_dim: int, causal: str) -> None:
    problem = AttentionProblem.parse(f"4x8x8x4096x4096x{head_dim}{causal}")
    seeds = seed_configs(SPEC, problem.family, "sm_90")
    assert len(set(seeds)) == len(seeds) >= 4
    for config in seeds:
        candidate = Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)
        assert rejection(candidate, problem.shape, H200) is None, config
