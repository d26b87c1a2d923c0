"""What only a GPU can show: compiled kernels against the reference, streams, graphs, many programs, large offsets.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fa_autotune import attention, warmup
from fa_autotune.errors import LaunchError
from fa_autotune.evaluation.evaluator import Deadlines, LocalEvaluator
from fa_autotune.evaluation.measure import MeasurePolicy
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime, TrialStatus
from fa_autotune.reference.attention import attention_reference, attention_same_precision
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from fa_autotune.space.registry import supported_variants
from fa_autotune.space.seeds import default_config, seed_configs

pytestmark = pytest.mark.gpu

QUICK = MeasurePolicy(warmup_ms=1.0, target_ms=2.0, min_launches=3, max_launches=10, rounds=2, round_ms=1.0)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def assert_follows_the_rule(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """The numerics rule for bshd tensors: at most twice plain torch's error, plus two roundings."""
    q, k, v, out = (tensor.transpose(1, 2) for tensor in (q, k, v, out))
    scale, diagonal = q.shape[3] ** -0.5, k.shape[2] - q.shape[2] if causal else None
    ref, _ = attention_reference(q, k, v, softmax_scale=scale, diagonal=diagonal)
    pt = attention_same_precision(q, k, v, softmax_scale=scale, diagonal=diagonal)
    rounded = ref.to(out.dtype)
    atol = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().max().item()
    assert (out.to(ref.dtype) - ref).abs().max().item() <= 2 * (pt.to(ref.dtype) - ref).abs().max().item() + atol


