"""The dispatcher's reader: what comes out of good, bad and hostile files."""

import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase, reader
from fa_autotune.database.entries import MeasurementRow
from fa_autotune.database.reader import TABLES_OF_SCHEMA
from fa_autotune.database.rows import COLUMNS, knob_columns
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.database.writing import (
    device_values,
    kernel_identity,
    kernel_of,
    kernel_outcome,
    measurement_values,
    problem_values,
    trial_of,
    trial_values,
)
from fa_autotune.dispatch import winners as snapshot_module
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot, Source, load_snapshot
from fa_autotune.errors import DatabaseError, FaAutotuneError
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import PortableFwdConfig, TmaFwdConfig, config_from_key, config_key
from fa_autotune.space.registry import VARIANTS, variant_spec
from kit.hostile_files import HOSTILE
from kit.rights import outcome_in
from kit.tuning_samples import begin, failed_record, fill, ok_record, write_pack
from kit.tuning_samples import confirmed as finalist
from kit.winners import plain_config, variant_of

H200 = KNOWN_DEVICES["h200"]
PROBLEM = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
MOMENT = "2026-01-31T12:00:00.000000Z"
CONFIG = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
ROW: dict[str, Any] = {
    "device_fingerprint": H200.fingerprint,
    "device_arch": H200.arch,
    "device_name": H200.name,
    "problem_key": PROBLEM.key,
    "variant": "portable",
    "config": config_key(CONFIG),
    "kernel_digest": "0123456789abcdef",
    "form": "aligned",
    "triton": "3.7.1",
    "regime": "events",
    "median_ms": 1.5,
    "confirmed_at": MOMENT,
}
ABSENT = Path("/nonexistent/tuning.db")


