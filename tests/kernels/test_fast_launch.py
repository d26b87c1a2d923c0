"""Bound launches: only addresses and counts change between them, and Triton's launcher is used where it is known."""

import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.errors import LaunchError
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.kernels import fast_launch, loaded, scratch
from fa_autotune.kernels.fast_launch import Counts, bind
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import seeded_inputs
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.attention_calls import interpreted
from kit.launchers import (
    FIXED,
    INDEX,
    STREAM,
    FlatLauncher,
    Launcher,
    NestedLauncher,
    OnGpu,
    Recorder,
    ScratchLauncher,
    compiled_with,
    describe,
    encoded,
    on_gpu,
    pretend_gpu,
    wrapped,
)
from kit.packed_calls import make_packed, rows_last
from kit.strategies import PLAIN_VARIANTS


@pytest.fixture(autouse=True)
def no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "bind_thread", lambda index: None)


# --- in the interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.kernel
@interpreted
@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_a_launch_runs_on_other_tensors_than_it_was_bound_with(variant: Variant) -> None:
    family = AttentionFamily(dtype=DType.BFLOAT16, head_dim=32, head_dim_v=32, bounded_right=True)
    shape = AttentionShape(batch_size=1, num_q_heads=2, num_kv_heads=1, seqlen_q=20, seqlen_k=30)
    config = default_config(variant_spec(family.kernel_pass, variant), family, "sm_90")
    kernel = load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)
    sample, inputs = (seeded_inputs(family, shape, device=torch.device("cpu"), seed=seed) for seed in (0, 1))
    places, found, expected = ((torch.empty_like(inputs[0]), torch.empty(1, 2, 20)) for _ in range(3))
    launch = bind(kernel, (*sample, *places), (0.2, 10))
    launch(None, *inputs, *found)
    kernel(*inputs, *expected, 0.2, 10)
    assert all(map(torch.equal, found, expected))


def make_kernel(kernel_pass: Pass = Pass.FWD, *, varlen: bool = False) -> LoadedKernel:
    family = AttentionFamily(
        kernel_pass=kernel_pass, dtype=DType.BFLOAT16, head_dim=16, head_dim_v=16, bounded_right=False, varlen=varlen
    )
    config = default_config(variant_spec(kernel_pass, Variant.PORTABLE), family, "sm_90")
    return load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)


@pytest.mark.kernel
@interpreted
def test_a_grid_that_no_launch_takes_is_refused_when_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel()
    monkeypatch.setattr("fa_autotune.kernels.loaded.MAX_GRID", 1)
    tensor, lse = torch.empty(2, 2, 20, 16, dtype=torch.bfloat16), torch.empty(2, 2, 20)
    with pytest.raises(LaunchError, match="programs, a launch takes at most 1: split the batch"):
        bind(kernel, (tensor, tensor.clone(), tensor.clone(), tensor.clone(), lse), (0.2, None))


def packed_call(lengths: list[tuple[int, int]]) -> tuple[Counts, list[Tensor]]:
    """The counts of a forward and its tensors, those that are written the last but two."""
    q, k, v, *starts = make_packed(lengths, heads=2, kv_heads=1, head_dim=16)
    counts = Counts(len(lengths), q.shape[0], k.shape[0])
    out, lse = torch.empty_like(q), torch.empty(1, 2, q.shape[0])
    return counts, [*rows_last(q, k, v, out), lse, *starts]


@pytest.mark.kernel
@interpreted
def test_a_counted_launch_serves_other_totals_than_it_was_bound_with() -> None:
    kernel = make_kernel(varlen=True)
    _, sample = packed_call([(5, 9)])
    launch = bind(kernel, sample, (0.2, None), is_counted=True)
    counts, tensors = packed_call([(40, 30), (0, 3), (7, 20)])
    expected = [torch.empty_like(tensor) for tensor in tensors[3:5]]
    launch(counts, *tensors)
    kernel(*tensors[:3], *expected, *tensors[5:], 0.2, None)
    assert all(map(torch.equal, tensors[3:5], expected))


