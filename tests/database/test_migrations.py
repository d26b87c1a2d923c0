"""The schema that the migrations make: tables, checks, views, and what the documentation says of them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.database.entries import CompileStatus
from fa_autotune.database.reader import TABLES
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.problem.device import Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime, Role, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import BwdDeltaConfig
from kit.database_files import records
from kit.tuning_samples import (
    begin,
    confirmed,
    fill,
    ok_record,
)

WINNERS_COLUMNS = [
    *("device_fingerprint", "device_arch", "device_name", "problem_key", "variant", "config"),
    *("kernel_digest", "measured_as", "form", "triton_release", "triton", "cuda", "driver", "torch"),
    *("regime", "median_ms", "p20_ms", "p80_ms", "registers", "spill_bytes"),
    *("smem_bytes", "max_error_ratio", "confirmed_at", "session_id", "trial_id"),
]


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

    def test_the_view_winners_tells_releases_of_triton_apart_as_dispatch_does(self, tmp_path: Path) -> None:
        versions = ("3.7.1", "3.7rc1", "3.7.0+git1", "3.10.2", "3.10", "4", "main", "v3.7.1")
        with TuningDatabase(tmp_path / "releases.db") as database:
            for triton in versions:
                session = begin(database, SessionKind.CONFIRM, toolchain=Toolchain(triton=triton))
                database.save_trial(session, confirmed(1.0, 1))
            winners = [(winner.toolchain.triton_release, winner.toolchain.triton) for winner in database.winners()]
        with closing(sqlite3.connect(tmp_path / "releases.db")) as connection:
            shown = connection.execute("SELECT triton_release, triton FROM winners").fetchall()
        assert shown == winners

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
