"""A kernel bound to how its tensors lie and to its numbers: launches fill in addresses only.

A generated module's `arguments()` is asked once for each binding. On a GPU a launch then costs the addresses, the
stream and one call of the C function below Triton's launcher; what that is, and where the addresses go, is found once
for each kernel. A descriptor (tma) depends on an address and on nothing else that changes, so it is encoded once for
each; where `triton_private` does not know the launcher, launches go through Triton's public way instead.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fa_autotune.kernels.gpu import bind_thread, num_sms_of
from fa_autotune.kernels.loaded import LoadedKernel
from fa_autotune.kernels.scratch import scratch_address
from fa_autotune.kernels.triton_private import FastPath, fast_path, is_descriptor, is_hooked

MAX_REMEMBERED_DESCRIPTORS = 1024  # of one kernel; training comes back to the same few addresses
_ALIGNED = 16  # bytes, of an address that a descriptor has
_lock = threading.Lock()
_ADDRESSES = 1 << 64  # how far apart the keys of two bindings are


class Counts(NamedTuple):
    """What changes from call to call of packed sequences: their number, and the rows of q and of k."""

    num_sequences: int
    total_q: int
    total_k: int


class Launch:
    """A kernel bound to how its tensors lie: called with `Counts` (or None) and the tensors, or as `run(self, …)`."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, counts: Counts | None, *tensors: Tensor) -> None:
        self.run(self, counts, *tensors)


_COUNTER = torch.empty(0, dtype=torch.int32, device="meta")  # no launch is given it: its stream decides which it is
_COUNTED = {"num_sequences": 0, "total_q": 1, "total_k": 2, "seqlen_q": 1}  # kernels' names of what `Counts` hold


