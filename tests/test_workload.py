"""What a kernel of each pass is called with, and what it writes."""

import pytest
import torch

from fa_autotune.problem import Access, AttentionProblem, Pass
from fa_autotune.reference import attention_reference, gradients_from_statistics
from fa_autotune.workload import Workload, bottom_right_diagonal, seeded_workload

CPU = torch.device("cpu")
CALL = AttentionProblem.parse("2x4x2x10x12x16x24,causal")

INPUTS = {
    Pass.FWD: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24)],
    Pass.BWD_DELTA: [(2, 4, 10, 24), (2, 4, 10, 24)],
    Pass.BWD_DKDV: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24), (2, 4, 10, 24), (2, 4, 10), (2, 4, 10)],
    Pass.BWD_DQ: [(2, 4, 10, 16), (2, 2, 12, 16), (2, 2, 12, 24), (2, 4, 10, 24), (2, 4, 10), (2, 4, 10)],
}
OUTPUTS = {
    Pass.FWD: [("out", (2, 4, 10, 24)), ("lse", (2, 4, 10))],
    Pass.BWD_DELTA: [("delta", (2, 4, 10))],
    Pass.BWD_DKDV: [("dk", (2, 2, 12, 16)), ("dv", (2, 2, 12, 24))],
    Pass.BWD_DQ: [("dq", (2, 4, 10, 16))],
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


@pytest.mark.parametrize("kernel_pass", Pass)
def test_the_same_seed_gives_the_same_values_and_another_seed_others(kernel_pass: Pass) -> None:
    one, same, other = (make_workload(kernel_pass, seed=seed).inputs for seed in (3, 3, 4))
    assert all(map(torch.equal, one, same))
    assert not any(map(torch.equal, one, other))


def test_the_statistics_are_those_of_the_calls_own_forward() -> None:
    q, k, v, d_out, lse, delta = make_workload(Pass.BWD_DQ).inputs
    out, expected = attention_reference(q, k, v, softmax_scale=0.25, diagonal=2)
    assert torch.equal(lse, expected)
    torch.testing.assert_close(delta, (out * d_out.float()).sum(-1))


def test_the_scale_is_that_of_q_k_and_v() -> None:
    plain, larger = (make_workload(Pass.BWD_DQ, scale=scale).inputs for scale in (1.0, 4.0))
    assert [torch.equal(4 * one, other) for one, other in zip(plain[:4], larger[:4], strict=True)] == [True] * 3 + [
        False
    ]


def test_gradients_stay_of_order_1_at_any_length() -> None:
    """Where they shrank with the length, the absolute part of the numerics rule would let anything pass."""
    for length in (64, 1024):
        problem = AttentionProblem.parse(f"1x1x1x{length}x{length}x32,bwd_dq")
        workload = seeded_workload(problem, device=CPU, diagonal=None)
        for gradient in gradients_from_statistics(*workload.inputs, softmax_scale=workload.softmax_scale):
            assert 0.1 < gradient.std() < 10


def test_inputs_of_any_access_are_strided_and_unaligned() -> None:
    problem = AttentionProblem.parse("1x2x2x8x8x16,any,bwd_dkdv")
    workload = seeded_workload(problem, device=CPU, diagonal=None)
    assert problem.family.access is Access.ANY
    assert [tensor.stride(-1) for tensor in workload.inputs[:4]] == [2] * 4
