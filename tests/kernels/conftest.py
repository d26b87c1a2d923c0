"""Fixtures of tests that compile kernels."""

from collections.abc import Iterator

import pytest

from fa_autotune.kernels.compiler import CompilePool
from kit.compile_candidates import PATIENCE_S, CompileAll, compiling


@pytest.fixture(scope="session")
def compile_pool() -> Iterator[CompilePool]:
    """The compilers of this process's tests: each takes seconds to start, and is then kept."""
    with CompilePool(2, deadline_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture(scope="session")
def compile_all(compile_pool: CompilePool, tmp_path_factory: pytest.TempPathFactory) -> CompileAll:
    """Compiles candidates side by side, for an arch and its shared memory."""
    return compiling(compile_pool, tmp_path_factory.mktemp("kernels"))
