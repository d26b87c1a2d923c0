"""What a tuning job may spend, what it says while it runs, and what it found. Plain data; no search in here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import MachineFault, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneBudget:
    """How much a job may try.

    `trials`: candidates handed to the evaluator per problem, shared between its variants. `time_s`: for all problems
    together, None = no limit. `finalists`: how many are measured again, interleaved, to choose the winners.
    """

    trials: int = 96
    time_s: float | None = None
    finalists: int = 8

    def __post_init__(self) -> None:
        for name in ("trials", "finalists"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise FaAutotuneError(f"{name}={getattr(self, name)!r} is not a positive integer")
        if self.time_s is not None and not 0 < self.time_s < math.inf:
            raise FaAutotuneError(f"time_s={self.time_s!r} is not a positive number of seconds; use None for no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedWinner:
    """The best config of one variant on one problem, as confirmed."""

    candidate: Candidate
    median_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """What a job found for one problem; `winners` holds one per variant, the fastest first.

    `measured`: candidates this job handed to the evaluator. `screened_ms` and `default_ms`: what the screen said of
    the first winner and of its variant's untuned default (figures of one kind, so their ratio is fair). `note`:
    why the problem was not searched, or has no winner.
    """

    problem: AttentionProblem
    winners: tuple[ConfirmedWinner, ...] = ()
    counts: Mapping[TrialStatus, int] = field(default_factory=dict)
    measured: int = 0
    screened_ms: float | None = None
    default_ms: float | None = None
    note: str | None = None

    @property
    def default_ratio(self) -> float | None:
        """Time of the untuned default over the winner's time; None if the default was not measured."""
        return None if self.default_ms is None or self.screened_ms is None else self.default_ms / self.screened_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSummary:
    """What a whole job found."""

    session_id: int
    device: DeviceSpec
    toolchain: Toolchain
    results: tuple[ProblemResult, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """The job begins."""

    problems: tuple[AttentionProblem, ...]
    device: DeviceSpec
    toolchain: Toolchain
    budget: TuneBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemStarted:
    """The search over a problem begins; `number` counts from 1 to `total`. `known`: trials it starts from."""

    problem: AttentionProblem
    number: int
    total: int
    known: int
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A record was saved. `counts` and `best_ms` are those of the record's problem in this job."""

    record: TrialRecord
    best_ms: float | None
    counts: Mapping[TrialStatus, int]
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMet:
    """The machine failed while a candidate was tried: it is passed over, not saved, and tried by a later job."""

    fault: MachineFault


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmStarted:
    """Finalists are about to be measured interleaved."""

    problem: AttentionProblem
    finalists: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemFinished:
    """A problem has its winners (or a note why not)."""

    result: ProblemResult


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """The job ended in good order."""

    summary: TuneSummary


TuneEvent = JobStarted | ProblemStarted | TrialEnded | FaultMet | ConfirmStarted | ProblemFinished | JobFinished
