"""How tensors of a call lie in memory: layouts, extents, allocation, access."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_autotune.problem.family import Access

# Order of a call's axes, and how its results lie in memory. Plain integers: they are arguments of an operator.
BHSD, BSHD, BHSD_STORED_AS_BSHD = 0, 1, 2

Quad = tuple[int, int, int, int]


Geometry = tuple[tuple[int, ...], tuple[int, ...]]  # size and strides


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


_empty_on_gpu: Allocate | None = getattr(_guards, "_empty_strided_cuda", None)


def heads_first(tensor: Tensor, layout: int) -> Tensor:
    """The view (batch, heads, seqlen, head_dim) of a call's tensor."""
    return tensor.transpose(1, 2) if layout == BSHD else tensor


def dense(size: Quad, layout: int) -> Geometry:
    """A result of that size in memory: contiguous in the layout that it is stored in."""
    _, second, third, last = size
    if layout == BHSD_STORED_AS_BSHD:
        return size, (second * third * last, last, second * last, 1)
    return size, (second * third * last, third * last, last, 1)


def lse_geometry(q: Tensor, layout: int) -> Geometry:
    """(batch, num_q_heads, seqlen_q), contiguous."""
    batch_size, num_heads, seqlen_q = lse_size(q, layout)
    return (batch_size, num_heads, seqlen_q), (num_heads * seqlen_q, seqlen_q, 1)


def contiguous(size: tuple[int, ...]) -> Geometry:
    """A contiguous tensor of that size."""
    strides = [1] * len(size)
    for axis in range(len(size) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(1, size[axis])
    return size, tuple(strides)


def sketch(geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """What binding a kernel needs of a tensor that is yet to be allocated."""
    return torch.empty_strided(*geometry, dtype=dtype, device="meta")


def allocator(device: torch.device) -> Allocate:
    """Allocates tensors of a size, strides and dtype on a device; a GPU must be current.

    On a GPU past torch's dispatcher, if torch offers what its own compiled code allocates with: half the host time.
    """
    if device.type == "cuda" and _empty_on_gpu is not None:
        return _empty_on_gpu
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


def quad(tensor: Tensor) -> Quad:
    """A tensor's four extents."""
    first, second, third, last = tensor.shape
    return first, second, third, last


def out_size(q: Tensor, v: Tensor) -> Quad:
    """Size of the output, in the order of q's axes."""
    batch_size, second, third, _ = q.shape
    return batch_size, second, third, v.shape[3]


def lse_size(q: Tensor, layout: int) -> tuple[int, int, int]:
    """(batch, num_q_heads, seqlen_q)."""
    batch_size, second, third, _ = q.shape
    return (batch_size, third, second) if layout == BSHD else (batch_size, second, third)


def access_of(*tensors: Tensor) -> Access:
    """The strongest access that tensors (batch, heads, seqlen, head_dim) allow, by their pointers and strides."""
    access = Access.TMA
    for tensor in tensors:
        itemsize = tensor.element_size()
        *outer, last = tensor.stride()
        misaligned = tensor.data_ptr() % 16 or any(stride * itemsize % 16 for stride in outer)
        if last != 1 or misaligned or tensor.shape[3] * itemsize % 16:
            return Access.ANY
        if 0 in outer:
            access = Access.ALIGNED
    return access
