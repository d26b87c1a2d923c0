"""A database whose file is deleted, moved or replaced while it is open: what writes says so, and claims no success."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fa_autotune.database import SessionState, TuningDatabase
from fa_autotune.database.reader import open_reader
from fa_autotune.errors import DatabaseError
from kit.tuning_samples import begin, fill, ok_record


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def relinked(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("another"))
    path.with_name("another").touch()


HAPPENINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, "was deleted or moved away"),
    "moved": (lambda path: path.rename(path.with_name("elsewhere")), "was deleted or moved away"),
    "replaced": (replaced, "was replaced by another file"),
    "linked to another": (relinked, "was replaced by another file"),
    "its folder renamed": (
        lambda path: path.parent.rename(path.parent.with_name("other")),
        "was deleted or moved away",
    ),
    "its log deleted": (lambda path: path.with_name(path.name + "-wal").unlink(), "-wal was deleted"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "tuning.db"


@pytest.mark.parametrize(("happen", "says"), HAPPENINGS.values(), ids=HAPPENINGS)
def test_whatever_writes_next_says_so(happen: Callable[[Path], object], says: str, path: Path) -> None:
    with TuningDatabase(path) as database:
        session = begin(database)
        happen(path)
        with pytest.raises(DatabaseError, match=says):
            database.save_trial(session, ok_record())
        with pytest.raises(DatabaseError, match=f"{says}.*run the command again, with --resume"):
            database.end_session(session, state=SessionState.FINISHED)


def test_a_file_that_was_put_back_is_taken(path: Path) -> None:
    with TuningDatabase(path) as database:
        session = begin(database)
        path.rename(path.with_name("elsewhere"))
        path.with_name("elsewhere").rename(path)
        database.save_trial(session, ok_record())


def test_files_that_stay_are_no_trouble(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)
    with TuningDatabase("tuning.db") as database, TuningDatabase(path) as other:
        session = begin(database)
        monkeypatch.chdir("/")  # a relative name means what it meant
        database.save_trial(session, ok_record())
        other.save_trial(begin(other), ok_record())
        database.end_session(session, state=SessionState.FINISHED)


def test_an_import_says_so_too(path: Path) -> None:
    with TuningDatabase(path) as database:
        fill(database)
        database.export(path.with_name("pack.db"))
        path.unlink()
        with pytest.raises(DatabaseError, match="was deleted"):
            database.import_pack(path.with_name("pack.db"))


def test_a_database_in_memory_has_no_place() -> None:
    with TuningDatabase(":memory:") as database:
        database.save_trial(begin(database), ok_record())


def test_a_pack_that_is_written_to_has_a_log_from_then_on(path: Path) -> None:
    with TuningDatabase(path) as database:
        database.export(path.with_name("pack.db"))
    with TuningDatabase(path.with_name("pack.db")) as pack:
        pack.save_trial(begin(pack), ok_record())
        path.with_name("pack.db-wal").unlink()
        with pytest.raises(DatabaseError, match="-wal was deleted"):
            pack.save_trial(begin(pack), ok_record())


def test_the_log_of_a_link_is_that_of_its_file(path: Path, tmp_path: Path) -> None:
    TuningDatabase(path).close()
    (tmp_path / "link.db").symlink_to(path)
    with TuningDatabase(tmp_path / "link.db") as database:
        session = begin(database)
        path.with_name("tuning.db-wal").unlink()
        with pytest.raises(DatabaseError, match=r"folder/tuning\.db-wal was deleted"):
            database.save_trial(session, ok_record())


def test_a_link_that_leads_elsewhere_meanwhile_is_another_file(path: Path, tmp_path: Path) -> None:
    TuningDatabase(path).close()
    TuningDatabase(tmp_path / "other.db").close()
    (tmp_path / "link.db").symlink_to(path)
    with TuningDatabase(tmp_path / "link.db") as database:
        session = begin(database)
        (tmp_path / "link.db").unlink()
        (tmp_path / "link.db").symlink_to(tmp_path / "other.db")
        with pytest.raises(DatabaseError, match=r"link\.db was replaced"):
            database.save_trial(session, ok_record())


def test_a_file_that_is_written_to_keeps_its_locks_while_it_is_looked_at(path: Path) -> None:
    """A process that closes any descriptor of a file loses its locks on it, and another would remove the log then."""
    with TuningDatabase(path) as database:
        session = begin(database)
        for is_pack in (True, False):
            open_reader(path, is_pack=is_pack).close()
        with TuningDatabase(":memory:") as other, pytest.raises(DatabaseError, match="in use by this process"):
            other.export(path)
        look = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT 1 FROM trials').connection.close()"
        subprocess.run([sys.executable, "-c", look, str(path)], check=True)
        database.save_trial(session, ok_record())
    with TuningDatabase(path, read_only=True) as database:
        assert len(database.trials()) == 1
