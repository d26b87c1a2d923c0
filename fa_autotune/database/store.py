"""`TuningDatabase`: the verbs of our trade over one SQLite file."""

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

from fa_autotune.database import packs, writing
from fa_autotune.database.connection import MEMORY, TABLES, open_read_only, open_writable, transaction, translated
from fa_autotune.database.entries import (
    JSON,
    DatabaseInfo,
    ImportSummary,
    LeaderboardEntry,
    MeasurementRow,
    Miss,
    RejectionCount,
    SessionInfo,
    SessionKind,
    SessionRow,
    SessionState,
    StoredTrial,
    Winner,
)
from fa_autotune.database.liveness import interrupt_dead_sessions, process_values
from fa_autotune.database.migrations import LEADERBOARD_SQL, REJECTIONS_SQL, WINNERS_SQL
from fa_autotune.database.places import FilesInPlace
from fa_autotune.database.rows import (
    COLUMNS,
    Row,
    arguments_from,
    device_from,
    kernel_from,
    leaderboard_from,
    measurement_from,
    miss_from,
    now_text,
    parse_time,
    problem_from,
    record_from,
    rejection_from,
    session_from,
    toolchain_from,
    trial_from,
    utc_text,
    winner_from,
)
from fa_autotune.database.schema import SCHEMA_VERSION
from fa_autotune.database.text import to_json
from fa_autotune.database.writing import (
    Values,
    device_values,
    kernel_of,
    record_rows,
    require_readable,
    session_values,
    toolchain_values,
    trial_of,
)
from fa_autotune.errors import DatabaseError, InvalidProblemError
from fa_autotune.files import OutputKind, write_output
from fa_autotune.paths import expanded, users_databases
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.family import canonical_json
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialRecord, TrialStatus
from fa_autotune.space.candidate import Variant

EntryT = TypeVar("EntryT")
JSON_TEXT = OutputKind(
    name="text of `fa-autotune db export --text`",
    is_one=lambda head: re.match(rb'{\n "schema": \d+,\n "(trials|winners)": \[', head) is not None,
    error=DatabaseError,
)
_JOINED = ("trials", "kernels", "problems", "devices", "toolchains", "sessions", "measurements")
_TRIALS_SQL = f"""
SELECT {", ".join(f"{table}.{column}" for table in _JOINED for column in COLUMNS[table])}
FROM trials
JOIN kernels ON kernels.id = trials.kernel_id
JOIN problems ON problems.id = trials.problem_id
JOIN devices ON devices.id = trials.device_id
JOIN toolchains ON toolchains.id = kernels.toolchain_id
JOIN sessions ON sessions.id = trials.session_id
LEFT JOIN measurements ON measurements.id = (
    SELECT newest.id FROM measurements AS newest WHERE newest.trial_id = trials.id
    ORDER BY newest.role = 'screen' DESC, newest.measured_at DESC, newest.id DESC LIMIT 1
)
"""


