"""Compiles candidates side by side, as a search does, for tests of what templates compile to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from fa_autotune.kernels.compiler import CompilePool, CompileResult
from fa_autotune.kernels.gates import CompileRequest
from fa_autotune.kernels.modules import write_module
from fa_autotune.kernels.render import render
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import compile_form

CompileAll = Callable[[Sequence[Candidate], str, int], list[CompileResult]]  # for an arch and its shared memory


@contextmanager
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompileAll]:
    """Give a function that compiles candidates for an arch with so many bytes of shared memory."""
    folder = tmp_path_factory.mktemp("kernels")
    with CompilePool(2, deadline_s=240.0) as pool:

        def compile_all(candidates: Sequence[Candidate], arch: str, smem_limit_bytes: int) -> list[CompileResult]:
            requests = [
                CompileRequest(
                    module_path=write_module(render(candidate), folder),
                    arch=arch,
                    form=compile_form(candidate.family),
                    variant=candidate.variant,
                    smem_limit_bytes=smem_limit_bytes,
                )
                for candidate in candidates
            ]
            return [future.result() for future in map(pool.submit, requests)]

        yield compile_all
