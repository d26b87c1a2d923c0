"""The warp-specialised forward on packed sequences, without a GPU: see `gluon_emulator`."""

from pathlib import Path

import pytest
import torch

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import KnobValue, variant_spec
from kit.combinations import one_in, slow
from kit.gluon_emulator import Emulator

SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
KERNELS: list[tuple[Schedule, dict[str, KnobValue]]] = [
    (Schedule.SINGLE, {"CONSUMERS": 1}),
    (Schedule.TILE, {"PING_PONG": True}),
    (Schedule.PERSISTENT, {"OWN_OUT": True, "num_stages": 3}),
    (Schedule.PIPELINED, {"PING_PONG": True}),
]


WORDS = ["", "causal,left=9,softcap,alibi,sinks", "causal,dropout", *slow(["causal", "left=9", "sinks"])]


@pytest.mark.parametrize(
    ("kernel", "words"), one_in(1, KERNELS, WORDS, default=3), ids=lambda value: value if isinstance(value, str) else ""
)
def test_passes_every_probe(kernel: tuple[Schedule, dict[str, KnobValue]], words: str, tmp_path: Path) -> None:
    """Ragged and empty sequences, rows and keys of none, NaN in what no row sees, and in what others see."""
    schedule, knobs = kernel
    family = AttentionProblem.parse(f"1x2x1x64x64x16,varlen{words and ','}{words}").family
    config = SPEC.config(SCHEDULE=schedule, **{"CONSUMERS": 2, "BLOCK_N": 64, **knobs})
    candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=config)
    emulated = Emulator(load_module(write_module(render(candidate), tmp_path)))
    probe_list = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
    assert verify(emulated, family, probe_list, torch.device("cpu")).failures == ()
