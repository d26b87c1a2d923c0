"""Which failures are the machine's, and say nothing about a kernel."""

import errno
import os
import pickle
import signal
import subprocess

import pytest

from fa_autotune.errors import CompileError, MachineError, WorkerDied
from fa_autotune.kernels.faults import is_machines


def caused_by(cause: BaseException) -> Exception:
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    return error


def died_by(number: int | None) -> WorkerDied:
    death = WorkerDied("worker died")
    death.signal = number
    return death


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        MemoryError(),
        MachineError("planted"),
        caused_by(OSError(errno.EIO, "Input/output error")),
        subprocess.CalledProcessError(1, ["gcc"]),
        died_by(signal.SIGKILL),
        died_by(signal.SIGTERM),
        WorkerDied("was killed by SIGABRT\nIts last output:\nterminate called after throwing 'std::bad_alloc'"),
        RuntimeError("`ptxas` failed with error code -9\n`ptxas` stderr:\n"),
        RuntimeError("`ptxas` stderr:\nptxas fatal   : Memory allocation failure"),
        RuntimeError(f"LLVM ERROR: IO failure on output stream: {os.strerror(errno.ENOSPC)}"),
    ],
    ids=repr,
)
def test_the_machine_is_to_blame_for(error: Exception) -> None:
    assert is_machines(error)


@pytest.mark.parametrize(
    "error",
    [
        CompileError("does not import"),
        RuntimeError("planted"),
        OSError("could not get source code"),
        died_by(signal.SIGABRT),
        died_by(signal.SIGSEGV),
        died_by(None),
        RuntimeError("`ptxas` failed with error code 255\nptxas fatal   : Ptx assembly aborted due to errors"),
        RuntimeError("`ptxas` failed with error code -11\n"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=repr,
)
def test_the_kernel_may_be_to_blame_for(error: Exception) -> None:
    assert not is_machines(error)


def test_causes_in_a_circle_end() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_machines(one)


def test_such_an_error_travels_between_processes() -> None:
    assert is_machines(pickle.loads(pickle.dumps(MachineError("planted"))))