def bind(
    kernel: LoadedKernel,
    tensors: Sequence[Tensor],
    numbers: Sequence[float | int | None] = (),
    *,
    is_counted: bool = False,
    like: Launch | None = None,
) -> Launch:
    """The launch of a kernel on tensors that lie like these; LaunchError for too large a grid.

    `tensors` and `numbers` together are what the kernel is called with; no tensor is kept. Later tensors come in this
    order and share shapes, strides and alignment, but may be views with other axes: only their addresses are read. A
    launch wants its GPU to be current.
    `is_counted`, for kernels of a varlen family and the delta that goes with them: launches are given `Counts`, tensors
    may have other numbers of rows and sequences each time, and it is the launch that raises LaunchError.
    `like`: a launch of this kernel on tensors that lie the same, with other numbers.
    """
    if len({id(tensor) for tensor in tensors}) < len(tensors):  # a caller's q may be his k
        tensors = [tensor.detach() for tensor in tensors]
    counter = (_COUNTER,) if kernel.is_persistent else ()
    programs = 0 if is_counted else kernel.grid(*tensors)[0]
    index = tensors[0].get_device()
    known: _Launcher | None = kernel.launchers.get(index)
    if known is not None:
        return known.bind(known.arguments(*tensors, *numbers, *counter), programs, like)
    arguments = list(kernel.module.arguments(*tensors, *numbers, *counter))
    if kernel.compiled is not None and index >= 0 and index not in kernel.launchers:
        with _lock:  # one for all threads
            if index not in kernel.launchers:
                kernel.launchers[index] = _launcher_of(kernel, arguments, (*tensors, *counter), index)
        launcher: _Launcher | None = kernel.launchers[index]
        if launcher is not None:
            return launcher.bind(arguments, programs)
    return _Public(kernel, _Places(arguments, (*tensors, *counter)), arguments, programs)


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class _Places:
    """Where a kernel's arguments hold tensors: position of a pointer or descriptor → number of its tensor."""

    pointers: dict[int, int]
    descriptors: dict[int, int]

    def __init__(self, arguments: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        pointers, descriptors = dict[int, int](), dict[int, int]()
        for position, value in enumerate(arguments):
            if isinstance(value, Tensor):
                pointers[position] = numbers[id(value)]
            elif is_descriptor(value):
                descriptors[position] = numbers[id(value.base)]
        object.__setattr__(self, "pointers", pointers)
        object.__setattr__(self, "descriptors", descriptors)

    def without_tensors(self, arguments: Sequence[Any]) -> list[Any]:
        """A launch's arguments, less the tensors."""
        values = list(arguments)
        for position in self.pointers:
            values[position] = None
        for position in self.descriptors:
            values[position] = copy.copy(values[position])
            values[position].base = None
        return values

    def filled(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments for these tensors, as `arguments()` would give them."""
        filled = list(values)
        for position, number in self.pointers.items():
            filled[position] = tensors[number]
        for position, number in self.descriptors.items():
            filled[position] = dataclasses.replace(filled[position], base=tensors[number])
        return filled


class _Public(Launch):
    """A launch as Triton's documents have it."""

    __slots__ = ("_kernel", "_places", "_programs", "_values")

    def __init__(self, kernel: LoadedKernel, places: _Places, arguments: Sequence[Any], programs: int) -> None:
        super().__init__(_Public._run)
        self._kernel, self._places, self._programs = kernel, places, programs
        self._values = places.without_tensors(arguments)

    def _run(self, counts: Counts | None, *tensors: Tensor) -> None:
        kernel = self._kernel
        programs = self._programs if counts is None else _programs_of(kernel, counts, tensors)
        if programs == 0:
            return
        filled = self._places.filled(self._values, (*tensors, *kernel.scratch(tensors[0].device)))
        if counts is not None:
            for position, number in _count_positions(kernel):
                filled[position] = counts[number]
        kernel.run((programs, 1, 1), filled)


def _count_positions(kernel: LoadedKernel) -> list[tuple[int, int]]:
    """Position of an argument, and which of the counts it is."""
    names = list(kernel.module.SIGNATURE)
    return [(names.index(name), number) for name, number in _COUNTED.items() if name in names]


def _programs_of(kernel: LoadedKernel, counts: Counts, tensors: Sequence[Tensor]) -> int:
    """The programs of a call on packed sequences, 0 where there is nothing to own."""
    spec = kernel.candidate.family.kernel_pass.spec
    total = counts.total_k if spec.owns_keys else counts.total_q
    if total == 0:
        return 0
    owner = tensors[kernel.owner]
    num_sms = (num_sms_of(owner.get_device()),) if kernel.is_persistent else ()
    num_sequences = counts.num_sequences if spec.knows_sequences else 1
    return kernel.grid_of(num_sequences, owner.shape[1], total, *num_sms)[0]


# --- past Triton's launcher -------------------------------------------------------------------------------------------


class _Bound(Launch):
    """The number of programs, a kernel's arguments but for what launches fill in, and where its keys begin among those
    of descriptors. It has little else, so that many are cheap."""

    __slots__ = ("arguments", "offset", "programs")

    def __init__(self, run: Callable[..., None], programs: int, arguments: tuple[Any, ...], offset: int) -> None:
        self.run, self.programs, self.arguments, self.offset = run, programs, arguments, offset


class _Launcher:
    """What all bindings of a kernel on one GPU share: where addresses go, and the descriptors encoded so far."""

    def __init__(self, kernel: LoadedKernel, path: FastPath, places: _Places, num_tensors: int, index: int) -> None:
        """`num_tensors`: those that launches are given; a tile counter comes after them."""
        self._kernel, self._path, self._places, self._index = kernel, path, places, index
        self._begins, place = list[int](), len(path.head)
        for position in range(len(kernel.module.SIGNATURE)):
            self._begins.append(place)
            place += path.encoders[position].count if position in path.encoders else 1
        self._serials = count()
        self._run = self._make_run(num_tensors)
        self.arguments = _with_plain_descriptors(kernel.module.arguments)

    def bind(self, arguments: Sequence[Any], programs: int, like: Launch | None = None) -> Launch:
        """A launch with these arguments, whose tensors launches are given; `like` one whose tensors lie the same."""
        values, shared = list[Any](), dict[int, int]()
        pointers, encoders = self._places.pointers, self._path.encoders
        for position, value in enumerate(arguments):
            if position in encoders:
                values += (None, *value.shape, *value.strides)
            else:
                values.append(None if position in pointers else value)
        kept = [shared.setdefault(value, value) if type(value) is int else value for value in values]
        is_mine = isinstance(like, _Bound) and like.run is self._run
        offset = cast("_Bound", like).offset if is_mine else next(self._serials) * _ADDRESSES
        return _Bound(self._run, programs, tuple(kept), offset)

    def _make_run(self, num_tensors: int) -> Callable[..., None]:
        path, index, begins, kernel = self._path, self._index, self._begins, self._kernel
        function, hooks, stream_of, is_flat, head = path.function, path.hooks, path.stream_of, path.is_flat, path.head
        stream_place, programs_place, head_count = path.stream_place, path.programs_place, len(path.head)
        pointers = [(begins[at], number) for at, number in self._places.pointers.items() if number < num_tensors]
        descriptors = [
            (begins[at], number, slot, path.encoders[at])
            for slot, (at, number) in enumerate(self._places.descriptors.items())
        ]
        assert len(descriptors) <= _ALIGNED  # a descriptor's slot is told apart in its address's low bits
        of_counter = next((begins[at] for at, n in self._places.pointers.items() if n >= num_tensors), None)
        counted = [(begins[position], number) for position, number in _count_positions(kernel)]
        known: dict[int, Any] = {}

        def run(bound: _Bound, counts: Counts | None, *tensors: Tensor) -> None:
            if is_hooked(hooks):  # a profiler wants the launch's metadata
                return self._run_publicly(bound, counts, tensors)
            programs = bound.programs if counts is None else _programs_of(kernel, counts, tensors)
            if programs == 0:
                return None
            values = [*head, *bound.arguments]
            values[programs_place] = programs
            for place, number in pointers:
                values[place] = tensors[number].data_ptr()
            for place, number, slot, encoder in descriptors:
                address = tensors[number].data_ptr()
                key = bound.offset + address + slot
                encoded = known.get(key)
                if encoded is None:
                    if len(known) >= MAX_REMEMBERED_DESCRIPTORS:
                        known.clear()
                    encoded = known[key] = encoder.of_address(address, values[place + 1 : place + encoder.count])
                values[place] = encoded
            if counts is not None:
                for place, number in counted:
                    values[place] = counts[number]
            stream = values[stream_place] = stream_of(index)
            if of_counter is not None:
                values[of_counter] = scratch_address(index, stream)
            if is_flat:
                function(*values)
            else:
                function(*values[:head_count], values[head_count:])
            return None

        return run

    def _run_publicly(self, bound: _Bound, counts: Counts | None, tensors: Sequence[Tensor]) -> None:
        values, head_count = list[Any](), len(self._path.head)
        for position, begin in enumerate(self._begins):
            place, encoder = begin - head_count, self._path.encoders.get(position)
            numbers = () if encoder is None else bound.arguments[place + 1 : place + encoder.count]
            values.append(bound.arguments[place] if encoder is None else encoder.described(None, numbers))
        _Public(self._kernel, self._places, values, bound.programs)(counts, *tensors)


class _Described(NamedTuple):
    """What a binding needs of a descriptor; in place of Triton's own class, whose checks the first one has passed."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any = None


def _with_plain_descriptors(arguments: Callable[..., Any]) -> Callable[..., Any]:
    """A generated module's `arguments()` whose descriptors are told, not checked: half of a binding's time."""
    scope = {**arguments.__globals__, "TensorDescriptor": _Described}
    return FunctionType(arguments.__code__, scope, arguments.__name__, arguments.__defaults__)


def _launcher_of(
    kernel: LoadedKernel, arguments: Sequence[Any], tensors: Sequence[Tensor], index: int
) -> _Launcher | None:
    """How a kernel is launched on a GPU past Triton's launcher; None where that is not as expected."""
    bind_thread(index)
    path = fast_path(kernel.compiled, arguments, index)
    if path is None:
        return None
    num_tensors = len(tensors) - kernel.is_persistent
    return _Launcher(kernel, path, _Places(arguments, tensors), num_tensors, index)
