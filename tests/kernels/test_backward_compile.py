"""Every backward template compiles for every arch that its variant supports, and its defaults pass the gates there."""

import pytest

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import BACKWARD_PASSES, KEYLESS_PASSES, SPLIT_BACKWARD, Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.combinations import rest, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.releases import THIS_TRITON
from kit.strategies import PLAIN_VARIANTS

pytestmark = pytest.mark.kernel

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
REST_ARCHS = ("sm_80", "sm_90", "gfx942")  # the others compile where slow tests are asked for
LIKE_SM_80 = ("sm_86", "sm_89")  # the same code but for the arch's name
SMALLEST_SMEM_BYTES = 64 * 1024  # a default must fit it anywhere
WIDE_SMEM_BYTES = 227 * 1024  # of the archs for which a backward is compiled through descriptors
H200 = KNOWN_DEVICES["h200"]
PORTABLE_PASSES = tuple(one for one in BACKWARD_PASSES if one is not Pass.BWD_FUSED)


def make_family(
    kernel_pass: Pass,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    dtype: DType = DType.BFLOAT16,
    access: Access = Access.TMA,
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        bounded_right=causal,
        access=access,
    )


def make_families(kernel_pass: Pass, arch: str) -> list[AttentionFamily]:
    dtype = DType.FLOAT16 if arch == "sm_75" else DType.BFLOAT16  # Turing multiplies no bfloat16
    causal = kernel_pass not in KEYLESS_PASSES
    families = [
        make_family(kernel_pass, 64, causal=causal, dtype=dtype),
        make_family(kernel_pass, 64, dtype=dtype, access=Access.ANY),
    ]
    if arch in LIKE_SM_80 or kernel_pass in KEYLESS_PASSES:
        return families
    families += [
        make_family(kernel_pass, 128, dtype=dtype),
        make_family(kernel_pass, 128, causal=True, dtype=dtype),
        make_family(kernel_pass, 96, causal=True, dtype=dtype),
    ]
    if kernel_pass is Pass.BWD_POSTPROCESS:
        return families
    return [
        *families,
        make_family(kernel_pass, 192, 128, causal=True, dtype=dtype),
        make_family(kernel_pass, 256, causal=True, dtype=dtype),
    ]


def defaults(family: AttentionFamily, arch: str, variant: Variant) -> list[Candidate]:
    return [
        Candidate(family=family, variant=variant, config=default_config(spec, family, arch))
        for spec in supported_variants(family, arch, THIS_TRITON)
        if spec.variant is variant
    ]


@pytest.mark.parametrize("kernel_pass", PORTABLE_PASSES)
@pytest.mark.parametrize("arch", [*rest(REST_ARCHS), *slow(arch for arch in ARCHS if arch not in REST_ARCHS)])
def test_portable_defaults_compile_and_pass_all_gates_in_64_kb(
    arch: str, kernel_pass: Pass, compile_all: CompileAll
) -> None:
    families = make_families(kernel_pass, arch)
    candidates = [one for family in families for one in defaults(family, arch, Variant.PORTABLE)]
    is_served = arch == "sm_90" or kernel_pass in SPLIT_BACKWARD
    assert len(candidates) == (len(families) if is_served else 0)
    assert unexpected(arch, candidates, compile_all(candidates, arch, SMALLEST_SMEM_BYTES)) == {}


@pytest.mark.parametrize("kernel_pass", [Pass.BWD_DKDV, Pass.BWD_DQ])
@pytest.mark.parametrize("arch", [*rest(["sm_90"]), *slow(["sm_100"])])
def test_defaults_through_descriptors_compile_and_pass_all_gates(
    arch: str, kernel_pass: Pass, compile_all: CompileAll
) -> None:
    families = make_families(kernel_pass, arch)
    candidates = [one for family in families for one in defaults(family, arch, Variant.TMA)]
    assert len(candidates) == sum(family.access is Access.TMA for family in families)
    assert unexpected(arch, candidates, compile_all(candidates, arch, WIDE_SMEM_BYTES)) == {}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "gfx942", "gfx950"])
def test_no_backward_goes_through_descriptors_where_they_spill_or_are_not_there(arch: str) -> None:
    family = make_family(Pass.BWD_DKDV, 64, dtype=DType.FLOAT16)
    assert defaults(family, arch, Variant.TMA) == []


@pytest.mark.parametrize("kernel_pass", SPLIT_BACKWARD)
@pytest.mark.parametrize("arch", [*rest(["sm_90"]), *slow(["sm_75", "sm_80", "gfx942"])])
def test_the_fp32_default_compiles_and_passes_all_gates(arch: str, kernel_pass: Pass, compile_all: CompileAll) -> None:
    family = make_family(kernel_pass, 64, causal=kernel_pass not in KEYLESS_PASSES, dtype=DType.FLOAT32)
    candidates = defaults(family, arch, Variant.PORTABLE)
    assert unexpected(arch, candidates, compile_all(candidates, arch, SMALLEST_SMEM_BYTES)) == {}


@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
@pytest.mark.parametrize("kernel_pass", [Pass.BWD_DKDV, Pass.BWD_DQ])
@pytest.mark.parametrize("head_dim", [*rest([128]), *slow([64])])
def test_seeds_for_hopper_give_the_search_a_start(
    head_dim: int, kernel_pass: Pass, variant: Variant, compile_all: CompileAll
) -> None:
    """Three at least pass all gates, and the assembler leaves wgmma asynchronous in all of them."""
    family, spec = make_family(kernel_pass, head_dim, causal=True), variant_spec(kernel_pass, variant)
    seeds = [
        Candidate(family=family, variant=variant, config=config)
        for config in seed_configs(spec, family, H200.arch)
        if spec.rejection(config, family=family, shape=None, device=H200) is None
    ]
    gates = [result.gate for result in compile_all(seeds, H200.arch, H200.smem_optin_bytes)]
    assert gates.count(None) >= 3, gates
    assert "wgmma_serialized" not in gates
