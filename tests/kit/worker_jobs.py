"""Jobs for the worker's tests: at the top of an importable module, as jobs must be."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

calls = 0


class NeedsTwoArguments(Exception):
    """An exception that pickles but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def add(left: int, right: int) -> int:
    return left + right


def count_calls() -> int:
    global calls
    calls += 1
    return calls


def process_id() -> int:
    return os.getpid()


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def spin() -> None:
    while True:
        pass


def hang_holding_the_interpreter_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def fail(message: str) -> None:
    raise ValueError(message)


def fail_unpicklably() -> None:
    raise NeedsTwoArguments("salt", "pepper")


def exit_hard(code: int) -> None:
    print("last words", flush=True)
    os._exit(code)


def exit_softly(code: int) -> None:
    sys.exit(code)


def die_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def touch_null() -> None:
    ctypes.string_at(0)


def return_lambda() -> object:
    return lambda: None


def print_megabytes(megabytes: int) -> int:
    line = b"x" * 1023 + b"\n"
    for _ in range(megabytes * 1024):
        os.write(1, line)
    print("printed", megabytes)
    return megabytes


def print_and_die(megabytes: int) -> None:
    print_megabytes(megabytes)
    print("the end is near", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGABRT)


def echo(payload: bytes) -> bytes:
    return payload


def environ(name: str) -> str | None:
    return os.environ.get(name)


def search_path() -> list[str]:
    return sys.path


def wait_for_child(pid_file: Path) -> None:
    """Start a grandchild that outlives everything unless killed, say its process id, and wait for it."""
    child = subprocess.Popen(["sleep", "300"])
    pid_file.write_text(str(child.pid))
    child.wait()


def leave_child_behind(pid_file: Path) -> None:
    """Start a grandchild that keeps inherited descriptors, as an assembler started by a compiler does, and die."""
    child = subprocess.Popen(["sleep", "300"], close_fds=False)
    pid_file.write_text(str(child.pid))
    os._exit(1)


def announce_and_spin(pid_file: Path) -> None:
    pid_file.write_text(str(os.getpid()))
    spin()


def announce_and_hold_the_interpreter_lock(pid_file: Path) -> None:
    pid_file.write_text(str(os.getpid()))
    hang_holding_the_interpreter_lock(300)
