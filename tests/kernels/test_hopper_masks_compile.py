"""What the warp-specialised forward with masks and dropout is rendered and compiled to."""

import pytest

from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.estimates import BARRIER_BYTES, hopper_smem_bytes
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.combinations import rest, slow
from kit.compile_candidates import CompileAll, unexpected

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)


def family_of(head_dim: str, words: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x1x1x64x64x{head_dim},{words}").family


def test_what_is_off_leaves_no_line() -> None:
    for words in ("causal", "causal,softcap,alibi,sinks", "dropout", "bias", "bias,loose_mask"):
        family = family_of("64", words)
        config = default_config(SPEC, family, "sm_90")
        text = render(Candidate(family=family, variant=Variant.HOPPER_WS, config=config)).text
        assert ("random_words" in text) == family.dropout
        assert ("rows_of_mask" in text) == family.has_mask
        assert ("async_copy.commit_group" in text) == (family.has_mask and not family.loose_mask)


COMPILED = ["128,causal,bias"]
REST = ["128,dropout", "64,causal,dropout,varlen", "64,bool_mask"]
OTHERS = [
    "256,causal,dropout",
    "128,bias,loose_mask",
    "64,causal,dropout",
    "64,wide_bias",
    "128,causal,bool_mask,dropout,fp16",
    "128,causal,wide_bias,softcap,alibi,sinks,dropout",
    "192,causal,bias,dropout",
    "256,bias",
    "256,dropout",
    "128,causal,left=9,bias,alibi,softcap",
]


@pytest.mark.kernel
@pytest.mark.parametrize("texts", [COMPILED, *rest([REST]), *slow([OTHERS])], ids=["", "rest", "others"])
def test_defaults_pass_the_gates_and_their_shared_memory_is_counted(texts: list[str], compile_all: CompileAll) -> None:
    families = [family_of(*text.split(",", 1)) for text in texts]
    candidates = [
        Candidate(family=family, variant=Variant.HOPPER_WS, config=default_config(SPEC, family, "sm_90"))
        for family in families
    ]
    results = compile_all(candidates, "sm_90", H200.smem_optin_bytes)
    assert unexpected("sm_90", candidates, results) == {}
    for candidate, result in zip(candidates, results, strict=True):
        assert result.resources is not None
        counted = hopper_smem_bytes(candidate.family, candidate.config)  # type: ignore[arg-type]
        assert counted - BARRIER_BYTES <= result.resources.smem_bytes <= counted