class TuningDatabase:
    """Every trial, measurement and winner, in one SQLite file, for any number of processes at once.

    A file that is not there is created, with its folder, unless `read_only`; `:memory:` is gone when it is closed.
    Whatever writes fails where the file is no more under its name: it was deleted, moved or replaced meanwhile.
    One object serves the thread that made it. Trouble with the file is a DatabaseError.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = None if str(path) == MEMORY else expanded(path)
        self._where = str(self.path or MEMORY)
        self._connection = open_read_only(self.path) if self.path and read_only else open_writable(self.path)
        self._places = FilesInPlace(self.path)

    def close(self) -> None:
        """Close the file; what was saved is saved already."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin_session(
        self,
        *,
        kind: SessionKind,
        device: DeviceSpec,
        toolchain: Toolchain,
        parent_id: int | None = None,
        arguments: Mapping[str, JSON] | None = None,
    ) -> int:
        """Start a session and return its id. Sessions that a dead process left running are marked interrupted."""
        session = SessionRow(
            uid=uuid4().hex,
            kind=kind,
            state=SessionState.RUNNING,
            torch=toolchain.torch,
            power_limit_w=device.power_limit_w,
            arguments=canonical_json(arguments or {}),
            started_at=now_text(),
            ended_at=None,
        )
        values = session_values(session)
        for parse, row in (
            (device_from, device_values(device)),
            (toolchain_from, toolchain_values(toolchain)),
            (session_from, values),
        ):
            require_readable(parse, row)
        with self._writing() as connection:
            interrupt_dead_sessions(connection)
            ids: Values = {
                "device_id": writing.put_device(connection, device),
                "toolchain_id": writing.put_toolchain(connection, toolchain),
                "parent_id": parent_id,
            }
            return writing.add(connection, "sessions", {**values, **ids, **process_values()})

    def end_session(self, session_id: int, *, state: SessionState) -> None:
        """Say how a session ended."""
        with self._writing() as connection:
            self._session_row(session_id)
            writing.update(connection, "sessions", session_id, {"state": state.value, "ended_at": now_text()})

    def save_trial(self, session_id: int, record: TrialRecord) -> int:
        """Save a record and return its trial's id; it is on the disk when this returns.

        The session says the device and toolchain. A trial of the same kernel, problem and device is replaced, its
        measurements of other sessions are kept.
        """
        if record.candidate.family != record.problem.family:
            raise InvalidProblemError(
                f"a candidate of family {record.candidate.family.label} was tried on {record.problem.label}; "
                "a record needs a problem of the candidate's family"
            )
        with self._writing() as connection:
            session = self._session_row(session_id)
            ended_at = now_text()
            kernel, trial = kernel_of(record, session["arch"]), trial_of(record, ended_at)
            timed = record.measurement
            measured = None if timed is None else MeasurementRow(measurement=timed, measured_at=ended_at)
            for parse, row in record_rows(kernel, trial, measured):
                require_readable(parse, row)
            keys: Values = {
                "kernel_id": writing.put_kernel(
                    connection, kernel, toolchain_id=session["toolchain_id"], overwrite=True
                ),
                "problem_id": writing.put_problem(connection, record.problem),
                "device_id": session["device_id"],
                "session_id": session_id,
            }
            trial_id, _ = writing.put_trial(connection, trial, keys=keys, overwrite=True)
            writing.drop_rejection(connection, keys)
            if measured:
                writing.put_measurement(connection, measured, trial_id=trial_id, session_id=session_id, overwrite=True)
            return trial_id

    def add_misses(self, misses: Iterable[Miss]) -> None:
        """Add to the counts of problems that were dispatched without a winner of their own."""
        with self._writing() as connection:
            for miss in misses:
                row: Values = {
                    "device_fingerprint": miss.device_fingerprint,
                    "count": miss.count,
                    "last_seen": utc_text(miss.last_seen),
                }
                require_readable(miss_from, {**row, "problem_key": miss.problem.key})
                connection.execute(
                    """INSERT INTO misses (problem_id, device_fingerprint, count, last_seen)
                       VALUES (:problem_id, :device_fingerprint, :count, :last_seen)
                       ON CONFLICT (problem_id, device_fingerprint) DO UPDATE
                       SET count = count + excluded.count, last_seen = max(last_seen, excluded.last_seen)""",
                    {**row, "problem_id": writing.put_problem(connection, miss.problem)},
                )

    def clear_misses(self, *, device: DeviceSpec | None = None, problem: AttentionProblem | None = None) -> int:
        """Forget misses, of one device or problem if given, and return how many."""
        where, values = _where({"device_fingerprint": _fingerprint(device), "problems.key": problem and problem.key})
        found = f"SELECT misses.id FROM misses JOIN problems ON problems.id = misses.problem_id {where}"
        with self._writing() as connection:
            return connection.execute(f"DELETE FROM misses WHERE id IN ({found})", values).rowcount

    # --- reading ------------------------------------------------------------------------------------------------------

    def trials(
        self,
        *,
        device: DeviceSpec | None = None,
        toolchain: Toolchain | None = None,
        problem: AttentionProblem | None = None,
        variant: Variant | None = None,
        statuses: Collection[TrialStatus] | None = None,
    ) -> list[StoredTrial]:
        """The trials that pass every filter, in the order in which they ended. A toolchain's torch is not compared."""
        where, values = _where(
            {
                "devices.fingerprint": _fingerprint(device),
                "toolchains.key": toolchain and toolchain_values(toolchain)["key"],
                "problems.key": problem and problem.key,
                "kernels.variant": variant,
                "trials.status": statuses,
            }
        )
        return self._read(f"{_TRIALS_SQL} {where} ORDER BY trials.ended_at, trials.id", values, _stored_trial)

    def winners(
        self,
        *,
        device: DeviceSpec | None = None,
        problem: AttentionProblem | None = None,
        variant: Variant | None = None,
    ) -> list[Winner]:
        """The winners that pass every filter, ordered by device, problem and variant."""
        filters = {
            "device_fingerprint": _fingerprint(device),
            "problem_key": problem and problem.key,
            "variant": variant,
        }
        return self._read_view(WINNERS_SQL, filters, winner_from)

    def leaderboard(
        self, problem: AttentionProblem, *, device: DeviceSpec | None = None, limit: int = 10
    ) -> list[LeaderboardEntry]:
        """The best `limit` configs of a problem on each device and in each regime, the fastest first."""
        filters = {"problem_key": problem.key, "device_fingerprint": _fingerprint(device)}
        best = f"SELECT * FROM ({LEADERBOARD_SQL}) WHERE position <= {int(limit)}"
        return self._read_view(best, filters, leaderboard_from)

    def rejections(
        self,
        *,
        device: DeviceSpec | None = None,
        problem: AttentionProblem | None = None,
        variant: Variant | None = None,
    ) -> list[RejectionCount]:
        """How many trials failed and how, by device, problem, variant and constraint."""
        filters = {
            "device_fingerprint": _fingerprint(device),
            "problem_key": problem and problem.key,
            "variant": variant,
        }
        return self._read_view(REJECTIONS_SQL, filters, rejection_from)

    def misses(self, *, device: DeviceSpec | None = None) -> list[Miss]:
        """The problems that were dispatched without a winner of their own, the most frequent first."""
        where, values = _where({"device_fingerprint": _fingerprint(device)})
        statement = f"""SELECT misses.id, problems.key AS problem_key, device_fingerprint, count, last_seen
            FROM misses JOIN problems ON problems.id = misses.problem_id {where}
            ORDER BY count DESC, problems.key, device_fingerprint"""
        return self._read(statement, values, lambda row: miss_from(dict(row)))

    def info(self) -> DatabaseInfo:
        """What the database holds."""
        counts = {
            table: self._read(f"SELECT count(*) FROM {table}", [], lambda row: int(row[0]))[0] for table in TABLES
        }
        size = self._read(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size", [], lambda row: int(row[0])
        )
        devices = self._read("SELECT * FROM devices ORDER BY fingerprint", [], lambda row: device_from(dict(row)))
        toolchains = self._read("SELECT * FROM toolchains ORDER BY key", [], lambda row: toolchain_from(dict(row)))
        sessions = self._read(
            """SELECT sessions.*, devices.fingerprint, triton, cuda, driver FROM sessions
               JOIN devices ON devices.id = device_id JOIN toolchains ON toolchains.id = toolchain_id
               ORDER BY started_at DESC, sessions.id DESC LIMIT 1""",
            [],
            lambda row: _session_info(dict(row)),
        )
        return DatabaseInfo(
            path=self.path,
            schema_version=SCHEMA_VERSION,
            size_bytes=size[0],
            counts=counts,
            devices=tuple(devices),
            toolchains=tuple(toolchains),
            last_session=sessions[0] if sessions else None,
        )

    # --- exchange -----------------------------------------------------------------------------------------------------

    def export(self, target: Path, *, device: DeviceSpec | None = None, winners_only: bool = True) -> int:
        """Write a pack and return the number of its trials.

        By default it holds the winners and the finalists that they beat, without the sessions' arguments. A pack is a
        database in one file that opens read-only anywhere; it replaces an older pack, and no other file.
        """
        with translated(self._where):
            content = packs.read_content(self._connection)
            if device is not None:
                content = packs.of_device(content, device)
            if winners_only:
                content = packs.of_winners(content, self._connection)
        with translated(str(target)):
            packs.write_pack(content, expanded(target), databases=self._kept())
        return len(content.trials)

    def write_json(self, target: Path, *, device: DeviceSpec | None = None, winners_only: bool = True) -> int:
        """Write what `export_json` gives to a file and return the number of its entries.

        It replaces an older such file, and no other.
        """
        text = self.export_json(device=device, winners_only=winners_only)
        with translated(str(target)):
            write_output(expanded(target), text, JSON_TEXT, databases=self._kept())
        return len(json.loads(text)["winners" if winners_only else "trials"])

    def export_json(self, *, device: DeviceSpec | None = None, winners_only: bool = True) -> str:
        """The winners, or all trials, as sorted JSON text that can be reviewed in a diff."""
        name = "winners" if winners_only else "trials"
        entries: Iterable[object] = self.winners(device=device) if winners_only else self.trials(device=device)
        rows = [to_json(entry) for entry in entries]
        for row in rows:
            assert isinstance(row, dict)
            for numbering in ("trial_id", "session_id"):  # of this file alone
                row.pop(numbering, None)
        rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
        return json.dumps({"schema": SCHEMA_VERSION, name: rows}, sort_keys=True, indent=1) + "\n"

    def import_pack(self, source: Path) -> ImportSummary:
        """Add another database's trials to this one; a trial that is there already stays unless theirs ended later.

        All of it or nothing: a row that is not a plain tuning record is an InvalidPackError. Importing again changes
        nothing. Misses stay where they are.
        """
        source = expanded(source)
        self._places.require()
        if self.path and source.exists() and self.path.samefile(source):
            raise DatabaseError(f"{source} is the database itself; name another file to import")
        with closing(open_read_only(source)) as other, translated(str(source)):
            content = packs.read_content(other)
        with translated(self._where):
            summary = packs.write_content(self._connection, content)
        self._places.require()
        return summary

    def _kept(self) -> list[Path]:
        """The databases that no export may replace: this one and the user's."""
        return [*users_databases(), *([self.path] if self.path else [])]

    # --- statements ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with translated(self._where), transaction(self._connection):
                yield self._connection
        except DatabaseError:
            self._places.require()  # a file that is gone explains more than what SQLite says of it
            raise
        self._places.require()

    def _read(self, statement: str, values: list[Any], parse: Callable[[sqlite3.Row], EntryT]) -> list[EntryT]:
        with translated(self._where):
            return [parse(row) for row in self._connection.execute(statement, values).fetchall()]

    def _read_view(self, select: str, filters: Mapping[str, Any], parse: Callable[[Row], EntryT]) -> list[EntryT]:
        # The view's own text, not its name: in a foreign file that name may stand for anything.
        where, values = _where(filters)
        return self._read(f"SELECT * FROM ({select}) {where}", values, lambda row: parse(dict(row)))

    def _session_row(self, session_id: int) -> sqlite3.Row:
        statement = """SELECT device_id, toolchain_id, arch FROM sessions
            JOIN devices ON devices.id = device_id WHERE sessions.id = ?"""
        row: sqlite3.Row | None = self._connection.execute(statement, (session_id,)).fetchone()
        if row is None:
            raise DatabaseError(f"{self._where} has no session {session_id}; begin one with begin_session")
        return row


