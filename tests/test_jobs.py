"""The composition root. No kernel runs here: the evaluator is a replay."""

import pytest

from fa_autotune.database import Miss, TuningDatabase
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, UnsupportedError
from fa_autotune.jobs import TuneJob, find_device, parse_duration_s, tune, tune_job
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import default_problems, tiny_problems
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.tuner import TuneBudget
from kit.database_files import edit
from kit.replay import replayed_job

H200, T4 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["t4"]
PREFILL = AttentionProblem.parse("4x32x8x4096x4096x128,causal")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.db"


def tuned(job, **options):
    run, evaluator = replayed_job(**options)
    return run(job), evaluator


def test_without_problems_a_gpu_gets_the_default_list(path):
    summary, _ = tuned(TuneJob(database=path, trials=2, finalists=1))
    assert [result.problem for result in summary.results] == default_problems()


def test_before_sm_80_the_default_list_is_in_float16(path):
    summary, _ = tuned(TuneJob(database=path, trials=1, finalists=1), device=T4)
    assert {result.problem.family.dtype for result in summary.results} == {DType.FLOAT16}


def test_without_a_gpu_the_tiny_list_is_tuned(path):
    summary, _ = tuned(TuneJob(database=path), device=INTERPRETER, index=None)
    assert [result.problem for result in summary.results] == tiny_problems()


def test_the_interpreter_gets_few_trials(path):
    _, evaluator = tuned(TuneJob(database=path), device=INTERPRETER, index=None)
    assert len(evaluator.screened) == 8 * len(tiny_problems())


def test_a_gpu_gets_96_trials_and_8_finalists():
    assert TuneJob().budget(H200) == TuneBudget(trials=96, finalists=8)


def test_without_a_gpu_a_large_problem_is_refused(path):
    with pytest.raises(UnsupportedError, match="no GPU that torch can use"):
        tuned(TuneJob(database=path, problems=(PREFILL,)), device=INTERPRETER, index=None)


@pytest.mark.parametrize("job", [{"problems": (PREFILL,)}, {"missed": True}], ids=["too large", "nothing missed"])
def test_a_job_that_is_refused_leaves_no_database(job, path):
    with pytest.raises(FaAutotuneError):
        tuned(TuneJob(database=path, **job), device=INTERPRETER, index=None)
    assert list(path.parent.iterdir()) == []


def test_a_machine_that_can_not_evaluate_leaves_no_database(path, monkeypatch):
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", "~nobody_of_this_name/cache")
    with pytest.raises(FaAutotuneError, match="FA_AUTOTUNE_CACHE: the home folder in"):
        tune_job(TuneJob(database=path), find=lambda gpu: (INTERPRETER, None))
    assert list(path.parent.iterdir()) == []


def test_a_recheck_takes_all_that_the_database_has_of_the_device(path):
    problems = (PREFILL, PREFILL.for_pass(Pass.BWD_DQ))
    tuned(TuneJob(database=path, problems=problems, trials=4, finalists=2))
    tuned(TuneJob(database=path, trials=1, finalists=1), device=T4)
    edit(path, "UPDATE kernels SET digest = 'yesterday' || id WHERE digest IS NOT NULL")
    summary, evaluator = tuned(TuneJob(database=path, recheck=True))
    assert {result.problem for result in summary.results} == set(problems)
    assert {problem for problem, _ in evaluator.screened} == set(problems)


def test_a_recheck_of_a_database_without_winners_is_refused(path):
    with pytest.raises(InvalidProblemError, match="no winner on NVIDIA H200 to measure again"):
        tuned(TuneJob(database=path, recheck=True))
    assert list(path.parent.iterdir()) == []


def test_every_problem_is_tuned_for_every_pass(path):
    summary, _ = tuned(TuneJob(database=path, problems=(PREFILL,), passes=(Pass.FWD, *BACKWARD_PASSES), trials=2))
    assert [result.problem for result in summary.results] == [PREFILL, *map(PREFILL.for_pass, BACKWARD_PASSES)]
    assert all(result.winners for result in summary.results)


