"""The fused backward on packed sequences, without a GPU: see `gluon_emulator`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.workspace import fused_tile, is_wide
from kit.gluon_emulator import Emulator

CPU = torch.device("cpu")


def family_of(text: str) -> AttentionFamily:
    return AttentionProblem.parse(f"1x2x1x64x64x{text},varlen,bwd_fused").family


def emulated(family: AttentionFamily, folder: Path, **knobs: KnobValue) -> Emulator:
    variant = Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS
    config = variant_spec(Pass.BWD_FUSED, variant).config(**knobs)
    return Emulator(load_module(write_module(render(Candidate(family=family, variant=variant, config=config)), folder)))


# Blocks of keys that wait for one another, rows and keys of no sequence, and sequences without either.
MIXED = Sequences(lengths_q=(0, 130, 60, 3, 0), lengths_k=(4, 141, 0, 2, 0), unused_q=5, unused_k=3)


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        ("64,causal", {"DIAGONAL_FIRST": True}),
        ("128", {}),
        ("96,causal,left=9,softcap", {}),
        ("192,left=9,unordered", {}),
        *(pytest.param(text, {}, marks=pytest.mark.slow) for text in ("64", "128,unordered", "256,causal")),
    ],
)
def test_mixed_sequences_have_the_gradients_of_each(text: str, knobs: dict[str, KnobValue], tmp_path: Path) -> None:
    """NaN in what no row sees, and in what others see; turns are 0 again, and a second launch gives the same bits."""
    family = family_of(text)
    shape = AttentionProblem.parse("5x2x1x130x141x64").shape
    shape = replace(shape, window_left=9 if family.bounded_left else 0)
    kernel = emulated(family, tmp_path, **knobs)
    assert verify(kernel, family, [Probe(shape=shape, sequences=MIXED)], CPU).failures == ()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("words", ["", ",causal", ",causal,left=9,softcap", ",left=9", ",unordered"])
def test_passes_every_probe(words: str, head_dim: int, tmp_path: Path) -> None:
    family = family_of(f"{head_dim}{words}")
    tile = fused_tile(family)
    probe_list = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False)
    assert verify(emulated(family, tmp_path), family, probe_list, CPU).failures == ()


@pytest.mark.parametrize(
    ("side", "starts"),
    [("cu_seqlens_q", [0, 260, 0, 300]), ("cu_seqlens_k", [0, 300, 5, 300]), ("cu_seqlens_k", [0, 300, 9, 9])],
)
def test_nobody_waits_for_good_where_a_sequence_ends_before_it_starts(
    side: str, starts: list[int], tmp_path: Path
) -> None:
    """The preprocessing has said so, in the last counter of the first head."""
    family = family_of("64,causal")
    sequences = Sequences(lengths_q=(100, 100, 100), lengths_k=(100, 100, 100))
    problem = AttentionProblem(family=family, shape=AttentionProblem.parse("3x2x1x100x100x64").shape)
    workload = seeded_workload(problem, device=CPU, diagonal=0, sequences=sequences)
    spoiled = replace(workload.features, **{side: torch.tensor(starts, dtype=torch.int32)})
    workload = replace(workload, features=spoiled)
    assert workload.turns is not None
    workload.turns[0, -1] = 1
    dk, dv, dq_acc = (output.fill_(float("nan")) for output in workload.allocate())
    emulated(family, tmp_path, DIAGONAL_FIRST=True)(*workload.arguments((dk, dv, dq_acc)))
    assert workload.turns.count_nonzero() == 1
    assert dq_acc.isnan().all()
