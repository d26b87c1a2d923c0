"""How a file is read: what is selected, what is left out with what it needs, and when reading ends."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fa_autotune.database import TuningDatabase
from fa_autotune.database.reader import (
    EVERYTHING,
    WINNERS,
    Reader,
    open_reader,
    read_content,
    selection,
    winner_of,
    winning,
)
from fa_autotune.errors import DatabaseError, InvalidPackError
from fa_autotune.problem.device import KNOWN_DEVICES
from kit.database_files import edit
from kit.tuning_samples import H200, PROBLEM, fill

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A pack of two devices' trials."""
    with TuningDatabase(":memory:") as database:
        for device in (H200, KNOWN_DEVICES["a100"]):
            fill(database, device=device)
        database.export(tmp_path / "t.db", winners_only=False)
    return tmp_path / "t.db"


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    with open_reader(path) as opened:
        yield opened


def test_everything_is_all_trials_with_all_that_they_refer_to(reader: Reader) -> None:
    content = read_content(reader, EVERYTHING)
    assert {name: len(getattr(content, name)) for name in ("devices", "trials", "sessions", "measurements")} == {
        **{"devices": 2, "trials": 10, "sessions": 4, "measurements": 10}
    }


def test_winners_are_read_without_the_other_trials(reader: Reader) -> None:
    content = read_content(reader, WINNERS)
    assert (len(content.trials), len(content.kernels), len(content.measurements)) == (2, 2, 2)
    assert [winner_of(content, key).device_name for key in winning(content)] == [KNOWN_DEVICES["a100"].name, H200.name]


@pytest.mark.parametrize(
    ("filters", "trials"),
    [
        ({}, 10),
        ({"devices__fingerprint": H200.fingerprint}, 5),
        ({"devices__fingerprint": H200.fingerprint, "status": ["ok", "rejected"]}, 4),
        ({"problems__key": PROBLEM.key, "kernels__variant": "tma"}, 0),
        ({"status": []}, 0),
        ({"toolchains__key": "none"}, 0),
    ],
)
def test_a_selection_is_the_trials_that_pass_every_filter(
    reader: Reader, filters: dict[str, object], trials: int
) -> None:
    assert len(read_content(reader, selection(**filters)).trials) == trials


@pytest.mark.parametrize(
    ("change", "says", "left"),
    [
        ("UPDATE devices SET name = '' WHERE id = 1", ["devices row 1"], 5),
        ("UPDATE sessions SET uid = '/' WHERE id = 1", ["sessions row 1"], 5),
        ("UPDATE measurements SET rank = 0 WHERE id = 1", ["measurements row 1"], 9),
    ],
)
def test_a_bad_row_is_told_once_and_takes_with_it_what_needs_it(
    path: Path, change: str, says: list[str], left: int
) -> None:
    edit(path, change)
    refused: list[InvalidPackError] = []
    with open_reader(path) as reader:
        content = read_content(reader, refuse=refused.append)
    assert [str(error).split(":")[0] for error in refused] == says
    assert len(content.trials) <= 9
    assert len(content.trials) >= left - 5


def test_a_statement_ends_with_its_time_and_restart_gives_it_new(path: Path) -> None:
    with open_reader(path, limit_s=0.2) as reader:
        with pytest.raises(DatabaseError, match="takes longer than a file of ours may"):
            reader.fetch(ENDLESS)
        with pytest.raises(DatabaseError, match="takes longer"):
            reader.fetch(ENDLESS.replace("FROM n)", "FROM n LIMIT 100000)"))
        reader.restart()
        assert reader.fetch(ENDLESS.replace("FROM n)", "FROM n LIMIT 1000)")) == [(1000,)]


def test_a_connection_of_ones_own_has_no_limit() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert Reader(connection, "here").fetch(ENDLESS.replace("FROM n)", "FROM n LIMIT 5)")) == [(5,)]


def test_nothing_is_written_through_a_reader(reader: Reader) -> None:
    with pytest.raises(DatabaseError, match="can't be written"):
        reader.fetch("DELETE FROM trials")


def test_a_log_beside_a_pack_is_never_passed_over(path: Path) -> None:
    """Opened as immutable, a file is read as if there were no log: only where there is none."""
    with TuningDatabase(path) as database:
        fill(database, device=KNOWN_DEVICES["h100"])
        with open_reader(path, is_pack=True) as reader:
            assert len(read_content(reader).devices) == 3


def test_a_journal_beside_a_file_is_never_passed_over(path: Path) -> None:
    edit(path, "PRAGMA journal_mode = wal")
    path.with_name("t.db-journal").write_bytes(b"x" * 4096)
    with pytest.raises(DatabaseError, match="has the journal of a change that was cut short"):
        open_reader(path, is_pack=True)
