"""Packs: what travels between databases, and what no pack can smuggle in."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.database.entries import ImportSummary
from fa_autotune.errors import DatabaseError, InvalidPackError
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.records import (
    TrialStatus,
)
from kit.database_files import edit, records, scalars
from kit.hostile_files import HOSTILE, rewrite_schema
from kit.tuning_samples import (
    H200,
    begin,
    candidate,
    confirmed,
    failed_record,
    fill,
    ok_record,
    write_pack,
)


@pytest.fixture(params=["memory", "file"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TuningDatabase]:
    with TuningDatabase(":memory:" if request.param == "memory" else tmp_path / "new" / "tuning.db") as opened:
        yield opened


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path)


class TestExchange:
    def test_importing_twice_changes_nothing(self, database: TuningDatabase, pack: Path) -> None:
        assert database.import_pack(pack).trials == 2
        before = database.export_json(winners_only=False)
        assert not database.import_pack(pack).changed
        assert database.export_json(winners_only=False) == before

    def test_a_pack_that_is_imported_again_takes_back_no_recheck(self, database: TuningDatabase, pack: Path) -> None:
        database.import_pack(pack)
        for key in database.kernels_of_winners():
            assert database.renew_kernel(key, "today")
        assert not database.import_pack(pack).changed
        assert [winner.kernel_digest for winner in database.winners()] == ["today"]

    def test_what_was_rechecked_elsewhere_is_renewed_here(
        self, database: TuningDatabase, pack: Path, tmp_path: Path
    ) -> None:
        database.import_pack(pack)
        with TuningDatabase(":memory:") as elsewhere:
            elsewhere.import_pack(pack)
            for key in elsewhere.kernels_of_winners():
                elsewhere.renew_kernel(key, "today")
            elsewhere.export(tmp_path / "renewed.db")
        assert database.import_pack(tmp_path / "renewed.db") == ImportSummary(updated_kernels=1)
        assert [winner.kernel_digest for winner in database.winners()] == ["today"]

    def test_machine_code_that_another_has_named_comes_along(
        self, database: TuningDatabase, pack: Path, tmp_path: Path
    ) -> None:
        database.import_pack(pack)
        with TuningDatabase(":memory:") as elsewhere:
            elsewhere.import_pack(pack)
            for key in elsewhere.kernels_of_winners():
                elsewhere.name_machine_code(key, "c0de")
            elsewhere.export(tmp_path / "named.db")
        assert database.import_pack(tmp_path / "named.db") == ImportSummary(updated_kernels=1)
        ((kernel, _),) = database.kernels_of_winners().values()
        assert kernel.resources is not None
        assert kernel.resources.code_digest == "c0de"

    def test_a_pack_holds_the_winner_and_whom_it_beat(self, pack: Path) -> None:
        with TuningDatabase(pack, read_only=True) as database:
            assert {record.candidate.config.BLOCK_M for record in records(database)} == {32, 64}
            assert [winner.candidate.config.BLOCK_M for winner in database.winners()] == [64]

    def test_a_pack_says_nothing_of_the_machine(self, pack: Path) -> None:
        found = scalars(pack, "SELECT coalesce(host, pid, process_start, arguments) FROM sessions")
        assert found == ["{}"]

    def test_a_pack_is_one_file_in_delete_mode(self, pack: Path) -> None:
        assert scalars(pack, "PRAGMA journal_mode") == ["delete"]
        assert [path.name for path in pack.parent.iterdir()] == [pack.name]

    def test_a_full_export_holds_every_trial(self, database: TuningDatabase, tmp_path: Path) -> None:
        fill(database)
        assert database.export(tmp_path / "all.db", winners_only=False) == 5
        with TuningDatabase(tmp_path / "all.db", read_only=True) as copy:
            assert copy.export_json(winners_only=False) == database.export_json(winners_only=False)

    def test_a_full_export_keeps_which_session_began_which(self, database: TuningDatabase, tmp_path: Path) -> None:
        fill(database)
        database.export(tmp_path / "all.db", winners_only=False)
        parents = "SELECT parents.kind FROM sessions JOIN sessions AS parents ON parents.id = sessions.parent_id"
        assert scalars(tmp_path / "all.db", parents) == ["tune"]

    def test_an_export_of_one_device_holds_no_other(self, database: TuningDatabase, tmp_path: Path) -> None:
        for device in (H200, KNOWN_DEVICES["a100"]):
            fill(database, device=device)
        database.export(tmp_path / "a100.db", device=KNOWN_DEVICES["a100"])
        assert scalars(tmp_path / "a100.db", "SELECT name FROM devices") == [KNOWN_DEVICES["a100"].name]

    def test_an_export_of_one_release_of_triton_holds_no_other(self, database: TuningDatabase, tmp_path: Path) -> None:
        fill(database)
        newer = Toolchain(triton="3.9.0")
        database.save_trial(begin(database, SessionKind.CONFIRM, toolchain=newer), confirmed(0.8, 1))
        for release, median_ms in (("3.7", 0.9), ("3.7.2", 0.9), ("3.9", 0.8)):
            database.export(tmp_path / f"{release}.db", release=release)
            with TuningDatabase(tmp_path / f"{release}.db", read_only=True) as pack:
                assert [winner.median_ms for winner in pack.winners()] == [median_ms]
            text = json.loads(database.export_json(release=release))
            assert [winner["median_ms"] for winner in text["winners"]] == [median_ms]
        with pytest.raises(DatabaseError, match=r"has nothing of Triton 3\.8; its releases are 3\.7, 3\.9"):
            database.export(tmp_path / "none.db", release="3.8")

    def test_a_pack_holds_what_a_gate_stopped_when_it_was_looked_at_again(
        self, database: TuningDatabase, tmp_path: Path
    ) -> None:
        """And not what it stopped while a job searched."""
        stopped = failed_record(TrialStatus.OVER_RESOURCES, 64)
        for kind, block_m in ((SessionKind.RECHECK, 64), (SessionKind.TUNE, 32)):
            session = begin(database, kind, toolchain=Toolchain(triton="3.9.0"))
            database.save_trial(session, replace(stopped, candidate=candidate(block_m)))
        database.export(tmp_path / "pack.db", release="3.9")
        with TuningDatabase(tmp_path / "pack.db", read_only=True) as pack:
            assert [trial.record.candidate.config.BLOCK_M for trial in pack.trials()] == [64]

    def test_a_pack_replaces_an_older_pack(self, database: TuningDatabase, pack: Path) -> None:
        database.export(pack)
        assert scalars(pack, "SELECT count(*) FROM trials") == [0]

    def test_a_pack_never_replaces_a_database_in_use(self, tmp_path: Path) -> None:
        with TuningDatabase(tmp_path / "tuning.db") as database:
            fill(database)
            with pytest.raises(DatabaseError, match="in use"):
                database.export(tmp_path / "tuning.db")
            assert len(database.trials()) == 5

    def test_a_pack_never_replaces_the_database_that_it_is_made_of(self, pack: Path) -> None:
        """… nor the user's, where that is at rest as packs are."""
        with TuningDatabase(pack, read_only=True) as database, pytest.raises(DatabaseError, match="in use"):
            database.export(pack)

    def test_a_pack_never_replaces_the_users_database(
        self, database: TuningDatabase, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FA_AUTOTUNE_DB", str(pack))
        before = pack.read_bytes()
        for target in (pack, pack.with_name("link.db")):
            if target != pack:
                target.symlink_to(pack)
            with pytest.raises(DatabaseError, match="in use"):
                database.export(target)
        assert pack.read_bytes() == before

    def test_on_a_full_disk_the_older_pack_stays(
        self, database: TuningDatabase, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, names = pack.read_bytes(), set(pack.parent.iterdir())

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(DatabaseError, match="No space left"):
            database.export(pack)
        assert (pack.read_bytes(), set(pack.parent.iterdir())) == (before, names)

    def test_a_pack_never_replaces_a_file_of_others(self, database: TuningDatabase, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("my thesis")
        with pytest.raises(DatabaseError, match="not a pack"):
            database.export(tmp_path / "thesis.txt")
        assert (tmp_path / "thesis.txt").read_text() == "my thesis"

    @pytest.mark.parametrize("side", ["-wal", "-journal"])
    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_pack_is_not_put_beside_what_an_earlier_file_left(
        self, database: TuningDatabase, pack: Path, side: str, is_there: bool
    ) -> None:
        """SQLite would read it as a part of the pack."""
        left = pack.with_name(f"pack.db{side}")
        left.write_bytes(b"x" * 4096)
        before = pack.read_bytes()
        if not is_there:
            pack.unlink()
        with pytest.raises(DatabaseError, match=rf"pack\.db{side} lies where .* move it away"):
            database.export(pack)
        assert (left.read_bytes(), pack.exists()) == (b"x" * 4096, is_there)
        assert not is_there or pack.read_bytes() == before

    def test_empty_files_that_an_earlier_one_left_go(self, database: TuningDatabase, pack: Path) -> None:
        for side in ("-wal", "-journal"):
            pack.with_name(f"pack.db{side}").touch()
        pack.with_name("pack.db-shm").write_bytes(b"x" * 32768)
        database.export(pack)
        assert [path.name for path in pack.parent.glob("pack.db*")] == [pack.name]

    def test_a_pack_that_was_tuned_is_not_replaced(self, database: TuningDatabase, pack: Path) -> None:
        with TuningDatabase(pack) as other:
            other.save_trial(begin(other), ok_record())
        with pytest.raises(DatabaseError, match=r"which a database in use .* is not"):
            database.export(pack)

    def test_the_later_of_two_trials_stays_whatever_the_order_of_imports(self, tmp_path: Path) -> None:
        paths = [tmp_path / "early.db", tmp_path / "late.db"]
        for path, status in zip(paths, (TrialStatus.TIMED_OUT, TrialStatus.CRASHED), strict=True):
            with TuningDatabase(path) as source:
                source.save_trial(begin(source), failed_record(status))
        for order in (paths, paths[::-1]):
            with TuningDatabase(":memory:") as target:
                for path in order:
                    target.import_pack(path)
                assert [record.status for record in records(target)] == [TrialStatus.CRASHED]

    def test_a_running_session_arrives_as_interrupted_and_is_finished_by_a_later_import(self, tmp_path: Path) -> None:
        with TuningDatabase(tmp_path / "a.db") as source, TuningDatabase(tmp_path / "b.db") as target:
            session = begin(source)
            source.save_trial(session, ok_record())
            target.import_pack(tmp_path / "a.db")
            states = [scalars(tmp_path / "b.db", "SELECT state FROM sessions")]
            source.end_session(session, state=SessionState.FINISHED)
            target.import_pack(tmp_path / "a.db")
            states += [scalars(tmp_path / "b.db", "SELECT state FROM sessions")]
        assert states == [["interrupted"], ["finished"]]

    def test_a_database_is_not_imported_into_itself(self, tmp_path: Path) -> None:
        with TuningDatabase(tmp_path / "a.db") as database, pytest.raises(DatabaseError, match="the database itself"):
            database.import_pack(tmp_path / "a.db")

    def test_the_text_of_equal_contents_is_equal(self, database: TuningDatabase, pack: Path) -> None:
        fill(database)
        with TuningDatabase(pack, read_only=True) as other:
            texts = [json.loads(source.export_json())["winners"] for source in (database, other)]
        for winners in texts:
            winners[0].pop("confirmed_at")
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pack_is_refused_whole(name: str, pack: Path) -> None:
    HOSTILE[name](pack)
    with TuningDatabase(":memory:") as database:
        with pytest.raises(DatabaseError, match=r"source you trust|damaged") as caught:
            database.import_pack(pack)
        assert set(database.info().counts.values()) == {0}
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


def test_a_refusal_names_table_row_and_rule(pack: Path) -> None:
    edit(pack, "UPDATE measurements SET launches = 0 WHERE id = 2")
    with (
        TuningDatabase(":memory:") as database,
        pytest.raises(InvalidPackError, match=r"measurements row 2: launches=0 is not an integer from 1"),
    ):
        database.import_pack(pack)


def test_a_packs_views_and_triggers_are_never_run(pack: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) AS trial_id FROM n"
    edit(
        pack,
        "DROP VIEW winners",
        f"CREATE VIEW winners AS {endless}",
        "CREATE TRIGGER gone AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
    )
    with TuningDatabase(pack, read_only=True) as source, TuningDatabase(":memory:") as database:
        database.import_pack(pack)
        assert len(database.winners()) == len(source.winners()) == 1


FOREIGN = {
    "trigger": "CREATE TRIGGER gone AFTER INSERT ON trials BEGIN DELETE FROM measurements; END",
    "trigger on a table of its own": "CREATE TRIGGER gone AFTER INSERT ON notes BEGIN DELETE FROM measurements; END",
    "view": "CREATE VIEW mine AS SELECT 1",
    "index": "CREATE UNIQUE INDEX mine ON trials (id, status)",
    "index that has our name": "CREATE INDEX idx_trials_device_id ON trials (hex(zeroblob(error)))",
    "index of migrations": "CREATE UNIQUE INDEX idx__sqlite_migrations ON trials (id)",
    "table that refers to ours": "CREATE TABLE mine (a REFERENCES claims ON DELETE SET NULL CHECK (a LIKE '%a%b%'))",
    "virtual table": "CREATE VIRTUAL TABLE mine USING fts4(a)",
}


@pytest.mark.parametrize("statement", FOREIGN.values(), ids=FOREIGN)
def test_what_would_take_part_in_writing_is_refused(statement: str, pack: Path) -> None:
    edit(pack, "CREATE TABLE notes (text TEXT)", "DROP INDEX idx_trials_device_id", statement)
    before = pack.read_bytes()
    with pytest.raises(InvalidPackError, match=r"is none of our tables, indexes and views.*drop it if it is yours"):
        TuningDatabase(pack)
    assert pack.read_bytes() == before


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        ("trials", "UNIQUE (kernel_id, problem_id, device_id)", "UNIQUE (status) ON CONFLICT REPLACE"),
        ("claims", "REFERENCES sessions (id)", "REFERENCES sessions (id) ON DELETE CASCADE"),
        ("devices", "name TEXT NOT NULL", "name TEXT CHECK (hex(zeroblob(1000000)) LIKE '%a%b%')"),
    ],
)
def test_a_rule_that_is_none_of_ours_is_refused(table: str, old: str, new: str, pack: Path) -> None:
    before = pack.read_bytes()
    rewrite_schema(table, old, new.replace("'", "''"))(pack)
    assert pack.read_bytes() != before
    with pytest.raises(InvalidPackError, match=f"'{table}' is none of our tables"):
        TuningDatabase(pack)


def test_a_statement_that_calls_itself_a_table_is_taken_for_what_it_says(pack: Path) -> None:
    trigger = "CREATE TRIGGER gone AFTER INSERT ON trials BEGIN DELETE FROM measurements; END"
    lie = f"INSERT INTO sqlite_master VALUES ('table', 'gone', 'gone', 0, '{trigger}')"
    edit(pack, "PRAGMA writable_schema = ON", lie)
    with pytest.raises(DatabaseError):
        TuningDatabase(pack)


def test_a_table_that_somebody_added_is_left_alone(pack: Path) -> None:
    edit(pack, "CREATE TABLE notes (text TEXT)", "INSERT INTO notes VALUES ('mine')", "ANALYZE")
    with TuningDatabase(pack) as database:
        database.save_trial(begin(database), ok_record())
    assert scalars(pack, "SELECT text FROM notes") == ["mine"]
