"""The fused backward of packed sequences on a Hopper GPU: values, order, repeats, graphs.

`pytest -m gpu -n 0`. Gluon has no interpreter, so nothing else runs these kernels as they are. Skipped where there is
no sm_90.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen
from fa_autotune.dispatch.loaded_kernels import dispatcher_of
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import same_bits, verify
from fa_autotune.kernels.gpu import live_device
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.passes import FUSED_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.problem.sequences import Sequences
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import KnobValue, supported_variants
from fa_autotune.space.seeds import default_config, seed_configs
from fa_autotune.space.workspace import STATISTIC_ROWS, fused_tile
from kit.attention_calls import requiring
from kit.packed_calls import (
    NAN,
    assert_packed_gradients_right,
    cu_seqlens,
    gradient_like,
    make_packed,
    varlen_gradients_of,
)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
TRITON = (3, 6)
REPEATS = 50
FAMILIES = [
    "64,causal", "64,fp16,left=1,softcap", "40x64", "64,unordered", "128,causal", "128", "128,causal,left=1",
    "96x72,causal,left=1,softcap", "128,fp16,causal,unordered", "256,causal", "192x128,fp16,left=1,softcap", "256",
]  # fmt: skip
every_family = pytest.mark.parametrize("words", FAMILIES)
LONG = [(640, 640), (0, 9), (1, 1), (300, 900), (129, 0), (0, 0), (900, 300), (128, 128), (77, 1000)]
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window softcap": {"window_size": (200, 40), "softcap": 20.0},
}
every_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def hopper() -> None:
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


def problem_of(words: str, shape: str = "1x2x1x64x64") -> AttentionProblem:
    kernel_pass = "" if "bwd_" in words else ",bwd_fused"
    return AttentionProblem.parse(f"{shape}x{words},varlen{kernel_pass}")


@cache
def kernel_of(words: str, **knobs: KnobValue) -> LoadedKernel:
    family = problem_of(words).family
    (spec,) = supported_variants(family, "sm_90", TRITON)
    config: Any = replace(default_config(spec, family, "sm_90"), **knobs)  # type: ignore[arg-type]
    return load_kernel(Candidate(family=family, variant=spec.variant, config=config), "sm_90", 0)


@every_family
def test_every_probe_passes(words: str) -> None:
    family = problem_of(words).family
    tile, num_sms = fused_tile(family), live_device(0).num_sms
    found = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False, programs=num_sms)
    assert verify(kernel_of(words), family, found, GPU).failures == ()


@pytest.mark.parametrize("words", ["64,causal", "128,causal", "256,causal"])
def test_every_seed_passes_where_programs_wait_for_one_another(words: str) -> None:
    family = problem_of(words).family
    (spec,) = supported_variants(family, "sm_90", TRITON)
    tile = fused_tile(family)
    waiting = probes(family, block_m=tile.block_m, block_n=tile.block_n, exact_lengths=False, programs=132)[-1]
    for config in seed_configs(spec, family, "sm_90"):
        if spec.rejection(config, family=family, shape=None, device=live_device(0)) is None:
            kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), "sm_90", 0)
            assert verify(kernel, family, [waiting], GPU).failures == (), config


@pytest.mark.parametrize(
    "words",
    [
        "64,bwd_preprocess", "40,any,fp16,bwd_preprocess", "64,causal,bwd_postprocess",
        "128,causal,left=1,bwd_postprocess", "192,bwd_postprocess",
    ],
)  # fmt: skip
def test_every_seed_of_the_kernels_beside_it_passes_its_probes(words: str) -> None:
    family = problem_of(words).family
    (spec,) = supported_variants(family, "sm_90", TRITON)
    block = STATISTIC_ROWS if family.kernel_pass is Pass.BWD_PREPROCESS else fused_tile(family).block_m
    found = probes(family, block_m=block, block_n=64, exact_lengths=False)
    for config in seed_configs(spec, family, "sm_90"):
        kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), "sm_90", 0)
        assert verify(kernel, family, found, GPU).failures == (), config


@pytest.mark.parametrize("words", ["64,causal", "128", "128,causal,left=1", "256,causal"])
def test_random_lengths(words: str) -> None:
    family, generator = problem_of(words).family, torch.Generator().manual_seed(0)
    found = []
    for seed in range(6):
        count = (3, 40, 300)[seed % 3]
        lengths = torch.randint(0, 3000 // count, (2, count), generator=generator)
        lengths[lengths < 5] = 0
        of_rows, of_keys = (tuple(side) for side in lengths.tolist())
        shape = AttentionShape(
            batch_size=count,
            num_q_heads=6,
            num_kv_heads=2,
            seqlen_q=max(1, *of_rows),
            seqlen_k=max(1, *of_keys),
            window_left=20 * family.bounded_left * seed,
        )
        sequences = Sequences(lengths_q=of_rows, lengths_k=of_keys, unused_q=seed, unused_k=3 * seed)
        found.append(Probe(shape=shape, sequences=sequences, seed=seed))
    assert verify(kernel_of(words), family, found, GPU).failures == ()


@pytest.mark.parametrize("is_crowded", [False, True], ids=["alone", "beside-other-work"])
@pytest.mark.parametrize("words", ["64,causal", "128,causal", "128", "256,causal"])
def test_fifty_launches_give_the_same_bits_and_leave_no_turn(words: str, is_crowded: bool) -> None:
    """Programs wait for those before them, which must have started however few fit beside another kernel."""
    problem = problem_of(words, "1x40x8x64x64")
    sequences = Sequences(lengths_q=(1000, 0, 333, 700), lengths_k=(1000, 70, 400, 640))
    workload = seeded_workload(problem, device=GPU, diagonal=0 if "causal" in words else None, sequences=sequences)
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def launch() -> tuple[Tensor, ...]:
        outputs = workload.allocate()
        if is_crowded:
            with torch.cuda.stream(side):
                for _ in range(4):
                    noise @ noise
        kernel_of(words)(*workload.arguments(outputs))
        return outputs[0], outputs[1], workload.dq_of(outputs[2])

    first = launch()
    assert all(one.isfinite().all() for one in first[:2])
    for _ in range(REPEATS):
        assert all(map(same_bits, first, launch()))
    assert workload.turns is not None
    assert not workload.turns.any()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("starts", [[0, 1000, 0, 1000], [0, 500, 20, 1000], [0, 1000, 5, 5], [-7, 300, 2**31 - 1, 0]])
@pytest.mark.parametrize("side", ["q", "k"])
def test_nobody_waits_for_good_where_a_sequence_ends_before_it_starts(side: str, starts: list[int]) -> None:
    q, k, v, good, _ = make_packed([(400, 400), (0, 0), (600, 600)], heads=4, kv_heads=2, head_dim=64)
    bad = torch.tensor(starts, dtype=torch.int32, device="cuda")
    lengths = (bad, good) if side == "q" else (good, bad)
    inputs = requiring(q, k, v)
    out = attention_varlen(*inputs, *lengths, causal=True)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    assert_packed_gradients_right((q, k, v, good, good), [(400, 400), (0, 0), (600, 600)], causal=True)


# --- through attention_varlen -----------------------------------------------------------------------------------------


def is_fused(text: str) -> bool:
    found = dispatcher_of(0).backward(AttentionProblem.parse(text).as_called())
    return [one.family.kernel_pass for one in found] == list(FUSED_BACKWARD)


def test_long_sequences_take_the_fused_way() -> None:
    for head_dim in (64, 128, 256):
        assert is_fused(f"8x16x16x2048x2048x{head_dim},causal,varlen")


@every_call
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradients_follow_the_numerics_rule(head_dim: int, name: str) -> None:
    tensors = make_packed(LONG, unused=70, fill=NAN, heads=6, kv_heads=2, head_dim=head_dim)
    found = assert_packed_gradients_right(tensors, LONG, 70, fill=NAN, factor=3.0, **CALLS[name])
    assert not any(one[-70:].any() for one in found)
    again = varlen_gradients_of(tensors, gradient_like(tensors, 70, NAN), **CALLS[name])
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_lengths_have_the_gradients_of_a_batch(head_dim: int) -> None:
    tensors = make_packed([(1024, 1024)] * 4, heads=4, kv_heads=4, head_dim=head_dim)
    d_out = gradient_like(tensors)
    batch = requiring(*(tensor.unflatten(0, (4, 1024)) for tensor in tensors[:3]))
    out = attention(*batch, causal=True)
    expected = torch.autograd.grad(out, batch, d_out.unflatten(0, (4, 1024)))
    for one, other in zip(varlen_gradients_of(tensors, d_out, causal=True), expected, strict=True):
        torch.testing.assert_close(one, other.flatten(0, 1), atol=2e-2, rtol=2e-2)


def test_gradients_of_lse_and_sinks_go_through_it() -> None:
    tensors = make_packed(LONG, heads=4, kv_heads=2, head_dim=64)
    results = []
    for backend in ("generated", "reference"):
        *inputs, sinks = requiring(*tensors[:3], torch.tensor([0.5, -1.0, 3.0, 0.0], device="cuda"))
        out, lse = attention_varlen(*inputs, *tensors[3:], sinks=sinks, causal=True, return_lse=True, backend=backend)
        d_lse = torch.linspace(-1, 1, lse.numel(), device="cuda").view_as(lse)
        results.append(torch.autograd.grad((out, lse), (*inputs, sinks), (gradient_like(tensors), d_lse)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.03)


@every_call
def test_a_captured_backward_replays_with_other_lengths(name: str) -> None:
    q, k, v, *_ = make_packed([(1000, 1000), (800, 800), (248, 248)], heads=4, kv_heads=2, head_dim=128)
    static, starts = requiring(q, k, v), cu_seqlens([1000, 800, 248])
    d_out = gradient_like((q, k, v))

    def step(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention_varlen(*inputs, starts, starts, **CALLS[name]), inputs, d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for lengths in ([1000, 800, 248], [1, 2047, 0], [0, 0, 0], [0, 64, 1900], [700, 0, 700]):
        starts.copy_(cu_seqlens(lengths))
        graph.replay()
        assert all(map(torch.equal, captured, step(requiring(q, k, v)))), lengths


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_waits_for_the_gpu_and_one_plan_serves_ever_new_lengths() -> None:
    for count in range(4):
        lengths = [(600 + 100 * count, 700), (500 - count, 600), (600, 500 + count)]
        tensors = make_packed(lengths, heads=4, kv_heads=2, head_dim=64)
        inputs, d_out = requiring(*tensors[:3]), gradient_like(tensors)
        try:
            torch.cuda.set_sync_debug_mode("error")
            out, lse = attention_varlen(*inputs, *tensors[3:], causal=True, return_lse=True)
            torch.autograd.grad((out, lse), inputs, (d_out, torch.ones_like(lse)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_packed_gradients_right(tensors, lengths, causal=True)
