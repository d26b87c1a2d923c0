"""The fused way through `attention_varlen`: its own workspaces between the kernels, which here need no GPU.

Those beside the fused one run in Triton's interpreter, that one in `gluon_emulator`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_emulator import Emulator
from torch import Tensor

from fa_autotune import varlen_plan
from fa_autotune.device import INTERPRETER
from fa_autotune.family import Pass
from fa_autotune.generated import load_module, write_module
from fa_autotune.launch import load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem import AttentionProblem
from fa_autotune.render import render
from tests.varlen_calls import NAN, assert_varlen_gradients_right, make_varlen
from tests.winners import dispatcher

pytestmark = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
LENGTHS = [(150, 141), (0, 0), (260, 290), (150, 0), (80, 130)]


class EmulatedKernel:
    """A Gluon kernel where `bound_launch` expects a loaded one."""

    compiled = None
    is_persistent = False

    def __init__(self, candidate: Any, folder: Path) -> None:
        self.candidate = candidate
        self.module = load_module(write_module(render(candidate), folder))
        self._emulator = Emulator(self.module)

    def grid_of(self, *sizes: int) -> tuple[int, ...]:
        return self.module.grid(*sizes)

    def run(self, grid: tuple[int, ...], values: Any) -> None:
        self._emulator.launch(grid[0], values)

    def scratch(self, _device: torch.device) -> tuple[Tensor, ...]:
        return ()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Pass]:
    """The passes whose kernels were bound, in a process whose plans decide as on an untuned H200."""
    found: list[Pass] = []
    deciding, own = dispatcher(), dispatcher(device=INTERPRETER)

    def kernel_for(problem: AttentionProblem, _index: int) -> Any:
        found.append(problem.family.kernel_pass)
        if problem.family.kernel_pass is Pass.BWD_FUSED:
            return EmulatedKernel(deciding.decide(problem).candidate, tmp_path)
        return load_kernel(own.decide(problem).candidate, INTERPRETER.arch)

    monkeypatch.setattr(varlen_plan, "dispatcher_of", lambda _index: deciding)
    monkeypatch.setattr(varlen_plan, "kernel_for", kernel_for)
    monkeypatch.setattr("fa_autotune.varlen_calls._plans", {})
    return found


def test_all_gradients_come_from_the_fused_kernel(passes: list[Pass]) -> None:
    tensors = make_varlen(LENGTHS, unused=5, fill=NAN, head_dim=64)
    assert_varlen_gradients_right(tensors, LENGTHS, 5, fill=NAN, causal=True)
    assert passes[1:] == [Pass.BWD_PREPROCESS, Pass.BWD_FUSED, Pass.BWD_POSTPROCESS]
