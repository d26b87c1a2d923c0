"""What a row may hold, and what a refusal says: table, row and rule."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlite_utils import Database

from fa_autotune.database.entries import MeasurementRow
from fa_autotune.database.migrations import migrate
from fa_autotune.database.rows import (
    COLUMNS,
    MAX_ARGUMENTS,
    MAX_ERROR,
    Row,
    clean_text,
    device_from,
    kernel_from,
    knob_columns,
    measurement_from,
    parse_time,
    problem_from,
    record_from,
    session_from,
    toolchain_from,
    trial_from,
    utc_text,
)
from fa_autotune.database.writing import (
    device_values,
    kernel_identity,
    kernel_of,
    kernel_outcome,
    measurement_values,
    problem_values,
    toolchain_values,
    trial_of,
    trial_values,
)
from fa_autotune.errors import InvalidPackError
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.records import TrialStatus
from kit.tuning_samples import ACCURACY, H200, OTHER_PROBLEM, PROBLEM, TOOLCHAIN, failed_record, ok_record

MOMENT = "2026-01-31T12:00:00.000000Z"
RECORD = ok_record()
SESSION: dict[str, Any] = {
    **{"uid": "0a-b_", "kind": "tune", "state": "finished", "torch": None, "power_limit_w": None},
    **{"arguments": "{}", "started_at": MOMENT, "ended_at": None},
}
# For each table: its parser, and a row that it reads.
ROWS: dict[str, tuple[Callable[[Row], object], dict[str, Any]]] = {
    "devices": (device_from, device_values(H200)),
    "toolchains": (toolchain_from, toolchain_values(TOOLCHAIN)),
    "problems": (problem_from, problem_values(PROBLEM)),
    "kernels": (
        kernel_from,
        {
            **kernel_identity(kernel_of(RECORD, "sm_90")),
            **knob_columns(RECORD.candidate),
            **kernel_outcome(kernel_of(RECORD, "sm_90")),
        },
    ),
    "sessions": (session_from, SESSION),
    "trials": (trial_from, trial_values(trial_of(RECORD, MOMENT))),
    "measurements": (
        measurement_from,
        measurement_values(MeasurementRow(measurement=RECORD.measurement, measured_at=MOMENT)),  # type: ignore[arg-type]
    ),
}


def read(table: str, **changes: object) -> Any:
    parse, row = ROWS[table]
    return parse({**row, "id": 7, **changes})


@pytest.mark.parametrize("table", ROWS)
def test_what_is_written_is_read_back(table: str) -> None:
    assert set(ROWS[table][1]) >= {name for name in COLUMNS[table] if name != "id" and not name.endswith("_id")}
    expected = {
        "devices": H200,
        "toolchains": type(TOOLCHAIN)(triton=TOOLCHAIN.triton, cuda=TOOLCHAIN.cuda, driver=TOOLCHAIN.driver),
        "problems": PROBLEM,
        "kernels": kernel_of(RECORD, "sm_90"),
        "trials": trial_of(RECORD, MOMENT),
        "measurements": MeasurementRow(measurement=RECORD.measurement, measured_at=MOMENT),  # type: ignore[arg-type]
    }
    found = read(table)
    assert found == expected.get(table, found)
    assert table != "sessions" or (found.uid, found.started_at, found.ended_at) == ("0a-b_", MOMENT, None)


@pytest.mark.parametrize(
    ("table", "column", "value", "says"),
    [
        ("devices", "num_sms", "132", "num_sms='132' is not an integer from 0"),
        ("devices", "num_sms", -1, "num_sms=-1 is not an integer from 0"),
        ("devices", "num_sms", 133, "fingerprint=.* is not .*133sm.*, as its figures say"),
        ("devices", "arch", "sm_90; rm", "arch='sm_90; rm' does not match"),
        ("devices", "name", "a\x1b[31m", "is not 1 to 200 printable characters"),
        ("toolchains", "triton", "", "triton='' is not 1 to 200 printable characters"),
        ("toolchains", "cuda", b"12", "cuda=<bytes> is not 1 to 200 printable characters"),
        ("problems", "key", " " + PROBLEM.key, "is not in canonical form"),
        ("problems", "key", "{}", "missing or unknown entries|schema"),
        ("problems", "seqlen_q", 4097, "seqlen_q=4097 is not 4096, as its key says"),
        ("problems", "seqlen_q", 4096.0, "seqlen_q=4096.0 is not 4096, as its key says"),
        ("kernels", "num_warps", 8, "num_warps=8 is not 4, as its config says"),
        ("kernels", "form", "general", "form='general' does not serve access=tma"),
        ("kernels", "variant", "../evil", "variant='../evil' is not one of: portable"),
        ("kernels", "config", "{}", "config|schema"),
        ("kernels", "config", ROWS["kernels"][1]["config"] + " ", "is not in canonical form"),
        ("kernels", "digest", "../x", "digest='../x' does not match"),
        ("kernels", "compile_warnings", "[1]", "compile_warnings='\\[1\\]' is not a list of short texts"),
        ("kernels", "compile_warnings", "[", "compile_warnings is not JSON"),
        ("sessions", "arguments", "[]", "arguments are not a JSON object"),
        ("sessions", "arguments", "[" * MAX_ARGUMENTS, "arguments are not JSON"),
        ("sessions", "arguments", '{"a": NaN}', "arguments are not JSON: NaN"),
        ("sessions", "arguments", '{"a": -Infinity}', "arguments are not JSON: -Infinity"),
        ("sessions", "arguments", '{"a": 1e999}', "arguments are not JSON: 1e999 is past"),
        ("sessions", "arguments", '{"a": 1, "a": 2}', "an object has a name twice"),
        ("sessions", "arguments", '{"a":' + "[" * 40 + "]" * 40 + "}", "nests deeper than 32"),
        ("sessions", "started_at", "2026-01-31", "is not a past moment written as 2026-01-31T12"),
        ("sessions", "started_at", "2999-01-31T12:00:00.000000Z", "is not a past moment"),
        ("trials", "status", "fine", "status='fine' is not one of: ok"),
        ("trials", "error", "x" * (MAX_ERROR + 1), f"is not text of at most {MAX_ERROR} printable characters"),
        ("trials", "duration_s", float("inf"), "duration_s=inf is not a time from 0 to 1e\\+09 s"),
        ("trials", "duration_s", 1e12, "duration_s=1000000000000.0 is not a time from 0 to 1e\\+09 s"),
        ("kernels", "compile_s", 1e9, "compile_s=1000000000.0 is not a time from 0 to 1e\\+09 s"),
        ("trials", "max_error", True, "max_error=True is not a finite number"),
        ("measurements", "median_ms", 0.0, "median_ms=0.0 is not a time from 1e-06 to 1e"),
        ("measurements", "median_ms", 5e-324, "median_ms=5e-324 is not a time from 1e-06 to 1e"),
        ("measurements", "median_ms", 1e9, "median_ms=1000000000.0 is not a time from 1e-06 to 1e"),
        ("measurements", "median_ms", 2.0, "median_ms=2.0 is not between 0.75 and 1.25"),
        ("measurements", "launches", 0, "launches=0 is not an integer from 1"),
        ("measurements", "rank", 0, "rank=0 is not an integer from 1"),
        ("measurements", "early_stopped", 2, "early_stopped=2 is not an integer from 0 to 1"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named_with_its_table_row_and_rule(
    table: str, column: str, value: object, says: str
) -> None:
    with pytest.raises(InvalidPackError, match=f"^{table} row 7: .*(?:{says})"):
        read(table, **{column: value})


UNLIKELY = (None, -1, 0, 2, 2**63 - 1, 0.5, -0.5, 1e9, 1e12, float("inf"), "", "fine", b"fine")


def refusal(connection: sqlite3.Connection, table: str, column: str, value: object) -> str | None:
    """What SQLite says against a value in a row that is right but for that; None if the schema takes it."""
    row = {**{name: 1 for name in COLUMNS[table] if name.endswith("_id")}, **ROWS[table][1], column: value}
    names = ", ".join(row)
    try:
        connection.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", list(row.values()))
    except sqlite3.IntegrityError as error:
        return str(error)
    finally:
        connection.rollback()
    return None


@pytest.mark.parametrize("table", ROWS)
def test_what_the_schema_refuses_is_refused_when_it_is_read(table: str) -> None:
    """Else an import fails at its last step, with SQLite's own words, and dispatch takes what an import refuses."""
    refused = 0
    with closing(sqlite3.connect(":memory:")) as connection:
        migrate(Database(connection, execute_plugins=False))
        checks = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
        for column in ROWS[table][1]:
            assert refusal(connection, table, column, ROWS[table][1][column]) is None
            worse = {value: said for value in UNLIKELY if (said := refusal(connection, table, column, value))}
            is_checked = f"CHECK ({column} " in checks
            assert is_checked is any("CHECK constraint" in said for said in worse.values())
            for value in worse if column in COLUMNS[table] else ():
                refused += 1
                with pytest.raises(InvalidPackError, match=f"^{table} row 7: "):
                    read(table, **{column: value})
    assert refused


