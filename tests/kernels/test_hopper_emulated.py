"""What the warp-specialised forward computes, and that it needs every wait, without a GPU: see `gluon_emulator`."""

import re
from collections.abc import Callable
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
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import KnobValue, variant_spec
from kit.combinations import one_in
from kit.gluon_emulator import Emulator
from kit.sabotage import Sabotage, render_with, without

TRIES = 5  # orders of events in which a missing wait may show
Failures = Callable[..., tuple[str, ...]]

SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
KERNELS: list[tuple[Schedule, dict[str, KnobValue]]] = [
    (Schedule.SINGLE, {"CONSUMERS": 1}),
    (Schedule.TILE, {"PING_PONG": True}),
    (Schedule.PERSISTENT, {"num_stages": 3}),
    (Schedule.PERSISTENT, {"OWN_OUT": True, "PING_PONG": True, "num_stages": 3}),
    (Schedule.PIPELINED, {}),
    (Schedule.PIPELINED, {"PING_PONG": True, "num_stages": 3}),
]


def words_alone(value: object) -> str | None:
    """Names a parameter where it is a text, and leaves the others to pytest."""
    return value if isinstance(value, str) else None


every_kernel = pytest.mark.parametrize(
    ("schedule", "knobs"), KERNELS, ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)
)


def make_candidate(problem: AttentionProblem, schedule: Schedule, **knobs: KnobValue) -> Candidate:
    config = SPEC.config(SCHEDULE=schedule, **{"CONSUMERS": 2, "BLOCK_N": 64, **knobs})
    return Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)


@pytest.fixture
def failures(tmp_path: Path) -> Failures:
    """What is wrong with a kernel, its text changed or not, in two launches on a problem."""

    def emulate(
        text: str,
        schedule: Schedule,
        sabotage: Sabotage | None = None,
        *,
        seed: int = 0,
        top_left: bool = False,
        **knobs: KnobValue,
    ) -> tuple[str, ...]:
        problem = AttentionProblem.parse(text)
        candidate = make_candidate(problem, schedule, **knobs)
        source = render_with({candidate: sabotage} if sabotage else {})(candidate)
        kernel = Emulator(load_module(write_module(source, tmp_path)), seed=seed)
        probe = Probe(shape=problem.shape, top_left=top_left)
        try:
            return verify(kernel, problem.family, [probe], torch.device("cpu")).failures
        except (AssertionError, IndexError) as error:  # a hang or a race, or rows that are nowhere
            return (str(error),)

    return emulate


CAUSAL = [
    *("1x4x2x150x200x128,causal", "2x2x2x200x70x64,fp16,causal"),
    *("1x2x1x300x420x96x40,causal", "1x1x1x1x1x64,causal"),
]


@pytest.mark.parametrize(
    ("kernel", "top_left", "text"), one_in(1, KERNELS, [False, True], CAUSAL, default=2), ids=words_alone
)
def test_causal_rows(
    text: str, top_left: bool, kernel: tuple[Schedule, dict[str, KnobValue]], failures: Failures
) -> None:
    schedule, knobs = kernel
    assert failures(text, schedule, top_left=top_left, **knobs) == ()


@every_kernel
@pytest.mark.parametrize("text", ["1x4x2x150x200x128", "2x2x1x65x64x40x72,fp16", "1x2x2x300x1x64"])
def test_full_rows(text: str, schedule: Schedule, knobs: dict[str, KnobValue], failures: Failures) -> None:
    assert failures(text, schedule, **knobs) == ()


FEATURES = [
    "1x4x2x150x300x128,causal,left=70",
    "1x2x1x420x300x64,left=200,right=90",
    "2x2x2x65x500x96x40,fp16,left=130",
    "1x2x2x200x200x64,causal,softcap",
    "1x4x2x100x150x128,fp16,causal,sinks",
    "1x2x1x300x130x64,left=3,right=1,softcap,sinks",
    "1x2x1x70x65x64,softcap,sinks",
    "1x4x2x150x200x128,causal,alibi",
    "2x2x1x100x333x64,alibi,sinks",
    "1x2x2x300x560x64,fp16,left=250,right=100,alibi,softcap",
]


@pytest.mark.parametrize(
    ("kernel", "top_left", "text"), one_in(1, KERNELS, [False, True], FEATURES, default=3), ids=words_alone
)
def test_features(text: str, top_left: bool, kernel: tuple[Schedule, dict[str, KnobValue]], failures: Failures) -> None:
    schedule, knobs = kernel
    assert failures(text, schedule, top_left=top_left, **knobs) == ()


@every_kernel
def test_exact_lengths(schedule: Schedule, knobs: dict[str, KnobValue], failures: Failures) -> None:
    assert failures("1x2x1x256x384x64", schedule, EXACT_LENGTHS=True, **knobs) == ()


SEVERAL_STEPS, ONE_STEP = "1x5x5x300x300x64,causal", "1x24x24x100x60x64,causal"  # of a tile

# Waits that others imply. A program with one tile has staged nothing before. In persistent programs the rows of O are
# free with the query rows, and a consumer reads which tile is next after the last values, which the producer loads
# after it has said so; before it says two more, the ring stops it. A turn that nobody takes is left over at the end.
STAGED = "tma.store_wait(0)  # what was staged here before has been read"
LAST = "tma.store_wait(0)  # shared memory lives until the last copy has read it"
NEXT = {"mbarrier.wait(announced.index(slot), phase)", "mbarrier.wait(taken.index(slot), phase ^ 1)"}
TURN = "take_turn(WARPGROUP)  # that the last warpgroup passed on"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kernel", "implied"),
    [
        pytest.param(KERNELS[0], {STAGED}, id="single"),
        pytest.param(KERNELS[2], {STAGED, LAST, *NEXT}, id="persistent"),
        pytest.param(KERNELS[3], {TURN, *NEXT}, id="persistent with rows of O's own"),
        pytest.param(KERNELS[5], {TURN}, id="pipelined"),
    ],
)
def test_a_wait_that_is_left_out_is_missed(
    kernel: tuple[Schedule, dict[str, KnobValue]], implied: set[str], failures: Failures
) -> None:
    schedule, knobs = kernel
    module = render(make_candidate(AttentionProblem.parse(ONE_STEP), schedule, **knobs)).text
    waits = set(re.findall(r"^ +(?:mbarrier\.wait|tma\.store_wait|take_turn).*", module, re.MULTILINE))
    assert len(waits) >= 4
    unnoticed = {
        wait.strip()
        for wait in sorted(waits)
        if not any(
            failures(text, schedule, without(wait), seed=2 * attempt, **knobs)
            for attempt in range(TRIES)
            for text in (SEVERAL_STEPS, ONE_STEP)
        )
    }
    assert unnoticed == implied