def family_of(dtype: DType, head_dim: int, head_dim_v: int, causal: bool, access: Access | None) -> AttentionFamily:
    return AttentionFamily(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "access"),
    [
        *[(DType.BFLOAT16, dim, dim, None) for dim in (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 224, 256)],
        *[(DType.FLOAT16, dim, dim, None) for dim in (64, 128)],
        *[(DType.BFLOAT16, dim, dim, None) for dim in (59, 111)],
        (DType.BFLOAT16, 192, 128, None),
        (DType.FLOAT16, 64, 128, Access.ALIGNED),
        (DType.BFLOAT16, 128, 128, Access.ANY),
        (DType.FLOAT32, 64, 64, None),
        (DType.FLOAT32, 128, 128, None),
        (DType.FLOAT32, 59, 59, None),
    ],
)
def test_every_variant_passes_its_probes(
    dtype: DType, head_dim: int, head_dim_v: int, access: Access | None, causal: bool, device: torch.device
) -> None:
    family, spec_device = family_of(dtype, head_dim, head_dim_v, causal, access), live_device(0)
    triton_version = tuple(int(part) for part in live_toolchain().triton.split(".")[:2])
    for spec in supported_variants(family, spec_device.arch, triton_version):
        config = default_config(spec, family, spec_device.arch)
        kernel = load_kernel(Candidate(family=family, variant=spec.variant, config=config), spec_device.arch)
        probe_list = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False)
        assert verify(kernel, family, probe_list, device).failures == (), spec.variant


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_seeds_are_right_and_most_of_them_fit(head_dim: int, causal: bool) -> None:
    problem = AttentionProblem.parse(f"2x8x8x1024x1024x{head_dim}" + (",causal" if causal else ""))
    device = live_device(0)
    candidates = [
        Candidate(family=problem.family, variant=spec.variant, config=config)
        for spec in supported_variants(problem.family, device.arch, (3, 6))
        for config in seed_configs(spec, problem.family, device.arch)
    ]
    with LocalEvaluator(device=device, device_index=0, policy=QUICK) as evaluator:
        statuses = [record.status for record in evaluator.screen(candidates, [problem])]
        assert set(statuses) <= {TrialStatus.OK, TrialStatus.OVER_RESOURCES}
        assert statuses.count(TrialStatus.OK) > len(statuses) / 2
        finalists = evaluator.confirm(candidates[:2], problem)
    assert [record.measurement.rank for record in finalists if record.measurement] != []


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(113, 203), (203, 113), (256, 512), (512, 256), (1023, 1024), (1024, 1023), (1, 239), (799, 3), (2048, 2048)],
)
def test_attention_follows_the_numerics_rule(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = randn(2, seqlen_q, 6, 128), randn(2, seqlen_k, 2, 128), randn(2, seqlen_k, 2, 128)
    assert_follows_the_rule(attention(q, k, v, causal=causal), q, k, v, causal)


def test_attention_agrees_with_sdpa_in_both_layouts() -> None:
    q, k, v = (randn(2, 8, 1000, 64) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    bhsd = attention(q, k, v, causal=True, layout="bhsd")
    bshd = attention(*(tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)), causal=True)
    torch.testing.assert_close(bhsd, expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(bhsd, bshd.transpose(1, 2))


def test_strided_and_misaligned_tensors_after_an_aligned_call() -> None:
    q, k, v = (randn(2, 300, 4, 64) for _ in range(3))
    expected = attention(q, k, v, causal=True)
    fused = torch.stack([q, k, v], dim=2)
    views = [fused[:, :, i] for i in range(3)]
    late = [torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape).copy_(t) for t in (q, k, v)]
    spread = [torch.empty(*t.shape, 2, dtype=t.dtype, device="cuda")[..., 0].copy_(t) for t in (q, k, v)]
    for tensors in (views, late, spread, [q, late[1], spread[2]]):
        torch.testing.assert_close(attention(*tensors, causal=True), expected, atol=2e-2, rtol=2e-2)
    once = k[:1, :, :1].expand(2, 300, 4, 64)
    out = attention(q, once, once)
    assert_follows_the_rule(out, q, once, once, causal=False)


def test_more_batch_heads_than_a_second_grid_axis_holds() -> None:
    q, k, v = (randn(17_500, 16, 4, 16) for _ in range(3))  # 70,000 heads, 16 tokens
    out = attention(q, k, v, causal=True)
    for batch in (0, 8_191, 16_384, 17_499):
        one = slice(batch, batch + 1)
        assert_follows_the_rule(out[one], q[one], k[one], v[one], causal=True)


def test_offsets_past_2_to_the_31_elements() -> None:
    """A view whose rows are 2^25 elements apart: row 127 starts past 2^31."""
    rows, stride = 128, 2**25
    storage = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    q, k, v = (
        storage.as_strided((1, rows, 1, 64), (rows * stride, stride, 64, 1), offset).copy_(randn(1, rows, 1, 64))
        for offset in (0, 4096, 8192)
    )
    for causal in (False, True):
        assert_follows_the_rule(attention(q, k, v, causal=causal), q, k, v, causal)


def test_tensors_larger_than_2_to_the_31_elements() -> None:
    q = randn(1, 16, 64, 64).expand(1, 16, 64, 64)
    big = torch.zeros(33, 2**15, 32, 64, dtype=torch.bfloat16, device="cuda")  # 2^31 + 2^26 elements
    big[-1] = randn(2**15, 32, 64)
    q = randn(33, 16, 32, 64)
    out = attention(q, big, big)
    assert_follows_the_rule(out[-1:], q[-1:], big[-1:], big[-1:], causal=False)


def test_a_side_stream_gives_the_same_bits() -> None:
    q, k, v = (randn(4, 512, 8, 64) for _ in range(3))
    expected = attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attention(q, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_captured_call_replays() -> None:
    q, k, v = (randn(2, 256, 4, 64) for _ in range(3))
    attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
    q.copy_(randn(2, 256, 4, 64))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention(q, k, v, causal=True))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_kernel_that_is_not_loaded_is_refused_inside_a_capture() -> None:
    q, k, v = (randn(1, 77, 2, 72) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="warmup"), torch.cuda.graph(graph):
        attention(q, k, v)
    torch.cuda.synchronize()
    warmup(["1x2x2x77x77x72"])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(q, k, v)


def test_repeated_calls_are_equal_beside_other_work() -> None:
    q, k, v = (randn(4, 1024, 16, 128) for _ in range(3))
    expected = attention(q, k, v, causal=True)
    noise, other = randn(4096, 4096), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        assert torch.equal(attention(q, k, v, causal=True), expected)


def test_threads_start_cold_together() -> None:
    q, k, v = (randn(2, 190, 4, 48) for _ in range(3))
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(attention, q, k, v) for _ in range(8)]
        results = [call.result() for call in calls]
    torch.cuda.synchronize()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    q, k, v = (randn(2, 128, 4, 64).to("cuda:1") for _ in range(3))
    out = attention(q, k, v)
    assert out.device == q.device
    assert_follows_the_rule(out, q, k, v, causal=False)


