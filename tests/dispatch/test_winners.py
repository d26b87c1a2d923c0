"""The dispatcher's reader: what comes out of good, bad and hostile files."""

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.dispatch import winners as snapshot_module
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot, Source, load_snapshot
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import PortableFwdConfig, TmaFwdConfig, config_key
from fa_autotune.space.registry import VARIANTS
from kit.winners import plain_config, variant_of

H200 = KNOWN_DEVICES["h200"]
PROBLEM = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
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
    "confirmed_at": "2026-08-01T12:00:00+00:00",
}
ABSENT = Path("/nonexistent/tuning.db")


def write_winners(path: Path, rows: list[dict[str, Any]], *, statements: tuple[str, ...] = ()) -> Path:
    """A file of our kind whose `winners` is a plain table, so that it can hold what our own writer refuses."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"CREATE TABLE winners ({', '.join(ROW)})")
        for row in rows:
            connection.execute(f"INSERT INTO winners VALUES ({', '.join('?' * len(ROW))})", tuple(row.values()))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in statements:
            connection.execute(statement)
    return path


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
    assert "ROW_SUM_LANES" in found.notes[0]


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
        {"confirmed_at": "yesterday"},
        {"device_name": "\x1b[2J cleared"},
        {"device_name": "n" * 5000},
        {"device_name": b"\xff\xfe"},
        {"device_arch": "sm_80"},
        {"kernel_digest": None},
    ],
    ids=lambda wrong: "-".join(f"{name}={str(value)[:20]}" for name, value in wrong.items()),
)
def test_row_that_does_not_parse_is_skipped_with_a_note(pack: Path, wrong: dict[str, Any]) -> None:
    found = read_pack(write_winners(pack, [{**ROW, **wrong}, ROW]))
    assert len(found.rows) == 1
    assert len(found.notes) == 1
    assert found.notes[0].isprintable()


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
    write_winners(pack, [ROW] * 200)
    content = bytearray(pack.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    pack.write_bytes(content)
    found = read_pack(pack)
    assert (found.rows, len(found.notes)) == ((), 1)


def test_folder_is_a_note(tmp_path: Path) -> None:
    assert "it is not a file" in read_pack(tmp_path).notes[0]


def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a file" in load_snapshot(tmp_path / "pipe", []).notes[0]


@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        (f"PRAGMA user_version = {SCHEMA_VERSION + 1}", "upgrade fa-autotune"),
        ("PRAGMA user_version = 0", "has schema 0"),
        ("PRAGMA application_id = 7", "not a tuning database"),
        ("DROP TABLE winners", "no view `winners`"),
        ("ALTER TABLE winners DROP COLUMN triton", "no such column"),
    ],
)
def test_file_of_another_kind_is_a_note_that_says_why(pack: Path, pragma: str, said: str) -> None:
    found = read_pack(write_winners(pack, [ROW], statements=(pragma,)))
    assert found.rows == ()
    assert said in found.notes[0]


def test_locked_database_is_a_note(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_BUSY_TIMEOUT_S", 0.01)
    write_winners(pack, [ROW])
    with closing(sqlite3.connect(pack, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert "locked by another process" in read_pack(pack).notes[0]


def hostile_view(path: Path, body: str) -> Path:
    return write_winners(path, [], statements=("DROP TABLE winners", f"CREATE VIEW winners AS {body}"))


def test_view_that_never_ends_is_a_note(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_MAX_VM_STEPS", 200_000)
    counting = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
    hostile_view(pack, counting + ", ".join(f"max(i) AS {name}" for name in ROW) + " FROM n")
    assert "more than 200000 steps" in read_pack(pack).notes[0]


def test_view_with_endless_rows_is_a_note(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_ROWS", 100)
    counting = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
    hostile_view(pack, counting + ", ".join(f"i AS {name}" for name in ROW) + " FROM n")
    found = read_pack(pack)
    assert found.rows == ()
    assert "pass 100 rows" in found.notes[0]


def test_view_with_huge_text_is_a_note(pack: Path) -> None:
    hostile_view(pack, "SELECT " + ", ".join(f"hex(zeroblob(900000000)) AS {name}" for name in ROW))
    assert "too big" in read_pack(pack).notes[0]


def test_view_cannot_call_functions_that_are_not_innocuous(pack: Path) -> None:
    hostile_view(pack, "SELECT " + ", ".join(f"load_extension('evil') AS {name}" for name in ROW))
    found = read_pack(pack)
    assert "unsafe use of load_extension" in found.notes[0]


def test_reading_changes_nothing_beside_a_pack(pack: Path, tmp_path: Path) -> None:
    write_winners(pack, [ROW], statements=("PRAGMA journal_mode = wal",))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before["pack.db"][18:20] == b"\x02\x02"  # else the test would prove nothing
    assert len(read_pack(pack).rows) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_wal_database_that_only_opens_as_immutable_is_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_winners(pack, [ROW], statements=("PRAGMA journal_mode = wal",))
    real = sqlite3.connect

    def connect(database: str, **options: Any) -> sqlite3.Connection:
        if "immutable" not in database:  # what SQLite says in a folder without write permission
            raise sqlite3.OperationalError("unable to open database file")
        connection: sqlite3.Connection = real(database, **options)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    assert len(load_snapshot(pack, []).rows) == 1


def test_path_with_special_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=rwc#x%41.db"
    assert len(read_pack(write_winners(path, [ROW])).rows) == 1


def test_winners_of_an_open_writer_are_seen(pack: Path) -> None:
    write_winners(pack, [], statements=("PRAGMA journal_mode = wal",))
    with closing(sqlite3.connect(pack)) as writer:
        writer.execute(f"INSERT INTO winners VALUES ({', '.join('?' * len(ROW))})", tuple(ROW.values()))
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
