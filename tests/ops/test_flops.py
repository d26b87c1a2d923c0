"""FLOPs of attention in torch's FlopCounterMode are those that torch counts for its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fa_autotune import attention, attention_varlen, flash_attn_qkvpacked_func, scaled_dot_product_attention
from kit.packed_calls import cu_seqlens

pytestmark = pytest.mark.usefixtures("reference_only")
PAIRS = 2 * 4 * 20 * 30  # batch, heads, queries, keys
FORWARD, BACKWARD = 2 * PAIRS * (16 + 24), 2 * PAIRS * (3 * 16 + 2 * 24)


def counted(call: Callable[..., Tensor], *tensors: Tensor) -> tuple[int, int]:
    """Those of a call, and those of its backward."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    with FlopCounterMode(display=False) as forward:
        out = call(*inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def sized(device: str = "cpu", kv_heads: int = 4) -> list[Tensor]:
    sizes = (2, 4, 20, 16), (2, kv_heads, 30, 16), (2, kv_heads, 30, 24)
    return [torch.ones(size, device=device) for size in sizes]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (3, 3)}, {"dropout_p": 0.5, "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_they_are_those_of_the_definition_whatever_is_hidden(device: str, options: dict[str, Any]) -> None:
    def call(*x: Tensor) -> Tensor:
        out: Tensor = attention(*x, layout="bhsd", **options)
        return out

    assert counted(call, *sized(device)) == (FORWARD, BACKWARD)
    assert counted(call, *sized(device, kv_heads=2)) == (FORWARD, BACKWARD)


def test_pytorch_counts_the_same_for_its_own() -> None:
    q, k, v = sized()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(q, k, v)
    assert theirs.get_total_flops() == FORWARD
    with FakeTensorMode(), FlopCounterMode(display=False) as of_flash:
        q, k = torch.empty(2, 4, 20, 16, device="meta"), torch.empty(2, 4, 30, 16, device="meta")
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k)
        arguments = *found[:6], 0.0, False, *found[6:8]
        torch.ops.aten._scaled_dot_product_flash_attention_backward(found[0], q, k, k, *arguments)
    q, k, _ = sized()
    assert of_flash.get_total_flops() == sum(counted(scaled_dot_product_attention, q, k, k))


def test_stacked_tensors_and_other_layouts_count_alike() -> None:
    assert counted(lambda *x: attention(*(one.transpose(1, 2) for one in x)), *sized()) == (FORWARD, BACKWARD)
    qkv = torch.ones(2, 20, 3, 4, 16)
    assert counted(flash_attn_qkvpacked_func, qkv) == (2 * 2 * 4 * 400 * 32, 2 * 2 * 4 * 400 * 80)


def test_packed_sequences_count_one_by_one() -> None:
    tensors = torch.ones(20, 4, 16), torch.ones(30, 4, 16), torch.ones(30, 4, 24)
    starts = cu_seqlens([5, 0, 12]), cu_seqlens([7, 9, 14])
    pairs = 4 * (5 * 7 + 12 * 14)
    expected = 2 * pairs * (16 + 24), 2 * pairs * (3 * 16 + 2 * 24)
    assert counted(lambda *x: attention_varlen(*x, *starts), *tensors) == expected


def test_packed_sequences_without_memory_count_as_equal_ones() -> None:
    x, starts = torch.ones(20, 4, 16, device="meta"), torch.ones(5, dtype=torch.int32, device="meta")
    assert counted(lambda x: attention_varlen(x, x, x, starts, starts), x)[0] == 2 * 4 * (4 * 5 * 5) * 32