def write_winners(path: Path, rows: list[dict[str, Any]], *, statements: tuple[str, ...] = ()) -> Path:
    """A file of our kind without types and checks, so that it can hold what our own writer refuses."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        for table, columns in TABLES_OF_SCHEMA[SCHEMA_VERSION].items():
            connection.execute(f"CREATE TABLE {table} ({', '.join(['id INTEGER PRIMARY KEY', *columns[1:]])})")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for number, row in enumerate(rows, start=1):
            insert_winner(connection, number, row)
        connection.execute("COMMIT")
        for statement in statements:
            connection.execute(statement)
    return path


def insert_winner(connection: sqlite3.Connection, number: int, row: dict[str, Any]) -> None:
    """A winner of rows of its own in every table, all with one id."""
    record = ok_record(digest=row["kernel_digest"], role=Role.CONFIRM, rank=1)
    assert record.measurement is not None
    try:
        problem = AttentionProblem.from_key(row["problem_key"])
        kind = variant_spec(problem.family.kernel_pass, Variant(row["variant"])).config_type
        config: Any = config_from_key(kind, row["config"])
    except (FaAutotuneError, ValueError):  # then the columns that repeat what the keys say don't matter
        problem, config = PROBLEM, CONFIG
    candidate = Candidate(family=problem.family, variant=Variant.PORTABLE, config=config)
    measured = {name: row["median_ms"] for name in ("p20_ms", "median_ms", "p80_ms")}
    values: dict[str, dict[str, Any]] = {
        "devices": {
            **device_values(H200),
            **{name: row[f"device_{name}"] for name in ("fingerprint", "arch", "name")},
        },
        "toolchains": {"triton": row["triton"], "cuda": None, "driver": None},
        "problems": {**problem_values(problem), "key": row["problem_key"]},
        "sessions": {
            **{"uid": f"session-{number}", "kind": "confirm", "state": "finished", "parent_id": None, "torch": None},
            **{"power_limit_w": None, "arguments": "{}", "started_at": row["confirmed_at"], "ended_at": None},
        },
        "kernels": {
            **{**kernel_identity(kernel_of(record, H200.arch)), **kernel_outcome(kernel_of(record, H200.arch))},
            **{**knob_columns(candidate), "family": problem.family.key, "digest": row["kernel_digest"]},
            **{name: row[name] for name in ("variant", "config", "form")},
        },
        "trials": trial_values(trial_of(record, MOMENT)),
        "measurements": {
            **measurement_values(MeasurementRow(measurement=record.measurement, measured_at=MOMENT)),
            **{**measured, "regime": row["regime"], "measured_at": row["confirmed_at"]},
        },
    }
    for table, found in values.items():
        columns = COLUMNS[table]
        parents = {name: number for name in columns if name.endswith("_id") and name != "parent_id"}
        whole = {**parents, **found, "id": number}
        marks = ", ".join("?" * len(columns))
        connection.execute(f"INSERT INTO {table} VALUES ({marks})", [whole[name] for name in columns])


def read_pack(path: Path) -> Snapshot:
    return load_snapshot(ABSENT, [path])


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return tmp_path / "pack.db"


def test_a_winner_comes_out_as_our_dataclasses(pack: Path) -> None:
    (row,) = read_pack(write_winners(pack, [ROW])).rows
    assert (row.problem, row.candidate.config, row.candidate.family) == (PROBLEM, CONFIG, PROBLEM.family)
    assert (row.device_fingerprint, row.median_ms, row.source, row.path) == (H200.fingerprint, 1.5, Source.PACK, pack)


def test_each_variant_has_its_own_config_class(pack: Path) -> None:
    config = TmaFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
    (row,) = read_pack(write_winners(pack, [{**ROW, "variant": "tma", "config": config_key(config)}])).rows
    assert row.candidate.config == config


@pytest.mark.parametrize("kernel_pass", BACKWARD_PASSES)
def test_a_winner_of_a_backward_comes_out_beside_those_of_the_forward(kernel_pass: Pass, pack: Path) -> None:
    problem = PROBLEM.for_pass(kernel_pass)
    config = plain_config(problem)
    backward = {**ROW, "problem_key": problem.key, "variant": variant_of(config).value, "config": config_key(config)}
    found = read_pack(write_winners(pack, [ROW, backward]))
    assert found.notes == ()
    assert {(row.problem, row.candidate.config) for row in found.rows} == {(PROBLEM, CONFIG), (problem, config)}


def test_a_config_of_another_pass_is_skipped(pack: Path) -> None:
    found = read_pack(write_winners(pack, [{**ROW, "problem_key": PROBLEM.for_pass(Pass.BWD_DQ).key}]))
    assert found.rows == ()
    assert "kernel_pass='fwd' is not 'bwd_dq', as its key says" in found.notes[0]


def test_absent_user_database_is_no_note() -> None:
    assert load_snapshot(ABSENT, []).notes == ()


def test_absent_pack_is_a_note() -> None:
    (note,) = load_snapshot(ABSENT, [Path("/nonexistent/pack.db")]).notes
    assert "/nonexistent/pack.db is not used" in note


def test_user_rows_are_marked_as_the_users(pack: Path) -> None:
    (row,) = load_snapshot(write_winners(pack, [ROW]), []).rows
    assert row.source is Source.USER


@pytest.mark.parametrize(
    "wrong",
    [
        {"problem_key": "{}"},
        {"problem_key": PROBLEM.key.replace('"seqlen_q":4096', '"seqlen_q":-1')},
        {"problem_key": "[" * 3000},
        {"variant": "hopper_ws"},
        {"variant": "tma"},
        {"config": config_key(CONFIG).replace('"BLOCK_M":64', '"BLOCK_M":1048576')},
        {"config": config_key(CONFIG).replace('"BLOCK_M":64', '"BLOCK_M":"{{ 7 * 7 }}"')},
        {"config": config_key(CONFIG)[:-1] + ',"extra":1}'},
        {"form": "general"},
        {"regime": "imagined"},
        {"median_ms": None},
        {"median_ms": float("inf")},
        {"median_ms": -1.0},
        {"median_ms": "fast"},
        {"median_ms": 1e300},
        {"median_ms": 5e-324},
        {"confirmed_at": "yesterday"},
        {"confirmed_at": "9999-12-31T23:59:59.999999Z"},
        {"device_name": "\x1b[2J cleared"},
        {"device_name": "n" * 201},
        {"device_name": b"\xff\xfe"},
        {"device_arch": "sm_80"},
        {"kernel_digest": None},
        {"kernel_digest": "../x"},
    ],
    ids=lambda wrong: "-".join(f"{name}={str(value)[:20]}" for name, value in wrong.items()),
)
def test_row_that_does_not_parse_is_skipped_with_a_note(pack: Path, wrong: dict[str, Any]) -> None:
    found = read_pack(write_winners(pack, [ROW, {**ROW, **wrong}]))  # the wrong one is the newer
    assert [(row.median_ms, row.device_name) for row in found.rows] == [(1.5, H200.name)]
    assert found.notes
    assert all(note.isprintable() and "not used" in note for note in found.notes)


def test_many_bad_rows_make_few_notes(pack: Path) -> None:
    found = read_pack(write_winners(pack, [{**ROW, "variant": str(number)} for number in range(50)]))
    assert len(found.notes) == 4
    assert "47 more" in found.notes[-1]


@pytest.mark.parametrize("content", [b"", b"not a database", os.urandom(4096)], ids=["empty", "text", "noise"])
def test_file_that_is_no_database_is_a_note(pack: Path, content: bytes) -> None:
    pack.write_bytes(content)
    found = load_snapshot(pack, [])
    assert (found.rows, len(found.notes)) == ((), 1)


def test_damaged_database_is_a_note(pack: Path) -> None:
    write_winners(pack, [ROW] * 20)
    content = bytearray(pack.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    pack.write_bytes(content)
    found = read_pack(pack)
    assert (found.rows, len(found.notes)) == ((), 1)


def test_folder_is_a_note(tmp_path: Path) -> None:
    assert "is not a file" in read_pack(tmp_path).notes[0]


def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in load_snapshot(tmp_path / "pipe", []).notes[0]


@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        (f"PRAGMA user_version = {SCHEMA_VERSION + 1}", "upgrade fa_autotune"),
        ("PRAGMA user_version = 0", "has schema 0"),
        ("PRAGMA application_id = 7", "not a tuning database"),
        ("DROP TABLE trials", "trials is no ordinary table (missing)"),
        ("ALTER TABLE toolchains DROP COLUMN triton", "toolchains does not store triton"),
    ],
)
def test_file_of_another_kind_is_a_note_that_says_why(pack: Path, pragma: str, said: str) -> None:
    found = read_pack(write_winners(pack, [ROW], statements=(pragma,)))
    assert found.rows == ()
    assert said in found.notes[0]


def test_locked_database_is_a_note(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "BUSY_TIMEOUT_S", 0.01)
    write_winners(pack, [ROW])
    with closing(sqlite3.connect(pack, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert "another process kept it" in read_pack(pack).notes[0]


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
SLOW = "SELECT hex(zeroblob(400000)) LIKE '%a%b%' || hex(zeroblob(9000)) || '%'"  # quadratic, in one step


@pytest.mark.parametrize("body", [ENDLESS, SLOW, "SELECT hex(zeroblob(900000000))", "SELECT load_extension('evil')"])
def test_a_view_of_a_file_is_never_run(pack: Path, body: str) -> None:
    statements = (f"CREATE VIEW winners AS {body}", f"CREATE VIEW leaderboard AS {body}")
    found = read_pack(write_winners(pack, [ROW], statements=statements))
    assert (len(found.rows), found.notes) == (1, ())


@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize(
    "instead",
    [
        "CREATE VIEW {table} AS SELECT * FROM hidden, (" + ENDLESS + ")",
        "CREATE VIRTUAL TABLE {table} USING fts4({columns})",
        "CREATE TABLE {table} ({columns}, x AS (hex(zeroblob(9))))",
    ],
    ids=["view", "virtual", "computed"],
)
def test_a_file_in_which_a_name_of_ours_is_no_plain_table_is_not_used(pack: Path, table: str, instead: str) -> None:
    columns = ", ".join(COLUMNS[table])
    if "hex" in instead:  # the last column of ours computes its values
        columns, _, last = columns.rpartition(", ")
        instead = instead.replace(" x AS", f" {last} AS")
    statements = (f"ALTER TABLE {table} RENAME TO hidden", instead.format(table=table, columns=columns))
    found = read_pack(write_winners(pack, [ROW], statements=statements))
    assert found.rows == ()
    assert f"{table} is no ordinary table" in found.notes[0] or f"{table} does not store" in found.notes[0]


def test_a_type_in_the_schema_that_is_not_what_its_statement_says_is_not_believed(pack: Path) -> None:
    lie = "UPDATE sqlite_master SET sql = 'CREATE VIEW trials AS SELECT 1' WHERE name = 'trials'"
    found = read_pack(write_winners(pack, [ROW], statements=("PRAGMA writable_schema = ON", lie)))
    assert (found.rows, len(found.notes)) == ((), 1)


def test_an_index_of_a_file_decides_nothing(pack: Path) -> None:
    """An index that a file brings may leave rows out: here it is of an empty table."""
    swap = """UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'other')
        WHERE name = 'mine'"""
    statements = (
        "CREATE INDEX mine ON measurements (role, rank, trial_id)",
        "CREATE TABLE void (a, b, c)",
        "CREATE INDEX other ON void (a, b, c)",
        "PRAGMA writable_schema = ON",
        swap,
    )
    assert len(read_pack(write_winners(pack, [ROW], statements=statements)).rows) == 1


def test_reading_has_a_limit_on_the_clock(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "READ_LIMIT_S", 0.0)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n LIMIT 9999) SELECT i FROM n"
    rows = f"INSERT INTO sessions (id) {numbers}"
    found = read_pack(write_winners(pack, [ROW], statements=(rows,)))
    assert found.rows == ()
    assert "takes longer than a file of ours may" in found.notes[0]


def test_a_file_with_too_many_winners_is_not_used(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_winners(pack, list(rows_of_some_variety()))
    assert len(read_pack(pack).rows) == 12
    monkeypatch.setattr(snapshot_module, "MAX_ROWS", 11)
    found = read_pack(pack)
    assert found.rows == ()
    assert "holds more than 11 winners" in found.notes[0]


def test_a_file_with_too_many_bad_rows_is_not_used(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_REFUSED", 3)
    found = read_pack(write_winners(pack, [ROW, *[{**ROW, "variant": str(number)} for number in range(4)]]))
    assert found.rows == ()
    assert "is not used: more than 3 of its rows are refused, such as: kernels row" in found.notes[0]


def test_one_text_that_is_read_many_times_has_a_limit(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_READ_BYTES", -(10**9))
    assert "bytes of what is read at once" in read_pack(write_winners(pack, [ROW])).notes[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_import_refuses_is_not_dispatched(name: str, tmp_path: Path) -> None:
    path = write_pack(tmp_path)
    HOSTILE[name](path)
    found = read_pack(path)
    assert found.rows == ()
    assert found.notes
    assert all(note.isprintable() and len(note) < 1500 for note in found.notes)
    with pytest.raises(DatabaseError), TuningDatabase(path, read_only=True) as database:
        database.winners()


def test_a_view_and_our_rules_name_the_same_winners(tmp_path: Path) -> None:
    """The view is for people and other tools; what is used is worked out from the rows."""
    for device, problem in [(H200, PROBLEM), (KNOWN_DEVICES["a100"], PROBLEM)]:
        with TuningDatabase(tmp_path / "t.db") as database:
            fill(database, device=device)
            session = begin(database, SessionKind.CONFIRM, device=device)
            for rank, (block_m, variant) in enumerate([(128, Variant.PORTABLE), (64, Variant.TMA)], start=1):
                database.save_trial(session, finalist(0.5, 1, block_m, problem=problem, variant=variant))
                database.save_trial(session, finalist(0.6, 1 + rank, 2 * block_m, problem=problem, variant=variant))
            later = begin(database, SessionKind.CONFIRM, device=device)
            database.save_trial(later, finalist(0.7, 1, 32, problem=problem, variant=Variant.PORTABLE))
            database.save_trial(later, failed_record(TrialStatus.CRASHED, 32))
            found = [(winner.trial_id, winner.session_id, winner.median_ms) for winner in database.winners()]
    with closing(sqlite3.connect(tmp_path / "t.db")) as connection:
        assert connection.execute("SELECT trial_id, session_id, median_ms FROM winners").fetchall() == found
    assert len(found) == 4


def test_reading_changes_nothing_beside_a_pack(pack: Path, tmp_path: Path) -> None:
    write_winners(pack, [ROW], statements=("PRAGMA journal_mode = wal",))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before["pack.db"][18:20] == b"\x02\x02"  # else the test would prove nothing
    assert len(read_pack(pack).rows) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def snapshot_of(folder: Path) -> str:
    found = load_snapshot(folder / "tuning.db", [])
    return f"{len(found.rows)} {found.notes}"


def test_a_wal_database_at_rest_in_a_folder_without_write_permission_is_read(public_folder: Path) -> None:
    with TuningDatabase(public_folder / "tuning.db") as database:
        fill(database)
    assert outcome_in(public_folder, snapshot_of) == "1 ()"


def left_open(folder: Path) -> None:
    with TuningDatabase(folder / "live.db") as database:
        fill(database)
        for suffix in ("", "-wal"):
            shutil.copy(folder / f"live.db{suffix}", folder / f"tuning.db{suffix}")


def test_a_wal_database_that_was_left_open_there_is_read(public_folder: Path) -> None:
    left_open(public_folder)
    assert outcome_in(public_folder, snapshot_of) == "1 ()"


def test_a_large_one_that_was_left_open_there_is_a_note(public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_COPY_BYTES", 0)
    left_open(public_folder)
    assert "is a live database (WAL) in a folder that can't be written" in outcome_in(public_folder, snapshot_of)


@pytest.mark.parametrize("source", Source)
def test_a_pipe_beside_a_database_is_a_note_and_not_waited_for(tmp_path: Path, source: Source) -> None:
    path = write_winners(tmp_path / "tuning.db", [ROW])
    os.mkfifo(tmp_path / "tuning.db-journal")
    found = load_snapshot(path, []) if source is Source.USER else read_pack(path)
    assert found.rows == ()
    assert "tuning.db-journal is no plain file" in found.notes[0]


def test_a_folder_that_may_not_be_entered_is_a_note(public_folder: Path) -> None:
    (public_folder / "closed").mkdir(mode=0o700)
    write_winners(public_folder / "closed" / "tuning.db", [ROW])
    text = outcome_in(public_folder, lambda folder: snapshot_of(folder / "closed"))
    assert text.startswith("0 (")
    assert "Permission denied" in text


def test_path_with_special_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=rwc#x%41.db"
    assert len(read_pack(write_winners(path, [ROW])).rows) == 1


def test_winners_of_an_open_writer_are_seen(pack: Path) -> None:
    write_winners(pack, [], statements=("PRAGMA journal_mode = wal",))
    with closing(sqlite3.connect(pack)) as writer:
        insert_winner(writer, 1, ROW)
        writer.commit()
        assert len(load_snapshot(pack, []).rows) == 1


def rows_of_some_variety() -> Iterator[dict[str, Any]]:
    for number in range(12):
        shape = replace(PROBLEM.shape, seqlen_k=1024 + number)
        yield {**ROW, "problem_key": replace(PROBLEM, shape=shape).key, "median_ms": 1.0 + number}


def test_content_hash_ignores_row_order_and_path(tmp_path: Path) -> None:
    rows = list(rows_of_some_variety())
    first = read_pack(write_winners(tmp_path / "first.db", rows))
    random.Random(7).shuffle(rows)
    second = read_pack(write_winners(tmp_path / "second.db", rows))
    assert first.content_hash == second.content_hash
    assert [row.problem for row in first.rows] == [row.problem for row in second.rows]


@pytest.mark.parametrize("change", [{"median_ms": 1.6}, {"triton": "3.7.2"}, {"kernel_digest": "fedcba9876543210"}])
def test_content_hash_changes_with_a_row(tmp_path: Path, change: dict[str, Any]) -> None:
    first = read_pack(write_winners(tmp_path / "first.db", [ROW]))
    second = read_pack(write_winners(tmp_path / "second.db", [{**ROW, **change}]))
    assert first.content_hash != second.content_hash


def test_content_hash_tells_the_users_rows_from_a_packs(pack: Path) -> None:
    write_winners(pack, [ROW])
    assert load_snapshot(pack, []).content_hash != load_snapshot(ABSENT, [pack]).content_hash


def test_related_rows_differ_in_access_alone(pack: Path) -> None:
    aligned, full = (AttentionProblem.parse(f"4x32x8x4096x4096x128,{flags}") for flags in ("causal,aligned", "full"))
    rows = [{**ROW, "problem_key": problem.key} for problem in (PROBLEM, aligned, full)]
    related = read_pack(write_winners(pack, rows)).related(PROBLEM.family)
    assert {row.problem for row in related} == {PROBLEM, aligned}


def test_every_variant_of_the_registry_can_be_read(pack: Path) -> None:
    rows = [
        {
            **ROW,
            "problem_key": PROBLEM.for_pass(spec.kernel_pass).key,
            "variant": spec.variant.value,
            "config": config_key(next(spec.configs())),
        }
        for spec in VARIANTS
    ]
    assert len(read_pack(write_winners(pack, rows)).rows) == len(VARIANTS)


# --- our own writer ---------------------------------------------------------------------------------------------------


def confirmed(path: Path, config: PortableFwdConfig, *, median_ms: float, rank: int = 1) -> None:
    """Store a finalist as a tuning job does."""
    record = TrialRecord(
        candidate=Candidate(family=PROBLEM.family, variant=Variant.PORTABLE, config=config),
        problem=PROBLEM,
        status=TrialStatus.OK,
        form=CompileForm.ALIGNED,
        kernel_digest="0123456789abcdef",
        resources=ResourceReport(registers=128, spill_bytes=0, smem_bytes=65536, compile_s=1.0),
        accuracy=AccuracyReport(max_error=0.0, max_error_ratio=0.5, mean_error_ratio=0.5, lse_error=0.0, probes=3),
        measurement=Measurement(
            role=Role.CONFIRM,
            regime=Regime.EVENTS,
            launches=100,
            p20_ms=median_ms,
            median_ms=median_ms,
            p80_ms=median_ms,
            rank=rank,
        ),
    )
    with TuningDatabase(path) as database:
        session = database.begin_session(kind=SessionKind.CONFIRM, device=H200, toolchain=Toolchain(triton="3.7.1"))
        database.save_trial(session, record)
        database.end_session(session, state=SessionState.FINISHED)


def test_winners_that_our_database_writes_come_out(pack: Path) -> None:
    confirmed(pack, CONFIG, median_ms=2.0)
    found = load_snapshot(pack, [])
    assert found.notes == ()
    (row,) = found.rows
    assert (row.problem, row.candidate.config, row.median_ms) == (PROBLEM, CONFIG, 2.0)
    assert (row.device_fingerprint, row.triton, row.regime) == (H200.fingerprint, "3.7.1", Regime.EVENTS)


def test_what_a_gate_stopped_when_it_was_looked_at_again_comes_out(pack: Path) -> None:
    """What it stopped while a job searched had won nowhere, and is not read."""
    with TuningDatabase(pack) as database:
        for kind, block_m in ((SessionKind.RECHECK, 64), (SessionKind.TUNE, 32)):
            stopped = failed_record(TrialStatus.OVER_RESOURCES, block_m)
            session = begin(database, kind, toolchain=Toolchain(triton="3.9.0"))
            database.save_trial(session, replace(stopped, kernel_digest=f"text{block_m}", constraint="spills"))
    found = load_snapshot(pack, [])
    (kernel,) = found.stopped
    assert (kernel.digest, kernel.arch, kernel.release, kernel.gate) == ("text64", H200.arch, "3.9", "spills")
    assert kernel.candidate == failed_record(TrialStatus.OVER_RESOURCES, 64).candidate
    assert found.rows == ()


def test_only_rank_one_comes_out_of_our_database(pack: Path) -> None:
    confirmed(pack, CONFIG, median_ms=2.0)
    confirmed(pack, replace(CONFIG, num_stages=2), median_ms=1.0, rank=2)
    assert [row.candidate.config for row in load_snapshot(pack, []).rows] == [CONFIG]


def test_pack_that_our_database_exports_reads_as_it_was(pack: Path, tmp_path: Path) -> None:
    confirmed(pack, CONFIG, median_ms=2.0)
    with TuningDatabase(pack) as database:
        database.export(tmp_path / "exported.db")
    assert read_pack(tmp_path / "exported.db").content_hash == read_pack(pack).content_hash


def test_misses_of_a_dispatcher_end_in_the_users_database(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(pack))
    counting = Dispatcher(device=H200, triton_version="3.7.1", load=lambda: Snapshot(rows=()), digest_of=None)
    counting.decide(PROBLEM)
    counting.decide(PROBLEM)
    counting.flush_misses()
    with TuningDatabase(pack) as database:
        assert [(miss.problem, miss.count) for miss in database.misses()] == [(PROBLEM, 2)]
