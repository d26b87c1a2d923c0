"""Features on a GPU: compiled kernels against the reference, forward and backward, and under graphs and compilers.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, warmup
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.problem.device import parse_triton_version
from fa_autotune.problem.family import Access, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.dropout import draw_seed, dropout_mask, scale_of
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import supported_variants
from fa_autotune.space.seeds import default_config, seed_configs
from kit.attention_calls import assert_gradients_right, assert_right, gradient_of, gradients, requiring
from kit.feature_families import FEATURES, TILED, make_family

pytestmark = pytest.mark.gpu

CALLS: dict[str, dict[str, Any]] = {  # arguments of `attention`, each with a feature that a kernel must know
    "window": {"window_size": (300, 0)},
    "window both": {"window_size": (100, 40)},
    "left": {"window_size": (256, -1)},
    "causal left": {"causal": True, "window_size": (511, -1)},
    "softcap": {"softcap": 20.0, "softmax_scale": 1.0},
    "causal softcap": {"causal": True, "softcap": 1.5},
    "window softcap": {"window_size": (300, 0), "softcap": 1.5},
}
CALLS |= {
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.02, 0.01])},
    "causal alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.02, 0.01])},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -2.0, 8.0, 3.0, 30.0])},
    "window sinks": {"window_size": (127, 0), "sinks": torch.tensor([0.0, 1.0, -2.0, 8.0, 3.0, 30.0])},
}
every_call = pytest.mark.parametrize("name", CALLS)


def arguments_of(name: str, heads: int) -> dict[str, Any]:
    """The arguments of a call with so many heads, on the GPU."""
    return {key: value[:heads].cuda() if isinstance(value, Tensor) else value for key, value in CALLS[name].items()}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "access"),
    [
        (DType.BFLOAT16, 64, 64, None),
        (DType.BFLOAT16, 128, 128, None),
        (DType.FLOAT16, 96, 96, None),
        (DType.BFLOAT16, 192, 128, None),
        (DType.BFLOAT16, 256, 256, None),
        (DType.BFLOAT16, 59, 59, None),
        (DType.FLOAT16, 64, 64, Access.ANY),
        (DType.FLOAT32, 64, 64, None),
    ],
)
def test_every_variant_passes_its_probes(
    dtype: DType, head_dim: int, head_dim_v: int, access: Access | None, kernel_pass: Pass, features: str
) -> None:
    family, device = make_family(kernel_pass, features, dtype, head_dim, head_dim_v, access), live_device(0)
    for spec in supported_variants(family, device.arch, parse_triton_version(live_toolchain().triton)):
        config: Any = default_config(spec, family, device.arch)
        kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), device.arch)
        probe_list = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
        assert verify(kernel, family, probe_list, torch.device("cuda", 0)).failures == (), spec.variant


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_seed_that_loads_passes_its_probes(head_dim: int, kernel_pass: Pass, features: str) -> None:
    family, device = make_family(kernel_pass, features, head_dim=head_dim), live_device(0)
    for spec in supported_variants(family, device.arch, parse_triton_version(live_toolchain().triton)):
        for config in seed_configs(spec, family, device.arch)[1:4]:
            if spec.rejection(config, family=family, shape=None, device=device) is not None:
                continue
            tile: Any = config
            kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), device.arch)
            probe_list = probes(family, block_m=tile.BLOCK_M, block_n=tile.BLOCK_N, exact_lengths=False)
            assert verify(kernel, family, probe_list, torch.device("cuda", 0)).failures == (), config


@every_call
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(113, 203), (256, 512), (512, 256), (1023, 1024), (1, 239), (799, 3), (2048, 2048)],
)
def test_attention_follows_the_numerics_rule(seqlen_q: int, seqlen_k: int, name: str) -> None:
    q, k, v = randn(2, seqlen_q, 6, 128), randn(2, seqlen_k, 2, 128), randn(2, seqlen_k, 2, 128)
    arguments = arguments_of(name, 6)
    with torch.no_grad():
        assert_right(q, k, v, **arguments)
    assert_gradients_right(q, k, v, **arguments, factor=3.0)


@every_call
def test_fifty_backwards_are_equal_to_the_bit(name: str) -> None:
    tensors, arguments = [randn(4, 1000, 6, 64) for _ in range(3)], arguments_of(name, 6)
    first = gradients(*tensors, **arguments)
    for _ in range(50):
        assert all(map(torch.equal, gradients(*tensors, **arguments), first))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
@every_call
def test_a_compiled_step_gives_the_bits_of_the_eager_one(name: str) -> None:
    tensors, arguments = [randn(2, 300, 4, 64) for _ in range(3)], arguments_of(name, 4)
    torch.compiler.reset()  # each name compiles the same lines anew

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **arguments)

    compiled, eager = requiring(*tensors), requiring(*tensors)
    out, expected = torch.compile(step, fullgraph=True)(*compiled), step(*eager)
    d_out = gradient_of(out.shape)
    found = [out, *torch.autograd.grad(out, compiled, d_out)]
    assert all(map(torch.equal, found, [expected, *torch.autograd.grad(expected, eager, d_out)]))


@every_call
def test_a_captured_step_replays(name: str) -> None:
    static = requiring(*(randn(2, 500, 4, 64) for _ in range(3)))
    d_out, arguments = gradient_of(static[0].shape), arguments_of(name, 4)

    def step(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*tensors, **arguments)
        return out, *torch.autograd.grad(out, tensors, d_out)

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
    graph.replay()
    assert all(map(torch.equal, captured, step(requiring(*static))))


@pytest.mark.parametrize("feature", ["alibi", "bool mask", "bias", "dropout"])
def test_seventy_thousand_heads_follow_the_definition(feature: str) -> None:
    """All of them, in plain torch and fp32: no number of a head, nor what is read by it, wraps."""
    batch, heads, length, head_dim = 17_500, 4, 16, 64
    tensors = requiring(*(randn(batch, length, heads, head_dim) for _ in range(3)))
    exact = requiring(*(tensor.float() for tensor in tensors))
    q, k, v = (tensor.transpose(1, 2) for tensor in exact)
    scores, kept = q @ k.transpose(-1, -2) / head_dim**0.5, torch.ones((), device="cuda")
    call: dict[str, Any] = {}
    rows = torch.arange(length, device="cuda")
    if feature == "alibi":
        call["alibi_slopes"] = torch.rand(batch, heads, device="cuda")
        scores = scores - call["alibi_slopes"][..., None, None] * (rows[:, None] - rows).abs()
    elif feature == "bool mask":
        call["attn_mask"] = (torch.rand(batch, heads, length, length, device="cuda") < 0.8).logical_or_(rows == 0)
        scores = scores.masked_fill(~call["attn_mask"], float("-inf"))
    elif feature == "bias":
        call["attn_mask"] = torch.randn(batch, heads, length, length, device="cuda", dtype=torch.bfloat16)
        scores = scores + call["attn_mask"].float()
    else:
        call["dropout_p"] = 0.3
        torch.manual_seed(7)
        seed = draw_seed(torch.device("cuda", 0))
        kept = dropout_mask(seed, batch, heads, length, length, dropout_p=0.3) * scale_of(0.3)
    expected = ((torch.softmax(scores, -1) * kept) @ v).transpose(1, 2)
    torch.manual_seed(7)
    out = attention(*tensors, **call)
    d_out = gradient_of(out.shape)
    found = [out, *torch.autograd.grad(out, tensors, d_out)]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, exact, d_out.float())], strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gradient_of_sinks_is_that_of_its_definition(head_dim: int, alone: bool) -> None:
    """Alone, delta comes from its own kernel; with the others, from the fused backward where that is taken."""
    q, k, v = (randn(2, 1000, 4, head_dim).requires_grad_(not alone) for _ in range(3))
    sinks = torch.tensor([0.0, 3.0, -4.0, 9.0], device="cuda", requires_grad=True)
    out = attention(q, k, v, causal=True, sinks=sinks)
    d_out = gradient_of(out.shape)
    found, *_ = torch.autograd.grad(out, [sinks] if alone else [sinks, q, k, v], d_out)
    with torch.no_grad():
        _, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        delta = (out.float() * d_out.float()).sum(-1).transpose(1, 2)
        exact = -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2))
    torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)


def test_a_window_costs_what_its_keys_cost() -> None:
    """A narrow window over long keys runs far faster than the whole: blocks outside are never visited."""
    q, k, v = (randn(1, 16384, 8, 64) for _ in range(3))

    def fastest_ms(**arguments: Any) -> float:
        times = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            attention(q, k, v, **arguments)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    with torch.no_grad():
        assert fastest_ms(window_size=(255, 0)) < fastest_ms(causal=True) / 4


def test_warmup_loads_what_a_window_needs() -> None:
    warmup(["2x4x4x640x640x64,causal,left=99"], backward=True)
    tensors = requiring(*(randn(2, 640, 4, 64) for _ in range(3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors, causal=True, window_size=(99, 0))
    graph.replay()
    assert torch.isfinite(out).all()
    assert AttentionProblem.parse("2x4x4x640x640x64,causal,left=99").visible_pairs < 640 * 100
