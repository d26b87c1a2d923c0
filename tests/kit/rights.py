"""Actions of a user without root's rights, which ignore permissions, whoever runs the tests."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534


def outcome(action: Callable[[], object], *, umask: int | None = None) -> str:
    """What an action gives, or its error, as text, in a child process that has given up root's rights."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that other tests left; the child needs none
        child = os.fork()
    if child == 0:
        try:
            if umask is not None:
                os.umask(umask)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            text = str(action())
        except BaseException as error:  # noqa: BLE001  the parent looks at it
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def outcome_in(folder: Path, action: Callable[[Path], object]) -> str:
    """The same of an action on a folder that it can't write."""
    folder.chmod(0o555)
    try:
        return outcome(lambda: action(folder))
    finally:
        folder.chmod(0o755)