@interpreted
def test_no_rows_are_no_launch() -> None:
    kernel = make_kernel(Pass.BWD_DELTA)
    out, delta = torch.empty(1, 2, 5, 16, dtype=torch.bfloat16), torch.empty(1, 2, 5)
    launch = bind(kernel, (out, out.clone(), delta), is_counted=True)
    kernel.run = None  # type: ignore[assignment]  # not to be called
    launch(Counts(1, 0, 7), out, out, delta)


@interpreted
def test_a_counted_grid_that_no_launch_takes_is_refused_when_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, tensors = packed_call([(5, 9)])
    launch = bind(make_kernel(varlen=True), tensors, (0.2, None), is_counted=True)
    monkeypatch.setattr("fa_autotune.kernels.loaded.MAX_GRID", 10)
    with pytest.raises(LaunchError, match="programs, a launch takes at most 10: split the batch"):
        launch(counts._replace(num_sequences=1000), *tensors)


# --- on a pretended GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What is launched on a pretended GPU: all that its C function is handed."""
    pretend_gpu(monkeypatch)
    return Recorder()


class Kernel:
    """What `bind` asks of a loaded kernel, on the pretended GPU or (`run` None) without a launcher of its own.

    `arrange` makes the arguments of a launch from what the kernel is called with.
    """

    def __init__(
        self,
        run: Any,
        arrange: Callable[..., Sequence[Any]] = lambda *values: values,
        *,
        names: Sequence[str] = ("one", "two", "three", "four"),
        is_persistent: bool = False,
        kernel_pass: Pass = Pass.FWD,
    ) -> None:
        self.compiled = None if run is None else compiled_with(run)
        self.launchers: dict[int, Any] = {}
        self.is_persistent = is_persistent
        self.candidate = SimpleNamespace(family=SimpleNamespace(kernel_pass=kernel_pass))
        self.owner = (*kernel_pass.spec.takes, *kernel_pass.spec.gives).index(kernel_pass.spec.owns)
        self.module = SimpleNamespace(arguments=arrange, SIGNATURE=dict.fromkeys(names))
        self.ran: list[tuple[tuple[int, ...], list[Any]]] = []  # by the public way: grids and arguments
        self.pieces: list[Tensor] = []

    def grid(self, *values: Any) -> tuple[int, ...]:
        return (5, 1, 1)

    def grid_of(self, batch_size: int, num_heads: int, length: int, *num_sms: int) -> tuple[int, ...]:
        return (1000 * batch_size + 100 * num_heads + length, 1, 1)

    def scratch(self, device: torch.device) -> tuple[Tensor, ...]:
        if self.is_persistent:
            self.pieces.append(torch.zeros(8, dtype=torch.int32))
        return tuple(self.pieces[-1:])

    def run(self, grid: tuple[int, ...], arguments: list[Any]) -> None:
        self.ran.append((grid, arguments))