def test_the_default_list_is_tuned_for_the_passes_asked_for(path):
    summary, _ = tuned(TuneJob(database=path, passes=(Pass.BWD_DQ,), trials=1, finalists=1))
    assert [result.problem for result in summary.results] == [p.for_pass(Pass.BWD_DQ) for p in default_problems()]


def test_calls_that_differ_in_what_delta_does_not_know_share_its_problem(path):
    calls = tuple(map(AttentionProblem.parse, ("4x32x8x512x512x64,causal", "4x32x32x512x1024x64")))
    summary, _ = tuned(TuneJob(database=path, problems=calls, passes=(Pass.BWD_DELTA,), trials=2))
    assert len(summary.results) == 1


def test_a_problem_that_names_its_pass_keeps_it(path):
    problem = PREFILL.for_pass(Pass.BWD_DKDV)
    summary, _ = tuned(TuneJob(database=path, problems=(problem,), trials=2))
    assert [result.problem for result in summary.results] == [problem]


def test_a_missed_backward_is_tuned_as_it_was_missed(path):
    problem = PREFILL.for_pass(Pass.BWD_DQ)
    with TuningDatabase(path) as database:
        database.add_misses([Miss(problem=problem, device_fingerprint=H200.fingerprint)])
    summary, _ = tuned(TuneJob(database=path, missed=True, trials=2))
    assert [result.problem for result in summary.results] == [problem]


def test_missed_problems_are_tuned(path):
    with TuningDatabase(path) as database:
        database.add_misses([Miss(problem=PREFILL, device_fingerprint=H200.fingerprint)])
    summary, _ = tuned(TuneJob(database=path, missed=True, trials=2))
    assert [result.problem for result in summary.results] == [PREFILL]


def test_a_miss_is_forgotten_once_it_has_a_winner(path):
    with TuningDatabase(path) as database:
        database.add_misses([Miss(problem=PREFILL, device_fingerprint=H200.fingerprint)])
        tuned(TuneJob(database=path, missed=True, trials=2))
        assert database.misses() == []


def test_a_miss_without_a_winner_is_kept(path):
    with TuningDatabase(path) as database:
        database.add_misses([Miss(problem=PREFILL, device_fingerprint=H200.fingerprint)])
        tuned(
            TuneJob(database=path, missed=True, trials=2), landscape=lambda candidate, problem: TrialStatus.WRONG_RESULT
        )
        assert [miss.problem for miss in database.misses()] == [PREFILL]


def test_misses_of_another_device_are_not_tuned(path):
    with TuningDatabase(path) as database:
        database.add_misses([Miss(problem=PREFILL, device_fingerprint=T4.fingerprint)])
    with pytest.raises(InvalidProblemError, match="no miss is recorded"):
        tuned(TuneJob(database=path, missed=True))


def test_winners_are_in_the_database_that_was_named(path):
    tuned(TuneJob(database=path, problems=(PREFILL,), trials=4))
    with TuningDatabase(path, read_only=True) as database:
        assert {winner.problem for winner in database.winners()} == {PREFILL}


def test_a_gpu_that_is_named_and_not_there_is_an_error():
    with pytest.raises(FaAutotuneError, match="GPU 99"):
        find_device(99)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), (" 2M ", 120)])
def test_a_duration_is_read_with_its_unit(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "10", "m", "0s", "-5m", "1.5h", "10m5", "tomorrow", "9" * 400 + "h", "9" * 5000 + "s"]
)
def test_a_duration_without_unit_or_sense_is_refused(text):
    with pytest.raises(FaAutotuneError, match="is no duration"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"problems": [None]}, "problem=None is a NoneType, and no problem"),
        ({"problems": None}, "problems=None is no list of problems"),
        ({"problems": [], "time_budget": 5}, "5 is no duration; write it as text with its unit"),
        ({"problems": [], "passes": 5}, "passes=5 is no text; write it such as fwd"),
        ({"problems": [], "database": "/a\0b"}, "is no path of a file; write it as text"),
    ],
    ids=str,
)
def test_what_is_no_argument_at_all_is_named(given, message):
    with pytest.raises(FaAutotuneError, match=message):
        tune(**given)
