"""A kernel bound to the shapes and strides of its tensors: later launches only fill in the addresses.

A generated module's `arguments()` is asked once. On a GPU a launch then costs the addresses, the stream and one call of
the C function below Triton's launcher. A descriptor (tma) depends on an address and on nothing else that changes, so it
is encoded once for each address; where the launcher is not built as in Triton 3.6 and 3.7, launches go through Triton's
public way instead.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.kernels.gpu import bind_thread, make_context_current, num_sms_of
from fa_autotune.kernels.loaded import OWNERS, LoadedKernel
from fa_autotune.kernels.scratch import scratch_address
from fa_autotune.problem.family import Pass

Launch = Callable[..., None]

MAX_REMEMBERED_ADDRESSES = 256  # of one descriptor; training comes back to the same few
_STREAM = object()  # where a launch's stream goes


def bind(
    kernel: LoadedKernel, tensors: Sequence[Tensor], *numbers: float | int | None, gpu: int | None = None
) -> Launch:
    """A function that launches a kernel on tensors like these, given in this order; LaunchError for too large a grid.

    `tensors` and `numbers` together are what the kernel is called with; those yet to be allocated may be on the meta
    device, and no tensor is kept. `gpu` is the index of the GPU, for a kernel all of whose tensors are such. Later
    tensors must share their shapes, strides and alignment, but may be views with other axes: only their addresses are
    read. A launch wants its GPU to be current.
    """
    tensors = [tensor.detach() for tensor in tensors]  # one object for each, also where a caller's q is his k
    grid = kernel.grid(*tensors)
    counter = (torch.empty(0, dtype=torch.int32, device="meta"),) if kernel.is_persistent else ()
    arguments = _Arguments(kernel.module.arguments(*tensors, *numbers, *counter), (*tensors, *counter))
    sample = next((tensor for tensor in tensors if tensor.is_cuda), None)
    if sample is None and gpu is not None:
        sample = torch.empty(16, device=torch.device("cuda", gpu))
    device = torch.device("cpu") if sample is None else sample.device

    def launch(*actual: Tensor) -> None:
        kernel.run(grid, arguments.filled((*actual, *kernel.scratch(device))))

    if kernel.compiled is None or sample is None:
        return launch
    return _on_gpu(kernel.compiled, arguments, grid, sample, launch, len(tensors) if counter else None)


class Counts(NamedTuple):
    """What changes from call to call of sequences in a row: their number, and the rows of q and of k."""

    num_sequences: int
    total_q: int
    total_k: int


def bind_varlen(
    kernel: LoadedKernel, tensors: Sequence[Tensor], *numbers: float | int | None, gpu: int | None = None
) -> Callable[..., None]:
    """As `bind`, a function of `Counts` and the tensors: these may have other numbers of rows and sequences each time.

    For kernels of a varlen family, and the delta that goes with them; LaunchError, when launched, for too large a grid.
    """
    tensors = [tensor.detach() for tensor in tensors]
    counter = (torch.empty(0, dtype=torch.int32, device="meta"),) if kernel.is_persistent else ()
    arguments = _Arguments(kernel.module.arguments(*tensors, *numbers, *counter), (*tensors, *counter))
    grid_of = _grid_of_counts(kernel, tensors, gpu)
    names = list(kernel.module.SIGNATURE)
    spots = [(names.index(name), number) for name, number in _COUNT_OF.items() if name in names]

    def slow(counts: Counts, *actual: Tensor) -> None:
        if grid := grid_of(counts):
            values = arguments.filled((*actual, *kernel.scratch(actual[0].device)))
            for position, number in spots:
                values[position] = counts[number]
            kernel.run(grid, values)

    if kernel.compiled is None or gpu is None:
        return slow
    sample = torch.empty(16, device=torch.device("cuda", gpu))
    return _varlen_on_gpu(kernel.compiled, arguments, spots, grid_of, sample, slow, len(tensors) if counter else None)


def _varlen_on_gpu(
    compiled: Any,
    arguments: "_Arguments",
    spots: Sequence[tuple[int, int]],
    grid_of: Callable[[Counts], tuple[int, ...] | None],
    sample: Tensor,
    slow: Callable[..., None],
    counter: int | None,
) -> Callable[..., None]:
    """`spots`: the position of an argument, and which of the counts it is; `counter` as in `_on_gpu`."""
    index = sample.device.index
    programs = int("1000003")  # an object of its own, by which its place is found
    ready = _prepared(compiled, arguments, programs, sample)
    if ready is None:
        return slow
    function, before, is_flat, place, stream_of, runtime = (
        ready.function, ready.before, ready.is_flat, ready.place, ready.stream_of, ready.runtime,
    )  # fmt: skip
    place_of_programs = next(place for place, value in enumerate(before) if value is programs)
    first = len(before) if is_flat else 0
    count_spots = [(first + ready.places[position], number) for position, number in spots]
    address_spots = [
        (first + position, number, known, encode)
        for position, number, known, encode in ready.fillers
        if number != counter
    ]
    place_of_counter = next((first + position for position, number, *_ in ready.fillers if number == counter), None)
    whole = [*before, *ready.template] if is_flat else ready.template

    def launch(counts: Counts, *actual: Tensor) -> None:
        grid = grid_of(counts)
        if not grid:
            return
        if _is_hooked(runtime):
            return slow(counts, *actual)
        values = whole.copy()
        for position, number, known, encode in address_spots:
            address = actual[number].data_ptr()
            values[position] = address if known is None else known.get(address) or encode(address)
        for position, number in count_spots:
            values[position] = counts[number]
        stream = stream_of(index)
        if place_of_counter is not None:
            values[place_of_counter] = scratch_address(index, stream)
        head = values if is_flat else before.copy()
        head[place], head[place_of_programs] = stream, grid[0]
        if is_flat:
            function(*values)
        else:
            function(*head, values)

    return launch


_COUNT_OF = {"num_sequences": 0, "total_q": 1, "total_k": 2, "seqlen_q": 1}  # kernels' names of what `Counts` hold


def _grid_of_counts(
    kernel: LoadedKernel, tensors: Sequence[Tensor], gpu: int | None
) -> Callable[[Counts], tuple[int, ...] | None]:
    """The programs of a call, None where there are none; LaunchError if a launch can't take that many."""
    kernel_pass = kernel.candidate.family.kernel_pass
    num_heads = tensors[OWNERS.get(kernel_pass, 0)].shape[1]
    owns_keys = kernel_pass in (Pass.BWD_DKDV, Pass.BWD_FUSED)
    num_sms = () if gpu is None or not kernel.is_persistent else (num_sms_of(gpu),)

    def grid_of(counts: Counts) -> tuple[int, ...] | None:
        num_sequences = 1 if kernel_pass is Pass.BWD_DELTA else counts.num_sequences
        total = counts.total_k if owns_keys else counts.total_q
        return kernel.grid_of(num_sequences, num_heads, total, *num_sms) if total else None

    return grid_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Spot:
    """Where a tensor's address goes: the position of an argument, and the tensor's number."""

    position: int
    number: int


