"""Problem, device and winners → a decision, and the kernels that were loaded for it."""

from importlib import import_module
from typing import Any
from warnings import warn


def __getattr__(name: str) -> Any:
    if name != "Dispatcher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = f"{__name__}.dispatcher"
    warn(f"{__name__}.{name} has moved; import it from {place}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(place), name)
