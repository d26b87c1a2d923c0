"""Combinations of parameters, of which the default tests take a share, CI a larger one, and both together are all but
the slow ones."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def one_in(share: int, *axes: Iterable[Any], default: int | None = None) -> list[Any]:
    """All combinations of values, in which only one in `share` is no slow test, and one in `default` a default one.

    `default` is a multiple of `share`, which it is unless given. The chosen ones go round the axes together: where an
    axis has no fewer values than the number, every value of every other one meets some of its values. A value may be a
    `pytest.param`, whose marks stay.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [_combined(combination, share, default or share) for combination in product(*numbered)]


def _combined(combination: tuple[tuple[int, Any], ...], share: int, default: int) -> Any:
    values: list[Any] = []
    place = sum(place for place, _ in combination)
    marks = [pytest.mark.slow] if place % share else [pytest.mark.rest] if place % default else []
    for _, value in combination:
        if hasattr(value, "marks"):  # of pytest.param
            marks += value.marks
            values += value.values
        else:
            values.append(value)
    return pytest.param(*values, marks=marks)


def rest(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, that are left to `scripts/test --rest`."""
    return [_marked(value, pytest.mark.rest) for value in values]


def sampled(values: Iterable[Any]) -> list[Any]:
    """The same, of which a run with another Triton is made too."""
    return [_marked(value, pytest.mark.rest, pytest.mark.sampled) for value in values]


def slow(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several, that run where slow tests are asked for."""
    return [_marked(value, pytest.mark.slow) for value in values]


def _marked(value: Any, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
