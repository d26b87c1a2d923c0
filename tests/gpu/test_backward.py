"""What only a GPU can show of the backward: compiled kernels, streams, graphs, devices, many programs, large offsets.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU. The other tests of gradients run on a GPU too.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import attention, flash_attn_func, flash_attn_qkvpacked_func, warmup
from fa_autotune.errors import LaunchError
from fa_autotune.problem.passes import Pass
from fa_autotune.reference.attention import attention_gradients, backward_statistics, gradients_from_statistics

pytestmark = pytest.mark.gpu

# flash-attention's published grid: (seqlen_q, seqlen_k)
LENGTHS = [
    (1, 1), (3, 3), (64, 1), (64, 32), (239, 1), (3, 799), (799, 3), (127, 512), (127, 513), (512, 127), (113, 203),
    (203, 113), (128, 217), (217, 128), (108, 256), (256, 108), (256, 512), (512, 256), (640, 128), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip
HEAD_DIMS = [8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def tensors(
    seqlen_q: int, seqlen_k: int, *, batch: int = 2, heads: int = 6, kv_heads: int = 2, head_dim: int = 128,
    head_dim_v: int | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v and the gradient of out, (batch, seqlen, heads, head_dim)."""
    v_dim = head_dim if head_dim_v is None else head_dim_v
    return (
        randn(batch, seqlen_q, heads, head_dim, dtype=dtype),
        randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype),
        randn(batch, seqlen_k, kv_heads, v_dim, dtype=dtype),
        randn(batch, seqlen_q, heads, v_dim, dtype=dtype),
    )


def gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, causal: bool = False) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(attention(*inputs, causal=causal), inputs, d_out)


def assert_follow_the_rule(
    found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, *, causal: bool, factor: float = 2.0
) -> None:
    """At most `factor` times plain torch's error, plus two roundings; tensors are (batch, seqlen, heads, head_dim)."""
    views = [tensor.transpose(1, 2) for tensor in (q, k, v, d_out)]
    numbers = {"softmax_scale": q.shape[3] ** -0.5, "diagonal": k.shape[1] - q.shape[1] if causal else None}
    refs = attention_gradients(*views, **numbers)
    lse, delta = backward_statistics(*views, **numbers)
    pts = gradients_from_statistics(*views, lse, delta, **numbers, dtype=q.dtype)
    for name, gradient, ref, pt in zip("qkv", found, refs, pts, strict=True):
        rounded = ref.to(gradient.dtype)
        roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
        error, pt_error = (gradient.transpose(1, 2).to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
        assert torch.isfinite(gradient).all(), f"d{name}"
        assert error.max() <= factor * pt_error.max() + roundings.max(), f"d{name}"
        assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean(), f"d{name}"


# --- values -----------------------------------------------------------------------------------------------------------


@causal_or_not
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_of_the_published_grid(head_dim: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    given = tensors(seqlen_q, seqlen_k, head_dim=head_dim)
    assert_follow_the_rule(gradients(*given, causal=causal), *given, causal=causal)


@causal_or_not
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_of_the_published_grid(head_dim: int, dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    given = tensors(113, 203, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert_follow_the_rule(
        gradients(*given, causal=causal), *given, causal=causal, factor=3.0 if head_dim > 192 else 2.0
    )


@causal_or_not
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 64), (96, 40)])
def test_value_columns_may_differ(head_dim: int, head_dim_v: int, causal: bool) -> None:
    given = tensors(300, 200, head_dim=head_dim, head_dim_v=head_dim_v)
    assert_follow_the_rule(gradients(*given, causal=causal), *given, causal=causal)


@causal_or_not
def test_float32_gradients_are_exact_to_1e_5(causal: bool) -> None:
    given = tensors(113, 203, head_dim=64, dtype=torch.float32)
    exact = attention_gradients(
        *(tensor.transpose(1, 2) for tensor in given), softmax_scale=0.125, diagonal=90 if causal else None
    )
    for gradient, expected in zip(gradients(*given, causal=causal), exact, strict=True):
        torch.testing.assert_close(gradient.transpose(1, 2).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seqlen", [1, 2, 5, 17, 128])
def test_large_magnitudes_do_not_overflow(seqlen: int) -> None:
    q, k, v, d_out = tensors(seqlen, seqlen, dtype=torch.float16)
    given = (q * 5, k * 3, v, d_out)
    assert_follow_the_rule(gradients(*given, causal=True), *given, causal=True, factor=5.0)


def test_gradients_agree_with_those_of_pytorch() -> None:
    given = tensors(1000, 1000, heads=4, kv_heads=4, head_dim=64)
    inputs = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in inputs), is_causal=True)
    expected = torch.autograd.grad(out, inputs, given[3].transpose(1, 2))
    for gradient, other in zip(gradients(*given, causal=True), expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    "view",
    [
        lambda out: out,
        lambda out: out[:, ::2],
        lambda out: out.transpose(1, 2),
        lambda out: out.sum((1, 2)),
        lambda out: out[..., 1:],
    ],
    ids=["whole", "every second row", "transposed", "summed", "odd columns"],
)
def test_gradients_of_out_of_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    q, k, v, _ = tensors(300, 300, head_dim=64)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*inputs, causal=True)
    view(out).square().sum().backward()
    leaf = out.detach().requires_grad_()
    view(leaf).square().sum().backward()
    assert_follow_the_rule(tuple(tensor.grad for tensor in inputs), q, k, v, leaf.grad, causal=True)


