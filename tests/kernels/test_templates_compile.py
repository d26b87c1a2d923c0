"""Every template compiles for every arch that its variant supports, and passes the gates there."""

from dataclasses import replace

import pytest

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import KEYLESS_PASSES, Pass
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import VARIANTS, VariantSpec, supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.combinations import rest, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.releases import THIS_TRITON

pytestmark = pytest.mark.kernel

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
LIKE_SM_80 = ("sm_86", "sm_89")  # the same code but for the arch's name
SMALLEST_SMEM_BYTES = 64 * 1024  # a default must fit it anywhere
H200 = KNOWN_DEVICES["h200"]
FORWARD_VARIANTS = [spec.variant for spec in VARIANTS if spec.kernel_pass is Pass.FWD]


def make_family(
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    dtype: DType = DType.BFLOAT16,
    access: Access = Access.TMA,
) -> AttentionFamily:
    return AttentionFamily(
        dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v or head_dim, bounded_right=causal, access=access
    )


def make_families(arch: str) -> list[AttentionFamily]:
    dtype = DType.FLOAT16 if arch == "sm_75" else DType.BFLOAT16  # Turing multiplies no bfloat16
    families = [
        make_family(64, causal=True, dtype=dtype),
        make_family(256, causal=True, dtype=dtype),
        make_family(64, dtype=dtype, access=Access.ANY),
    ]
    if arch in LIKE_SM_80:
        return families
    return [
        *families,
        make_family(128, dtype=dtype),
        make_family(96, causal=True, dtype=dtype),
        make_family(192, 128, causal=True, dtype=dtype),
    ]


def variants_of(family: AttentionFamily, arch: str) -> list[VariantSpec]:
    return supported_variants(family, arch, THIS_TRITON)


def plain_family(spec: VariantSpec, arch: str) -> AttentionFamily:
    """A family of a variant's pass that it serves where it serves any."""
    head_dim = 256 if spec.variant is Variant.HOPPER_WIDE else 64
    family = make_family(head_dim, dtype=DType.FLOAT16 if arch == "sm_75" else DType.BFLOAT16)
    return replace(family, kernel_pass=spec.kernel_pass, bounded_right=spec.kernel_pass not in KEYLESS_PASSES)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_template_compiles_for_every_arch_that_it_serves(arch: str, compile_all: CompileAll) -> None:
    """And passes the gates, in 64 KB of shared memory where it is written for GPUs that have no more."""
    large, small = [], []
    for spec in VARIANTS:
        family = plain_family(spec, arch)
        if spec.supports(family, arch, THIS_TRITON) is None:
            candidate = Candidate(family=family, variant=spec.variant, config=default_config(spec, family, arch))
            by_descriptors = spec.variant is Variant.TMA and spec.kernel_pass is not Pass.FWD
            (large if spec.variant.is_gluon or by_descriptors else small).append(candidate)
    assert unexpected(arch, large, compile_all(large, arch, H200.smem_optin_bytes)) == {}
    assert unexpected(arch, small, compile_all(small, arch, SMALLEST_SMEM_BYTES)) == {}


def test_the_archs_have_the_variants_that_are_written_for_them() -> None:
    """So that a variant which supports nothing could not pass the test above."""
    hopper, descriptors, everywhere = {"sm_90"}, {"sm_90", "sm_100"}, set(ARCHS)
    assert {
        (spec.kernel_pass, spec.variant): {
            arch for arch in ARCHS if spec.supports(plain_family(spec, arch), arch, THIS_TRITON) is None
        }
        for spec in VARIANTS
    } == {
        (Pass.FWD, Variant.PORTABLE): everywhere,
        (Pass.FWD, Variant.TMA): {*descriptors, "sm_120"},
        (Pass.FWD, Variant.HOPPER_WS): hopper,
        (Pass.BWD_DELTA, Variant.PORTABLE): everywhere,
        (Pass.BWD_DKDV, Variant.PORTABLE): everywhere,
        (Pass.BWD_DKDV, Variant.TMA): descriptors,
        (Pass.BWD_DQ, Variant.PORTABLE): everywhere,
        (Pass.BWD_DQ, Variant.TMA): descriptors,
        (Pass.BWD_PREPROCESS, Variant.PORTABLE): hopper,
        (Pass.BWD_FUSED, Variant.HOPPER_WS): hopper,
        (Pass.BWD_FUSED, Variant.HOPPER_WIDE): hopper,
        (Pass.BWD_POSTPROCESS, Variant.PORTABLE): hopper,
    }


@pytest.mark.parametrize("arch", [*rest(arch for arch in ARCHS if arch not in LIKE_SM_80), *slow(LIKE_SM_80)])
def test_defaults_compile_and_pass_all_gates_in_64_kb(arch: str, compile_all: CompileAll) -> None:
    candidates = [
        Candidate(family=family, variant=spec.variant, config=default_config(spec, family, arch))
        for family in make_families(arch)
        for spec in variants_of(family, arch)
    ]
    hopper = [candidate for candidate in candidates if candidate.variant.is_gluon]  # for what sm_90 has
    others = [candidate for candidate in candidates if not candidate.variant.is_gluon]
    assert unexpected(arch, hopper, compile_all(hopper, arch, H200.smem_optin_bytes)) == {}
    assert unexpected(arch, others, compile_all(others, arch, SMALLEST_SMEM_BYTES)) == {}


@pytest.mark.parametrize("arch", ["sm_90", *rest(["sm_75", "sm_80", "gfx942"])])
def test_the_fp32_default_compiles_and_passes_all_gates(arch: str, compile_all: CompileAll) -> None:
    family = make_family(64, causal=True, dtype=DType.FLOAT32)
    config = default_config(variant_spec(Pass.FWD, Variant.PORTABLE), family, arch)
    candidate = Candidate(family=family, variant=Variant.PORTABLE, config=config)
    (result,) = compile_all([candidate], arch, SMALLEST_SMEM_BYTES)
    assert (result.status, result.error) == (TrialStatus.OK, None)


@pytest.mark.parametrize(
    ("variant", "causal", "head_dim"),
    [
        one
        for variant in FORWARD_VARIANTS
        for one in (
            *rest([(variant, False, 64), (variant, True, 128)]),
            *slow([(variant, True, 64), (variant, False, 128)]),
        )
    ],
)
def test_seeds_for_hopper_give_the_search_a_start(
    variant: Variant, causal: bool, head_dim: int, compile_all: CompileAll
) -> None:
    """Three at least pass all gates, among them that the assembler leaves wgmma asynchronous."""
    family, spec = make_family(head_dim, causal=causal), variant_spec(Pass.FWD, variant)
    seeds = [
        Candidate(family=family, variant=variant, config=config) for config in seed_configs(spec, family, H200.arch)
    ]
    results = compile_all(seeds, H200.arch, H200.smem_optin_bytes)
    assert sum(result.status is TrialStatus.OK for result in results) >= 3, [result.gate for result in results]


@pytest.mark.rest
@pytest.mark.parametrize("variant", FORWARD_VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_ragged_full_kernel_keeps_hoppers_products_asynchronous(
    head_dim: int, variant: Variant, compile_all: CompileAll
) -> None:
    """A loop over the ragged keys that runs at most once, provably, made the assembler serialize all of them."""
    family, spec = make_family(head_dim), variant_spec(Pass.FWD, variant)
    seeds = [
        Candidate(family=family, variant=variant, config=config) for config in seed_configs(spec, family, H200.arch)
    ]
    results = compile_all(seeds, H200.arch, H200.smem_optin_bytes)
    assert "wgmma_serialized" not in {result.gate for result in results}
