"""The command that tunes: what it prints, how it ends, and what it refuses. No kernel runs here."""

import errno
import json
import re
import shutil
import sys

import pytest
from click.testing import CliRunner

from fa_autotune.cli import main
from fa_autotune.cli.tune import _Progress
from fa_autotune.database import TuningDatabase
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, Toolchain
from fa_autotune.problem.passes import BACKWARD_PASSES
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import MachineFault, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.tuner import JobStarted, ProblemStarted, TrialEnded, TuneBudget
from kit.replay import OpenReplay, failure, replayed_job, success

H200 = KNOWN_DEVICES["h200"]
SHORT = "4x32x8x4096x4096x128,causal"
PREFILL = AttentionProblem.parse("4x32x8x4096x4096x128,causal")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tuning.db"


class OftenSick(OpenReplay):
    """An evaluator to which every second candidate is a fault of the machine."""

    def screen(self, *args, **options):
        for record in super().screen(*args, **options):
            if len(self.screened) % 2:
                yield MachineFault(candidate=record.candidate, problem=record.problem, error="the disk is full")
            else:
                yield record


def command(*arguments, **options):
    run, _ = replayed_job(**options)
    return CliRunner().invoke(main, ["tune", *map(str, arguments)], obj=run)


def test_the_command_prints_a_line_per_problem_with_speed_and_ratio(path):
    result = command("--model", "llama-3-8b", "--seqlens", "2048,4096", "--trials", 6, "--db", path)
    rows = [line for line in result.stdout.splitlines() if "d128 causal" in line]
    assert len(rows) == 2
    assert all(re.search(r"\d+ +\d\.\d\d×", row) for row in rows)


@pytest.mark.parametrize("unused", [":memory:", "~nobody_of_this_name/tuning.db"])
def test_a_setting_that_is_not_used_may_be_unusable(unused, path, monkeypatch):
    monkeypatch.setenv("FA_AUTOTUNE_DB", unused)
    result = command("--problem", SHORT, "--trials", 2, "--db", path)
    assert (result.exit_code, result.stdout.count(f"`fa-autotune db winners --db {path}` shows them.")) == (0, 1)


def test_a_setting_that_is_used_is_named_before_the_work(path, monkeypatch):
    monkeypatch.setenv("FA_AUTOTUNE_DB", ":memory:")
    run, evaluator = replayed_job()
    result = CliRunner().invoke(main, ["tune", "--problem", SHORT], obj=run)
    assert (result.exit_code, evaluator.calls) == (2, [])
    assert result.stderr.startswith("Error: FA_AUTOTUNE_DB: ':memory:' is not the path of a file")


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


@pytest.mark.parametrize("happen", ["deleted", "moved", "replaced"])
@pytest.mark.parametrize("after", [0, 3, 6])
def test_a_database_that_is_gone_meanwhile_is_a_failure(happen, after, path):
    def landscape(candidate, problem):
        trials.append(candidate)
        if len(trials) == after + 1:
            if happen == "replaced":
                shutil.copy(path, path.with_name("copy"))
                path.with_name("copy").rename(path)
            else:
                path.unlink() if happen == "deleted" else path.rename(path.with_name("elsewhere"))
        return 1.0

    trials = []
    result = command("--problem", SHORT, "--trials", 6, "--db", path, landscape=landscape)
    assert (result.exit_code, "winners" in result.stdout) == (2, False)
    assert re.search("tuning.db was (deleted or moved away|replaced by another file)", result.stderr)


def test_a_machine_that_fails_is_told_and_candidates_are_counted_as_to_be_tried_again(path):
    result = command("--problem", SHORT, "--trials", 6, "--db", path, "--json", evaluator_type=OftenSick)
    assert json.loads(result.stdout)["faults"] == 3
    assert result.stderr.count("A fault of the machine, stored for no candidate: the disk is full") == 3
    said = command("--problem", SHORT, "--trials", 6, "--db", path, "--resume")
    assert "3 candidates were tried" in said.stdout
    assert "of the machine" not in said.output


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(errno.EPIPE, "closed")])
def test_progress_that_can_not_be_written_is_dropped(error, path):
    def refuse(_):
        raise error

    def landscape(candidate, problem):
        sys.stderr.write = refuse
        return 1.0

    result = command("--problem", SHORT, "--trials", 6, "--db", path, landscape=landscape)
    assert (result.exit_code, "[1/1]" in result.stderr) == (0, False)
    with TuningDatabase(path, read_only=True) as database:
        assert (len(database.winners()) > 0, len(database.trials()) >= 6) == (True, True)


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
