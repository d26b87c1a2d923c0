"""float32 in tf32 on a GPU: on tensor cores, within what cutting the operands costs, and only where asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.problem.device import parse_triton_version
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.reference.attention import (
    attention_gradients,
    attention_reference,
    attention_same_precision,
    backward_statistics,
    gradients_from_statistics,
)
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import supported_variants
from fa_autotune.space.seeds import default_config, seed_configs
from kit.attention_calls import FLOAT32, gradient_of, gradients, referred, requiring, swapped

pytestmark = pytest.mark.gpu

TILED = (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
TF32: dict[str, Any] = {"fp32_precision": "tf32"}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def make_family(kernel_pass: Pass, head_dim: int, access: Access = Access.TMA, **features: bool) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=DType.FLOAT32,
        head_dim=head_dim,
        head_dim_v=head_dim,
        bounded_right=True,
        access=access,
        tf32=True,
        **features,
    )


@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize(
    ("head_dim", "access", "features"),
    [
        (64, Access.TMA, {}),
        (64, Access.ANY, {}),
        (128, Access.TMA, {}),
        (256, Access.TMA, {}),
        (59, Access.ANY, {"softcap": True}),
        (96, Access.ALIGNED, {"bounded_left": True, "alibi": True}),
        (192, Access.TMA, {}),
    ],
)
def test_every_pass_passes_its_probes(
    head_dim: int, access: Access, features: dict[str, bool], kernel_pass: Pass
) -> None:
    family, device = make_family(kernel_pass, head_dim, access, **features), live_device(0)
    (spec,) = supported_variants(family, device.arch, parse_triton_version(live_toolchain().triton))
    configs: list[Any] = [default_config(spec, family, device.arch)]
    if head_dim == 64 and access is Access.TMA:
        configs += seed_configs(spec, family, device.arch)[2:4]
    for config in configs:
        kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), device.arch)
        probe_list = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
        assert verify(kernel, family, probe_list, torch.device("cuda", 0)).failures == (), config


@pytest.mark.parametrize("causal", [False, True])
def test_results_err_as_tf32_does_and_no_more(causal: bool) -> None:
    for seqlen_q, seqlen_k in ((113, 203), (512, 256), (1023, 1024), (1, 239), (799, 3)):
        q, k, v = randn(2, seqlen_q, 6, 64), randn(2, seqlen_k, 2, 64), randn(2, seqlen_k, 2, 64)
        call, d_out = referred(q, k, causal=causal), gradient_of(q.shape, FLOAT32)
        tensors = swapped(q, k, v, d_out)
        with torch.no_grad():
            out = attention(q, k, v, causal=causal, **TF32)
        ref, pt = (
            attention_reference(*tensors[:3], **call)[0],
            attention_same_precision(*tensors[:3], **call, tf32=True),
        )
        refs = [ref, *attention_gradients(*tensors, **call)]
        statistics = backward_statistics(*tensors, **call)
        pts = [pt, *gradients_from_statistics(*tensors, *statistics, **call, dtype=FLOAT32, tf32=True)]
        found = [out, *gradients(q, k, v, d_out, causal=causal, **TF32)]
        for name, one, exact, cut in zip(("out", "dq", "dk", "dv"), swapped(*found), refs, pts, strict=True):
            error, allowed = (one - exact).abs(), (cut - exact).abs()
            assert error.max() <= 2 * allowed.max() + 1e-6, (name, seqlen_q, seqlen_k)
            assert error.mean() <= 1.5 * allowed.mean() + 1e-6, (name, seqlen_q, seqlen_k)
        if min(seqlen_q, seqlen_k) > 100:  # so that it was no ieee product
            assert (found[0] - attention(q, k, v, causal=causal)).abs().max() > 1e-5


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # that nothing is accumulated in
def test_a_step_repeats_to_the_bit_on_a_side_stream_compiled_and_captured() -> None:
    static = requiring(*(randn(2, 500, 4, 64) for _ in range(3)))
    d_out = gradient_of(static[0].shape, FLOAT32)

    def step(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*tensors, causal=True, **TF32)
        return out, *torch.autograd.grad(out, tensors, d_out)

    first = step(static)
    for _ in range(20):
        assert all(map(torch.equal, step(static), first))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = step(static)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, beside, first))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, **TF32), fullgraph=True)
    out = compiled(*static)
    assert all(map(torch.equal, (out, *torch.autograd.grad(out, static, d_out)), first))
    static = requiring(*static)  # new leaves: autograd keeps the stream that it first saw of the old ones
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
    graph.replay()
    assert all(map(torch.equal, captured, step(static)))


def test_it_is_faster_than_ieee_products() -> None:
    q, k, v = (randn(1, 4096, 8, 64) for _ in range(3))

    def fastest_ms(**arguments: Any) -> float:
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            attention(q, k, v, **arguments)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    with torch.no_grad():
        assert fastest_ms(**TF32) < fastest_ms() / 2
