"""The composition root, and the command that calls it. No kernel runs here: the evaluator is a replay."""

import json
import re
from contextlib import nullcontext
from functools import partial

import pytest
from click.testing import CliRunner

from fa_autotune.cli import main
from fa_autotune.cli.tune import _Progress
from fa_autotune.database import Miss, TuningDatabase
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, UnsupportedError
from fa_autotune.jobs import TuneJob, find_device, parse_duration_s, tune_job
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, Toolchain
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import default_problems, tiny_problems
from fa_autotune.problem.passes import BACKWARD_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.tuner import JobStarted, ProblemStarted, TrialEnded, TuneBudget
from kit.replay import ReplayEvaluator, attention_landscape, failure, success

H200, T4 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["t4"]
PREFILL = AttentionProblem.parse("4x32x8x4096x4096x128,causal")


class OpenReplay(ReplayEvaluator):
    """A replay that knows a toolchain, as `tune_job` wants it."""

    toolchain = Toolchain(triton="3.7.1")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.db"


def replayed(device=H200, index=0, **options):
    """`tune_job` on a device that need not be there, and the evaluator that it opens."""
    # As rendered: what a resumed job compares.
    evaluator = OpenReplay(options.pop("landscape", attention_landscape(H200)), digest=rendered_digest, **options)
    return partial(
        tune_job, find=lambda gpu: (device, index), open_evaluator=lambda device, index: nullcontext(evaluator)
    ), evaluator


def tuned(job, **options):
    run, evaluator = replayed(**options)
    return run(job), evaluator


def command(*arguments, **options):
    run, _ = replayed(**options)
    return CliRunner().invoke(main, ["tune", *map(str, arguments)], obj=run)


# --- the job ----------------------------------------------------------------------------------------------------------


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


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_per_problem_with_speed_and_ratio(path):
    result = command("--model", "llama-3-8b", "--seqlens", "2048,4096", "--trials", 6, "--db", path)
    rows = [line for line in result.stdout.splitlines() if "d128 causal" in line]
    assert len(rows) == 2
    assert all(re.search(r"\d+ +\d\.\d\d×", row) for row in rows)


def test_progress_goes_to_stderr(path):
    result = command("--model", "llama-3-8b", "--seqlens", "2048,4096", "--trials", 6, "--db", path)
    assert "[2/2]" in result.stderr
    assert "[2/2]" not in result.stdout


def test_json_is_one_document_on_stdout(path):
    result = command("--problem", "4x32x8x4096x4096x128,causal", "--trials", 6, "--db", path, "--json")
    document = json.loads(result.stdout)
    assert (document["state"], document["problems"], document["evaluated"]) == ("finished", 1, 6)


def test_json_names_the_winner_and_its_speed(path):
    result = command("--problem", "4x32x8x4096x4096x128,causal", "--trials", 6, "--db", path, "--json")
    (entry,) = json.loads(result.stdout)["results"]
    assert entry["tflops"] == pytest.approx(PREFILL.flops / entry["winners"][0]["median_ms"] / 1e9)


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(path):
    result = command("--problem", "4x32x8x4096x4096x128", "--db", path, interrupt_after=5)
    assert result.exit_code == 130
    assert "--resume goes on" in result.stdout


def test_ctrl_c_with_json_still_prints_a_document(path):
    result = command("--problem", "4x32x8x4096x4096x128", "--db", path, "--json", interrupt_after=5)
    assert json.loads(result.stdout)["state"] == "interrupted"


def test_an_interrupted_command_resumes_with_resume(path):
    arguments = ("--problem", "4x32x8x4096x4096x128", "--trials", 12, "--db", path)
    command(*arguments, interrupt_after=5)
    document = json.loads(command(*arguments, "--resume", "--json").stdout)
    assert document["evaluated"] == 7


def test_without_a_gpu_the_command_says_plainly_what_it_is(path):
    result = command("--db", path, device=INTERPRETER, index=None)
    assert "no GPU that torch can use" in result.stderr
    assert "times say nothing about any GPU" in result.stderr


def test_without_a_gpu_no_tflops_are_claimed(path):
    document = json.loads(command("--db", path, "--json", device=INTERPRETER, index=None).stdout)
    assert {entry["tflops"] for entry in document["results"]} == {None}


def test_a_job_without_any_winner_exits_with_1(path):
    result = command(
        "--problem",
        "4x32x8x4096x4096x128",
        "--trials",
        4,
        "--db",
        path,
        landscape=lambda candidate, problem: TrialStatus.WRONG_RESULT,
    )
    assert result.exit_code == 1
    assert "no candidate ran and gave the right result" in result.stdout


