import statistics
from collections import Counter

import optuna
import pytest

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, MachineError, UnsupportedError
from fa_autotune.problem.device import KNOWN_DEVICES, Toolchain
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import MachineFault, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import TmaFwdConfig
from fa_autotune.space.registry import problem_candidates, rejection, supported_variants, variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.tuner import (
    ConfirmStarted,
    FaultMet,
    JobFinished,
    JobStarted,
    ProblemFinished,
    ProblemStarted,
    TrialEnded,
    TuneBudget,
    TuneSummary,
    tune,
)
from fa_autotune.tuner.study import HOPELESS_WEIGHT
from kit.combinations import rest
from kit.database_files import edit
from kit.replay import ReplayEvaluator, attention_landscape, candidate_digest, failure, success

H100, H200 = KNOWN_DEVICES["h100"], KNOWN_DEVICES["h200"]
TOOLCHAIN = Toolchain(triton="3.7.1")
LANDSCAPE = attention_landscape(H200)
LONG = AttentionProblem.parse("2x16x16x8192x8192x128")
SHORT = AttentionProblem.parse("16x16x16x1024x1024x128")
CAUSAL = AttentionProblem.parse("4x8x8x4096x4096x256,causal")
NARROW_CAUSAL = AttentionProblem.parse("4x32x8x4096x4096x128,causal")  # which the fused backward serves too
SMALL = TuneBudget(trials=24, finalists=4)


