"""What goes into and comes out of the database, beside the records that the whole package shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"


class SessionKind(StrEnum):
    """What a session was for: a search, the comparison of its finalists, or a second look at old winners."""

    TUNE = "tune"
    CONFIRM = "confirm"
    RECHECK = "recheck"


class SessionState(StrEnum):
    """Where a session stands. INTERRUPTED ones left every trial that had ended."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class CompileStatus(StrEnum):
    """What the compiler made of a kernel: `not_compiled` if it never got that far."""

    NOT_COMPILED = "not_compiled"
    COMPILED = "compiled"
    FAILED = "failed"


def utc_now() -> datetime:
    """The time now, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """A record as stored, with its newest screen measurement, or its newest confirm if it has no screen."""

    record: TrialRecord
    device: DeviceSpec
    toolchain: Toolchain
    trial_id: int
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """One row of the view `winners`: rank 1 of the newest confirm session of a device, problem, variant and release of
    Triton (its major and minor version).

    `measured_as`: as of the kernel's row.
    """

    candidate: Candidate
    problem: AttentionProblem
    device_fingerprint: str
    device_arch: str
    device_name: str
    toolchain: Toolchain
    kernel_digest: str | None
    measured_as: str | None
    form: CompileForm
    regime: Regime
    median_ms: float
    p20_ms: float
    p80_ms: float
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    max_error_ratio: float | None
    confirmed_at: datetime
    session_id: int
    trial_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardEntry:
    """One row of the view `leaderboard`: a config's place among all timed ones of its device, problem and regime.

    The time is the newest confirm's, or the newest screen's where a config never was a finalist.
    """

    position: int
    candidate: Candidate
    problem: AttentionProblem
    device_fingerprint: str
    triton: str
    role: Role
    regime: Regime
    early_stopped: bool
    median_ms: float
    p20_ms: float
    p80_ms: float
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    compile_s: float | None
    max_error_ratio: float | None
    trial_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionCount:
    """One row of the view `rejections`: how many trials ended with a status, and by which constraint or gate."""

    device_fingerprint: str
    problem: AttentionProblem
    variant: Variant
    status: TrialStatus
    constraint: str | None
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A problem that was dispatched `count` times without a winner of its own."""

    problem: AttentionProblem
    device_fingerprint: str
    count: int = 1
    last_seen: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """One session of tuning, confirming or rechecking. `uid` is the same in every database that has the session."""

    session_id: int
    uid: str
    kind: SessionKind
    state: SessionState
    device_fingerprint: str
    toolchain: Toolchain
    parent_id: int | None
    arguments: Mapping[str, JSON]
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseInfo:
    """What a database holds: rows per table, devices, toolchains and its last session."""

    path: Path | None
    schema_version: int
    size_bytes: int
    counts: Mapping[str, int]
    devices: tuple[DeviceSpec, ...]
    toolchains: tuple[Toolchain, ...]
    last_session: SessionInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """What an import added, and the kernels and trials that it brought up to date. All zero if everything was there."""

    devices: int = 0
    problems: int = 0
    sessions: int = 0
    kernels: int = 0
    updated_kernels: int = 0
    trials: int = 0
    updated_trials: int = 0
    measurements: int = 0

    @property
    def changed(self) -> bool:
        """True if the database is not as it was before."""
        return self != ImportSummary()


# --- rows, parsed: what a table's row means, with the ids of the rows that it refers to -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """A row of `kernels`. `resources` is None where the compiler never said.

    `measured_as`: the digest of the text that was measured, where that was another one of the same machine code.
    """

    candidate: Candidate
    arch: str
    form: CompileForm
    digest: str | None
    compile_status: CompileStatus
    resources: ResourceReport | None
    measured_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A row of `sessions` without what only its own process may know (host and process id)."""

    uid: str
    kind: SessionKind
    state: SessionState
    torch: str | None
    power_limit_w: float | None
    arguments: str
    started_at: str
    ended_at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A row of `trials`."""

    status: TrialStatus
    constraint: str | None
    error: str | None
    accuracy: AccuracyReport | None
    duration_s: float
    ended_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """A row of `measurements`."""

    measurement: Measurement
    measured_at: str