def bound(kernel: Kernel, *values: Any, is_counted: bool = False) -> Callable[..., None]:
    """A launch of a kernel that is called with these values, tensors first."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return bind(kernel, tensors, values[len(tensors) :], is_counted=is_counted)  # type: ignore[arg-type]


def test_a_launch_hands_over_addresses_and_the_bound_numbers(launched: Recorder) -> None:
    kernel = Kernel(Launcher(launched), lambda q, out, scale, size: (q, scale, out, size))
    launch = bound(kernel, on_gpu(2, 3), on_gpu(2, 3), 0.5, 7)
    other, result = on_gpu(2, 3), on_gpu(2, 3)
    assert launched == []  # nothing runs when it is bound
    launch(None, other, result)
    assert launched == [(*FIXED, other.data_ptr(), 0.5, result.data_ptr(), 7)]
    assert kernel.ran == []


def test_one_tensor_may_be_several_arguments(launched: Recorder) -> None:
    """A caller's q may be his k, and a later call's not."""
    q = on_gpu(2, 3)
    launch = bound(Kernel(Launcher(launched), names=("q", "k", "scale")), q, q, 0.5)
    one, other = on_gpu(2, 3), on_gpu(2, 3)
    launch(None, one, other)
    assert launched == [(*FIXED, one.data_ptr(), other.data_ptr(), 0.5)]


@pytest.mark.parametrize("kind", [FlatLauncher, NestedLauncher, ScratchLauncher])
def test_past_a_known_launcher_the_same_reaches_its_c_function(kind: type[Launcher], launched: Recorder) -> None:
    callers: list[str] = []

    def c_function(*arguments: Any) -> None:
        callers.append(sys._getframe(1).f_code.co_name)
        launched(*arguments)

    run = kind(c_function)
    q, k, out = on_gpu(2, 3), on_gpu(4, 3), on_gpu(2, 3)
    launch = bound(Kernel(run, lambda q, k, out, scale: (q, scale, k, out)), q, k, out, 0.5)
    assert launched == []
    launch(None, k, out, q)
    run(*FIXED, k.data_ptr(), 0.5, out.data_ptr(), q.data_ptr())  # what Triton's own way hands over
    assert launched[0] == launched[1]
    assert callers == ["__call__" if kind is ScratchLauncher else "run", "__call__"]


def test_an_unknown_launcher_is_left_to_the_public_way(launched: Recorder) -> None:
    kernel = Kernel(Launcher(launched), names=("q",))
    del kernel.compiled.function
    q = on_gpu(2)
    bound(kernel, on_gpu(2))(None, q)
    assert launched == []
    assert kernel.ran == [((5, 1, 1), [q])]


def test_a_launcher_is_looked_for_once_for_each_kernel_and_gpu(
    launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new length is bound: what lies below Triton's launcher is the same for all."""
    kernel = Kernel(Launcher(launched), names=("q", "length"))
    launches = [bound(kernel, on_gpu(1), 1)]
    monkeypatch.setattr(fast_launch, "fast_path", None)  # not to be called
    launches += [bound(kernel, on_gpu(length), length) for length in (2, 3)]
    tensors = [on_gpu(length) for length in (1, 2, 3)]
    for launch, tensor in zip(launches, tensors, strict=True):
        launch(None, tensor)
    assert launched == [(*FIXED, tensor.data_ptr(), tensor.numel()) for tensor in tensors]


def test_a_launch_is_like_another_of_its_own_launcher_only(launched: Recorder) -> None:
    """Two launchers may have given their bindings the same keys of descriptors."""
    run = Launcher(wrapped(launched, ["layout"]))
    kernel = Kernel(run, lambda q, scale: (describe(q), scale), names=("q", "scale"))
    (long, short), place = (on_gpu(8, 4), on_gpu(2, 4)), on_gpu(8, 4)
    lost = bound(kernel, long, 0.5)
    kernel.launchers.clear()
    bound(kernel, short, 0.5)(None, place)
    like: Any = lost
    bind(kernel, [long], [0.25], like=like)(None, place)  # type: ignore[arg-type]
    of_short, of_long = (arguments[len(FIXED)] for arguments in launched)
    assert of_short is not of_long


