"""Triton's interpreter, which runs kernels on CPU tensors in a process started with TRITON_INTERPRET=1.

It is not thread-safe and rounds bfloat16 wrongly: a lock and a shim see to both.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

_interpreter_lock = threading.Lock()


def interpreted(module: ModuleType) -> Callable[[tuple[int, ...], Sequence[Any]], None]:
    import numpy  # noqa: PLC0415 - Triton's interpreter brings it

    install_interpreter_shim()

    def run(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        # log2(0), inf − inf and a row of NaN have defined results in a kernel; numpy would warn, and of Triton 3.6.
        with _interpreter_lock, numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            module.KERNEL[grid](*arguments)

    return run


@cache
def install_interpreter_shim() -> None:
    """Make Triton's interpreter treat bfloat16 as a GPU does.

    Triton 3.6 and 3.7 keep bfloat16 as raw 16-bit integers there, multiply those integers in `dot`, and truncate on the
    way from fp32. Here dot operands are widened to fp32 first and casts round to nearest even.
    """
    import numpy  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    def widen(data: Any) -> Any:
        return (data.astype(numpy.uint32) << 16).view(numpy.float32)

    def narrow(data: Any) -> Any:
        bits = numpy.ascontiguousarray(data).view(numpy.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
        quiet_nan = ((bits >> 16) | 0x40).astype(numpy.uint16)
        return numpy.where(numpy.isnan(data), quiet_nan, rounded)

    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def operand(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(widen(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, operand(a), operand(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrow(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
