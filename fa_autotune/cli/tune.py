"""`fa-autotune tune`: search the fastest kernels for this machine's GPU, and show how it goes."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click

from fa_autotune.cli.problem_options import named_problems, problem_options
from fa_autotune.cli.terminal import ProgressStream, echo, print_table, say, shown_lines
from fa_autotune.cli.values import DatabaseFile, WholeNumber
from fa_autotune.problem.device import INTERPRETER_ARCH
from fa_autotune.problem.passes import parse_passes
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.config import config_label

if TYPE_CHECKING:
    from fa_autotune.tuner import ProblemResult, TuneEvent, TuneSummary

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PLAIN_EVERY_S = 10.0
TOP_REASONS = 3
ENOUGH_FOR_A_PACE = 4  # candidates; the first ones wait for processes to start
_INTERPRETER_BANNER = (
    "There is no GPU that torch can use: this runs the same pipeline on Triton's interpreter, with tiny problems.\n"
    "It checks that everything works. Its times say nothing about any GPU, and no GPU ever uses its results."
)


@click.command("tune")
@problem_options
@click.option("--missed", is_flag=True, help="What dispatch met on this device without a winner of its own.")
@click.option(
    "--passes",
    default="fwd",
    show_default=True,
    help="Kernels to tune, separated by commas: fwd, bwd (all of the backward), or single ones, such as bwd_dkdv.",
)
@click.option("--trials", type=WholeNumber(min=1), help="Candidates measured per problem. [default: 96]")
@click.option("--time-budget", help="For all problems together, such as 90s, 10m or 1h30m. [default: none]")
@click.option("--gpu", "gpu_index", type=WholeNumber(min=0), help="Index of the GPU. [default: 0]")
@click.option(
    "--db",
    "db_path",
    type=DatabaseFile(),
    help="The database. [default: FA_AUTOTUNE_DB, or the user's own]",
)
@click.option(
    "--resume", is_flag=True, help="Go on with a job that was killed: what was tried counts, nothing is repeated."
)
@click.option(
    "--recheck",
    is_flag=True,
    help="Search nothing: measure again what won before, with whatever Triton or text; by default all of the database.",
)
@click.option("--seed", type=WholeNumber(), default=0, show_default=True, help="Seed of the search.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to stderr.")
@click.pass_context
def tune_command(
    ctx: click.Context,
    /,
    *,
    gpu_index: int | None,
    db_path: Path | None,
    trials: int | None,
    time_budget: str | None,
    missed: bool,
    resume: bool,
    recheck: bool,
    seed: int,
    passes: str,
    as_json: bool,
    **named: Any,
) -> None:
    """Search the fastest kernels for this machine's GPU.

    Without a problem it tunes a list of common ones. Every trial is stored as soon as it ends, so Ctrl-C loses nothing:
    the same command with --resume goes on.
    """
    problems = named_problems(**named)
    from fa_autotune.jobs import TuneJob, parse_duration_s, tune_job
    from fa_autotune.paths import database_path, require_working_folder

    require_working_folder()
    job = TuneJob(
        problems=tuple(problems),
        missed=missed,
        passes=parse_passes(passes),
        database=db_path or database_path(),
        gpu_index=gpu_index,
        trials=trials,
        time_budget_s=None if time_budget is None else parse_duration_s(time_budget),
        resume=resume,
        recheck=recheck,
        seed=seed,
    )
    run: Callable[..., TuneSummary] = ctx.obj or tune_job
    progress = _Progress()
    try:
        with _shown(progress) as on_event:
            run(job, on_event=on_event)
    except KeyboardInterrupt:
        progress.state = "interrupted"
    _print_document(progress, job.database) if as_json else _print_results(progress, job.database)
    if progress.state == "interrupted":
        ctx.exit(INTERRUPTED)
    if not any(result.winners for result in progress.results):
        ctx.exit(1)


# --- progress ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What a person wants to know while a job runs, from its events."""

    clock: Callable[[], float] = time.monotonic
    state: str = "finished"
    device: str = ""
    interpreted: bool = False
    results: "list[ProblemResult]" = field(default_factory=list)
    total: int = 0
    time_budget_s: float | None = None
    started_s: float = 0.0
    remaining: dict[AttentionProblem, int] = field(default_factory=dict)
    current: AttentionProblem | None = None
    best_ms: float | None = None
    statuses: Counter[TrialStatus] = field(default_factory=Counter)
    rejected_by: Counter[str] = field(default_factory=Counter)
    failed_by: Counter[str] = field(default_factory=Counter)
    confirming: int = 0
    faults: int = 0

    def take(self, event: "TuneEvent") -> None:
        """Note an event."""
        from fa_autotune.tuner import ConfirmStarted, FaultMet, JobStarted, ProblemFinished, ProblemStarted, TrialEnded

        match event:
            case JobStarted():
                self.device, self.total = event.device.name, len(event.problems)
                self.interpreted = event.device.arch == INTERPRETER_ARCH
                self.time_budget_s, self.started_s = event.budget.time_s, self.clock()
                self.remaining = dict.fromkeys(event.problems, event.budget.trials)
            case ProblemStarted():
                self.remaining[event.problem] = event.trials
            case TrialEnded():
                self.current, self.best_ms, self.confirming = event.record.problem, event.best_ms, 0
                status = event.record.status
                self.statuses[status] += 1
                if status is TrialStatus.REJECTED:
                    self.rejected_by[event.record.constraint or status.value] += 1
                else:
                    self.remaining[self.current] -= 1
                    if status is not TrialStatus.OK:
                        self.failed_by[event.record.constraint or status.value] += 1
            case FaultMet():
                self.faults += 1
            case ConfirmStarted():
                self.current, self.confirming = event.problem, len(event.finalists)
            case ProblemFinished():
                self.results.append(event.result)
                self.remaining[event.result.problem] = 0

    @property
    def evaluated(self) -> int:
        """Candidates that were compiled, and run where that went well."""
        return self.statuses.total() - self.statuses[TrialStatus.REJECTED]

    def time_left_s(self) -> float | None:
        """A guess from the pace so far, at most what the time budget leaves; None before there is a pace."""
        elapsed_s = self.clock() - self.started_s
        left = [] if self.time_budget_s is None else [max(0.0, self.time_budget_s - elapsed_s)]
        if self.evaluated >= ENOUGH_FOR_A_PACE:
            left.append(elapsed_s / self.evaluated * sum(max(0, trials) for trials in self.remaining.values()))
        return min(left, default=None)

    def lines(self) -> list[str]:
        """How far the job is, what became of the candidates, and the problem at hand."""
        left_s = self.time_left_s()
        lines = [f"{len(self.results)}/{self.total} problems done"]
        if left_s is not None:
            lines[0] += f", about {_duration(left_s)} left"
        ok, failed = self.statuses[TrialStatus.OK], self.failed_by
        lines.append(f"{self.evaluated} tried: {ok} measured, {failed.total()} failed{_most_common(failed)}")
        if rejected := self.rejected_by:
            lines.append(f"{rejected.total()} rejected before compiling{_most_common(rejected)}")
        if self.current is not None:
            best = self.speed(self.current, self.best_ms)
            lines.append(
                f"{self.current.label}: " + (f"confirming {self.confirming}" if self.confirming else f"best {best}")
            )
        return lines

    def speed(self, problem: AttentionProblem, time_ms: float | None) -> str:
        """Milliseconds and TFLOP/s; of the interpreter only the former."""
        if time_ms is None:
            return "none yet"
        tflops = None if self.interpreted else problem.tflops(time_ms)
        return f"{time_ms:.4g} ms" + ("" if tflops is None else f" ({tflops:.0f} TFLOP/s)")


