"""How a file is read, whatever lies beside it, and when reading ends."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fa_autotune.database import TuningDatabase
from fa_autotune.database import reader as reader_module
from fa_autotune.database.content import read_content
from fa_autotune.database.reader import LIMIT_S, Reader, limit_for, open_reader
from fa_autotune.errors import DatabaseError
from fa_autotune.problem.device import KNOWN_DEVICES
from kit.database_files import edit, save_and_leave_open
from kit.tuning_samples import H200, fill

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
RENAMED = "UPDATE devices SET name = 'X'"


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


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("is_pack", [True, False])
def test_a_log_lies_beside_the_file_and_not_beside_a_link(path: Path, tmp_path: Path, is_pack: bool) -> None:
    save_and_leave_open(path, RENAMED)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one.db").symlink_to(path)
    (tmp_path / "links" / "two.db").symlink_to("one.db")
    with open_reader(tmp_path / "links" / "two.db", is_pack=is_pack) as reader:
        assert {device.name for device, _ in read_content(reader).devices.values()} == {"X"}


def test_a_file_that_was_left_open_is_read_and_nothing_left_beside_it(path: Path, tmp_path: Path) -> None:
    save_and_leave_open(path, RENAMED)
    before = names_of(tmp_path)
    with open_reader(path) as reader:
        assert {device.name for device, _ in read_content(reader).devices.values()} == {"X"}
    assert names_of(tmp_path) == before


def test_a_file_that_is_too_large_to_copy_is_read_where_it_lies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_COPY_BYTES", 0)
    test_a_log_lies_beside_the_file_and_not_beside_a_link(path, path.parent, is_pack=True)


def test_a_log_of_another_file_is_refused(path: Path, tmp_path: Path) -> None:
    """A file at rest has none, so what lies there is of an earlier one, and SQLite would read its pages instead."""
    at_rest = path.read_bytes()
    save_and_leave_open(path, RENAMED)
    path.write_bytes(at_rest)
    with pytest.raises(DatabaseError, match=r"t\.db-wal holds changes of another database .* move it away"):
        open_reader(path)


def test_a_log_beside_an_empty_file_stays(path: Path) -> None:
    save_and_leave_open(path, RENAMED)
    log = path.with_name("t.db-wal").read_bytes()
    path.write_bytes(b"")
    with pytest.raises(DatabaseError, match="is empty"):
        open_reader(path)
    assert path.with_name("t.db-wal").read_bytes() == log


@pytest.mark.parametrize("side", ["-wal", "-shm", "-journal"])
def test_a_side_file_that_is_none_is_refused_and_not_waited_for(path: Path, side: str) -> None:
    save_and_leave_open(path, RENAMED)
    path.with_name(f"t.db{side}").unlink(missing_ok=True)
    os.mkfifo(path.with_name(f"t.db{side}"))
    with pytest.raises(DatabaseError, match=rf"t\.db{side} is no plain file"):
        open_reader(path, is_pack=True)


def test_holes_of_a_file_buy_no_time_and_no_memory(path: Path) -> None:
    os.truncate(path, 2**40)
    assert limit_for(path) < LIMIT_S + 1
    with open_reader(path) as reader:
        assert len(read_content(reader).trials) == 10
        with pytest.raises(DatabaseError, match="bytes of what is read at once"):
            reader.fetch(
                f"{ENDLESS.replace('count(*)', 'hex(zeroblob(400000))').replace('FROM n)', 'FROM n LIMIT 999)')}"
            )


def test_however_large_a_file_is_its_limits_have_an_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MOST_COMPRESSED", 2**40)
    monkeypatch.setattr(reader_module, "_MOST_READ_BYTES", 10_000)
    os.truncate(path, 2**40)
    assert limit_for(path) == 30
    with pytest.raises(DatabaseError, match="more than 10000 bytes"):
        open_reader(path)