def test_packed_gradients_are_those_of_the_parts() -> None:
    q, k, v, d_out = tensors(300, 300, heads=4, kv_heads=4, head_dim=64)
    qkv = torch.stack([q, k, v], dim=2).requires_grad_()
    (packed,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, causal=True), qkv, d_out)
    parts = torch.autograd.grad(flash_attn_func(*qkv.unbind(2), causal=True), qkv, d_out)[0]
    assert torch.equal(packed, parts)


# --- where and when it runs -------------------------------------------------------------------------------------------


def test_a_hundred_backwards_are_equal_beside_other_work() -> None:
    given = tensors(1024, 1024, batch=4, heads=16, kv_heads=4)
    expected = gradients(*given, causal=True)
    noise, other = randn(4096, 4096), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        assert all(map(torch.equal, gradients(*given, causal=True), expected))


def test_a_side_stream_gives_the_same_bits() -> None:
    given = tensors(512, 512)
    expected = gradients(*given, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(*given, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, found, expected))


def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    q, k, v, d_out = tensors(512, 512)
    expected = gradients(q, k, v, d_out)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    out.backward(d_out)  # autograd waits for the stream in the end
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, expected, strict=True))


def test_a_captured_training_step_replays() -> None:
    q, k, v, d_out = tensors(256, 256)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    expected = gradients(*(tensor.detach() for tensor in inputs), d_out, causal=True)
    assert all(map(torch.equal, found, expected))


def test_a_captured_step_of_warm_kernels_replays() -> None:
    warmup(f"1x2x2x96x96x48,{kernel_pass}" for kernel_pass in Pass)
    q, k, v, d_out = tensors(96, 96, batch=1, heads=2, kv_heads=2, head_dim=48)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(attention(*inputs), inputs, d_out)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, gradients(q, k, v, d_out)))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_backward_that_is_not_loaded_is_refused_inside_a_capture() -> None:
    q, k, v, d_out = tensors(77, 77, batch=1, heads=2, kv_heads=2, head_dim=88)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.no_grad():
        attention(q, k, v)
    with pytest.raises(LaunchError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.autograd.grad(attention(*inputs), inputs, d_out)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    given = tuple(tensor.to("cuda:1") for tensor in tensors(128, 128))
    found = gradients(*given, causal=True)
    assert {gradient.device.index for gradient in found} == {1}
    assert torch.cuda.current_device() == 0
    assert_follow_the_rule(found, *given, causal=True)


def test_threads_start_cold_together() -> None:
    given = tensors(190, 190, heads=4, kv_heads=4, head_dim=72)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(gradients, *given) for _ in range(8)]
        results = [call.result() for call in calls]
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for found in results for one, other in zip(found, results[0], strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
def test_a_compiled_step_gives_the_bits_of_the_eager_one() -> None:
    torch.compiler.reset()
    given = tensors(256, 256)
    expected = gradients(*given, causal=True)
    function = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    inputs = [tensor.detach().requires_grad_() for tensor in given[:3]]
    found = torch.autograd.grad(function(*inputs), inputs, given[3])
    assert all(map(torch.equal, found, expected))


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_more_batch_heads_than_a_second_grid_axis_holds() -> None:
    given = tensors(16, 16, batch=17_500, heads=4, kv_heads=4, head_dim=16)  # 70,000 heads
    found = gradients(*given, causal=True)
    for batch in (0, 8_191, 16_384, 17_499):
        one = slice(batch, batch + 1)
        part = tuple(tensor[one] for tensor in given)
        assert_follow_the_rule(tuple(gradient[one] for gradient in found), *part, causal=True)


@causal_or_not
def test_offsets_past_2_to_the_31_elements(causal: bool) -> None:
    """Views whose rows are 2^25 elements apart: row 127 starts past 2^31."""
    rows, stride = 128, 2**25
    storage = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    given = tuple(
        storage.as_strided((1, rows, 1, 64), (rows * stride, stride, 64, 1), offset).copy_(randn(1, rows, 1, 64))
        for offset in (0, 4096, 8192, 12288)
    )
    assert_follow_the_rule(gradients(*given, causal=causal), *given, causal=causal)


def test_gradients_larger_than_2_to_the_31_elements() -> None:
    q, d_out = (torch.zeros(33, 2**15, 32, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q[-1], d_out[-1] = randn(2**15, 32, 64), randn(2**15, 32, 64)
    k, v = randn(33, 16, 32, 64), randn(33, 16, 32, 64)
    found = gradients(q, k, v, d_out)
    last = slice(32, 33)
    part = tuple(tensor[last] for tensor in (q, k, v, d_out))
    assert_follow_the_rule(tuple(gradient[last] for gradient in found), *part, causal=False)


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "heads"), [(256, 4096, 4), (128, 4096, 16), (64, 4096, 16), (128, 2**15, 4), (128, 2**17, 1)]
)
def test_memory_beyond_inputs_and_results_grows_with_rows_alone(head_dim: int, seqlen: int, heads: int) -> None:
    q, k, v, d_out = tensors(seqlen, seqlen, batch=2, heads=heads, kv_heads=heads, head_dim=head_dim)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(attention(*inputs, causal=True), inputs, d_out)
    torch.cuda.synchronize()
    results = q.nbytes + sum(gradient.nbytes for gradient in found)  # out, and the gradients
    rows = 2 * heads * seqlen
    beside = 2 * 4 * rows  # two statistics of the forward and of the backward
    beside += 4 * rows + 4 * rows // 64 + 4 * rows * head_dim  # lse in base 2, a counter for 64 rows, and dq in fp32
    assert torch.cuda.max_memory_allocated() - before <= results + beside + 2**16