class FakeClock:
    """A clock that moves a step each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def database():
    with TuningDatabase(":memory:") as opened:
        yield opened


def run(problems, evaluator, database, **options) -> TuneSummary:
    options = {"device": H200, "toolchain": TOOLCHAIN, "budget": SMALL, "digest": candidate_digest, **options}
    return tune(problems, evaluator=evaluator, database=database, **options)


def ok_where(condition, otherwise: TrialStatus, time_ms: float = 1.0):
    return lambda candidate, problem: time_ms if condition(candidate) else otherwise


def session_state(database: TuningDatabase) -> SessionState:
    session = database.info().last_session
    assert session is not None
    return session.state


def measured_configs(evaluator: ReplayEvaluator, variant: Variant) -> list[object]:
    return [candidate.config for _, candidate in evaluator.screened if candidate.variant is variant]


# --- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [LONG, *rest([CAUSAL])], ids=["long", "wide causal"])
def test_96_trials_come_close_to_the_exhaustive_best(problem, database):
    tma = variant_spec(problem.family.kernel_pass, Variant.TMA)  # the faster variant everywhere in this landscape
    times = (LANDSCAPE(candidate, problem) for candidate in problem_candidates(problem, tma, H200))
    exhaustive = min(time_ms for time_ms in times if isinstance(time_ms, float))
    regrets = []
    for seed in range(3):
        with TuningDatabase(":memory:") as fresh:
            evaluator = ReplayEvaluator(LANDSCAPE, seed=seed)
            summary = run([problem], evaluator, fresh, budget=TuneBudget(), seed=seed)
        found = LANDSCAPE(summary.results[0].winners[0].candidate, problem)
        assert isinstance(found, float)
        regrets.append(found / exhaustive - 1)
    assert statistics.mean(regrets) < 0.04


@pytest.mark.parametrize("kernel_pass", BACKWARD_PASSES)
def test_every_pass_of_a_backward_gets_its_winners(kernel_pass, database):
    problem = NARROW_CAUSAL.for_pass(kernel_pass)
    (result,) = run([problem], ReplayEvaluator(LANDSCAPE), database).results
    served = supported_variants(problem.family, H200.arch, (3, 7))
    assert {winner.candidate.variant for winner in result.winners} == {spec.variant for spec in served}
    assert {winner.problem for winner in database.winners()} == {problem}


def test_a_small_space_is_searched_whole_and_the_search_ends(database):
    problem = LONG.for_pass(Pass.BWD_DELTA)
    spec = variant_spec(Pass.BWD_DELTA, Variant.PORTABLE)
    evaluator = ReplayEvaluator(attention_landscape(H200, failing_share=0.0))
    run([problem], evaluator, database, budget=TuneBudget(trials=96))
    assert {candidate for _, candidate in evaluator.screened} == set(problem_candidates(problem, spec, H200))


FAMILY = [AttentionProblem.parse(f"{16384 // n}x32x32x{n}x{n}x64") for n in (512, 1024, 2048, 4096, 8192, 16384)]


@pytest.mark.rest
def test_each_shape_of_a_family_comes_close_to_the_best_that_any_of_them_found(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    summary = run(FAMILY, evaluator, database, budget=TuneBudget())
    tried = {candidate for _, candidate in evaluator.screened}
    for problem, result in zip(FAMILY, summary.results, strict=True):
        best = min(time_ms for one in tried if isinstance(time_ms := LANDSCAPE(one, problem), float))
        assert LANDSCAPE(result.winners[0].candidate, problem) < 1.03 * best


def test_the_shapes_of_a_family_share_kernels(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run(FAMILY, evaluator, database, budget=TuneBudget(trials=48))
    assert len({candidate for _, candidate in evaluator.screened}) < 0.7 * len(evaluator.screened)


def test_the_second_half_of_the_trials_improves_on_the_first(database):
    bests = []
    run([LONG], ReplayEvaluator(LANDSCAPE), database, budget=TuneBudget(), on_event=bests.append)
    times = [event.best_ms for event in bests if isinstance(event, TrialEnded) and event.best_ms is not None]
    assert times[-1] < times[len(times) // 2]


def test_the_last_third_of_the_trials_are_steps_from_a_good_config(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, budget=TuneBudget(trials=90), variants=[Variant.TMA])
    configs = measured_configs(evaluator, Variant.TMA)
    knobs = [knob.name for knob in variant_spec(LONG.family.kernel_pass, Variant.TMA).knobs]
    for place, config in enumerate(configs[-20:], len(configs) - 20):
        fewest = min(sum(getattr(config, k) != getattr(before, k) for k in knobs) for before in configs[:place])
        assert fewest <= 2


def test_the_same_seed_tries_the_same_candidates():
    runs = []
    for _ in range(2):
        with TuningDatabase(":memory:") as fresh:
            evaluator = ReplayEvaluator(LANDSCAPE)
            run([LONG, SHORT], evaluator, fresh, seed=3)
            runs.append(evaluator.screened)
    assert runs[0] == runs[1]


def test_another_seed_tries_other_candidates():
    runs = []
    for seed in (1, 2):
        with TuningDatabase(":memory:") as fresh:
            evaluator = ReplayEvaluator(LANDSCAPE)
            run([LONG], evaluator, fresh, seed=seed)
            runs.append(evaluator.screened)
    assert runs[0] != runs[1]


def test_the_default_is_measured_and_its_ratio_reported(database):
    result = run([LONG], ReplayEvaluator(LANDSCAPE), database).results[0]
    assert result.default_ratio is not None
    assert result.default_ratio > 1


def test_each_variant_that_ran_gets_a_winner(database):
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    served = {spec.variant for spec in supported_variants(LONG.family, H200.arch, (3, 7))}
    assert {winner.candidate.variant for winner in database.winners()} == served > {Variant.PORTABLE}


def test_only_the_variants_asked_for_are_searched(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, variants=[Variant.PORTABLE])
    assert {candidate.variant for _, candidate in evaluator.screened} == {Variant.PORTABLE}


def test_an_event_that_can_not_be_told_ends_no_job(database):
    def on_event(event) -> None:
        told.append(event)
        raise BrokenPipeError

    told: list[object] = []
    summary = run([LONG], ReplayEvaluator(LANDSCAPE), database, on_event=on_event)
    assert isinstance(told[-1], JobFinished)
    assert summary.results[0].winners


# --- other jobs on the same database ----------------------------------------------------------------------------------


def jobs_at_once(path, problems, *, second_begins_at) -> tuple[TuneSummary, TuneSummary, list[object]]:
    """Two equal jobs, the second of which runs whole as soon as an event of the first is of a kind."""
    seconds, evaluators = [], [ReplayEvaluator(LANDSCAPE), ReplayEvaluator(LANDSCAPE)]

    def on_event(event) -> None:
        if isinstance(event, second_begins_at) and not seconds:
            with TuningDatabase(path) as other:
                seconds.append(run(problems, evaluators[1], other))

    with TuningDatabase(path) as database:
        first = run(problems, evaluators[0], database, on_event=on_event)
    return first, seconds[0], [*evaluators[0].screened, *evaluators[1].screened]


def test_two_equal_jobs_measure_nothing_twice_and_take_families_in_turns(tmp_path):
    problems = [LONG, SHORT, CAUSAL]
    first, second, screened = jobs_at_once(tmp_path / "t.db", problems, second_begins_at=TrialEnded)
    assert max(Counter(screened).values()) == 1
    assert Counter(problem for problem, _ in screened) == dict.fromkeys(problems, SMALL.trials)
    assert [result.measured for result in first.results] == [24, 24, 0]
    assert [result.measured for result in second.results] == [0, 0, 24]
    assert [result.note for result in first.results] == [None, None, "already tuned"]
    assert second.results[0].note == f"another job (session {first.session_id}) is tuning it"


def test_what_another_job_did_meanwhile_counts_as_done(tmp_path):
    first, second, screened = jobs_at_once(tmp_path / "t.db", [CAUSAL, LONG], second_begins_at=ProblemFinished)
    assert Counter(problem for problem, _ in screened) == {CAUSAL: 48, LONG: 24}  # the second began after CAUSAL
    assert max(Counter(screened).values()) == 1
    assert [result.note for result in first.results] == [None, "already tuned"]
    assert first.results[1].winners == second.results[1].winners


@pytest.mark.parametrize(
    "change", ["process_start = '1'", "host = 'elsewhere', started_at = '2026-01-01T00:00:00.000000Z'"]
)
def test_what_a_dead_job_had_claimed_is_tuned(tmp_path, change):
    path = tmp_path / "t.db"
    with TuningDatabase(path) as database:
        dead = database.begin_session(kind=SessionKind.TUNE, device=H200, toolchain=TOOLCHAIN)
        assert database.claim(dead, LONG) is None
        edit(path, f"UPDATE sessions SET {change}", "UPDATE claims SET claimed_at = '2026-01-01T00:00:00.000000Z'")
        assert run([LONG], ReplayEvaluator(LANDSCAPE), database).results[0].winners


def test_a_job_of_another_toolchain_is_not_waited_for(database):
    other = database.begin_session(kind=SessionKind.TUNE, device=H200, toolchain=Toolchain(triton="3.6.0"))
    database.claim(other, LONG)
    assert run([LONG], ReplayEvaluator(LANDSCAPE), database).results[0].winners


def test_claims_end_with_the_job(database):
    with pytest.raises(KeyboardInterrupt):
        run([LONG], ReplayEvaluator(LANDSCAPE), database, on_event=interrupt_at(TrialEnded))
    assert database.info().counts["claims"] == 0
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    assert database.info().counts["claims"] == 0


def interrupt_at(kind):
    def on_event(event) -> None:
        if isinstance(event, kind):
            raise KeyboardInterrupt

    return on_event


# --- the budget -------------------------------------------------------------------------------------------------------


def test_each_problem_gets_exactly_its_trials(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT, CAUSAL], evaluator, database)
    assert Counter(problem for problem, _ in evaluator.screened) == dict.fromkeys((LONG, SHORT, CAUSAL), 24)


def test_a_problem_named_twice_is_tuned_once(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    assert len(run([LONG, LONG], evaluator, database).results) == 1


def test_nothing_is_measured_twice(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT], evaluator, database, budget=TuneBudget(trials=64))
    assert max(Counter(evaluator.screened).values()) == 1


def test_a_hopeless_variant_gets_only_its_probe_and_a_small_remainder(database):
    evaluator = ReplayEvaluator(lambda candidate, problem: 1.0 if candidate.variant is Variant.TMA else 2.0)
    run([LONG], evaluator, database, budget=TuneBudget(trials=96))
    assert 16 <= len(measured_configs(evaluator, Variant.PORTABLE)) <= 16 + 2 * HOPELESS_WEIGHT * 64


def test_equal_variants_share_equally(database):
    evaluator = ReplayEvaluator(lambda candidate, problem: 1.0, noise=0.001)
    run([LONG], evaluator, database, budget=TuneBudget(trials=96))
    assert abs(len(measured_configs(evaluator, Variant.PORTABLE)) - 48) <= 16


@pytest.mark.rest
def test_a_space_smaller_than_the_budget_is_used_up_and_the_job_ends(database):
    tiny = AttentionProblem.parse("1x2x2x16x16x16,fp32")
    everything = problem_candidates(tiny, variant_spec(tiny.family.kernel_pass, Variant.PORTABLE), H200)
    evaluator = ReplayEvaluator(lambda candidate, problem: 1.0)
    budget = TuneBudget(trials=10 * len(everything))
    run([tiny], evaluator, database, variants=[Variant.PORTABLE], budget=budget)
    assert {candidate for _, candidate in evaluator.screened} == set(everything)


def test_a_time_budget_stops_asking_but_still_confirms(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    budget = TuneBudget(trials=500, time_s=6.0)
    summary = run([LONG], evaluator, database, budget=budget, clock=FakeClock(1.0))
    assert len(evaluator.screened) < 500
    assert summary.results[0].winners


def test_time_is_shared_between_families(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG, CAUSAL], evaluator, database, budget=TuneBudget(trials=500, time_s=12.0), clock=FakeClock(1.0))
    counts = Counter(problem for problem, _ in evaluator.screened)
    assert 0.5 < counts[LONG] / counts[CAUSAL] < 2


def test_a_problem_for_which_no_time_was_left_says_so(database):
    summary = run([LONG], ReplayEvaluator(LANDSCAPE), database, budget=TuneBudget(time_s=0.5), clock=FakeClock(1.0))
    assert summary.results[0].note == "no time was left for it"


# --- warm start -------------------------------------------------------------------------------------------------------


def store_winner(database, problem, device, config):
    session_id = database.begin_session(kind=SessionKind.CONFIRM, device=device, toolchain=TOOLCHAIN)
    candidate = Candidate(family=problem.family, variant=Variant.TMA, config=config)
    database.save_trial(session_id, success(candidate, problem, 1.0, Role.CONFIRM, rank=1))
    database.end_session(session_id, state=SessionState.FINISHED)


def test_the_default_is_tried_first(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database)
    first = evaluator.screened[0][1]
    assert first.config == default_config(variant_spec(LONG.family.kernel_pass, first.variant), LONG.family, H200.arch)


ODD = TmaFwdConfig(BLOCK_M=64, BLOCK_N=16, num_warps=2, num_stages=4, HEADS_PER_GROUP=16, STORE_BY_TMA=False)


@pytest.mark.parametrize(
    ("problem", "device"), [(SHORT, H200), (LONG, H100)], ids=["a neighbor shape's", "a sibling device's"]
)
def test_a_winner_from_elsewhere_is_tried_early(problem, device, database):
    store_winner(database, problem, device, ODD)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database)
    assert ODD in measured_configs(evaluator, Variant.TMA)[:2]


def test_a_winner_of_another_arch_is_not_tried_early(database):
    store_winner(database, LONG, KNOWN_DEVICES["b200"], ODD)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database)
    assert ODD not in measured_configs(evaluator, Variant.TMA)[:2]


def test_the_best_of_one_shape_is_tried_on_the_next_in_the_same_job(database):
    def landscape(candidate, problem):
        return 1.0 if problem == LONG and candidate.config.num_stages == 4 else 2.0

    evaluator = ReplayEvaluator(landscape, noise=0.0)
    run([LONG, SHORT], evaluator, database, budget=TuneBudget(trials=48))
    good = {
        candidate for problem, candidate in evaluator.screened if problem == LONG and landscape(candidate, LONG) == 1
    }
    assert good & {candidate for problem, candidate in evaluator.screened if problem == SHORT}


# --- compiling ahead --------------------------------------------------------------------------------------------------


def test_the_next_batch_is_prefetched_before_this_one_is_measured(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, budget=TuneBudget(trials=60))
    assert evaluator.calls[:3] == ["prefetch", "prefetch", "screen"]


def test_whatever_is_measured_was_prefetched(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT], evaluator, database)
    assert [candidate for _, candidate in evaluator.screened] == evaluator.prefetched


# --- what fails -------------------------------------------------------------------------------------------------------


def test_candidates_that_break_a_constraint_never_reach_the_evaluator(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([CAUSAL], evaluator, database, budget=TuneBudget(trials=60))
    assert all(rejection(candidate, problem.shape, H200) is None for problem, candidate in evaluator.screened)


def test_rejections_are_stored_with_constraint_and_reason(database):
    run([CAUSAL], ReplayEvaluator(LANDSCAPE), database, budget=TuneBudget(trials=60))
    stored = database.trials(statuses=[TrialStatus.REJECTED])
    assert stored
    for trial in stored:
        reason = rejection(trial.record.candidate, CAUSAL.shape, H200)
        assert reason is not None
        assert (trial.record.constraint, trial.record.error) == (reason.constraint, reason.reason)


def test_stored_rejections_are_bounded(database, monkeypatch):
    monkeypatch.setattr("fa_autotune.tuner.study.MAX_STORED_REJECTIONS", 5)
    run([CAUSAL], ReplayEvaluator(LANDSCAPE), database, budget=TuneBudget(trials=60))
    stored = Counter(trial.record.candidate.variant for trial in database.trials(statuses=[TrialStatus.REJECTED]))
    assert max(stored.values()) == 5
    assert set(stored) <= set(Variant)


FAILING = [status for status in TrialStatus if status not in (TrialStatus.OK, TrialStatus.REJECTED)]


@pytest.mark.parametrize("status", FAILING)
def test_the_search_goes_on_past_failures_of_any_kind(status, database):
    evaluator = ReplayEvaluator(ok_where(lambda candidate: candidate.config.num_stages == 3, status))
    summary = run([LONG], evaluator, database, budget=TuneBudget(trials=40))
    assert len(evaluator.screened) == 40
    assert summary.results[0].winners


@pytest.mark.parametrize("status", FAILING)
def test_a_failure_is_stored_with_its_error(status, database):
    run([LONG], ReplayEvaluator(ok_where(lambda c: c.config.num_stages == 3, status)), database)
    stored = database.trials(statuses=[status])
    assert {trial.record.error for trial in stored} == {f"made to end as {status.value}"}


def test_a_problem_on_which_everything_is_wrong_has_no_winner_and_says_so(database):
    summary = run([LONG], ReplayEvaluator(lambda candidate, problem: TrialStatus.WRONG_RESULT), database)
    assert summary.results[0].note == "no candidate ran and gave the right result"


@pytest.mark.parametrize(
    "status",
    [TrialStatus.CRASHED, TrialStatus.LAUNCH_FAILED, TrialStatus.COMPILE_FAILED, TrialStatus.TIMED_OUT],
)
def test_a_job_on_which_everything_fails_alike_stops_early_and_names_the_error(database, status):
    evaluator = ReplayEvaluator(lambda candidate, problem: status)
    with pytest.raises(FaAutotuneError, match=f"made to end as {status}"):
        run([LONG], evaluator, database, budget=TuneBudget(trials=400))
    assert len(evaluator.screened) == 20


def test_a_job_that_stops_early_leaves_its_session_failed(database):
    with pytest.raises(FaAutotuneError):
        run([LONG], ReplayEvaluator(lambda candidate, problem: TrialStatus.LAUNCH_FAILED), database)
    assert session_state(database) is SessionState.FAILED


def test_crashes_after_a_success_do_not_stop_the_job(database):
    evaluator = ReplayEvaluator(ok_where(lambda c: c.config.BLOCK_M == 64, TrialStatus.CRASHED))
    run([LONG], evaluator, database, budget=TuneBudget(trials=80))
    assert len(evaluator.screened) == 80


# --- confirming -------------------------------------------------------------------------------------------------------


def test_the_winner_is_the_first_of_the_confirm_session(database):
    summary = run([LONG], ReplayEvaluator(LANDSCAPE, noise=0.2), database)
    stored = {winner.candidate: winner.median_ms for winner in database.winners()}
    assert {winner.candidate: winner.median_ms for winner in summary.results[0].winners} == stored


def test_no_more_finalists_are_confirmed_than_asked_for(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database)
    assert len(evaluator.confirmed) == SMALL.finalists


def test_a_slow_variant_still_sends_its_best_to_the_final(database):
    evaluator = ReplayEvaluator(lambda candidate, problem: 1.0 if candidate.variant is Variant.TMA else 9.0)
    run([LONG], evaluator, database)
    assert Variant.PORTABLE in {candidate.variant for _, candidate in evaluator.confirmed}


def test_when_all_finalists_fail_the_next_ones_are_confirmed(database):
    chosen: list[Candidate] = []

    def fails(candidate: Candidate) -> bool:
        chosen.append(candidate)
        return len(chosen) <= SMALL.finalists

    summary = run([LONG], ReplayEvaluator(LANDSCAPE, confirm_failures=fails), database)
    assert summary.results[0].winners
    assert {winner.candidate for winner in summary.results[0].winners}.isdisjoint(chosen[: SMALL.finalists])


def test_a_finalist_that_fails_is_stored_as_failed(database):
    evaluator = ReplayEvaluator(LANDSCAPE, confirm_failures=lambda candidate: candidate.variant is Variant.TMA)
    run([LONG], evaluator, database)
    assert {winner.candidate.variant for winner in database.winners()} == {Variant.HOPPER_WS, Variant.PORTABLE}


# --- ending early, and going on ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing is cleaned up on purpose."""


def test_ctrl_c_is_raised_again(database):
    with pytest.raises(KeyboardInterrupt):
        run([LONG], ReplayEvaluator(LANDSCAPE, interrupt_after=10), database)


def test_ctrl_c_leaves_the_session_interrupted(database):
    with pytest.raises(KeyboardInterrupt):
        run([LONG], ReplayEvaluator(LANDSCAPE, interrupt_after=10), database)
    assert session_state(database) is SessionState.INTERRUPTED


def test_ctrl_c_keeps_every_trial_that_ended(database):
    with pytest.raises(KeyboardInterrupt):
        run([LONG], ReplayEvaluator(LANDSCAPE, interrupt_after=10), database)
    kept = [trial for trial in database.trials() if trial.record.status is not TrialStatus.REJECTED]
    assert len(kept) == 10


class OnASickMachine(ReplayEvaluator):
    """One on which some candidates, or all finalists once, meet a fault of the machine."""

    def __init__(self, *args, is_met=lambda candidate: False, while_confirming=0, **options) -> None:
        super().__init__(*args, **options)
        self.is_met, self.while_confirming = is_met, while_confirming
        self.met: list[Candidate] = []

    def screen(self, candidates, problems, *, incumbents_ms=()):
        for record in super().screen(candidates, problems, incumbents_ms=incumbents_ms):
            if self.is_met(record.candidate):
                self.met.append(record.candidate)
                yield MachineFault(candidate=record.candidate, problem=record.problem, error="No space left on device")
            else:
                yield record

    def confirm(self, candidates, problem):
        records = super().confirm(candidates, problem)
        if self.while_confirming:
            self.while_confirming -= 1
            return [MachineFault(candidate=one, problem=problem, error="killed by SIGKILL") for one in candidates]
        return records


