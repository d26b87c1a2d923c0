"""Fixtures and options that all tests share."""

import os
import platform
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # torch is imported by the tests that need it
    from fa_autotune.kernels.loaded import LoadedKernel
    from fa_autotune.space.candidate import Candidate

# Where there is no GPU, kernels run in Triton's interpreter. Triton reads this once, when it is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers of pytest-xdist fill the cores: torch's threads, which it counts as it starts, would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("fa_autotune", deadline=None)  # a busy machine is no failure
settings.load_profile("fa_autotune")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _gpu_name() -> str | None:
    """Name of the first GPU, or None. Only asked for the header and before a GPU test, never while collecting."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def pytest_report_header(config: pytest.Config) -> str:
    """What a reader of a log must know to repeat it."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "numpy", "optuna"))
    gpu = "not asked (worker)" if hasattr(config, "workerinput") else _gpu_name() or "none"
    return f"gpu: {gpu}; {packages}, sqlite {sqlite3.sqlite_version}, python {platform.python_version()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests when they run, so that collecting them starts no CUDA."""
    if item.get_closest_marker("gpu") and _gpu_name() is None:
        pytest.skip("no GPU that torch can use")


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's database and caches out of every test, and of the processes that tests start.

    The workers of a run share the caches: what is put there is named for what it holds, and written whole.
    """
    folder = tmp_path_factory.mktemp("own")
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "FA_AUTOTUNE_DB", str(folder / "tuning.db"))
        patch.delitem(os.environ, "COLUMNS", raising=False)  # which the workers of a run are given: tables honour it
        patch.setitem(os.environ, "FA_AUTOTUNE_CACHE", str(shared / "cache"))
        # Inductor finds a graph again by what it calls, also where another release's operators take other arguments.
        patch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
        yield


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The checkout's root folder."""
    return Path(__file__).resolve().parent.parent


# --- generated kernels in this process --------------------------------------------------------------------------------


@pytest.fixture
def kernels_can_run() -> None:
    """What a test needs that runs generated kernels; tests/attention_calls.py marks them."""
    import torch

    from fa_autotune.paths import interpreting

    if not interpreting() and not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use, and kernels are not interpreted (TRITON_INTERPRET=1)")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has called nothing yet."""
    from fa_autotune.dispatch import loaded_kernels as live_kernels
    from kit.attention_calls import forget_plans

    forget_plans(monkeypatch)
    for name in ("_kernels", "_dispatchers"):
        monkeypatch.setattr(live_kernels, name, {})


@pytest.fixture
def loads(cold: None, monkeypatch: pytest.MonkeyPatch) -> "list[Candidate]":
    """The candidates loaded since the process was cold."""
    from fa_autotune.dispatch import loaded_kernels as live_kernels

    loaded: list[Candidate] = []
    load = live_kernels.load_kernel

    def counted(candidate: "Candidate", *where: Any) -> "LoadedKernel":
        loaded.append(candidate)
        return load(candidate, *where)

    monkeypatch.setattr(live_kernels, "load_kernel", counted)
    return loaded


@pytest.fixture
def reference_only(cold: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without an interpreter, in which CPU tensors run the reference."""
    from fa_autotune.dispatch import loaded_kernels as live_kernels
    from fa_autotune.ops import plans as calls

    for module in (calls, live_kernels):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    calls.tell_of_reference.cache_clear()
    yield
    calls.tell_of_reference.cache_clear()
