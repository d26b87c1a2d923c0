"""The fused backward on sequences in a row, without a GPU: see `gluon_emulator`."""

from pathlib import Path

import pytest
import torch
from gluon_emulator import Emulator

from fa_autotune.family import Pass
from fa_autotune.fused_workspace import fused_tile, is_wide
from fa_autotune.generated import load_module, write_module
from fa_autotune.probes import probes
from fa_autotune.problem import AttentionProblem
from fa_autotune.records import Candidate, Variant
from fa_autotune.render import render
from fa_autotune.variants import KnobValue, variant_spec
from fa_autotune.verify import verify


def failures(words: str, head_dim: int, folder: Path, **knobs: KnobValue) -> tuple[str, ...]:
    """What is wrong with a kernel on the probes of sequences."""
    family = AttentionProblem.parse(f"1x2x1x64x64x{head_dim},varlen,bwd_fused{words and ','}{words}").family
    variant = Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS
    config = variant_spec(Pass.BWD_FUSED, variant).config(**knobs)
    candidate = Candidate(family=family, variant=variant, config=config)
    kernel = Emulator(load_module(write_module(render(candidate), folder)))
    tile = fused_tile(family)
    probe_list = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False)
    return verify(kernel, family, probe_list, torch.device("cpu")).failures


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("words", ["", "causal", "causal,left=9,softcap", "left=9", "unordered"])
def test_passes_every_probe(words: str, head_dim: int, tmp_path: Path) -> None:
    """Ragged and empty sequences, rows and keys of none, NaN in what no row sees, and in what others see."""
    assert failures(words, head_dim, tmp_path) == ()
