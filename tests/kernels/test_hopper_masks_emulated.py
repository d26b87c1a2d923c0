"""attn_mask and dropout in the warp-specialised forward, without a GPU: see `gluon_emulator`."""

from pathlib import Path

import pytest
import torch

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import KnobValue, variant_spec
from kit.combinations import rest
from kit.gluon_emulator import Emulator
from kit.sabotage import Sabotage, instead_of, render_with

SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
SINGLE, TILE, PERSISTENT, PIPELINED = Schedule.SINGLE, Schedule.TILE, Schedule.PERSISTENT, Schedule.PIPELINED
KNOBS: dict[Schedule, dict[str, KnobValue]] = {
    SINGLE: {"CONSUMERS": 1},
    TILE: {"PING_PONG": True},
    PERSISTENT: {"OWN_OUT": True, "num_stages": 3},
    PIPELINED: {"PING_PONG": True},
}


def failures(
    words: str, schedule: Schedule, tmp_path: Path, sabotage: Sabotage | None = None, **knobs: KnobValue
) -> tuple[str, ...]:
    """What is wrong with a kernel, its text changed or not, in calls around its blocks."""
    family = AttentionProblem.parse(f"1x2x1x64x64x16,{words}").family
    config = SPEC.config(SCHEDULE=schedule, **{"CONSUMERS": 2, "BLOCK_N": 64, **KNOBS[schedule], **knobs})
    candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=config)
    source = render_with({candidate: sabotage} if sabotage else {})(candidate)
    kernel = Emulator(load_module(write_module(source, tmp_path)))
    probe_list = probes(
        family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=bool(knobs.get("EXACT_LENGTHS"))
    )
    try:
        return verify(kernel, family, probe_list, torch.device("cpu")).failures
    except AssertionError as error:  # a hang or a race, or rows that are nowhere
        return (str(error),)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (SINGLE, "dropout"),
        (TILE, "causal,dropout"),
        (PERSISTENT, "dropout,softcap,sinks"),
        (PIPELINED, "causal,dropout,alibi"),
    ],
)
def test_dropout_passes_every_probe(schedule: Schedule, words: str, tmp_path: Path) -> None:
    assert failures(words, schedule, tmp_path) == ()


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (SINGLE, "bool_mask"),
        (TILE, "causal,wide_bias,sinks"),
        (PERSISTENT, "bias,softcap"),
        (PIPELINED, "causal,bias,alibi,dropout"),
        (PIPELINED, "bool_mask,loose_mask"),
        (TILE, "left=9,causal,bias,loose_mask,alibi"),
        (PERSISTENT, "left=9,bool_mask"),
    ],
)
def test_masks_pass_every_probe(schedule: Schedule, words: str, tmp_path: Path) -> None:
    assert failures(words, schedule, tmp_path) == ()


@pytest.mark.parametrize("words", ["bias,dropout", "causal,bool_mask"])
def test_exact_lengths_pass_every_probe(words: str, tmp_path: Path) -> None:
    assert failures(words, PERSISTENT, tmp_path, EXACT_LENGTHS=True) == ()


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        ("bias", "async_copy.wait_group(0)", "pass"),  # what is read has not arrived
        ("dropout", "0xCD9E8D57", "0xCD9E8D59"),
        *rest(
            [
                ("causal,bool_mask", "copy_mask(start_n - (step + 1) * BLOCK_N, mask_rows, mask_tile)", "pass"),
                ("bias", "gl.minimum(rows, seqlen_q - 1)", "rows"),  # rows past the end are read
                ("causal,dropout", "dropped(p_new, start_n - step * BLOCK_N,", "dropped(p_new, start_n,"),
            ]
        ),
    ],
)
def test_what_is_left_out_is_missed(words: str, old: str, new: str, tmp_path: Path) -> None:
    assert failures(words, TILE, tmp_path) == ()
    assert failures(words, TILE, tmp_path, instead_of(old, new)) != ()
