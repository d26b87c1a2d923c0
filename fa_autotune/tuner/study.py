"""What to try next: an Optuna study per (problem, variant), and how a problem's trials are shared between its variants.

The only module that knows Optuna. Studies live in memory; the trials table of the database is the source of truth.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, combinations

import optuna

from fa_autotune.problem.device import DeviceSpec
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig
from fa_autotune.space.constraints import Rejected
from fa_autotune.space.registry import Knob, KnobValue, VariantSpec
from fa_autotune.space.seeds import default_config, search_domain

LOCAL_SHARE = 0.35  # of a problem's trials, at the end: steps from the best config instead of the sampler's ideas
PROBE_SHARE = 1 / 3  # of a variant's equal share, before variants are compared
WEIGHT_EXPONENT = 10.0  # after that a variant 7 % slower than the best gets half as many trials as that one, and
HOPELESS_WEIGHT = 0.1  # one 25 % or more slower a tenth
ASKS_PER_CANDIDATE = 8  # the sampler repeats itself and proposes what constraints reject: bounded per candidate wanted
MAX_ASKS = 600  # per study: an ask costs the more, the more were asked; then random draws take over
DRAWS_PER_CANDIDATE = 64
MAX_STORED_REJECTIONS = 64  # distinct ones per study; all are counted
_MISSING = object()


class VariantSearch:
    """Which config of one variant to try next on one problem; owns the Optuna study.

    `times_ms` holds every config whose fate is known, None for one that failed. `spent` counts those that used budget.
    """

    def __init__(self, problem: AttentionProblem, spec: VariantSpec, device: DeviceSpec, rng: random.Random) -> None:
        self.problem = problem
        self.spec = spec
        self.times_ms: dict[KernelConfig, float | None] = {}
        self.spent = 0
        self.exhausted = False
        self._is_closed = False
        self.rejected: dict[KernelConfig, Rejected] = {}
        self.unsaved: list[KernelConfig] = []
        self._device = device
        self._proposed = 0
        self._asks = 0
        self._random = rng
        self._warm: deque[KernelConfig] = deque()
        self._in_flight: dict[KernelConfig, list[optuna.Trial]] = {}
        self._passed_over: set[KernelConfig] = set()
        self._knobs = search_domain(spec, problem.family, device)
        self._distributions = {knob.name: _distribution(knob) for knob in self._knobs}
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=rng.getrandbits(32)))

    @property
    def best(self) -> KernelConfig | None:
        """The fastest config so far."""
        return min(self.measured, key=self.measured.__getitem__, default=None)

    @property
    def best_ms(self) -> float | None:
        """The fastest time so far."""
        return min(self.measured.values(), default=None)

    @property
    def measured(self) -> dict[KernelConfig, float]:
        """Configs with a time."""
        return {config: time_ms for config, time_ms in self.times_ms.items() if time_ms is not None}

    def warm_start(self, configs: Sequence[KernelConfig]) -> None:
        """Put configs at the front of what is tried next."""
        self._warm.extendleft(reversed(configs))

    def close(self, configs: Sequence[KernelConfig]) -> None:
        """From now on propose these configs, and nothing else."""
        self._warm = deque(configs)
        self._is_closed = True

    def propose(self, count: int, *, local: bool) -> list[KernelConfig]:
        """Up to `count` configs that pass all constraints and are not known yet; none if the space is used up."""
        new = (
            self._neighbors() if local else (),
            self._asked(min(MAX_ASKS, (self._proposed + count) * ASKS_PER_CANDIDATE)),
            self._drawn(count * DRAWS_PER_CANDIDATE),
            ((config, None) for config in self.spec.configs()),  # few are left: look at each
        )
        sources = chain(self._warm_starts(), *(() if self._is_closed else new))
        batch: list[KernelConfig] = []
        for config, trial in sources:
            if self._admit(config, trial):
                batch.append(config)
            if len(batch) == count:
                break
        self.spent += len(batch)
        self._proposed += len(batch)
        self.exhausted = not batch
        return batch

    def learn(self, config: KernelConfig, time_ms: float | None, constraint: str) -> None:
        """Take in what became of a config; `time_ms` None means that it failed, for the reason `constraint`."""
        self.times_ms[config] = time_ms
        trials = self._in_flight.pop(config, [])
        for trial in trials:
            self._tell(trial, time_ms, constraint)
        in_domain = all(getattr(config, knob.name) in knob.values for knob in self._knobs)
        if not trials and in_domain:
            frozen = optuna.trial.create_trial(
                value=self._objective(time_ms),
                params={knob.name: _encode(knob, getattr(config, knob.name)) for knob in self._knobs},
                distributions=dict(self._distributions),
                constraints={constraint: 1.0} if time_ms is None else None,
            )
            self._study.add_trial(frozen)

    def pass_over(self, config: KernelConfig) -> None:
        """Learn nothing of a config that was proposed, and don't propose it again."""
        self._passed_over.add(config)
        for trial in self._in_flight.pop(config, []):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def rejection(self, config: KernelConfig) -> Rejected | None:
        """Why a config can't be tried on this problem and device, or None."""
        return self.spec.rejection(config, family=self.problem.family, shape=self.problem.shape, device=self._device)

    def translate(self, config: KernelConfig) -> KernelConfig:
        """Another variant's config with the knobs that both have; the others stay at their default."""
        shared = {
            knob.name: value
            for knob in self.spec.knobs
            if (value := getattr(config, knob.name, _MISSING)) is not _MISSING and value in knob.values
        }
        base = default_config(self.spec, self.problem.family, self._device.arch)
        return replace(base, **shared)  # type: ignore[arg-type]

    def _admit(self, config: KernelConfig, trial: optuna.Trial | None) -> bool:
        if config in self.times_ms:
            if trial is not None:
                self._tell(trial, self.times_ms[config], "known_failure")
            return False
        if config in self._passed_over:
            if trial is not None:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return False
        if config in self._in_flight:
            if trial is not None:
                self._in_flight[config].append(trial)
            return False
        if rejected := self.rejection(config):
            if trial is not None:
                self._tell(trial, None, rejected.constraint)
                if config not in self.rejected and len(self.rejected) < MAX_STORED_REJECTIONS:
                    self.unsaved.append(config)
                self.rejected[config] = rejected
            return False
        self._in_flight[config] = [] if trial is None else [trial]
        return True

    def _tell(self, trial: optuna.Trial, time_ms: float | None, constraint: str) -> None:
        if time_ms is None:
            trial.set_constraint(constraint, 1.0)
        self._study.tell(trial, self._objective(time_ms))

    def _objective(self, time_ms: float | None) -> float:
        # The sampler ignores a FAIL and proposes the same again; the worst time seen teaches it without skewing scales.
        return math.log(time_ms if time_ms is not None else max(self.measured.values(), default=1.0))

    def _warm_starts(self) -> Iterator[tuple[KernelConfig, optuna.Trial | None]]:
        while self._warm:
            yield self._warm.popleft(), None

    def _neighbors(self) -> Iterator[tuple[KernelConfig, optuna.Trial | None]]:
        best = self.best
        if best is None:
            return
        steps = [(knob.name, value) for knob in self._knobs for value in _adjacent(knob, getattr(best, knob.name))]
        pairs = [dict(pair) for pair in combinations(steps, 2) if pair[0][0] != pair[1][0]]
        singles = [dict([step]) for step in steps]
        for changes in (singles, pairs):
            self._random.shuffle(changes)
            for change in changes:
                yield self.spec.canonical(replace(best, **change)), None  # type: ignore[arg-type]

    def _asked(self, limit: int) -> Iterator[tuple[KernelConfig, optuna.Trial | None]]:
        """The sampler's ideas, until it was asked `limit` times in all: its cost grows with the times it was asked."""
        while self._asks < limit:
            self._asks += 1
            trial = self._study.ask(self._distributions)
            yield self._config({knob.name: _decode(knob, trial.params[knob.name]) for knob in self._knobs}), trial

    def _drawn(self, limit: int) -> Iterator[tuple[KernelConfig, optuna.Trial | None]]:
        for _ in range(limit):
            yield self._config({knob.name: self._random.choice(knob.values) for knob in self._knobs}), None

    def _config(self, values: dict[str, KnobValue]) -> KernelConfig:
        return self.spec.canonical(self.spec.config(**values))


