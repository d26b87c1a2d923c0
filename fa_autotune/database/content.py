"""The rows of a database file, parsed and judged: which count, and which of them won.

What stands here is the rule for import, dispatch and inspection alike; `reader` says how a file is opened.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fa_autotune.database.entries import KernelRow, MeasurementRow, SessionRow, TrialRow, Winner
from fa_autotune.database.reader import Reader, moment
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
from fa_autotune.database.sqlite_errors import translated
from fa_autotune.errors import InvalidPackError
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Role, TrialRecord, TrialStatus

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
