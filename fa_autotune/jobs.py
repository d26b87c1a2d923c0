"""The composition root of tuning: finds the device, opens the database and the evaluator, and runs the search.

Without a GPU the same pipeline runs on Triton's interpreter: a check that it works, which says nothing about speed. Its
results are stored under the device `interpreter`, which no GPU ever uses.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fa_autotune.database import TuningDatabase
from fa_autotune.errors import FaAutotuneError, InvalidProblemError, UnsupportedError
from fa_autotune.paths import database_path, expanded
from fa_autotune.problem.device import INTERPRETER, INTERPRETER_ARCH, DeviceSpec, Toolchain
from fa_autotune.problem.family import DType
from fa_autotune.problem.models import default_problems, problems_for_model, tiny_problems
from fa_autotune.problem.passes import Pass, parse_passes
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Evaluator
from fa_autotune.space.candidate import Variant
from fa_autotune.tuner import TuneBudget, TuneEvent, TuneSummary
from fa_autotune.tuner import tune as search

INTERPRETER_BUDGET = TuneBudget(trials=8, finalists=2)
MAX_INTERPRETED_PAIRS = 2**18  # (query, key) pairs over all heads: some seconds per launch


class OpenEvaluator(Evaluator, Protocol):
    """An evaluator that knows its toolchain."""

    @property
    def toolchain(self) -> Toolchain:
        """What compiles and runs its kernels."""
        ...


OpensEvaluator = Callable[[DeviceSpec, int | None], AbstractContextManager[OpenEvaluator]]
FindsDevice = Callable[[int | None], tuple[DeviceSpec, int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """What is to be tuned, and where.

    `problems` empty: the device's default list, or with `missed` those that dispatch met without a winner of their own.
    `recheck`: nothing is searched, only what the database has is measured again, and without problems all of them.
    `passes`: the kernels to tune for each problem; a problem of a backward pass stays as it is, and so do missed ones.
    `database` None: the user's. `gpu_index` None: the first GPU, or the interpreter where there is none. `trials` per
    problem and `finalists` None: `TuneBudget`'s, fewer in the interpreter. `time_budget_s`: for all problems together.
    """

    problems: tuple[AttentionProblem, ...] = ()
    missed: bool = False
    passes: tuple[Pass, ...] = (Pass.FWD,)
    database: Path | None = None
    gpu_index: int | None = None
    trials: int | None = None
    finalists: int | None = None
    time_budget_s: float | None = None
    variants: Collection[Variant] | None = None
    resume: bool = False
    recheck: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("missed", "resume", "recheck"):
            if not isinstance(value := getattr(self, name), bool):
                raise FaAutotuneError(f"{name}={value!r} is not True or False")
        if type(self.seed) is not int:
            raise FaAutotuneError(f"seed={self.seed!r} is no integer")
        if self.gpu_index is not None and (type(self.gpu_index) is not int or self.gpu_index < 0):
            raise FaAutotuneError(f"gpu={self.gpu_index!r} is no index of a GPU; write 0 for the first one")

    def budget(self, device: DeviceSpec) -> TuneBudget:
        """The budget on a device, defaults filled in."""
        usual = INTERPRETER_BUDGET if device.arch == INTERPRETER_ARCH else TuneBudget()
        return TuneBudget(
            trials=usual.trials if self.trials is None else self.trials,
            finalists=usual.finalists if self.finalists is None else self.finalists,
            time_s=self.time_budget_s,
        )


def find_device(gpu_index: int | None) -> tuple[DeviceSpec, int | None]:
    """The device to tune and its index; the interpreter has none. FaAutotuneError if a GPU is named and not there."""
    from fa_autotune.kernels.gpu import live_device  # noqa: PLC0415  imports torch

    try:
        device = live_device(gpu_index or 0)
    except FaAutotuneError:
        if gpu_index is not None:
            raise
        device = INTERPRETER
    if device.arch != INTERPRETER_ARCH:
        return device, gpu_index or 0
    if gpu_index is not None:
        raise FaAutotuneError(f"GPU {gpu_index} asked for, but TRITON_INTERPRET=1 interprets kernels; unset it")
    return device, None


def local_evaluator(device: DeviceSpec, device_index: int | None) -> AbstractContextManager[OpenEvaluator]:
    """The evaluator of this machine."""
    from fa_autotune.evaluation.evaluator import LocalEvaluator  # noqa: PLC0415  imports torch

    return LocalEvaluator(device=device, device_index=device_index)


def tune_job(
    job: TuneJob,
    *,
    on_event: Callable[[TuneEvent], None] = lambda event: None,
    find: FindsDevice = find_device,
    open_evaluator: OpensEvaluator = local_evaluator,
) -> TuneSummary:
    """Run a job; `find` and `open_evaluator` are for tests."""
    device, device_index = find(job.gpu_index)
    path = job.database or database_path()
    problems = _problems(job, device, path)  # a job that is refused leaves no new database
    with open_evaluator(device, device_index) as evaluator, TuningDatabase(path) as database:
        summary = search(
            problems,
            evaluator=evaluator,
            database=database,
            device=device,
            toolchain=evaluator.toolchain,
            budget=job.budget(device),
            variants=job.variants,
            resume=job.resume,
            recheck=job.recheck,
            seed=job.seed,
            on_event=on_event,
        )
        for result in summary.results:
            if result.winners:
                database.clear_misses(device=device, problem=result.problem)
    return summary


def tune(
    problems: Sequence[AttentionProblem | str] = (),
    *,
    model: str | None = None,
    passes: str = "fwd",
    trials: int | None = None,
    time_budget: str | None = None,
    gpu: int | None = None,
    database: Path | str | None = None,
    resume: bool = False,
    seed: int = 0,
    on_event: Callable[[TuneEvent], None] = lambda event: None,
) -> TuneSummary:
    """Tune problems (or a model's, or this GPU's default list) and store the winners; see `TuneJob`.

    A problem may be its short text, such as `4x32x8x4096x4096x128,causal`; `passes` is such as `fwd,bwd` and
    `time_budget` such as `10m`. Attention that this process has decided already keeps its kernels until it starts
    again.
    """
    if not callable(on_event):
        raise FaAutotuneError(f"on_event={on_event!r} can't be called; leave it out, or give a function of one event")
    named = AttentionProblem.several(problems)
    if model is not None:
        named += problems_for_model(model)
    job = TuneJob(
        problems=tuple(named),
        passes=parse_passes(passes),
        database=None if database is None else expanded(database),
        gpu_index=gpu,
        trials=trials,
        time_budget_s=None if time_budget is None else parse_duration_s(time_budget),
        resume=resume,
        seed=seed,
    )
    return tune_job(job, on_event=on_event)


def parse_duration_s(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h` or `1h30m`; a bare number is refused, since its unit would be a guess."""
    if not isinstance(text, str):
        raise FaAutotuneError(f"{text!r} is no duration; write it as text with its unit, such as 90s, 10m or 1h30m")
    match = re.fullmatch(r"(?=.)(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?", text.strip().lower())
    seconds = (
        0
        if match is None
        else sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
    )
    if seconds <= 0:
        raise FaAutotuneError(f"{text!r} is no duration; write it with its unit, such as 90s, 10m or 1h30m")
    return float(seconds)