def _is_scale(knob: Knob) -> bool:
    return knob.ordinal or all(type(value) is int for value in knob.values)


def _distribution(knob: Knob) -> optuna.distributions.BaseDistribution:
    # The place in an ascending scale; for powers of two without gaps that is their exponent, shifted.
    if _is_scale(knob):
        return optuna.distributions.IntDistribution(0, len(knob.values) - 1)
    return optuna.distributions.CategoricalDistribution(knob.values)


def _encode(knob: Knob, value: KnobValue) -> KnobValue:
    return knob.values.index(value) if _is_scale(knob) else value


def _decode(knob: Knob, encoded: int | bool | None) -> KnobValue:
    return knob.values[int(encoded or 0)] if _is_scale(knob) else encoded


def _adjacent(knob: Knob, value: KnobValue) -> list[KnobValue]:
    """Values one step away: the next ones of a scale, all others of a set."""
    if not _is_scale(knob):
        return [other for other in knob.values if other is not value and other != value]
    place = knob.values.index(value)
    return [knob.values[near] for near in (place - 1, place + 1) if 0 <= near < len(knob.values)]


# --- one problem ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    search: "ProblemSearch"
    variant: VariantSearch
    candidates: list[Candidate]


class ProblemSearch:
    """All variants of one problem, and how its trials are shared between them."""

    def __init__(self, problem: AttentionProblem, variants: Sequence[VariantSearch], trials: int) -> None:
        self.problem = problem
        self.variants = {variant.spec.variant: variant for variant in variants}
        self.trials = trials
        self.known = 0
        self.measured = 0
        self.counts: Counter[TrialStatus] = Counter()

    @property
    def remaining(self) -> int:
        """Trials left."""
        return max(0, self.trials - sum(variant.spent for variant in self.variants.values()))

    @property
    def best_ms(self) -> float | None:
        """The fastest time of any variant."""
        times = (variant.best_ms for variant in self.variants.values())
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def next_batch(self, limit: int) -> Batch | None:
        """Candidates of one variant, at most `limit`; None when the budget or the spaces are used up."""
        while self.remaining and (live := [v for v in self.variants.values() if not v.exhausted]):
            variant, count = self._turn(live)
            local = self.remaining <= LOCAL_SHARE * self.trials
            count = min(count, self.remaining, max(1, limit // 2) if local else limit)
            if configs := variant.propose(count, local=local):
                candidates = [self.candidate(variant, config) for config in configs]
                return Batch(search=self, variant=variant, candidates=candidates)
        return None

    def best_elsewhere(self, variant: VariantSearch) -> list[KernelConfig]:
        """The best configs of the other variants, as configs of this one: most knobs are shared."""
        bests = (other.best for other in self.variants.values() if other is not variant)
        return [variant.translate(config) for config in bests if config is not None]

    def candidate(self, variant: VariantSearch, config: KernelConfig) -> Candidate:
        """A config as candidate."""
        return Candidate(family=self.problem.family, variant=variant.spec.variant, config=config)

    def finalists(self, count: int, variants: Collection[Variant], tried: Collection[Candidate]) -> list[Candidate]:
        """The fastest candidates not tried yet, at least one of each variant that has any."""
        pool = sorted(
            (
                (time_ms, self.candidate(variant, config))
                for name, variant in self.variants.items()
                if name in variants
                for config, time_ms in variant.measured.items()
            ),
            key=lambda entry: entry[0],
        )
        ranking = [candidate for _, candidate in pool if candidate not in tried]
        firsts = list({candidate.variant: candidate for candidate in reversed(ranking)}.values())
        others = [candidate for candidate in ranking if candidate not in firsts]
        chosen = {*firsts, *others[: max(0, count - len(firsts))]}
        return [candidate for candidate in ranking if candidate in chosen]

    def _turn(self, live: list[VariantSearch]) -> tuple[VariantSearch, int]:
        """The variant whose turn it is, and how many of the trials left are due to it."""
        probe = max(1, math.ceil(PROBE_SHARE * self.trials / len(self.variants)))
        probing = [variant for variant in live if variant.spent < probe]
        if probing:
            variant = min(probing, key=lambda v: v.spent)
            return variant, probe - variant.spent
        weights = {id(variant): self._weight(variant) for variant in live}
        variant = min(live, key=lambda v: ((v.spent - probe) / weights[id(v)], v.best_ms or math.inf))
        return variant, max(1, round(self.remaining * weights[id(variant)] / sum(weights.values())))

    def _weight(self, variant: VariantSearch) -> float:
        best_ms = self.best_ms
        if best_ms is None:
            return 1.0
        ratio = (variant.best_ms or math.inf) / best_ms
        return max(HOPELESS_WEIGHT, math.pow(ratio, -WEIGHT_EXPONENT))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna announces each study; the verbosity that the caller chose is put back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
