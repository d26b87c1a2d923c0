"""A kernel bound to the shapes and strides of its tensors: later launches only fill in the addresses.

A generated module's `arguments()` is asked once. On a GPU a launch then costs the addresses, the stream and one call of
Triton's launcher. A descriptor (tma) depends on an address and on nothing else that changes, so it is encoded once for
each address; where the launcher is not built as in Triton 3.6 and 3.7, launches go through Triton's public way instead.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_autotune.launch import LoadedKernel, bind_thread

Launch = Callable[..., None]

MAX_REMEMBERED_ADDRESSES = 256  # of one descriptor; training comes back to the same few


def bind(kernel: LoadedKernel, tensors: Sequence[Tensor], *numbers: float | int | None) -> Launch:
    """A function that launches a kernel on tensors like these, given in this order; LaunchError for too large a grid.

    `tensors` and `numbers` together are what the kernel is called with; outputs may be on the meta device, and no
    tensor is kept. Later tensors must share their shapes, strides and alignment, but may be views with other axes: only
    their addresses are read.
    """
    grid = kernel.grid(*tensors)
    sample = next((tensor for tensor in tensors if tensor.is_cuda), None)
    scratch = kernel.scratch(sample.device) if sample is not None else ()
    arguments = _Arguments(kernel.module.arguments(*tensors, *numbers, *scratch), (*tensors, *scratch))

    def launch(*actual: Tensor) -> None:
        kernel.run(grid, arguments.filled(actual))

    if kernel.compiled is None or sample is None:
        return launch
    on_gpu = _on_gpu(kernel.compiled, arguments, grid, sample, launch)
    if not scratch:
        return on_gpu
    device = sample.device
    return lambda *actual: on_gpu(*actual, *kernel.scratch(device))  # which scratch, the stream decides


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


def _on_gpu(compiled: Any, arguments: _Arguments, grid: tuple[int, ...], sample: Tensor, slow: Launch) -> Launch:
    import triton  # noqa: PLC0415 - loaded by now: the kernel is compiled

    sample_device, index = sample.device, sample.device.index
    bind_thread(sample_device)  # descriptors are encoded below
    with torch.cuda.device(index):
        run = compiled.run  # loads the kernel on the current device
    expanded = _expand(run, arguments, sample)
    if expanded is None:
        return slow
    run, template, fillers = expanded
    function, metadata, runtime, grid_x = compiled.function, compiled.packed_metadata, triton.knobs.runtime, grid[0]
    device_of: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)

    def launch(*tensors: Tensor) -> None:
        bind_thread(sample_device)
        if device_of() != index:
            with torch.cuda.device(index):
                launch(*tensors)
        elif _is_hooked(runtime):  # a profiler wants the launch's metadata
            slow(*tensors)
        else:
            values = template.copy()
            for position, number, encode in fillers:
                address = tensors[number].data_ptr()
                values[position] = address if encode is None else encode(address)
            run(grid_x, 1, 1, stream_of(index), function, metadata, None, None, None, *values)

    return launch


def _expand(
    run: Any, arguments: _Arguments, sample: Tensor
) -> tuple[Any, list[Any], list[tuple[int, int, Any]]] | None:
    """The launcher that takes what descriptors stand for, its arguments, and what fills in their addresses.

    None where Triton's launcher is not as expected.
    """
    encoders: dict[int, _Encoder] = {}
    if arguments.descriptors:
        opened = _opened(run)
        if opened is None:
            return None
        run, encode, layouts = opened
        for spot, layout in zip(arguments.descriptors, layouts, strict=True):
            encoders[spot.position] = _Encoder(encode, arguments.values[spot.position], layout)
    numbers = {spot.position: spot.number for spot in (*arguments.pointers, *arguments.descriptors)}
    template: list[Any] = []
    fillers: list[tuple[int, int, Any]] = []
    for position, value in enumerate(arguments.values):
        encoder = encoders.get(position)
        if position in numbers:
            fillers.append((len(template), numbers[position], encoder))
        if encoder is None:
            template.append(value)
        else:
            map_, *rest = encoder.all_of(sample.data_ptr())
            if isinstance(map_, _Address):
                return None  # lowered to a plain pointer
            template += [map_, *rest]
    return run, template, fillers


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

    def __init__(self, encode: Callable[..., list[Any]], descriptor: Any, layout: Any) -> None:
        self._encode = encode
        self._descriptor = descriptor
        self._layout = layout
        self._known: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MAX_REMEMBERED_ADDRESSES:
                self._known.clear()
            found = self.all_of(address)[0]
            self._known[address] = found
        return found

    def all_of(self, address: int) -> list[Any]:
        """The encoded descriptor and what follows it: shape and strides."""
        descriptor = copy.copy(self._descriptor)
        descriptor.base = _Address(address)
        return self._encode(descriptor, self._layout)


def _is_hooked(runtime: Any) -> bool:
    hook = runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None)) or bool(
        getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook is not None)
    )


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream
