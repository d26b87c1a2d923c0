"""Triton's interpreter, which runs kernels on CPU tensors in a process started with TRITON_INTERPRET=1.

It is not thread-safe and rounds bfloat16 wrongly: a lock and a shim (of `triton_private`) see to both.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fa_autotune.errors import LaunchError
from fa_autotune.kernels.modules import keep_source
from fa_autotune.kernels.triton_private import install_interpreter_shim, interpreter_failure

_interpreter_lock = threading.Lock()


def interpreted(module: ModuleType) -> Callable[[tuple[int, ...], Sequence[Any]], None]:
    import numpy  # noqa: PLC0415 - Triton's interpreter brings it

    install_interpreter_shim()

    def run(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        # log2(0), inf − inf and a row of NaN have defined results in a kernel; numpy would warn, and of Triton 3.6.
        with _interpreter_lock, numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            keep_source(module)
            try:
                module.KERNEL[grid](*arguments)
            except Exception as error:
                if said := interpreter_failure(error):
                    raise LaunchError(f"{said}; {next_step(arguments)}") from error
                raise

    def next_step(arguments: Sequence[Any]) -> str:
        step = f"numpy is {numpy.__version__}, and Triton 3.6 needs one below 2.4: install another of the two"
        on_gpu = any(getattr(value, "is_cuda", False) for value in arguments)
        return f"{step}, or unset TRITON_INTERPRET, since these tensors are on a GPU" if on_gpu else step

    return run
