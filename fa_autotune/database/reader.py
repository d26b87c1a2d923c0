"""The one reader of database files: import, dispatch and inspection judge a file and its rows by what stands here.

A file may be foreign, damaged, or written to hurt. It is opened read-only by sqlite3 alone, and nothing that it defines
is executed: our own statements read plain columns of ordinary tables, without its indexes, views and triggers, within
limits on time and size. A row counts if `rows` parses it and all that it refers to.
"""

import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from fa_autotune.database.places import (
    JOURNAL,
    LOG,
    SHARED_MEMORY,
    beside,
    is_live,
    require_own_journal,
    require_own_log,
    require_plain_sides,
    waiting,
)
from fa_autotune.database.rows import (
    COLUMNS,
)
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.database.sqlite_errors import BUSY_TIMEOUT_S, needs_writing_beside, translated
from fa_autotune.errors import DatabaseError, InvalidPackError, SchemaTooNewError
from fa_autotune.files import real_path
from fa_autotune.paths import shell_command

MEMORY = ":memory:"
LIMIT_S = 3.0  # that SQLite may take for one verb, and a second more for each of
_BYTES_PER_S = 16 * 2**20  # of the file, up to
_MAX_LIMIT_S = 30.0
_MAX_VALUE_BYTES = 2**20
_MAX_READ_BYTES = 64 * 2**20  # of memory at once: damaged pages may hold one text many times. Beside that
_READ_BYTES_PER_BYTE = 8  # of the file, up to
_MOST_READ_BYTES = 2 * 2**30
_MOST_COMPRESSED = 8  # bytes of a file for each that a disk stores; the rest of it are holes
_BYTES_PER_BLOCK = 512
_ANYBODY_WRITES = 0o222
_MAX_COPY_BYTES = 256 * 2**20
VM_STEPS_PER_LOOK = 1_000  # at the clock
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,  # also of each statement in the file's schema
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
}
_MIN_SQLITE = (3, 37)  # strict tables

_OTHER_TABLES = {"portfolios": ("id",), "misses": ("id", "problem_id", "device_fingerprint", "count", "last_seen")}
# What each schema that was ever released stores, of what is read. A new schema is a new entry; none is ever removed.
_SINCE_3 = ("code_digest", "measured_as")
_BEFORE_3 = {"kernels": tuple(name for name in COLUMNS["kernels"] if name not in _SINCE_3)}
TABLES_OF_SCHEMA: dict[int, dict[str, tuple[str, ...]]] = {
    1: {**COLUMNS, **_BEFORE_3, **_OTHER_TABLES},
    2: {**COLUMNS, **_BEFORE_3, **_OTHER_TABLES, "claims": ("id",)},
    3: {**COLUMNS, **_OTHER_TABLES, "claims": ("id",)},
}
TABLES = tuple(TABLES_OF_SCHEMA[SCHEMA_VERSION])


