#!/usr/bin/env python3
"""Host time per call: our attention beside PyTorch's, forward and forward with backward, on one tiny problem.

The problem is so small that the GPU waits for the host. The contenders take turns in rounds, and each round is one
figure: the time of many calls, without waiting for the GPU in between, divided by their number.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_autotune import attention, flash_attn_func, scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def contenders(is_causal: bool) -> dict[str, tuple[Attend, SDPBackend | None]]:
    """Each takes (batch, heads, seqlen, head_dim), but flash_attn_func, which takes rows first."""

    def pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return {
        "attention": (lambda q, k, v: attention(q, k, v, causal=is_causal, layout="bhsd"), None),
        "flash_attn_func": (lambda q, k, v: flash_attn_func(q, k, v, causal=is_causal), None),
        "scaled_dot_product_attention": (
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal),
            None,
        ),
        "torch sdpa, flash": (pytorch, SDPBackend.FLASH_ATTENTION),
        "torch sdpa, cudnn": (pytorch, SDPBackend.CUDNN_ATTENTION),
    }


@contextmanager
def chosen(backend: SDPBackend | None) -> Iterator[None]:
    if backend is None:
        yield
        return
    with sdpa_kernel(backend):
        yield


def calls(name: str, attend: Attend, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The measured calls of a contender."""
    size = (options.batch, options.heads, options.seqlen, options.head_dim)
    if name == "flash_attn_func":
        size = (options.batch, options.seqlen, options.heads, options.head_dim)
    q, k, v, d_out = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    return {
        "forward": lambda: attend(q, k, v),
        "forward and backward": lambda: torch.autograd.grad(attend(*inputs), inputs, d_out),
    }


def round_us(call: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / count * 1e6


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each contender and kind of call: median, p20 and p80 of its rounds, in us."""
    figures: dict[tuple[str, str], list[float]] = {}
    failures: dict[tuple[str, str], str] = {}
    prepared = []
    for name, (attend, backend) in contenders(not options.full).items():
        for kind, call in calls(name, attend, options).items():
            try:
                with chosen(backend):
                    round_us(call, options.calls)  # compiles, loads and warms up
            except RuntimeError as error:
                failures[name, kind] = str(error).strip().splitlines()[0]
            else:
                prepared.append((name, kind, call, backend))
    for _ in range(options.rounds):
        for name, kind, call, backend in prepared:
            with chosen(backend):
                figures.setdefault((name, kind), []).append(round_us(call, options.calls))
    rows = [{"contender": n, "call": k, "failed": why} for (n, k), why in failures.items()]
    for (name, kind), values in figures.items():
        p20, *_, p80 = statistics.quantiles(values, n=5)
        median = statistics.median(values)
        rows.append({"contender": name, "call": kind, "median_us": median, "p20_us": p20, "p80_us": p80})
    return rows


def environment() -> dict[str, str | None]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("heads", 2), ("seqlen", 64), ("head-dim", 64), ("calls", 300), ("rounds", 25)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU that torch can use: host time of GPU calls can't be measured here")
    rows = measure(options)
    if options.json:
        print(json.dumps({"environment": environment(), "options": vars(options), "rows": rows}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    for row in rows:
        figure = row.get("failed") or f"{row['median_us']:8.1f} us  ({row['p20_us']:.1f} … {row['p80_us']:.1f})"
        print(f"{row['call']:22}{row['contender']:32}{figure}")


if __name__ == "__main__":
    main()
