"""Kernels of packed sequences compile for the archs that they are written for, and pass the gates there."""

from collections.abc import Callable, Sequence

import pytest

from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.combinations import rest, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.feature_families import TILED

pytestmark = pytest.mark.kernel

FEATURES: dict[str, dict[str, bool]] = {
    "full": {},
    "causal": {"bounded_right": True},
    "window": {"bounded_left": True, "bounded_right": True},
    "window alibi softcap": {"bounded_left": True, "bounded_right": True, "alibi": True, "softcap": True},
}
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
QUICK = [("sm_90", "causal")]
OTHERS = [("sm_80", "causal"), ("sm_90", "full")]
ALL = [(arch, features) for arch in ARCHS for features in FEATURES]
H200 = KNOWN_DEVICES["h200"]
Compile = Callable[[Sequence[Candidate], str], list[CompileResult]]


@pytest.fixture(scope="module")
def compiled(compile_all: CompileAll) -> Compile:
    return lambda candidates, arch: compile_all(
        candidates, arch, H200.smem_optin_bytes if arch in ("sm_90", "sm_100") else 64 * 1024
    )


def make_family(
    kernel_pass: Pass, features: str, head_dim: int, dtype: DType = DType.BFLOAT16, access: Access | None = None
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        access=access or strongest_access(dtype, head_dim, head_dim),
        varlen=True,
        **{"bounded_right": False, **FEATURES[features]},
    )


@pytest.mark.parametrize(
    ("arch", "features"),
    [*QUICK, *rest(OTHERS), *slow(pair for pair in ALL if pair not in (*QUICK, *OTHERS))],
)
def test_defaults_compile_and_pass_all_gates(arch: str, features: str, compiled: Compile) -> None:
    dtype = DType.FLOAT16 if arch == "sm_75" else DType.BFLOAT16  # Turing multiplies no bfloat16
    families = [
        make_family(kernel_pass, features, head_dim, dtype, access)
        for kernel_pass in TILED
        for head_dim, access in ((64, None), (128, None), (64, Access.ANY))
    ]
    candidates = [
        Candidate(
            family=family,
            variant=Variant.PORTABLE,
            config=default_config(variant_spec(family.kernel_pass, Variant.PORTABLE), family, arch),
        )
        for family in families
    ]
    assert unexpected(arch, candidates, compiled(candidates, arch)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_seeds_for_hopper_keep_its_products_asynchronous(
    head_dim: int, kernel_pass: Pass, features: str, compiled: Compile
) -> None:
    """And two at least pass all gates, so that a search has a start."""
    family, spec = make_family(kernel_pass, features, head_dim), variant_spec(kernel_pass, Variant.PORTABLE)
    seeds = [
        Candidate(family=family, variant=Variant.PORTABLE, config=config)
        for config in seed_configs(spec, family, H200.arch)
    ]
    gates = [result.gate for result in compiled(seeds, H200.arch)]
    assert "wgmma_serialized" not in gates
    assert gates.count(None) >= 2, gates
