"""Which failures are the machine's: a disk, memory, a cache, another program. They say nothing about a kernel."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator

from fa_autotune.errors import MachineError, WorkerDied

MAX_ERROR_CHARACTERS = 1000  # compilers print pages of intermediate code

# How the system, compilers and assemblers word it where they only leave a text.
_ERRNOS = (
    errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS, errno.ESTALE
)  # fmt: skip
_TEXTS = (
    *(os.strerror(number) for number in _ERRNOS),
    "memory allocation failure",
    "memory exhausted",
    "virtual memory exhausted",
    "llvm error: out of memory",
    "std::bad_alloc",
    "failed to find c compiler",
)
# From outside; and of SIGBUS, which a full disk or a file cut short sends to who has it mapped.
_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGXFSZ,
    signal.SIGBUS,
)  # fmt: skip
_ENDS = tuple(text for number in _SIGNALS for text in (f"error code -{number:d}\n", f"error code {128 + number:d}\n"))


def is_machines(error: BaseException) -> bool:
    """Whether a failure, or what it came from, is the machine's."""
    return any(_is_one(one) for one in _causes(error))


def _is_one(error: BaseException) -> bool:
    if isinstance(error, MachineError | MemoryError | subprocess.SubprocessError):
        return True
    if isinstance(error, OSError):
        return error.errno is not None  # Python's own way to say that a source is not found has none
    if isinstance(error, WorkerDied) and error.signal in _SIGNALS:
        return True
    text = f"{error}\n"
    return any(end in text for end in _ENDS) or any(part.lower() in text.lower() for part in _TEXTS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if error.__cause__ is None:
            return
        error = error.__cause__
