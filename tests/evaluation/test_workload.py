"""What a kernel of each pass is called with, and what it writes."""

import pytest
import torch

from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.workload import (
    Workload,
    acc_of_dq,
    bottom_right_diagonal,
    dq_of_acc,
    lse_and_delta_of,
    statistics_of,
)
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import attention_reference
from fa_autotune.space.workspace import dq_acc_size

CPU = torch.device("cpu")
CALL = AttentionProblem.parse("2x4x2x10x12x16x24,causal")

INPUTS = {
    Pass.FWD: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24)],
    Pass.BWD_DELTA: [(2, 4, 10, 24), (2, 4, 10, 24)],
    Pass.BWD_DKDV: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24), (2, 4, 10, 24), (2, 4, 10), (2, 4, 10)],
    Pass.BWD_DQ: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24), (2, 4, 10, 24), (2, 4, 10), (2, 4, 10)],
    Pass.BWD_PREPROCESS: [(2, 4, 10, 24), (2, 4, 10, 24), (2, 4, 10)],
    Pass.BWD_FUSED: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24), (2, 4, 10, 24), (2, 8, 128), (8, 2)],
    Pass.BWD_POSTPROCESS: [(8 * 32, 256)],
}
OUTPUTS = {
    Pass.FWD: [("out", (2, 4, 10, 24)), ("lse", (2, 4, 10))],
    Pass.BWD_DELTA: [("delta", (2, 4, 10))],
    Pass.BWD_DKDV: [("dk", (2, 2, 12, 16)), ("dv", (2, 2, 12, 24))],
    Pass.BWD_DQ: [("dq", (2, 4, 10, 16))],
    Pass.BWD_PREPROCESS: [("statistics", (2, 8, 128)), ("turns", (8, 2))],
    Pass.BWD_FUSED: [("dk", (2, 2, 12, 16)), ("dv", (2, 2, 12, 24)), ("dq_acc", (8 * 32, 256))],
    Pass.BWD_POSTPROCESS: [("dq", (2, 4, 10, 16))],
}


def make_workload(kernel_pass: Pass, **changes: object) -> Workload:
    problem = CALL.for_pass(kernel_pass)
    values = {"device": CPU, "diagonal": bottom_right_diagonal(problem), **changes}
    return seeded_workload(problem, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel_pass", Pass)
def test_the_inputs_of_a_pass_come_in_the_order_of_its_kernels(kernel_pass: Pass) -> None:
    assert [tuple(tensor.shape) for tensor in make_workload(kernel_pass).inputs] == INPUTS[kernel_pass]


@pytest.mark.parametrize("kernel_pass", Pass)
def test_the_outputs_of_a_pass_come_in_the_order_of_its_kernels(kernel_pass: Pass) -> None:
    workload = make_workload(kernel_pass)
    assert [(output.name, output.size) for output in workload.outputs] == OUTPUTS[kernel_pass]
    assert [tuple(tensor.shape) for tensor in workload.allocate()] == [size for _, size in OUTPUTS[kernel_pass]]


@pytest.mark.parametrize(
    ("kernel_pass", "scalars"), [(Pass.FWD, (0.25, 2)), (Pass.BWD_DELTA, ()), (Pass.BWD_DQ, (0.25, 2))]
)
def test_a_kernel_gets_inputs_outputs_and_scalars(kernel_pass: Pass, scalars: tuple[float | int, ...]) -> None:
    workload = make_workload(kernel_pass)
    outputs = workload.allocate()
    arguments = workload.arguments(outputs)
    tensors = [*workload.inputs, *outputs]
    assert all(one is other for one, other in zip(arguments, tensors, strict=False))
    assert arguments[len(tensors) :] == scalars


def test_the_statistics_are_those_of_the_calls_own_forward() -> None:
    q, k, v, d_out, lse, delta = make_workload(Pass.BWD_DQ).inputs
    out, expected = attention_reference(q, k, v, softmax_scale=0.25, diagonal=2)
    assert torch.equal(lse, expected)
    torch.testing.assert_close(delta, (out * d_out.float()).sum(-1))


# --- what the kernels of the fused backward hand to each other --------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_dq_leaves_the_order_of_registers_as_it_came(head_dim: int) -> None:
    problem = AttentionProblem.parse(f"2x3x3x150x200x{head_dim},bwd_fused")
    rows, columns = (256, 64) if head_dim <= 64 else (192, 128)
    dq = torch.randn(2, 3, rows, columns)
    acc = acc_of_dq(problem.family, dq)
    assert tuple(acc.shape) == dq_acc_size(problem.family, problem.shape)
    assert torch.equal(dq_of_acc(problem.family, problem.shape, acc), dq[:, :, :150, :head_dim])


@pytest.mark.parametrize(("head_dim", "row", "column"), [(64, 64 + 16 + 8 + 3, 8 + 5), (128, 16 + 8 + 3, 64 + 8 + 5)])
def test_the_order_is_that_of_a_warpgroups_accumulators(head_dim: int, row: int, column: int) -> None:
    # Warpgroup 1, second group of 8 columns, second warp, lane 3 · 4 + 2, second half of its rows, second of its pair.
    place = ((((((1 * 8 + 1) * 4 + 1) * 8 + 3) * 4 + 2) * 2) + 1) * 2 + 1
    problem = AttentionProblem.parse(f"1x1x1x128x128x{head_dim},bwd_fused")
    acc = torch.zeros(dq_acc_size(problem.family, problem.shape))
    acc.view(-1)[place] = 1.0
    dq = dq_of_acc(problem.family, problem.shape, acc)
    assert dq.nonzero().tolist() == [[0, 0, row, column]]


def test_statistics_give_back_lse_and_delta_and_rows_past_the_end_have_no_effect() -> None:
    shape = CALL.shape
    lse, delta = torch.randn(2, 4, 10), torch.randn(2, 4, 10)
    lse[:, :, :2] = float("-inf")
    statistics = statistics_of(shape, lse, delta)
    again_lse, again_delta = lse_and_delta_of(shape, statistics)
    torch.testing.assert_close(again_lse, lse)
    assert torch.equal(again_delta, delta)
    assert (statistics[0, :, 10:] == float("inf")).all()
    assert (statistics[0, :, :2] == float("inf")).all()
    assert not statistics[1, :, 10:].any()


def test_what_a_kernel_adds_to_is_zero_at_first() -> None:
    problem = CALL.for_pass(Pass.BWD_FUSED, unordered=True)
    workload = seeded_workload(problem, device=CPU, diagonal=2)
    assert [output.adds_up for output in workload.outputs] == [False, False, True]
    assert not workload.allocate()[2].any()
