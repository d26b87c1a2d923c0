"""The job: hands candidates to an Evaluator, keeps every record, shares the time and confirms the best."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime

from fa_autotune.database import SessionKind, SessionState, StoredTrial, TuningDatabase
from fa_autotune.database.entries import JSON, Winner, utc_now
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, MachineError, UnsupportedError
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.problem.device import DeviceSpec, Toolchain, parse_triton_version
from fa_autotune.problem.distance import shape_distance
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Evaluator, MachineFault, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig
from fa_autotune.space.registry import VARIANTS, VariantSpec, compile_form, supported_variants
from fa_autotune.space.seeds import default_config, seed_configs
from fa_autotune.tuner.events import (
    ConfirmedWinner,
    ConfirmStarted,
    FaultMet,
    JobFinished,
    JobStarted,
    ProblemFinished,
    ProblemResult,
    ProblemStarted,
    TrialEnded,
    TuneBudget,
    TuneEvent,
    TuneSummary,
)
from fa_autotune.tuner.study import Batch, ProblemSearch, VariantSearch, quiet_optuna

SEARCH_TIME_SHARE = 0.85  # of a time budget; the rest is for confirming
BATCH_SIZE = 8  # candidates; smaller ones learn more from each other, larger ones keep more compilers busy
MAX_BATCHES_AHEAD = 3
MAX_NEIGHBOR_WINNERS = 4
MAX_RECHECKED = 1_000  # configs of a problem
MAX_FATAL_IN_A_ROW = 20
MAX_FAULTS_IN_A_ROW = 3  # of the machine, with nothing between that ended
_FATAL = (TrialStatus.CRASHED, TrialStatus.LAUNCH_FAILED, TrialStatus.COMPILE_FAILED, TrialStatus.TIMED_OUT)


def tune(
    problems: Sequence[AttentionProblem],
    *,
    evaluator: Evaluator,
    database: TuningDatabase,
    device: DeviceSpec,
    toolchain: Toolchain,
    budget: TuneBudget | None = None,
    variants: Collection[Variant] | None = None,
    resume: bool = False,
    recheck: bool = False,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    on_event: Callable[[TuneEvent], None] = lambda event: None,
    digest: Callable[[Candidate], str] = rendered_digest,
    clock: Callable[[], float] = time.monotonic,
) -> TuneSummary:
    """Search winners for problems on a device; every record is in the database before the next is asked for.

    An OSError of `on_event`, as of a closed pipe, is dropped: no job ends for progress that can't be told.

    Trials already known (same device, Triton and kernel text) inform the search and are never measured again; with
    `resume` they also count against the budget, and problems that are done are skipped; so do the trials that other
    jobs end while this one runs. A problem that another live job has claimed is left to it, and looked at again at the
    end. With `recheck` nothing is searched: only what the database has as winners and their finalists, of whatever
    Triton or text, is tried, and problems whose winners are current are skipped. `variants` restricts the search. On
    KeyboardInterrupt the session is marked interrupted and what was measured stays. `digest` and `clock` are for tests.
    """
    on_event = _heard_or_not(on_event)
    distinct = list(dict.fromkeys(problems))
    if not distinct:
        raise InvalidProblemError("there is no problem to tune; name at least one")
    budget = budget or TuneBudget()
    arguments: dict[str, JSON] = {
        "problems": [problem.key for problem in distinct],
        "trials": budget.trials,
        "time_s": budget.time_s,
        "finalists": budget.finalists,
        "variants": None if variants is None else [variant.value for variant in sorted(variants)],
        "resume": resume,
        "recheck": recheck,
        "seed": seed,
    }
    job = _Job(
        evaluator=evaluator,
        database=database,
        device=device,
        toolchain=toolchain,
        budget=budget,
        resume=resume or recheck,
        recheck=recheck,
        seed=seed,
        batch_size=batch_size,
        on_event=on_event,
        digest=digest,
        clock=clock,
        total=len(distinct),
    )
    if not any(job.specs(problem.family, variants) for problem in distinct):
        raise UnsupportedError(_nothing_serves(distinct[0], variants, device, toolchain))
    with (
        _session(job, SessionKind.RECHECK if recheck else SessionKind.TUNE, arguments) as job.session_id,
        quiet_optuna(),
    ):
        on_event(JobStarted(problems=tuple(distinct), device=device, toolchain=toolchain, budget=budget))
        summary = job.run(distinct, variants)
    on_event(JobFinished(summary=summary))
    return summary


def _heard_or_not(on_event: Callable[[TuneEvent], None]) -> Callable[[TuneEvent], None]:
    def tell(event: TuneEvent) -> None:
        with suppress(OSError):
            on_event(event)

    return tell


def _nothing_serves(
    problem: AttentionProblem, variants: Collection[Variant] | None, device: DeviceSpec, toolchain: Toolchain
) -> str:
    release = parse_triton_version(toolchain.triton)
    reasons = [
        f"{spec.variant}: {spec.supports(problem.family, device.arch, release) or 'not asked for'}"
        for spec in VARIANTS
        if spec.kernel_pass is problem.family.kernel_pass
    ]
    return f"no variant can be tuned for {problem.family.label} on {device.name} ({'; '.join(reasons)})"


@dataclass(slots=True, kw_only=True)
class _Job:
    evaluator: Evaluator
    database: TuningDatabase
    device: DeviceSpec
    toolchain: Toolchain
    budget: TuneBudget
    resume: bool
    recheck: bool
    seed: int
    batch_size: int
    on_event: Callable[[TuneEvent], None]
    digest: Callable[[Candidate], str]
    clock: Callable[[], float]
    total: int
    session_id: int = 0
    finished: int = 0
    fatal_in_a_row: int = 0
    faults_in_a_row: int = 0
    any_ok: bool = False
    began_at: datetime = field(default_factory=utc_now)  # what others tried since then counts as tried here

    def run(self, problems: Sequence[AttentionProblem], variants: Collection[Variant] | None) -> TuneSummary:
        """Search family by family; the problems of one are interleaved."""
        start = self.clock()
        deadline = math.inf if self.budget.time_s is None else start + self.budget.time_s
        families: dict[AttentionFamily, list[AttentionProblem]] = {}
        for problem in problems:
            families.setdefault(problem.family, []).append(problem)
        results: dict[AttentionProblem, ProblemResult] = {}
        for is_last in (False, True):  # what another job has claimed comes again at the end: it may have died
            for family, members in families.items():
                waiting = [problem for problem in members if problem not in results]
                specs = self.specs(family, variants)
                now, left = self.clock(), len(problems) - len(results)
                search_until = now + SEARCH_TIME_SHARE * (deadline - now) * len(waiting) / max(1, left)
                for result in self._run_family(waiting, specs, search_until, is_last=is_last):
                    results[result.problem] = result
        return TuneSummary(
            session_id=self.session_id,
            device=self.device,
            toolchain=self.toolchain,
            results=tuple(results[problem] for problem in problems),
            elapsed_s=self.clock() - start,
        )

    def specs(self, family: AttentionFamily, variants: Collection[Variant] | None) -> list[VariantSpec]:
        specs = supported_variants(family, self.device.arch, parse_triton_version(self.toolchain.triton))
        return [spec for spec in specs if variants is None or spec.variant in variants]

    def _run_family(
        self, problems: Sequence[AttentionProblem], specs: Sequence[VariantSpec], search_until: float, *, is_last: bool
    ) -> Iterator[ProblemResult]:
        """Search the problems that no other job has claimed; the others have a result only if it `is_last`."""
        searches: list[ProblemSearch] = []
        for problem in problems:
            holder = self.database.claim(self.session_id, problem) if specs else None
            if holder is not None:
                if is_last:
                    note = f"another job (session {holder}) is tuning it"
                    yield self._finish(ProblemResult(problem=problem, note=note))
                continue
            search, done = self._open(problem, specs)
            if why := self._nothing_to_do(search, done):
                yield self._finish(ProblemResult(problem=problem, winners=done, note=why))
                continue
            searches.append(search)
            self.on_event(
                ProblemStarted(
                    problem=problem,
                    number=self.finished + len(searches),
                    total=self.total,
                    known=search.known,
                    trials=search.remaining,
                )
            )
        self._search(searches, search_until)
        for search in searches:
            yield self._finish(self._confirm(search))

    def _nothing_to_do(self, search: ProblemSearch, done: tuple[ConfirmedWinner, ...]) -> str | None:
        """Why a problem needs no search, or None."""
        if done:
            return "already tuned"
        if not search.variants:
            return "no variant serves it on this device"
        if self.recheck and not search.trials:
            return "nothing that won on it before can be measured again; tune it without --recheck"
        return None

    def _finish(self, result: ProblemResult) -> ProblemResult:
        self.database.release(self.session_id, result.problem)
        self.finished += 1
        self.on_event(ProblemFinished(result=result))
        return result

    # --- what is known before ---

    def _open(
        self, problem: AttentionProblem, specs: Sequence[VariantSpec]
    ) -> tuple[ProblemSearch, tuple[ConfirmedWinner, ...]]:
        """A search that knows what the database knows; and the winners, if it is done already."""
        # A seed of its own for each: problems of a family pass their best on, so they should not try the same at first.
        variants = [
            VariantSearch(problem, spec, self.device, random.Random(f"{self.seed} {problem.key} {spec.variant}"))
            for spec in specs
        ]
        search = ProblemSearch(problem, variants, self.budget.trials)
        last_ok = None
        for stored in self._known_trials(problem):
            record = stored.record
            variant = search.variants.get(record.candidate.variant)
            if variant is None or variant.rejection(record.candidate.config) is not None:
                continue
            variant.learn(record.candidate.config, _time_ms(record), record.status.value)
            variant.spent += self.resume or stored.ended_at >= self.began_at
            search.known += 1
            if record.status is TrialStatus.OK:
                self.any_ok, last_ok = True, stored.ended_at
        if self.recheck:
            self._close(search)
        else:
            for variant in variants:
                variant.warm_start(self._warm_configs(problem, variant.spec))
        return search, () if search.remaining else self._confirmed_before(search, last_ok)

    def _close(self, search: ProblemSearch) -> None:
        """Have a search try what was ever confirmed on its problem, by the variants whose winner is not current."""
        confirmed: dict[Variant, list[KernelConfig]] = {}
        for entry in self.database.leaderboard(search.problem, device=self.device, limit=MAX_RECHECKED):
            if entry.role is Role.CONFIRM:
                confirmed.setdefault(entry.candidate.variant, []).append(entry.candidate.config)
        search.trials = 0
        current = {winner.candidate.variant for winner in self._current_winners(search)}
        for name, variant in search.variants.items():
            tried = confirmed.get(name, []) if name not in current else []
            untried = [config for config in tried if config not in variant.times_ms]
            runnable = [config for config in dict.fromkeys(untried) if variant.rejection(config) is None]
            variant.close(runnable)
            search.trials += variant.spent + len(runnable)

    def _known_trials(self, problem: AttentionProblem) -> Iterator[StoredTrial]:
        """Trials of this device, this Triton and today's kernel text, in the order in which they ended."""
        for stored in self.database.trials(device=self.device, problem=problem):
            record = stored.record
            if record.status is TrialStatus.REJECTED or stored.toolchain.triton != self.toolchain.triton:
                continue
            if record.kernel_digest is not None and record.kernel_digest == self.digest(record.candidate):
                yield stored

    def _warm_configs(self, problem: AttentionProblem, spec: VariantSpec) -> list[KernelConfig]:
        """The default first (its time tells what tuning brings), then winners from elsewhere, then good habits."""
        elsewhere, neighbors = [], []
        for winner in self.database.winners(variant=spec.variant):
            if winner.problem.family != problem.family or winner.device_arch != self.device.arch:
                continue
            if winner.problem == problem:
                elsewhere.append(winner.candidate.config)
            else:
                neighbors.append(
                    (shape_distance(winner.problem, problem, self.device.num_sms), winner.candidate.config)
                )
        nearest = [config for _, config in sorted(neighbors, key=lambda pair: pair[0])]
        return [
            default_config(spec, problem.family, self.device.arch),
            *elsewhere,
            *list(dict.fromkeys(nearest))[:MAX_NEIGHBOR_WINNERS],
            *seed_configs(spec, problem.family, self.device.arch),
        ]

    def _confirmed_before(self, search: ProblemSearch, last_ok: datetime | None) -> tuple[ConfirmedWinner, ...]:
        """The stored winners, if every variant that has a time has a current one and nothing was timed since."""
        stored = self._current_winners(search)
        wanted = {name for name, variant in search.variants.items() if variant.measured}
        if {winner.candidate.variant for winner in stored} != wanted or not stored or last_ok is None:
            return ()
        if last_ok > max(winner.confirmed_at for winner in stored):
            return ()
        return _fastest_first(
            ConfirmedWinner(candidate=winner.candidate, median_ms=winner.median_ms) for winner in stored
        )

    def _current_winners(self, search: ProblemSearch) -> list[Winner]:
        """The stored winners that this Triton and today's text have the times of."""
        return [
            winner
            for winner in self.database.winners(device=self.device, problem=search.problem)
            if winner.toolchain.triton == self.toolchain.triton
            and winner.candidate.variant in search.variants
            and winner.candidate.config in search.variants[winner.candidate.variant].measured
            and winner.kernel_digest == self.digest(winner.candidate)
        ]

    # --- searching ---

    def _search(self, searches: Sequence[ProblemSearch], until: float) -> None:
        """Measure batch after batch, the problems in turn; the next ones compile while this one is measured."""
        turns, ahead = deque(searches), deque[Batch]()
        depth = max(2, min(MAX_BATCHES_AHEAD, len(searches)))  # of one problem, no more: each batch should learn
        while True:
            while len(ahead) < depth and self.clock() < until and (batch := self._next_batch(turns)):
                self.evaluator.prefetch(batch.candidates)
                ahead.append(batch)
            if not ahead:
                return
            self._measure(ahead.popleft())

    def _next_batch(self, turns: deque[ProblemSearch]) -> Batch | None:
        for _ in range(len(turns)):
            search = turns[0]
            turns.rotate(-1)
            for variant in search.variants.values() if not self.recheck else ():
                variant.warm_start([*search.best_elsewhere(variant), *self._best_of_siblings(variant, turns)])
            batch = search.next_batch(self.batch_size)
            for variant in search.variants.values():
                self._save_rejections(search, variant)
            if batch is not None:
                return batch
        return None

    def _best_of_siblings(self, variant: VariantSearch, searches: Iterable[ProblemSearch]) -> list[KernelConfig]:
        """What is best so far on the nearest other problems of the family, in the same job."""
        siblings = sorted(
            (search for search in searches if search.problem != variant.problem),
            key=lambda search: shape_distance(search.problem, variant.problem, self.device.num_sms),
        )
        bests = (search.variants[variant.spec.variant].best for search in siblings[:MAX_NEIGHBOR_WINNERS])
        return list(dict.fromkeys(config for config in bests if config is not None))

    def _measure(self, batch: Batch) -> None:
        search, variant = batch.search, batch.variant
        records = self.evaluator.screen(batch.candidates, [search.problem], incumbents_ms=[variant.best_ms])
        for record in records:
            if isinstance(record, MachineFault):
                variant.pass_over(record.candidate.config)
                self._meet(record)
                continue
            search.measured += 1
            self.faults_in_a_row = 0
            variant.learn(record.candidate.config, _time_ms(record), record.status.value)
            self._keep(search, record)
            self._stop_if_hopeless(record)

    def _meet(self, fault: MachineFault) -> None:
        """Tell of a fault of the machine, which is no trial; where it stays, every candidate would meet it."""
        self.on_event(FaultMet(fault=fault))
        self.faults_in_a_row += 1
        if self.faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
            raise MachineError(
                f"{self.faults_in_a_row} candidates in a row met a fault of the machine, which is stored for none of "
                f"them; the last was: {fault.error}; mend that, then the same command with --resume goes on"
            )

    def _save_rejections(self, search: ProblemSearch, variant: VariantSearch) -> None:
        while variant.unsaved:
            config = variant.unsaved.pop()
            rejected = variant.rejected[config]
            record = TrialRecord(
                candidate=search.candidate(variant, config),
                problem=search.problem,
                status=TrialStatus.REJECTED,
                form=compile_form(search.problem.family),
                error=rejected.reason,
                constraint=rejected.constraint,
            )
            self._keep(search, record)

    def _keep(self, search: ProblemSearch, record: TrialRecord) -> None:
        self.database.save_trial(self.session_id, record)
        search.counts[record.status] += 1
        self.on_event(
            TrialEnded(
                record=record,
                best_ms=search.best_ms,
                counts=dict(search.counts),
                remaining=search.remaining,
            )
        )

    def _stop_if_hopeless(self, record: TrialRecord) -> None:
        """A broken install or GPU fails everything in the same way: say so instead of trying the whole space."""
        self.any_ok = self.any_ok or record.status is TrialStatus.OK
        self.fatal_in_a_row = self.fatal_in_a_row + 1 if record.status in _FATAL else 0
        if self.fatal_in_a_row >= MAX_FATAL_IN_A_ROW and not self.any_ok:
            raise FaAutotuneError(
                f"{self.fatal_in_a_row} candidates in a row ended as {record.status.value} and none ever ran, so the "
                f"cause is not the candidates; the last error was: {record.error}; run `fa-autotune doctor`"
            )

    # --- confirming ---

    def _confirm(self, search: ProblemSearch) -> ProblemResult:
        """Measure the finalists interleaved; where all of a variant's fail, its next ones get their chance."""
        winners: dict[Variant, ConfirmedWinner] = {}
        missing = {name for name, variant in search.variants.items() if variant.measured}
        tried: set[Candidate] = set()
        again: set[Candidate] = set()  # after a fault of the machine, once
        arguments: dict[str, JSON] = {"problem": search.problem.key, "finalists": self.budget.finalists}
        with _session(self, SessionKind.CONFIRM, arguments, parent_id=self.session_id) as session_id:
            while missing and (finalists := search.finalists(self.budget.finalists, missing, tried)):
                self.on_event(ConfirmStarted(problem=search.problem, finalists=tuple(finalists)))
                tried.update(finalists)
                # The winner last: then a confirm that is cut short has none, and resuming repeats it.
                for record in reversed(self.evaluator.confirm(finalists, search.problem)):
                    if isinstance(record, MachineFault):
                        self.on_event(FaultMet(fault=record))
                        tried -= {record.candidate} - again
                        again.add(record.candidate)
                        continue
                    self.database.save_trial(session_id, record)
                    if record.measurement is not None and record.measurement.rank == 1:
                        winners[record.candidate.variant] = ConfirmedWinner(
                            candidate=record.candidate, median_ms=record.measurement.median_ms
                        )
                missing -= winners.keys()
        return self._result(search, _fastest_first(winners.values()))

    def _result(self, search: ProblemSearch, winners: tuple[ConfirmedWinner, ...]) -> ProblemResult:
        note, screened_ms, default_ms = None, None, None
        if winners:
            first = winners[0].candidate
            times_ms = search.variants[first.variant].times_ms
            spec = search.variants[first.variant].spec
            screened_ms = times_ms.get(first.config)
            default_ms = times_ms.get(default_config(spec, search.problem.family, self.device.arch))
        elif not search.measured and search.remaining:
            note = "no time was left for it"
        else:
            note = "no candidate ran and gave the right result"
        return ProblemResult(
            problem=search.problem,
            winners=winners,
            counts=dict(search.counts),
            measured=search.measured,
            screened_ms=screened_ms,
            default_ms=default_ms,
            note=note,
        )


def _time_ms(record: TrialRecord) -> float | None:
    return None if record.measurement is None else record.measurement.median_ms


def _fastest_first(winners: Iterable[ConfirmedWinner]) -> tuple[ConfirmedWinner, ...]:
    return tuple(sorted(winners, key=lambda winner: winner.median_ms))


@contextmanager
def _session(job: _Job, kind: SessionKind, arguments: dict[str, JSON], parent_id: int | None = None) -> Iterator[int]:
    """A session that ends in the state that its block ends in."""
    session_id = job.database.begin_session(
        kind=kind, device=job.device, toolchain=job.toolchain, parent_id=parent_id, arguments=arguments
    )
    state = SessionState.FAILED
    try:
        yield session_id
        state = SessionState.FINISHED
    except KeyboardInterrupt:
        state = SessionState.INTERRUPTED
        raise
    finally:
        job.database.end_session(session_id, state=state)