def _where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A WHERE clause of the filters that are not None: equality, or membership where a value is a collection."""
    terms, values = [], []
    for column, wanted in filters.items():
        if wanted is None:
            continue
        options = [wanted] if isinstance(wanted, str) else list(wanted)
        terms.append(f"{column} IN ({', '.join('?' * len(options))})")
        values += [str(option) if isinstance(option, str) else option for option in options]
    return ("WHERE " + " AND ".join(terms) if terms else ""), values


def _fingerprint(device: DeviceSpec | None) -> str | None:
    return None if device is None else device.fingerprint


def _stored_trial(row: sqlite3.Row) -> StoredTrial:
    parts, start = {}, 0
    for table in _JOINED:
        columns = COLUMNS[table]
        parts[table] = dict(zip(columns, row[start : start + len(columns)], strict=True))
        start += len(columns)
    session, trial = session_from(parts["sessions"]), trial_from(parts["trials"])
    measured = None if parts["measurements"]["id"] is None else measurement_from(parts["measurements"])
    return StoredTrial(
        record=record_from(kernel_from(parts["kernels"]), problem_from(parts["problems"]), trial, measured),
        device=device_from(parts["devices"], session.power_limit_w),
        toolchain=toolchain_from(parts["toolchains"], session.torch),
        trial_id=parts["trials"]["id"],
        ended_at=parse_time(trial.ended_at),
    )


def _session_info(row: Row) -> SessionInfo:
    session = session_from(row)
    return SessionInfo(
        session_id=row["id"],
        uid=session.uid,
        kind=session.kind,
        state=session.state,
        device_fingerprint=row["fingerprint"],
        toolchain=toolchain_from(row, session.torch),
        parent_id=row["parent_id"],
        arguments=arguments_from(row),
        started_at=parse_time(session.started_at),
        ended_at=None if session.ended_at is None else parse_time(session.ended_at),
    )
