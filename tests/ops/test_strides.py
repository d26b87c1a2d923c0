"""`attention` on tensors of any strides, and the access that those allow.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.ops.memory import access_of
from fa_autotune.problem.family import Access
from kit.attention_calls import BFLOAT16, FLOAT32, assert_right, make, runs_kernels
from kit.views import VIEWS, one_element_late


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_tensor_gives_the_values_of_its_copy(view: Callable[[Tensor], Tensor], which: str) -> None:
    q, k, v = make(kv_heads=4)
    q, k, v = (view(tensor) if name in which else tensor for name, tensor in zip("qkv", (q, k, v), strict=True))
    assert_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_expanded_keys_and_values_are_read_with_stride_zero(dim: int) -> None:
    q, k, v = make(kv_heads=4)
    k, v = (tensor.narrow(dim, 0, 1).expand(tensor.shape) for tensor in (k, v))
    assert_right(q, k, v, causal=True)


@runs_kernels
def test_real_strides_after_expanded_ones_of_the_same_shape() -> None:
    q, k, v = make()
    attention(q, k[:1].expand(k.shape), v[:1].expand(v.shape))
    assert_right(q, k, v)


@runs_kernels
def test_unaligned_tensors_after_aligned_ones_of_the_same_shape() -> None:
    q, k, v = make()
    aligned = attention(q, k, v)
    assert_right(one_element_late(q), one_element_late(k), one_element_late(v))
    assert torch.equal(attention(q, k, v), aligned)


@runs_kernels
def test_a_dimension_of_one_may_have_any_stride() -> None:
    q, k, v = make(20, 30, batch=1, heads=1, kv_heads=1)
    odd = [tensor.as_strided(tensor.shape, (3, tensor.stride(1), 5, 1)) for tensor in (q, k, v)]
    assert_right(*odd, causal=True)


@runs_kernels
def test_q_k_and_v_may_be_one_tensor() -> None:
    q, _, _ = make()
    assert_right(q, q, q, causal=True)


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
