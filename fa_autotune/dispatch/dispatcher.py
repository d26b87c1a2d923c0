"""What a process asks for kernels: choices among its databases' winners, and the way of a whole backward.

Nothing is tuned, measured or compiled here.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple, TypeVar

from fa_autotune.dispatch.decision import TUNE_COMMAND, Choice, Decision, DigestOf, FamilyChoices, Origin
from fa_autotune.dispatch.misses import MissLog, Store
from fa_autotune.dispatch.winners import Snapshot, load_snapshot
from fa_autotune.errors import NoKernelError
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.paths import database_path, pack_paths
from fa_autotune.problem.device import INTERPRETER_ARCH, DeviceSpec, parse_triton_version
from fa_autotune.problem.family import MAX_REMEMBERED_FAMILIES, AttentionFamily
from fa_autotune.problem.passes import FUSED_BACKWARD, KEYLESS_PASSES, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Variant
from fa_autotune.space.support import untested
from fa_autotune.space.workspace import dq_padding

MAX_PADDING = 2.0  # of dq: with so much and more, a fused backward that nobody measured is not taken
ZEROS_PER_POSTPROCESSING = 2 / 3  # of its time: an unordered kernel's zeros are 4 of the 6 bytes that it moves
MAX_REMEMBERED = 1024  # decisions, which say why, kept by a Dispatcher

Key = TypeVar("Key")
Value = TypeVar("Value")

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


class _Weighed(NamedTuple):
    """The way of a backward and what made it so: of these the first that is there."""

    way: BackwardWay
    unserved: AttentionProblem | None = None  # a fused kernel's
    times: Mapping[BackwardWay, float] | None = None  # of the ways that were measured on the very shape
    padding: float = 0.0  # of dq, if it is too much


class Dispatcher:
    """Kernels for one device. What follows from a problem's family is worked out once, so that a new shape is cheap.

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
        self._families: dict[AttentionFamily, FamilyChoices] = {}
        self._remembered: dict[AttentionProblem, Decision] = {}
        self._lost: dict[Pass, dict[Variant, str]] = {}
        self._is_interpreter = device.arch == INTERPRETER_ARCH
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

    def choose(self, problem: AttentionProblem, *, ahead: bool = False) -> Choice:
        """The kernel for a problem, the same objects for each problem that it serves; NoKernelError if none does.

        `ahead`: it may never run, so no miss is counted and nothing is logged.
        """
        with self._lock:
            choice = self._choices(problem.family).choose(problem.shape)
            if not ahead:
                self._note(problem, choice)
            return choice

    def decide(self, problem: AttentionProblem) -> Decision:
        """`choose`, with the reasons."""
        found = self.peek(problem)
        self._note(problem, found)
        return found

    def peek(self, problem: AttentionProblem) -> Decision:
        """`decide`, for those who only want to know: no miss is counted and nothing is logged."""
        with self._lock:
            found = self._remembered.get(problem)
            if found is None:
                found = self._choices(problem.family).decide(problem.shape)
                _keep(self._remembered, problem, found, MAX_REMEMBERED)
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
        with self._lock:
            weighed = self._weigh(call, unordered)
            return BackwardChoice(
                way=weighed.way,
                problems=_problems_of(weighed.way, call),
                reason=self._reason(weighed, _ways(unordered)),
            )

    def backward_way(self, call: AttentionProblem, *, unordered: bool = False) -> BackwardWay:
        """The way of `backward_choice`, without the reason."""
        with self._lock:
            return self._weigh(call, unordered).way

    def _weigh(self, call: AttentionProblem, unordered: bool) -> _Weighed:
        before, fused, after = _problems_of(BackwardWay.FUSED, call)
        for problem in (fused, before, after):
            if not self._choices(problem.family).serves(problem.shape):
                return _Weighed(BackwardWay.SPLIT, unserved=problem)
        fused_ms = self._measured_ms((before, fused, after))
        if fused_ms is not None:
            times = {BackwardWay.FUSED: fused_ms}
            for way in _ways(unordered)[1:]:
                if (ms := self._measured_ms(_problems_of(way, call))) is not None:
                    times[way] = ms
            if BackwardWay.FUSED_UNORDERED in times:
                times[BackwardWay.FUSED_UNORDERED] += ZEROS_PER_POSTPROCESSING * (self._measured_ms((after,)) or 0.0)
            return _Weighed(min(times, key=lambda way: times[way]), times=times)
        if (padding := dq_padding(fused.family, call.shape)) >= MAX_PADDING:
            return _Weighed(BackwardWay.SPLIT, padding=padding)
        return _Weighed(BackwardWay.FUSED)

    def _reason(self, weighed: _Weighed, ways: Sequence[BackwardWay]) -> str:
        if weighed.unserved is not None:
            try:
                self.peek(weighed.unserved)
            except NoKernelError as error:
                return str(error)
        if times := weighed.times:
            told = ", ".join(f"{way} {ms:.4g} ms" for way, ms in times.items())
            why = "the fastest of those that were" if len(times) > 1 else "the only one that was"
            missing = "".join(f"; {way} was not" for way in ways if way not in times)
            return f"{why} measured on this shape ({told}){missing}"
        if weighed.padding:
            return f"the fused kernel would pad dq to {weighed.padding:.1f} times its size"
        return "a kernel serves it, and it was not measured on this shape"

    def _measured_ms(self, problems: Sequence[AttentionProblem]) -> float | None:
        """Time of kernels one after another; None if one of them has no winner of that very shape.

        Those that know no keys are a few per cent of a way: the time on another shape will do for them, or none, and
        that they were timed in CUDA graphs where long kernels were timed by events.
        """
        times: list[float] = []
        for problem in sorted(problems, key=_is_short):  # most often a long one decides, and quickly
            choices = self._choices(problem.family)
            found = choices.find(problem.shape) if _is_short(problem) else choices.find_exact(problem.shape)
            if found is None:
                return None
            times.append(found.median_ms or 0.0)
        return math.fsum(times)

    def flush_misses(self) -> int:
        """Append the misses so far to the user's database; gives the number of problems. Runs by itself at exit."""
        return self._misses.flush()

    def lose(self, kernel_pass: Pass, variant: Variant, reason: str) -> bool:
        """Let other variants serve a pass from now on, since this one does not compile here; whether that is new.

        Only with a Triton that nothing was tested with: else it is an error that somebody must hear of.
        """
        with self._lock:
            newer, lost = untested(parse_triton_version(self.triton_version)), self._lost.setdefault(kernel_pass, {})
            if newer is None or variant in lost:
                return False
            lost[variant] = f"{newer}, and its kernel does not compile: {reason}"
            self._families.clear()
            self._remembered.clear()
        _logger.warning("%s %s can't serve any more: %s", kernel_pass, variant, lost[variant])
        return True

    def _choices(self, family: AttentionFamily) -> FamilyChoices:
        found = self._families.get(family)
        if found is None:
            if newer := untested(parse_triton_version(self.triton_version)):
                self._warn_once("untested", f"{newer}; `fa-autotune tune` verifies its kernels here (told once)")
            found = FamilyChoices(
                family,
                device=self.device,
                triton_version=self.triton_version,
                snapshot=self.snapshot,
                digest_of=self._digest_of,
                lost=self._lost.get(family.kernel_pass, {}),
            )
            _keep(self._families, family, found, MAX_REMEMBERED_FAMILIES)
        return found

    def _note(self, problem: AttentionProblem, choice: Choice) -> None:
        """Count a miss and tell what concerns people."""
        if self._is_interpreter:  # what it misses is never tuned: its times mean nothing
            return
        if choice.origin is not Origin.EXACT:
            self._misses.add(problem)
        if choice.stale and "stale" not in self._warned:
            self._warn_once("stale", f"{problem.label} runs with a stale winner: {self.peek(problem).trace[-1]}")
        if choice.origin is Origin.DEFAULT and "default" not in self._warned:
            text = f"{problem.label} is untuned on {self.device.name} and runs with a default"
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


def _ways(unordered: bool) -> tuple[BackwardWay, ...]:
    """The ways that a backward may go, the one that needs no measurement first."""
    ordered = (BackwardWay.FUSED, BackwardWay.SPLIT)
    return (*ordered, BackwardWay.FUSED_UNORDERED) if unordered else ordered


def _problems_of(way: BackwardWay, call: AttentionProblem) -> tuple[AttentionProblem, ...]:
    if way is BackwardWay.SPLIT:
        return tuple(call.for_pass(one) for one in SPLIT_BACKWARD)
    is_free = way is BackwardWay.FUSED_UNORDERED
    return tuple(call.for_pass(one, unordered=is_free and one is Pass.BWD_FUSED) for one in FUSED_BACKWARD)


def _is_short(problem: AttentionProblem) -> bool:
    return problem.family.kernel_pass in KEYLESS_PASSES


def _keep(memory: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Remember a value, in place of the oldest if there are as many as may be."""
    if len(memory) >= most:
        del memory[next(iter(memory))]
    memory[key] = value
