"""Actions of a user who may not write a folder, whoever runs the tests."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path


def outcome(folder: Path, action: Callable[[Path], object]) -> str:
    """What an action gives, or its error, in a process that can't write the folder, even if root runs the tests."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that other tests left; the child needs none
        child = os.fork()
    if child == 0:
        folder.chmod(0o555)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            text = str(action(folder))
        except BaseException as error:  # noqa: BLE001  the parent looks at it
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    folder.chmod(0o755)
    return text
