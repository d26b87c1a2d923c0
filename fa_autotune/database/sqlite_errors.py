"""The one place where SQLite's error codes become our errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from fa_autotune.errors import DatabaseError

BUSY_TIMEOUT_S = 30.0

_DAMAGED = "the file is damaged or something else; restore it from a copy, or name another with --db FILE"
_NOT_WRITABLE = "the file or its folder can't be written; choose one that can with FA_AUTOTUNE_DB or --db FILE"
_HELD = "another process kept it for too long; end that, then try again"
_DISK = "see that its disk works and has space left, then try again"
_NEXT_STEPS = {
    sqlite3.SQLITE_BUSY: _HELD,
    sqlite3.SQLITE_LOCKED: _HELD,
    sqlite3.SQLITE_PROTOCOL: _HELD,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FORMAT: _DAMAGED,
    sqlite3.SQLITE_TOOBIG: _DAMAGED,
    sqlite3.SQLITE_MISMATCH: _DAMAGED,
    sqlite3.SQLITE_ERROR: _DAMAGED,  # our statements are right for a file of ours
    sqlite3.SQLITE_READONLY: _NOT_WRITABLE,
    sqlite3.SQLITE_CANTOPEN: _NOT_WRITABLE,
    sqlite3.SQLITE_PERM: _NOT_WRITABLE,
    sqlite3.SQLITE_AUTH: _NOT_WRITABLE,
    sqlite3.SQLITE_FULL: "free some space, then try again",
    sqlite3.SQLITE_IOERR: _DISK,
    sqlite3.SQLITE_NOLFS: _DISK,
    sqlite3.SQLITE_INTERRUPT: "reading it takes longer than a file of ours may; get the file from a source you trust",
}
_SHARED_MEMORY = (sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_SHMSIZE)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into DatabaseError."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite's own message quotes broken text
        said = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(error)[:300])
        raise DatabaseError(f"{where}: {said}; {_next_step(error)}") from error
    except OSError as error:
        raise DatabaseError(
            f"{where}: {error.strerror or error}; name a file that can be used with FA_AUTOTUNE_DB or --db FILE"
        ) from error


def needs_writing_beside(error: sqlite3.Error) -> bool:
    """True if a file does not open because SQLite may not write it or what belongs beside it."""
    code = _code(error)
    return code is not None and (
        code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM) or code in _SHARED_MEMORY
    )


def _code(error: Exception) -> int | None:
    """SQLite's extended code; None where Python's module itself refuses, such as text that is no UTF-8."""
    return getattr(error, "sqlite_errorcode", None)


def _next_step(error: Exception) -> str:
    code = _code(error)
    if code is None:
        return _DAMAGED if isinstance(error, UnicodeDecodeError | sqlite3.OperationalError) else _other()
    return _NEXT_STEPS.get(code & 0xFF) or _other()


def _other() -> str:
    return "check the file with `fa-autotune db info --db FILE`"
