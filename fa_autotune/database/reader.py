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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

from fa_autotune.database.entries import KernelRow, MeasurementRow, SessionRow, TrialRow, Winner
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
    Row,
    device_from,
    kernel_from,
    measurement_from,
    parse_time,
    problem_from,
    record_from,
    session_from,
    toolchain_from,
    trial_from,
)
from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.database.sqlite_errors import BUSY_TIMEOUT_S, needs_writing_beside, translated
from fa_autotune.errors import DatabaseError, InvalidPackError, SchemaTooNewError
from fa_autotune.files import real_path
from fa_autotune.paths import shell_command
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Role, TrialRecord, TrialStatus

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

ParsedT = TypeVar("ParsedT")
Refers = Mapping[str, int | None]  # column → the id that a row refers to, in its own database
Refuse = Callable[[InvalidPackError], None]

PARENTS = {
    "device_id": "devices",
    "toolchain_id": "toolchains",
    "problem_id": "problems",
    "session_id": "sessions",
    "parent_id": "sessions",
    "kernel_id": "kernels",
    "trial_id": "trials",
}
# Measurements that won, and those whose words are none of ours, which might have.
_RANK_ONE = """role IS NOT 'screen'
    AND (role IS NOT 'confirm' OR rank IS 1 OR typeof(rank) NOT IN ('integer', 'null') OR rank < 1)"""


# --- a file -----------------------------------------------------------------------------------------------------------


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


