#!/usr/bin/env python3
"""How many times as fast as cuDNN attention is here, forward and backward: one row for each shape, as JSON.

Run it in the environments of several releases of Triton in turn, to see what each makes of the same winners. Within a
process ours and cuDNN come in short turns, in changing order; results are held to cuDNN's.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_autotune import attention, warmup
from fa_autotune.problem.models import paper_problems
from fa_autotune.problem.problem import AttentionProblem

SHAPES = (
    "8x16x16x2048x2048x128", "8x16x16x2048x2048x128,causal", "2x16x16x8192x8192x128", "2x16x16x8192x8192x128,causal",
    "1x16x16x16384x16384x128,causal", "8x32x32x2048x2048x64,causal", "2x32x32x8192x8192x64",
    "4x8x8x4096x4096x256,causal", "4x32x8x4096x4096x128,causal", "32x16x16x512x512x128,causal",
)  # fmt: skip
TURN_MS, TURNS = 20.0, 6

Run = Callable[[], Any]


def elapsed_ms(run: Run, count: int) -> float:
    """Of each of so many runs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def in_turns(runs: dict[str, Run]) -> dict[str, float]:
    """Median ms of each."""
    counts, times = {}, {name: list[float]() for name in runs}
    for name, run in runs.items():
        run()
        counts[name] = max(1, int(TURN_MS / max(elapsed_ms(run, 1), 1e-3)))
    for turn in range(TURNS):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            times[name].append(elapsed_ms(runs[name], counts[name]))
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def rows_of(problem: AttentionProblem) -> list[dict[str, Any]]:
    """The forward's and the backward's row of a shape."""
    shape, causal = problem.shape, problem.family.bounded_right

    def randn(heads: int, length: int) -> Tensor:
        size = shape.batch_size, heads, length, problem.family.head_dim
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    theirs = [randn(shape.num_q_heads, shape.seqlen_q), *(randn(shape.num_kv_heads, shape.seqlen_k) for _ in "kv")]
    ours = [tensor.transpose(1, 2).contiguous().requires_grad_() for tensor in theirs]
    d_theirs = randn(shape.num_q_heads, shape.seqlen_q)
    d_ours = d_theirs.transpose(1, 2).contiguous()
    q, k, v = (tensor.requires_grad_() for tensor in theirs)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            grouped = shape.num_q_heads != shape.num_kv_heads
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def without_gradient(run: Run) -> Run:
        return lambda: torch.no_grad()(run)()

    def mine() -> Tensor:
        found: Tensor = attention(*ours, causal=causal)
        return found

    out, other = mine(), cudnn()
    runs: dict[str, dict[str, Run]] = {
        "fwd": {"ours": without_gradient(mine), "cudnn": without_gradient(cudnn)},
        "bwd": {
            "ours": lambda: torch.autograd.grad(out, ours, d_ours, retain_graph=True),
            "cudnn": lambda: torch.autograd.grad(other, theirs, d_theirs, retain_graph=True),
        },
    }
    results = {"fwd": ([out], [other]), "bwd": (runs["bwd"]["ours"](), runs["bwd"]["cudnn"]())}
    rows = []
    for name, contenders in runs.items():
        error = max(
            ((one.transpose(1, 2).float() - two.float()).abs().max() / two.float().abs().max()).item()
            for one, two in zip(*results[name], strict=True)
        )
        ms = in_turns(contenders)
        rows.append({"shape": problem.label, "pass": name, **ms, "ratio": ms["cudnn"] / ms["ours"], "error": error})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--paper", action="store_true", help="the 28 shapes of `fa-autotune bench --paper`, not ten")
    options = parser.parse_args()
    torch.manual_seed(0)
    problems = paper_problems() if options.paper else [AttentionProblem.parse(text) for text in SHAPES]
    warmup(problems, backward=True)
    rows = [row for problem in problems for row in rows_of(problem)]
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    options.output.write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")
    for name in ("fwd", "bwd"):
        mean = statistics.geometric_mean(row["ratio"] for row in rows if row["pass"] == name)
        print(f"Triton {triton.__version__} {name}: {mean:.3f} times cuDNN")


if __name__ == "__main__":
    main()
