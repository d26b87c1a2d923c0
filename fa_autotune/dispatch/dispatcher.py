"""What a process asks for kernels: decisions on its databases' winners, remembered, and the way of a whole backward.

Nothing is tuned, measured or compiled here.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from fa_autotune.dispatch.decision import TUNE_COMMAND, Decision, DigestOf, Origin, decide
from fa_autotune.dispatch.misses import MissLog, Store
from fa_autotune.dispatch.winners import Snapshot, load_snapshot
from fa_autotune.errors import NoKernelError
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.paths import database_path, pack_paths
from fa_autotune.problem.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.problem.passes import FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.workspace import dq_padding

MAX_PADDING = 2.0  # of dq: with so much and more, a fused backward that nobody measured is not taken
ZEROS_PER_POSTPROCESSING = 2 / 3  # of its time: an unordered kernel's zeros are 4 of the 6 bytes that it moves
MAX_REMEMBERED = 16_384  # decisions kept by a Dispatcher; a stream of ever new lengths must not fill memory

_logger = logging.getLogger("fa_autotune")


def default_snapshot() -> Snapshot:
    """The winners of the user's database and of the shipped packs."""
    return load_snapshot(database_path(), pack_paths())


class BackwardWay(StrEnum):
    """A way to compute a backward: which kernels, and whether parts of dq are added in a fixed order."""

    SPLIT = "split"
    FUSED = "fused"
    FUSED_UNORDERED = "fused, unordered"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardChoice:
    """The way that computes a backward, the problems of its kernels in the order in which they run, and the reason."""

    way: BackwardWay
    problems: tuple[AttentionProblem, ...]
    reason: str

    def describe(self) -> str:
        """The way and the reason, for people."""
        return f"backward {self.way}: {self.reason}"


