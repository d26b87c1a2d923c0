"""Budgets and results of a tuning job."""

import pytest

from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.tuner import TuneBudget
from fa_autotune.tuner.events import ProblemResult


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"trials": 0}, "trials=0 is not a positive integer"),
        ({"trials": 8.0}, r"trials=8\.0 is not a positive integer"),
        ({"finalists": -1}, "finalists=-1 is not a positive integer"),
        ({"time_s": 0.0}, r"time_s=0\.0 is not a positive number of seconds; use None for no limit"),
        ({"time_s": float("nan")}, "time_s=nan is not a positive number"),
    ],
)
def test_a_budget_out_of_range_is_refused(values, says):
    with pytest.raises(FaAutotuneError, match=says):
        TuneBudget(**values)


@pytest.mark.parametrize(
    ("default_ms", "screened_ms", "ratio"), [(3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None)]
)
def test_the_default_is_compared_where_both_were_screened(default_ms, screened_ms, ratio):
    problem = AttentionProblem.parse("1x1x1x64x64x64")
    assert ProblemResult(problem=problem, default_ms=default_ms, screened_ms=screened_ms).default_ratio == ratio