@contextmanager
def _shown(progress: _Progress) -> "Iterator[Callable[[TuneEvent], None]]":
    """Show progress on stderr while the block runs: live on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from fa_autotune.tuner import FaultMet, JobStarted, ProblemFinished

    console = Console(file=cast("IO[str]", ProgressStream()), highlight=False)
    live = Live(Text(""), console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
    last_line_s = progress.clock()

    def on_event(event: "TuneEvent") -> None:
        nonlocal last_line_s
        progress.take(event)
        if isinstance(event, JobStarted):
            _say(console, _INTERPRETER_BANNER if progress.interpreted else f"Tuning for {progress.device}.")
        elif isinstance(event, FaultMet):
            _say(console, f"A fault of the machine, stored for no candidate: {event.fault.error}")
        elif isinstance(event, ProblemFinished):
            _say(console, f"[{len(progress.results)}/{progress.total}] {_outcome(progress, event.result)}")
        if live is not None:
            live.update(Text(shown_lines("\n".join(progress.lines()))))
        elif progress.clock() - last_line_s >= PLAIN_EVERY_S:
            last_line_s = progress.clock()
            _say(console, "; ".join(progress.lines()))

    if live is None:
        yield on_event
    else:
        with live:
            yield on_event


def _say(console: Any, text: str) -> None:
    """A line above the live ones: no markup, and no wrapping to the width of a pipe."""
    console.print(shown_lines(text), markup=False, soft_wrap=not console.is_terminal)


def _outcome(progress: _Progress, result: "ProblemResult") -> str:
    if not result.winners:
        return f"{result.problem.label}: {result.note}"
    best = result.winners[0]
    words = [f"{result.problem.label}: {progress.speed(result.problem, best.median_ms)}"]
    words.append(f"{best.candidate.variant} {config_label(best.candidate.config)}")
    if result.default_ratio is not None and not progress.interpreted:
        words.append(f"{result.default_ratio:.2f}× the default's speed")
    return ", ".join([*words, result.note] if result.note else words)


def _most_common(reasons: Counter[str]) -> str:
    named = ", ".join(f"{name} {count}" for name, count in reasons.most_common(TOP_REASONS))
    return f" ({named}{', …' if len(reasons) > TOP_REASONS else ''})" if named else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


# --- results ----------------------------------------------------------------------------------------------------------


def _print_results(progress: _Progress, database: Path | None) -> None:
    if progress.results:
        columns = ["problem", "variant", "config", "ms", "TFLOP/s", "vs default"]
        shown = len(columns) - 2 if progress.interpreted else len(columns)
        rows = [_row(progress, result)[:shown] for result in progress.results]
        print_table(columns[:shown], rows, optional=["TFLOP/s", "vs default"])
    say(_closing(progress, database))


def _row(progress: _Progress, result: "ProblemResult") -> list[str]:
    if not result.winners:
        return [result.problem.label, "–", result.note or "", "–", "–", "–"]
    best = result.winners[0]
    speed = ["–", "–"]
    if not progress.interpreted:
        tflops = result.problem.tflops(best.median_ms)
        speed[0] = "–" if tflops is None else f"{tflops:.0f}"
        speed[1] = "–" if result.default_ratio is None else f"{result.default_ratio:.2f}×"
    label = config_label(best.candidate.config)
    return [result.problem.label, best.candidate.variant, label, f"{best.median_ms:.4g}", *speed]


def _closing(progress: _Progress, database: Path | None) -> str:
    from fa_autotune.paths import shell_command, users_databases

    won = sum(bool(result.winners) for result in progress.results)
    text = f"{won} of {progress.total} problems have winners in {database}; {progress.evaluated} candidates were tried."
    if won:
        where: list[Path | str] = [] if database is None or [database] == users_databases() else ["--db", database]
        text += f" `{shell_command(['fa-autotune', 'db', 'winners', *where])}` shows them."
    if progress.state == "interrupted":
        usable = "The winners are usable now; the" if won else "The"
        text = f"Interrupted. {text} {usable} same command with --resume goes on and repeats nothing."
    elif progress.interpreted and won:
        text += " The pipeline works; with a GPU the same command tunes it."
    if progress.faults:
        text += f" {progress.faults} met a fault of the machine: the same command with --resume tries them again."
    return text


def _print_document(progress: _Progress, database: Path | None) -> None:
    from fa_autotune.database import to_json

    results = [
        {
            **_object(to_json(result)),
            "label": result.problem.label,
            "default_ratio": result.default_ratio,
            "tflops": None
            if progress.interpreted or not result.winners
            else result.problem.tflops(result.winners[0].median_ms),
        }
        for result in progress.results
    ]
    document = {
        "state": progress.state,
        "device": progress.device,
        "interpreted": progress.interpreted,
        "database": str(database),
        "problems": progress.total,
        "evaluated": progress.evaluated,
        "faults": progress.faults,
        "statuses": {status.value: count for status, count in sorted(progress.statuses.items())},
        "results": results,
    }
    echo(json.dumps(document, indent=2))


def _object(value: Any) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value
