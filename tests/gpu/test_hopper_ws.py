"""The warp-specialised forward on a Hopper GPU: values, edges, many tiles for each program, streams, graphs, repeats.

`pytest -m gpu -n 0`. Gluon has no interpreter, so nothing else runs these kernels. Skipped where there is no sm_90.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.database import SessionKind, TuningDatabase
from fa_autotune.dispatch import loaded_kernels as live_kernels
from fa_autotune.dispatch.decision import Origin
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot, load_snapshot
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels import scratch
from fa_autotune.kernels.fast_launch import bind
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.kernels.render import render
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.reference.attention import attention_reference
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.constraints import Rejected
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.seeds import seed_configs
from kit.attention_calls import forget_plans
from kit.tuning_samples import begin, confirmed, ok_record

pytestmark = pytest.mark.gpu

SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
PROGRAMS = 132  # of an H200; on a GPU with fewer SMs each has more tiles
REPEATS = 1000
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, and at the end tile counters that are 0 again."""
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


@pytest.fixture(autouse=True)
def zero_counters(hopper: None):
    yield
    torch.cuda.synchronize()
    assert not any(chunk.any() for chunk in scratch._chunks), "a tile counter was left at another value than 0"


def make_candidate(
    schedule: Schedule,
    head_dims: tuple[int, int] = (128, 128),
    *,
    causal: bool = True,
    dtype: DType = DType.BFLOAT16,
    **knobs: KnobValue,
) -> Candidate:
    family = AttentionFamily(
        dtype=dtype, head_dim=head_dims[0], head_dim_v=head_dims[1], bounded_right=causal, access=Access.TMA
    )
    shared = {"SCHEDULE": schedule, "CONSUMERS": 1 if schedule is Schedule.SINGLE else 2, "BLOCK_N": 64, **knobs}
    candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=SPEC.config(**shared))
    rejected = rejection_of(candidate)
    assert rejected is None, rejected
    return candidate


def rejection_of(candidate: Candidate) -> Rejected | None:
    return SPEC.rejection(candidate.config, family=candidate.family, shape=None, device=live_device(0))


@cache
def loaded(candidate: Candidate) -> LoadedKernel:
    return load_kernel(candidate, "sm_90", 0)


def failures(candidate: Candidate, probe_list: list[Probe]) -> tuple[str, ...]:
    """What the numerics rule, the canaries, the lse and the second launch say."""
    return verify(loaded(candidate), candidate.family, probe_list, torch.device("cuda", 0)).failures


