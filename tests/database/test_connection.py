"""Which files open, where, and what a refusal says."""

import os
import re
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from fa_autotune.database import TuningDatabase, connection, reader
from fa_autotune.database.connection import open_writable
from fa_autotune.database.schema import SCHEMA_VERSION
from fa_autotune.errors import DatabaseError, FaAutotuneError, InvalidPackError, SchemaTooNewError
from fa_autotune.files import locked
from fa_autotune.paths import database_path
from kit.database_files import edit, records, save_and_leave_open, scalars
from kit.rights import outcome_in
from kit.tuning_samples import (
    PROBLEM,
    begin,
    fill,
    ok_record,
    write_pack,
)

RELEASED_SCHEMAS = sorted((Path(__file__).parents[1] / "data").glob("schema_*.sql"))


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path)


def database_of_schema(folder: Path, schema: Path) -> Path:
    """A database as the release that had this schema wrote it."""
    with closing(sqlite3.connect(folder / "old.db")) as connection:
        connection.executescript(schema.read_text())
    return folder / "old.db"


class TestFile:
    """Opening: what is created, what is refused, and what the refusal says."""

    def test_a_database_and_its_folder_are_created(self, tmp_path: Path) -> None:
        TuningDatabase(tmp_path / "a" / "b" / "tuning.db").close()
        assert (tmp_path / "a" / "b" / "tuning.db").is_file()

    def test_what_was_saved_is_there_after_closing(self, tmp_path: Path) -> None:
        with TuningDatabase(tmp_path / "tuning.db") as database:
            database.save_trial(begin(database), ok_record())
        with TuningDatabase(tmp_path / "tuning.db") as database:
            assert records(database) == [ok_record()]

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_name_that_the_system_refuses_is_an_error_of_ours(self, tmp_path: Path, read_only: bool) -> None:
        with pytest.raises(DatabaseError, match=r"x\.db: .*; .*FA_AUTOTUNE_DB"):
            TuningDatabase(tmp_path / f"{'x' * 300}.db", read_only=read_only)

    def test_a_home_folder_that_is_not_known_is_an_error_of_ours(self) -> None:
        with pytest.raises(FaAutotuneError, match="home folder"):
            TuningDatabase("~nobody-of-this-name/tuning.db")

    def test_reading_a_file_that_is_not_there_creates_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(DatabaseError, match=r"no tuning database at .*; create one with"):
            TuningDatabase(tmp_path / "a" / "tuning.db", read_only=True)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("read_only", [True, False])
    def test_another_programs_database_is_left_alone(self, tmp_path: Path, read_only: bool) -> None:
        path = tmp_path / "notes.db"
        edit(path, "CREATE TABLE notes (text TEXT)")
        before = path.read_bytes()
        with pytest.raises(DatabaseError, match="not a tuning database"):
            TuningDatabase(path, read_only=read_only)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_newer_schema_is_refused(self, pack: Path, read_only: bool) -> None:
        edit(pack, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        with pytest.raises(SchemaTooNewError, match="upgrade fa_autotune"):
            TuningDatabase(pack, read_only=read_only)

    @pytest.mark.parametrize("read_only", [True, False])
    @pytest.mark.parametrize("content", [b"not SQLite at all" * 100, b"SQLite format 3\0" + b"\xff" * 4080])
    def test_a_file_that_is_no_database_is_refused(self, tmp_path: Path, content: bytes, read_only: bool) -> None:
        path = tmp_path / "tuning.db"
        path.write_bytes(content)
        with pytest.raises(DatabaseError, match="damaged or something else"):
            TuningDatabase(path, read_only=read_only)

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_schema_that_is_no_text_is_refused(self, pack: Path, read_only: bool) -> None:
        """SQLite quotes the broken bytes in its message, which Python then can't decode."""
        pack.write_bytes(pack.read_bytes().replace(b"CREATE TABLE", b"CREATE \xa2\xa2\xa2\xa2\xa2"))
        with pytest.raises(DatabaseError, match="damaged"):
            TuningDatabase(pack, read_only=read_only)

    def test_a_file_cut_short_is_refused(self, pack: Path) -> None:
        pack.write_bytes(pack.read_bytes()[: pack.stat().st_size // 2])
        with pytest.raises(DatabaseError, match="damaged"), TuningDatabase(":memory:") as database:
            database.import_pack(pack)

    def test_a_folder_in_place_of_a_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DatabaseError, match=r"choose one that can|can't be"):
            TuningDatabase(tmp_path)

    def test_an_empty_file_is_no_pack(self, tmp_path: Path) -> None:
        (tmp_path / "empty.db").touch()
        with pytest.raises(DatabaseError, match="is empty"):
            TuningDatabase(tmp_path / "empty.db", read_only=True)

    @pytest.mark.parametrize("schema", RELEASED_SCHEMAS)
    def test_an_older_schema_is_read_as_it_is(self, tmp_path: Path, schema: Path) -> None:
        path = database_of_schema(tmp_path, schema)
        before = path.read_bytes()
        with TuningDatabase(path, read_only=True) as database, TuningDatabase(":memory:") as other:
            assert [winner.median_ms for winner in database.winners()] == [0.9]
            assert (len(database.trials()), len(database.misses()), len(database.rejections())) == (5, 1, 2)
            assert (database.info().schema_version, database.info().counts["misses"]) == (int(schema.stem[-1]), 1)
            assert other.import_pack(path).trials == 5
        assert path.read_bytes() == before

    @pytest.mark.parametrize("schema", RELEASED_SCHEMAS)
    def test_an_older_schema_is_migrated_when_it_is_opened_to_write(self, tmp_path: Path, schema: Path) -> None:
        path = database_of_schema(tmp_path, schema)
        with TuningDatabase(path) as database:
            assert database.claim(begin(database), PROBLEM) is None
        assert scalars(path, "SELECT median_ms FROM winners") == [0.9]
        assert scalars(path, "PRAGMA user_version") == [SCHEMA_VERSION]

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_schema_that_is_migrated_while_it_is_looked_at_opens(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
    ) -> None:
        path = database_of_schema(tmp_path, RELEASED_SCHEMAS[-1])
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA journal_mode = wal")
        found: list[int | None] = []

        def schema_of(opened: reader.Reader) -> int | None:
            found.append(schema := real_schema_of(opened))
            if len(found) == 1:
                TuningDatabase(path).close()  # as another process would
            return schema

        real_schema_of = reader.schema_of
        for module in (connection, reader):
            monkeypatch.setattr(module, "schema_of", schema_of)
        with TuningDatabase(path, read_only=read_only) as database:
            assert len(database.winners()) == 1
        assert found[0] == int(RELEASED_SCHEMAS[-1].stem[-1])

    def test_each_schema_before_todays_has_a_file_that_it_made(self) -> None:
        assert [int(path.stem[-1]) for path in RELEASED_SCHEMAS] == list(range(1, SCHEMA_VERSION))

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_schema_that_no_release_wrote_is_refused(self, pack: Path, read_only: bool) -> None:
        edit(pack, "PRAGMA user_version = 0")
        with pytest.raises(InvalidPackError, match="has schema 0, which no release wrote"):
            TuningDatabase(pack, read_only=read_only)

    def test_a_read_only_database_refuses_to_write(self, pack: Path) -> None:
        with TuningDatabase(pack, read_only=True) as database, pytest.raises(DatabaseError, match="can't be written"):
            begin(database)

    @pytest.mark.parametrize("victim", ["precious", None])
    def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(
        self, victim: str | None, tmp_path: Path
    ) -> None:
        if victim:
            (tmp_path / "victim").write_text(victim)
        (tmp_path / "tuning.db.lock").symlink_to(tmp_path / "victim")
        with pytest.raises(
            DatabaseError, match=r"tuning\.db\.lock can't be opened as a lock.*remove it if it is a link"
        ):
            TuningDatabase(tmp_path / "tuning.db")
        assert (tmp_path / "victim").exists() is (victim is not None)
        assert victim is None or (tmp_path / "victim").read_text() == victim

    def test_a_lock_that_another_process_holds_is_waited_for_as_long_as_a_database(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert connection.BUSY_TIMEOUT_S == 30
        monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.1)
        with (
            locked(tmp_path / "tuning.db.lock", wait_s=0),
            pytest.raises(
                DatabaseError, match=r"tuning\.db\.lock is locked: another process kept it for 0\.1 s; end that"
            ),
        ):
            TuningDatabase(tmp_path / "tuning.db")
        TuningDatabase(tmp_path / "tuning.db").close()

    def test_folders_are_for_this_user_alone(self, tmp_path: Path) -> None:
        inner = tmp_path / "a" / "b"
        TuningDatabase(inner / "tuning.db").close()
        assert [oct(folder.stat().st_mode & 0o777) for folder in (inner, inner.parent)] == ["0o700", "0o700"]

    def test_reading_a_pack_leaves_nothing_beside_it(self, pack: Path) -> None:
        with TuningDatabase(pack, read_only=True) as database:
            database.winners()
            assert [path.name for path in pack.parent.iterdir()] == [pack.name]


def count_winners(folder: Path) -> int:
    with TuningDatabase(folder / "tuning.db", read_only=True) as database:
        return len(database.winners())


def left_open(folder: Path) -> None:
    """A database that has a winner in its log alone."""
    with TuningDatabase(folder / "live.db") as database:
        fill(database)
        for suffix in ("", "-wal"):
            shutil.copy(folder / f"live.db{suffix}", folder / f"tuning.db{suffix}")


class TestBesideTheFile:
    """What lies beside a file that is opened to write."""

    def test_the_lock_of_a_link_lies_beside_its_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "link.db").symlink_to(tmp_path / "a" / "tuning.db")
        TuningDatabase(tmp_path / "link.db").close()
        assert {path.name for path in tmp_path.iterdir()} == {"a", "link.db"}
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"tuning.db", "tuning.db.lock"}

    def test_a_pack_is_in_use_from_its_first_opening_to_write_on(self, pack: Path) -> None:
        TuningDatabase(pack).close()
        assert scalars(pack, "PRAGMA journal_mode") == ["wal"]

    @pytest.mark.parametrize("content", [None, b"", b"at rest"], ids=["gone", "empty", "at rest"])
    def test_a_log_of_another_file_is_refused_and_stays(self, pack: Path, content: bytes | None) -> None:
        at_rest = pack.read_bytes()
        save_and_leave_open(pack, "DELETE FROM measurements")
        log = pack.with_name("pack.db-wal").read_bytes()
        pack.unlink() if content is None else pack.write_bytes(content and at_rest)
        with pytest.raises(DatabaseError, match=r"pack\.db-wal holds changes of another database"):
            TuningDatabase(pack)
        assert pack.with_name("pack.db-wal").read_bytes() == log

    @pytest.mark.parametrize("content", [None, b""], ids=["gone", "empty"])
    def test_a_journal_of_another_file_is_refused_and_stays(self, pack: Path, content: bytes | None) -> None:
        journal = pack.with_name("pack.db-journal")
        journal.write_bytes(hot_journal(pack))
        pack.unlink() if content is None else pack.write_bytes(content)
        with pytest.raises(DatabaseError, match=r"pack\.db-journal holds a part of another database"):
            TuningDatabase(pack)
        assert journal.exists()

    def test_a_change_that_was_cut_short_is_taken_back(self, pack: Path) -> None:
        before = scalars(pack, "SELECT count(*) FROM trials")
        journal = hot_journal(pack)
        edit(pack, "DELETE FROM measurements", "DELETE FROM trials")
        pack.with_name("pack.db-journal").write_bytes(journal)
        with pytest.raises(DatabaseError, match=r"cut short.*`sqlite-utils tables .*` opens the file to write"):
            TuningDatabase(pack, read_only=True)
        TuningDatabase(pack).close()
        assert scalars(pack, "SELECT count(*) FROM trials") == before

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_journal_that_names_another_file_is_refused(self, pack: Path, read_only: bool) -> None:
        """SQLite would remove the file that it names."""
        victim = pack.with_name("thesis.txt")
        victim.write_text("my thesis")
        name = os.fsencode(victim)
        checked = sum(int.from_bytes(bytes([byte]), "big", signed=True) for byte in name) % 2**32
        end = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
        numbers = len(name).to_bytes(4, "big") + checked.to_bytes(4, "big")
        journal = pack.with_name("pack.db-journal")
        journal.write_bytes(hot_journal(pack) + b"\xff\xff\xff\xff" + name + numbers + end)
        with pytest.raises(DatabaseError, match="names a file that SQLite would remove"):
            TuningDatabase(pack, read_only=read_only)
        assert victim.exists()

    @pytest.mark.parametrize("side", ["", "-wal", "-shm", "-journal"])
    def test_what_is_no_plain_file_is_refused_and_not_waited_for(self, pack: Path, side: str) -> None:
        pack.rename(pack.with_name("old.db"))
        os.mkfifo(pack.with_name(f"pack.db{side}"))
        with pytest.raises(DatabaseError, match=r"is no (plain )?file"):
            TuningDatabase(pack)

    def test_a_file_with_two_names_is_refused(self, pack: Path) -> None:
        pack.with_name("other.db").hardlink_to(pack)
        with pytest.raises(DatabaseError, match="has 2 names"):
            TuningDatabase(pack)
        assert count_trials(pack) == 2

    def test_a_statement_has_a_limit_on_the_clock(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader, "LIMIT_S", 0.1)
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        with closing(open_writable(pack)) as opened:
            with pytest.raises(sqlite3.OperationalError, match="interrupted"):
                opened.execute(endless)
            time.sleep(0.12)
            few = opened.execute(endless.replace("FROM n)", "FROM n LIMIT 9999)")).fetchone()
            assert tuple(few) == (9999,)


