"""Rows found by what identifies them, or added; and which of two writes stays."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from fa_autotune.database.connection import open_writable
from fa_autotune.database.entries import CompileStatus, KernelRow, MeasurementRow, SessionState
from fa_autotune.database.rows import kernel_from, session_from
from fa_autotune.database.writing import (
    kernel_of,
    put_device,
    put_kernel,
    put_measurement,
    put_problem,
    put_session,
    put_toolchain,
    put_trial,
    require_readable,
    trial_of,
)
from fa_autotune.errors import DatabaseError
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.records import TrialStatus
from kit.tuning_samples import H200, PROBLEM, RESOURCES, TOOLCHAIN, failed_record, measurement, ok_record

EARLY, LATE = "2026-01-01T00:00:00.000000Z", "2026-02-01T00:00:00.000000Z"
SESSION = session_from(
    {
        **{"id": 1, "uid": "one", "kind": "tune", "state": "running", "torch": "2.13.0", "power_limit_w": 700.0},
        **{"arguments": "{}", "started_at": EARLY, "ended_at": None},
    }
)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(open_writable(None)) as opened:
        yield opened


def keys_of(connection: sqlite3.Connection, kernel: KernelRow | None = None) -> dict[str, Any]:
    """The rows that a trial refers to."""
    toolchain_id, device_id = put_toolchain(connection, TOOLCHAIN), put_device(connection, H200)
    return {
        "kernel_id": put_kernel(
            connection, kernel or kernel_of(ok_record(), "sm_90"), toolchain_id=toolchain_id, overwrite=True
        )[0],
        "problem_id": put_problem(connection, PROBLEM),
        "device_id": device_id,
        "session_id": put_session(connection, SESSION, device_id=device_id, toolchain_id=toolchain_id),
    }


def value(connection: sqlite3.Connection, column: str, table: str) -> Any:
    (row,) = connection.execute(f"SELECT {column} FROM {table}").fetchall()
    return row[0]


def test_rows_are_found_by_what_identifies_them(connection: sqlite3.Connection) -> None:
    renamed = replace(H200, name="of another vendor", power_limit_w=1.0)
    assert put_device(connection, H200) == put_device(connection, renamed)
    assert put_device(connection, KNOWN_DEVICES["t4"]) != put_device(connection, H200)
    assert put_toolchain(connection, TOOLCHAIN) == put_toolchain(connection, replace(TOOLCHAIN, torch="9.9"))
    assert put_problem(connection, PROBLEM) == put_problem(connection, PROBLEM)
    name = connection.execute("SELECT name FROM devices ORDER BY id").fetchone()[0]
    assert name == H200.name  # that came first


@pytest.mark.parametrize(
    ("status", "resources", "compiled"),
    [
        (TrialStatus.OK, None, CompileStatus.COMPILED),
        (TrialStatus.WRONG_RESULT, None, CompileStatus.COMPILED),
        (TrialStatus.CRASHED, RESOURCES, CompileStatus.COMPILED),
        (TrialStatus.CRASHED, None, CompileStatus.NOT_COMPILED),
        (TrialStatus.COMPILE_FAILED, None, CompileStatus.FAILED),
        (TrialStatus.REJECTED, None, CompileStatus.NOT_COMPILED),
    ],
)
def test_how_a_trial_ended_says_whether_its_kernel_compiled(
    status: TrialStatus, resources: Any, compiled: CompileStatus
) -> None:
    record = ok_record() if status is TrialStatus.OK else failed_record(status)
    assert kernel_of(replace(record, resources=resources), "sm_90").compile_status is compiled


def test_kernels_differ_by_their_digest_and_no_digest_is_one_too(connection: sqlite3.Connection) -> None:
    toolchain_id = put_toolchain(connection, TOOLCHAIN)
    kernels = [replace(kernel_of(ok_record(), "sm_90"), digest=digest) for digest in ("a", "b", None, None, "a")]
    ids = [put_kernel(connection, kernel, toolchain_id=toolchain_id, overwrite=False)[0] for kernel in kernels]
    assert ids[2] == ids[3]
    assert ids[0] == ids[4]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(("overwrite", "registers"), [(True, 99), (False, 168)])
def test_what_the_compiler_said_is_replaced_only_if_asked(
    overwrite: bool, registers: int, connection: sqlite3.Connection
) -> None:
    toolchain_id, kernel = put_toolchain(connection, TOOLCHAIN), kernel_of(ok_record(), "sm_90")
    put_kernel(connection, kernel, toolchain_id=toolchain_id, overwrite=True)
    other = replace(kernel, resources=replace(RESOURCES, registers=99))
    put_kernel(connection, other, toolchain_id=toolchain_id, overwrite=overwrite)
    assert value(connection, "registers", "kernels") == registers
    silent = replace(kernel, resources=None, compile_status=CompileStatus.NOT_COMPILED)
    put_kernel(connection, silent, toolchain_id=toolchain_id, overwrite=True)  # one that never got that far
    assert value(connection, "registers", "kernels") == registers


@pytest.mark.parametrize(
    ("ended_at", "overwrite", "changed"),
    [(LATE, False, True), (EARLY, False, False), (EARLY, True, True)],
)
def test_the_later_of_two_trials_stays(
    ended_at: str, overwrite: bool, changed: bool, connection: sqlite3.Connection
) -> None:
    keys = keys_of(connection)
    before = trial_of(ok_record(), EARLY)
    trial_id, is_new = put_trial(connection, before, keys=keys, overwrite=False)
    assert is_new
    after = trial_of(failed_record(TrialStatus.CRASHED), ended_at)
    assert put_trial(connection, after, keys=keys, overwrite=overwrite) == (trial_id, changed)
    assert value(connection, "status", "trials") == ("crashed" if changed else "ok")


def test_the_later_of_two_measurements_stays(connection: sqlite3.Connection) -> None:
    keys = keys_of(connection)
    trial_id, _ = put_trial(connection, trial_of(ok_record(), EARLY), keys=keys, overwrite=False)

    def put(median_ms: float, measured_at: str) -> bool:
        row = MeasurementRow(measurement=measurement(median_ms), measured_at=measured_at)
        return put_measurement(connection, row, trial_id=trial_id, session_id=keys["session_id"], overwrite=False)

    assert [put(1.0, EARLY), put(2.0, LATE), put(3.0, EARLY)] == [True, True, False]
    assert value(connection, "median_ms", "measurements") == 2.0


def test_a_session_of_another_database_does_not_run_here_and_ends_when_it_is_brought_again(
    connection: sqlite3.Connection,
) -> None:
    ids = {"device_id": put_device(connection, H200), "toolchain_id": put_toolchain(connection, TOOLCHAIN)}
    first = put_session(connection, SESSION, **ids)
    assert value(connection, "state", "sessions") == "interrupted"
    ended = replace(SESSION, state=SessionState.FINISHED, ended_at=LATE)
    assert put_session(connection, ended, **ids) == first
    assert put_session(connection, SESSION, **ids) == first  # an older copy changes nothing
    assert (value(connection, "state", "sessions"), value(connection, "ended_at", "sessions")) == ("finished", LATE)


def test_a_row_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(DatabaseError, match=r"kernels row to be written: .*; nothing was saved, correct the record"):
        require_readable(kernel_from, {"family": "{}"})
