"""Combinations of parameters, of which default runs take a share."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def one_in(share: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of values, in which only one in `share` is no slow test.

    Those go round the axes together: where an axis has no fewer values than `share`, every value of every other one
    meets some of its values. A value may be a `pytest.param`, whose marks stay.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [_combined(combination, share) for combination in product(*numbered)]


def _combined(combination: tuple[tuple[int, Any], ...], share: int) -> Any:
    values: list[Any] = []
    marks = [] if sum(place for place, _ in combination) % share == 0 else [pytest.mark.slow]
    for _, value in combination:
        if hasattr(value, "marks"):  # of pytest.param
            marks += value.marks
            values += value.values
        else:
            values.append(value)
    return pytest.param(*values, marks=marks)
