"""How tensors of a call lie in memory: extents and strides, what they allow kernels, and where new ones come from."""

import pytest
import torch
from torch import Tensor

from fa_autotune.ops import memory
from fa_autotune.ops.memory import access_of, allocator, contiguous, is_loose
from fa_autotune.problem.family import Access
from kit.attention_calls import BFLOAT16, FLOAT32


@pytest.mark.parametrize("size", [(), (7,), (2, 3, 5), (2, 0, 5), (0, 4), (3, 1, 1, 2)])
def test_a_contiguous_tensor_is_laid_out_as_torch_does(size: tuple[int, ...]) -> None:
    assert contiguous(size) == (size, torch.empty(size).stride())


def test_memory_of_the_cpu_is_allocated_by_torch_itself() -> None:
    tensor = allocator(torch.device("cpu"))((2, 3), (1, 2), torch.bfloat16)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type) == ((2, 3), (1, 2), torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_known", [False, True])
def test_memory_of_a_gpu_is_allocated_past_the_dispatcher_where_torch_tells_how(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_gpu(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(0)

    asked: list[torch.device] = []
    monkeypatch.setattr(memory, "empty_strided_cuda", on_gpu if is_known else None)
    monkeypatch.setattr(torch, "empty_strided", lambda *_, dtype, device: asked.append(device))
    gpu = torch.device("cuda", 1)
    allocate = allocator(gpu)
    assert (allocate is on_gpu) is is_known
    allocate((2,), (1,), torch.float32)
    assert asked == ([] if is_known else [gpu])


# In (batch, heads, seqlen, head_dim) order: 2 bytes an element, so 8 elements are 16 bytes.
SHAPE = (2, 3, 5, 32)


def strided(*strides: int, offset: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.zeros(20_000, dtype=BFLOAT16).as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("tensor", "access"),
    [
        (torch.zeros(SHAPE, dtype=BFLOAT16), Access.TMA),
        (strided(480, 32, 96, 1), Access.TMA),  # bshd
        (strided(480, 160, 40, 1), Access.TMA),  # rows of 80 bytes
        (strided(480, 160, 32, 1, offset=8), Access.TMA),
        (strided(0, 160, 32, 1), Access.ALIGNED),
        (strided(480, 0, 32, 1), Access.ALIGNED),
        (strided(480, 160, 0, 1), Access.ALIGNED),
        (strided(480, 160, 32, 1, offset=1), Access.ANY),
        (strided(480, 160, 32, 1, offset=4), Access.ANY),
        (strided(480, 160, 33, 1), Access.ANY),
        (strided(484, 160, 32, 1), Access.ANY),
        (strided(960, 320, 64, 2), Access.ANY),
        (strided(480, 160, 1, 5), Access.ANY),
        (strided(480, 160, 32, 0), Access.ANY),
        (strided(480, 160, 32, 1, shape=(2, 3, 5, 30)), Access.ANY),  # rows of 60 bytes
        (torch.zeros(2, 3, 5, 36, dtype=FLOAT32), Access.TMA),
        (torch.zeros(2, 3, 5, 34, dtype=FLOAT32), Access.ANY),
    ],
    ids=lambda value: str(value.stride()) if isinstance(value, Tensor) else value.value,
)
def test_access_follows_pointers_and_strides(tensor: Tensor, access: Access) -> None:
    assert access_of(tensor) is access


def test_the_weakest_tensor_decides_the_access() -> None:
    tma, aligned, anyhow = torch.zeros(SHAPE, dtype=BFLOAT16), strided(0, 160, 32, 1), strided(480, 160, 33, 1)
    assert access_of(tma, aligned, tma) is Access.ALIGNED
    assert access_of(tma, aligned, anyhow) is Access.ANY


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.zeros(1, 1, 8, 16), False),
        (torch.zeros(1, 1, 8, 20)[..., :18], False),
        (torch.zeros(1, 1, 1, 18), False),  # the stride of one row is never used
        (torch.zeros(1, 1, 8, 18), True),
        (torch.zeros(1, 1, 8, 1), True),
        (torch.zeros(1, 1, 16, 8).transpose(2, 3), True),
        (torch.zeros(129)[1:].view(1, 1, 8, 16), True),
        (torch.zeros(1, 1, 1, 16).expand(2, 3, 8, 16), False),
    ],
)
def test_masks_are_loose_where_16_bytes_cant_be_read_at_a_time(mask: Tensor, expected: bool) -> None:
    assert is_loose(mask) is expected