def of_eight_warps(candidate: Candidate) -> bool:
    return candidate.config.num_warps == 8


def test_a_fault_of_the_machine_is_told_and_stored_for_no_candidate(database):
    events = []
    evaluator = OnASickMachine(ok_where(lambda _: True, TrialStatus.OK), is_met=of_eight_warps)
    run([LONG], evaluator, database, on_event=events.append, batch_size=2)
    told = [event.fault.candidate for event in events if isinstance(event, FaultMet)]
    assert told == evaluator.met != []
    stored = {trial.record.candidate for trial in database.trials() if trial.record.status is not TrialStatus.REJECTED}
    assert len(stored) + len(told) == SMALL.trials
    assert not stored & set(told)


def test_what_met_a_fault_is_tried_again_on_resume(database):
    sick = OnASickMachine(LANDSCAPE, is_met=of_eight_warps)
    run([LONG], sick, database)
    well = ReplayEvaluator(LANDSCAPE)
    run([LONG], well, database, resume=True)
    assert len(well.screened) == len(sick.met)
    assert {candidate for _, candidate in well.screened} & set(sick.met)


def test_a_machine_that_stays_sick_ends_the_job_with_what_to_mend(database):
    evaluator = OnASickMachine(LANDSCAPE, is_met=lambda candidate: True)
    with pytest.raises(MachineError, match=r"3 candidates in a row.*No space left on device.*--resume goes on"):
        run([LONG], evaluator, database)
    assert (len(evaluator.met), database.info().counts["trials"]) == (3, 0)
    assert session_state(database) is SessionState.FAILED


