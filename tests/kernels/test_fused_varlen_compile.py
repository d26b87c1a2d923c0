"""The fused backward of packed sequences, and the kernels beside it, compile for sm_90 without a spill in a loop."""

import pytest

from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import FusedConfig
from fa_autotune.space.estimates import fused_smem_bytes
from fa_autotune.space.registry import supported_variants
from fa_autotune.space.seeds import seed_configs
from kit.compile_candidates import CompileAll, unexpected

pytestmark = pytest.mark.kernel

H200 = KNOWN_DEVICES["h200"]
TRITON = (3, 6)
WORDS = [
    "64,bwd_fused", "64,causal,left=1,softcap,bwd_fused", "128,bwd_fused", "128,causal,left=1,bwd_fused",
    "96x40,fp16,unordered,bwd_fused", "128,softcap,bwd_fused", "192x128,left=1,bwd_fused", "192,bwd_fused",
    "256,bwd_fused", "256,left=1,bwd_fused", "256,fp16,causal,bwd_fused", "40,any,bwd_preprocess",
    "192,bwd_postprocess",
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["128,causal,bwd_fused", "64,causal,bwd_preprocess", "128,causal,left=1,bwd_postprocess"], id="few"
        ),
        pytest.param(WORDS, marks=pytest.mark.slow, id="many"),
    ],
)
def test_seeds_compile_and_pass_the_gates(words: list[str], compile_all: CompileAll) -> None:
    candidates = []
    for text in words:
        family = AttentionProblem.parse(f"1x2x1x64x64x{text},varlen").family
        (spec,) = supported_variants(family, "sm_90", TRITON)
        fitting = [
            config
            for config in seed_configs(spec, family, "sm_90")
            if spec.rejection(config, family=family, shape=None, device=H200) is None
        ]
        candidates += [Candidate(family=family, variant=spec.variant, config=config) for config in fitting[:1]]
    results = compile_all(candidates, "sm_90", H200.smem_optin_bytes)
    assert len(results) == len(words)
    assert unexpected("sm_90", candidates, results) == {}
    for candidate, result in zip(candidates, results, strict=True):
        assert result.resources is not None
        if isinstance(candidate.config, FusedConfig):
            assert result.resources.smem_bytes <= fused_smem_bytes(candidate.family, candidate.config)
