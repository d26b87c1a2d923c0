"""Many processes on one file: none loses what was committed, none sees a half-made database."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from fa_autotune.database import SessionState, TuningDatabase
from kit.tuning_samples import H200, PROBLEM, TOOLCHAIN, begin, ok_record

# Each process imports, says that it is ready, and waits for a line, so that all open the file at once.
PRELUDE = """
import sys
from pathlib import Path
from kit.tuning_samples import *
from fa_autotune.database import Miss, SessionKind, SessionState, TuningDatabase
path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""


def start(code: str, path: Path) -> "subprocess.Popen[str]":
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )


def let_go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def all_at_once(code: str, path: Path, processes: int) -> list[str]:
    """Run code in several processes from the same moment on, and give what each wrote to stderr."""
    started = [start(code, path) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        let_go(process)
    return [process.communicate(timeout=120)[1] for process in started]


def test_sixteen_processes_create_one_database(tmp_path: Path) -> None:
    code = "TuningDatabase(path).save_trial(begin(TuningDatabase(path)), ok_record())"
    assert all_at_once(code, tmp_path / "new" / "tuning.db", 16) == [""] * 16
    with TuningDatabase(tmp_path / "new" / "tuning.db") as database:
        counts = database.info().counts
    assert (counts["sessions"], counts["devices"], counts["trials"], counts["measurements"]) == (16, 1, 1, 16)


def test_eight_writers_lose_no_update(tmp_path: Path) -> None:
    code = """
database = TuningDatabase(path)
for _ in range(25):
    database.add_misses([Miss(problem=PROBLEM, device_fingerprint=H200.fingerprint)])
"""
    assert all_at_once(code, tmp_path / "tuning.db", 8) == [""] * 8
    with TuningDatabase(tmp_path / "tuning.db") as database:
        assert [miss.count for miss in database.misses()] == [200]


def test_eight_writers_of_the_same_trials_leave_one_of_each(tmp_path: Path) -> None:
    code = """
database = TuningDatabase(path)
session = begin(database)
for block_m in (16, 32, 64, 128) * 4:
    database.save_trial(session, ok_record(1.0, block_m))
"""
    assert all_at_once(code, tmp_path / "tuning.db", 8) == [""] * 8
    with TuningDatabase(tmp_path / "tuning.db") as database:
        counts = database.info().counts
    assert (counts["trials"], counts["measurements"]) == (4, 32)


SAVE_FOR_EVER = """
database = TuningDatabase(path)
session = begin(database)
for batch_size in range(1, 10**6):
    problem = AttentionProblem.parse(f"{batch_size}x8x8x512x512x128,causal")
    database.save_trial(session, ok_record(problem=problem))
    print(problem.key, flush=True)
"""


def killed_writer(path: Path, trials: int) -> list[str]:
    """Kill a process while it saves, and give the keys of the problems that it said were saved."""
    process = start(SAVE_FOR_EVER, path)
    assert process.stdout is not None
    process.stdout.readline()
    let_go(process)
    saved = [process.stdout.readline() for _ in range(trials)]
    process.send_signal(signal.SIGKILL)
    saved += process.communicate(timeout=60)[0].splitlines(keepends=True)
    return [line.rstrip("\n") for line in saved if line.endswith("\n")]


def test_a_killed_writer_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    saved = killed_writer(tmp_path / "tuning.db", 30)
    with TuningDatabase(tmp_path / "tuning.db") as database:
        found = [trial.record.problem.key for trial in database.trials()]
    assert found[: len(saved)] == saved
    assert len(found) - len(saved) <= 1  # saved, but killed before it could say so


def test_a_killed_writers_session_is_interrupted_by_the_next(tmp_path: Path) -> None:
    killed_writer(tmp_path / "tuning.db", 1)
    with TuningDatabase(tmp_path / "tuning.db") as database:
        mine = begin(database)
    with closing(sqlite3.connect(tmp_path / "tuning.db")) as connection:
        states = connection.execute("SELECT id, state, ended_at IS NULL FROM sessions ORDER BY id").fetchall()
    assert states == [(mine - 1, SessionState.INTERRUPTED, 0), (mine, SessionState.RUNNING, 1)]


def test_a_living_sessions_state_is_left_alone(tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "tuning.db") as first, TuningDatabase(tmp_path / "tuning.db") as second:
        begin(first)
        begin(second)
    with closing(sqlite3.connect(tmp_path / "tuning.db")) as connection:
        assert connection.execute("SELECT DISTINCT state FROM sessions").fetchall() == [("running",)]


def session_of_another_process(path: Path, *changes: str) -> str:
    """The state of a running session after the next has begun, had its process been another."""
    with TuningDatabase(path) as database:
        session = begin(database)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"UPDATE sessions SET {', '.join(changes)}")
            begin(database)
            return str(connection.execute("SELECT state FROM sessions WHERE id = ?", (session,)).fetchone()[0])


def test_a_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    assert session_of_another_process(tmp_path / "a.db", "process_start = '1'") == "interrupted"


def test_another_hosts_session_is_left_alone_for_a_day(tmp_path: Path) -> None:
    assert session_of_another_process(tmp_path / "a.db", "host = 'elsewhere'", "pid = 1") == "running"


def test_another_hosts_session_that_saves_nothing_for_a_day_is_interrupted(tmp_path: Path) -> None:
    changes = ("host = 'elsewhere'", "started_at = '2026-01-01T00:00:00.000000Z'")
    assert session_of_another_process(tmp_path / "a.db", *changes) == "interrupted"


def test_a_reader_sees_trials_while_they_are_written(tmp_path: Path) -> None:
    with (
        TuningDatabase(tmp_path / "tuning.db") as writer,
        TuningDatabase(tmp_path / "tuning.db", read_only=True) as reader,
    ):
        session = begin(writer)
        before = len(reader.trials())
        writer.save_trial(session, ok_record())
        assert (before, len(reader.trials(device=H200, toolchain=TOOLCHAIN, problem=PROBLEM))) == (0, 1)
