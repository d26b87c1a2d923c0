"""Calls of attention on DTensors, beside the same on whole tensors: run by two processes, each with half."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fa_autotune import attention, attention_varlen, flash_attn_qkvpacked_func, scaled_dot_product_attention

STARTS_Q, STARTS_K = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 3, 8], [0, 5, 12]))
WHOLE = Replicate()


def qkv(kv_heads: int = 2) -> list[Tensor]:
    return [torch.randn(4, 8, 4, 16), torch.randn(4, 12, kv_heads, 16), torch.randn(4, 12, kv_heads, 16)]


# What is called on which tensors, of which placements, and where out lies then.
CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor], list[Any], Any]] = {
    "batch": (lambda *x: attention(*x, causal=True, backend="reference"), qkv(), [Shard(0)] * 3, Shard(0)),
    "heads": (lambda *x: attention(*x, causal=True, backend="reference"), qkv(), [Shard(2)] * 3, Shard(2)),
    "rows": (lambda *x: attention(*x, causal=True, backend="reference"), qkv(), [Shard(1)] * 3, WHOLE),
    "one kv head": (lambda *x: attention(*x, backend="reference"), qkv(1), [Shard(2), WHOLE, WHOLE], Shard(2)),
    "sinks": (
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, alibi_slopes=torch.ones(4), backend="reference"),
        [*qkv(), torch.randn(4)],
        [Shard(2), Shard(2), Shard(2), Shard(0)],
        Shard(2),
    ),
    "a broadcast mask": (
        lambda q, k, v, mask: attention(q, k, v, attn_mask=mask, backend="reference"),
        [*qkv(), torch.randn(8, 12)],
        [Shard(0), Shard(0), Shard(0), WHOLE],
        Shard(0),
    ),
    "packed": (
        lambda q, k, v: attention_varlen(q[0], k[0], v[0], STARTS_Q, STARTS_K, backend="reference"),
        qkv(),
        [Shard(2)] * 3,
        Shard(1),
    ),
    "sdpa": (
        lambda *x: scaled_dot_product_attention(*(one.transpose(1, 2) for one in x), enable_gqa=True),
        qkv(),
        [Shard(2)] * 3,
        Shard(1),
    ),
    "stacked": (lambda x: flash_attn_qkvpacked_func(x), [torch.randn(4, 8, 3, 2, 16)], [Shard(0)], Shard(0)),
    "scale": (
        lambda *x: attention(*x, softmax_scale=0.9, backend="reference"),
        qkv(),
        [WHOLE, Shard(2), WHOLE],
        Shard(2),
    ),
}


def check(rank: int, port: str) -> None:
    """Each case on two processes; prints the names of those that pass."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, (call, tensors, placements, _) in CASES.items():
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        whole = [tensor.clone().requires_grad_() for tensor in tensors]
        sharded = [
            distribute_tensor(tensor.clone(), mesh, [place]).requires_grad_()
            for tensor, place in zip(tensors, placements, strict=True)
        ]
        expected, out = call(*whole), call(*sharded)
        d_out = torch.ones_like(expected).cumsum(-1)
        found = [out, *torch.autograd.grad(out, sharded, distribute_tensor(d_out, mesh, [WHOLE]))]
        for one, other in zip(found, [expected, *torch.autograd.grad(expected, whole, d_out)], strict=True):
            torch.testing.assert_close(one.full_tensor(), other, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]
        print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    check(int(sys.argv[1]), sys.argv[2])