def make_shape(seqlen_q: int, seqlen_k: int, *, batch: int = 2, heads: int = 4, group: int = 1) -> AttentionShape:
    return AttentionShape(
        batch_size=batch, num_q_heads=heads, num_kv_heads=heads // group, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )


def make_inputs(
    candidate: Candidate,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (batch, heads, seqlen, head_dim)."""
    torch.manual_seed(seed)
    family = candidate.family
    dtype = getattr(torch, family.dtype.value)
    return (
        torch.randn(batch, heads, seqlen_q, family.head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, seqlen_k, family.head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, seqlen_k, family.head_dim_v, device="cuda").to(dtype),
    )


def make_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Poisoned out and lse."""
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    return out, torch.full(q.shape[:3], float("nan"), device=q.device)


def run(candidate: Candidate, q: Tensor, k: Tensor, v: Tensor, diagonal: int | None = None) -> tuple[Tensor, Tensor]:
    """Poisoned outputs filled by one launch; a causal one without a diagonal is bottom-right."""
    if diagonal is None and candidate.family.bounded_right:
        diagonal = k.shape[2] - q.shape[2]
    out, lse = make_outputs(q, v)
    loaded(candidate)(q, k, v, out, lse, q.shape[3] ** -0.5, diagonal)
    return out, lse


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def are_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Bit by bit: −inf and NaN are the same as themselves."""
    return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in zip(one, other, strict=True))


KERNELS: list[tuple[Schedule, tuple[int, int], dict[str, KnobValue]]] = [
    (Schedule.SINGLE, (64, 64), {"BLOCK_N": 128}),
    (Schedule.SINGLE, (128, 128), {"num_stages": 3}),
    (Schedule.TILE, (64, 64), {"CONSUMERS": 3, "BLOCK_N": 128, "PING_PONG": True}),
    (Schedule.TILE, (128, 128), {"BLOCK_N": 128}),
    (Schedule.TILE, (256, 256), {"PING_PONG": True}),
    (Schedule.TILE, (96, 192), {"num_stages": 3}),
    (Schedule.PERSISTENT, (64, 64), {"CONSUMERS": 3, "PING_PONG": True, "num_stages": 4}),
    (Schedule.PERSISTENT, (128, 128), {"BLOCK_N": 128, "PING_PONG": True}),
    (Schedule.PERSISTENT, (192, 192), {}),
    (Schedule.PERSISTENT, (256, 256), {"PING_PONG": True}),
    (Schedule.PERSISTENT, (80, 256), {"HEADS_PER_GROUP": 4}),
    (Schedule.PIPELINED, (64, 64), {"BLOCK_N": 128, "num_stages": 3}),
    (Schedule.PIPELINED, (96, 96), {"BLOCK_N": 128, "PING_PONG": True}),
    (Schedule.PIPELINED, (128, 128), {"BLOCK_N": 128}),
    (Schedule.PIPELINED, (128, 128), {"BLOCK_N": 64, "num_stages": 3, "PING_PONG": True}),
    (Schedule.PIPELINED, (192, 128), {}),
    (Schedule.PERSISTENT, (128, 128), {"BLOCK_N": 128, "OWN_OUT": True}),
    (Schedule.PERSISTENT, (64, 64), {"CONSUMERS": 3, "BLOCK_N": 128, "PING_PONG": True, "OWN_OUT": True}),
]
every_kernel = pytest.mark.parametrize(
    ("schedule", "head_dims", "knobs"), KERNELS, ids=lambda value: "" if isinstance(value, dict) else str(value)
)
COUNTED = [case for case in KERNELS if case[0] in (Schedule.PERSISTENT, Schedule.PIPELINED)]
every_counted_kernel = pytest.mark.parametrize(
    ("schedule", "head_dims", "knobs"), COUNTED, ids=lambda value: "" if isinstance(value, dict) else str(value)
)

# --- values -----------------------------------------------------------------------------------------------------------

LENGTHS = [
    (1, 1), (1, 300), (300, 1), (64, 64), (63, 129), (129, 63), (128, 128), (127, 513), (513, 127), (200, 256),
    (192, 384), (384, 192), (1023, 1024), (1024, 1023), (640, 640),
]  # fmt: skip


@both_masks
@every_kernel
def test_ragged_lengths_both_ways_and_shared_heads_follow_the_numerics_rule(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool
) -> None:
    """seqlen_q > seqlen_k leaves rows, and for these blocks whole tiles, that see no key."""
    candidate = make_candidate(schedule, head_dims, causal=causal, **knobs)
    probe_list = [
        Probe(shape=make_shape(*lengths, group=group), top_left=top_left, seed=group)
        for lengths, group, top_left in product(LENGTHS, (1, 4), (False, True) if causal else (False,))
    ]
    assert failures(candidate, probe_list) == ()


@both_masks
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("schedule", Schedule)
def test_both_dtypes_and_large_scores(schedule: Schedule, dtype: DType, causal: bool) -> None:
    candidate = make_candidate(schedule, (64, 64), dtype=dtype, causal=causal)
    probe_list = [Probe(shape=make_shape(257, 300, group=2), scale=scale) for scale in (0.01, 1.0, 4.0)]
    assert failures(candidate, probe_list) == ()


@both_masks
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 80, 112, 160, 200, 224, 256])
def test_any_head_dim_of_whole_vectors(head_dim: int, causal: bool) -> None:
    candidate = make_candidate(Schedule.PERSISTENT, (head_dim, head_dim), causal=causal)
    assert failures(candidate, [Probe(shape=make_shape(300, 333, group=2))]) == ()


@both_masks
@every_counted_kernel
def test_several_tiles_for_each_program(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool
) -> None:
    """With loops over masked blocks of no, one and more trips, beside tiles that see nothing: verify's own probes."""
    candidate = make_candidate(schedule, head_dims, causal=causal, **knobs)
    config = candidate.config
    probe_list = probes(
        candidate.family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False, programs=PROGRAMS
    )
    assert failures(candidate, probe_list) == ()


@pytest.mark.parametrize(
    ("schedule", "knobs"),
    [
        (Schedule.TILE, {"BLOCK_N": 128}),
        (Schedule.PERSISTENT, {"BLOCK_N": 128}),
        (Schedule.PIPELINED, {"BLOCK_N": 128}),
        (Schedule.PIPELINED, {"BLOCK_N": 64}),
        (Schedule.PERSISTENT, {"BLOCK_N": 64, "CONSUMERS": 3}),
    ],
)
@pytest.mark.parametrize("offset", [-130, -65, -64, -1, 0, 1, 63, 64, 127, 128, 500])
def test_every_place_of_the_diagonal_in_a_block(schedule: Schedule, knobs: dict, offset: int) -> None:
    """So that a tile has one to four masked blocks, and programs go from tiles with some to tiles with others."""
    candidate = make_candidate(schedule, (64, 64), **knobs)
    probe_list = [Probe(shape=make_shape(768, 768 + offset, batch=4, heads=PROGRAMS // 4), seed=offset + 200)]
    assert failures(candidate, probe_list) == ()


@both_masks
@every_kernel
def test_exact_lengths(schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool) -> None:
    candidate = make_candidate(schedule, head_dims, causal=causal, EXACT_LENGTHS=True, **knobs)
    config = candidate.config
    probe_list = probes(
        candidate.family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=True, programs=PROGRAMS
    )
    assert failures(candidate, probe_list) == ()


@both_masks
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_seed_is_right(head_dim: int, causal: bool) -> None:
    family = make_candidate(Schedule.TILE, (head_dim, head_dim), causal=causal).family
    for config in seed_configs(SPEC, family, "sm_90"):
        candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=config)
        probe_list = probes(
            family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=False, programs=PROGRAMS
        )
        assert failures(candidate, probe_list) == (), config


@every_kernel
def test_rows_that_see_no_key_give_0_and_minus_infinity(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict
) -> None:
    candidate = make_candidate(schedule, head_dims, **knobs)
    q, k, v = make_inputs(candidate, 700, 100)  # rows 0 … 599 see nothing: several whole tiles, and part of one
    out, lse = run(candidate, q, k, v)
    assert not out[:, :, :600].any()
    assert (lse[:, :, :600] == float("-inf")).all()
    _, expected = attention_reference(q, k, v, softmax_scale=q.shape[3] ** -0.5, diagonal=-600)
    torch.testing.assert_close(lse[:, :, 600:], expected[:, :, 600:], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(out).all()


# --- memory -----------------------------------------------------------------------------------------------------------


@both_masks
@every_kernel
def test_both_layouts_give_the_same_bits(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool
) -> None:
    candidate = make_candidate(schedule, head_dims, causal=causal, **knobs)
    q, k, v = make_inputs(candidate, 333, 444)
    expected = run(candidate, q, k, v)
    views = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    out, lse = make_outputs(q, v)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    loaded(candidate)(*views, out, lse, q.shape[3] ** -0.5, 111 if causal else None)
    assert are_same((out, lse), expected)


@pytest.mark.parametrize("schedule", Schedule)
def test_a_slice_of_packed_tensors_is_read_where_it_lies(schedule: Schedule) -> None:
    candidate = make_candidate(schedule, (64, 64))
    packed = torch.randn(2, 500, 3, 4, 64, device="cuda").to(torch.bfloat16)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    copies = [view.contiguous() for view in views]
    assert are_same(run(candidate, *views), run(candidate, *copies))


@both_masks
@every_kernel
def test_nan_past_the_keys_does_not_leak(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool
) -> None:
    """K and V as the front of a longer cache."""
    candidate = make_candidate(schedule, head_dims, causal=causal, **knobs)
    q, k, v = make_inputs(candidate, 257, 333)
    expected = run(candidate, q, k, v)
    longer = [torch.full((2, 2, 600, t.shape[3]), float("nan"), dtype=t.dtype, device="cuda") for t in (k, v)]
    for cache_, tensor in zip(longer, (k, v), strict=True):
        cache_[:, :, :333] = tensor
    assert are_same(run(candidate, q, *(cache_[:, :, :333] for cache_ in longer)), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@every_kernel
def test_what_lies_past_the_visible_range_does_not_leak(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, bad: float
) -> None:
    candidate = make_candidate(schedule, head_dims, **knobs)
    q, k, v = make_inputs(candidate, 200, 500)
    expected = run(candidate, q, k, v, diagonal=0)
    for tensor in (k, v):
        tensor[:, :, 200:] = bad
    found = run(candidate, q, k, v, diagonal=0)
    assert are_same(found, expected)
    assert torch.isfinite(found[0]).all()


# --- repeats ----------------------------------------------------------------------------------------------------------


def repeated(candidate: Candidate, *, beside: bool) -> int:
    """How many of many launches differ from the first in any bit; every program has several tiles."""
    q, k, v = make_inputs(candidate, 1100, 1100, batch=4, heads=32, kv_heads=8)
    expected = run(candidate, q, k, v)
    out, lse = make_outputs(q, v)
    diagonal = 0 if candidate.family.bounded_right else None
    launch = bind(loaded(candidate), (q, k, v, out, lse), (q.shape[3] ** -0.5, diagonal))
    different = torch.zeros((), dtype=torch.int32, device="cuda")
    noise, other = torch.randn(2048, 2048, device="cuda").to(torch.bfloat16), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(REPEATS):
        if beside:
            with torch.cuda.stream(other):
                noise @ noise
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        launch(None, q, k, v, out, lse)
        changed = (bits(out) != bits(expected[0])).any() | (bits(lse) != bits(expected[1])).any()
        different += changed
    torch.cuda.synchronize()
    return int(different)


@both_masks
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside other work"])
@pytest.mark.parametrize(
    ("schedule", "head_dims", "knobs"),
    [KERNELS[0], KERNELS[2], KERNELS[7], KERNELS[9], KERNELS[12], KERNELS[13], KERNELS[15]],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_a_thousand_launches_give_the_same_bits(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, beside: bool, causal: bool
) -> None:
    assert repeated(make_candidate(schedule, head_dims, causal=causal, **knobs), beside=beside) == 0


# --- streams and graphs -----------------------------------------------------------------------------------------------


@every_counted_kernel
def test_two_streams_at_once_have_a_counter_each(schedule: Schedule, head_dims: tuple[int, int], knobs: dict) -> None:
    candidate = make_candidate(schedule, head_dims, **knobs)
    calls_of = [make_inputs(candidate, 900, 900, batch=2, heads=16, kv_heads=4, seed=seed) for seed in (1, 2)]
    expected = [run(candidate, *inputs) for inputs in calls_of]
    streams = [torch.cuda.Stream() for _ in calls_of]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for _ in range(50):
        for place, (stream, inputs) in enumerate(zip(streams, calls_of, strict=True)):
            with torch.cuda.stream(stream):
                results[place].append(run(candidate, *inputs))
    torch.cuda.synchronize()
    for found, one in zip(results, expected, strict=True):
        assert all(are_same(result, one) for result in found)


@both_masks
@every_counted_kernel
def test_a_captured_launch_replays_with_a_counter_of_its_own(
    schedule: Schedule, head_dims: tuple[int, int], knobs: dict, causal: bool
) -> None:
    candidate = make_candidate(schedule, head_dims, causal=causal, **knobs)
    q, k, v = make_inputs(candidate, 900, 900, batch=4, heads=16, kv_heads=4)
    run(candidate, q, k, v)
    out, lse = make_outputs(q, v)
    launch = bind(loaded(candidate), (q, k, v, out, lse), (q.shape[3] ** -0.5, 0 if causal else None))
    launch(None, q, k, v, out, lse)
    graph, again = torch.cuda.CUDAGraph(), make_outputs(q, v)
    with torch.cuda.graph(graph):
        launch(None, q, k, v, out, lse)
        launch(None, q, k, v, *again)
    side = torch.cuda.Stream()
    for seed in range(10):
        fresh = make_inputs(candidate, 900, 900, batch=4, heads=16, kv_heads=4, seed=seed)
        for tensor, value in zip((q, k, v), fresh, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            direct = run(candidate, q, k, v)  # at the same time
        torch.cuda.synchronize()
        assert are_same((out, lse), direct)
        assert are_same(again, direct)


def test_many_graphs_keep_their_counters() -> None:
    """More captured launches than one piece of memory has counters for."""
    candidate = make_candidate(Schedule.PERSISTENT, (64, 64))
    q, k, v = make_inputs(candidate, 300, 300, batch=1)
    expected = run(candidate, q, k, v)
    out, lse = make_outputs(q, v)
    launch = bind(loaded(candidate), (q, k, v, out, lse), (0.125, 0))
    launch(None, q, k, v, out, lse)
    graphs = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(scratch.CHUNK_SLOTS // 2):
                launch(None, q, k, v, out, lse)
        graphs.append(graph)
    torch.cuda.empty_cache()
    poison = torch.full((2**22,), 7, dtype=torch.int32, device="cuda")  # where freed memory would be handed out again
    for graph in graphs:
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert are_same((out, lse), expected)
    assert (poison == 7).all()


# --- through the front door -------------------------------------------------------------------------------------------


def use(load: Callable[[], Snapshot], monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """Have `attention` choose from these winners only."""
    dispatcher = Dispatcher(
        device=live_device(0),
        triton_version=live_toolchain().triton,
        load=load,
        store_misses=lambda misses: None,
    )
    forget_plans(monkeypatch)
    monkeypatch.setattr(live_kernels, "_dispatchers", {0: dispatcher})
    return dispatcher


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("schedule", Schedule)
def test_attention_runs_a_stored_winner(
    schedule: Schedule, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = AttentionProblem.parse("2x8x2x700x700x64,causal")
    candidate = make_candidate(schedule, (64, 64))
    assert candidate.family == problem.family
    digest, path = render(candidate).digest, tmp_path / "tuning.db"
    with TuningDatabase(path) as database:
        here = {"device": live_device(0), "toolchain": live_toolchain()}
        tune = begin(database, **here)
        database.save_trial(tune, replace(ok_record(digest=digest), candidate=candidate, problem=problem))
        confirm = begin(database, SessionKind.CONFIRM, parent_id=tune, **here)
        database.save_trial(confirm, replace(confirmed(0.9, 1, digest=digest), candidate=candidate, problem=problem))
    decision = use(lambda: load_snapshot(path, []), monkeypatch).decide(problem)
    assert (decision.origin, decision.candidate, decision.stale) == (Origin.EXACT, candidate, False)

    q, k, v = make_inputs(candidate, 700, 700, heads=8, kv_heads=2)
    expected = run(candidate, q, k, v)
    given = [tensor if layout == "bhsd" else tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    with torch.no_grad():
        for _ in range(3):  # bound, then from the plan
            out, lse = attention(*given, causal=True, layout=layout, return_lse=True)
            out = out if layout == "bhsd" else out.transpose(1, 2)
            assert are_same((out, lse), expected)


def test_gradients_flow_through_a_warp_specialised_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves for the backward (lse) is what the backward takes."""
    decision = use(lambda: Snapshot(rows=()), monkeypatch).decide(AttentionProblem.parse("2x8x8x512x512x128,causal"))
    assert decision.candidate.variant is Variant.HOPPER_WS
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 512, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, causal=True)
    views = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True).transpose(1, 2)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
