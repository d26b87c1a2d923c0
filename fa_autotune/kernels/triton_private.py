"""What Triton keeps private and is touched all the same, here and nowhere else; each with a fallback where it differs.

Launching: below Triton's public `compiled[grid](...)` lie a launcher in Python, a wrapper that encodes descriptors, and
a C function. Their forms differ between releases, so they are recognised, not looked up by version: `fast_path` gives
what to call and what to fill in, or None, and then launches go the public way.
"""

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.kernels.gpu import make_context_current

MAX_REMEMBERED_ADDRESSES = 256  # of one descriptor; training comes back to the same few

Encode = Callable[[Any, Any], list[Any]]

_STREAM = object()  # where a launch's stream goes
_PROGRAMS = int("1000003")  # an object of its own, by which the place of their number is found

# --- launching --------------------------------------------------------------------------------------------------------


class LaunchForm(StrEnum):
    """What a launch calls, from the quickest to the slowest."""

    SEQUENCE = "the C function, a kernel's arguments in one sequence"
    ONE_BY_ONE = "the C function, a kernel's arguments one by one"
    LAUNCHER = "Triton's launcher"
    PUBLIC = "Triton's public way"


class Filler(NamedTuple):
    """An address to fill in: its place among a kernel's arguments, and the tensor's number.

    A descriptor has those that are `known` by their address, and `encode` for the others; a pointer is the address.
    """

    place: int
    number: int
    known: dict[int, Any] | None
    encode: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class FastPath:
    """What a launch calls, and what it fills in.

    `function` takes `head`, then `template` (one by one, or as one sequence: `is_flat`). In `head` the stream and the
    number of programs have their places; in `template`, `places` tells where each of a kernel's arguments begins.
    """

    function: Callable[..., None]
    form: LaunchForm
    head: list[Any]
    template: list[Any]
    fillers: list[Filler]
    places: list[int]
    stream_place: int
    programs_place: int
    stream_of: Callable[[int], int]
    hooks: Any

    @property
    def is_flat(self) -> bool:
        """Whether a kernel's arguments follow one by one."""
        return self.form is not LaunchForm.SEQUENCE


def fast_path(
    compiled: Any, values: Sequence[Any], pointers: Mapping[int, int], descriptors: Mapping[int, int], sample: Tensor
) -> FastPath | None:
    """The way past Triton's launcher for a compiled kernel, which is put on a sample's GPU; None where it is not known.

    `values` are a kernel's arguments without their tensors: None for a pointer, a descriptor without its base. Where
    they stand is told by `pointers` and `descriptors`: position of the argument → number of its tensor.
    """
    hooks = _launch_hooks()
    with torch.cuda.device(sample.device.index):
        run = getattr(compiled, "run", None)  # loads the kernel on the current device
    if run is None or hooks is None:
        return None
    expanded = _expanded(run, values, pointers, descriptors, sample)
    if expanded is None:
        return None
    run, template, fillers, places = expanded
    tapped = _tapped(run, compiled, template)
    if tapped is None:
        return None
    form, function, head = tapped
    return FastPath(
        function=function,
        form=form,
        head=head,
        template=template,
        fillers=fillers,
        places=places,
        stream_place=next(place for place, value in enumerate(head) if value is _STREAM),
        programs_place=next(place for place, value in enumerate(head) if value is _PROGRAMS),
        stream_of=getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of),
        hooks=hooks,
    )


def launch_form(compiled: Any, *, has_descriptors: bool) -> LaunchForm:
    """How a compiled kernel is launched by `fast_path`; it is put on the current GPU."""
    run = getattr(compiled, "run", None)
    if has_descriptors:
        run = opened[0] if (opened := _opened(run)) else None
    tapped = None if run is None or _launch_hooks() is None else _tapped(run, compiled, [object()])
    return LaunchForm.PUBLIC if tapped is None else tapped[0]


def is_hooked(hooks: Any) -> bool:
    """Whether a profiler wants the metadata of launches, which only Triton's public way gives."""
    hook = hooks.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None)) or bool(
        getattr(hooks.launch_exit_hook, "calls", hooks.launch_exit_hook is not None)
    )


def _launch_hooks() -> Any:
    """Triton's settings that hold the hooks of launches; None where they are not as expected."""
    import triton  # noqa: PLC0415 - loaded by now: the kernel is compiled

    hooks = getattr(getattr(triton, "knobs", None), "runtime", None)
    return hooks if hasattr(hooks, "launch_enter_hook") and hasattr(hooks, "launch_exit_hook") else None


# What a launcher takes before a kernel's own arguments; it may name them as it likes, but none of these elsewhere.
_HEAD_NAMES = (
    "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
    "launch_exit_hook",
)  # fmt: skip


