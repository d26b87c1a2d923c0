"""What lies round the fused backward of packed sequences: workspaces, the kernels beside it, and when it is taken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify, verify_sampled
from fa_autotune.evaluation.workload import Workload
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.passes import FUSED_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import seed_configs
from fa_autotune.space.workspace import (
    STATISTIC_ROWS,
    fused_tile,
)
from kit.winners import dispatcher

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1; test_gpu_fused_varlen.py")
CPU = torch.device("cpu")
NAN = float("nan")


# --- where rows lie ---------------------------------------------------------------------------------------------------


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
    assert verify(kernel, kernel.candidate.family, [probe], CPU, repeated=False).failures == ()


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
    found = probes(family, block_m=block, block_n=16, exact_lengths=False)
    assert verify(kernel, family, found, CPU, repeated=False).failures == ()


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
