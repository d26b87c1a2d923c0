"""What torch.jit.script is told of functions that it can't translate."""

from typing import Any, NoReturn

from fa_autotune.errors import UnsupportedError


def keep_out_of_scripts(function: Any) -> None:
    """Have torch.jit.script refuse a function: it would translate its source, and stumble somewhere in it."""
    function.__prepare_scriptable__ = _refuse_scripting


def _refuse_scripting() -> NoReturn:
    raise UnsupportedError(
        "torch.jit.script can't translate attention; use torch.compile or torch.export, trace the module with "
        "torch.jit.trace, or call attention in a function that torch.jit.ignore leaves to Python"
    )
