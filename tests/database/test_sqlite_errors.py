"""What SQLite's error codes become, whatever its texts say."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fa_autotune.database.sqlite_errors import needs_writing_beside, translated
from fa_autotune.errors import DatabaseError


def error_of(code: int, text: str = "something") -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "next_step"),
    [
        (sqlite3.SQLITE_BUSY, "another process kept it"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "another process kept it"),
        (sqlite3.SQLITE_LOCKED_SHAREDCACHE, "another process kept it"),
        (sqlite3.SQLITE_NOTADB, "damaged or something else"),
        (sqlite3.SQLITE_CORRUPT_INDEX, "damaged or something else"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, "choose one that can with FA_AUTOTUNE_DB or --db FILE"),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, "choose one that can with FA_AUTOTUNE_DB or --db FILE"),
        (sqlite3.SQLITE_FULL, "free some space"),
        (sqlite3.SQLITE_IOERR_FSYNC, "see that its disk works"),
        (sqlite3.SQLITE_INTERRUPT, "takes longer than a file of ours may"),
        (sqlite3.SQLITE_MISUSE, "check the file with `fa-autotune db info --db FILE`"),
    ],
)
def test_a_code_says_the_next_step_and_its_text_does_not(code: int, next_step: str) -> None:
    lie = "database is locked, readonly, malformed, full, unable to open"
    with pytest.raises(DatabaseError, match=f"^t.db: {lie}; .*{next_step}"), translated("t.db"):
        raise error_of(code, lie)


def test_what_steers_a_terminal_is_not_repeated() -> None:
    with pytest.raises(DatabaseError) as caught, translated("t.db"):
        raise error_of(sqlite3.SQLITE_CORRUPT, "malformed \x1b[2J schema " + "x" * 1000)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_errors_of_the_file_system_are_ours_too() -> None:
    with (
        pytest.raises(DatabaseError, match=r"t\.db: Permission denied; name a file that can be used"),
        translated("t.db"),
    ):
        raise PermissionError(13, "Permission denied")


def test_sqlite_itself_gives_these_codes(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_bytes(b"no database" * 100)
    with (
        closing(sqlite3.connect(tmp_path / "t.db")) as connection,
        pytest.raises(DatabaseError, match="damaged"),
        translated("t.db"),
    ):
        connection.execute("SELECT * FROM sqlite_master")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_CANTOPEN, True),
        (sqlite3.SQLITE_READONLY, True),
        (sqlite3.SQLITE_READONLY_DIRECTORY, True),
        (sqlite3.SQLITE_IOERR_SHMOPEN, True),
        (sqlite3.SQLITE_IOERR_READ, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_BUSY, False),
    ],
)
def test_a_file_opens_as_immutable_only_where_writing_was_the_trouble(code: int, expected: bool) -> None:
    assert needs_writing_beside(error_of(code, "attempt to write a readonly database")) is expected
    assert needs_writing_beside(sqlite3.OperationalError("attempt to write a readonly database")) is False