# --- its rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A database's tuning records, parsed, by their ids there. Misses, claims and portfolios don't travel."""

    devices: Mapping[int, tuple[DeviceSpec, Refers]]
    toolchains: Mapping[int, tuple[Toolchain, Refers]]
    problems: Mapping[int, tuple[AttentionProblem, Refers]]
    sessions: Mapping[int, tuple[SessionRow, Refers]]
    kernels: Mapping[int, tuple[KernelRow, Refers]]
    trials: Mapping[int, tuple[TrialRow, Refers]]
    measurements: Mapping[int, tuple[MeasurementRow, Refers]]

    def trial_of(self, measurement_id: int) -> tuple[TrialRow, Refers]:
        """The trial that a measurement timed."""
        return self.trials[required(self.measurements[measurement_id][1], "trial_id")]

    def record_of(self, trial_id: int, measured: MeasurementRow | None) -> TrialRecord:
        """A trial as a record; InvalidPackError if it makes none."""
        trial, refers = self.trials[trial_id]
        return record_from(
            self.kernels[required(refers, "kernel_id")][0],
            self.problems[required(refers, "problem_id")][0],
            self.devices[required(refers, "device_id")][0],
            trial,
            measured,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is read, as terms of SQL, with the values of the trials' marks."""

    trials: str = "1"
    measurements: str = "1"
    sessions: str | None = None  # None: those of the trials and measurements
    values: tuple[str, ...] = ()


EVERYTHING = Selection()
# Beside the winners' trials those that say of themselves that they were timed, and were not; and what a gate stopped
# when it was looked at again: it had won with another Triton.
WINNERS = Selection(
    measurements=_RANK_ONE,
    trials=f"""id IN (SELECT trial_id FROM measurements NOT INDEXED WHERE {_RANK_ONE})
        OR status IS 'ok' AND id NOT IN (SELECT trial_id FROM measurements NOT INDEXED)
        OR status IS 'over_resources'
            AND session_id IN (SELECT id FROM sessions NOT INDEXED WHERE kind IS 'recheck')""",
)


def selection(base: Selection = EVERYTHING, **filters: Any) -> Selection:
    """The part of a selection whose trials pass filters: a text or several for a column of `trials` or of what it
    refers to, as in `devices__fingerprint`."""
    terms: list[str] = []
    values: list[str] = []
    for name, wanted in filters.items():
        if wanted is None:
            continue
        options = [str(option) for option in ([wanted] if isinstance(wanted, str) else wanted)]
        marks = ", ".join("?" * len(options))
        table, _, column = name.rpartition("__")
        among = f"{column} IN ({marks})"
        if table == "toolchains":
            among = f"toolchain_id IN (SELECT id FROM toolchains NOT INDEXED WHERE {among})"
            table = "kernels"
        if table:
            among = f"{table.removesuffix('s')}_id IN (SELECT id FROM {table} NOT INDEXED WHERE {among})"
        terms.append(among)
        values += options
    if not terms:
        return base
    trials = " AND ".join([f"({base.trials})", *terms])
    chosen = f"trial_id IN (SELECT id FROM trials NOT INDEXED WHERE {trials})"
    return Selection(trials=trials, measurements=f"({base.measurements}) AND {chosen}", values=tuple(values))


def strictly(error: InvalidPackError) -> None:
    """Refuse a file whole at its first bad row."""
    raise error


def read_content(
    reader: Reader, chosen: Selection = EVERYTHING, *, refuse: Refuse = strictly, max_rows: int | None = None
) -> Content:
    """Read and parse records. What is not one of ours goes to `refuse`, and what refers to it is left out.

    DatabaseError if the file itself can't be read, or a table gives more than `max_rows`.
    """
    by_trial = f"SELECT %s FROM trials NOT INDEXED WHERE {chosen.trials}"
    by_measurement = f"SELECT %s FROM measurements NOT INDEXED WHERE {chosen.measurements}"
    of_both = f"{by_trial % 'session_id'} UNION {by_measurement % 'session_id'}"
    is_whole = chosen == EVERYTHING
    wheres: dict[str, tuple[str, int]] = {  # table → term, and how often the values stand in it
        "devices": ("1", 0),
        "toolchains": ("1", 0),
        "problems": ("1", 0) if is_whole else (f"id IN ({by_trial % 'problem_id'})", 1),
        "sessions": ("1", 0)
        if is_whole
        else (f"id IN ({of_both})", 2)
        if chosen.sessions is None
        else (chosen.sessions, 0),
        "kernels": ("1", 0) if is_whole else (f"id IN ({by_trial % 'kernel_id'})", 1),
        "trials": (chosen.trials, 1),
        "measurements": (chosen.measurements, 1),
    }
    with translated(reader.where), moment(reader.connection):
        raw = {
            table: reader.fetch_raw(
                f"SELECT {reader.columns(table)} FROM {table} NOT INDEXED WHERE {where}",
                chosen.values * times,
                max_rows=max_rows,
            )
            for table, (where, times) in wheres.items()
        }
        sessions_there = {key for (key,) in reader.fetch_raw("SELECT id FROM sessions NOT INDEXED")}
    return _Judge(raw=raw, sessions_there=sessions_there, refuse=refuse).content()


def winning(content: Content) -> list[int]:
    """The measurements that won: rank 1 of the newest session that confirmed a (device, problem, variant, release of
    Triton).

    In the order of these. A trial that has failed since is none.
    """
    newest: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for key, (row, refers) in content.measurements.items():
        trial, trial_refers = content.trial_of(key)
        if row.measurement.role is not Role.CONFIRM or row.measurement.rank != 1 or trial.status is not TrialStatus.OK:
            continue
        kernel, kernel_refers = content.kernels[required(trial_refers, "kernel_id")]
        group = (
            content.devices[required(trial_refers, "device_id")][0].fingerprint,
            content.problems[required(trial_refers, "problem_id")][0].key,
            kernel.candidate.variant.value,
            content.toolchains[required(kernel_refers, "toolchain_id")][0].triton_release,
        )
        session = content.sessions[required(refers, "session_id")][0]
        recency = (session.started_at, session.uid, row.measured_at, key)
        newest[group] = max(newest.get(group, recency), recency)
    return [newest[group][-1] for group in sorted(newest)]


def winner_of(content: Content, measurement_id: int) -> Winner:
    """A winning measurement as an entry."""
    row, refers = content.measurements[measurement_id]
    trial, trial_refers = content.trial_of(measurement_id)
    kernel, kernel_refers = content.kernels[required(trial_refers, "kernel_id")]
    device = content.devices[required(trial_refers, "device_id")][0]
    session_id = required(refers, "session_id")
    toolchain = content.toolchains[required(kernel_refers, "toolchain_id")][0]
    resources = kernel.resources
    return Winner(
        candidate=kernel.candidate,
        problem=content.problems[required(trial_refers, "problem_id")][0],
        device_fingerprint=device.fingerprint,
        device_arch=device.arch,
        device_name=device.name,
        toolchain=Toolchain(
            triton=toolchain.triton,
            cuda=toolchain.cuda,
            driver=toolchain.driver,
            torch=content.sessions[session_id][0].torch,
        ),
        kernel_digest=kernel.digest,
        measured_as=kernel.measured_as,
        form=kernel.form,
        regime=row.measurement.regime,
        median_ms=row.measurement.median_ms,
        p20_ms=row.measurement.p20_ms,
        p80_ms=row.measurement.p80_ms,
        registers=None if resources is None else resources.registers,
        spill_bytes=None if resources is None else resources.spill_bytes,
        smem_bytes=None if resources is None else resources.smem_bytes,
        max_error_ratio=None if trial.accuracy is None else trial.accuracy.max_error_ratio,
        confirmed_at=parse_time(row.measured_at),
        session_id=session_id,
        trial_id=required(refers, "trial_id"),
    )


def required(refers: Refers, column: str) -> int:
    """An id that a row which was read must have."""
    key = refers[column]
    assert key is not None
    return key


@dataclass(slots=True, kw_only=True)
class _Judge:
    """Parses raw rows. A row is refused aloud; what only refers to a refused one is left out without more words."""

    raw: Mapping[str, list[tuple[Any, ...]]]
    sessions_there: set[Any]
    refuse: Refuse
    refused: set[tuple[str, Any]] = field(default_factory=set)  # (table, id)
    untimed: set[Any] = field(default_factory=set)  # trials of which a measurement was refused

    def content(self) -> Content:
        """What may be used."""
        content = Content(
            devices=self._parsed("devices", device_from),
            toolchains=self._parsed("toolchains", toolchain_from),
            problems=self._parsed("problems", problem_from),
            sessions=self._parsed("sessions", session_from),
            kernels=self._parsed("kernels", kernel_from),
            trials=self._parsed("trials", trial_from),
            measurements=self._parsed("measurements", measurement_from),
        )
        return self._records(self._anchored(content))

    def _say(self, text: object) -> None:
        self.refuse(InvalidPackError(f"{text}; get the file from a source you trust"))

    def _parsed(self, table: str, parse: Callable[[Row], ParsedT]) -> dict[int, tuple[ParsedT, Refers]]:
        columns = COLUMNS[table]
        found: dict[int, tuple[ParsedT, Refers]] = {}
        for values in self.raw[table]:
            row = dict(zip(columns, values, strict=True))
            key = row["id"]
            try:
                if type(key) is not int or key in found:
                    raise InvalidPackError(f"{table} has a row without an integer id of its own")
                found[key] = parse(row), {name: row[name] for name in columns if name in PARENTS}
            except InvalidPackError as error:
                self.refused.add((table, key))
                self.untimed.add(row.get("trial_id"))
                self._say(error)
        return found

    def _anchored(self, content: Content) -> Content:
        """Without the rows that refer to one that is not there."""
        kept: dict[str, Any] = {table: getattr(content, table) for table in COLUMNS}
        for table in ("sessions", "kernels", "trials", "measurements"):
            rows = {}
            for key, (parsed, refers) in kept[table].items():
                if lost := [column for column in refers if not self._is_there(column, refers[column], kept)]:
                    self.refused.add((table, key))
                    self.untimed.add(refers.get("trial_id"))
                    if not any((PARENTS[column], refers[column]) in self.refused for column in lost):
                        self._say(f"{table} row {key}: {lost[0]} refers to no row of {PARENTS[lost[0]]}")
                else:
                    rows[key] = parsed, refers
            kept[table] = rows
        return Content(**kept)

    def _is_there(self, column: str, parent: Any, kept: Mapping[str, Any]) -> bool:
        if column == "parent_id":
            return parent is None or (type(parent) is int and parent in self.sessions_there)
        return type(parent) is int and parent in kept[PARENTS[column]]

    def _records(self, content: Content) -> Content:
        """Without the trials that make no record, and their measurements."""
        measured = {refers["trial_id"]: row for row, refers in content.measurements.values()}
        trials = {}
        for key, entry in content.trials.items():
            try:
                content.record_of(key, measured.get(key))
                trials[key] = entry
            except InvalidPackError as error:
                if key in measured or key not in self.untimed:
                    self._say(f"trials row {key}: {error}")
        timed = {key: entry for key, entry in content.measurements.items() if entry[1]["trial_id"] in trials}
        return replace(content, trials=trials, measurements=timed)


def newest_measurements(content: Content, first: Role) -> Iterator[tuple[int, int | None]]:
    """Each trial with its newest measurement of a role, or of the other if it has none of that."""
    newest: dict[int, tuple[bool, str, int]] = {}
    for key, (row, refers) in content.measurements.items():
        trial_id = required(refers, "trial_id")
        recency = (row.measurement.role is first, row.measured_at, key)
        newest[trial_id] = max(newest.get(trial_id, recency), recency)
    for trial_id in content.trials:
        yield trial_id, newest[trial_id][-1] if trial_id in newest else None
