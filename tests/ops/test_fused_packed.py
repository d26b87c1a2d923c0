"""The fused backward of packed sequences: its own workspaces between the kernels, which here need no GPU.

Those beside the fused one run in Triton's interpreter, that one in `gluon_emulator`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention_varlen
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.ops import backward, call_kernels, plans
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.passes import FUSED_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from kit.attention_calls import forget_plans, requiring
from kit.gluon_emulator import Emulator
from kit.packed_calls import NAN, assert_packed_gradients_right, make_packed
from kit.winners import dispatcher

pytestmark = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
LENGTHS = [(150, 141), (0, 0), (260, 290), (150, 0), (80, 130)]


class EmulatedKernel:
    """A Gluon kernel where `fast_launch` expects a loaded one."""

    compiled = None
    is_persistent = False

    def __init__(self, candidate: Any, folder: Path) -> None:
        self.candidate = candidate
        self.launchers: dict[int, Any] = {}
        family = candidate.family
        self.owner = family.tensors.index(family.kernel_pass.spec.owns)
        self.operands = (*family.kernel_pass.spec.takes, *family.outputs)
        self.extra_tensors, self.numbers = family.extra_tensors, family.numbers
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

    monkeypatch.setattr(backward, "dispatcher_of", lambda _index: deciding)
    monkeypatch.setattr(call_kernels, "kernel_for", kernel_for)
    forget_plans(monkeypatch)
    return found


def fused_gradients(passes: list[Pass], tensors: Sequence[Tensor], **arguments: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv and the gradient of sinks of a call whose lse is used too, and that it took the fused way."""
    del passes[:]
    *inputs, sinks = requiring(*tensors[:3], torch.tensor([0.5, -1.0]))
    out, lse = attention_varlen(*inputs, *tensors[3:], sinks=sinks, return_lse=True, **arguments)
    generator = torch.Generator().manual_seed(3)
    d_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    d_lse = torch.randn(lse.shape, generator=generator).where(lse > float("-inf"), 0.0)
    found = torch.autograd.grad((out, lse), (*inputs, sinks), (d_out, d_lse))
    assert set(passes) <= {Pass.FWD, *FUSED_BACKWARD}
    return found


def test_all_gradients_come_from_the_fused_kernel(passes: list[Pass]) -> None:
    tensors = make_packed(LENGTHS, unused=5, fill=NAN, heads=2, kv_heads=1, head_dim=64)
    assert_packed_gradients_right(tensors, LENGTHS, 5, fill=NAN, causal=True)
    assert passes == [Pass.FWD, *FUSED_BACKWARD]


def test_gradients_of_lse_and_of_sinks_go_through_it_whatever_the_lengths(passes: list[Pass]) -> None:
    """One plan: its workspaces grow with what a launch brings. Sequences without keys have their sinks alone."""
    for lengths in ([(260, 141), (200, 0), (0, 130), (60, 5)], [(90, 60), (139, 80), (300, 120)]):
        tensors = make_packed(lengths, heads=2, kv_heads=1, head_dim=64)
        found = fused_gradients(passes, tensors, window_size=(40, 3))
        expected = fused_gradients(passes, tensors, window_size=(40, 3), backend="reference")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)
    assert passes == []  # of the reference
    assert len(plans._plans) == 2


def test_totals_without_keys_give_zeros(passes: list[Pass]) -> None:
    tensors = make_packed([(200, 0), (300, 0)], heads=2, kv_heads=1, head_dim=64)
    dq, dk, dv, d_sinks = fused_gradients(passes, tensors)
    assert passes == [Pass.FWD, *FUSED_BACKWARD]
    assert not dq.any()
    assert dk.shape == dv.shape == (0, 1, 64)
    assert d_sinks.isfinite().all()
    assert d_sinks.all()


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {"wanted": 1}), (24, {}), (64, {"lengths": [(20, 20)] * 5}), (64, {"alibi_slopes": torch.ones(2)})],
    ids=["dq alone", "head dims mostly padding", "short sequences", "ALiBi"],
)
def test_other_backwards_are_split(passes: list[Pass], head_dim: int, options: dict[str, Any]) -> None:
    lengths, wanted = options.pop("lengths", [(200, 150)]), options.pop("wanted", 3)
    tensors = make_packed(lengths, heads=2, kv_heads=1, head_dim=head_dim)
    inputs = requiring(*tensors[:wanted])
    out = attention_varlen(*inputs, *tensors[wanted:], **options)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert Pass.BWD_DELTA in passes
    assert not set(passes) & set(FUSED_BACKWARD)