def test_a_pipeline_that_found_nothing_is_not_said_to_work(path):
    fails = {"landscape": lambda candidate, problem: TrialStatus.WRONG_RESULT}
    result = command("--db", path, device=INTERPRETER, index=None, **fails)
    assert result.exit_code == 1
    assert "The pipeline works" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-3-8b"], "did you mean"),
        (["--problem", "4x4"], "is no problem"),
        (["--seqlens", "512"], "name one of these"),
        (["--model", "gpt2", "--seqlens", "a,b"], "is not lengths"),
        (["--passes", "sideways"], "is not one of: fwd"),
        (["--time-budget", "10"], "is no duration"),
        (["--hf-config", "nowhere.json"], "can't be read"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(arguments, message):
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_command_tunes_the_passes_that_it_names(path):
    arguments = ["--problem", "1x8x8x512x512x64", "--passes", "fwd,bwd", "--trials", 2]
    document = json.loads(command(*arguments, "--db", path, "--json").stdout)
    assert [entry["problem"]["pass"] for entry in document["results"]] == ["fwd", *BACKWARD_PASSES]


def test_no_tflops_are_claimed_for_a_pass_without_products(path):
    result = command("--problem", "1x8x8x512x512x64,bwd_delta", "--trials", 2, "--db", path)
    (row,) = [line for line in result.stdout.splitlines() if "bwd_delta" in line]
    assert re.search(r"\d +– +\d\.\d\d×", row)
    assert "TFLOP/s)" not in result.stderr


def test_a_single_causal_row_is_tuned_as_the_problem_that_its_calls_ask_for(path):
    arguments = ["--problem", "1x8x8x1x512x64,causal", "--trials", 1]
    document = json.loads(command(*arguments, "--db", path, "--json").stdout)
    assert [entry["problem"]["bounded_right"] for entry in document["results"]] == [False]


def test_several_ways_to_name_problems_add_up(path):
    arguments = ["--problem", "1x8x8x512x512x64", "--model", "gpt2", "--seqlens", "1024", "--trials", 1]
    document = json.loads(command(*arguments, "--db", path, "--json").stdout)
    assert document["problems"] == 2


# --- progress ---------------------------------------------------------------------------------------------------------


class FakeClock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def halfway(time_s=None, statuses=(TrialStatus.OK,) * 4) -> _Progress:
    """Progress after some of eight trials, 10 seconds each."""
    clock = FakeClock()
    progress = _Progress(clock=clock)
    budget = TuneBudget(trials=8, time_s=time_s)
    progress.take(JobStarted(problems=(PREFILL,), device=H200, toolchain=Toolchain(triton="3.7.1"), budget=budget))
    progress.take(ProblemStarted(problem=PREFILL, number=1, total=1, known=0, trials=8))
    config = default_config(variant_spec(PREFILL.family.kernel_pass, Variant.TMA), PREFILL.family, H200.arch)
    candidate = Candidate(family=PREFILL.family, variant=Variant.TMA, config=config)
    for status in statuses:
        clock.now_s += 10.0
        ok = success(candidate, PREFILL, 2.0)
        record = ok if status is TrialStatus.OK else failure(candidate, PREFILL, status)
        progress.take(TrialEnded(record=record, best_ms=2.0, counts={}, remaining=1))
    return progress


def test_time_left_follows_the_pace_so_far():
    assert halfway().time_left_s() == 40.0


def test_time_left_is_never_more_than_the_time_budget_leaves():
    assert halfway(time_s=43.0).time_left_s() == 3.0


def test_no_time_is_guessed_from_the_first_candidates():
    assert halfway(statuses=[TrialStatus.OK] * 3).time_left_s() is None


def test_progress_tells_time_left_counts_and_best():
    tflops = round(PREFILL.flops / 2.0 / 1e9)
    assert halfway().lines() == [
        "0/1 problems done, about 40s left",
        "4 tried: 4 measured, 0 failed",
        f"{PREFILL.label}: best 2 ms ({tflops} TFLOP/s)",
    ]


def test_progress_tells_what_failed_from_what_was_never_tried():
    statuses = [TrialStatus.OK, TrialStatus.CRASHED, *[TrialStatus.REJECTED] * 2]
    assert halfway(statuses=statuses).lines()[1:3] == [
        "2 tried: 1 measured, 1 failed (crashed 1)",
        "2 rejected before compiling (rejected 2)",
    ]