def test_an_illegal_access_costs_only_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A candidate that writes far out of bounds is a record; the next one is measured in a fresh worker."""
    from dataclasses import replace

    import fa_autotune.evaluation.evaluator as evaluate_module

    problem = AttentionProblem.parse("1x2x2x256x256x64")
    wild = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    sane = PortableFwdConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    plain = evaluate_module.render

    def sabotaged(candidate: Candidate):
        source = plain(candidate)
        if candidate.config != wild:
            return source
        text = source.text.replace("lse_ptrs = lse_ptr +", "lse_ptrs = lse_ptr + (1 << 45) +")
        assert text != source.text
        return replace(source, text=text, digest="feedface", name="fwd_feedface")

    monkeypatch.setattr(evaluate_module, "render", sabotaged)
    candidates = [Candidate(family=problem.family, variant=Variant.PORTABLE, config=config) for config in (wild, sane)]
    with LocalEvaluator(device=live_device(0), device_index=0, policy=QUICK, deadlines=Deadlines()) as evaluator:
        records = [record for one in candidates for record in evaluator.screen([one], [problem])]
    assert [record.status for record in records] == [TrialStatus.CRASHED, TrialStatus.OK]


def test_a_small_problem_is_timed_under_a_graph_and_a_large_one_by_events() -> None:
    device = live_device(0)
    with LocalEvaluator(device=device, device_index=0, policy=QUICK) as evaluator:
        for text, regime in (("1x2x2x128x128x64", Regime.GRAPH), ("4x16x16x4096x4096x64", Regime.EVENTS)):
            problem = AttentionProblem.parse(text)
            spec = supported_variants(problem.family, device.arch, (3, 6))[0]
            config = default_config(spec, problem.family, device.arch)
            candidate = Candidate(family=problem.family, variant=spec.variant, config=config)
            (record,) = evaluator.screen([candidate], [problem])
            assert record.measurement is not None
            assert record.measurement.regime is regime
            assert record.measurement.sm_clock_mhz


def test_memory_is_flat_over_many_kernels(device: torch.device) -> None:
    problem = AttentionProblem.parse("1x2x2x128x128x64")
    spec_device = live_device(0)

    def run(kernel: LoadedKernel) -> None:
        q, k, v = (torch.ones(1, 2, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
        kernel(q, k, v, torch.empty_like(q), torch.empty(1, 2, 128, device=device), 0.125, None)

    run(load_kernel(_portable(problem, 1), spec_device.arch))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for heads in (4, 8, 16):
        run(load_kernel(_portable(problem, heads), spec_device.arch))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def _portable(problem: AttentionProblem, heads: int) -> Candidate:
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, HEADS_PER_GROUP=heads)
    return Candidate(family=problem.family, variant=Variant.PORTABLE, config=config)


def test_a_live_known_gpu_has_the_fingerprint_of_the_table() -> None:
    device = live_device(0)
    known = [spec for spec in KNOWN_DEVICES.values() if spec.name == device.name]
    if not known:
        pytest.skip(f"{device.name} is not in the table")
    assert device.fingerprint == known[0].fingerprint


def test_the_lse_of_a_thousand_steps_is_as_exact_as_of_one() -> None:
    """No step may leave an error in the running sum while the maximum stays: 16 keys a step, 16,384 keys."""
    family = family_of(DType.BFLOAT16, 64, 64, False, None)
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=1)
    kernel = load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), live_device().arch)
    q, k, v = (randn(1, 1, seqlen, 64) for seqlen in (256, 16384, 16384))
    out, lse = torch.empty_like(q), torch.empty(1, 1, 256, device="cuda")
    kernel(q, k, v, out, lse, 0.125, None)
    _, exact = attention_reference(q.double(), k.double(), v.double(), softmax_scale=0.125)
    assert ((lse - exact) / exact).abs().max() < 2e-6
