"""The fused backward with windows to the left and capped scores on a Hopper GPU: values, order, repeats, graphs.

`pytest -m gpu -n 0`. Gluon has no interpreter, so nothing else runs these kernels as they are. Skipped where there is
no sm_90.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.dispatch.loaded_kernels import dispatcher_of
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import same_bits, verify
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.kernels.gpu import live_device
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import KnobValue, supported_variants
from fa_autotune.space.seeds import default_config
from fa_autotune.space.workspace import fused_tile
from kit.attention_calls import assert_gradients_right, gradient_of, gradients, requiring

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
REPEATS = 50
TRITON = (3, 6)
FAMILIES = [
    "64,causal,left=1", "64,left=1,softcap", "64,fp16,causal,left=1,softcap", "40x64,softcap",
    "128,causal,left=1", "128,left=1", "128,causal,softcap", "128,fp16,causal,left=1,softcap", "96x72,left=1,softcap",
    "256,causal,left=1", "256,causal,softcap", "192x128,fp16,left=1,softcap", "192,causal,left=1,softcap",
]  # fmt: skip
every_family = pytest.mark.parametrize("words", FAMILIES)
# (heads of queries, of keys), (seqlen_q, seqlen_k), (left, right): windows narrower than a tile, of whole tiles, wider
# than the sequence; keys before every window; rows after it where the first key belongs to the first row.
CALLS = [
    ((2, 1), (1, 1), (0, 0)), ((6, 2), (130, 333), (0, 0)), ((2, 2), (333, 130), (1, 0)), ((4, 4), (500, 500), (63, 0)),
    ((3, 1), (500, 500), (64, 0)), ((2, 2), (500, 500), (127, 1)), ((4, 1), (1000, 1024), (128, 64)),
    ((2, 2), (1000, 1000), (255, 0)), ((8, 2), (1500, 1500), (300, 100)), ((2, 1), (77, 900), (65, 3)),
    ((2, 1), (900, 77), (65, 3)), ((4, 4), (2048, 2048), (511, 0)), ((2, 2), (640, 640), (5000, 0)),
    ((2, 2), (64, 2000), (300, 0)), ((6, 2), (1025, 1025), (1000, 1000)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper() -> None:
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


def problem_of(words: str, shape: AttentionShape | None = None) -> AttentionProblem:
    """The problem of a fused kernel; its window is that of the shape where one is given."""
    problem = AttentionProblem.parse(f"1x2x2x64x64x{words},bwd_fused")
    if shape is None:
        return problem
    left, right = shape.window_left * problem.family.bounded_left, shape.window_right * problem.family.bounded_right
    return replace(problem, shape=replace(shape, window_left=left, window_right=right))


@cache
def kernel_of(words: str, **knobs: KnobValue) -> LoadedKernel:
    family = problem_of(words).family
    (spec,) = supported_variants(family, "sm_90", TRITON)
    config: Any = replace(default_config(spec, family, "sm_90"), **knobs)  # type: ignore[arg-type]
    return load_kernel(Candidate(family=family, variant=spec.variant, config=config), "sm_90", 0)


@every_family
def test_every_probe_passes(words: str) -> None:
    family = problem_of(words).family
    tile = fused_tile(family)
    num_sms = live_device(0).num_sms
    probe_list = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False, programs=num_sms)
    assert verify(kernel_of(words), family, probe_list, GPU).failures == ()


@every_family
@pytest.mark.parametrize("top_left", [False, True], ids=["bottom-right", "top-left"])
def test_windows_of_all_widths(words: str, top_left: bool) -> None:
    shapes = [
        AttentionShape(
            batch_size=1,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            window_left=window[0],
            window_right=window[1],
        )
        for heads, lengths, window in CALLS
    ]
    probe_list = [
        Probe(shape=problem_of(words, shape).shape, top_left=top_left, seed=seed) for seed, shape in enumerate(shapes)
    ]
    assert verify(kernel_of(words), problem_of(words).family, probe_list, GPU).failures == ()


@pytest.mark.parametrize("words", ["64,causal,left=1", "128,left=1", "128,causal,left=1", "256,causal,left=1"])
def test_the_other_order_of_key_blocks_gives_gradients_too(words: str) -> None:
    family = problem_of(words).family
    tile = fused_tile(family)
    probe_list = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False, programs=132)
    assert verify(kernel_of(words, DIAGONAL_FIRST=True), family, probe_list, GPU).failures == ()


@pytest.mark.parametrize("is_crowded", [False, True], ids=["alone", "beside-other-work"])
@pytest.mark.parametrize("words", ["64,causal,left=1", "128,causal,left=1", "128,causal,softcap", "256,causal,left=1"])
def test_fifty_launches_give_the_same_bits_and_leave_no_turn(words: str, is_crowded: bool) -> None:
    """Programs wait for those before them, which must have started however few fit beside another kernel."""
    shape = replace(AttentionProblem.parse("1x40x8x2000x2000x64").shape, window_left=300)
    problem = problem_of(words, shape)
    workload = seeded_workload(problem, device=GPU, diagonal=bottom_right_diagonal(problem))
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def launch() -> tuple[Tensor, ...]:
        outputs = workload.allocate()
        if is_crowded:
            with torch.cuda.stream(side):
                for _ in range(4):
                    noise @ noise
        kernel_of(words)(*workload.arguments(outputs))
        return outputs

    first = launch()
    assert all(one.isfinite().all() for one in first)
    for _ in range(REPEATS):
        assert all(map(same_bits, first, launch()))
    assert workload.turns is not None
    assert not workload.turns.any()


# --- through attention ------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (200, 0)},
    "both sides": {"window_size": (100, 40)},
    "softcap": {"causal": True, "softcap": 30.0},
    "window softcap": {"window_size": (300, 0), "softcap": 2.0},
}
every_call = pytest.mark.parametrize("name", ARGUMENTS)


def tensors_of(seqlen_q: int, seqlen_k: int, head_dim: int, *, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_k)
    sizes = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)]
    return [torch.randn(2, *size, head_dim, generator=generator, device="cuda").bfloat16() for size in sizes]


@every_call
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_attention_follow_the_numerics_rule(head_dim: int, name: str) -> None:
    for seqlen_q, seqlen_k in [(640, 640), (300, 900), (900, 300), (129, 1)]:
        q, k, v = tensors_of(seqlen_q, seqlen_k, head_dim)
        assert_gradients_right(q, k, v, **ARGUMENTS[name], factor=3.0)


def test_a_long_narrow_window_is_fused_and_takes_the_time_of_its_keys() -> None:
    problem = AttentionProblem.parse("1x8x8x16384x16384x128,causal,left=511")
    assert "bwd_fused" in {one.family.kernel_pass for one in dispatcher_of(0).backward(problem)}

    def fastest_ms(**arguments: Any) -> float:
        inputs = requiring(*tensors_of(16384, 16384, 128, heads=8, kv_heads=8))
        out = attention(*inputs, **arguments)
        times, d_out = [], gradient_of(out.shape)
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.autograd.grad(out, inputs, d_out, retain_graph=True)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    assert fastest_ms(window_size=(511, 0)) < fastest_ms(causal=True) / 4


@every_call
def test_a_captured_backward_replays(name: str) -> None:
    static = requiring(*tensors_of(500, 500, 128))
    d_out = gradient_of(static[0].shape)

    def step(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs, **ARGUMENTS[name]), inputs, d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    with torch.no_grad():
        for tensor in static:
            tensor.copy_(torch.randn_like(tensor))
    for _ in range(3):
        graph.replay()
    assert all(map(torch.equal, captured, step(requiring(*static))))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
def test_a_compiled_backward_gives_the_bits_of_the_eager_one() -> None:
    tensors, arguments = tensors_of(300, 500, 128), ARGUMENTS["window softcap"]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **arguments)

    compiled, eager = requiring(*tensors), requiring(*tensors)
    out, expected = torch.compile(step, fullgraph=True)(*compiled), step(*eager)
    d_out = gradient_of(out.shape)
    found = torch.autograd.grad(out, compiled, d_out)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, eager, d_out)))


@every_call
def test_streams_side_by_side_give_the_bits_of_one(name: str) -> None:
    tensors = tensors_of(1500, 1500, 128, heads=8)
    expected = gradients(*tensors, **ARGUMENTS[name])
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for stream in streams * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(gradients(*tensors, **ARGUMENTS[name]))
    torch.cuda.synchronize()
    assert all(all(map(torch.equal, expected, one)) for one in found)