class _Arguments:
    """The arguments of a launch without their tensors."""

    def __init__(self, arguments: Iterable[Any], tensors: Sequence[Tensor]) -> None:
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.values: list[Any] = []
        self.pointers: list[_Spot] = []
        self.descriptors: list[_Spot] = []
        for position, value in enumerate(arguments):
            kept = value
            if isinstance(value, Tensor):
                self.pointers.append(_Spot(position, numbers[id(value)]))
                kept = None
            elif hasattr(value, "block_shape"):
                self.descriptors.append(_Spot(position, numbers[id(value.base)]))
                kept = copy.copy(value)
                kept.base = None
            self.values.append(kept)

    def filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments for these tensors, as `arguments()` would give them."""
        filled = list(self.values)
        for spot in self.pointers:
            filled[spot.position] = tensors[spot.number]
        for spot in self.descriptors:
            filled[spot.position] = dataclasses.replace(filled[spot.position], base=tensors[spot.number])
        return filled


def _on_gpu(
    compiled: Any,
    arguments: _Arguments,
    grid: tuple[int, ...],
    sample: Tensor,
    slow: Launch,
    counter: int | None = None,
) -> Launch:
    """`counter`: the number of the tensor that no launch is given: it is looked up, since the stream decides which."""
    index = sample.device.index
    ready = _prepared(compiled, arguments, grid[0], sample)
    if ready is None:
        return slow
    function, before, template, is_flat, fillers, place, stream_of, runtime = (
        ready.function, ready.before, ready.template, ready.is_flat, ready.fillers, ready.place, ready.stream_of,
        ready.runtime,
    )  # fmt: skip
    first = len(before) if is_flat else 0
    whole = [*before, *template] if is_flat else template
    spots = [
        (first + position, number, known, encode) for position, number, known, encode in fillers if number != counter
    ]
    place_of_counter = next((first + position for position, number, *_ in fillers if number == counter), None)

    def launch(*tensors: Tensor) -> None:
        if _is_hooked(runtime):  # a profiler wants the launch's metadata
            return slow(*tensors)
        values = whole.copy()
        for position, number, known, encode in spots:
            address = tensors[number].data_ptr()
            values[position] = address if known is None else known.get(address) or encode(address)
        stream = stream_of(index)
        if place_of_counter is not None:
            values[place_of_counter] = scratch_address(index, stream)
        if is_flat:
            values[place] = stream
            function(*values)
        else:
            function(*before[:place], stream, *before[place + 1 :], values)

    return launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """What a launch calls, and what it fills in: see `_tapped` and `_expand`. `place`: where the stream goes; `places`:
    where in the template each of a kernel's arguments begins."""

    function: Callable[..., None]
    before: list[Any]
    template: list[Any]
    is_flat: bool
    fillers: "list[_Filler]"
    places: list[int]
    place: int
    stream_of: Callable[[int], int]
    runtime: Any


