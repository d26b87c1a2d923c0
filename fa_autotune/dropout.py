"""The former place of `fa_autotune.reference.dropout`; names are found here for one more release."""

from importlib import import_module
from typing import Any
from warnings import warn

_PLACE = "fa_autotune.reference.dropout"


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(found := import_module(_PLACE), name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn(f"{__name__}.{name} has moved; import it from {_PLACE}", DeprecationWarning, stacklevel=2)
    return getattr(found, name)
