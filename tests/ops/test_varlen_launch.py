"""Launches whose totals and number of sequences come with each call: what reaches a pretended GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.errors import LaunchError
from fa_autotune.kernels import fast_launch as bound_launch
from fa_autotune.kernels.fast_launch import Counts, bind_varlen
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.attention_calls import interpreted
from kit.varlen_calls import make_varlen, rows_last

INDEX, STREAM = 3, 77


def make_kernel(kernel_pass: Pass = Pass.FWD) -> LoadedKernel:
    varlen = kernel_pass is not Pass.BWD_DELTA
    family = AttentionFamily(
        kernel_pass=kernel_pass, dtype=DType.BFLOAT16, head_dim=16, head_dim_v=16, bounded_right=False, varlen=varlen
    )
    config = default_config(variant_spec(kernel_pass, Variant.PORTABLE), family, "sm_90")
    return load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)


def call(lengths: list[tuple[int, int]]) -> tuple[Counts, list[Tensor]]:
    """The counts of a forward and its tensors, those that are written the last but two."""
    q, k, v, *starts = make_varlen(lengths, heads=2, kv_heads=1, head_dim=16)
    counts = Counts(len(lengths), q.shape[0], k.shape[0])
    out, lse = torch.empty_like(q), torch.empty(1, 2, q.shape[0])
    return counts, [*rows_last(q, k, v, out), lse, *starts]


@interpreted
@pytest.mark.kernel
def test_a_launch_serves_other_totals_than_it_was_bound_with() -> None:
    kernel = make_kernel()
    _, sample = call([(5, 9)])
    launch = bind_varlen(kernel, sample, 0.2, None)
    counts, tensors = call([(40, 30), (0, 3), (7, 20)])
    expected = [torch.empty_like(tensor) for tensor in tensors[3:5]]
    launch(counts, *tensors)
    kernel(*tensors[:3], *expected, *tensors[5:], 0.2, None)
    assert all(map(torch.equal, tensors[3:5], expected))


@interpreted
def test_no_rows_are_no_launch() -> None:
    kernel = make_kernel(Pass.BWD_DELTA)
    out, delta = torch.empty(1, 2, 5, 16, dtype=torch.bfloat16), torch.empty(1, 2, 5)
    launch = bind_varlen(kernel, (out, out.clone(), delta))
    kernel.run = None  # type: ignore[assignment]  # not to be called
    launch(Counts(1, 0, 7), out, out, delta)


@interpreted
def test_too_many_programs_are_refused_when_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, tensors = call([(5, 9)])
    launch = bind_varlen(make_kernel(), tensors, 0.2, None)
    monkeypatch.setattr("fa_autotune.kernels.loaded.MAX_GRID", 10)
    with pytest.raises(LaunchError, match="programs, a launch takes at most 10: split the batch"):
        launch(counts._replace(num_sequences=1000), *tensors)


class Launcher:
    """A launcher that is not known: it hands its arguments to `launch`."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


class FlatLauncher(Launcher):
    """Triton 3.6's: adds what it knows of the kernel, and hands on one by one."""

    global_scratch_size = profile_scratch_size = 0

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, "cooperative", None, *rest)


class NestedLauncher(FlatLauncher):
    """Triton 3.7's: the kernel's own arguments come in one sequence."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, "cooperative", *rest[:4], "signature", rest[4:])


@pytest.mark.parametrize("kind", [Launcher, FlatLauncher, NestedLauncher])
def test_counts_addresses_and_programs_reach_the_launcher(
    kind: type[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_launch, "bind_thread", lambda index: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    launched: list[tuple[Any, ...]] = []

    def c_function(*arguments: Any) -> None:
        *fixed, last = arguments
        launched.append((*fixed, *last) if isinstance(last, (list, tuple)) else arguments)

    run = kind(c_function)
    compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    sample: Any = SimpleNamespace(device=torch.device("cuda", INDEX), data_ptr=lambda: 4096)
    monkeypatch.setattr(bound_launch, "scratch_address", lambda index, stream: (index, stream))
    q, out, counter = torch.ones(2, 3), torch.ones(2, 3), torch.ones(1)
    launch = bound_launch._varlen_on_gpu(
        compiled,
        bound_launch._Arguments((q, 0.5, out, 1, 2, 3, counter), (q, out, counter)),
        [(3, 0), (4, 1), (5, 2)],
        lambda counts: (10 * counts.total_q, 1, 1) if counts.total_q else None,
        sample,
        lambda *arguments: None,
        2,
    )
    launch(Counts(4, 50, 60), out, q)
    launch(Counts(4, 0, 60), out, q)  # nothing to do
    head = (500, 1, 1, STREAM + INDEX, "function", "metadata", None, None, None)
    run(*head, out.data_ptr(), 0.5, q.data_ptr(), 4, 50, 60, (INDEX, STREAM + INDEX))  # as Triton's own way does
    assert launched == [launched[-1]] * 2
