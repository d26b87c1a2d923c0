"""Which sessions count as running: those whose process lives."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fa_autotune.database import SessionState, TuningDatabase, liveness
from kit.database_files import killed_writer
from kit.tuning_samples import OTHER_PROBLEM, PROBLEM, begin


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


def test_a_process_that_ended_and_that_nobody_asked_for_is_dead(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked what became of it
    start = liveness._process_start(ended.pid)
    assert session_of_another_process(tmp_path / "a.db", f"pid = {ended.pid}", f"process_start = '{start}'") == (
        "interrupted"
    )
    ended.wait()


@pytest.mark.parametrize("pid", ["NULL", "0", "-1", "1 << 40"])
def test_a_process_id_that_is_none_is_of_no_process(tmp_path: Path, pid: str) -> None:
    assert session_of_another_process(tmp_path / "a.db", f"pid = {pid}") == "interrupted"


def test_claims_are_of_one_live_session_each(tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "a.db") as first, TuningDatabase(tmp_path / "a.db") as second:
        one, other = begin(first), begin(second)
        assert [first.claim(one, PROBLEM), first.claim(one, PROBLEM)] == [None, None]
        assert [second.claim(other, PROBLEM), second.claim(other, OTHER_PROBLEM)] == [one, None]
        second.release(other, PROBLEM)  # not its own
        assert second.claim(other, PROBLEM) == one
        first.end_session(one, state=SessionState.FINISHED)
        assert second.claim(other, PROBLEM) is None


def test_another_hosts_session_is_left_alone_for_a_day(tmp_path: Path) -> None:
    assert session_of_another_process(tmp_path / "a.db", "host = 'elsewhere'", "pid = 1") == "running"


def test_another_hosts_session_that_saves_nothing_for_a_day_is_interrupted(tmp_path: Path) -> None:
    changes = ("host = 'elsewhere'", "started_at = '2026-01-01T00:00:00.000000Z'")
    assert session_of_another_process(tmp_path / "a.db", *changes) == "interrupted"
