"""What the fused backward's kernels compute, and that they need every wait, without a GPU: see `gluon_emulator`."""

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from fa_autotune.evaluation.probes import Probe
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.workspace import is_wide
from kit.gluon_emulator import Emulator
from kit.sabotage import Sabotage, render_with, without

TRIES = 10  # orders of events in which a missing wait may show
PROBE_SEEDS = count()  # the inputs of a probe are kept, and so would be turns that a failed kernel left
Failures = Callable[..., tuple[str, ...]]


def make_candidate(problem: AttentionProblem, **knobs: KnobValue) -> Candidate:
    variant = Variant.HOPPER_WIDE if is_wide(problem.family) else Variant.HOPPER_WS
    config = variant_spec(Pass.BWD_FUSED, variant).config(**knobs)
    return Candidate(family=problem.family, variant=variant, config=config)


@pytest.fixture
def failures(tmp_path: Path) -> Failures:
    """What is wrong with a kernel, its text changed or not, in two launches on a problem."""

    def emulate(
        text: str, sabotage: Sabotage | None = None, *, seed: int = 0, top_left: bool = False, **knobs: KnobValue
    ) -> tuple[str, ...]:
        problem = AttentionProblem.parse(text)
        candidate = make_candidate(problem, **knobs)
        source = render_with({candidate: sabotage} if sabotage else {})(candidate)
        kernel = Emulator(load_module(write_module(source, tmp_path)), seed=seed)
        probe = Probe(shape=problem.shape, top_left=top_left, seed=next(PROBE_SEEDS))
        try:
            return verify(kernel, problem.family, [probe], torch.device("cpu")).failures
        except AssertionError as error:  # a hang or a race
            return (str(error),)

    return emulate


@pytest.mark.parametrize(
    ("top_left", "diagonal_first"), [(False, False), (True, True)], ids=["bottom-right", "top-left-diagonal-first"]
)
@pytest.mark.parametrize(
    "text",
    [
        "1x4x2x150x200x256,causal,bwd_fused",
        "2x2x2x200x70x192x128,fp16,causal,bwd_fused",
        "1x2x1x70x150x64x256,causal,bwd_fused,unordered",
        "1x4x2x150x300x128,causal,bwd_fused",
        "2x2x2x300x100x96x40,fp16,causal,bwd_fused",
        "1x2x1x140x200x64,causal,bwd_fused,unordered",
    ],
)
def test_causal_gradients(text: str, top_left: bool, diagonal_first: bool, failures: Failures) -> None:
    assert failures(text, top_left=top_left, DIAGONAL_FIRST=diagonal_first) == ()


@pytest.mark.parametrize("exact", [False, True], ids=["ragged", "exact"])
@pytest.mark.parametrize(
    ("heads", "head_dims", "flags", "knobs"),
    [
        ("1x4x2", "256", "", {"DQ_STAGES": 2}),
        ("2x2x1", "192x128", "", {"DO_STAGES": 2, "DQ_STAGES": 1}),
        ("1x1x1", "136", ",unordered", {}),
        ("1x4x2", "128", "", {"SCORES_EARLY": True}),
        ("2x2x1", "64", ",fp16", {}),
    ],
)
def test_full_gradients(
    heads: str, head_dims: str, flags: str, knobs: dict[str, KnobValue], exact: bool, failures: Failures
) -> None:
    text = f"{heads}x{'128x256' if exact else '150x200'}x{head_dims},bwd_fused{flags}"
    assert failures(text, **knobs, EXACT_LENGTHS=exact) == ()


# Waits that another one of the same step implies: the loads are done that P, which they wait for, is made of.
IMPLIED = {
    "mbarrier.wait(q_filled.index(i % Q_STAGES), (i // Q_STAGES) & 1)",
    "mbarrier.wait(q_filled.index(place), (last // Q_STAGES) & 1)",
    "mbarrier.wait(k_filled.index(0), 0)  # at once but in the first step: where there is none, nothing is loaded",
}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("text", "implied"),
    [("1x1x1x260x260x256,causal,bwd_fused", IMPLIED), ("1x1x1x260x260x128,causal,bwd_fused", set())],
    ids=["hopper_wide", "hopper_ws"],
)
def test_a_wait_that_is_left_out_is_missed(text: str, implied: set[str], failures: Failures) -> None:
    module = render(make_candidate(AttentionProblem.parse(text))).text
    waits = re.findall(r"^ +(?:mbarrier\.wait|tma\.store_wait|meet\(\)|while now < turn).*", module, re.MULTILINE)
    assert len(waits) >= 10
    unnoticed = {
        wait.strip()
        for wait in sorted(set(waits))
        if not any(failures(text, without(wait), seed=2 * attempt) for attempt in range(TRIES))
    }
    assert unnoticed == implied