def test_a_figure_that_is_absent_is_beyond_every_bound() -> None:
    found = read("trials", max_error=None, lse_error=None)
    assert (found.accuracy.max_error, found.accuracy.lse_error) == (float("inf"), float("inf"))
    assert found.accuracy.max_error_ratio == ACCURACY.max_error_ratio


def test_only_a_trial_that_ended_well_has_a_measurement() -> None:
    kernel, measured = read("kernels"), read("measurements")
    assert record_from(kernel, PROBLEM, H200, read("trials"), measured) == RECORD
    failed = trial_of(failed_record(TrialStatus.CRASHED), MOMENT)
    assert record_from(kernel, PROBLEM, H200, failed, measured).measurement is None
    with pytest.raises(InvalidPackError, match="a trial has status ok, but no measurement; ok says that it was timed"):
        record_from(kernel, PROBLEM, H200, read("trials"), None)
    with pytest.raises(InvalidPackError, match=r"a trial has a kernel of family .* on problem"):
        record_from(kernel, OTHER_PROBLEM, H200, read("trials"), measured)
    with pytest.raises(InvalidPackError, match="its kernel is for sm_90, its device has sm_80"):
        record_from(kernel, PROBLEM, KNOWN_DEVICES["a100"], read("trials"), measured)


# --- text and time ----------------------------------------------------------------------------------------------------


def test_moments_are_utc_sort_as_text_and_come_back() -> None:
    early = datetime(2026, 1, 31, 13, tzinfo=timezone(timedelta(hours=1)))
    late = datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC)
    assert utc_text(early) == MOMENT < utc_text(late)
    assert [parse_time(utc_text(one)) for one in (early, late)] == [early, late]
    with pytest.raises(InvalidPackError, match="'tomorrow' is not a moment in ISO-8601"):
        parse_time("tomorrow")


def test_text_loses_what_steers_a_terminal_and_its_middle_where_it_is_long() -> None:
    assert clean_text("a\tb\nc", 100) == "a\tb\nc"
    assert clean_text("\x1b[31m\u202e\ud800", 100) == "\ufffd[31m\ufffd\ufffd"
    cut = clean_text("begin" + "x" * 100 + "end", 21)
    assert (len(cut), cut[:5], cut[-3:], "\n…\n" in cut) == (21, "begin", "end", True)
