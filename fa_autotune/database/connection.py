"""Opening a database file to write: who may create it, and transactions that don't deadlock."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlite_utils import Database

from fa_autotune.database.migrations import migrate
from fa_autotune.database.reader import MEMORY, Reader, connect, require_sqlite, schema_of
from fa_autotune.database.schema import SCHEMA_VERSION
from fa_autotune.database.sqlite_errors import BUSY_TIMEOUT_S, translated
from fa_autotune.errors import DatabaseError
from fa_autotune.files import locked, make_folder


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write under one lock from the first read on: a deferred transaction that reads first fails when others write."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def open_writable(path: Path | None) -> sqlite3.Connection:
    """Open a database to read and write, creating or migrating it as needed. None is one in memory."""
    require_sqlite()
    where = MEMORY if path is None else str(path)
    with translated(where):
        if path is not None:
            _make_folder(path.parent)
        connection = connect(where)
        try:
            if not _is_current(connection, where):
                with _only_me(path):
                    _create_or_migrate(connection, where)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")  # a commit that returned survives a power cut
        except BaseException:
            connection.close()
            raise
        return connection


def _is_current(connection: sqlite3.Connection, where: str) -> bool:
    return schema_of(Reader(connection, where)) == SCHEMA_VERSION


def _create_or_migrate(connection: sqlite3.Connection, where: str) -> None:
    if _is_current(connection, where):  # another process was faster
        return
    database = Database(connection, execute_plugins=False)
    if where != MEMORY:
        database.enable_wal()
    migrate(database)


@contextmanager
def _only_me(path: Path | None) -> Iterator[None]:
    """Hold the file lock: SQLite's own locks don't cover the switch to WAL and a migration by several processes."""
    if path is None:
        yield
        return
    lock_path = path.with_name(path.name + ".lock")
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock_path, wait_s=BUSY_TIMEOUT_S))
        except BlockingIOError:
            raise DatabaseError(
                f"{lock_path} is locked: another process kept it for {BUSY_TIMEOUT_S:g} s; end that, then try again"
            ) from None
        except OSError as error:
            raise DatabaseError(
                f"{lock_path} can't be opened as a lock ({error.strerror}); remove it if it is a link, or choose "
                "another folder with FA_AUTOTUNE_DB or --db FILE"
            ) from error
        yield


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise DatabaseError(
            f"{folder} can't be created ({error.strerror}); choose a folder with FA_AUTOTUNE_DB or --db"
        ) from error
