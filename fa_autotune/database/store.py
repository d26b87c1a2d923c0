"""`TuningDatabase`: the verbs of our trade over one SQLite file."""

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from fa_autotune.database import packs, writing
from fa_autotune.database.connection import open_writable, transaction
from fa_autotune.database.content import (
    EVERYTHING,
    WINNERS,
    Content,
    ParsedT,
    Selection,
    newest_measurements,
    read_content,
    required,
    selection,
    winner_of,
    winning,
)
from fa_autotune.database.entries import (
    JSON,
    DatabaseInfo,
    ImportSummary,
    KernelRow,
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
from fa_autotune.database.migrations import REJECTIONS_SQL
from fa_autotune.database.packs import Pack, naming
from fa_autotune.database.places import FilesInPlace
from fa_autotune.database.reader import MEMORY, TABLES, Reader, open_reader
from fa_autotune.database.rows import (
    Row,
    arguments_from,
    device_from,
    miss_from,
    now_text,
    parse_time,
    rejection_from,
    session_from,
    toolchain_from,
    utc_text,
)
from fa_autotune.database.sqlite_errors import translated
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
from fa_autotune.problem.device import DeviceSpec, Toolchain, triton_release
from fa_autotune.problem.family import canonical_json
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Variant

JSON_TEXT = OutputKind(
    name="text of `fa-autotune db export --text`",
    is_one=lambda head: re.match(rb'{\n "schema": \d+,\n "(trials|winners)": \[', head) is not None,
    error=DatabaseError,
)
_REJECTION_COLUMNS = ("device_fingerprint", "problem_key", "variant", "status", "constraint_name", "trials")
_MISS_COLUMNS = ("id", "problem_key", "device_fingerprint", "count", "last_seen")
_MISSES_SQL = """SELECT misses.id, problems.key AS problem_key, device_fingerprint, count, last_seen
    FROM misses JOIN problems ON problems.id = misses.problem_id"""


class TuningDatabase:
    """Every trial, measurement and winner, in one SQLite file, for any number of processes at once.

    A file that is not there is created, with its folder, unless `read_only`; `:memory:` is gone when it is closed.
    Whatever writes fails where the file is no more under its name: it was deleted, moved or replaced meanwhile.
    One object serves the thread that made it. Trouble with the file is a DatabaseError.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = None if str(path) == MEMORY else expanded(path)
        self._where = str(self.path or MEMORY)
        is_reader = self.path is not None and read_only
        self._reader = (
            open_reader(self.path) if self.path and is_reader else Reader(open_writable(self.path), self._where)
        )
        self._connection = self._reader.connection
        self._places = FilesInPlace(self.path)

    def close(self) -> None:
        """Close the file; what was saved is saved already."""
        self._reader.close()

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
        """Say how a session ended; what it had claimed is free again."""
        with self._writing() as connection:
            self._session_row(session_id)
            writing.update(connection, "sessions", session_id, {"state": state.value, "ended_at": now_text()})
            connection.execute("DELETE FROM claims WHERE session_id = ?", (session_id,))

    def claim(self, session_id: int, problem: AttentionProblem) -> int | None:
        """Take a problem for a session, on its device and toolchain; None, or the live session that has it already.

        A claim ends with `release`, with its session, or with the process that made it.
        """
        with self._writing() as connection:
            interrupt_dead_sessions(connection)
            session = self._session_row(session_id)
            values: Values = {
                "problem_id": writing.put_problem(connection, problem),
                "device_id": session["device_id"],
                "toolchain_id": session["toolchain_id"],
                "session_id": session_id,
                "claimed_at": now_text(),
            }
            holder = connection.execute(
                """SELECT session_id FROM claims WHERE problem_id = :problem_id AND device_id = :device_id
                   AND toolchain_id = :toolchain_id AND session_id <> :session_id""",
                values,
            ).fetchone()
            if holder is not None:
                return int(holder["session_id"])
            connection.execute(
                """INSERT INTO claims (problem_id, device_id, toolchain_id, session_id, claimed_at)
                   VALUES (:problem_id, :device_id, :toolchain_id, :session_id, :claimed_at)
                   ON CONFLICT (problem_id, device_id, toolchain_id) DO UPDATE SET claimed_at = excluded.claimed_at""",
                values,
            )
            return None

    def release(self, session_id: int, problem: AttentionProblem) -> None:
        """Give a claimed problem back."""
        with self._writing() as connection:
            connection.execute(
                "DELETE FROM claims WHERE session_id = ? AND problem_id IN (SELECT id FROM problems WHERE key = ?)",
                (session_id, problem.key),
            )

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
        if record.status is TrialStatus.OK and record.kernel_digest is None:
            raise DatabaseError("a record that is ok has no kernel_digest; nothing was saved, correct the record")
        with self._writing() as connection:
            session = self._session_row(session_id)
            ended_at = now_text()
            kernel, trial = kernel_of(record, session["arch"]), trial_of(record, ended_at)
            timed = record.measurement
            measured = None if timed is None else MeasurementRow(measurement=timed, measured_at=ended_at)
            for parse, row in record_rows(kernel, trial, measured):
                require_readable(parse, row)
            kernel_id, _ = writing.put_kernel(connection, kernel, toolchain_id=session["toolchain_id"], overwrite=True)
            keys: Values = {
                "kernel_id": kernel_id,
                "problem_id": writing.put_problem(connection, record.problem),
                "device_id": session["device_id"],
                "session_id": session_id,
            }
            trial_id, _ = writing.put_trial(connection, trial, keys=keys, overwrite=True)
            writing.drop_rejection(connection, keys)
            if measured:
                writing.put_measurement(connection, measured, trial_id=trial_id, session_id=session_id, overwrite=True)
                writing.forget_older_text(connection, kernel_id, trial_id)
            return trial_id

    def renew_kernel(self, kernel_id: int, digest: str) -> bool:
        """Give a kernel's row the digest of a text that compiles to the same machine code; its times stay.

        The row remembers under which digest it was measured. If that text has a row already, the times become that
        row's, but for those of problems on which it failed. False if nothing changes.
        """
        with self._writing() as connection:
            return writing.renew_kernel(connection, kernel_id, digest)

    def name_machine_code(self, kernel_id: int, code_digest: str) -> None:
        """Note what the machine code of a kernel is, where that was not known."""
        with self._writing() as connection:
            writing.update(
                connection, "kernels", kernel_id, {"code_digest": code_digest}, unless="code_digest IS NOT NULL"
            )

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
        chosen = selection(
            devices__fingerprint=_fingerprint(device),
            toolchains__key=toolchain and toolchain_values(toolchain)["key"],
            problems__key=problem and problem.key,
            kernels__variant=variant,
            status=statuses,
        )
        content = self._content(chosen)
        found = [_stored_trial(content, *pair) for pair in newest_measurements(content, Role.SCREEN)]
        return sorted(found, key=lambda trial: (trial.ended_at, trial.trial_id))

    def winners(
        self,
        *,
        device: DeviceSpec | None = None,
        problem: AttentionProblem | None = None,
        variant: Variant | None = None,
    ) -> list[Winner]:
        """The winners that pass every filter, ordered by device, problem and variant."""
        chosen = selection(
            WINNERS,
            devices__fingerprint=_fingerprint(device),
            problems__key=problem and problem.key,
            kernels__variant=variant,
        )
        content = self._content(chosen)
        return [winner_of(content, key) for key in winning(content)]

    def kernels_of_winners(self) -> dict[int, tuple[KernelRow, Toolchain]]:
        """The kernels that won somewhere and what compiled them, by their rows' ids."""
        content = self._content(WINNERS)
        found = {}
        for key in winning(content):
            _, refers = content.trial_of(key)
            kernel_id = required(refers, "kernel_id")
            kernel, kernel_refers = content.kernels[kernel_id]
            found[kernel_id] = kernel, content.toolchains[required(kernel_refers, "toolchain_id")][0]
        return found

    def leaderboard(
        self, problem: AttentionProblem, *, device: DeviceSpec | None = None, limit: int = 10
    ) -> list[LeaderboardEntry]:
        """The best `limit` configs of a problem on each device and in each regime, the fastest first."""
        content = self._content(
            selection(devices__fingerprint=_fingerprint(device), problems__key=problem.key, status=TrialStatus.OK)
        )
        found: dict[tuple[str, str], list[tuple[StoredTrial, Measurement]]] = {}
        for pair in newest_measurements(content, Role.CONFIRM):
            trial = _stored_trial(content, *pair)
            if timed := trial.record.measurement:
                found.setdefault((trial.device.fingerprint, timed.regime.value), []).append((trial, timed))
        entries: list[LeaderboardEntry] = []
        for _, group in sorted(found.items()):
            group.sort(key=lambda pair: (pair[1].early_stopped, pair[1].median_ms, pair[0].trial_id))
            entries += [_entry(position, *pair) for position, pair in enumerate(group[:limit], start=1)]
        return entries

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
        return self._rows(rejection_from, REJECTIONS_SQL, _REJECTION_COLUMNS, filters)

    def misses(self, *, device: DeviceSpec | None = None) -> list[Miss]:
        """The problems that were dispatched without a winner of their own, the most frequent first."""
        filters = {"device_fingerprint": _fingerprint(device)}
        order = "ORDER BY count DESC, problem_key, device_fingerprint"
        return self._rows(miss_from, _MISSES_SQL, _MISS_COLUMNS, filters, order)

    def info(self) -> DatabaseInfo:
        """What the database holds."""
        reader = self._reader
        reader.restart()
        counts = {table: 0 for table in TABLES}
        for table in reader.tables:
            counts[table] = reader.fetch(f"SELECT count(*) FROM {table} NOT INDEXED")[0][0]
        pages, page_bytes = (reader.fetch(f"PRAGMA {name}")[0][0] for name in ("page_count", "page_size"))
        last = "id IN (SELECT id FROM sessions NOT INDEXED ORDER BY started_at DESC, id DESC LIMIT 1)"
        content = self._content(Selection(trials="0", measurements="0", sessions=last))
        return DatabaseInfo(
            path=self.path,
            schema_version=reader.schema,
            size_bytes=pages * page_bytes,
            counts=counts,
            devices=tuple(sorted((spec for spec, _ in content.devices.values()), key=lambda spec: spec.fingerprint)),
            toolchains=tuple(
                sorted(
                    (chain for chain, _ in content.toolchains.values()),
                    key=lambda chain: str(toolchain_values(chain)["key"]),
                )
            ),
            last_session=next((_session_info(content, key) for key in content.sessions), None),
        )

    # --- exchange -----------------------------------------------------------------------------------------------------

    def export(
        self,
        target: Path,
        *,
        device: DeviceSpec | None = None,
        release: str | None = None,
        winners_only: bool = True,
    ) -> int:
        """Write a pack and return the number of its trials.

        By default it holds the winners and the finalists that they beat, without the sessions' arguments. `release`:
        only what that release of Triton compiled, such as 3.9. A pack is a database in one file that opens read-only
        anywhere; it replaces an older pack, and no other file.
        """
        content = self._content(EVERYTHING)
        if device is not None:
            content = packs.of_device(content, device)
        if release is not None:
            content = packs.of_release(content, self._known_release(content, release))
        if winners_only:
            content = packs.of_winners(content)
        with translated(str(target)):
            packs.write_pack(content, expanded(target), databases=self._kept())
        return len(content.trials)

    def _known_release(self, content: Content, release: str) -> str:
        known = {chain.triton_release for chain, _ in content.toolchains.values()}
        if (found := triton_release(release)) not in known:
            raise DatabaseError(
                f"{self._where} has nothing of Triton {release}; its releases are {', '.join(sorted(known)) or 'none'}"
            )
        return found

    def write_json(
        self,
        target: Path,
        *,
        device: DeviceSpec | None = None,
        release: str | None = None,
        winners_only: bool = True,
    ) -> int:
        """Write what `export_json` gives to a file and return the number of its entries.

        It replaces an older such file, and no other.
        """
        text = self.export_json(device=device, release=release, winners_only=winners_only)
        with translated(str(target)):
            write_output(expanded(target), text, JSON_TEXT, databases=self._kept())
        return len(json.loads(text)["winners" if winners_only else "trials"])

    def export_json(
        self, *, device: DeviceSpec | None = None, release: str | None = None, winners_only: bool = True
    ) -> str:
        """The winners, or all trials, as sorted JSON text that can be reviewed in a diff."""
        name = "winners" if winners_only else "trials"
        entries: list[Winner | StoredTrial] = [
            *(self.winners(device=device) if winners_only else self.trials(device=device))
        ]
        wanted = None if release is None else self._known_release(self._content(EVERYTHING), release)
        rows = [to_json(entry) for entry in entries if wanted in (None, entry.toolchain.triton_release)]
        for row in rows:
            assert isinstance(row, dict)
            for numbering in ("trial_id", "session_id"):  # of this file alone
                row.pop(numbering, None)
        rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
        return json.dumps({"schema": self._reader.schema, name: rows}, sort_keys=True, indent=1) + "\n"

    def import_pack(self, source: Path) -> ImportSummary:
        """Add another database's trials to this one; a trial that is there already stays unless theirs ended later.

        All of it or nothing: a row that is not a plain tuning record is an InvalidPackError. Importing again changes
        nothing. Misses stay where they are.
        """
        self._places.require()
        (summary,) = self.import_packs([Pack.read(source)])
        return summary

    def import_packs(self, sources: Sequence[Pack]) -> list[ImportSummary]:
        """`import_pack`, of several that were read: all of them or none."""
        self._places.require()
        for source in sources if self.path else ():
            with translated(str(source.path)):
                if source.path.samefile(self._where):
                    raise DatabaseError(f"{source.path} is the database itself; name another file to import")
        with self._writing() as connection:
            return [packs.write_content(connection, source.content) for source in sources]

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

    def _content(self, chosen: Selection) -> Content:
        self._reader.restart()
        with naming(self._where):
            return read_content(self._reader, chosen)

    def _rows(
        self,
        parse: Callable[[Row], ParsedT],
        select: str,
        columns: Sequence[str],
        filters: Mapping[str, Any],
        order: str = "",
    ) -> list[ParsedT]:
        """Rows of our own SELECT, not of a view's name: in a foreign file that may stand for anything."""
        where, values = _where(filters)
        self._reader.restart()
        found = self._reader.fetch(f"SELECT {', '.join(columns)} FROM ({select}) {where} {order}", values)
        with naming(self._where):
            return [parse(dict(zip(columns, row, strict=True))) for row in found]

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


def _stored_trial(content: Content, trial_id: int, measurement_id: int | None) -> StoredTrial:
    trial, refers = content.trials[trial_id]
    session = content.sessions[required(refers, "session_id")][0]
    kernel_refers = content.kernels[required(refers, "kernel_id")][1]
    return StoredTrial(
        record=content.record_of(trial_id, None if measurement_id is None else content.measurements[measurement_id][0]),
        device=replace(content.devices[required(refers, "device_id")][0], power_limit_w=session.power_limit_w),
        toolchain=replace(content.toolchains[required(kernel_refers, "toolchain_id")][0], torch=session.torch),
        trial_id=trial_id,
        ended_at=parse_time(trial.ended_at),
    )


def _entry(position: int, trial: StoredTrial, timed: Measurement) -> LeaderboardEntry:
    record, resources = trial.record, trial.record.resources
    return LeaderboardEntry(
        position=position,
        candidate=record.candidate,
        problem=record.problem,
        device_fingerprint=trial.device.fingerprint,
        triton=trial.toolchain.triton,
        role=timed.role,
        regime=timed.regime,
        early_stopped=timed.early_stopped,
        median_ms=timed.median_ms,
        p20_ms=timed.p20_ms,
        p80_ms=timed.p80_ms,
        registers=None if resources is None else resources.registers,
        spill_bytes=None if resources is None else resources.spill_bytes,
        smem_bytes=None if resources is None else resources.smem_bytes,
        compile_s=None if resources is None else resources.compile_s,
        max_error_ratio=None if record.accuracy is None else record.accuracy.max_error_ratio,
        trial_id=trial.trial_id,
    )


def _session_info(content: Content, session_id: int) -> SessionInfo:
    session, refers = content.sessions[session_id]
    return SessionInfo(
        session_id=session_id,
        uid=session.uid,
        kind=session.kind,
        state=session.state,
        device_fingerprint=content.devices[required(refers, "device_id")][0].fingerprint,
        toolchain=replace(content.toolchains[required(refers, "toolchain_id")][0], torch=session.torch),
        parent_id=refers["parent_id"],
        arguments=arguments_from({"arguments": session.arguments}),
        started_at=parse_time(session.started_at),
        ended_at=None if session.ended_at is None else parse_time(session.ended_at),
    )
