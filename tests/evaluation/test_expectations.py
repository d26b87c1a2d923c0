"""The rule for single outputs, each kind of which has its own: what passes, what does not, and what is said of it."""

import math

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.expectations import (
    STATISTIC_TOLERANCE,
    Expectation,
    ExpectedDelta,
    ExpectedLse,
    ExpectedNumbers,
    ExpectedStatistics,
    ExpectedZeros,
    WorstErrors,
    largest,
)

NAN, INF = float("nan"), float("inf")
NOWHERE = torch.zeros(2, dtype=torch.bool)


def said(expected: Expectation, written: Tensor) -> list[str]:
    return list(expected.failures(written, WorstErrors()))


def numbers(ref: Tensor, off_by: float, *, zero: Tensor = NOWHERE, factor: float = 2.0) -> ExpectedNumbers:
    """What is expected where plain torch errs by so much in every value."""
    return ExpectedNumbers(name="out", ref=ref, pt=ref + off_by, zero=zero, why="rows that see no key", factor=factor)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "off_by"), [(2.0, 0.19), (2.0, 0.21), (3.0, 0.29), (3.0, 0.31)])
def test_an_error_may_be_so_many_times_that_of_plain_torch(factor: float, off_by: float) -> None:
    ref = torch.zeros(2, 4)
    written = ref.clone()
    written[1, 3] += off_by
    found = said(numbers(ref, 0.1, factor=factor), written)
    assert (found == []) is (off_by < factor * 0.1)
    assert found == [] or found[0].endswith("(plain torch errs by 0.1)")


def test_a_small_error_in_every_value_is_one_of_the_mean() -> None:
    ref = torch.zeros(2, 4)
    assert said(numbers(ref, 0.1), ref + 0.14) == []
    assert said(numbers(ref, 0.1), ref + 0.16) == ["out mean error 0.16 > 0.15"]


@pytest.mark.parametrize(
    ("dtype", "off_by", "is_right"),
    [
        (torch.bfloat16, 2.0**-7, True),
        (torch.bfloat16, 2.0**-5, False),
        (torch.float32, 2.0**-22, True),
        (torch.float32, 2.0**-19, False),
    ],
)
def test_where_plain_torch_is_exact_some_roundings_are_allowed(
    dtype: torch.dtype, off_by: float, is_right: bool
) -> None:
    ref = torch.ones(2, 4, dtype=torch.float64)
    written = (ref + torch.tensor([[off_by, 0.0, 0.0, 0.0], [0.0] * 4])).to(dtype)
    assert (said(numbers(ref, 0.0), written) == []) is is_right


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_was_left_unwritten(value: float) -> None:
    written = torch.zeros(2, 4)
    written[1, 2] = value
    assert said(numbers(torch.zeros(2, 4), 9.0), written) == ["out was left unwritten or is not finite"]


def test_rows_that_must_be_zero_are_zero_exactly() -> None:
    zero = torch.tensor([False, True])
    ref = torch.zeros(2, 4)
    assert said(numbers(ref, 0.1, zero=zero), ref) == []
    written = ref.clone()
    written[1, 0] = 1e-30
    assert said(numbers(ref, 0.1, zero=zero), written) == ["out: rows that see no key are not exactly 0"]


def test_the_largest_errors_of_all_outputs_are_kept() -> None:
    worst, ref = WorstErrors(), torch.zeros(2, 4)
    for off_by in (0.05, 0.15, 0.1):
        written = ref.clone()
        written[0, 0] = off_by
        list(numbers(ref, 0.1).failures(written, worst))
    worst.failures.append("one")
    report = worst.report(3)
    assert report.max_error == pytest.approx(0.15)
    assert report.max_error_ratio == pytest.approx(0.75)
    assert report.mean_error_ratio == pytest.approx(0.125)
    assert (report.probes, report.failures, report.passed) == (3, ("one",), False)


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "ref"), [([-INF, 3.0], [0.0, 3.0]), ([0.0, 3.0], [-INF, 3.0])])
def test_an_lse_is_minus_infinity_at_exactly_the_rows_that_see_no_key(written: list[float], ref: list[float]) -> None:
    found = said(ExpectedLse(ref=torch.tensor(ref), tolerance=1e-5), torch.tensor(written))
    assert "lse is not −inf at exactly the rows that see no key" in found


@pytest.mark.parametrize(("off_by", "is_right"), [(0.9e-5, True), (1.5e-5, False), (NAN, False)])
@pytest.mark.parametrize("size", [0.5, 1000.0])
def test_an_lse_is_close_absolutely_or_relatively(size: float, off_by: float, is_right: bool) -> None:
    ref = torch.tensor([-INF, size], dtype=torch.float64)
    written = ref + torch.tensor([0.0, off_by * max(1.0, size)], dtype=torch.float64)
    assert (said(ExpectedLse(ref=ref, tolerance=1e-5), written) == []) is is_right


@pytest.mark.parametrize(
    ("off_by", "says"), [(0.9, None), (1.5, "delta error 1.5e-05 > 1e-05"), (NAN, "delta was left unwritten")]
)
def test_delta_is_close_relative_to_what_it_is_summed_from(off_by: float, says: str | None) -> None:
    ref, magnitude = torch.zeros(3, dtype=torch.float64), torch.full((3,), 50.0)
    written = ref.clone()
    written[1] = off_by * 50.0 * STATISTIC_TOLERANCE
    found = said(ExpectedDelta(ref=ref, magnitude=magnitude), written)
    assert found == [] if says is None else found[0].startswith(says)


def test_statistics_have_rows_of_no_effect_where_the_reference_has_them() -> None:
    ref = torch.tensor([[3.0, INF], [0.5, 0.0]])
    expected = ExpectedStatistics(ref=ref, magnitude=torch.ones(2, 2))
    assert said(expected, ref) == []
    assert said(expected, ref + 1e-6) == []
    (found,) = said(expected, ref + torch.tensor([[0.0, 0.0], [1e-3, 0.0]]))
    assert found == "statistics error 0.001 > 1e-05"
    assert said(expected, torch.tensor([[3.0, 99.0], [0.5, 0.0]]))[0].startswith("lse is not +inf at exactly the rows")


def test_turns_are_zero_everywhere() -> None:
    turns = torch.zeros(2, 2, dtype=torch.int32)
    assert said(ExpectedZeros(name="turns"), turns) == []
    turns[1, 1] = 1
    assert said(ExpectedZeros(name="turns"), turns) == ["turns is not 0 everywhere"]


def test_nan_is_the_largest_of_all_errors() -> None:
    assert math.isinf(largest(torch.tensor([0.0, NAN, 5.0])))
    assert largest(torch.tensor([0.0, 5.0])) == 5.0
