"""A kernel bound to the shapes and strides of its tensors: later launches only fill in the addresses.

A generated module's `arguments()` is asked once. On a GPU a launch then costs the addresses, the stream and one call of
the C function below Triton's launcher. A descriptor (tma) depends on an address and on nothing else that changes, so it
is encoded once for each address; where `triton_private` does not know the launcher, launches go through Triton's public
way instead.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.kernels.gpu import bind_thread, num_sms_of
from fa_autotune.kernels.loaded import OWNERS, LoadedKernel
from fa_autotune.kernels.scratch import scratch_address
from fa_autotune.kernels.triton_private import FastPath, fast_path, is_hooked
from fa_autotune.problem.family import Pass

Launch = Callable[..., None]


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
    path = _fast_path(compiled, arguments, sample)
    if path is None:
        return slow
    function, before, is_flat, place, place_of_programs, stream_of, hooks = (
        path.function, path.head, path.is_flat, path.stream_place, path.programs_place, path.stream_of, path.hooks,
    )  # fmt: skip
    first = len(before) if is_flat else 0
    count_spots = [(first + path.places[position], number) for position, number in spots]
    address_spots = [
        (first + position, number, known, encode)
        for position, number, known, encode in path.fillers
        if number != counter
    ]
    place_of_counter = next((first + position for position, number, *_ in path.fillers if number == counter), None)
    whole = [*before, *path.template] if is_flat else path.template

    def launch(counts: Counts, *actual: Tensor) -> None:
        grid = grid_of(counts)
        if not grid:
            return
        if is_hooked(hooks):
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


class _Arguments:
    """The arguments of a launch without their tensors; of these, position of the argument → number of the tensor."""

    def __init__(self, arguments: Iterable[Any], tensors: Sequence[Tensor]) -> None:
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.values: list[Any] = []
        self.pointers: dict[int, int] = {}
        self.descriptors: dict[int, int] = {}
        for position, value in enumerate(arguments):
            kept = value
            if isinstance(value, Tensor):
                self.pointers[position] = numbers[id(value)]
                kept = None
            elif hasattr(value, "block_shape"):
                self.descriptors[position] = numbers[id(value.base)]
                kept = copy.copy(value)
                kept.base = None
            self.values.append(kept)

    def filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments for these tensors, as `arguments()` would give them."""
        filled = list(self.values)
        for position, number in self.pointers.items():
            filled[position] = tensors[number]
        for position, number in self.descriptors.items():
            filled[position] = dataclasses.replace(filled[position], base=tensors[number])
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
    path = _fast_path(compiled, arguments, sample)
    if path is None:
        return slow
    function, before, template, is_flat, fillers, place, stream_of, hooks = (
        path.function, path.head, path.template, path.is_flat, path.fillers, path.stream_place, path.stream_of,
        path.hooks,
    )  # fmt: skip
    before[path.programs_place] = grid[0]
    first = len(before) if is_flat else 0
    whole = [*before, *template] if is_flat else template
    spots = [
        (first + position, number, known, encode) for position, number, known, encode in fillers if number != counter
    ]
    place_of_counter = next((first + position for position, number, *_ in fillers if number == counter), None)

    def launch(*tensors: Tensor) -> None:
        if is_hooked(hooks):  # a profiler wants the launch's metadata
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


def _fast_path(compiled: Any, arguments: _Arguments, sample: Tensor) -> FastPath | None:
    bind_thread(sample.device.index)
    return fast_path(compiled, arguments.values, arguments.pointers, arguments.descriptors, sample)