def _prepared(compiled: Any, arguments: _Arguments, programs: int, sample: Tensor) -> _Ready | None:
    """A kernel put on a sample's GPU; None where Triton's launcher is not as expected."""
    import triton  # noqa: PLC0415 - loaded by now: the kernel is compiled

    index = sample.device.index
    bind_thread(index)
    with torch.cuda.device(index):
        run = compiled.run  # loads the kernel on the current device
    expanded = _expand(run, arguments, sample)
    if expanded is None:
        return None
    run, template, fillers, places = expanded
    head = (programs, 1, 1, _STREAM, compiled.function, compiled.packed_metadata, None, None, None)
    function, before, is_flat = _tapped(run, head, template)
    return _Ready(
        function=function,
        before=before,
        template=template,
        is_flat=is_flat,
        fillers=fillers,
        places=places,
        place=before.index(_STREAM),
        stream_of=getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of),
        runtime=triton.knobs.runtime,
    )


_Filler = tuple[int, int, dict[int, Any] | None, Any]  # position, tensor's number, descriptors known, encoder


def _tapped(run: Any, head: tuple[Any, ...], template: list[Any]) -> tuple[Callable[..., None], list[Any], bool]:
    """What Triton's launcher calls in the end, what it hands over before the kernel's arguments, and whether those
    follow one by one (Triton 3.6) or as one sequence (3.7). The launcher itself, where it does more than that.
    """
    handed: list[tuple[Any, ...]] = []
    if getattr(run, "global_scratch_size", None) == 0 == getattr(run, "profile_scratch_size", None):
        tapped = copy.copy(run)
        tapped.launch = lambda *values: handed.append(values)
        tapped(*head, *template)
    if len(handed) == 1 and _STREAM in handed[0]:
        *before, last = handed[0]
        if isinstance(last, (list, tuple)) and _are_same(last, template):
            return run.launch, before, False
        count = len(handed[0]) - len(template)
        if template and _are_same(handed[0][count:], template):
            return run.launch, list(handed[0][:count]), True
    return run, list(head), True


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _expand(run: Any, arguments: _Arguments, sample: Tensor) -> tuple[Any, list[Any], list[_Filler], list[int]] | None:
    """The launcher that takes what descriptors stand for, its arguments, what fills in their addresses, and where each
    argument begins.

    None where Triton's launcher is not as expected.
    """
    encoders: dict[int, _Encoder] = {}
    if arguments.descriptors:
        opened = _opened(run)
        if opened is None:
            return None
        run, encode, layouts = opened
        for spot, layout in zip(arguments.descriptors, layouts, strict=True):
            encoders[spot.position] = _Encoder(encode, arguments.values[spot.position], layout, sample.device.index)
    numbers = {spot.position: spot.number for spot in (*arguments.pointers, *arguments.descriptors)}
    template: list[Any] = []
    fillers: list[_Filler] = []
    places: list[int] = []
    for position, value in enumerate(arguments.values):
        encoder = encoders.get(position)
        places.append(len(template))
        if position in numbers:
            known = None if encoder is None else encoder.known
            fillers.append((len(template), numbers[position], known, encoder))
        if encoder is None:
            template.append(value)
        else:
            map_, *rest = encoder.all_of(sample.data_ptr())
            if isinstance(map_, _Address):
                return None  # lowered to a plain pointer
            template += [map_, *rest]
    return run, template, fillers, places


def _opened(run: Any) -> tuple[Any, Callable[..., list[Any]], Sequence[Any]] | None:
    """A launcher without the wrapper that encodes descriptors, that encoding, and its data; None if unknown."""
    wrapper = getattr(run, "launch", None)
    code = getattr(wrapper, "__code__", None)
    if wrapper is None or code is None or wrapper.__closure__ is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in wrapper.__closure__), strict=True))
    encode = wrapper.__globals__.get("make_tensordesc_arg")
    if encode is None or not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    opened = copy.copy(run)
    opened.launch = cells["launcher"]
    return opened, encode, cells["tensordesc_meta"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Address:
    """What Triton asks of a descriptor's tensor when it encodes it."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class _Encoder:
    """The encoded descriptor of an address, remembered."""

    def __init__(self, encode: Callable[..., list[Any]], descriptor: Any, layout: Any, index: int) -> None:
        self._index = index
        self._encode = encode
        self._descriptor = descriptor
        self._layout = layout
        self.known: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        if len(self.known) >= MAX_REMEMBERED_ADDRESSES:
            self.known.clear()
        self.known[address] = encoded = self.all_of(address)[0]
        return encoded

    def all_of(self, address: int) -> list[Any]:
        """The encoded descriptor and what follows it: shape and strides."""
        descriptor = copy.copy(self._descriptor)
        descriptor.base = _Address(address)
        try:
            return self._encode(descriptor, self._layout)
        except RuntimeError:  # perhaps in a thread that has no context yet
            make_context_current(self._index)
            return self._encode(descriptor, self._layout)


def _is_hooked(runtime: Any) -> bool:
    hook = runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None)) or bool(
        getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook is not None)
    )


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream
