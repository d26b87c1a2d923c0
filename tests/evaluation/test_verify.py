"""The judge of kernels: planted faults are all caught, a right kernel passes. Kernels here are plain functions."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.numerics import TANH_ERROR
from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.verify import SAMPLED_ROWS, Kernel, verify, verify_sampled
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.records import AccuracyReport
from fa_autotune.reference.attention import attention_reference, attention_same_precision, seeded_inputs
from fa_autotune.reference.features import Features

CPU = torch.device("cpu")
BLOCK = 16
NAN, INF = float("nan"), float("inf")
Fault = Callable[[Tensor, Tensor], None]  # spoils (out, lse) after a right kernel wrote them


def make_family(dtype: DType = DType.BFLOAT16, *, causal: bool = True, access: Access = Access.TMA) -> AttentionFamily:
    return AttentionFamily(dtype=dtype, head_dim=16, head_dim_v=32, bounded_right=causal, access=access)


def right_kernel(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, diagonal: int | None
) -> None:
    """The reference, rounded once to the output's dtype."""
    exact, exact_lse = attention_reference(q, k, v, softmax_scale=softmax_scale, diagonal=diagonal)
    out.copy_(exact)
    lse.copy_(exact_lse)


def spoiled(fault: Fault) -> Kernel:
    """A right kernel whose result is spoiled."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        right_kernel(q, k, v, out, lse, scale, diagonal)
        fault(out, lse)

    return kernel


def report(kernel: Kernel, family: AttentionFamily | None = None) -> AccuracyReport:
    family = family or make_family()
    return verify(kernel, family, probes(family, block_m=BLOCK, block_n=BLOCK, exact_lengths=False), CPU)


def reasons(kernel: Kernel, family: AttentionFamily | None = None) -> str:
    return "\n".join(report(kernel, family).failures)


def beside(tensor: Tensor, offset: int) -> Tensor:
    """One element of a tensor's storage: `offset` from its end, or before its start where negative."""
    place = tensor.storage_offset() + (tensor.numel() + offset if offset >= 0 else offset)
    return tensor.as_strided((1,), (1,), place)


# --- faults, each of which changes a result that was right ------------------------------------------------------------


def one_row_scaled(out: Tensor, lse: Tensor) -> None:
    out[0, 0, -1] *= 1.1


def everything_scaled(out: Tensor, lse: Tensor) -> None:
    out *= 1.01


def one_nan(out: Tensor, lse: Tensor) -> None:
    out[0, -1, out.shape[2] // 2, 3] = NAN


def one_infinity(out: Tensor, lse: Tensor) -> None:
    out[0, 0, -1, 0] = INF


def tail_unwritten(out: Tensor, lse: Tensor) -> None:
    out[:, :, -1] = NAN  # what the output held before


def column_unwritten(out: Tensor, lse: Tensor) -> None:
    out[..., -1] = NAN


def lse_tail_unwritten(out: Tensor, lse: Tensor) -> None:
    lse[:, :, -1] = NAN


def lse_in_base_two(out: Tensor, lse: Tensor) -> None:
    lse /= math.log(2)


def lse_slightly_off(out: Tensor, lse: Tensor) -> None:
    lse += 1e-3


def lse_of_empty_rows_plus_infinity(out: Tensor, lse: Tensor) -> None:
    lse[lse == -INF] = INF


def lse_of_empty_rows_very_small(out: Tensor, lse: Tensor) -> None:
    lse[lse == -INF] = -1e30


def empty_rows_not_zero(out: Tensor, lse: Tensor) -> None:
    out[lse == -INF] = 1e-30


def small_error_everywhere(out: Tensor, lse: Tensor) -> None:
    """Far below the largest error that is allowed, but in every value."""
    visible = lse != -INF
    out[visible] += 0.004


def heads_swapped(out: Tensor, lse: Tensor) -> None:
    out.copy_(out.flip(1))


FAULTS = {
    one_row_scaled: "error",
    everything_scaled: "mean error",
    one_nan: "not finite",
    one_infinity: "not finite",
    tail_unwritten: "unwritten",
    column_unwritten: "unwritten",
    lse_tail_unwritten: "lse error inf",
    lse_in_base_two: "lse error",
    lse_slightly_off: "lse error",
    lse_of_empty_rows_plus_infinity: "lse is not −inf",
    lse_of_empty_rows_very_small: "lse is not −inf",
    empty_rows_not_zero: "not exactly 0",
    small_error_everywhere: "mean error",
    heads_swapped: "error",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_catches(fault: Fault) -> None:
    assert FAULTS[fault] in reasons(spoiled(fault))


@pytest.mark.parametrize(("share", "is_caught"), [(0.5, False), (1.5, True)])
def test_the_lse_of_capped_scores_may_differ_by_what_the_gpus_tanh_does(share: float, is_caught: bool) -> None:
    family = replace(make_family(), softcap=True)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None, softcap: float
    ) -> None:
        call = {"softmax_scale": scale, "diagonal": diagonal, "features": Features(softcap=softcap)}
        exact, exact_lse = attention_reference(q, k, v, **call)
        out.copy_(exact)
        off = share * TANH_ERROR * softcap * exact_lse.abs().clamp(min=1.0)
        lse.copy_(torch.where(exact_lse == -INF, -INF, exact_lse + off))

    assert ("lse error" in reasons(kernel, family)) == is_caught


@pytest.mark.parametrize("offset", [0, 5], ids=["next_to_it", "further_off"])
@pytest.mark.parametrize("side", [1, -1], ids=["behind", "before"])
@pytest.mark.parametrize("which", ["out", "lse"])
def test_catches_a_write_outside(which: str, side: int, offset: int) -> None:
    def fault(out: Tensor, lse: Tensor) -> None:
        tensor = {"out": out, "lse": lse}[which]
        beside(tensor, offset if side > 0 else -1 - offset).fill_(1.0)

    assert f"wrote outside of {which}" in reasons(spoiled(fault))


@pytest.mark.parametrize("which", ["out", "lse"])
def test_catches_a_result_that_differs_in_its_last_bit_between_two_launches(which: str) -> None:
    launches = 0

    def fault(out: Tensor, lse: Tensor) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            tensor = {"out": out, "lse": lse}[which]
            bits = tensor.view(torch.int32 if which == "lse" else torch.int16)
            bits[0, 0, -1] ^= 1

    assert f"two launches gave different bits in {which}" in reasons(spoiled(fault))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_catches_all_else_in_one_launch_where_a_second_could_not_differ(fault: Fault) -> None:
    launched: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        launched.append(out)
        spoiled(fault)(q, k, v, out, lse, scale, diagonal)

    family = make_family()
    probe_list = probes(family, block_m=BLOCK, block_n=BLOCK, exact_lengths=False)
    found = verify(kernel, family, probe_list, CPU, repeated=False).failures
    assert FAULTS[fault] in "\n".join(found)
    assert len(launched) == len(probe_list)


def test_catches_a_result_that_only_the_first_launch_leaves_unwritten() -> None:
    launches = 0

    def fault(out: Tensor, lse: Tensor) -> None:
        nonlocal launches
        launches += 1
        if launches == 1:
            out[0, 0, 0] = NAN

    assert "different bits" in reasons(spoiled(fault))


@pytest.mark.parametrize("by", [1, -1])
def test_catches_a_mask_off_by_one(by: int) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        assert diagonal is not None
        right_kernel(q, k, v, out, lse, scale, diagonal + by)

    assert "error" in reasons(kernel)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("causal", [False, True])
def test_catches_a_window_off_by_one(causal: bool, by: int) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *numbers: Any) -> None:
        scale, diagonal, left_diagonal = numbers
        features = Features(left_diagonal=left_diagonal + by)
        exact, exact_lse = attention_reference(q, k, v, softmax_scale=scale, diagonal=diagonal, features=features)
        out.copy_(exact)
        lse.copy_(exact_lse)

    assert "error" in reasons(kernel, replace(make_family(causal=causal), bounded_left=True))


def test_passes_a_right_kernel_in_windows() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *numbers: Any) -> None:
        scale, diagonal, left_diagonal = numbers
        features = Features(left_diagonal=left_diagonal)
        exact, exact_lse = attention_reference(
            q, k.nan_to_num(), v.nan_to_num(), softmax_scale=scale, diagonal=diagonal, features=features
        )
        out.copy_(exact)
        lse.copy_(exact_lse)

    assert reasons(kernel, replace(make_family(), bounded_left=True)) == ""


def test_catches_a_causal_kernel_that_ignores_its_diagonal() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        right_kernel(q, k, v, out, lse, scale, k.shape[2] - q.shape[2])

    assert "top-left" in reasons(kernel)


def test_catches_a_kernel_that_ignores_its_scale() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        right_kernel(q, k, v, out, lse, 0.3, diagonal)

    assert "error" in reasons(kernel)


def test_catches_a_kernel_that_reads_keys_that_no_row_sees() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        """Hides them by a product with 0, which NaN survives."""
        right_kernel(q, k, v, out, lse, scale, diagonal)
        out += 0.0 * v[:, :, -1:].sum()

    assert "not finite" in reasons(kernel)


def test_catches_a_kernel_that_maps_query_heads_to_the_wrong_kv_heads() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        group = q.shape[1] // k.shape[1]
        order = [head % k.shape[1] for head in range(k.shape[1] * group)]
        right_kernel(q, k[:, order], v[:, order], out, lse, scale, diagonal)

    assert "error" in reasons(kernel)


def test_a_kernel_that_writes_nothing_fails_every_probe() -> None:
    family = make_family()
    result = report(lambda *arguments: None, family)
    assert len({text.split(":")[0] for text in result.failures}) == result.probes == 6


# --- right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DType)
def test_a_right_kernel_passes(dtype: DType, causal: bool, exact_lengths: bool) -> None:
    family = make_family(dtype, causal=causal)
    probe_list = probes(family, block_m=32, block_n=BLOCK, exact_lengths=exact_lengths)
    assert verify(right_kernel, family, probe_list, CPU).failures == ()


def test_a_right_kernel_is_well_below_what_is_allowed() -> None:
    result = report(right_kernel)
    assert 0 < result.max_error_ratio < 0.5
    assert 0 < result.mean_error_ratio < 0.8


def test_plain_torch_in_the_same_precision_passes() -> None:
    """It is what the rule measures by."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        right_kernel(q, k, v, out, lse, scale, diagonal)
        right_out = attention_same_precision(q, k, v, softmax_scale=scale, diagonal=diagonal)
        out.copy_(torch.where(right_out.isnan(), out, right_out))  # it lets NaN through from keys that no row sees

    assert reasons(kernel) == ""


def test_a_right_kernel_passes_where_no_row_sees_a_key() -> None:
    """All of the output is 0, and so is the error that is allowed."""
    shape = AttentionShape(batch_size=1, num_q_heads=1, num_kv_heads=1, seqlen_q=4, seqlen_k=4)
    assert verify(right_kernel, make_family(), [HiddenProbe(shape=shape)], CPU).failures == ()


class HiddenProbe(Probe):
    """A probe whose diagonal hides every key."""

    def diagonal(self, family: AttentionFamily) -> int:
        return -self.shape.seqlen_q


def test_reports_the_worst_of_all_probes() -> None:
    only_long = spoiled(lambda out, lse: one_row_scaled(out, lse) if out.shape[2] > 2 * BLOCK else None)
    assert report(only_long).max_error_ratio > 1 >= report(right_kernel).max_error_ratio


def test_errors_of_the_launch_propagate() -> None:
    def kernel(*arguments: object) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        report(kernel)


def test_outputs_keep_the_16_byte_rules() -> None:
    addresses = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, diagonal: int | None) -> None:
        addresses.extend([out.data_ptr(), lse.data_ptr()])
        right_kernel(q, k, v, out, lse, scale, diagonal)

    report(kernel)
    assert {address % 16 for address in addresses} == {0}


# --- the probes -------------------------------------------------------------------------------------------------------


# --- at a problem's own size ------------------------------------------------------------------------------------------


def sampled(kernel: Kernel, seqlen_q: int = 40, seqlen_k: int = 50, *, causal: bool = True) -> AccuracyReport:
    shape = AttentionShape(batch_size=2, num_q_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    problem = AttentionProblem(family=make_family(causal=causal), shape=shape)
    inputs = seeded_inputs(problem.family, shape, device=CPU, seed=0)
    return verify_sampled(kernel, problem, inputs, 0.25)


class TestSampled:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 50), (700, 30), (1, 300), (SAMPLED_ROWS + 1, 20)])
    def test_a_right_kernel_passes(self, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
        assert sampled(right_kernel, seqlen_q, seqlen_k, causal=causal).failures == ()

    @pytest.mark.parametrize(
        "fault",
        [fault for fault in FAULTS if fault not in (small_error_everywhere, everything_scaled)],
        ids=lambda fault: fault.__name__,
    )
    def test_catches(self, fault: Fault) -> None:
        assert sampled(spoiled(fault), 40, 30).failures != ()

    @pytest.mark.parametrize("offset", [0, -1], ids=["behind", "before"])
    @pytest.mark.parametrize("which", ["out", "lse"])
    def test_catches_a_write_outside(self, which: str, offset: int) -> None:
        def fault(out: Tensor, lse: Tensor) -> None:
            beside({"out": out, "lse": lse}[which], offset).fill_(1.0)

        assert f"wrote outside of {which}" in sampled(spoiled(fault)).failures

    def test_catches_a_nan_outside_of_the_samples(self) -> None:
        def fault(out: Tensor, lse: Tensor) -> None:
            out[1, 1, 300] = NAN

        assert any("not finite" in text for text in sampled(spoiled(fault), 1200, 20, causal=False).failures)

    def test_catches_different_bits_outside_of_the_samples(self) -> None:
        launches = 0

        def fault(out: Tensor, lse: Tensor) -> None:
            nonlocal launches
            launches += 1
            out[1, 1, 300] += launches

        assert "two launches gave different bits in out" in sampled(spoiled(fault), 1200, 20, causal=False).failures

    @pytest.mark.parametrize("row", [0, 600, 1199], ids=["first", "middle", "last"])
    @pytest.mark.parametrize(("batch", "head"), [(0, 0), (1, 3)], ids=["first_head", "last_head"])
    def test_looks_at(self, batch: int, head: int, row: int) -> None:
        def fault(out: Tensor, lse: Tensor) -> None:
            out[batch, head, row] += 1.0

        assert sampled(spoiled(fault), 1200, 20, causal=False).failures != ()

    def test_says_where_the_error_is(self) -> None:
        def fault(out: Tensor, lse: Tensor) -> None:
            out[1, 3, 1199] += 1.0

        (failure,) = sampled(spoiled(fault), 1200, 20, causal=False).failures
        assert failure.startswith("batch 1 head 3 rows 944…1199: out error ")

    def test_compares_all_rows_of_a_short_problem(self) -> None:
        assert sampled(right_kernel, 40, 50).probes == 4
