"""The real Evaluator: render, compile in a pool of processes, then verify and time in one worker that owns the device.

Compiling overlaps with measuring; every kernel is compiled and verified once, however many shapes it is timed on. What
fails is a record; a worker that hangs or crashes is replaced and the job goes on.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from fa_autotune.errors import FaAutotuneError, MachineError, TemplateError, WorkerDied, WorkerError, WorkerTimeout
from fa_autotune.evaluation.measure import MeasurePolicy
from fa_autotune.evaluation.worker_jobs import (
    Built,
    Failure,
    TrialSetting,
    confirm_job,
    screen_job,
    soak_job,
    toolchain_job,
    verify_job,
)
from fa_autotune.files import locked, read_plain, write_whole
from fa_autotune.kernels.compiler import CompilePool, CompileResult
from fa_autotune.kernels.faults import is_machines
from fa_autotune.kernels.gates import CompileRequest
from fa_autotune.kernels.gpu import gpu_uuid
from fa_autotune.kernels.modules import candidates_dir, write_module
from fa_autotune.kernels.render import render
from fa_autotune.paths import cache_dir, own_cache_folder, triton_cache_dir
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, MachineFault, Measurement, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import KernelConfig
from fa_autotune.space.registry import compile_form
from fa_autotune.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a job of the measuring worker may take, in seconds; past it the worker is killed."""

    start_s: float = 180.0  # imports torch and starts the device; added to the first job's own
    verify_s: float = 60.0
    measure_s: float = 60.0
    confirm_s: float = 180.0


# Kernels in the interpreter take milliseconds per program and their times mean nothing: few launches do.
INTERPRETER_POLICY = MeasurePolicy(
    warmup_ms=0.0, target_ms=0.0, min_launches=1, max_launches=1, early_launches=1, rounds=2, round_ms=0.0
)
WORKER_JOBS = 3000  # a fresh process after so many, so that its memory stays bounded
NARROW_TIE, WIDE_TIE = 0.003, 0.01  # finalists within their noise, inside these fractions, count as equally fast


@dataclass(slots=True)
class _Kernel:
    """What is known of a candidate's kernel in this process. Nothing was built where it does not render."""

    built: Built | None
    digest: str | None
    compiled: Future[CompileResult]
    accuracy: AccuracyReport | Failure | None = None


