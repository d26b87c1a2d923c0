"""Time of an attention layer's forward and backward, ours beside PyTorch's SDPA: eager, and replayed from CUDA graphs.

What a training step sees of attention: kernels, allocations and host time together. 16,384 tokens (32,768 at the
longest length), 2048 columns of heads, causal, bfloat16. Each figure is the median of interleaved rounds.

    python scripts/training_step.py [--json FILE]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_autotune import attention
from fa_autotune.benchmark.bench import geomean
from fa_autotune.files import OutputKind, write_output
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.paths import users_databases

HEAD_DIMS = (64, 128)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS, COLUMNS = 16384, 2048
ROUNDS, ROUND_MS = 5, 30.0

Step = Callable[[], Any]


def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch's attention by one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ours": lambda q, k, v: attention(q, k, v, causal=True, layout="bhsd"),
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
}


def make_steps(head_dim: int, seqlen: int) -> dict[str, Step]:
    """Each contender's forward and backward, eager and as a graph."""
    size = (max(1, TOKENS // seqlen), COLUMNS // head_dim, seqlen, head_dim)
    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    d_out = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    steps: dict[str, Step] = {}
    for name, attend in CONTENDERS.items():

        def step(attend: Callable[..., Tensor] = attend) -> Any:
            return torch.autograd.grad(attend(*inputs), inputs, d_out)

        steps[f"{name} eager"] = step
        steps[f"{name} graph"] = captured(step)
    return steps


def captured(step: Step) -> Step:
    """A step recorded in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay(kept: Any = kept) -> None:  # the results' memory is the graph's
        graph.replay()

    return replay


def time_ms(step: Step, count: int) -> float:
    """Time of a step among `count` of them, from the first launch to the end of the last kernel."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def measure(steps: dict[str, Step]) -> dict[str, float]:
    """The median time of each step in ms."""
    counts = {name: max(3, int(ROUND_MS / time_ms(step, 3))) for name, step in steps.items()}
    rounds = [{name: time_ms(step, counts[name]) for name, step in steps.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(one[name] for one in rounds) for name in steps}


def main() -> None:
    """Print the table, and write all figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("training_step times kernels on a GPU, and torch sees none; `fa-autotune doctor` says what is missing")
    names = [f"{name} {mode}" for mode in ("eager", "graph") for name in CONTENDERS]
    print("| head_dim | seqlen | " + " | ".join(f"{name} ms" for name in names) + " |")
    print("| --- " * (2 + len(names)) + "|")
    rows = []
    for head_dim in HEAD_DIMS:
        for seqlen in SEQLENS:
            found = measure(make_steps(head_dim, seqlen))
            rows.append({"head_dim": head_dim, "seqlen": seqlen, "median_ms": found})
            print(f"| {head_dim} | {seqlen} | " + " | ".join(f"{found[name]:.3f}" for name in names) + " |", flush=True)
    for mode in ("eager", "graph"):
        best = [
            min(row["median_ms"][f"{name} {mode}"] for name in CONTENDERS if name != "ours")
            / row["median_ms"][f"ours {mode}"]
            for row in rows
        ]
        print(f"\n{mode}: ours against the faster peer, geometric mean {geomean(best):.3f}, least {min(best):.3f}")
    if chosen.json:
        device, toolchain = live_device(), live_toolchain()
        found = {"device": device.name, "torch": toolchain.torch, "triton": toolchain.triton, "rows": rows}
        kind = OutputKind(name="figures of this script", is_one=lambda head: head.startswith(b'{\n "device": '))
        write_output(chosen.json, json.dumps(found, indent=1), kind, databases=users_databases())


if __name__ == "__main__":
    main()
