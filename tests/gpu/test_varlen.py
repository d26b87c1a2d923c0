"""Packed sequences on a GPU: compiled kernels against the reference, their gradients, under graphs and compilers.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen, flash_attn_varlen_qkvpacked_func, warmup
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.ops import plans
from fa_autotune.problem.device import parse_triton_version
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.attention_calls import requiring
from kit.feature_families import TILED
from kit.packed_calls import (
    NAN,
    assert_packed_gradients_right,
    assert_packed_right,
    cu_seqlens,
    gradient_like,
    make_packed,
    varlen_gradients_of,
)

pytestmark = pytest.mark.gpu

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.02, 0.01])
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 40)},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"window_size": (127, 0), "sinks": torch.tensor([0.0, 1.0, -2.0, 8.0, 3.0, 30.0])},
}
every_call = pytest.mark.parametrize("name", CALLS)
# flash-attention's pairs of lengths, empty sequences, and lengths round the blocks.
GRID = [(113, 203), (0, 7), (128, 217), (1, 239), (799, 3), (0, 0), (256, 512), (512, 256), (5, 0), (1023, 1024)]
MIXED = [(113, 203), (0, 7), (1, 1), (300, 300), (5, 0), (64, 64), (129, 127)]


def arguments_of(name: str, heads: int = 6) -> dict[str, Any]:
    """The arguments of a call with so many heads, on the GPU."""
    return {key: value[:heads].cuda() if isinstance(value, Tensor) else value for key, value in CALLS[name].items()}


@pytest.mark.parametrize("features", [{}, {"bounded_right": True}, {"bounded_left": True, "alibi": True}])
@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "access"),
    [
        (DType.BFLOAT16, 64, 64, None),
        (DType.BFLOAT16, 128, 128, None),
        (DType.BFLOAT16, 192, 128, None),
        (DType.FLOAT16, 59, 59, None),
        (DType.FLOAT16, 64, 64, Access.ANY),
        (DType.FLOAT32, 64, 64, None),
    ],
)
def test_defaults_and_a_seed_pass_their_probes(
    dtype: DType, head_dim: int, head_dim_v: int, access: Access | None, kernel_pass: Pass, features: dict[str, bool]
) -> None:
    family = AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
        varlen=True,
        **{"bounded_right": False, **features},
    )
    device = live_device(0)
    for spec in supported_variants(family, device.arch, parse_triton_version(live_toolchain().triton)):
        seeds = seed_configs(spec, family, device.arch)[2:3]
        configs: list[Any] = [default_config(spec, family, device.arch), *seeds]
        for config in dict.fromkeys(configs):
            if spec.rejection(config, family=family, shape=None, device=device) is not None:
                continue
            kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), device.arch)
            chosen = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
            assert verify(kernel, family, chosen, torch.device("cuda", 0)).failures == (), config


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("words", ["", ",causal", ",left=9", ",causal,left=9,softcap,alibi,sinks"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_schedule_of_the_warp_specialised_forward_passes_its_probes(
    head_dim: int, words: str, schedule: Schedule
) -> None:
    family, device = AttentionProblem.parse(f"1x2x1x64x64x{head_dim},varlen{words}").family, live_device(0)
    spec = variant_spec(Pass.FWD, Variant.HOPPER_WS)
    if spec.supports(family, device.arch, parse_triton_version(live_toolchain().triton)) is not None:
        pytest.skip("for sm_90")
    config = spec.config(SCHEDULE=schedule, CONSUMERS=1 if schedule is Schedule.SINGLE else 2, BLOCK_N=64)
    kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), device.arch)
    chosen = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
    assert verify(kernel, family, chosen, torch.device("cuda", 0)).failures == ()


@every_call
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_the_published_lengths_follows_the_numerics_rule(head_dim: int, name: str) -> None:
    tensors = make_packed(GRID, heads=6, kv_heads=2, head_dim=head_dim)
    arguments = arguments_of(name)
    with torch.no_grad():
        assert_packed_right(tensors, GRID, **arguments)
    assert_packed_gradients_right(tensors, GRID, factor=3.0, **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(59, 59), (40, 40), (96, 64), (111, 111)])
def test_odd_head_dims_and_dtypes(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    tensors = make_packed(MIXED, heads=4, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    assert_packed_right(tensors, MIXED, causal=True)
    assert_packed_gradients_right(tensors, MIXED, causal=True, factor=3.0)


@every_call
def test_unused_rows_never_leak(name: str) -> None:
    results = []
    for fill in (0.0, NAN):
        tensors = make_packed(MIXED, unused=200, fill=fill, heads=6, kv_heads=2, head_dim=64)
        out, lse = attention_varlen(*tensors, **arguments_of(name), return_lse=True)
        gradients = varlen_gradients_of(tensors, gradient_like(tensors, 200, fill), **arguments_of(name))
        for value in (out, *gradients):
            assert not value[-200:].any()
            assert torch.isfinite(value).all()
        assert (lse[:, -200:] == float("-inf")).all()
        results.append((out, lse, *gradients))
    assert all(map(torch.equal, *results))


def test_a_hundred_thousand_documents() -> None:
    lengths = torch.randint(0, 4, (100_000,), generator=torch.Generator().manual_seed(0))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to("cuda", torch.int32)
    total = int(starts[-1])
    q, k, v = requiring(*(torch.randn(total, 2, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3)))
    out = attention_varlen(q, k, v, starts, starts, causal=True)
    first = starts[:-1][lengths.cuda() > 0].long()
    torch.testing.assert_close(out[first], v[first])  # a first row sees its own key alone
    d_out = torch.randn_like(out)
    _, _, dv = torch.autograd.grad(out, (q, k, v), d_out)
    last = (starts[1:] - 1)[lengths.cuda() == 1].long()
    torch.testing.assert_close(dv[last], d_out[last])  # the key of a single row is seen by nobody else


@every_call
def test_twenty_steps_are_equal_to_the_bit(name: str) -> None:
    tensors, arguments = make_packed([(500, 500), (77, 130), (1000, 1000)], heads=6, kv_heads=2), arguments_of(name)
    first = varlen_gradients_of(tensors, gradient_like(tensors), **arguments)
    for _ in range(20):
        assert all(map(torch.equal, varlen_gradients_of(tensors, gradient_like(tensors), **arguments), first))


@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_a_captured_step_replays_with_other_lengths(name: str) -> None:
    """The totals and the number of sequences stay, cu_seqlens are written between replays."""
    arguments = arguments_of(name)
    q, k, v, *_ = make_packed([(300, 300), (212, 212)], heads=6, kv_heads=2, head_dim=64)
    static, starts = requiring(q, k, v), cu_seqlens([300, 212])
    d_out = gradient_like((q, k, v))

    def step(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out, lse = attention_varlen(*inputs, starts, starts, **arguments, return_lse=True)
        return out, lse, *torch.autograd.grad(out, inputs, d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for lengths in ([300, 212], [1, 511], [0, 512], [64, 100], [0, 0], [400, 0]):
        starts.copy_(cu_seqlens(lengths))
        graph.replay()
        assert all(map(torch.equal, captured, step(requiring(*static)))), lengths


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (300, 0)])
def test_dropout_drops_what_a_batch_drops_also_when_captured(window: tuple[int, int], head_dim: int) -> None:
    dense = [torch.randn(6, 701, heads, head_dim, dtype=torch.bfloat16, device="cuda") for heads in (6, 2, 2)]
    starts, call = cu_seqlens([701] * 6), {"window_size": window, "dropout_p": 0.3}
    d_out = torch.randn_like(dense[0])

    def step(inputs: list[Tensor], attend: Any, *more: Tensor) -> list[Tensor]:
        out = attend(*inputs, *more, **call)
        return [out, *torch.autograd.grad(out, inputs, d_out.view(out.shape))]

    torch.manual_seed(3)
    expected = step(requiring(*dense), attention)
    static = requiring(*(tensor.flatten(0, 1) for tensor in dense))
    torch.manual_seed(3)
    found = step(static, attention_varlen, starts, starts)
    for one, other in zip(found, expected, strict=True):
        scale = other.float().abs().max().item()
        torch.testing.assert_close(one.view(other.shape), other, atol=0.02 * scale, rtol=0.02)
    graph = torch.cuda.CUDAGraph()
    static = requiring(*static)
    with torch.cuda.graph(graph):
        captured = step(static, attention_varlen, starts, starts)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        graph.replay()
        outs.append([one.clone() for one in captured])
    assert all(map(torch.equal, *outs))
    graph.replay()
    assert not torch.equal(captured[0], outs[0][0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_nothing_waits_for_the_gpu() -> None:
    """Not the first call of a kind of kernel either: what a call needs lies on the device."""
    tensors = make_packed(MIXED, heads=6, kv_heads=2, head_dim=64)
    maximum = torch.tensor(300, device="cuda")
    attention_varlen(*tensors, causal=True)
    inputs, d_out = requiring(*tensors[:3]), gradient_like(tensors)
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = attention_varlen(*inputs, *tensors[3:], maximum, maximum, causal=True)
        torch.autograd.grad(out, inputs, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
@every_call
def test_a_compiled_step_gives_the_bits_of_the_eager_one(name: str) -> None:
    tensors, arguments = make_packed(MIXED, heads=6, kv_heads=2, head_dim=64), arguments_of(name)

    def step(*call: Tensor) -> Tensor:
        return attention_varlen(*call, max_seqlen_q=300, **arguments)

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        inputs = requiring(*tensors[:3])
        out = function(*inputs, *tensors[3:])
        results.append((out, *torch.autograd.grad(out, inputs, gradient_like(tensors))))
    assert all(map(torch.equal, *results))


def test_another_stream_gives_the_same_bits() -> None:
    tensors = make_packed(MIXED, heads=6, kv_heads=2, head_dim=64)
    expected = varlen_gradients_of(tensors, gradient_like(tensors), causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = varlen_gradients_of(tensors, gradient_like(tensors), causal=True)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


def test_packed_gradients_have_the_bits_of_their_parts() -> None:
    lengths = [(100, 100), (0, 0), (333, 333)]
    q, k, v, starts, _ = make_packed(lengths, heads=4, kv_heads=4, head_dim=64)
    d_out = gradient_like((q, k, v))
    (packed,) = requiring(torch.stack([q, k, v], 1))
    flash_attn_varlen_qkvpacked_func(packed, starts, 333, causal=True).backward(d_out)
    expected = varlen_gradients_of((q, k, v, starts, starts), d_out, causal=True)
    torch.testing.assert_close(packed.grad, torch.stack(expected, 1), atol=2e-2, rtol=2e-2)


def test_ever_new_totals_make_few_plans() -> None:
    before = len(plans._plans)
    for count in range(100, 400):
        lengths = [count, 50, 3 * (count % 7)]
        starts = cu_seqlens(lengths)
        q, k, v = (torch.randn(sum(lengths), 2, 32, device="cuda", dtype=torch.float16) for _ in range(3))
        out = attention_varlen(q, k, v, starts, starts, count, count, causal=True)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[count], v[count])  # the first row of the second sequence
    assert len(plans._plans) - before <= 4


def test_tensors_with_more_than_2_to_the_31_elements() -> None:
    """The last sequence lies past the 2^31st element of q, k, v and out."""
    total, last = 2**31 // 1024 + 700, 500
    q, k, v = (torch.empty(total, 8, 128, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(3))
    starts = cu_seqlens([200] * ((total - last) // 200) + [(total - last) % 200, last])
    inputs = requiring(q, k, v)
    out, lse = attention_varlen(*inputs, starts, starts, causal=True, return_lse=True)
    d_out = torch.empty_like(out).normal_()
    batch = requiring(*(tensor[-last:][None] for tensor in (q, k, v)))
    expected, expected_lse = attention(*batch, causal=True, return_lse=True)
    torch.testing.assert_close(out[-last:], expected[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:, -last:], expected_lse[0], atol=1e-4, rtol=1e-4)
    found = torch.autograd.grad(out, inputs, d_out)
    for one, other in zip(found, torch.autograd.grad(expected, batch, d_out[-last:][None]), strict=True):
        torch.testing.assert_close(one[-last:], other[0], atol=2e-2, rtol=2e-2)


def test_warmup_loads_what_a_capture_needs() -> None:
    warmup(["2x4x4x512x512x64,causal,varlen"], backward=True)
    q, k, v, *starts = make_packed([(500, 500), (524, 524)], heads=4, kv_heads=4, head_dim=64)
    graph, inputs, d_out = torch.cuda.CUDAGraph(), requiring(q, k, v), gradient_like((q, k, v))
    with torch.cuda.graph(graph):
        out = attention_varlen(*inputs, *starts, causal=True)
        gradients = torch.autograd.grad(out, inputs, d_out)
    graph.replay()
    assert all(torch.isfinite(tensor).all() for tensor in (out, *gradients))
