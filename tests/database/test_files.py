"""Database files: their schema, and which of them open, where, and what a refusal says."""

import os
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.database.connection import TABLES
from fa_autotune.database.entries import CompileStatus
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.errors import DatabaseError, FaAutotuneError, SchemaTooNewError
from fa_autotune.paths import database_path
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import BwdDeltaConfig
from kit.tuning_samples import (
    begin,
    fill,
    ok_record,
    write_pack,
)

WINNERS_COLUMNS = [
    *("device_fingerprint", "device_arch", "device_name", "problem_key", "variant", "config"),
    *("kernel_digest", "form", "triton", "cuda", "driver", "torch"),
    *("regime", "median_ms", "p20_ms", "p80_ms", "registers", "spill_bytes"),
    *("smem_bytes", "max_error_ratio", "confirmed_at", "session_id", "trial_id"),
]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path)


def records(database: TuningDatabase, **filters: Any) -> list[TrialRecord]:
    return [trial.record for trial in database.trials(**filters)]


def edit(path: Path, *statements: str, unchecked: bool = True) -> None:
    """Change a file behind our back, past its CHECKs and types."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if unchecked:
            connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)


def scalars(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(statement)]


class TestSchema:
    """What other tools, and later releases, rely on."""

    @pytest.fixture
    def connection(self, tmp_path: Path) -> Iterator[sqlite3.Connection]:
        with TuningDatabase(tmp_path / "tuning.db") as database:
            fill(database)
        with closing(sqlite3.connect(tmp_path / "tuning.db")) as opened:
            yield opened

    def test_the_header_names_us_and_our_schema(self, connection: sqlite3.Connection) -> None:
        pragmas = ("application_id", "user_version", "journal_mode")
        found = [connection.execute(f"PRAGMA {pragma}").fetchone()[0] for pragma in pragmas]
        assert found == [APPLICATION_ID, SCHEMA_VERSION, "wal"]

    @pytest.mark.parametrize("table", TABLES)
    def test_a_table_is_strict_with_an_integer_id(self, connection: sqlite3.Connection, table: str) -> None:
        (strict,) = connection.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (table,)).fetchone()
        keys = connection.execute("SELECT name, type FROM pragma_table_info(?) WHERE pk", (table,)).fetchall()
        assert (strict, keys) == (1, [("id", "INTEGER")])

    @pytest.mark.parametrize("table", TABLES)
    def test_columns_that_refer_are_declared_and_indexed(self, connection: sqlite3.Connection, table: str) -> None:
        columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
        declared = {name for (name,) in connection.execute('SELECT "from" FROM pragma_foreign_key_list(?)', (table,))}
        indexes = [name for (name,) in connection.execute("SELECT name FROM pragma_index_list(?)", (table,))]
        leading = {
            connection.execute(f"SELECT name FROM pragma_index_info('{name}')").fetchone()[0] for name in indexes
        }
        assert declared == {name for name in columns if name.endswith("_id")}
        assert declared <= leading

    @pytest.mark.parametrize(
        ("table", "column", "words"),
        [
            ("trials", "status", TrialStatus),
            ("measurements", "role", Role),
            ("measurements", "regime", Regime),
            ("kernels", "form", CompileForm),
            ("kernels", "compile_status", CompileStatus),
            ("sessions", "kind", SessionKind),
            ("sessions", "state", SessionState),
        ],
    )
    def test_a_check_allows_just_the_words_of_its_enum(
        self, connection: sqlite3.Connection, table: str, column: str, words: Any
    ) -> None:
        """If this fails, a word was added: write a migration that rebuilds the table, for files that are out there."""
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        allowed = sql.split(f"CHECK ({column} IN (")[1].split("))")[0]
        assert [word.strip(" '") for word in allowed.replace("\n", " ").split(",")] == [*words]

    def test_the_view_winners_has_exactly_the_columns_that_dispatch_reads(self, connection: sqlite3.Connection) -> None:
        assert [column[0] for column in connection.execute("SELECT * FROM winners").description] == WINNERS_COLUMNS

    @pytest.mark.parametrize(("view", "rows"), [("winners", 1), ("leaderboard", 3), ("rejections", 2)])
    def test_a_view_can_be_read_by_other_tools(self, connection: sqlite3.Connection, view: str, rows: int) -> None:
        connection.execute("PRAGMA trusted_schema = OFF")
        assert len(connection.execute(f"SELECT * FROM {view}").fetchall()) == rows

    def test_knobs_can_be_faceted_by_column(self, connection: sqlite3.Connection) -> None:
        knobs = "SELECT block_m, block_n, num_warps, num_stages, maxnreg FROM kernels WHERE digest = 'portable-0020'"
        assert connection.execute(knobs).fetchall() == [(32, 64, 4, 2, None)]

    def test_a_knob_that_a_pass_lacks_is_null(self, tmp_path: Path) -> None:
        problem = AttentionProblem.parse("1x2x2x64x64x32,bwd_delta")
        config = BwdDeltaConfig(BLOCK_M=32, num_warps=4)
        delta = Candidate(family=problem.family, variant=Variant.PORTABLE, config=config)
        with TuningDatabase(tmp_path / "delta.db") as database:
            database.save_trial(begin(database), replace(ok_record(), candidate=delta, problem=problem))
            assert [record.candidate for record in records(database)] == [delta]
        with closing(sqlite3.connect(tmp_path / "delta.db")) as connection:
            knobs = "SELECT kernel_pass, block_m, block_n, num_warps, num_stages FROM kernels"
            assert connection.execute(knobs).fetchall() == [("bwd_delta", 32, None, 4, None)]

    def test_no_time_is_ever_infinite_or_absent(self, connection: sqlite3.Connection) -> None:
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute("UPDATE measurements SET median_ms = 9e999")

    def test_the_documentation_names_every_table_view_and_column(self, connection: sqlite3.Connection) -> None:
        text = (Path(__file__).parents[2] / "docs" / "database.md").read_text()
        sections = {part.split("`", 2)[1]: part for part in text.split("\n### ")[1:]}
        kinds = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE '\\_%' ESCAPE '\\'"
        missing = [
            f"{name}.{column}"
            for (name,) in connection.execute(kinds).fetchall()
            for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
            if f"`{column}`" not in sections.get(name, "")
        ]
        assert missing == []


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

    def test_an_older_schema_is_read_through_a_migrated_copy(self, pack: Path) -> None:
        edit(pack, "DROP VIEW winners", "PRAGMA user_version = 0")
        before = pack.read_bytes()
        with TuningDatabase(pack, read_only=True) as database:
            assert len(database.winners()) == 1
        assert pack.read_bytes() == before

    def test_an_older_schema_is_migrated_when_it_is_opened_to_write(self, pack: Path) -> None:
        edit(pack, "DROP VIEW winners", "PRAGMA user_version = 0")
        TuningDatabase(pack).close()
        assert scalars(pack, "SELECT median_ms FROM winners") == [0.9]

    def test_a_read_only_database_refuses_to_write(self, pack: Path) -> None:
        with TuningDatabase(pack, read_only=True) as database, pytest.raises(DatabaseError, match="can't be written"):
            begin(database)

    def test_reading_a_pack_leaves_nothing_beside_it(self, pack: Path) -> None:
        with TuningDatabase(pack, read_only=True) as database:
            database.winners()
            assert [path.name for path in pack.parent.iterdir()] == [pack.name]


def outcome(folder: Path, action: Callable[[Path], object]) -> str:
    """What an action gives, or its error, in a process that can't write the folder, even if root runs the tests."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that other tests left; the child needs none
        child = os.fork()
    if child == 0:
        folder.chmod(0o555)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            text = str(action(folder))
        except BaseException as error:  # noqa: BLE001  the parent looks at it
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    folder.chmod(0o755)
    return text


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def count_winners(folder: Path) -> int:
    with TuningDatabase(folder / "tuning.db", read_only=True) as database:
        return len(database.winners())


