"""What the checks of the fused backward's kernels let through, and what they catch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import UNORDERED_RUNS, Kernel, verify, verify_sampled
from fa_autotune.evaluation.workload import acc_of_dq, dq_of_acc, lse_and_delta_of, statistics_of
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport
from fa_autotune.reference.attention import gradients_from_statistics
from fa_autotune.space.workspace import fused_tile

CPU = torch.device("cpu")
NAN = float("nan")


def family_of(kernel_pass: Pass, flags: str = "causal", head_dim: int = 16) -> AttentionFamily:
    return AttentionProblem.parse(f"1x2x2x64x64x{head_dim},{flags},{kernel_pass}").family


def shape_of(q: Tensor, k: Tensor) -> Any:
    return AttentionProblem.parse(f"{q.shape[0]}x{q.shape[1]}x{k.shape[1]}x{q.shape[2]}x{k.shape[2]}x16").shape


def right_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, statistics: Tensor, turns: Tensor) -> None:
    statistics.copy_(statistics_of(shape_of(out, out), lse, (out.float() * d_out.float()).sum(-1)))
    turns.zero_()


def right_postprocess(family: AttentionFamily) -> Kernel:
    def kernel(dq_acc: Tensor, dq: Tensor, scale: float, diagonal: int | None) -> None:
        dq.copy_(dq_of_acc(family, shape_of(dq, dq), dq_acc) * scale)
        if diagonal is not None:
            dq[:, :, : max(0, -diagonal)] = 0.0

    return kernel


def right_fused(family: AttentionFamily) -> Kernel:
    """The reference; tiles of dq whose rows all see no key stay as they are."""

    def kernel(*arguments: Any) -> None:
        q, k, v, d_out, statistics, turns, dk, dv, dq_acc, scale, diagonal = arguments
        assert not turns.any()
        lse, delta = lse_and_delta_of(shape_of(q, k), statistics)
        seen = k.shape[2] if diagonal is None else max(0, min(k.shape[2], q.shape[2] + diagonal))
        found = gradients_from_statistics(
            q, k[:, :, :seen], v[:, :, :seen], d_out, lse, delta, softmax_scale=scale, diagonal=diagonal
        )
        for gradient, output in zip(found[1:], (dk, dv), strict=True):
            output.zero_()[:, :, :seen] = gradient
        tile = fused_tile(family)
        rows = -(-q.shape[2] // tile.block_m) * tile.block_m
        dq = torch.zeros(*q.shape[:2], rows, tile.columns)
        dq[:, :, : q.shape[2], : q.shape[3]] = found[0] / scale
        blind = 0 if diagonal is None else min(rows, max(0, -diagonal) // tile.block_m * tile.block_m)
        written = acc_of_dq(family, dq).view(-1, rows, tile.columns)[:, blind:]
        target = dq_acc.view(-1, rows, tile.columns)[:, blind:]
        target.copy_(target + written if family.unordered else written)

    return kernel


def right(family: AttentionFamily) -> Kernel:
    if family.kernel_pass is Pass.BWD_PREPROCESS:
        return right_preprocess
    return right_fused(family) if family.kernel_pass is Pass.BWD_FUSED else right_postprocess(family)


def spoiled(family: AttentionFamily, place: int, fault: Callable[[Tensor], object]) -> Kernel:
    """A right kernel, and then something done to one of its arguments."""

    def kernel(*arguments: Any) -> None:
        right(family)(*arguments)
        fault(arguments[place])

    return kernel


BLIND = Probe(shape=AttentionProblem.parse("1x2x2x300x20x16").shape)  # causal: two tiles of rows that see no key


def report(kernel: Kernel, family: AttentionFamily) -> AccuracyReport:
    return verify(kernel, family, [*probes(family, block_m=16, block_n=16, exact_lengths=False), BLIND], CPU)


FAMILIES = [
    family_of(Pass.BWD_PREPROCESS, "full"),
    *(family_of(Pass.BWD_FUSED, flags) for flags in ("full", "causal", "causal,unordered")),
    family_of(Pass.BWD_FUSED, "causal", 72),
    family_of(Pass.BWD_FUSED, "causal", 136),
    family_of(Pass.BWD_POSTPROCESS, "full"),
    family_of(Pass.BWD_POSTPROCESS),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_a_right_kernel_passes(family: AttentionFamily) -> None:
    assert report(right(family), family).failures == ()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_a_right_kernel_passes_at_a_problems_own_size(family: AttentionFamily) -> None:
    problem = AttentionProblem(family=family, shape=AttentionProblem.parse("2x4x4x300x300x16").shape)
    workload = seeded_workload(problem, device=CPU, diagonal=0 if family.bounded_right else None)
    assert verify_sampled(right(family), problem, workload.inputs, workload.softmax_scale).failures == ()


def first(tensor: Tensor) -> Tensor:
    """The first value that is finite where all is right: the first lse is not."""
    return tensor.view(-1)[1:2]


@pytest.mark.parametrize(
    ("kernel_pass", "place", "name"),
    [
        (Pass.BWD_PREPROCESS, 3, "statistics"),
        (Pass.BWD_FUSED, 6, "dk"),
        (Pass.BWD_FUSED, 7, "dv"),
        (Pass.BWD_FUSED, 8, "dq"),
        (Pass.BWD_POSTPROCESS, 1, "dq"),
    ],
)
@pytest.mark.parametrize("fault", [lambda tensor: first(tensor).add_(9.0), lambda tensor: first(tensor).fill_(NAN)])
def test_a_wrong_output_is_caught(kernel_pass: Pass, place: int, name: str, fault: Callable[[Tensor], object]) -> None:
    family = family_of(kernel_pass, "full")
    failures = report(spoiled(family, place, fault), family).failures
    assert any(name in text for text in failures)


def test_turns_that_are_left_behind_are_caught() -> None:
    family = family_of(Pass.BWD_PREPROCESS, "full")
    failures = report(spoiled(family, 4, lambda turns: first(turns).fill_(1)), family).failures
    assert any("turns is not 0 everywhere" in text for text in failures)


def test_turns_that_a_fused_kernel_leaves_are_caught_and_wait_for_nobody() -> None:
    family = family_of(Pass.BWD_FUSED)
    failures = report(spoiled(family, 5, lambda turns: first(turns).fill_(1)), family).failures
    assert any("left turns at another value than 0" in text for text in failures)
    assert report(right_fused(family), family).failures == ()  # which checks that it finds them at 0


def test_a_padding_row_that_would_count_is_caught() -> None:
    family = family_of(Pass.BWD_PREPROCESS, "full")
    failures = report(spoiled(family, 3, lambda statistics: statistics[0, :, -1].zero_()), family).failures
    assert any("+inf at exactly the rows" in text for text in failures)


def test_a_blind_row_that_is_not_zeroed_is_caught() -> None:
    family = family_of(Pass.BWD_POSTPROCESS)

    def kernel(dq_acc: Tensor, dq: Tensor, scale: float, diagonal: int | None) -> None:
        right_postprocess(family)(dq_acc, dq, scale, None)

    assert any("dq was left unwritten" in text for text in report(kernel, family).failures)


@pytest.mark.parametrize("unordered", [False, True])
def test_last_bits_may_differ_between_launches_where_the_order_is_free(unordered: bool) -> None:
    family = family_of(Pass.BWD_FUSED, "full,unordered" if unordered else "full")
    launches = iter(range(10**6))

    def drift(dq_acc: Tensor) -> None:
        dq_acc.mul_(1.0 + next(launches) % 2 * 2.0**-20)

    failures = report(spoiled(family, 8, drift), family).failures
    assert (failures == ()) is unordered
    assert all("different bits in dq_acc" in text for text in failures)


def test_one_wrong_run_of_ten_is_caught_where_the_order_is_free() -> None:
    family = family_of(Pass.BWD_FUSED, "full,unordered")
    launches = iter(range(10**6))

    def fail_at_last(dq_acc: Tensor) -> None:
        if next(launches) % UNORDERED_RUNS == UNORDERED_RUNS - 1:
            first(dq_acc).add_(99.0)

    assert any("dq error" in text for text in report(spoiled(family, 8, fail_at_last), family).failures)


def test_a_dq_of_twice_the_size_is_caught_where_the_order_is_free() -> None:
    family = family_of(Pass.BWD_FUSED, "full,unordered")
    assert report(spoiled(family, 8, lambda dq_acc: dq_acc.mul_(2.0)), family).failures
