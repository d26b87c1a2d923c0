"""What is expected of each pass, from plain torch: of whole calls, of stretches of them, and of unseen keys."""

from dataclasses import replace

import pytest
import torch

from fa_autotune.evaluation.expectations import ExpectedLse, ExpectedNumbers, WorstErrors
from fa_autotune.evaluation.numerics import (
    BIAS_ERROR,
    LENIENT_GRADIENT_FACTOR,
    TANH_ERROR,
    blind_rows,
    expectations_of,
    expected_of,
    expected_stretch,
    parts_of,
)
from fa_autotune.evaluation.probes import Probe
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.workload import Workload, bottom_right_diagonal
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import attention_reference

CPU = torch.device("cpu")
CALL = AttentionProblem.parse("2x4x2x10x12x16x24,causal")
NAMES = {
    Pass.FWD: ["out", "lse"],
    Pass.BWD_DELTA: ["delta"],
    Pass.BWD_DKDV: ["dk", "dv"],
    Pass.BWD_DQ: ["dq"],
    Pass.BWD_PREPROCESS: ["statistics", "turns"],
    Pass.BWD_FUSED: ["dk", "dv", "dq"],
    Pass.BWD_POSTPROCESS: ["dq"],
}


def workload_of(problem: AttentionProblem) -> Workload:
    return seeded_workload(problem, device=CPU, diagonal=bottom_right_diagonal(problem))


def numbers_of(problem: AttentionProblem) -> list[ExpectedNumbers]:
    workload = workload_of(problem)
    return [one for one in expectations_of(workload, workload.inputs) if isinstance(one, ExpectedNumbers)]


@pytest.mark.parametrize("kernel_pass", Pass)
def test_every_output_of_a_pass_is_expected_in_its_order(kernel_pass: Pass) -> None:
    workload = workload_of(CALL.for_pass(kernel_pass))
    expected = expectations_of(workload, workload.inputs)
    kinds = ["lse" if isinstance(one, ExpectedLse) else getattr(one, "name", None) for one in expected]
    assert [kind or name for kind, name in zip(kinds, NAMES[kernel_pass], strict=True)] == NAMES[kernel_pass]


@pytest.mark.parametrize("kernel_pass", [Pass.FWD, Pass.BWD_DELTA, Pass.BWD_DQ, Pass.BWD_DKDV])
def test_a_stretch_is_expected_to_be_that_part_of_all(kernel_pass: Pass) -> None:
    workload = workload_of(CALL.for_pass(kernel_pass))
    whole = expectations_of(workload, workload.inputs)
    head = 1
    for one, part in zip(whole, expected_stretch(workload, 1, head, 3, 7), strict=True):
        torch.testing.assert_close(part.ref, one.ref[1:2, head : head + 1, 3:7])


def test_keys_that_no_row_sees_hold_nan_and_results_do_not() -> None:
    shape = AttentionProblem.parse("1x2x2x8x40x16").shape
    workload, expected = expected_of(CALL.family, Probe(shape=shape, top_left=True), "cpu")
    q, k, v = workload.inputs
    assert q.isfinite().all()
    for tensor in (k, v):
        assert tensor.isnan().all(-1).all(0).all(0).tolist() == [key >= 8 for key in range(40)]
    assert all(one.ref.isfinite().all() for one in expected)


def test_rows_of_no_sequence_hold_nan() -> None:
    family = AttentionProblem.parse("1x2x2x8x8x16,causal,varlen").family
    sequences = Sequences(lengths_q=(4, 0), lengths_k=(6, 3), unused_q=2, unused_k=1)
    shape = AttentionProblem.parse("2x2x2x4x6x16").shape
    workload, _ = expected_of(family, Probe(shape=shape, sequences=sequences), "cpu")
    q, k, _ = (tensor.isnan().all(-1).all(0).all(0) for tensor in workload.inputs)
    assert q.nonzero().flatten().tolist() == [4, 5]
    assert k.nonzero().flatten().tolist() == [6, 7, 8, 9]  # keys of a sequence without rows, and of none


def test_a_probe_is_made_once() -> None:
    probe = Probe(shape=CALL.shape, seed=5)
    assert expected_of(CALL.family, probe, "cpu") is expected_of(CALL.family, replace(probe), "cpu")


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("1x2x1x4x4x16,bwd_dq", 2.0),
        ("1x2x1x4x4x16,softcap,bwd_dq", LENIENT_GRADIENT_FACTOR),
        ("1x2x1x4x4x256,bwd_dkdv", LENIENT_GRADIENT_FACTOR),  # sums over the heads of a group
        ("1x2x2x4x4x256,bwd_dkdv", 2.0),
        ("1x2x1x4x4x256,fp16,bwd_dkdv", 2.0),
    ],
)
def test_gradients_may_err_by_more_where_caps_or_wide_groups_do(text: str, factor: float) -> None:
    assert {one.factor for one in numbers_of(AttentionProblem.parse(text))} == {factor}


def test_an_lse_may_be_off_by_what_a_cap_and_a_bias_are_rounded_to() -> None:
    def tolerance(words: str) -> float:
        workload = workload_of(AttentionProblem.parse(f"1x2x2x8x90x16{words}"))
        return expectations_of(workload, workload.inputs)[1].tolerance

    assert tolerance("") == 1e-5
    assert tolerance(",softcap") == pytest.approx(1e-5 + 2.0 * TANH_ERROR)
    slopes = workload_of(AttentionProblem.parse("1x2x2x8x90x16,alibi")).features.alibi_slopes
    assert tolerance(",alibi") == pytest.approx(1e-5 + BIAS_ERROR * 90 * slopes.max().item())
    assert tolerance(",fp32,tf32") > 1e-4  # the operands are cut


def test_rows_whose_only_score_is_a_sink_are_zero_and_their_lse_is_the_sink() -> None:
    problem = AttentionProblem.parse("1x2x2x6x3x16,causal,sinks")
    workload = workload_of(problem)
    out, lse = expectations_of(workload, workload.inputs)
    assert out.zero[0, 0].tolist() == [True] * 3 + [False] * 3
    assert torch.equal(lse.ref[0, :, :3], workload.features.sinks[0][:, None].expand(2, 3))
    assert blind_rows(workload).tolist() == out.zero[0, 0].tolist()


def test_a_fused_backward_is_expected_to_give_what_the_split_one_gives() -> None:
    workload = workload_of(CALL.for_pass(Pass.BWD_FUSED))
    assert [(part.family.kernel_pass, places) for part, places in parts_of(workload)] == [
        (Pass.BWD_DKDV, (0, 1)),
        (Pass.BWD_DQ, (2,)),
    ]
    split = [one for kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ) for one in numbers_of(CALL.for_pass(kernel_pass))]
    for one, other in zip(expectations_of(workload, workload.inputs), split, strict=True):
        torch.testing.assert_close(one.ref, other.ref)
    for kernel_pass in (*BACKWARD_PASSES, Pass.FWD):
        if kernel_pass is not Pass.BWD_FUSED:
            other = workload_of(CALL.for_pass(kernel_pass))
            assert parts_of(other) == [(other, tuple(range(len(other.outputs))))]


def test_the_reference_passes_its_own_rule() -> None:
    workload = workload_of(CALL)
    found = attention_reference(*workload.inputs, softmax_scale=workload.softmax_scale, diagonal=workload.diagonal)
    for one, value in zip(expectations_of(workload, workload.inputs), found, strict=True):
        assert list(one.failures(value, WorstErrors())) == []