class Dispatcher:
    """Decisions for one device, remembered: after the first call a problem costs one dict look-up.

    Thread-safe. The databases are read once, on the first decision; later ones open no database. What concerns people
    (unreadable databases, stale winners, an untuned problem) is logged once each to the logger `fa_autotune`.
    """

    def __init__(
        self,
        *,
        device: DeviceSpec,
        triton_version: str,
        load: Callable[[], Snapshot] = default_snapshot,
        digest_of: DigestOf | None = rendered_digest,
        store_misses: Store | None = None,
    ) -> None:
        """`store_misses` takes the misses when they are flushed; None stores them in the user's database."""
        self.device = device
        self.triton_version = triton_version
        self._load = load
        self._digest_of = None if digest_of is None else cache(digest_of)
        self._misses = MissLog(store_misses or self._store_in_user_database)
        self._snapshot: Snapshot | None = None
        self._remembered: dict[AttentionProblem, Decision | NoKernelError] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    @property
    def snapshot(self) -> Snapshot:
        """The winners that decisions come from; the first use reads the databases."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = self._load()
                if notes := self._snapshot.notes:
                    _logger.warning("tuning databases: %s", "; ".join(notes))
            return self._snapshot

    @property
    def misses(self) -> dict[AttentionProblem, int]:
        """How often each problem without an exact winner was asked for since the last flush."""
        return self._misses.counts

    def decide(self, problem: AttentionProblem) -> Decision:
        """The decision for a problem, made once; NoKernelError if no variant serves it."""
        found = self._decision(problem)
        if isinstance(found, NoKernelError):
            # A fresh one each time: a raised exception holds on to its caller's frames.
            raise NoKernelError(str(found))
        self._warn(found)
        # What the interpreter misses is never tuned: its times mean nothing.
        if found.origin is not Origin.EXACT and self.device.arch != INTERPRETER_ARCH:
            self._misses.add(problem)
        return found

    def peek(self, problem: AttentionProblem) -> Decision:
        """`decide`, for those who only want to know: no miss is counted and nothing is logged."""
        found = self._decision(problem)
        if isinstance(found, NoKernelError):
            raise NoKernelError(str(found))
        return found

    def backward(self, call: AttentionProblem, *, unordered: bool = False) -> tuple[AttentionProblem, ...]:
        """The problems of the kernels of a call's whole backward, in the order in which they run; `call` is the
        forward's problem."""
        return self.backward_choice(call, unordered=unordered).problems

    def backward_choice(self, call: AttentionProblem, *, unordered: bool = False) -> BackwardChoice:
        """Which way computes a call's whole backward.

        Ways that were measured on this very shape are compared by time. Where the fused one was not, it is taken all
        the same if kernels serve it and would not work on padding mostly. With `unordered` the fused kernel may add up
        dq in any order, which counts as a way of its own where both orders were measured, with the time for zeros to
        add to.
        """
        ways = {
            BackwardWay.FUSED: tuple(call.for_pass(one) for one in FUSED_BACKWARD),
            BackwardWay.SPLIT: tuple(call.for_pass(one) for one in SPLIT_BACKWARD),
        }
        before, fused, after = ways[BackwardWay.FUSED]

        def choose(way: BackwardWay, reason: str) -> BackwardChoice:
            return BackwardChoice(way=way, problems=ways[way], reason=reason)

        for problem in (fused, before, after):
            if isinstance(found := self._decision(problem), NoKernelError):
                return choose(BackwardWay.SPLIT, str(found))
        if unordered:
            ways[BackwardWay.FUSED_UNORDERED] = (before, call.for_pass(Pass.BWD_FUSED, unordered=True), after)
        times = {way: ms for way, problems in ways.items() if (ms := self._measured_ms(problems)) is not None}
        if BackwardWay.FUSED_UNORDERED in times:
            times[BackwardWay.FUSED_UNORDERED] += ZEROS_PER_POSTPROCESSING * (self._measured_ms((after,)) or 0.0)
        if BackwardWay.FUSED in times:
            told = ", ".join(f"{way} {ms:.4g} ms" for way, ms in times.items())
            why = "the fastest of those that were" if len(times) > 1 else "the only one that was"
            missing = "".join(f"; {way} was not" for way in ways if way not in times)
            fastest = min(times, key=lambda way: times[way])
            return choose(fastest, f"{why} measured on this shape ({told}){missing}")
        if (padding := dq_padding(fused.family, call.shape)) >= MAX_PADDING:
            return choose(BackwardWay.SPLIT, f"the fused kernel would pad dq to {padding:.1f} times its size")
        return choose(BackwardWay.FUSED, "a kernel serves it, and it was not measured on this shape")

    def _measured_ms(self, problems: Sequence[AttentionProblem]) -> float | None:
        """Time of kernels one after another; None if one of them has no winner of that very shape.

        Those that know no keys are a few per cent of a way: the time on another shape will do for them, or none, and
        that they were timed in CUDA graphs where long kernels were timed by events.
        """
        times: list[float] = []
        for problem in problems:
            found = self._decision(problem)
            is_short = not problem.family.kernel_pass.spec.knows_keys
            if isinstance(found, NoKernelError) or (found.origin is not Origin.EXACT and not is_short):
                return None
            times.append(found.median_ms or 0.0)
        return math.fsum(times)

    def flush_misses(self) -> int:
        """Append the misses so far to the user's database; gives the number of problems. Runs by itself at exit."""
        return self._misses.flush()

    def _decision(self, problem: AttentionProblem) -> Decision | NoKernelError:
        return self._remembered.get(problem) or self._decide_once(problem)

    def _decide_once(self, problem: AttentionProblem) -> Decision | NoKernelError:
        with self._lock:
            if (known := self._remembered.get(problem)) is not None:
                return known
            found: Decision | NoKernelError
            try:
                found = decide(
                    problem,
                    device=self.device,
                    triton_version=self.triton_version,
                    snapshot=self.snapshot,
                    digest_of=self._digest_of,
                )
            except NoKernelError as error:
                found = NoKernelError(str(error))
            if len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[problem] = found
            return found

    def _warn(self, decision: Decision) -> None:
        if self.device.arch == INTERPRETER_ARCH:
            return
        if decision.stale:
            self._warn_once("stale", f"{decision.problem.label} runs with a stale winner: {decision.trace[-1]}")
        if decision.origin is Origin.DEFAULT:
            text = f"{decision.problem.label} is untuned on {self.device.name} and runs with a default"
            self._warn_once("default", f"{text}; {TUNE_COMMAND} tunes what was missed (told once)")

    def _warn_once(self, subject: str, text: str) -> None:
        with self._lock:
            if subject in self._warned:
                return
            self._warned.add(subject)
        _logger.warning(text)

    def _store_in_user_database(self, misses: Mapping[AttentionProblem, int]) -> None:
        from fa_autotune.database import Miss, TuningDatabase  # noqa: PLC0415  dispatch itself needs no sqlite_utils

        fingerprint = self.device.fingerprint
        with TuningDatabase(database_path()) as database:
            database.add_misses(
                Miss(problem=problem, device_fingerprint=fingerprint, count=count) for problem, count in misses.items()
            )
