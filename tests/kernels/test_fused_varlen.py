"""What lies round the fused backward of packed sequences: workspaces, the kernels beside it, and when it is taken."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify, verify_sampled
from fa_autotune.evaluation.worker_jobs import probes as probes_of_trials
from fa_autotune.evaluation.workload import Workload
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES
from fa_autotune.problem.passes import FUSED_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.packed import packed_lse_and_delta, packed_statistics_of, padded_places
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import rejection, variant_spec
from fa_autotune.space.seeds import seed_configs
from fa_autotune.space.support import wide_supports
from fa_autotune.space.workspace import (
    STATISTIC_ROWS,
    dq_acc_size,
    dq_padding,
    fused_tile,
    packed_dq_acc_size,
    packed_statistics_size,
    packed_turns_size,
    row_blocks,
)
from kit.winners import dispatcher

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1; test_gpu_fused_varlen.py")
CPU = torch.device("cpu")
NAN = float("nan")


def starts_of(*lengths: int) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


# --- where rows lie ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("lengths", [(1,), (0, 0, 5), (128, 127, 129, 0, 1, 64), (300, 0, 0, 2, 2, 2, 1000, 0)])
def test_every_sequence_has_whole_blocks_of_its_own(lengths: tuple[int, ...], block: int) -> None:
    starts, total = starts_of(*lengths), sum(lengths) + 3
    places = padded_places(starts, total, block)
    blocks = [set((places[first:end] // block).tolist()) for first, end in pairwise([*starts.tolist(), total])]
    for number, own in enumerate(blocks):
        assert all(own.isdisjoint(other) for other in blocks[number + 1 :])
        first = int(starts[number])
        if own:
            assert places[first] == (first // block + number) * block
    assert max(places) < row_blocks(total, len(lengths), block) * block
    assert (places.diff() >= 1).all()


@pytest.mark.parametrize("starts", [[0, 500, 20], [-7, 3, 30], [5, 2, 9], [0, 2**31 - 1, 2**31 - 1]])
def test_places_of_starts_that_make_no_sense_are_there_all_the_same(starts: list[int]) -> None:
    places = padded_places(torch.tensor(starts, dtype=torch.int32), 20, 64)
    assert places.min() >= 0
    assert places.max() < row_blocks(20, 2, 64) * 64


def test_statistics_are_made_of_lse_and_delta_and_back() -> None:
    starts = starts_of(130, 0, 7)
    lse, delta = torch.randn(1, 3, 140), torch.randn(1, 3, 140)
    lse[:, :, 4] = lse[:, :, 137:] = float("-inf")
    delta[:, :, 137:] = 0.0
    statistics = packed_statistics_of(starts, lse, delta)
    assert tuple(statistics.shape) == packed_statistics_size(3, 3, 140)
    found = packed_lse_and_delta(starts, statistics, 140)
    torch.testing.assert_close(found[0], lse)
    assert torch.equal(found[1], delta)


def test_workspaces_have_room_for_every_sequence_and_one_more() -> None:
    call = AttentionProblem.parse("8x4x2x1024x1024x64,varlen")
    padded = replace(call, family=replace(call.family, varlen=False))
    assert packed_turns_size(4, 8, 8 * 1024) == (4, (64 + 8 + 1) * 2)
    assert packed_dq_acc_size(call.family, 4, 8, 8192)[0] == 4 * (64 + 9) * (128 * 64 // 256)
    assert dq_padding(call.family, call.shape) == 73 / 64
    assert dq_padding(padded.family, padded.shape) == 1.0
    assert dq_acc_size(padded.family, padded.shape)[0] == 4 * 64 * 32


# --- the kernels before and after -------------------------------------------------------------------------------------


def kernel_of(text: str, number: int = 0) -> LoadedKernel:
    family = AttentionProblem.parse(f"1x2x1x64x64x{text}").family
    spec = variant_spec(family.kernel_pass, Variant.PORTABLE)
    config = seed_configs(spec, family, "interpreter")[number]
    return load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(("text", "number"), [
    ("24,varlen,bwd_preprocess", 3), ("24,any,fp16,varlen,bwd_preprocess", 0),
    ("40,causal,left=3,varlen,bwd_postprocess", 0), ("192,any,varlen,bwd_postprocess", 1),
])  # fmt: skip
def test_kernels_beside_the_fused_one_know_each_sequence(text: str, number: int) -> None:
    """Two blocks of rows, none, few; rows without a key, keys without a row, and rows of no sequence that hold NaN."""
    kernel = kernel_of(text, number)
    sequences = Sequences(lengths_q=(200, 0, 5, 20, 0), lengths_k=(190, 4, 0, 31, 0), unused_q=9, unused_k=2)
    shape = replace(AttentionProblem.parse("5x2x1x200x190x24").shape, window_left=3 if "left" in text else 0)
    probe = Probe(shape=shape, sequences=sequences, seed=1)
    assert verify(kernel, kernel.candidate.family, [probe], CPU).failures == ()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24,varlen,bwd_preprocess", 3),
        ("40,causal,left=3,varlen,bwd_postprocess", 0),
        *(
            (text, number)
            for text, number in [
                ("40,any,fp16,varlen,bwd_preprocess", 0), ("64,varlen,bwd_preprocess", 1),
                ("128,varlen,bwd_postprocess", 0), ("192,left=3,varlen,bwd_postprocess", 1),
                ("40,any,fp16,causal,varlen,bwd_postprocess", 0), ("256,causal,varlen,bwd_postprocess", 0),
            ]
        ),
    ],
)  # fmt: skip
def test_kernels_beside_the_fused_one_pass_every_probe(text: str, number: int) -> None:
    kernel = kernel_of(text, number)
    family = kernel.candidate.family
    block = STATISTIC_ROWS if family.kernel_pass is Pass.BWD_PREPROCESS else fused_tile(family).block_m
    assert verify(kernel, family, probes(family, block_m=block, block_n=16, exact_lengths=False), CPU).failures == ()


def small_workload(text: str, **changes: Any) -> Workload:
    problem = AttentionProblem.parse(f"2x2x1x10x10x{text}")
    workload = seeded_workload(problem, device=CPU, diagonal=0)
    return replace(workload, features=replace(workload.features, **changes))


@interpreted
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(("starts", "falls"), [([0, 10, 20], 0), ([0, 20, 19], 1), ([-7, 3, 2**31 - 1], 0)])
def test_the_preprocessing_says_whether_a_sequence_ends_before_it_starts(
    side: str, starts: list[int], falls: int
) -> None:
    workload = small_workload("24,varlen,bwd_preprocess", **{side: torch.tensor(starts, dtype=torch.int32)})
    statistics, turns = workload.allocate()
    kernel_of("24,varlen,bwd_preprocess")(*workload.arguments((statistics, turns)))
    assert turns[0, -1] == falls
    assert turns.flatten().count_nonzero() == falls


@interpreted
@pytest.mark.parametrize("starts", [[0, 500, 20], [-7, 3, 30], [5, 2, 9], [0, 2**31 - 1, 2**31 - 1]])
@pytest.mark.parametrize("text", ["24,varlen,bwd_preprocess", "24,causal,varlen,bwd_postprocess"])
def test_starts_that_make_no_sense_make_no_kernel_touch_other_memory(text: str, starts: list[int]) -> None:
    workload = small_workload(text, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))
    buffers = [
        torch.full((3, *output.size), NAN if output.dtype.is_floating_point else -7, dtype=output.dtype)
        for output in workload.outputs
    ]
    kernel_of(text)(*workload.arguments([buffer[1] for buffer in buffers]))
    for buffer in buffers:
        around = buffer[[0, 2]]
        assert (around.isnan() if around.is_floating_point() else around == -7).all()


@interpreted
def test_sampled_checks_see_what_the_kernel_after_does() -> None:
    problem = AttentionProblem.parse("3x2x1x20x24x24,causal,varlen,bwd_postprocess")
    workload = seeded_workload(problem, device=CPU, diagonal=0)
    kernel = kernel_of("24,causal,varlen,bwd_postprocess")

    def wrong(*values: Any) -> None:
        kernel(*values)
        values[1][:, :, 43] += 1.0

    for run, is_right in ((kernel, True), (wrong, False)):
        report = verify_sampled(run, problem, workload.inputs, workload.softmax_scale, workload.features)
        assert report.passed is is_right


# --- problems, and the choice of a way --------------------------------------------------------------------------------


def test_the_passes_of_the_fused_way_know_sequences_and_only_they_do_in_their_keys() -> None:
    call = AttentionProblem.parse("8x32x8x2048x1024x128,causal,left=99,softcap,sinks,varlen")
    for kernel_pass in FUSED_BACKWARD:
        problem = call.for_pass(kernel_pass)
        assert problem.family.varlen
        assert (problem.shape.batch_size, problem.shape.seqlen_q) == (8, 2048)
        assert AttentionProblem.from_key(problem.key) == problem == AttentionProblem.parse(problem.label)
    before = call.for_pass(Pass.BWD_PREPROCESS)
    assert before == AttentionProblem.parse("8x32x32x2048x2048x128,varlen,bwd_preprocess")
    assert call.for_pass(Pass.BWD_POSTPROCESS).family.feature_numbers == ("left_diagonal",)
    padded = AttentionProblem.parse("8x32x8x2048x1024x128,causal").for_pass(Pass.BWD_PREPROCESS)
    assert "varlen" not in padded.key


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("8x16x16x2048x2048x128,causal", BackwardWay.FUSED),
        ("16x16x16x1024x1024x64,causal,sinks", BackwardWay.FUSED),
        ("8x16x16x2048x2048x256", BackwardWay.FUSED),
        ("512x16x16x128x128x64", BackwardWay.SPLIT),  # every sequence would be padded to as much again
        ("8x16x16x2048x2048x128,causal,alibi", BackwardWay.SPLIT),
    ],
)
def test_untuned_calls_of_long_sequences_take_the_fused_way(text: str, way: BackwardWay) -> None:
    assert dispatcher().backward_choice(AttentionProblem.parse(f"{text},varlen")).way is way


def test_statistics_that_a_descriptor_does_not_address_are_refused() -> None:
    family = AttentionProblem.parse("1x1x1x64x64x8,varlen,bwd_fused").family
    config = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WS).config()
    candidate = Candidate(family=family, variant=Variant.HOPPER_WS, config=config)
    shapes = [AttentionProblem.parse(f"{batch}x128x128x4096x64x8").shape for batch in (64, 2048)]
    small, large = (rejection(candidate, shape, KNOWN_DEVICES["h200"]) for shape in shapes)
    assert small is None
    assert large is not None
    assert (large.constraint, "lse and delta in a row" in large.reason) == ("addressable_dq", True)


def test_a_window_that_spills_in_the_wide_kernel_is_refused_with_the_reason() -> None:
    window = AttentionProblem.parse("1x2x1x64x64x256,causal,left=9,varlen,bwd_fused").family
    reason = wide_supports(window, "sm_90", (3, 6))
    assert reason is not None
    assert "both edges of a window spill above head_dim 192" in reason
    assert wide_supports(replace(window, varlen=False), "sm_90", (3, 6)) is None


def test_trials_check_programs_that_wait_for_one_another() -> None:
    family = AttentionProblem.parse("1x2x1x64x64x64,varlen,bwd_fused").family
    found = probes_of_trials(family, block_m=128, block_n=128, exact_lengths=False, programs=132)
    last = found[-1]
    assert last.sequences == Sequences(lengths_q=(513, 0, 383), lengths_k=(639, 3, 515))
    lengths = zip(last.sequences.lengths_q, last.sequences.lengths_k, strict=True)
    busy_blocks = sum(-(-keys // 128) for rows, keys in lengths if rows)
    assert busy_blocks * last.shape.num_kv_heads > 132