def test_finalists_that_met_a_fault_are_confirmed_again(database):
    evaluator = OnASickMachine(LANDSCAPE, while_confirming=1)
    (result,) = run([LONG], evaluator, database).results
    assert result.winners
    assert {trial.record.status for trial in database.trials()} <= set(TrialStatus)


def test_finalists_that_keep_meeting_faults_leave_no_winner_but_their_times(database):
    (result,) = run([LONG], OnASickMachine(LANDSCAPE, while_confirming=10**9), database).results
    assert result.winners == ()
    resumed = ReplayEvaluator(LANDSCAPE)
    assert run([LONG], resumed, database, resume=True).results[0].winners
    assert resumed.calls == ["confirm"]


def test_where_all_was_tried_before_and_failed_nothing_is_said_of_time(database):
    budget = TuneBudget(trials=4, finalists=2)
    failing = ok_where(lambda _: False, TrialStatus.WRONG_RESULT)
    run([LONG], ReplayEvaluator(failing), database, budget=budget)
    (result,) = run([LONG], ReplayEvaluator(failing), database, resume=True, budget=budget).results
    assert (result.measured, result.note) == (0, "no candidate ran and gave the right result")


def test_a_killed_job_resumes_and_measures_nothing_twice(database):
    first = ReplayEvaluator(LANDSCAPE, interrupt_after=17, interrupt_with=Killed)
    with pytest.raises(Killed):
        run([LONG, SHORT], first, database)
    second = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT], second, database, resume=True)
    assert not set(first.screened) & set(second.screened)


