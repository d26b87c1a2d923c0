"""Kernels with features compile for the archs that they are written for, and pass the gates there."""

from collections.abc import Callable, Sequence

import pytest

from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.combinations import rest, sampled, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.feature_families import FEATURES, TILED, fewest_of_all, make_family
from kit.releases import THIS_TRITON
from kit.strategies import PLAIN_VARIANTS

pytestmark = pytest.mark.kernel

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
QUICK = [("sm_80", "window softcap"), ("sm_90", "window")]
ALL = [(arch, features) for arch in ARCHS for features in FEATURES]
WIDE = ("sm_90", "sm_100")  # whose backward through descriptors takes what they have
H200 = KNOWN_DEVICES["h200"]
Compile = Callable[[Sequence[Candidate], str], list[CompileResult]]


@pytest.fixture(scope="module")
def compiled(compile_all: CompileAll) -> Compile:
    """Compile candidates in the shared memory that a default may take on an arch."""

    def by_limit(candidates: Sequence[Candidate], arch: str) -> list[CompileResult]:
        limits = [
            H200.smem_optin_bytes
            if arch in WIDE and (one.variant is Variant.HOPPER_WS or one.family.kernel_pass is not Pass.FWD)
            else 64 * 1024
            for one in candidates
        ]
        found: dict[Candidate, CompileResult] = {}
        for limit in sorted(set(limits)):
            some = [one for one, own in zip(candidates, limits, strict=True) if own == limit]
            found.update(zip(some, compile_all(some, arch, limit), strict=True))
        return [found[one] for one in candidates]

    return by_limit


def families_of(features: str, arch: str) -> list[AttentionFamily]:
    dtype = DType.FLOAT16 if arch == "sm_75" else DType.BFLOAT16  # Turing multiplies no bfloat16
    return [
        make_family(kernel_pass, features, dtype, head_dim, access=access)
        for kernel_pass in TILED
        for head_dim, access in ((64, Access.TMA), (128, Access.TMA), (64, Access.ANY))
    ]


@pytest.mark.parametrize(
    ("arch", "features"),
    [*rest(QUICK), *slow(pair for pair in ALL if pair not in QUICK)],
)
def test_defaults_compile_and_pass_all_gates(arch: str, features: str, compiled: Compile) -> None:
    candidates = [
        Candidate(family=family, variant=spec.variant, config=default_config(spec, family, arch))
        for family in families_of(features, arch)
        for spec in supported_variants(family, arch, THIS_TRITON)
    ]
    assert unexpected(arch, candidates, compiled(candidates, arch)) == {}


@pytest.mark.parametrize("features", sampled(fewest_of_all()))
def test_every_feature_compiles_for_hopper_by_every_template(features: str, compiled: Compile) -> None:
    candidates = [
        Candidate(family=family, variant=spec.variant, config=default_config(spec, family, H200.arch))
        for family in (make_family(kernel_pass, features, head_dim=128) for kernel_pass in TILED)
        for spec in supported_variants(family, H200.arch, THIS_TRITON)
    ]
    assert unexpected(H200.arch, candidates, compiled(candidates, H200.arch)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_seeds_for_hopper_keep_its_products_asynchronous(
    head_dim: int, kernel_pass: Pass, variant: Variant, features: str, compiled: Compile
) -> None:
    """And two at least pass all gates, so that a search has a start."""
    family, spec = make_family(kernel_pass, features, head_dim=head_dim), variant_spec(kernel_pass, variant)
    seeds = [
        Candidate(family=family, variant=variant, config=config) for config in seed_configs(spec, family, H200.arch)
    ]
    gates = [result.gate for result in compiled(seeds, H200.arch)]
    assert "wgmma_serialized" not in gates
    assert gates.count(None) >= 2, gates
