"""How tensors of a call lie in memory: extents and strides, allocation, access."""

from collections.abc import Callable

import torch
from torch import Tensor

from fa_autotune.ops.torch_private import empty_strided_cuda
from fa_autotune.problem.family import Access

Geometry = tuple[tuple[int, ...], tuple[int, ...]]  # size and strides
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def contiguous(size: tuple[int, ...]) -> Geometry:
    """A contiguous tensor of that size."""
    strides = [1] * len(size)
    for axis in range(len(size) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(1, size[axis])
    return size, tuple(strides)


def allocator(device: torch.device) -> Allocate:
    """Allocates tensors of a size, strides and dtype on a device; a GPU must be current.

    On a GPU past torch's dispatcher, if torch offers what its own compiled code allocates with: half the host time.
    """
    if device.type == "cuda" and empty_strided_cuda is not None:
        on_gpu: Allocate = empty_strided_cuda
        return on_gpu
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


def access_of(*tensors: Tensor) -> Access:
    """The strongest access that tensors (…, head_dim) of one dtype allow, by their pointers and strides."""
    access, misaligned = Access.TMA, 0
    for tensor in tensors:
        *outer, last = tensor.stride()
        if last != 1:
            return Access.ANY
        itemsize = tensor.element_size()
        misaligned |= tensor.data_ptr() | tensor.shape[-1] * itemsize
        for stride in outer:
            misaligned |= stride * itemsize
            if stride == 0:
                access = Access.ALIGNED
    return Access.ANY if misaligned & 15 else access


def is_loose(mask: Tensor) -> bool:
    """Whether a mask (batch, heads, rows, keys) can't be read 16 bytes at a time, by its pointer and strides."""
    *outer, keys = mask.shape
    *strides, last = mask.stride()
    itemsize = mask.element_size()
    apart = [stride for size, stride in zip(outer, strides, strict=True) if size > 1]
    # One number for all keys is read with a stride of 0.
    return bool(last != 1 or keys == 1 or mask.data_ptr() % 16 or any(stride * itemsize % 16 for stride in apart))
