"""Moving rows between databases: read and check everything first, then write it all in one transaction."""

import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa_autotune.database import writing
from fa_autotune.database.connection import open_writable, transaction
from fa_autotune.database.content import PARENTS, Content, Refers, read_content, required, winning
from fa_autotune.database.entries import ImportSummary, MeasurementRow, SessionKind, TrialRow
from fa_autotune.database.places import (
    JOURNAL,
    LOG,
    SHARED_MEMORY,
    beside,
    is_written_here,
    require_plain_sides,
    waiting,
)
from fa_autotune.database.reader import open_reader
from fa_autotune.database.schema import APPLICATION_ID
from fa_autotune.errors import DatabaseError
from fa_autotune.files import OutputKind, output_path, put_in_place, real_path
from fa_autotune.paths import expanded
from fa_autotune.problem.device import DeviceSpec
from fa_autotune.problem.family import canonical_json
from fa_autotune.records import Role, TrialStatus


def _is_pack(head: bytes) -> bool:
    """Whether a file begins as a database of ours that is at rest: not in WAL mode, as those in use are."""
    return head[68:72] == APPLICATION_ID.to_bytes(4, "big") and head[18:20] != b"\x02\x02"


PACK = OutputKind(name="a pack, which a database in use (WAL) is not", is_one=_is_pack, error=DatabaseError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Another database that was read, to be imported."""

    path: Path
    content: Content

    @classmethod
    def read(cls, path: Path) -> "Pack":
        """Read all of a database; DatabaseError that names it if it can't be read, or not each row may be used."""
        path = expanded(path)
        with naming(str(path), "; nothing was imported"), open_reader(path, is_pack=True) as reader:
            return cls(path=path, content=read_content(reader))


@contextmanager
def naming(where: str, then: str = "") -> Iterator[None]:
    """Say in errors which file they are about, and what follows."""
    try:
        yield
    except DatabaseError as error:
        said = str(error)
        raise type(error)(f"{said if where in said else f'{where}: {said}'}{then}") from error.__cause__


def of_device(content: Content, device: DeviceSpec) -> Content:
    """The trials of one device."""
    keep = {key for key, (spec, _) in content.devices.items() if spec.fingerprint == device.fingerprint}
    trials = {key: entry for key, entry in content.trials.items() if entry[1]["device_id"] in keep}
    return replace(content, trials=trials, measurements=_of_trials(content, trials))


def of_release(content: Content, release: str) -> Content:
    """The trials of kernels that one release of Triton compiled."""
    keep = {key for key, (chain, _) in content.toolchains.items() if chain.triton_release == release}
    kernels = {key for key, (_, refers) in content.kernels.items() if refers["toolchain_id"] in keep}
    trials = {key: entry for key, entry in content.trials.items() if entry[1]["kernel_id"] in kernels}
    return replace(content, trials=trials, measurements=_of_trials(content, trials))


def of_winners(content: Content) -> Content:
    """The winners and the finalists that they beat: the ok trials of the winners' confirm sessions, so measured.

    With what a gate stopped when it was looked at again: it won with another Triton, and must not run with this one.
    """
    finals = {_final(content, key) for key in winning(content)}
    measurements = {
        key: (row, refers)
        for key, (row, refers) in content.measurements.items()
        if row.measurement.role is Role.CONFIRM
        and content.trial_of(key)[0].status is TrialStatus.OK
        and _final(content, key) in finals
    }
    kept = {refers["trial_id"] for _, refers in measurements.values()}
    kept |= {key for key, (trial, refers) in content.trials.items() if _is_stopped_again(content, trial, refers)}
    trials = {key: entry for key, entry in content.trials.items() if key in kept}
    # What was typed on somebody's machine is no business of a pack's readers.
    sessions = {key: (replace(row, arguments="{}"), refers) for key, (row, refers) in content.sessions.items()}
    return replace(content, trials=trials, measurements=measurements, sessions=sessions)


def write_content(connection: sqlite3.Connection, content: Content) -> ImportSummary:
    """Write trials, their measurements and all that they refer to, in the caller's transaction.

    Rows that are there already stay.
    """
    tables = ("devices", "problems", "sessions", "kernels", "trials")
    before = _counts(connection, tables)
    writer = _Writer(connection=connection, content=content, new_ids={})
    updated = measured = 0
    for key in sorted(content.trials, key=lambda key: _sort_key(content, key)):
        updated += writer.put_trial(key)
    for key in sorted(content.measurements, key=lambda key: _measurement_sort_key(content, key)):
        measured += writer.put_measurement(key)
    writer.link_sessions()
    after = _counts(connection, tables)
    added = {table: after[table] - before[table] for table in tables}
    return ImportSummary(
        **added,
        updated_kernels=len(writer.changed_kernels) - added["kernels"],
        updated_trials=updated - added["trials"],
        measurements=measured,
    )


def write_pack(content: Content, path: Path, *, databases: Iterable[Path]) -> None:
    """Write a content as a pack: a file in journal_mode=delete, vacuumed, put in place whole.

    It replaces a pack, never one of `databases`, another database in use or a file of others. What SQLite left beside
    a file of that name would be read into the pack: it is removed if it is empty, else the pack is refused.
    """
    kept = list(databases)
    target = _free_target(path, kept)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".pack-", dir=target.parent))
    except OSError as error:
        raise DatabaseError(
            f"{target.parent} can't be written ({error.strerror}); name a pack in another folder"
        ) from error
    draft = folder / "pack.db"
    try:
        with closing(open_writable(draft)) as connection:
            with transaction(connection):
                write_content(connection, content)
            connection.execute("PRAGMA journal_mode = delete")
            connection.execute("VACUUM")
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        _free_target(path, kept)  # again: this may have taken its time
        for side in (LOG, SHARED_MEMORY, JOURNAL):
            beside(target, side).unlink(missing_ok=True)
        put_in_place(draft, target)
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


