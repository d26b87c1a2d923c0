"""`attention` on tensors of any strides, and the access that those allow.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from kit.attention_calls import assert_right, make, runs_kernels
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
