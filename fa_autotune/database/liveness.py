"""Which process runs a session, and whether it still lives."""

import os
import socket
import sqlite3
from datetime import timedelta
from pathlib import Path

from fa_autotune.database.entries import utc_now
from fa_autotune.database.rows import utc_text
from fa_autotune.database.writing import Values

_MAX_PID = 2**31
_LEASE = timedelta(days=1)  # a session of another host that saved nothing for so long counts as dead


def process_values() -> Values:
    """The columns of `sessions` that say which process runs it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_start": _process_start(os.getpid())}


def interrupt_dead_sessions(connection: sqlite3.Connection) -> None:
    """Mark the running sessions whose process has ended as interrupted, at the time of their last trial.

    What a session that is not running had claimed is free again.
    """
    running = """
        SELECT id, host, pid, process_start, max(
            started_at,
            ifnull((SELECT max(ended_at) FROM trials WHERE trials.session_id = sessions.id), ''),
            ifnull((SELECT max(claimed_at) FROM claims WHERE claims.session_id = sessions.id), '')) AS last_seen
        FROM sessions WHERE state = 'running'"""
    for row in connection.execute(running).fetchall():
        if not _is_alive(row):
            statement = "UPDATE sessions SET state = 'interrupted', ended_at = ? WHERE id = ?"
            connection.execute(statement, (row["last_seen"], row["id"]))
    connection.execute("DELETE FROM claims WHERE session_id IN (SELECT id FROM sessions WHERE state <> 'running')")


def _is_alive(row: sqlite3.Row) -> bool:
    if row["host"] != socket.gethostname():
        return str(row["last_seen"]) > utc_text(utc_now() - _LEASE)
    if type(row["pid"]) is not int or not 0 < row["pid"] < _MAX_PID:  # of no process
        return False
    try:
        os.kill(row["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    # Process ids are used again; the start time tells who it is, where the system has it.
    return bool(_process_start(row["pid"]) == row["process_start"]) and not _has_ended(row["pid"])


def _process_start(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process, as Linux counts them; None elsewhere."""
    found = _stat_of(pid)
    return found[19] if found else None


def _has_ended(pid: int) -> bool:
    """True for a process that is there until its parent asks what became of it, where the system tells."""
    return _stat_of(pid)[:1] in (["Z"], ["X"], ["x"])


def _stat_of(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on; nothing elsewhere."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()
