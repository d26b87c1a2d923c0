"""Who serves what, on which GPU and with which Triton."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given

from fa_autotune.problem.device import INTERPRETER, DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import FUSED_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Variant
from fa_autotune.space.registry import (
    VARIANTS,
    VariantSpec,
    supported_variants,
    variant_spec,
)
from kit.feature_families import TILED
from kit.strategies import devices, families

LLAMA = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
SERVES_SEQUENCES = {
    *((one, Variant.PORTABLE) for one in (*TILED, Pass.BWD_PREPROCESS, Pass.BWD_POSTPROCESS)),
    (Pass.FWD, Variant.HOPPER_WS),
    (Pass.BWD_FUSED, Variant.HOPPER_WS),
    (Pass.BWD_FUSED, Variant.HOPPER_WIDE),
}


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


@pytest.mark.parametrize(
    "spec",
    [spec for spec in VARIANTS if spec.kernel_pass is not Pass.BWD_DELTA],  # which has no families of sequences
    ids=lambda spec: f"{spec.kernel_pass}-{spec.variant}",
)
def test_a_variant_that_does_not_serve_sequences_in_a_row_says_why(spec: VariantSpec) -> None:
    head_dim = 64 if (spec.kernel_pass, spec.variant) == (Pass.BWD_FUSED, Variant.HOPPER_WS) else 256
    family = AttentionFamily(
        kernel_pass=spec.kernel_pass,
        dtype=DType.BFLOAT16,
        head_dim=head_dim,
        head_dim_v=head_dim,
        bounded_right=spec.kernel_pass is not Pass.BWD_PREPROCESS,
        varlen=True,
    )
    reason = spec.supports(family, "sm_90", (3, 6))
    if (spec.kernel_pass, spec.variant) in SERVES_SEQUENCES:
        assert reason is None
    else:
        assert reason is not None
        assert "sequence" in reason