def test_trials_before_the_kill_count_against_the_budget(database):
    first = ReplayEvaluator(LANDSCAPE, interrupt_after=17, interrupt_with=Killed)
    with pytest.raises(Killed):
        run([LONG, SHORT], first, database)
    second = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT], second, database, resume=True)
    assert len(second.screened) == 2 * SMALL.trials - 17


def test_a_confirmed_problem_is_skipped_on_resume(database):
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, resume=True)
    assert evaluator.calls == []


def test_a_skipped_problem_reports_its_stored_winners(database):
    before = run([LONG], ReplayEvaluator(LANDSCAPE), database).results[0].winners
    assert run([LONG], ReplayEvaluator(LANDSCAPE), database, resume=True).results[0].winners == before


def test_a_job_killed_while_confirming_only_confirms_on_resume(database):
    class DiesConfirming(ReplayEvaluator):
        def confirm(self, candidates, problem) -> list[TrialRecord]:
            raise Killed

    with pytest.raises(Killed):
        run([LONG], DiesConfirming(LANDSCAPE), database)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, resume=True)
    assert evaluator.calls == ["confirm"]


def test_resuming_with_more_trials_adds_only_the_difference(database):
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, resume=True, budget=TuneBudget(trials=30))
    assert len(evaluator.screened) == 6