class Reader:
    """Reads a connection within limits. `limit_s`: seconds that SQLite may take until `restart`, None for no limit."""

    def __init__(
        self, connection: sqlite3.Connection, where: str, *, limit_s: float | None = None, size_bytes: float = 0
    ) -> None:
        self.connection = connection
        self.where = where
        self.schema = SCHEMA_VERSION
        self._limit_s = limit_s
        self._left_s = limit_s or 0.0
        self._max_bytes = min(_MAX_READ_BYTES + _READ_BYTES_PER_BYTE * size_bytes, _MOST_READ_BYTES)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tables(self) -> Mapping[str, tuple[str, ...]]:
        """The tables that a file of this schema has, with the columns that are read."""
        return TABLES_OF_SCHEMA[self.schema]

    def columns(self, table: str) -> str:
        """What is selected of a table: COLUMNS, NULL for one that this schema lacks."""
        stored = self.tables[table]
        return ", ".join(name if name in stored else f"NULL AS {name}" for name in COLUMNS[table])

    def restart(self) -> None:
        """Give SQLite its whole time again, for the next verb."""
        self._left_s = self._limit_s or 0.0

    def fetch(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement; DatabaseError past a limit."""
        with translated(self.where):
            return self.fetch_raw(statement, values)

    def fetch_raw(
        self, statement: str, values: Sequence[Any] = (), *, max_rows: int | None = None
    ) -> list[tuple[Any, ...]]:
        """`fetch`, with SQLite's own errors."""
        if self._limit_s is None:
            return [tuple(row) for row in self.connection.execute(statement, values)]
        start = time.monotonic()
        end = start + self._left_s
        self.connection.set_progress_handler(lambda: int(time.monotonic() > end), VM_STEPS_PER_LOOK)
        try:
            return self._bounded(self.connection.execute(statement, values), max_rows)
        finally:
            self.connection.set_progress_handler(None, 0)
            self._left_s -= time.monotonic() - start

    def _bounded(self, cursor: sqlite3.Cursor, max_rows: int | None) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in map(tuple, cursor):
            size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
            if size > self._max_bytes:
                raise DatabaseError(
                    f"{self.where} holds more than {self._max_bytes} bytes of what is read at once; get the file from "
                    "a source you trust"
                )
            rows.append(row)
            if max_rows is not None and len(rows) > max_rows:
                raise DatabaseError(f"{self.where} holds more than {max_rows} winners; export a smaller pack")
        return rows


def open_reader(
    path: Path, *, is_pack: bool = False, limit_s: float | None = None, busy_s: float = BUSY_TIMEOUT_S
) -> Reader:
    """Open a file to read, of any schema that was released; DatabaseError if it is none of ours, or can't be read.

    Nothing is created beside the file, unless it is a live WAL database; beside a pack, or in a folder that nobody may
    write, never. `limit_s` None goes by the size of the file.
    """
    require_sqlite()
    with translated(str(path)):
        real = real_path(path)
        if not real.is_file():
            if real.exists():
                raise DatabaseError(f"{path} is not a file; name a tuning database with --db FILE")
            raise DatabaseError(
                f"there is no tuning database at {path}; create one with `fa-autotune tune`, or name another with "
                "--db FILE"
            )
        require_plain_sides(real)
        if not real.stat().st_size:  # SQLite would remove a log beside it
            raise DatabaseError(_is_empty(path))
        require_own_log(real)
        reader = _connect_read_only(
            real,
            where=str(path),
            is_pack=is_pack,
            busy_s=busy_s,
            limit_s=limit_for(real) if limit_s is None else limit_s,
        )
        try:
            with moment(reader.connection):
                schema = schema_of(reader)
                if schema is None:
                    raise DatabaseError(_is_empty(path))
                reader.schema = schema
                require_plain_tables(reader)
        except BaseException:
            reader.close()
            raise
        return reader


def limit_for(real: Path) -> float:
    """Seconds that SQLite may take for one verb on a file."""
    return min(_MAX_LIMIT_S, LIMIT_S + _stored_bytes(real) / _BYTES_PER_S)


def _stored_bytes(real: Path) -> float:
    """The size of a file without its holes, with its log: holes cost nobody anything, so they buy no time either."""
    found = [path.stat() for path in (real, *waiting(real, LOG))]
    return sum(min(one.st_size, _MOST_COMPRESSED * _BYTES_PER_BLOCK * one.st_blocks) for one in found)


def _is_empty(path: Path) -> str:
    return f"{path} is empty, not a tuning database; name another file with --db FILE"


def connect(
    where: str,
    *,
    uri: bool = False,
    busy_s: float = BUSY_TIMEOUT_S,
    factory: type[sqlite3.Connection] = sqlite3.Connection,
) -> sqlite3.Connection:
    """A connection in autocommit mode; text that is no UTF-8 comes as text that no rule of ours lets pass."""
    connection = sqlite3.connect(where, timeout=busy_s, isolation_level=None, uri=uri, factory=factory)
    connection.row_factory = sqlite3.Row
    connection.text_factory = _decoded
    return connection


@contextmanager
def moment(connection: sqlite3.Connection) -> Iterator[None]:
    """What the block reads is of one moment, though other processes create, migrate or write the file meanwhile."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.rollback()


def schema_of(reader: Reader) -> int | None:
    """The schema of a file of ours at this `moment`; None if it is empty, an error for what we must not touch."""
    application_id, version, objects = (
        reader.fetch_raw(statement)[0][0]
        for statement in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    if application_id != APPLICATION_ID:
        if application_id or version or objects:
            raise DatabaseError(
                f"{reader.where} is an SQLite file, but not a tuning database (application_id {application_id:#x}, "
                f"ours is {APPLICATION_ID:#x}); name another file with --db FILE"
            )
        return None
    if version > SCHEMA_VERSION:
        raise SchemaTooNewError(
            f"{reader.where} has schema {version}, this release knows {SCHEMA_VERSION}; upgrade fa_autotune, "
            "or name another file with --db FILE"
        )
    if version not in TABLES_OF_SCHEMA:
        raise InvalidPackError(
            f"{reader.where} has schema {version}, which no release wrote; get the file from a source you trust"
        )
    return int(version)


def require_sqlite() -> None:
    """DatabaseError where Python's SQLite is too old."""
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        raise DatabaseError(
            f"SQLite {sqlite3.sqlite_version} has no strict tables; use a Python with SQLite 3.37 or newer"
        )


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _connect_read_only(real: Path, *, where: str, is_pack: bool, busy_s: float, limit_s: float) -> Reader:
    """Open as immutable what SQLite could only open by writing beside it, if no change waits to be taken in there."""

    def opened(at: Path, *options: str) -> Reader:
        uri = "&".join((f"{at.as_uri()}?mode=ro", *options))
        connection = connect(uri, uri=True, busy_s=busy_s)
        reader = Reader(connection, where, limit_s=limit_s, size_bytes=_stored_bytes(real))
        try:
            harden(connection)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.execute("PRAGMA query_only = ON").close()
            reader.fetch_raw("SELECT count(*) FROM sqlite_master")
        except BaseException:
            reader.close()
            raise
        return reader

    if _is_left_open(real):
        with suppress(OSError), TemporaryDirectory(prefix="fa-autotune-", ignore_cleanup_errors=True) as folder:
            if (copy := _copied(real, Path(folder))) is not None:
                return opened(copy)  # what is open stays, whether it has a name or not
    is_kept_out = is_pack or not real.parent.stat().st_mode & _ANYBODY_WRITES  # though root could
    if is_kept_out and is_live(real) and not waiting(real):
        return opened(real, "immutable=1")
    try:
        return opened(real)
    except sqlite3.Error as error:
        if not needs_writing_beside(error):
            raise
        if waiting(real, JOURNAL):
            require_own_journal(real)
            first = "" if os.access(real.parent, os.W_OK) else "copy both to a folder that you can write, where "
            raise DatabaseError(
                f"{where} has the journal of a change that was cut short, {beside(real, JOURNAL)}; {first}"
                f"`{shell_command(['sqlite-utils', 'tables', where])}` opens the file to write, which takes that "
                "change back; if the journal is of another file, move it away"
            ) from None
        if waiting(real, LOG):
            raise DatabaseError(
                f"{where} is a live database (WAL) in a folder that can't be written, so it does not open; on a "
                "machine that can write there, turn it into a pack: "
                f"`{shell_command(['fa-autotune', 'db', 'export', 'PACK', '--all', '--db', where])}`"
            ) from None
    return opened(real, "immutable=1")


def _is_left_open(real: Path) -> bool:
    """True if a file and its log were left by a process that ended, and nobody has them open."""
    return waiting(real) == [beside(real, LOG)] and not os.path.lexists(beside(real, SHARED_MEMORY))


def _copied(real: Path, folder: Path) -> Path | None:
    """A copy, in a folder of ours, of a file that was left open and its log: SQLite writes beside a file to read both.

    None where it is too large to be copied for each reader, or somebody opens it meanwhile.
    """
    paths = (real, beside(real, LOG))
    before = [path.stat() for path in paths]
    if sum(found.st_size for found in before) > _MAX_COPY_BYTES:
        return None
    for path in paths:
        shutil.copyfile(path, folder / path.name)
    is_same = all(
        (one.st_ino, one.st_size, one.st_mtime_ns) == (other.st_ino, other.st_size, other.st_mtime_ns)
        for one, other in zip(before, [path.stat() for path in paths], strict=True)
    )
    return folder / real.name if is_same and _is_left_open(real) else None


def harden(connection: sqlite3.Connection) -> None:
    """Bound what a file may make of our statements, and call nothing that it defines."""
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}").close()


def require_plain_tables(reader: Reader) -> None:
    """Refuse a file in which a name of ours is anything but one ordinary table that stores the columns we read."""
    named: dict[str, list[tuple[str, str, int]]] = {}
    for name, kind, sql, root in reader.fetch_raw("SELECT name, type, sql, rootpage FROM sqlite_master"):
        if isinstance(name, str) and kind != "index":
            named.setdefault(name.lower(), []).append((str(kind), str(sql), root))
    for table, columns in reader.tables.items():
        found = named.get(table, [])
        kind, sql, root = found[0] if len(found) == 1 else ("missing" if not found else "named twice", "", 0)
        # What a schema says of an object's type is not what SQLite makes of it: that is its statement.
        if kind != "table" or not sql.upper().startswith("CREATE TABLE") or type(root) is not int or root < 2:
            raise InvalidPackError(
                f"{reader.where}: {table} is no ordinary table ({kind}); get the file from a source you trust"
            )
        stored = {name for _, name, *_, hidden in reader.fetch_raw(f"PRAGMA table_xinfo({table})") if hidden == 0}
        if absent := [column for column in columns if column not in stored]:
            raise InvalidPackError(
                f"{reader.where}: {table} does not store {', '.join(absent)}; get the file from a source you trust"
            )
