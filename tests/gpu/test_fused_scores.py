"""The fused backward with ALiBi and dropout on a Hopper GPU: values, repeats, graphs, the forward's own random bits.

`pytest -m gpu -n 0`. Skipped where there is no sm_90.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.dispatch.loaded_kernels import dispatcher_of
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import same_bits, verify
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.kernels.gpu import live_device
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import KnobValue, supported_variants
from fa_autotune.space.seeds import default_config
from fa_autotune.space.workspace import fused_tile
from kit.attention_calls import gradient_of, requiring

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
REPEATS = 30
TRITON = (3, 6)
FAMILIES = [
    "64,alibi", "128,causal,alibi", "128,fp16,left=1,alibi", "256,causal,alibi", "64,causal,left=1,softcap,alibi",
    "64,dropout", "96x72,fp16,causal,dropout", "128,causal,dropout", "192,causal,left=1,dropout",
    "64,fp16,causal,softcap,dropout", "64,causal,alibi,dropout", "192x128,alibi,dropout",
]  # fmt: skip
every_family = pytest.mark.parametrize("words", FAMILIES)


@pytest.fixture(autouse=True)
def hopper() -> None:
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


@cache
def kernel_of(words: str, **knobs: KnobValue) -> LoadedKernel:
    family = AttentionProblem.parse(f"1x2x2x64x64x{words},bwd_fused").family
    (spec,) = supported_variants(family, "sm_90", TRITON)
    config: Any = replace(default_config(spec, family, "sm_90"), **knobs)  # type: ignore[arg-type]
    return load_kernel(Candidate(family=family, variant=spec.variant, config=config), "sm_90", 0)


@every_family
def test_every_probe_passes(words: str) -> None:
    family = AttentionProblem.parse(f"1x2x2x64x64x{words},bwd_fused").family
    tile = fused_tile(family)
    num_sms = live_device(0).num_sms
    for programs in (0, num_sms):
        probe_list = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False, programs=programs)
        assert verify(kernel_of(words), family, probe_list, GPU).failures == ()


@every_family
def test_launches_give_the_same_bits_and_leave_no_turn(words: str) -> None:
    window = 300 if "left" in words else 0
    problem = AttentionProblem.parse(f"1x40x8x2000x2000x{words},bwd_fused")
    problem = replace(problem, shape=replace(problem.shape, window_left=window))
    workload = seeded_workload(problem, device=GPU, diagonal=bottom_right_diagonal(problem))

    def launch() -> tuple[Tensor, ...]:
        outputs = workload.allocate()
        kernel_of(words)(*workload.arguments(outputs))
        return outputs

    first = launch()
    assert all(one.isfinite().all() for one in first)
    for _ in range(REPEATS):
        assert all(map(same_bits, first, launch()))
    assert workload.turns is not None
    assert not workload.turns.any()


# --- through attention ------------------------------------------------------------------------------------------------


def arguments_of(name: str, heads: int) -> dict[str, Any]:
    slopes = torch.linspace(0.02, 0.6, heads, device="cuda")
    return {
        "alibi": {"causal": True, "alibi_slopes": slopes},
        "dropout": {"causal": True, "dropout_p": 0.2},
        "alibi dropout": {"alibi_slopes": slopes, "dropout_p": 0.4},
    }[name]


def tensors_of(seqlen_q: int, seqlen_k: int, head_dim: int, *, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k)
    sizes = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)]
    return [torch.randn(2, *size, head_dim, generator=generator, device="cuda").bfloat16() for size in sizes]


def gradients_of(tensors: list[Tensor], name: str, **more: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    inputs = requiring(*tensors)
    out = attention(*inputs, **arguments_of(name, tensors[0].shape[2]), **more)
    return torch.autograd.grad(out, inputs, gradient_of(out.shape))


every_call = pytest.mark.parametrize("name", ["alibi", "dropout", "alibi dropout"])


@every_call
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradients_of_attention_are_those_of_the_reference(head_dim: int, name: str) -> None:
    """Of the same seed, so of the same random bits: a mask of other bits would differ in every value."""
    flags = ",".join({"alibi": ["causal", "alibi"], "dropout": ["causal", "dropout"]}.get(name, name.split()))
    problem = AttentionProblem.parse(f"2x4x2x640x640x{head_dim},{flags}")
    is_fused = (head_dim, name) != (128, "alibi dropout")  # which spills
    assert is_fused is ("bwd_fused" in {one.family.kernel_pass for one in dispatcher_of(0).backward(problem)})
    for seqlen_q, seqlen_k in [(640, 640), (300, 900), (900, 300)]:
        tensors = tensors_of(seqlen_q, seqlen_k, head_dim)
        found, expected = gradients_of(tensors, name), gradients_of(tensors, name, backend="reference")
        for one, other in zip(found, expected, strict=True):
            scale = float(other.float().abs().max())
            torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02 * scale)


@every_call
def test_a_captured_backward_replays(name: str) -> None:
    static = requiring(*tensors_of(500, 500, 128))
    d_out = gradient_of(static[0].shape)

    def step(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs, **arguments), inputs, d_out)

    arguments = arguments_of(name, 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.manual_seed(11)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    with torch.no_grad():
        for tensor in static:
            tensor.copy_(torch.randn_like(tensor))
    torch.cuda.manual_seed(5)
    graph.replay()
    torch.cuda.synchronize()
    torch.cuda.manual_seed(5)
    assert all(map(torch.equal, captured, step(requiring(*static))))
