"""attn_mask and dropout in the warp-specialised forward on a Hopper GPU: every seed, repeats, graphs, edges.

`pytest -m gpu -n 0`. Skipped where there is no sm_90.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify
from fa_autotune.evaluation.workload import Workload, bottom_right_diagonal
from fa_autotune.kernels.fast_launch import bind
from fa_autotune.kernels.gpu import live_device
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import Schedule
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.seeds import seed_configs

pytestmark = pytest.mark.gpu

SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
PROGRAMS = 132  # of an H200
REPEATS = 200
Results = tuple[Tensor, ...]
WORDS = [
    "dropout",
    "causal,dropout",
    "bias",
    "causal,bias",
    "bool_mask",
    "causal,bool_mask,dropout,fp16",
    "causal,wide_bias,softcap,sinks",
    "causal,bias,alibi,softcap,sinks,dropout",
    "bias,loose_mask",
    "causal,left=100,bool_mask",
]
KERNELS: list[tuple[str, Schedule, dict[str, KnobValue]]] = [
    ("5x8x4x{n}x{n}x128,causal,dropout", Schedule.PIPELINED, {"BLOCK_N": 128}),
    ("5x8x4x{n}x{n}x128,bias", Schedule.PERSISTENT, {"BLOCK_N": 128, "OWN_OUT": True}),
    ("5x8x8x{n}x{n}x64,causal,bool_mask,dropout", Schedule.PIPELINED, {"PING_PONG": True}),
    ("5x8x8x{n}x{n}x64,wide_bias", Schedule.TILE, {}),
    ("5x8x8x{n}x{n}x64,bool_mask", Schedule.SINGLE, {"CONSUMERS": 1, "BLOCK_N": 128}),
    ("5x8x4x{n}x{n}x64,bias,loose_mask", Schedule.PERSISTENT, {}),
]
every_kernel = pytest.mark.parametrize(("text", "schedule", "knobs"), KERNELS, ids=[text for text, _, _ in KERNELS])


@pytest.fixture(autouse=True)
def hopper() -> None:
    device = live_device(0)
    if device.arch != "sm_90":
        pytest.skip(f"{device.name} is no sm_90")


@cache
def loaded(candidate: Candidate) -> LoadedKernel:
    return load_kernel(candidate, "sm_90", 0)


def make(
    text: str, schedule: Schedule, knobs: dict[str, KnobValue], *, n: int = 1100, seed: int = 3
) -> tuple[LoadedKernel, Workload]:
    """A kernel, and a call of it in which every mask is one of each batch, head and row."""
    problem = AttentionProblem.parse(text.format(n=n))
    config = SPEC.config(SCHEDULE=schedule, **{"CONSUMERS": 2, "BLOCK_N": 64, **knobs})
    assert SPEC.rejection(config, family=problem.family, shape=None, device=live_device(0)) is None
    device = torch.device("cuda", 0)
    workload = seeded_workload(problem, device=device, diagonal=bottom_right_diagonal(problem), seed=seed)
    return loaded(Candidate(family=problem.family, variant=Variant.HOPPER_WS, config=config)), workload


def run(kernel: LoadedKernel, workload: Workload) -> Results:
    outputs = workload.allocate()
    for tensor in outputs:
        tensor.fill_(float("nan"))
    kernel(*workload.arguments(outputs))
    return outputs


def are_same(one: Results, other: Results) -> bool:
    """Bit by bit."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("words", WORDS)
def test_every_seed_passes_every_probe(words: str, head_dim: int) -> None:
    family = AttentionProblem.parse(f"1x2x1x64x64x{head_dim},{words}").family
    if reason := SPEC.supports(family, "sm_90", (3, 6)):
        pytest.skip(reason)
    device = live_device(0)
    for config in seed_configs(SPEC, family, "sm_90"):
        if SPEC.rejection(config, family=family, shape=None, device=device):
            continue
        programs = PROGRAMS if config.SCHEDULE in (Schedule.PERSISTENT, Schedule.PIPELINED) else 0  # type: ignore[union-attr]
        probe_list = probes(
            family,
            block_m=config.BLOCK_M,  # type: ignore[union-attr]
            block_n=config.BLOCK_N,  # type: ignore[union-attr]
            exact_lengths=False,
            programs=programs,
        )
        kernel = loaded(Candidate(family=family, variant=Variant.HOPPER_WS, config=config))
        assert verify(kernel, family, probe_list, torch.device("cuda", 0)).failures == (), config