def count_trials(path: Path) -> int:
    with TuningDatabase(path, read_only=True) as database:
        return len(database.trials())


def hot_journal(path: Path) -> bytes:
    """The journal of a change of a file at rest, as it is while the change is being made."""
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as opened:
        opened.execute("PRAGMA cache_size = 1")  # so that it is on the disk before the change ends
        opened.execute("BEGIN IMMEDIATE")
        opened.execute("DELETE FROM measurements")
        opened.execute("DELETE FROM trials")
        opened.execute("UPDATE kernels SET compile_warnings = hex(zeroblob(9000))")
        journal = path.with_name("copy.db-journal").read_bytes()
        opened.rollback()
    copy.unlink()
    assert journal[0]
    return journal


class TestFolderWithoutWritePermission:
    def test_a_change_that_was_cut_short_asks_for_a_copy(self, public_folder: Path) -> None:
        path = write_pack(public_folder, "tuning.db")
        path.with_name("tuning.db-journal").write_bytes(hot_journal(path))
        text = outcome_in(public_folder, count_winners)
        assert re.search(r"cut short, .*; copy both to a folder that you can write, where `sqlite-utils tables", text)

    def test_not_even_root_leaves_anything_there(self, public_folder: Path) -> None:
        with TuningDatabase(public_folder / "tuning.db") as database:
            fill(database)
        before = {path.name for path in public_folder.iterdir()}
        public_folder.chmod(0o555)
        try:
            assert count_winners(public_folder) == 1
        finally:
            public_folder.chmod(0o755)
        assert {path.name for path in public_folder.iterdir()} == before

    def test_a_pack_is_read(self, public_folder: Path) -> None:
        write_pack(public_folder, "tuning.db").chmod(0o644)
        assert outcome_in(public_folder, count_winners) == "1"

    def test_a_wal_database_at_rest_is_read(self, public_folder: Path) -> None:
        with TuningDatabase(public_folder / "tuning.db") as database:
            fill(database)
        assert outcome_in(public_folder, count_winners) == "1"

    def test_a_wal_database_that_was_left_open_is_read(self, public_folder: Path) -> None:
        left_open(public_folder)
        assert outcome_in(public_folder, count_winners) == "1"

    def test_a_large_one_asks_for_a_pack(self, public_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader, "_MAX_COPY_BYTES", 0)
        left_open(public_folder)
        text = outcome_in(public_folder, count_winners)
        assert text.startswith("DatabaseError: ")
        assert "db export PACK" in text

    def test_a_new_database_names_the_way_out(self, public_folder: Path) -> None:
        text = outcome_in(public_folder, lambda folder: TuningDatabase(folder / "tuning.db"))
        assert text.startswith("DatabaseError: ")
        assert "FA_AUTOTUNE_DB" in text

    def test_saving_to_a_database_there_is_an_error_of_ours(self, public_folder: Path) -> None:
        write_pack(public_folder, "tuning.db").chmod(0o644)
        text = outcome_in(public_folder, lambda folder: begin(TuningDatabase(folder / "tuning.db")))
        assert text.startswith("DatabaseError: ")

    def test_a_pack_is_not_exported_there(self, public_folder: Path) -> None:
        text = outcome_in(public_folder, lambda folder: TuningDatabase(":memory:").export(folder / "pack.db"))
        assert text.startswith("DatabaseError: ")

    def test_without_a_home_the_users_folder_is_named(
        self, public_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HOME", "FA_AUTOTUNE_DB"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_DATA_HOME", str(public_folder))
        text = outcome_in(public_folder, lambda folder: TuningDatabase(database_path()))
        assert text.startswith(f"DatabaseError: {public_folder}")
