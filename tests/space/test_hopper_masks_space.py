"""What the warp-specialised forward serves of masks and dropout, where its search starts, and what that compiles to."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule
from fa_autotune.space.estimates import BARRIER_BYTES, hopper_smem_bytes
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.compile_candidates import compiling

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)


def family_of(head_dim: str, words: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x1x1x64x64x{head_dim},{words}").family


@pytest.mark.parametrize(
    ("head_dim", "words", "says"),
    [
        ("128", "dropout,left=9", "dropout wants whole 16 keys"),
        ("256", "wide_bias", "head_dim_v=256 leaves no registers for a mask in fp32, 192 does"),
        ("256", "bias,dropout", "no registers for attn_mask and dropout at once"),
        ("256", "causal,dropout,softcap", "no registers for dropout and softcap at once"),
        ("192", "bool_mask,loose_mask", "no registers for a mask that is read by elements, 128 does"),
        ("160", "bool_mask,left=9", "no registers for a mask that is read by elements, 128 does"),
    ],
)
def test_what_leaves_no_registers_gets_a_reason(head_dim: str, words: str, says: str) -> None:
    reason = SPEC.supports(family_of(head_dim, words), "sm_90", (3, 7))
    assert reason is not None
    assert says in reason


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
    family = family_of(head_dim, words)
    if SPEC.supports(family, "sm_90", (3, 7)):
        assert family.head_dim_v > 128
        return
    seeds = seed_configs(SPEC, family, "sm_90")
    assert seeds[0] == default_config(SPEC, family, "sm_90")
    assert [SPEC.rejection(one, family=family, shape=None, device=H200) for one in seeds] == [None] * len(seeds)


def test_three_consumers_have_no_registers_for_them() -> None:
    config = HopperWsFwdConfig(SCHEDULE=Schedule.TILE, CONSUMERS=3, BLOCK_N=64)
    for words in ("bias", "dropout"):
        rejected = SPEC.rejection(config, family=family_of("64", words), shape=None, device=H200)
        assert rejected is not None
        assert rejected.reason == "CONSUMERS=3 leaves no registers for a mask or for random bits"


def test_what_is_off_leaves_no_line() -> None:
    for words in ("causal", "causal,softcap,alibi,sinks", "dropout", "bias", "bias,loose_mask"):
        family = family_of("64", words)
        config = default_config(SPEC, family, "sm_90")
        text = render(Candidate(family=family, variant=Variant.HOPPER_WS, config=config)).text
        assert ("random_words" in text) == family.dropout
        assert ("rows_of_mask" in text) == family.has_mask
        assert ("async_copy.commit_group" in text) == (family.has_mask and not family.loose_mask)


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Sequence[Candidate]], list[CompileResult]]]:
    with compiling(tmp_path_factory) as compile_all:
        yield lambda candidates: compile_all(candidates, "sm_90", H200.smem_optin_bytes)


COMPILED = ["128,dropout", "64,causal,dropout,varlen", "128,causal,bias", "64,bool_mask"]
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
@pytest.mark.parametrize("texts", [COMPILED, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["", "others"])
def test_defaults_pass_the_gates_and_their_shared_memory_is_counted(
    texts: list[str], compiled: Callable[[Sequence[Candidate]], list[CompileResult]]
) -> None:
    families = [family_of(*text.split(",", 1)) for text in texts]
    candidates = [
        Candidate(family=family, variant=Variant.HOPPER_WS, config=default_config(SPEC, family, "sm_90"))
        for family in families
    ]
    for candidate, result in zip(candidates, compiled(candidates), strict=True):
        assert (result.status, result.error) == (TrialStatus.OK, None), candidate.family.label
        assert result.resources is not None
        counted = hopper_smem_bytes(candidate.family, candidate.config)  # type: ignore[arg-type]
        assert counted - BARRIER_BYTES <= result.resources.smem_bytes <= counted
