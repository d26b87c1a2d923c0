"""Database files: looked into and changed past our own code, and written by other processes."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from fa_autotune.database import TuningDatabase
from fa_autotune.records import TrialRecord

# Each process imports, says that it is ready, and waits for a line, so that all open the file at once.
_PRELUDE = """
import sys
from pathlib import Path
from kit.tuning_samples import *
from fa_autotune.database import Miss, SessionKind, SessionState, TuningDatabase
path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""
_SAVE_FOR_EVER = """
database = TuningDatabase(path)
session = begin(database)
for batch_size in range(1, 10**6):
    problem = AttentionProblem.parse(f"{batch_size}x8x8x512x512x128,causal")
    database.save_trial(session, ok_record(problem=problem))
    print(problem.key, flush=True)
"""


def records(database: TuningDatabase, **filters: Any) -> list[TrialRecord]:
    """The records of a database's trials."""
    return [trial.record for trial in database.trials(**filters)]


def edit(path: Path, *statements: str, unchecked: bool = True) -> None:
    """Change a file behind our back, past its CHECKs and types."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if unchecked:
            connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)


def scalars(path: Path, statement: str) -> list[Any]:
    """The first column of what a statement finds."""
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(statement)]


def save_and_leave_open(path: Path, *statements: str) -> None:
    """Change a file as a process does that is killed then: what it saved stays in the log beside the file."""
    live = path.with_name(f"live-{path.name}")
    shutil.copy(path, live)
    with closing(sqlite3.connect(live, isolation_level=None)) as connection:
        for statement in ("PRAGMA journal_mode = wal", "PRAGMA ignore_check_constraints = ON", *statements):
            connection.execute(statement)
        for side in ("", "-wal"):
            shutil.copy(f"{live}{side}", f"{path}{side}")
    live.unlink()


# --- other processes --------------------------------------------------------------------------------------------------


def _start(code: str, path: Path) -> "subprocess.Popen[str]":
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )


def _let_go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def all_at_once(code: str, path: Path, processes: int) -> list[str]:
    """Run code in several processes from the same moment on, and give what each wrote to stderr."""
    started = [_start(code, path) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        _let_go(process)
    return [process.communicate(timeout=120)[1] for process in started]


def killed_writer(path: Path, trials: int) -> list[str]:
    """Kill a process while it saves, and give the keys of the problems that it said were saved."""
    process = _start(_SAVE_FOR_EVER, path)
    assert process.stdout is not None
    process.stdout.readline()
    _let_go(process)
    saved = [process.stdout.readline() for _ in range(trials)]
    process.send_signal(signal.SIGKILL)
    saved += process.stdout.readlines()  # `communicate` would pass over lines that were read ahead
    process.communicate(timeout=60)
    return [line.rstrip("\n") for line in saved if line.endswith("\n")]