class TestFolderWithoutWritePermission:
    def test_a_pack_is_read(self, public_folder: Path) -> None:
        write_pack(public_folder, "tuning.db").chmod(0o644)
        assert outcome(public_folder, count_winners) == "1"

    def test_a_wal_database_at_rest_is_read(self, public_folder: Path) -> None:
        with TuningDatabase(public_folder / "tuning.db") as database:
            fill(database)
        assert outcome(public_folder, count_winners) == "1"

    def test_a_wal_database_that_was_left_open_asks_for_a_pack(self, public_folder: Path) -> None:
        with TuningDatabase(public_folder / "live.db") as database:
            fill(database)
            for suffix in ("", "-wal"):
                shutil.copy(public_folder / f"live.db{suffix}", public_folder / f"tuning.db{suffix}")
        text = outcome(public_folder, count_winners)
        assert text.startswith("DatabaseError: ")
        assert "db export PACK" in text

    def test_a_new_database_names_the_way_out(self, public_folder: Path) -> None:
        text = outcome(public_folder, lambda folder: TuningDatabase(folder / "tuning.db"))
        assert text.startswith("DatabaseError: ")
        assert "FA_AUTOTUNE_DB" in text

    def test_saving_to_a_database_there_is_an_error_of_ours(self, public_folder: Path) -> None:
        write_pack(public_folder, "tuning.db").chmod(0o644)
        text = outcome(public_folder, lambda folder: begin(TuningDatabase(folder / "tuning.db")))
        assert text.startswith("DatabaseError: ")

    def test_a_pack_is_not_exported_there(self, public_folder: Path) -> None:
        text = outcome(public_folder, lambda folder: TuningDatabase(":memory:").export(folder / "pack.db"))
        assert text.startswith("DatabaseError: ")

    def test_without_a_home_the_users_folder_is_named(
        self, public_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HOME", "FA_AUTOTUNE_DB"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_DATA_HOME", str(public_folder))
        text = outcome(public_folder, lambda folder: TuningDatabase(database_path()))
        assert text.startswith(f"DatabaseError: {public_folder}")