class LocalEvaluator:
    """Evaluates candidates on one local GPU or, with `device_index` None, in Triton's interpreter.

    Holds the GPU for itself while open: a second job on it is refused, since each would disturb the other's timings.
    """

    def __init__(
        self,
        *,
        device: DeviceSpec,
        device_index: int | None,
        compile_workers: int | None = None,
        policy: MeasurePolicy | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        interpreted = device_index is None
        self._bench = TrialSetting(
            device=device,
            device_index=device_index,
            policy=policy or (INTERPRETER_POLICY if interpreted else MeasurePolicy()),
        )
        self._deadlines = deadlines or Deadlines()
        self._lock = None if device_index is None else _DeviceLock(device_index)
        self._compilers = CompilePool(compile_workers)
        self._environ = {
            "TRITON_INTERPRET": "1" if interpreted else None,
            "TRITON_CACHE_DIR": str(triton_cache_dir()),
        }
        self._worker: Worker | None = None
        self._kernels: dict[Candidate, _Kernel] = {}
        self._toolchain: Toolchain | None = None

    @property
    def toolchain(self) -> Toolchain:
        """The versions that compile and run the kernels; the first use starts the measuring worker."""
        if self._toolchain is None:
            self._toolchain = self._call(toolchain_job, deadline_s=self._deadlines.start_s)
        return self._toolchain

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all subprocesses and release the device."""
        self._compilers.close(cancel=True)
        self._end_worker()
        if self._lock is not None:
            self._lock.release()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling candidates in the background."""
        for candidate in candidates:
            self._kernel(candidate)

    def screen(
        self,
        candidates: Sequence[Candidate],
        problems: Sequence[AttentionProblem],
        *,
        incumbents_ms: Sequence[float | None] = (),
    ) -> Iterator[TrialRecord | MachineFault]:
        """One record for each candidate on each problem, or a fault, in the order in which compiling finishes."""
        best = dict(zip(problems, incumbents_ms or [None] * len(problems), strict=True))
        waiting: dict[Future[CompileResult], list[Candidate]] = {}
        for candidate in candidates:
            waiting.setdefault(self._kernel(candidate).compiled, []).append(candidate)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for candidate in [candidate for future in done for candidate in waiting.pop(future)]:
                for problem in problems:
                    record = self._screen_one(candidate, problem, best[problem])
                    measurement = None if isinstance(record, MachineFault) else record.measurement
                    if measurement and measurement.median_ms < (best[problem] or float("inf")):
                        best[problem] = measurement.median_ms
                    yield record

    def confirm(self, candidates: Sequence[Candidate], problem: AttentionProblem) -> list[TrialRecord | MachineFault]:
        """Check finalists at the problem's size, launch each many times, then time them interleaved and rank them."""
        failed: list[TrialRecord | MachineFault] = []
        finalists: list[Candidate] = []
        reports: dict[Candidate, AccuracyReport] = {}
        self.prefetch(candidates)
        for candidate in candidates:
            if (broken := self._compile_failure(candidate, problem)) is not None:
                failed.append(broken)
                continue
            report = self._run(soak_job, self._kernel(candidate).built, problem, deadline_s=self._deadlines.measure_s)
            if isinstance(report, Failure):
                failed.append(self._record(candidate, problem, failure=report))
            elif not report.passed:
                failed.append(self._record(candidate, problem, failure=_wrong(report), accuracy=report))
            else:
                finalists.append(candidate)
                reports[candidate] = report
        if not finalists:
            return failed
        built = [self._kernel(candidate).built for candidate in finalists]
        measured = self._run(confirm_job, built, problem, deadline_s=self._deadlines.confirm_s)
        if isinstance(measured, Failure):
            return [*(self._record(candidate, problem, failure=measured) for candidate in finalists), *failed]
        ranked = rank_finalists(list(zip(finalists, measured, strict=True)))
        ok = [self._record(one, problem, measurement=time, accuracy=reports[one]) for one, time in ranked]
        return [*ok, *failed]

    def _kernel(self, candidate: Candidate) -> _Kernel:
        known = self._kernels.get(candidate)
        if known is None:
            known = self._kernels[candidate] = self._start_compiling(candidate)
        return known

    def _start_compiling(self, candidate: Candidate) -> _Kernel:
        try:
            source = render(candidate)
            module = write_module(source, candidates_dir())
        except TemplateError as error:
            broken: Future[CompileResult] = Future()
            broken.set_result(CompileResult(status=TrialStatus.COMPILE_FAILED, error=str(error)))
            return _Kernel(built=None, digest=None, compiled=broken)
        request = CompileRequest(
            module=module,
            arch=self._bench.device.arch,
            form=compile_form(candidate.family),
            variant=candidate.variant,
            smem_limit_bytes=self._bench.device.smem_optin_bytes,
        )
        built = Built(candidate=candidate, module=module)
        return _Kernel(built=built, digest=source.digest, compiled=self._compilers.submit(request))

    def _screen_one(
        self, candidate: Candidate, problem: AttentionProblem, incumbent_ms: float | None
    ) -> TrialRecord | MachineFault:
        started = time.monotonic()
        kernel = self._kernel(candidate)
        if (broken := self._compile_failure(candidate, problem)) is not None:
            return broken
        if kernel.accuracy is None:
            kernel.accuracy = self._run(verify_job, kernel.built, deadline_s=self._deadlines.verify_s)
        accuracy = kernel.accuracy
        if isinstance(accuracy, Failure):
            if accuracy.status is None:
                kernel.accuracy = None  # so that it is verified again
            record = self._record(candidate, problem, failure=accuracy)
        elif not accuracy.passed:
            record = self._record(candidate, problem, failure=_wrong(accuracy))
        else:
            timed = self._run(screen_job, kernel.built, problem, incumbent_ms, deadline_s=self._deadlines.measure_s)
            failure, measurement = (timed, None) if isinstance(timed, Failure) else (None, timed)
            record = self._record(candidate, problem, failure=failure, measurement=measurement)
        if isinstance(record, MachineFault):
            return record
        return replace(record, duration_s=time.monotonic() - started)

    def _compile_failure(self, candidate: Candidate, problem: AttentionProblem) -> TrialRecord | MachineFault | None:
        """Wait for the compiler; the record of a kernel that it or a gate refused, None if there is a kernel."""
        kernel = self._kernel(candidate)
        try:
            compiled = kernel.compiled.result()
        except (OSError, MachineError) as error:
            del self._kernels[candidate]  # so that it is compiled again
            text = (
                f"compiling failed for a reason outside of the kernels: {error}; check disk, memory and "
                f"{triton_cache_dir()} (FA_AUTOTUNE_CACHE names another place), and see `fa-autotune doctor`"
            )
            if isinstance(error, OSError):  # a full disk, a folder that can't be written: so for all that follow
                raise MachineError(text) from error
            return MachineFault(candidate=candidate, problem=problem, error=text)
        if compiled.status is TrialStatus.OK:
            return None
        return TrialRecord(
            candidate=candidate,
            problem=problem,
            status=compiled.status,
            form=compile_form(candidate.family),
            kernel_digest=kernel.digest,
            resources=compiled.resources,
            error=compiled.error,
            constraint=compiled.gate,
        )

    def _record(
        self,
        candidate: Candidate,
        problem: AttentionProblem,
        *,
        failure: Failure | None = None,
        measurement: Measurement | None = None,
        accuracy: AccuracyReport | None = None,
    ) -> TrialRecord | MachineFault:
        if failure is not None and failure.status is None:
            return MachineFault(candidate=candidate, problem=problem, error=failure.error)
        kernel = self._kernel(candidate)
        known = kernel.accuracy if isinstance(kernel.accuracy, AccuracyReport) else None
        return TrialRecord(
            candidate=candidate,
            problem=problem,
            status=TrialStatus.OK if failure is None or failure.status is None else failure.status,
            form=compile_form(candidate.family),
            kernel_digest=kernel.digest,
            resources=kernel.compiled.result().resources,
            accuracy=accuracy or known,
            measurement=measurement,
            error=failure.error if failure else None,
        )

    def _run(self, job: Callable[..., T | Failure], /, *arguments: Any, deadline_s: float) -> T | Failure:
        """Run job(bench, …) in the measuring worker; what happens to the worker is a Failure."""
        try:
            started = self._worker is not None
            allowed = deadline_s if started else deadline_s + self._deadlines.start_s
            result = self._call(job, self._bench, *arguments, deadline_s=allowed)
        except (WorkerTimeout, WorkerDied, OSError) as error:
            self._end_worker()  # a fresh one, that may take its time to start
            status = TrialStatus.TIMED_OUT if isinstance(error, WorkerTimeout) else TrialStatus.CRASHED
            return Failure(status=None if is_machines(error) else status, error=str(error))
        except WorkerError as error:
            return Failure(status=TrialStatus.LAUNCH_FAILED, error=str(error))
        if isinstance(result, Failure) and result.sticky:
            self._end_worker()
        return result

    def _call(self, job: Callable[..., T], /, *arguments: Any, deadline_s: float) -> T:
        if self._worker is None:
            self._worker = Worker(name="measure", environ=self._environ, max_jobs=WORKER_JOBS)
        return self._worker.call(job, *arguments, deadline_s=deadline_s)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def rank_finalists(measured: Sequence[tuple[Candidate, Measurement]]) -> list[tuple[Candidate, Measurement]]:
    """Rank finalists within each variant; the fastest first over all.

    Those within the noise of their variant's fastest count as equally fast, and the simplest of them wins.
    """
    ordered = sorted(measured, key=lambda pair: pair[1].median_ms)
    ranked: list[tuple[Candidate, Measurement]] = []
    for variant in dict.fromkeys(candidate.variant for candidate, _ in ordered):
        own = [pair for pair in ordered if pair[0].variant is variant]
        fastest = own[0][1]
        noise = (fastest.p80_ms - fastest.p20_ms) / 2 / fastest.median_ms
        band = fastest.median_ms * (1 + min(WIDE_TIE, max(NARROW_TIE, noise)))
        tied = sorted((pair for pair in own if pair[1].median_ms <= band), key=lambda pair: _complexity(pair[0].config))
        rest = [pair for pair in own if pair[1].median_ms > band]
        ranked += [
            (candidate, replace(measurement, rank=rank))
            for rank, (candidate, measurement) in enumerate([*tied, *rest], start=1)
        ]
    return sorted(ranked, key=lambda pair: (pair[1].rank != 1, pair[1].median_ms))


def _complexity(config: KernelConfig) -> tuple[int, ...]:
    """Smaller is simpler: fewest knobs away from their default, least shared memory, fewest warps."""
    away = sum(getattr(config, knob.name) != knob.default for knob in fields(config) if knob.default is not MISSING)
    tiles = getattr(config, "num_stages", 0) * getattr(config, "BLOCK_N", 0)  # of kernels that may differ in them
    return away, tiles, config.num_warps, getattr(config, "BLOCK_M", 0)


def _wrong(report: AccuracyReport) -> Failure:
    return Failure(status=TrialStatus.WRONG_RESULT, error="; ".join(report.failures)[:1000])


class _DeviceLock:
    """A lock file per GPU, held while its timings must not be disturbed, and beside it who holds it."""

    def __init__(self, device_index: int) -> None:
        name = f"gpu-{gpu_uuid(device_index)}"
        with ExitStack() as held:
            try:
                folder = own_cache_folder(cache_dir() / "locks")
                held.enter_context(locked(folder / f"{name}.lock", wait_s=0.0))
                write_whole(folder / f"{name}.process", str(os.getpid()), durable=False)
            except BlockingIOError:
                holder = (read_plain(folder / f"{name}.process", at_most=32) or b"unknown").decode(errors="replace")
                raise FaAutotuneError(
                    f"GPU {device_index} is being tuned by process {holder}; wait for it, or name another GPU: two "
                    "jobs on one GPU would falsify each other's timings"
                ) from None
            except OSError as error:
                raise FaAutotuneError(
                    f"the lock of GPU {device_index} can't be written: {error}; let FA_AUTOTUNE_CACHE name another "
                    "folder"
                ) from error
            self._held = held.pop_all()

    def release(self) -> None:
        """Let others have the device."""
        self._held.close()
