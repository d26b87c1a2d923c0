"""Opening a database file: who may create it, what proves that it is ours, and transactions that don't deadlock."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlite_utils import Database

from fa_autotune.database.migrations import migrate
from fa_autotune.database.rows import COLUMNS
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.errors import DatabaseError, InvalidPackError, SchemaTooNewError
from fa_autotune.files import locked, make_folder

MEMORY = ":memory:"
BUSY_TIMEOUT_S = 30.0
TABLES = (*COLUMNS, "portfolios", "misses")
_MIN_SQLITE = (3, 37)  # strict tables
_MAX_VALUE_BYTES = 2**20


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn errors of SQLite and of the file system into DatabaseError."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite's own message quotes broken text
        raise DatabaseError(f"{where}: {error}; {_next_step(str(error))}") from error
    except OSError as error:
        raise DatabaseError(
            f"{where}: {error.strerror or error}; name a file that can be used with FA_AUTOTUNE_DB or --db FILE"
        ) from error


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
    _require_sqlite()
    where = MEMORY if path is None else str(path)
    with translated(where):
        if path is not None:
            _make_folder(path.parent)
        connection = _connect(where)
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


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a database that may be foreign, under limits; one of an older schema is migrated in a copy in memory.

    Nothing is created beside the file unless it is a live WAL database.
    """
    _require_sqlite()
    with translated(str(path)):
        if not path.is_file():
            raise DatabaseError(
                f"there is no tuning database at {path}; create one with `fa-autotune tune`, or name another with "
                "--db FILE"
            )
        connection = _connect_read_only(path)
        try:
            if not _is_current(connection, str(path)):
                connection = _migrated_copy(connection, path)
            _require_plain_tables(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _connect(where: str, *, uri: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(where, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=uri)
    connection.row_factory = sqlite3.Row
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    pending = path.with_name(path.name + "-wal")
    for attempt in (uri, f"{uri}&immutable=1"):
        connection = _connect(attempt, uri=True)
        try:
            _harden(connection)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            if attempt != uri or not _is_folder_trouble(error):
                raise
            if pending.exists() and pending.stat().st_size:
                raise DatabaseError(
                    f"{path} is a live database (WAL) in a folder that can't be written, so it does not open; "
                    "on a machine that can write there, turn it into a pack: fa-autotune db export PACK --all"
                ) from None
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise AssertionError("the second attempt returns or raises")


def _harden(connection: sqlite3.Connection) -> None:
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {pragma}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)


def _is_folder_trouble(error: sqlite3.OperationalError) -> bool:
    return any(text in str(error) for text in ("readonly database", "unable to open database file"))


def _is_current(connection: sqlite3.Connection, where: str) -> bool:
    """False for an empty file or an older schema of ours; an error for anything that we must not touch."""
    connection.execute("BEGIN")  # the three are of one moment, though another process may be creating the file
    try:
        application_id, version, objects = (
            connection.execute(statement).fetchone()[0]
            for statement in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
    finally:
        connection.rollback()
    if application_id != APPLICATION_ID:
        if application_id or version or objects:
            raise DatabaseError(
                f"{where} is an SQLite file, but not a tuning database (application_id {application_id:#x}, ours is "
                f"{APPLICATION_ID:#x}); name another file with --db FILE"
            )
        return False
    if version > SCHEMA_VERSION:
        raise SchemaTooNewError(
            f"{where} has schema {version}, this release knows {SCHEMA_VERSION}; upgrade fa_autotune, "
            "or name another file with --db FILE"
        )
    return bool(version == SCHEMA_VERSION)


def _create_or_migrate(connection: sqlite3.Connection, where: str) -> None:
    if _is_current(connection, where):  # another process was faster
        return
    database = Database(connection, execute_plugins=False)
    if where != MEMORY:
        database.enable_wal()
    migrate(database)


def _migrated_copy(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise DatabaseError(f"{path} is empty, not a tuning database; name another file with --db FILE")
    _require_plain_tables(connection, path)
    copy = _connect(MEMORY)
    try:
        connection.backup(copy)
        connection.close()
        copy.execute("PRAGMA trusted_schema = OFF")
        if copy.execute("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'").fetchone()[0]:
            raise InvalidPackError(f"{path} has triggers, which no file of ours has; get it from a source you trust")
        migrate(Database(copy, execute_plugins=False))
        _harden(copy)
    except BaseException:
        copy.close()
        raise
    return copy


def _require_plain_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file in which a name of ours is a view or a virtual table, or a column computes its values."""
    kinds = {
        row["name"]: (row["type"], row["sql"] or "")
        for row in connection.execute("SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view')")
    }
    for table, columns in COLUMNS.items():
        kind, sql = kinds.get(table, ("missing", ""))
        if kind != "table" or sql.lstrip().upper().startswith("CREATE VIRTUAL"):
            raise InvalidPackError(
                f"{path}: {table} is no ordinary table ({kind}); get the file from a source you trust"
            )
        stored = {row["name"] for row in connection.execute(f"PRAGMA table_xinfo({table})") if row["hidden"] == 0}
        if absent := [column for column in columns if column not in stored]:
            raise InvalidPackError(
                f"{path}: {table} does not store {', '.join(absent)}; get the file from a source you trust"
            )


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
            raise DatabaseError(f"{lock_path} is locked: {_next_step('locked')}") from None
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


def _require_sqlite() -> None:
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        raise DatabaseError(
            f"SQLite {sqlite3.sqlite_version} has no strict tables; use a Python with SQLite 3.37 or newer"
        )


def _next_step(text: str) -> str:
    if "locked" in text:
        return f"another process kept it for {BUSY_TIMEOUT_S:g} s; end that, then try again"
    if any(trouble in text for trouble in ("not a database", "malformed", "decode", "too big")):
        return "the file is damaged or something else; restore it from a copy, or name another with --db FILE"
    if "readonly" in text or "unable to open" in text:
        return "the file or its folder can't be written; choose one that can with FA_AUTOTUNE_DB or --db FILE"
    if "full" in text:
        return "free some space, then try again"
    return "check the file with `fa-autotune db info --db FILE`"