def _free_target(path: Path, databases: Iterable[Path]) -> Path:
    """The file that a pack may become."""
    if is_written_here(real_path(path)):
        raise DatabaseError(f"{path} is a database in use by this process; name another file")
    target = output_path(path, PACK, databases=databases)
    require_plain_sides(target)
    for left in waiting(target):
        raise DatabaseError(
            f"{left} lies where a pack {target.name} would be read with it, and may hold what somebody saved; name "
            "another file, or move it away"
        )
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Puts a content's rows into another database, each parent when it is first referred to."""

    connection: sqlite3.Connection
    content: Content
    new_ids: dict[tuple[str, int], int]
    changed_kernels: set[int] = field(default_factory=set)  # with those that are new

    def put_trial(self, key: int) -> bool:
        trial, refers = self.content.trials[key]
        keys: dict[str, str | int | float | None] = {name: self._new(name, refers) for name in refers}
        trial_id, changed = writing.put_trial(self.connection, trial, keys=keys, overwrite=False)
        self.new_ids["trials", key] = trial_id
        return changed

    def put_measurement(self, key: int) -> bool:
        row, refers = self.content.measurements[key]
        ids = {name: self._new(name, refers) for name in refers}
        return writing.put_measurement(self.connection, row, **ids, overwrite=False)

    def link_sessions(self) -> None:
        for (table, key), session_id in list(self.new_ids.items()):
            parent = self.content.sessions[key][1]["parent_id"] if table == "sessions" else None
            if parent is not None and (new_parent := self.new_ids.get(("sessions", parent))):
                writing.update(
                    self.connection, "sessions", session_id, {"parent_id": new_parent}, unless="parent_id IS NOT NULL"
                )

    def _new(self, column: str, refers: Refers) -> int:
        table, key = PARENTS[column], refers[column]
        assert key is not None  # only a session's parent may be absent
        if (table, key) not in self.new_ids:
            self.new_ids[table, key] = self._put(table, key)
        return self.new_ids[table, key]

    def _put(self, table: str, key: int) -> int:
        content = self.content
        if table == "devices":
            return writing.put_device(self.connection, content.devices[key][0])
        if table == "toolchains":
            return writing.put_toolchain(self.connection, content.toolchains[key][0])
        if table == "problems":
            return writing.put_problem(self.connection, content.problems[key][0])
        if table == "kernels":
            kernel, refers = content.kernels[key]
            toolchain_id = self._new("toolchain_id", refers)
            kernel_id, changed = writing.put_kernel(self.connection, kernel, toolchain_id=toolchain_id, overwrite=False)
            if changed:
                self.changed_kernels.add(kernel_id)
            return kernel_id
        session, refers = content.sessions[key]
        ids = {name: self._new(name, refers) for name in ("device_id", "toolchain_id")}
        return writing.put_session(self.connection, session, **ids)


def _of_trials(
    content: Content, trials: Mapping[int, tuple[TrialRow, Refers]]
) -> dict[int, tuple[MeasurementRow, Refers]]:
    return {key: entry for key, entry in content.measurements.items() if entry[1]["trial_id"] in trials}


def _is_stopped_again(content: Content, trial: TrialRow, refers: Refers) -> bool:
    session = content.sessions[required(refers, "session_id")][0]
    return trial.status is TrialStatus.OVER_RESOURCES and session.kind is SessionKind.RECHECK


def _final(content: Content, measurement_id: int) -> tuple[object, ...]:
    """What a winner and the finalists that it beat have in common."""
    refers = content.trial_of(measurement_id)[1]
    variant = content.kernels[required(refers, "kernel_id")][0].candidate.variant
    session_id = content.measurements[measurement_id][1]["session_id"]
    return session_id, refers["device_id"], refers["problem_id"], variant


def _sort_key(content: Content, trial_id: int) -> tuple[str, ...]:
    """Equal contents are written in equal order, whatever order they were measured in."""
    trial, refers = content.trials[trial_id]
    device = content.devices[required(refers, "device_id")][0].fingerprint
    problem = content.problems[required(refers, "problem_id")][0].key
    kernel, kernel_refers = content.kernels[required(refers, "kernel_id")]
    toolchain = content.toolchains[required(kernel_refers, "toolchain_id")][0]
    return device, problem, canonical_json(writing.kernel_identity(kernel)), str(toolchain), trial.ended_at


def _measurement_sort_key(content: Content, key: int) -> tuple[str, ...]:
    row, refers = content.measurements[key]
    return (*_sort_key(content, required(refers, "trial_id")), row.measured_at, row.measurement.role.value)


def _counts(connection: sqlite3.Connection, tables: tuple[str, ...]) -> dict[str, int]:
    return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