@every_kernel
def test_many_launches_beside_other_work_give_the_same_bits(
    text: str, schedule: Schedule, knobs: dict[str, KnobValue]
) -> None:
    kernel, workload = make(text, schedule, knobs)
    expected = run(kernel, workload)
    noise, other = torch.randn(2048, 2048, device="cuda").to(torch.bfloat16), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(REPEATS):
        with torch.cuda.stream(other):
            noise @ noise
        assert are_same(run(kernel, workload), expected)


@every_kernel
def test_a_captured_launch_reads_the_mask_and_the_seed_of_its_replay(
    text: str, schedule: Schedule, knobs: dict[str, KnobValue]
) -> None:
    kernel, workload = make(text, schedule, knobs, n=500)
    graph, outputs = torch.cuda.CUDAGraph(), run(kernel, workload)
    family, features = workload.family, workload.features
    tensors = (*workload.inputs, *outputs, *features.tensors(family))
    launch = bind(kernel, tensors, (workload.softmax_scale, workload.diagonal, *features.numbers(family)))
    launch(None, *tensors)
    with torch.cuda.graph(graph):
        launch(None, *tensors)
    _, fresh = make(text, schedule, knobs, n=500, seed=7 if "loose" not in text else 11)
    for name in ("attn_mask", "dropout_seed"):
        if (tensor := getattr(features, name)) is not None:
            tensor.copy_(getattr(fresh.features, name))
    graph.replay()
    torch.cuda.synchronize()
    assert are_same(outputs, run(kernel, workload))


@pytest.mark.parametrize("words", ["bias", "causal,bool_mask", "wide_bias"])
@pytest.mark.parametrize("size", [(1, 1, 1, 300), (5, 1, 1, 300), (1, 8, 300, 300), (5, 8, 1, 300)], ids=str)
def test_a_broadcast_mask_gives_the_bits_of_its_expanded_copy(size: tuple[int, ...], words: str) -> None:
    kernel, workload = make(f"5x8x8x{{n}}x{{n}}x64,{words}", Schedule.PERSISTENT, {}, n=300)
    whole = workload.features.attn_mask
    assert whole is not None
    rows = torch.empty((*size[:3], 304), dtype=whole.dtype, device="cuda")[..., :300]
    rows.copy_(whole[: size[0], : size[1], 5 : 5 + size[2]] if size[2] == 1 else whole[: size[0], : size[1]])
    copied = torch.empty((5, 8, 300, 304), dtype=whole.dtype, device="cuda")[..., :300].copy_(rows.expand(whole.shape))
    found, expected = (
        run(kernel, replace(workload, features=replace(workload.features, attn_mask=mask))) for mask in (rows, copied)
    )
    assert are_same(found, expected)


@pytest.mark.parametrize("words", ["bias", "bias,loose_mask", "wide_bias"])
def test_a_mask_is_not_read_past_its_rows_and_keys(words: str) -> None:
    """NaN lies around it, also in the 16 bytes in which its rows end: nothing of it may reach a result."""
    kernel, workload = make(f"5x8x8x{{n}}x{{n}}x64,{words}", Schedule.PIPELINED, {}, n=299)
    mask = workload.features.attn_mask
    assert mask is not None
    step = mask.stride(3)
    around = torch.full((5, 8, 400, 400 * step), float("nan"), dtype=mask.dtype, device="cuda")
    inside = around[:, :, :299, : 299 * step : step].copy_(mask)
    found = run(kernel, replace(workload, features=replace(workload.features, attn_mask=inside)))
    assert are_same(found, run(kernel, workload))


def test_dropout_takes_the_weights_that_another_variant_takes() -> None:
    kernel, workload = make("2x4x4x{n}x{n}x64,dropout", Schedule.PERSISTENT, {"BLOCK_N": 128}, n=333)
    spec = variant_spec(Pass.FWD, Variant.PORTABLE)
    config = seed_configs(spec, workload.family, "sm_90")[0]
    other = loaded(Candidate(family=workload.family, variant=Variant.PORTABLE, config=config))
    found, expected = run(kernel, workload), run(other, workload)
    torch.testing.assert_close(found[0], expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
