"""Triton's interpreter as it runs our kernels: rounded as on a GPU, and one launch at a time."""

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from fa_autotune.errors import LaunchError
from fa_autotune.kernels.interpreter import interpreted
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.kernels.triton_private import install_interpreter_shim
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")


@pytest.mark.kernel
@needs_interpreter
def test_the_interpreter_rounds_bfloat16_to_nearest_even() -> None:
    """One key: the output is that value row, and the cast of exact values must not change them."""
    family = AttentionProblem.parse("1x1x1x64x64x32").family
    config = variant_spec(family.kernel_pass, Variant.PORTABLE).config(
        BLOCK_M=32, BLOCK_N=16, num_warps=2, num_stages=1
    )
    kernel = load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)
    q, k, _ = (torch.ones(1, 1, rows, 32, dtype=torch.bfloat16) for rows in (1, 2, 2))
    low, high = torch.tensor(1.0), torch.tensor(1.0078125)  # neighbours in bfloat16; their mean is a tie, to even
    out, lse = torch.empty_like(q), torch.empty(1, 1, 1)
    for pair, rounded in (((low, high), 1.0), ((high, high + 0.0078125), 1.015625)):
        v = torch.stack([value.expand(32) for value in pair]).to(torch.bfloat16)[None, None]
        kernel(q, k, v, out, lse, 1.0, None)
        assert out.float().unique().tolist() == [rounded]


@needs_interpreter
def test_what_a_comparison_gives_are_bools() -> None:
    """A block made of one of two numbers is a mask only so: Triton 3.9 refuses masks of integers, others read them."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    install_interpreter_shim()
    builder: Any = InterpreterBuilder()
    number = TensorHandle(numpy.array([7], dtype=numpy.int32), tl.int32)
    told, total = builder.create_icmpEQ(number, number), builder.create_add(number, number)
    assert (told.dtype, told.data.tolist(), total.dtype, total.data.tolist()) == (tl.int1, [True], tl.int32, [14])
    assert builder.create_splat(tl.block_type(tl.int1, [4]), told).data.dtype == numpy.bool_


class FakeKernel:
    """Stands for a kernel that the interpreter runs: `body` is called with the arguments of each launch."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.body = body

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.body(grid, *arguments)


@needs_interpreter
@pytest.mark.parametrize("is_cuda", [False, True])
def test_what_the_interpreter_falls_over_is_an_error_of_ours(is_cuda: bool) -> None:
    """As Triton 3.6 does with numpy 2.4, which no longer takes an array of one number for a number."""
    from triton.runtime.errors import InterpreterError

    def body(grid: tuple[int, ...], *arguments: object) -> None:
        try:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        except TypeError as error:
            raise InterpreterError(repr(error)) from error

    run = interpreted(SimpleNamespace(KERNEL=FakeKernel(body)))  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"Triton .* fails with only 0-dim.*; numpy is .*below 2\.4") as caught:
        run((1,), [SimpleNamespace(is_cuda=is_cuda)])
    assert ("unset TRITON_INTERPRET" in str(caught.value)) is is_cuda


@needs_interpreter
def test_an_error_of_a_kernel_of_ours_stays_what_it_is() -> None:
    def body(grid: tuple[int, ...], *arguments: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interpreted(SimpleNamespace(KERNEL=FakeKernel(body)))((1,), [])  # type: ignore[arg-type]


@needs_interpreter
def test_launches_of_several_threads_run_one_after_another() -> None:
    """All kernels share one lock: what the interpreter keeps between programs belongs to the process."""
    running, most, lock = 0, 0, threading.Lock()

    def body(grid: tuple[int, ...]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    kernels = [interpreted(SimpleNamespace(KERNEL=FakeKernel(body))) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: kernels[number % 2]((1, 1, 1), ()), range(8)))
    assert most == 1


@needs_interpreter
def test_a_launch_gets_its_grid_and_its_arguments() -> None:
    launched = []
    run = interpreted(SimpleNamespace(KERNEL=FakeKernel(lambda *values: launched.append(values))))
    run((3, 1, 1), (1, None, 0.5))
    assert launched == [((3, 1, 1), 1, None, 0.5)]


@needs_interpreter
def test_what_is_defined_in_a_kernel_is_no_warning_of_numpys_and_other_warnings_are_told() -> None:
    def body(grid: tuple[int, ...]) -> None:
        numpy.log2(numpy.zeros(1))
        numpy.full(1, numpy.inf) - numpy.full(1, numpy.inf)
        numpy.nanmax(numpy.full(1, numpy.nan))
        warnings.warn("of another kind", RuntimeWarning, stacklevel=1)

    with pytest.warns(RuntimeWarning) as told:
        interpreted(SimpleNamespace(KERNEL=FakeKernel(body)))((1, 1, 1), ())
    assert [str(one.message) for one in told] == ["of another kind"]