def _tapped(run: Any, compiled: Any, template: list[Any]) -> tuple[LaunchForm, Callable[..., None], list[Any]] | None:
    """What Triton's launcher calls in the end, and what it hands over before the kernel's arguments.

    These follow one by one (Triton 3.6) or as one sequence (since 3.7). The launcher itself where it does more than
    that, and None where it is not known to take what is meant.
    """
    metadata = getattr(compiled, "packed_metadata", None)
    head = (_PROGRAMS, 1, 1, _STREAM, getattr(compiled, "function", None), metadata, None, None, None)
    if head[4] is None or not _takes_head(run):
        return None
    handed: list[tuple[Any, ...]] = []
    if getattr(run, "global_scratch_size", None) == 0 == getattr(run, "profile_scratch_size", None):
        tapped = copy.copy(run)
        tapped.launch = lambda *values: handed.append(values)
        with suppress(Exception):  # of a launcher that does more; it is itself called then
            tapped(*head, *template)
    if len(handed) == 1 and any(value is _STREAM for value in handed[0]):
        *before, last = handed[0]
        if isinstance(last, (list, tuple)) and _are_same(last, template):
            return LaunchForm.SEQUENCE, run.launch, before
        count = len(handed[0]) - len(template)
        if template and _are_same(handed[0][count:], template):
            return LaunchForm.ONE_BY_ONE, run.launch, list(handed[0][:count])
    return LaunchForm.LAUNCHER, run, list(head)


def _takes_head(run: Any) -> bool:
    """Whether a launcher takes what `_tapped` gives it, in that order."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):
        return False
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return False
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return False
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_in_order = all(_HEAD_NAMES.index(name) == place for place, name in enumerate(named) if name in _HEAD_NAMES)
    return is_in_order and len(named) <= len(_HEAD_NAMES)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _expanded(
    run: Any, values: Sequence[Any], pointers: Mapping[int, int], descriptors: Mapping[int, int], sample: Tensor
) -> tuple[Any, list[Any], list[Filler], list[int]] | None:
    """The launcher that takes what descriptors stand for, its arguments, what fills in their addresses, and where each
    argument begins.

    None where Triton's launcher is not as expected.
    """
    encoders: dict[int, _Encoder] = {}
    if descriptors:
        opened = _opened(run)
        if opened is None or len(opened[2]) != len(descriptors):
            return None
        run, encode, layouts = opened
        for position, layout in zip(descriptors, layouts, strict=True):
            encoders[position] = _Encoder(encode, values[position], layout, sample.device.index)
    template: list[Any] = []
    fillers: list[Filler] = []
    places: list[int] = []
    for position, value in enumerate(values):
        places.append(len(template))
        if position in pointers:
            fillers.append(Filler(len(template), pointers[position], None, int))
        if (encoder := encoders.get(position)) is None:
            template.append(value)
            continue
        fillers.append(Filler(len(template), descriptors[position], encoder.known, encoder))
        map_, *rest = encoder.all_of(sample.data_ptr())
        if isinstance(map_, _Address):
            return None  # lowered to a plain pointer
        template += [map_, *rest]
    return run, template, fillers, places


def _opened(run: Any) -> tuple[Any, Encode, Sequence[Any]] | None:
    """A launcher without the wrapper that encodes descriptors, that encoding, and its data; None if unknown."""
    wrapper = getattr(run, "launch", None)
    code = getattr(wrapper, "__code__", None)
    if wrapper is None or code is None or wrapper.__closure__ is None:
        return None
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in wrapper.__closure__), strict=True))
    encode = next(_encodings(wrapper.__globals__, cells), None)
    if encode is None or not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    opened = copy.copy(run)
    opened.launch = cells["launcher"]
    return opened, encode, cells["tensordesc_meta"]


def _encodings(scope: Mapping[str, Any], cells: Mapping[str, Any]) -> Iterator[Encode]:
    """Triton's encoding of a descriptor: a function of its driver (3.6, 3.7), or handed to the wrapper (since 3.8)."""
    if (of_two := scope.get("make_tensordesc_arg")) is not None:
        yield of_two
    if (of_three := cells.get("make_tensordesc_arg")) is not None:
        yield partial(_without_others, of_three)


def _without_others(encode: Callable[..., list[Any]], descriptor: Any, layout: Any) -> list[Any]:
    """Triton's encoding without the launch's other arguments, which NVIDIA's does not read."""
    return encode(descriptor, layout, ())


@dataclass(frozen=True, slots=True)
class _Address:
    """What Triton asks of a descriptor's tensor when it encodes it."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class _Encoder:
    """The encoded descriptor of an address, remembered."""

    def __init__(self, encode: Encode, descriptor: Any, layout: Any, index: int) -> None:
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


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream
