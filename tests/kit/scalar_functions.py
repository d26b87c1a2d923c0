"""Scalar functions of generated modules, run on plain Python numbers."""

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any


def on_python_numbers(function: Any, **constants: Any) -> Callable[..., Any]:
    """A scalar function of a generated module, with Python's min and max in place of the language module."""
    language = SimpleNamespace(minimum=min, maximum=max)
    return FunctionType(function.fn.__code__, {"tl": language, **constants})
