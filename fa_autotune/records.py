"""Outcome types: what became of a candidate on a problem, and the protocol of what produces them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, CompileForm


class TrialStatus(StrEnum):
    """How a trial ended. Only OK has a measurement; the others say why in `TrialRecord.error`."""

    OK = "ok"
    REJECTED = "rejected"  # a named constraint, before anything ran
    COMPILE_FAILED = "compile_failed"
    OVER_RESOURCES = "over_resources"  # compiled, but spills, does not fit, or fails another gate on the binary
    WRONG_RESULT = "wrong_result"
    LAUNCH_FAILED = "launch_failed"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"


class Role(StrEnum):
    """Why a measurement was taken: first sight, or the interleaved comparison of finalists."""

    SCREEN = "screen"
    CONFIRM = "confirm"


class Regime(StrEnum):
    """How a kernel was timed; figures of different regimes are never compared."""

    EVENTS = "events"  # device events around each launch, L2 flushed between
    GRAPH = "graph"  # replays of a CUDA graph of many launches: launch overhead excluded
    WALL = "wall"  # host clock round Triton's interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceReport:
    """What the compiled kernel needs, read without a GPU. `registers` per thread; None if the assembler kept silent.

    `code_digest`: of the machine code, equal for kernels that differ in nothing that a GPU runs; None if unknown.
    """

    registers: int | None
    spill_bytes: int
    smem_bytes: int
    compile_s: float
    warnings: tuple[str, ...] = ()
    code_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """Errors against the reference over all probes: absolute maxima, each beside what the numerics rule allows there.

    `max_error_ratio` and `mean_error_ratio` are error / allowance: at most 1 passes. `failures` says what did not.
    """

    max_error: float
    max_error_ratio: float
    mean_error_ratio: float
    lse_error: float
    probes: int
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check held."""
        return not self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one kernel on one problem, in milliseconds, over `launches` times taken.

    In the regime `graph` each of these is the mean of one replay's launches, so the spread is that of means.
    `early_stopped`: clearly slower than the incumbent after a few launches; then the median is of those few.
    `rank`: place among the finalists of its variant in a confirm session, 1 is the winner; None for a screen.
    """

    role: Role
    regime: Regime
    launches: int
    p20_ms: float
    median_ms: float
    p80_ms: float
    early_stopped: bool = False
    rank: int | None = None
    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """What became of a candidate on a problem. Exactly the OK ones have a measurement.

    `kernel_digest` and `form` identify the compiled kernel; the digest is None if nothing was rendered.
    """

    candidate: Candidate
    problem: AttentionProblem
    status: TrialStatus
    form: CompileForm
    kernel_digest: str | None = None
    resources: ResourceReport | None = None
    accuracy: AccuracyReport | None = None
    measurement: Measurement | None = None
    error: str | None = None
    constraint: str | None = None  # REJECTED, OVER_RESOURCES: the name of the constraint or gate
    duration_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if (self.status is TrialStatus.OK) != (self.measurement is not None):
            raise ValueError(
                f"a trial with status {self.status} {'lacks' if self.measurement is None else 'has'} a measurement"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """A candidate of which nothing is known, since the machine failed meanwhile: no trial, and never stored."""

    candidate: Candidate
    problem: AttentionProblem
    error: str


class Evaluator(Protocol):
    """Turns candidates into records. The real one compiles and runs kernels; a replay answers from recorded sweeps."""

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling candidates in the background; a later `screen` finds them done. Returns at once."""
        ...

    def screen(
        self,
        candidates: Sequence[Candidate],
        problems: Sequence[AttentionProblem],
        *,
        incumbents_ms: Sequence[float | None] = (),
    ) -> Iterator[TrialRecord | MachineFault]:
        """Yield one record for each candidate on each problem, in completion order, or the fault in its place.

        All candidates and problems are of one family; each kernel is compiled once. `incumbents_ms` holds the best
        time so far for each problem: a candidate clearly slower stops early. A candidate that fails is a record.
        """
        ...

    def confirm(self, candidates: Sequence[Candidate], problem: AttentionProblem) -> list[TrialRecord | MachineFault]:
        """Measure finalists interleaved in one session: records of role `confirm`, the fastest first.

        Finalists may be of several variants; `rank` counts from 1 within each variant. Candidates that fail here come
        last, without a rank, and so do faults.
        """
        ...
