"""Bound launches: only addresses change between them, and Triton's launcher is used where it is known."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.errors import LaunchError
from fa_autotune.kernels import fast_launch, scratch
from fa_autotune.kernels.fast_launch import bind
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference.attention import seeded_inputs
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.launchers import (
    FIXED,
    INDEX,
    STREAM,
    Descriptor,
    FlatLauncher,
    Launcher,
    NestedLauncher,
    ScratchLauncher,
    compiled_with,
    encoded,
    sample_tensor,
    wrapped,
)
from kit.strategies import PLAIN_VARIANTS


@pytest.fixture(autouse=True)
def no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "bind_thread", lambda index: None)


# --- in the interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu_backward.py runs launches")
@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_a_fast_launch_runs_on_other_tensors_than_it_was_bound_with(variant: Variant) -> None:
    family = AttentionFamily(dtype=DType.BFLOAT16, head_dim=32, head_dim_v=32, bounded_right=True)
    shape = AttentionShape(batch_size=1, num_q_heads=2, num_kv_heads=1, seqlen_q=20, seqlen_k=30)
    config = default_config(variant_spec(family.kernel_pass, variant), family, "sm_90")
    kernel = load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)
    sample, inputs = (seeded_inputs(family, shape, device=torch.device("cpu"), seed=seed) for seed in (0, 1))
    meta = torch.empty_like(sample[0], device="meta"), torch.empty(1, 2, 20, device="meta")
    launch = bind(kernel, (*sample, *meta), 0.2, 10)
    found, expected = ((torch.empty_like(inputs[0]), torch.empty(1, 2, 20)) for _ in range(2))
    launch(*inputs, *found)
    kernel(*inputs, *expected, 0.2, 10)
    assert all(map(torch.equal, found, expected))


@pytest.mark.kernel
@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
def test_a_grid_that_no_launch_takes_is_refused_when_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    family = AttentionFamily(dtype=DType.BFLOAT16, head_dim=32, head_dim_v=32, bounded_right=False)
    config = default_config(variant_spec(family.kernel_pass, Variant.PORTABLE), family, "sm_90")
    kernel = load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)
    monkeypatch.setattr("fa_autotune.kernels.loaded.MAX_GRID", 1)
    tensor, lse = torch.empty(2, 2, 20, 32, dtype=torch.bfloat16), torch.empty(2, 2, 20)
    with pytest.raises(LaunchError, match="programs, a launch takes at most 1: split the batch"):
        bind(kernel, (tensor, tensor.clone(), tensor.clone(), tensor.clone(), lse), 0.2, None)


# --- on a pretended GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pretended GPU, and what is launched on it."""
    found = SimpleNamespace(launched=[], public=[])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    encoded.clear()
    return found


def on_gpu(
    gpu: SimpleNamespace, run: Any, *arguments: Any, tensors: tuple[Tensor, ...], counter: int | None = None
) -> Callable[..., None]:
    return fast_launch._on_gpu(
        compiled_with(run),
        fast_launch._Arguments(arguments, tensors),
        (5, 1, 1),
        sample_tensor(),
        lambda *x: gpu.public.append(x),
        counter,
    )


def test_a_launch_hands_over_addresses_and_the_bound_numbers(gpu: SimpleNamespace) -> None:
    q, out = torch.ones(2, 3), torch.ones(2, 3)
    run = Launcher(lambda *arguments: gpu.launched.append(arguments))
    launch = on_gpu(gpu, run, q, 0.5, out, 7, tensors=(q, out))
    other, result = torch.ones(2, 3), torch.ones(2, 3)
    launch(other, result)
    assert gpu.launched == [(*FIXED, other.data_ptr(), 0.5, result.data_ptr(), 7)]
    assert gpu.public == []


@pytest.mark.parametrize("kind", [FlatLauncher, NestedLauncher, ScratchLauncher])
def test_past_a_known_launcher_the_same_reaches_its_c_function(kind: type[Launcher], gpu: SimpleNamespace) -> None:
    q, k, out = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)
    callers: list[str] = []

    def c_function(*arguments: Any) -> None:
        callers.append(sys._getframe(1).f_code.co_name)
        *fixed, last = arguments
        gpu.launched.append((*fixed, *last) if isinstance(last, (list, tuple)) else arguments)

    run = kind(c_function)
    launch = on_gpu(gpu, run, q, 0.5, k, out, tensors=(q, k, out))
    assert gpu.launched == []  # nothing runs when it is bound
    launch(k, out, q)
    run(*FIXED, k.data_ptr(), 0.5, out.data_ptr(), q.data_ptr())  # what Triton's own way hands over
    assert gpu.launched[0] == gpu.launched[1]
    assert callers == ["__call__" if kind is ScratchLauncher else "launch", "__call__"]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_gets_launches_of_the_public_way(
    hook: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    q = torch.ones(2)
    launch = on_gpu(gpu, Launcher(lambda *arguments: gpu.launched.append(arguments)), q, tensors=(q,))
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda metadata: None)
    launch(q)
    assert (len(gpu.public), gpu.launched) == (1, [])


def test_a_descriptor_is_encoded_once_for_each_address(gpu: SimpleNamespace) -> None:
    q, k, out = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)
    run = Launcher(wrapped(lambda *arguments: gpu.launched.append(arguments), ["layout 0", "layout 1"]))
    arguments = (Descriptor(q), 0.5, Descriptor(k), out)
    launch = on_gpu(gpu, run, *arguments, tensors=(q, k, out))
    encoded.clear()
    for _ in range(3):
        launch(q, k, out)
    run(*FIXED, *arguments[:3], out.data_ptr())  # what Triton's own way hands over
    assert gpu.launched == [gpu.launched[-1]] * 4
    assert encoded == [q.data_ptr(), k.data_ptr()] * 2
    launch(out, k, q)
    assert encoded[4:] == [out.data_ptr()]


class Scratch:
    """In place of the module's memory: one piece for each stream, and a fresh one for each captured launch."""

    def __init__(self) -> None:
        self.stream, self.capturing = 0, False
        self.slow: list[int] = []
        self.known: dict[tuple[int, int], Tensor] = {}

    def of(self, index: int) -> Tensor:
        self.slow.append(self.stream)
        if self.capturing:
            return torch.zeros(8, dtype=torch.int32)
        piece = self.known.setdefault((index, self.stream), torch.zeros(8, dtype=torch.int32))
        scratch._addresses[index, self.stream] = piece.data_ptr()
        return piece


@pytest.fixture
def memory(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """The scratch memory of the pretended GPU, whose current stream and capture a test can set."""
    memory = Scratch()
    monkeypatch.setattr(scratch, "_addresses", {})
    monkeypatch.setattr(scratch, "scratch_of", memory.of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: memory.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: memory.stream, raising=False)
    return memory


@pytest.mark.parametrize("kind", [Launcher, FlatLauncher, NestedLauncher])
def test_a_launch_takes_the_counter_of_its_stream(kind: type[Launcher], gpu: SimpleNamespace, memory: Scratch) -> None:
    def c_function(*arguments: Any) -> None:
        *fixed, last = arguments
        gpu.launched.append((*fixed, *last) if isinstance(last, (list, tuple)) else arguments)

    q, counter = torch.ones(2, 3), torch.empty(0, dtype=torch.int32, device="meta")
    launch = on_gpu(gpu, kind(c_function), q, counter, 0.5, tensors=(q, counter), counter=1)
    for stream in (7, 8, 7, 8, 7):
        memory.stream = stream
        launch(q)
    found = [arguments[-2] for arguments in gpu.launched]
    seven, eight = (memory.known[INDEX, stream].data_ptr() for stream in (7, 8))
    assert found == [seven, eight, seven, eight, seven]
    assert memory.slow == [7, 8]  # after that a stream costs one look-up
    assert [arguments[-3:] for arguments in gpu.launched] == [(q.data_ptr(), address, 0.5) for address in found]


def test_a_captured_launch_never_takes_its_streams_counter(gpu: SimpleNamespace, memory: Scratch) -> None:
    q, counter = torch.ones(2, 3), torch.empty(0, dtype=torch.int32, device="meta")
    run = Launcher(lambda *arguments: gpu.launched.append(arguments))
    launch = on_gpu(gpu, run, q, counter, tensors=(q, counter), counter=1)
    memory.stream = 7
    launch(q)
    memory.capturing = True
    launch(q)
    memory.capturing = False
    launch(q)
    addresses = [arguments[-1] for arguments in gpu.launched]
    assert addresses[0] == addresses[2] != addresses[1]
    assert memory.slow == [7, 7]


class PersistentKernel:
    """What `bind` asks of a loaded kernel with a tile counter, which has no launcher of its own here."""

    is_persistent, compiled = True, None

    def __init__(self) -> None:
        self.module = SimpleNamespace(arguments=lambda *values: values)
        self.ran: list[list[Any]] = []
        self.pieces: list[Tensor] = []

    def grid(self, *values: Any) -> tuple[int, ...]:
        return (3, 1, 1)

    def scratch(self, device: torch.device) -> tuple[Tensor, ...]:
        self.pieces.append(torch.zeros(8, dtype=torch.int32))
        return (self.pieces[-1],)

    def run(self, grid: tuple[int, ...], arguments: list[Any]) -> None:
        self.ran.append(arguments)


def test_the_public_way_asks_for_a_counter_at_each_launch_and_none_when_it_is_bound() -> None:
    kernel, q, other = PersistentKernel(), torch.ones(2), torch.ones(2)
    launch = bind(kernel, (q,), 0.5)  # type: ignore[arg-type]
    assert kernel.pieces == []
    launch(q)
    launch(other)
    assert [arguments[0] for arguments in kernel.ran] == [q, other]
    assert [arguments[1:] for arguments in kernel.ran] == [[0.5, piece] for piece in kernel.pieces]