@pytest.mark.parametrize("way", ["past the launcher", "public"])
def test_no_tensor_is_kept(way: str, launched: Recorder) -> None:
    run = Launcher(wrapped(launched, ["layout"])) if way == "past the launcher" else None
    kernel = Kernel(run, lambda q, k, scale: (describe(q), k, scale), names=("q", "k", "scale"))
    q, k = on_gpu(2, 3), on_gpu(4, 3)
    launch = bound(kernel, q, k, 0.5)
    launch(None, q, k)
    del kernel.ran[:]
    watched = [weakref.ref(tensor) for tensor in (q, k)]
    del q, k
    assert [watch() for watch in watched] == [None, None]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_gets_launches_of_the_public_way(
    hook: str, launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arguments that the module gives, descriptors whole."""
    import triton

    def arrange(q: Tensor, k: Tensor, scale: float) -> tuple[Any, ...]:
        return describe(q), scale, describe(k), q

    kernel = Kernel(Launcher(wrapped(launched, ["layout 0", "layout 1"])), arrange)
    launch = bound(kernel, on_gpu(2, 3), on_gpu(5, 4), 0.5)
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda metadata: None)
    q, k = on_gpu(2, 3), on_gpu(5, 4)
    launch(None, q, k)
    assert launched == []
    ((grid, (of_q, scale, of_k, whole)),) = kernel.ran
    assert (grid, scale) == ((5, 1, 1), 0.5)
    assert whole is of_q.base is q
    assert of_k.base is k
    assert [(one.shape, one.strides) for one in (of_q, of_k)] == [([2, 3], [3, 1]), ([5, 4], [4, 1])]


def test_a_descriptor_is_encoded_once_for_each_address(launched: Recorder) -> None:
    def arrange(q: Tensor, k: Tensor, out: Tensor, scale: float) -> tuple[Any, ...]:
        return describe(q), scale, describe(k), out

    run = Launcher(wrapped(launched, ["layout 0", "layout 1"]))
    q, k, out = on_gpu(2, 3), on_gpu(4, 3), on_gpu(2, 3)
    launch = bound(Kernel(run, arrange), q, k, out, 0.5)
    encoded.clear()
    for _ in range(3):
        launch(None, q, k, out)
    run(*FIXED, describe(q), 0.5, describe(k), out.data_ptr())  # what Triton's own way hands over
    assert launched == [launched[-1]] * 4
    assert encoded == [q.data_ptr(), k.data_ptr()] * 2
    launch(None, out, k, q)
    assert encoded[4:] == [out.data_ptr()]


def test_a_descriptor_of_another_length_at_the_same_address_is_another(launched: Recorder) -> None:
    """An allocator gives a shorter batch the memory of a longer one."""
    memory = on_gpu(64)
    run = Launcher(wrapped(launched, ["layout"]))
    kernel = Kernel(run, lambda q: (describe(q),), names=("q",))
    tensors = [memory[: 4 * rows].view(rows, 4) for rows in (2, 8, 3)]
    launches = [bound(kernel, tensor) for tensor in tensors]
    for launch, tensor in (*zip(launches, tensors, strict=True), *zip(launches, tensors, strict=True)):
        launch(None, tensor)
    sizes = [arguments[len(FIXED) + 1 :] for arguments in launched]
    assert sizes == [(rows, 4, 4, 1) for rows in (2, 8, 3)] * 2
    assert len({id(arguments[len(FIXED)]) for arguments in launched}) == 3


def test_a_stream_of_addresses_does_not_fill_memory(launched: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "MAX_REMEMBERED_DESCRIPTORS", 2)
    tensors = [on_gpu(2) for _ in range(5)]
    kernel = Kernel(Launcher(wrapped(launched, ["layout"])), lambda q: (describe(q),), names=("q",))
    launch = bound(kernel, tensors[0])
    encoded.clear()
    for tensor in tensors:
        launch(None, tensor)
    assert [arguments[len(FIXED)][1] for arguments in launched] == [tensor.data_ptr() for tensor in tensors]
    launch(None, tensors[-1])
    launch(None, tensors[0])  # forgotten
    assert encoded == [tensor.data_ptr() for tensor in (*tensors, tensors[0])]


# --- counters ---------------------------------------------------------------------------------------------------------


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
def memory(launched: Recorder, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """The scratch memory of the pretended GPU, whose current stream and capture a test can set."""
    from triton.runtime import driver

    memory = Scratch()
    monkeypatch.setattr(scratch, "_addresses", {})
    monkeypatch.setattr(scratch, "scratch_of", memory.of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: memory.capturing)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: memory.stream))
    return memory


def with_counter(run: Any) -> Kernel:
    """A kernel that takes a tile counter between a tensor and a number."""
    return Kernel(run, lambda q, scale, counter: (q, counter, scale), names="abc", is_persistent=True)


@pytest.mark.parametrize("kind", [Launcher, FlatLauncher, NestedLauncher])
def test_a_launch_takes_the_counter_of_its_stream(kind: type[Launcher], launched: Recorder, memory: Scratch) -> None:
    q = on_gpu(2, 3)
    launch = bound(with_counter(kind(launched)), q, 0.5)
    for stream in (7, 8, 7, 8, 7):
        memory.stream = stream
        launch(None, q)
    found = [arguments[-2] for arguments in launched]
    seven, eight = (memory.known[INDEX, stream].data_ptr() for stream in (7, 8))
    assert found == [seven, eight, seven, eight, seven]
    assert memory.slow == [7, 8]  # after that a stream costs one look-up
    assert [arguments[-3:] for arguments in launched] == [(q.data_ptr(), address, 0.5) for address in found]


def test_a_captured_launch_never_takes_its_streams_counter(launched: Recorder, memory: Scratch) -> None:
    q = on_gpu(2, 3)
    launch = bound(with_counter(Launcher(launched)), q, 0.5)
    memory.stream = 7
    launch(None, q)
    memory.capturing = True
    launch(None, q)
    memory.capturing = False
    launch(None, q)
    addresses = [arguments[-2] for arguments in launched]
    assert addresses[0] == addresses[2] != addresses[1]
    assert memory.slow == [7, 7]


def test_the_public_way_asks_for_a_counter_at_each_launch_and_none_when_it_is_bound() -> None:
    kernel, q, other = with_counter(None), on_gpu(2), on_gpu(2)
    launch = bound(kernel, q, 0.5)
    assert kernel.pieces == []
    launch(None, q)
    launch(None, other)
    (_, first), (_, second) = kernel.ran
    assert first[0] is q
    assert second[0] is other
    assert all(one[1] is piece for one, piece in zip((first, second), kernel.pieces, strict=True))
    assert first[2] == second[2] == 0.5


# --- counts -----------------------------------------------------------------------------------------------------------

COUNTED = ("q", "num_sequences", "out", "total_q", "total_k", "counter")


def counted(run: Any, *, kernel_pass: Pass = Pass.FWD) -> Kernel:
    """A kernel of packed sequences that takes a tile counter."""

    def arrange(q: Tensor, out: Tensor, counter: Tensor) -> tuple[Any, ...]:
        return q, 1, out, 2, 3, counter  # counts of the tensors that it was bound with

    return Kernel(run, arrange, names=COUNTED, is_persistent=True, kernel_pass=kernel_pass)


@pytest.mark.parametrize("kind", [Launcher, FlatLauncher, NestedLauncher])
def test_counts_addresses_and_programs_reach_the_launcher(
    kind: type[Launcher], launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_launch, "scratch_address", lambda index, stream: (index, stream))
    monkeypatch.setattr(fast_launch, "num_sms_of", lambda index: 132)
    run = kind(launched)
    q, out = on_gpu(1, 2, 3), on_gpu(1, 2, 3)
    launch = bound(counted(run), q, out, is_counted=True)
    launch(Counts(4, 50, 60), out, q)
    launch(Counts(4, 0, 60), out, q)  # nothing to do
    head = (4 * 1000 + 2 * 100 + 50, 1, 1, *FIXED[3:])
    run(*head, out.data_ptr(), 4, q.data_ptr(), 50, 60, (INDEX, STREAM + INDEX))  # as Triton's own way does
    assert launched == [launched[-1]] * 2


@pytest.mark.parametrize(
    ("kernel_pass", "programs"),
    [
        (Pass.FWD, 4 * 1000 + 2 * 100 + 50),
        (Pass.BWD_DQ, 4 * 1000 + 2 * 100 + 50),
        (Pass.BWD_DELTA, 1 * 1000 + 2 * 100 + 50),  # rows, whose sequences do not matter
        (Pass.BWD_DKDV, 4 * 1000 + 3 * 100 + 60),
        (Pass.BWD_FUSED, 4 * 1000 + 3 * 100 + 60),
    ],
)
def test_the_programs_are_those_of_the_rows_or_keys_that_they_own(
    kernel_pass: Pass, programs: int, launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_launch, "scratch_address", lambda index, stream: 0)
    monkeypatch.setattr(fast_launch, "num_sms_of", lambda index: 132)
    of_rows, of_keys = on_gpu(1, 2, 3), on_gpu(1, 3, 5)
    launch = bound(counted(Launcher(launched), kernel_pass=kernel_pass), of_rows, of_keys, is_counted=True)
    launch(Counts(4, 50, 60), of_rows, of_keys)
    assert [arguments[0] for arguments in launched] == [programs]


def test_the_public_way_fills_the_counts_in() -> None:
    q, out = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    kernel = Kernel(None, lambda q, out: (q, 1, out, 2, 3), names=COUNTED[:-1])
    launch = bound(kernel, q, out, is_counted=True)
    launch(Counts(4, 50, 60), out, q)
    launch(Counts(4, 0, 60), out, q)  # nothing to do
    ((grid, arguments),) = kernel.ran
    assert grid == (4 * 1000 + 2 * 100 + 50, 1, 1)
    assert arguments[0] is out
    assert arguments[2] is q
    assert [arguments[place] for place in (1, 3, 4)] == [4, 50, 60]


# --- modules as they are rendered -------------------------------------------------------------------------------------

COUNTER = 4096  # the address of a tile counter
FIXED_KERNELS = [
    ("fwd,causal,alibi,dropout", Variant.PORTABLE),
    ("fwd,left=9,sinks", Variant.TMA),
    ("fwd,causal", Variant.HOPPER_WS),
    ("bwd_delta", Variant.PORTABLE),
    ("bwd_dkdv,causal,softcap", Variant.TMA),
    ("bwd_dq,left=9,bias", Variant.PORTABLE),
    ("bwd_preprocess", Variant.PORTABLE),
    ("bwd_fused,causal,alibi", Variant.HOPPER_WS),
    ("bwd_postprocess,left=9", Variant.PORTABLE),
]
PACKED_KERNELS = [
    ("fwd,causal,alibi,sinks", Variant.PORTABLE),
    ("fwd,left=9", Variant.HOPPER_WS),
    ("bwd_dkdv,causal", Variant.PORTABLE),
    ("bwd_dq,left=9", Variant.PORTABLE),
    ("bwd_preprocess", Variant.PORTABLE),
    ("bwd_fused,causal", Variant.HOPPER_WS),
    ("bwd_postprocess", Variant.PORTABLE),
]
of_modules = "pass_and_features", "variant"


def loaded_on_gpu(
    pass_and_features: str, variant: Variant, run: Any, patch: pytest.MonkeyPatch, *, varlen: bool = False
) -> tuple[LoadedKernel, AttentionProblem]:
    """A kernel as it is on a GPU, launched by `run`, and a problem for it."""
    patch.setattr(loaded, "interpreting", lambda: False)
    patch.setattr(loaded, "compile_module", lambda module, arch: compiled_with(run))
    for module in (loaded, fast_launch):
        patch.setattr(module, "num_sms_of", lambda index: 3)
    patch.setattr(fast_launch, "scratch_address", lambda index, stream: COUNTER)
    problem = AttentionProblem.parse(f"2x4x2x130x140x64,{pass_and_features}{',varlen' if varlen else ''}")
    spec = variant_spec(problem.family.kernel_pass, variant)
    config = default_config(spec, problem.family, "sm_90")
    return load_kernel(Candidate(family=problem.family, variant=variant, config=config), "sm_90"), problem


def values_of(problem: AttentionProblem, *, sequences: Sequences | None = None) -> tuple[list[Tensor], list[Any]]:
    """What a kernel is called with: tensors of the pretended GPU, which lie as a call's do, and numbers."""
    diagonal = bottom_right_diagonal(problem)
    workload = seeded_workload(problem, device=torch.device("cpu"), diagonal=diagonal, sequences=sequences)
    values = workload.arguments(workload.allocate())
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = list(values[len(tensors) :])
    if sequences is not None:  # rows first
        of_rows = {sequences.total_q, sequences.total_k}
        tensors = [
            tensor.transpose(1, 2).contiguous().transpose(1, 2)
            if tensor.ndim == 4 and tensor.shape[2] in of_rows
            else tensor
            for tensor in tensors
        ]
    return [tensor.as_subclass(OnGpu) for tensor in tensors], numbers


def elsewhere(tensor: Tensor) -> Tensor:
    """A copy that lies alike."""
    copy = torch.empty(0, dtype=tensor.dtype)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.as_subclass(OnGpu)


def handed_over_publicly(
    kernel: LoadedKernel, launcher: Callable[..., None], tensors: list[Tensor], numbers: list[Any]
) -> None:
    """What Triton's own way hands to a launcher."""
    counter = torch.empty(0, dtype=torch.int32)
    arguments = kernel.module.arguments(*tensors, *numbers, *([counter] if kernel.is_persistent else []))
    programs, *_ = kernel.grid(*tensors)
    addresses = (
        COUNTER if value is counter else value.data_ptr() if isinstance(value, Tensor) else value for value in arguments
    )
    launcher(programs, *FIXED[1:], *addresses)


def layouts_of(kernel: LoadedKernel, tensors: list[Tensor], numbers: list[Any]) -> list[str]:
    """What Triton knows of each of a kernel's descriptors."""
    counter = [torch.empty(0, dtype=torch.int32)] if kernel.is_persistent else []
    arguments = kernel.module.arguments(*tensors, *numbers, *counter)
    return [f"layout {place}" for place, value in enumerate(arguments) if hasattr(value, "block_shape")]


@pytest.mark.kernel
@pytest.mark.parametrize(of_modules, FIXED_KERNELS)
def test_a_rendered_module_is_launched_with_what_its_arguments_are(
    pass_and_features: str, variant: Variant, launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other tensors than it was bound with."""
    run = Launcher(launched)
    kernel, problem = loaded_on_gpu(pass_and_features, variant, run, monkeypatch)
    tensors, numbers = values_of(problem)
    if layouts := layouts_of(kernel, tensors, numbers):
        run.launch = wrapped(launched, layouts)
    launch = bind(kernel, tensors, numbers)
    others = [elsewhere(tensor) for tensor in tensors]
    launch(None, *others)
    handed_over_publicly(kernel, run, others, numbers)
    assert launched[0] == launched[1]
    assert variant is Variant.PORTABLE or layouts


@pytest.mark.kernel
@pytest.mark.parametrize(of_modules, PACKED_KERNELS)
def test_of_a_rendered_module_of_packed_sequences_counts_alone_change_with_the_totals(
    pass_and_features: str, variant: Variant, launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was bound with to others stays right for any other totals and numbers of sequences."""
    run = Launcher(launched)
    kernel, problem = loaded_on_gpu(pass_and_features, variant, run, monkeypatch, varlen=True)
    tensors, numbers = values_of(problem, sequences=Sequences(lengths_q=(7, 0), lengths_k=(5, 20)))
    if layouts := layouts_of(kernel, tensors, numbers):
        run.launch = wrapped(launched, layouts)
    launch = bind(kernel, tensors, numbers, is_counted=True)
    other = Sequences(lengths_q=(150, 3, 60), lengths_k=(0, 130, 9))
    others, _ = values_of(problem, sequences=other)
    launch(Counts(3, other.total_q, other.total_k), *others)
    handed_over_publicly(kernel, run, others, numbers)
    assert launched[0] == launched[1]


@pytest.mark.kernel
def test_the_delta_of_packed_sequences_is_that_of_one_batch_of_all_rows(
    launched: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel knows of no sequences."""
    run = Launcher(launched)
    kernel, _ = loaded_on_gpu("bwd_delta", Variant.PORTABLE, run, monkeypatch)

    def rows(total: int) -> list[Tensor]:
        out, d_out = (on_gpu(total, 4, 64).bfloat16().transpose(0, 1)[None] for _ in range(2))
        return [out, d_out, on_gpu(1, 4, total)]

    launch = bind(kernel, rows(7), is_counted=True)
    others = rows(213)
    launch(Counts(3, 213, 139), *others)
    handed_over_publicly(kernel, run, others, [])
    assert launched[0] == launched[1]
