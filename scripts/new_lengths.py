#!/usr/bin/env python3
"""Host time and memory of calls that were never made before: new lengths, and new numbers on known tensors.

Calls come one after another, BURST of them before the GPU is waited for, each timed by itself; and each alone, with
the GPU idle before and after, when the processor's caches are cold. The first calls of a case are left out, and so is a
call that loads a kernel (longer than LOAD_MS), which is counted. Memory is what tracemalloc and the process's resident
set say has grown for each length that came.
"""

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen

LOAD_MS = 8.0
WARM_CALLS = 40
BURST = 20

Call = Callable[[], Any]


def make(seqlen_q: int, seqlen_k: int, *, head_dim: int = 128, grad: bool = False) -> tuple[Tensor, ...]:
    """q with 32 heads, k and v with 8."""
    sizes = [(1, seqlen_q, 32, head_dim), *[(1, seqlen_k, 8, head_dim)] * 2]
    return tuple(torch.zeros(size, dtype=torch.bfloat16, device="cuda", requires_grad=grad) for size in sizes)


def new_lengths(count: int, seed: int) -> Iterator[int]:
    """Different lengths from 256 to 4096, in random order."""
    return iter(random.Random(seed).sample(range(256, 4096), count))


def prefill(length: int, **options: Any) -> Call:
    """Causal, of q as long as k."""
    q, k, v = make(length, length)
    return lambda: attention(q, k, v, causal=True, **options)


def decoding(length: int) -> Call:
    """One new row beside a cache that has grown."""
    q, k, v = make(1, length)
    return lambda: attention(q, k, v, causal=True)


def training(length: int, *, head_dim: int = 128) -> Call:
    """Causal, forward and backward."""
    inputs = make(length, length, head_dim=head_dim, grad=True)
    d_out = torch.zeros_like(inputs[0])

    def call() -> None:
        torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)

    return call


def packed(length: int) -> Call:
    """Two sequences, of a total that never came before."""
    q, k, v = (tensor[0] for tensor in make(length, length))
    starts = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cuda")
    return lambda: attention_varlen(q, k, v, starts, starts, causal=True)


def numbers(**options: Callable[[int], Any]) -> Callable[[int], Call]:
    """The same tensors with a number that is new each time."""
    tensors = make(1000, 1000)

    def of(step: int) -> Call:
        values = {name: value(step) for name, value in options.items()}
        return lambda: attention(*tensors, causal=True, **values)

    return of


CASES: dict[str, Callable[[int], Call]] = {
    "new length, prefill": prefill,
    "new length, decoding": decoding,
    "new length, softcap": lambda length: prefill(length, softcap=30.0),
    "new length, window": lambda length: prefill(length, window_size=(200, 0)),
    "new length, forward and backward": training,
    "new length, forward and backward, head_dim 64": lambda length: training(length, head_dim=64),
    "new total, packed": packed,
}
NUMBERS: dict[str, dict[str, Callable[[int], Any]]] = {
    "same call": {},
    "new scale": {"softmax_scale": lambda step: 0.05 + step * 1e-5},
    "new softcap": {"softcap": lambda step: 10.0 + step * 1e-2},
    "new window": {"window_size": lambda step: (100 + step, 0)},
    "new dropout_p": {"dropout_p": lambda step: 0.1 + step * 1e-4},
}


def times_us(calls: Iterator[Call], burst: int) -> list[float]:
    """Host time of each call; the tensors of a burst are made before it."""
    times = []
    while together := list(itertools.islice(calls, burst)):
        torch.cuda.synchronize()
        for call in together:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def row_of(name: str, calls: Iterator[Call]) -> dict[str, Any]:
    """The median, p20 and p80 of a case's calls after the first ones, in bursts and alone."""
    gc.collect()
    gc.disable()
    times_us(itertools.islice(calls, WARM_CALLS), BURST)
    in_bursts, alone = list[float](), list[float]()
    while together := list(itertools.islice(calls, 2 * BURST)):
        in_bursts += times_us(iter(together[:BURST]), BURST)
        alone += times_us(iter(together[BURST:]), 1)
    gc.enable()
    row: dict[str, Any] = {"case": name, "loads": sum(one > LOAD_MS * 1000 for one in in_bursts + alone)}
    for prefix, times in (("", in_bursts), ("alone_", alone)):
        times = [one for one in times if one <= LOAD_MS * 1000]
        p20, *_, p80 = statistics.quantiles(times, n=5)
        row |= {f"{prefix}median_us": statistics.median(times), f"{prefix}p20_us": p20, f"{prefix}p80_us": p80}
    return row


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def memory_of(make_call: Callable[[int], Call], count: int, seed: int) -> dict[str, float]:
    """What each new length adds, in bytes: Python's own objects, and the process's resident set."""
    lengths = new_lengths(count, seed)
    for length in itertools.islice(lengths, WARM_CALLS):
        make_call(length)()
    gc.collect()
    tracemalloc.start()
    before, resident = tracemalloc.get_traced_memory()[0], resident_bytes()
    rest = list(lengths)
    for length in rest:
        make_call(length)()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"python_bytes": grown / len(rest), "resident_bytes": (resident_bytes() - resident) / len(rest)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, in order; each has its own lengths."""
    rows = []
    for number, (name, make_call) in enumerate(CASES.items()):
        lengths = new_lengths(options.calls + WARM_CALLS, options.seed + number)
        rows.append(row_of(name, (make_call(length) for length in lengths)))
    for name, values in NUMBERS.items():
        of = numbers(**values)
        rows.append(row_of(name, (of(step) for step in range(options.calls + WARM_CALLS))))
    memory = {
        name: memory_of(CASES[name], 1000, options.seed + 100)
        for name in ("new length, prefill", "new length, forward and backward")
    }
    return {"rows": rows, "memory_per_length": memory}


def environment() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="of each case; default 300")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths; default 0")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    found = {"environment": environment(), "options": vars(options), **measure(options)}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in found["environment"].items()))
    for row in found["rows"]:
        spread = f"({row['p20_us']:.1f} … {row['p80_us']:.1f})"
        alone = f"alone {row['alone_median_us']:.1f}"
        print(f"{row['case']:48}{row['median_us']:9.1f} us  {spread:24} {alone:16} {row['loads']} loads apart")
    for name, grown in found["memory_per_length"].items():
        print(f"{name:48}{grown['python_bytes']:9.0f} bytes of Python, {grown['resident_bytes']:.0f} resident")


if __name__ == "__main__":
    main()
