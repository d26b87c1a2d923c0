"""Launchers as Triton builds them, and a pretended GPU: a test sees what reaches the C function."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

INDEX, STREAM = 3, 77  # of the pretended GPU, and a stream of it


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let Triton be asked for the streams of the pretended GPU, and nothing make it current."""
    from triton.runtime import driver

    patch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: STREAM + index))
    patch.setattr(torch.cuda, "device", lambda index: nullcontext())
    encoded.clear()


class OnGpu(Tensor):
    """A tensor that says that it is on the pretended GPU."""

    def get_device(self) -> int:
        return INDEX


def on_gpu(*size: int) -> Tensor:
    """Ones on the pretended GPU."""
    return torch.ones(size).as_subclass(OnGpu)


@dataclass
class Descriptor:
    """What a module's arguments() makes for a kernel that reads through descriptors."""

    base: Any
    shape: list[int]
    strides: list[int]
    block_shape: tuple[int, int] = (16, 16)


def describe(tensor: Tensor) -> Descriptor:
    """The descriptor of a tensor."""
    return Descriptor(tensor, list(tensor.shape), list(tensor.stride()))


class Recorder(list[tuple[Any, ...]]):
    """A C function that keeps what it is handed, a kernel's arguments one by one."""

    def __call__(self, *arguments: Any) -> None:
        *fixed, last = arguments
        self.append((*fixed, *last) if isinstance(last, (list, tuple)) else arguments)


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
    """Triton's since 3.7: the kernel's own arguments come in one sequence."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, "cooperative", *rest[:4], "signature", rest[4:])


class ScratchLauncher(FlatLauncher):
    """One whose kernel wants memory of its own at each launch, which only the launcher can give."""

    global_scratch_size = 64


def compiled_with(run: Any) -> SimpleNamespace:
    """What Triton's compiled kernel has, loaded on the pretended GPU."""
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


# What Triton's own way hands over to such a launcher, before a kernel's arguments.
FIXED = (5, 1, 1, STREAM + INDEX, "function", "metadata", None, None, None)

encoded: list[int] = []  # addresses for which a descriptor was made


def make_tensordesc_arg(descriptor: Any, layout: Any) -> list[Any]:
    encoded.append(descriptor.base.data_ptr())
    return [("map", descriptor.base.data_ptr(), layout), *descriptor.shape, *descriptor.strides]


triton = SimpleNamespace(fill=lambda *values: values)  # as far as `encoding_with` reads it


def encoding_with(expand: Callable[[list[int]], Any]) -> Callable[[Any, Any], list[Any]]:
    """An encoding that hands on what it makes of a shape."""

    def encode(descriptor: Any, layout: Any) -> list[Any]:
        filled = triton.fill(descriptor.base.data_ptr(), expand(descriptor.shape), descriptor.strides)
        return [filled, *descriptor.shape, *descriptor.strides]

    return encode


def wrapped(launcher: Callable[..., None], tensordesc_meta: list[Any]) -> Callable[..., None]:
    """As Triton 3.6 and 3.7 wrap the launcher of a kernel with descriptors, whose arguments follow one by one."""

    def inner(*arguments: Any) -> None:
        final: list[Any] = []
        layouts = iter(tensordesc_meta)
        for argument in arguments[len(FIXED) :]:
            final += make_tensordesc_arg(argument, next(layouts)) if hasattr(argument, "base") else [argument]
        launcher(*arguments[: len(FIXED)], *final)

    return inner