def test_tuning_again_without_resume_measures_new_candidates_only(database):
    first, second = ReplayEvaluator(LANDSCAPE), ReplayEvaluator(LANDSCAPE)
    run([LONG], first, database)
    run([LONG], second, database)
    assert len(second.screened) == SMALL.trials
    assert not set(first.screened) & set(second.screened)


@pytest.mark.parametrize(
    "changed",
    [{"toolchain": Toolchain(triton="3.6.0")}, {"device": H100}, {"digest": lambda candidate: "another text"}],
    ids=["Triton", "device", "kernel text"],
)
def test_trials_of_another_kind_do_not_count_on_resume(changed, database):
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database, resume=True, **changed)
    assert len(evaluator.screened) == SMALL.trials


# --- recheck ----------------------------------------------------------------------------------------------------------

NEWER = Toolchain(triton="3.9.0")


def test_a_recheck_tries_what_was_confirmed_and_nothing_else(database):
    first = ReplayEvaluator(LANDSCAPE)
    run([LONG, SHORT], first, database)
    evaluator = ReplayEvaluator(LANDSCAPE)
    summary = run([LONG, SHORT], evaluator, database, recheck=True, toolchain=NEWER)
    assert len(evaluator.screened) == len(first.confirmed) < len(first.screened)
    assert set(evaluator.screened) == set(first.confirmed)
    assert all(result.winners for result in summary.results)
    assert {winner.toolchain.triton for winner in database.winners()} == {TOOLCHAIN.triton, NEWER.triton}


