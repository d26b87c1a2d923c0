"""Opening a database file to write: who may create it, and transactions that don't deadlock."""

import math
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from fa_autotune.database.migrations import VIEWS, migrate, migrations
from fa_autotune.database.places import (
    beside,
    forget_writer,
    note_writer,
    require_own_journal,
    require_own_log,
    require_plain_sides,
)
from fa_autotune.database.reader import (
    MEMORY,
    VM_STEPS_PER_LOOK,
    Reader,
    connect,
    harden,
    limit_for,
    moment,
    require_plain_tables,
    require_sqlite,
    schema_of,
)
from fa_autotune.database.schema import SCHEMA_VERSION
from fa_autotune.database.sqlite_errors import BUSY_TIMEOUT_S, translated
from fa_autotune.errors import DatabaseError, InvalidPackError
from fa_autotune.files import locked, make_folder, real_path

_FORM = re.compile(r"""[\s"`\[\]]""")
_OF_ITS_OWN = re.compile(r"createtable(?!.*references)", re.DOTALL)  # a table that no change of ours reaches
_OF_MIGRATIONS = re.compile(r"create(table|uniqueindex\w*on)_sqlite_migrations\(")  # sqlite_utils' own list of them


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


class _Writer(sqlite3.Connection):
    """Ends a statement that takes too long: none of ours does on a file of ours."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limit_s = math.inf
        self._end = [math.inf]  # apart from the connection, which would refer to itself

    def limit(self, seconds: float) -> None:
        """Give each statement so much time."""
        end = self._end
        self._limit_s = seconds
        self.set_progress_handler(lambda: int(time.monotonic() > end[0]), VM_STEPS_PER_LOOK)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        """`sqlite3.Connection.execute`, within the limit."""
        self._end[0] = time.monotonic() + self._limit_s
        return super().execute(*arguments)

    def close(self) -> None:
        """Close it."""
        forget_writer(self)
        super().close()


def open_writable(path: Path | None) -> sqlite3.Connection:
    """Open a database to read and write, creating or migrating it as needed. None is one in memory.

    It is in WAL mode from then on, by which a database in use is told from a pack. One that holds more than tables and
    views of ours is refused: what else it brings would be run.
    """
    require_sqlite()
    where = MEMORY if path is None else str(path)
    real = None if path is None else real_path(path)
    with translated(where):
        if real is not None:
            _make_folder(real.parent)
            _require_writable_place(where, real)
        connection = connect(where if real is None else str(real), factory=_Writer)
        assert isinstance(connection, _Writer)
        try:
            harden(connection)
            if real is not None and real.exists():
                note_writer(connection, real)
                if real.stat().st_size:
                    connection.limit(limit_for(real))
            with moment(connection):
                schema = schema_of(Reader(connection, where))
                if schema is not None and real is not None:
                    _require_our_schema(connection, where, schema)
            if schema != SCHEMA_VERSION or not _is_wal(connection):
                with _only_me(real):
                    _prepare(connection, where)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")  # a commit that returned survives a power cut
            if real is not None:
                note_writer(connection, real)
        except BaseException:
            connection.close()
            raise
        return connection


def _require_writable_place(where: str, real: Path) -> None:
    require_plain_sides(real)
    if real.exists():
        if not real.is_file():
            raise DatabaseError(f"{where} is no file, so it can't be a database; name a file with --db FILE")
        if (names := real.stat().st_nlink) > 1:
            raise DatabaseError(
                f"{where} has {names} names (hard links), and SQLite keeps what was saved last beside one of them, "
                "where the others don't have it; make it a file of its own: copy it, then move the copy in its place"
            )
    require_own_log(real)
    require_own_journal(real)


def _prepare(connection: sqlite3.Connection, where: str) -> None:
    """Create or migrate, unless another process was faster."""
    if where != MEMORY:
        connection.execute("PRAGMA journal_mode = wal")
    with moment(connection):
        schema = schema_of(Reader(connection, where))
    if schema != SCHEMA_VERSION:
        migrate(Database(connection, execute_plugins=False))


def _is_wal(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA journal_mode").fetchone()[0] in ("wal", "memory"))


def _require_our_schema(connection: sqlite3.Connection, where: str, schema: int) -> None:
    """Refuse what a file defines beside what our migrations do, but for tables that have nothing to do with ours.

    What an entry of the schema calls itself is not what SQLite makes of it: that is its statement.
    """
    reader = Reader(connection, where)
    reader.schema = schema
    require_plain_tables(reader)
    ours = _statements_of(schema)
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master"):
        if sql is None:  # an index of SQLite's own
            continue
        found, key = _essence(str(sql)), str(name).lower()
        is_ours = key in ours and found == ours[key]
        is_view = key in VIEWS and found.startswith("createview")
        is_other_table = key not in ours and key not in VIEWS and _OF_ITS_OWN.match(found)
        if not is_ours and not is_view and not is_other_table and not _OF_MIGRATIONS.match(found):
            raise InvalidPackError(
                f"{where}: {name!r} is none of our tables, indexes and views, and would take part in what is saved; "
                "drop it if it is yours, or get the file from a source you trust"
            )


@cache
def _statements_of(schema: int) -> Mapping[str, str]:
    """What defines the tables and indexes of a schema, by their names."""
    with closing(sqlite3.connect(MEMORY, isolation_level=None)) as connection:
        database = Database(connection, execute_plugins=False)
        migrations.apply(database, stop_before=[one.name for one in migrations.pending(database)][schema:])
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {name.lower(): _essence(sql) for name, sql in found}


def _essence(sql: str) -> str:
    """A statement without what may be written in several ways."""
    return _FORM.sub("", sql).lower()


@contextmanager
def _only_me(path: Path | None) -> Iterator[None]:
    """Hold the file lock: SQLite's own locks don't cover the switch to WAL and a migration by several processes."""
    if path is None:
        yield
        return
    lock_path = beside(path, ".lock")
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