def _problems(job: TuneJob, device: DeviceSpec, path: Path) -> list[AttentionProblem]:
    problems = _of_passes(job.problems, job.passes)
    wants_all = job.recheck and not (problems or job.missed)
    stored = TuningDatabase(path, read_only=True) if (job.missed or wants_all) and os.path.lexists(path) else None
    with stored or nullcontext():
        misses = stored.misses(device=device) if stored and job.missed else []
        winners = stored.winners(device=device) if stored and wants_all else []
    if job.missed:
        problems += [miss.problem for miss in misses]
        if not problems:
            raise InvalidProblemError(
                f"no miss is recorded for {device.name}: either every call had a winner of its own, or the process "
                "that called attention has not ended yet"
            )
    if job.recheck and not problems:
        problems = list(dict.fromkeys(winner.problem for winner in winners))
        if not problems:
            raise InvalidProblemError(
                f"the database has no winner on {device.name} to measure again; import a pack that has some, or leave "
                "out --recheck"
            )
    if device.arch != INTERPRETER_ARCH:
        # Triton has no bfloat16 matrix products before sm_80.
        dtype = DType.FLOAT16 if device.arch == "sm_75" else DType.BFLOAT16
        return problems or _of_passes(default_problems(dtype), job.passes)
    for problem in problems:
        pairs = problem.visible_pairs * problem.shape.batch_size * problem.shape.num_q_heads
        if pairs > MAX_INTERPRETED_PAIRS:
            raise UnsupportedError(
                f"there is no GPU that torch can use, and {problem.label} has {pairs:.1e} query-key pairs: Triton's "
                f"interpreter would need hours (at most {MAX_INTERPRETED_PAIRS} here); `fa-autotune doctor` says what "
                "is missing, and without problems a tiny list checks the pipeline"
            )
    return problems or _of_passes(tiny_problems(), job.passes)


def _of_passes(problems: Sequence[AttentionProblem], passes: Sequence[Pass]) -> list[AttentionProblem]:
    """Each forward problem's problems of the passes, as a call asks for them, pass by pass; a backward's stay."""
    backward = [problem for problem in problems if problem.family.kernel_pass is not Pass.FWD]
    calls = [problem for problem in problems if problem.family.kernel_pass is Pass.FWD]
    asked = [problem.as_called().for_pass(kernel_pass) for kernel_pass in passes for problem in calls]
    return list(dict.fromkeys([*asked, *backward]))