def test_a_recheck_goes_on_where_it_was_killed_and_skips_what_is_current(database):
    run([LONG], ReplayEvaluator(LANDSCAPE), database)
    first = ReplayEvaluator(LANDSCAPE, interrupt_after=2, interrupt_with=Killed)
    with pytest.raises(Killed):
        run([LONG], first, database, recheck=True, toolchain=NEWER)
    second = ReplayEvaluator(LANDSCAPE)
    run([LONG], second, database, recheck=True, toolchain=NEWER)
    assert second.screened
    assert not set(first.screened) & set(second.screened)
    third = ReplayEvaluator(LANDSCAPE)
    run([LONG], third, database, recheck=True, toolchain=NEWER)
    assert third.calls == []


def test_a_recheck_searches_nothing_where_nothing_was_confirmed(database):
    evaluator = ReplayEvaluator(LANDSCAPE)
    (result,) = run([LONG], evaluator, database, recheck=True).results
    assert (evaluator.calls, result.winners) == ([], ())
    assert "won on it before" in (result.note or "")


def older_digest(candidate: Candidate) -> str:
    return f"older-{candidate_digest(candidate)}"


@pytest.mark.parametrize("renewed", [{Variant.TMA}, set(Variant)])
def test_a_recheck_leaves_variants_alone_whose_winner_was_found_to_hold(renewed, database):
    run([LONG], ReplayEvaluator(LANDSCAPE, digest=older_digest), database, digest=older_digest)
    for key, (kernel, _) in database.kernels_of_winners().items():
        if kernel.candidate.variant in renewed:
            database.renew_kernel(key, candidate_digest(kernel.candidate))
    evaluator = ReplayEvaluator(LANDSCAPE)
    (result,) = run([LONG], evaluator, database, recheck=True).results
    assert {candidate.variant for _, candidate in evaluator.screened}.isdisjoint(renewed)
    assert bool(evaluator.calls) == (renewed != set(Variant))
    assert result.winners


def test_known_failures_are_not_tried_again(database):
    session_id = database.begin_session(kind=SessionKind.TUNE, device=H200, toolchain=TOOLCHAIN)
    spec = variant_spec(LONG.family.kernel_pass, Variant.TMA)
    candidate = Candidate(family=LONG.family, variant=Variant.TMA, config=default_config(spec, LONG.family, H200.arch))
    database.save_trial(session_id, failure(candidate, LONG, TrialStatus.CRASHED))
    evaluator = ReplayEvaluator(LANDSCAPE)
    run([LONG], evaluator, database)
    assert (LONG, candidate) not in evaluator.screened


# --- events, and wrong use --------------------------------------------------------------------------------------------


def test_events_come_in_order(database):
    events = []
    run([LONG], ReplayEvaluator(LANDSCAPE), database, on_event=events.append)
    kinds = list(dict.fromkeys(type(event) for event in events))
    assert kinds == [JobStarted, ProblemStarted, TrialEnded, ConfirmStarted, ProblemFinished, JobFinished]


def test_each_record_is_in_the_database_when_its_event_comes(database):
    stored = []

    def on_event(event):
        if isinstance(event, TrialEnded):
            stored.append(event.record.candidate in [trial.record.candidate for trial in database.trials()])

    run([LONG], ReplayEvaluator(LANDSCAPE), database, on_event=on_event, budget=TuneBudget(trials=8))
    assert stored
    assert all(stored)


def test_the_callers_optuna_verbosity_is_kept(database):
    before = optuna.logging.get_verbosity()
    run([LONG], ReplayEvaluator(LANDSCAPE), database, budget=TuneBudget(trials=4))
    assert optuna.logging.get_verbosity() == before


def test_no_problem_at_all_is_refused(database):
    with pytest.raises(InvalidProblemError, match="no problem to tune"):
        run([], ReplayEvaluator(LANDSCAPE), database)


def test_a_family_that_nothing_serves_is_refused_with_the_reasons(database):
    with pytest.raises(UnsupportedError, match="bfloat16 matrix products need sm_80"):
        run([LONG], ReplayEvaluator(LANDSCAPE), database, device=KNOWN_DEVICES["t4"])


def test_one_family_that_nothing_serves_does_not_stop_the_others(database):
    half = AttentionProblem.parse("2x16x16x8192x8192x128,fp16")
    summary = run([LONG, half], ReplayEvaluator(LANDSCAPE), database, device=KNOWN_DEVICES["t4"])
    assert [bool(result.winners) for result in summary.results] == [False, True]
