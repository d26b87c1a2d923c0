"""Compiles generated modules ahead of time, without a GPU, and judges what comes out.

A candidate that spills, does not fit, or lost what its template was written for (wide loads, warps that split query
rows only) never reaches the GPU. Each such check is a gate: a named function that gives a reason, or None.
"""

import json
import os
import re
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from threading import Lock
from types import ModuleType, TracebackType
from typing import Any, Self

from fa_autotune.errors import FaAutotuneError, MachineError, WorkerDied, WorkerTimeout
from fa_autotune.kernels.faults import MAX_ERROR_CHARACTERS, is_machines
from fa_autotune.kernels.gates import GATES, CompiledText, CompileRequest
from fa_autotune.kernels.machine_code import code_digest
from fa_autotune.kernels.modules import compile_module, load_module
from fa_autotune.kernels.triton_private import keep_beside, kept_assembler_log, kept_beside, parts_of
from fa_autotune.paths import triton_cache_dir
from fa_autotune.records import ResourceReport, TrialStatus
from fa_autotune.worker import WorkerPool

DEFAULT_DEADLINE_S = 120.0

_JOBS_PER_PROCESS = 200  # Triton keeps what it compiled
_LOG_NAME = "assembler_log.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What became of a request: OK, COMPILE_FAILED, OVER_RESOURCES, TIMED_OUT or CRASHED.

    `resources` is there whenever the kernel compiled; `error` says why it can't be used, and `gate` which gate said so.
    """

    status: TrialStatus
    resources: ResourceReport | None = None
    error: str | None = None
    gate: str | None = None


def compile_request(request: CompileRequest) -> CompileResult:
    """Compile a module and put it through the gates: the job of a compile worker. A bad kernel is a result.

    OSError (a full disk, a cache folder that can't be written, a missing assembler) and MachineError (memory, an
    assembler that was killed) are raised: they are not the kernel's fault.
    """
    try:
        text, compile_s = _compiled_text(load_module(request.module), request.arch)
    except OSError:
        raise
    except Exception as error:
        if is_machines(error):
            raise MachineError(_brief(error)) from error
        return CompileResult(status=TrialStatus.COMPILE_FAILED, error=_brief(error))
    resources = resource_report(text, compile_s)
    for name, gate in GATES:
        if reason := gate(request, text, resources):
            return CompileResult(status=TrialStatus.OVER_RESOURCES, resources=resources, error=reason, gate=name)
    return CompileResult(status=TrialStatus.OK, resources=resources)


def resource_report(text: CompiledText, compile_s: float) -> ResourceReport:
    """Registers, spills and warnings, from the assembler's log (NVIDIA) or the assembly's notes (AMD)."""
    if text.is_nvidia:
        registers = _numbers(r"Used (\d+) registers", text.log)
        spill_bytes = max(_numbers(r"(\d+) bytes spill (?:stores|loads)", text.log), default=0)
        warnings = [line.strip() for line in text.log.splitlines() if re.search(r"warning|\(C\d{4}\)", line)]
    else:
        registers = _numbers(r"\.vgpr_count:\s*(\d+)", text.assembly)
        spill_bytes = max(_numbers(r"\.private_segment_fixed_size:\s*(\d+)", text.assembly), default=0)
        warnings = ["access widths are checked in PTX only, not in this assembly"]
    return ResourceReport(
        registers=max(registers, default=None),
        spill_bytes=spill_bytes,
        smem_bytes=text.smem_bytes,
        compile_s=compile_s,
        warnings=tuple(line[:MAX_ERROR_CHARACTERS] for line in warnings),
        code_digest=code_digest(text.binary),
    )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


# --- compiling --------------------------------------------------------------------------------------------------------


def _compiled_text(module: ModuleType, arch: str) -> tuple[CompiledText, float]:
    """Compile; also gives the seconds it took, of the first time where Triton's cache has the kernel."""
    kernel, log, compile_s = _compile(module, arch)
    if not log and (known := _known_log(kept_beside(kernel, _LOG_NAME))):
        log, compile_s = known
    else:
        if not log and parts_of(kernel).is_nvidia:  # cached by a process that kept no log
            kernel, log, compile_s = _compile(module, arch, anew=True)
        keep_beside(kernel, _LOG_NAME, json.dumps([log, compile_s]))
    reads_elements = "stride_attn_mask_n" in module.SIGNATURE
    return CompiledText(**asdict(parts_of(kernel)), log=log, reads_elements=reads_elements), compile_s


def _known_log(text: str | None) -> tuple[str, float] | None:
    """What was kept beside a kernel, unless it is damaged."""
    try:
        log, compile_s = json.loads(text or "null")
    except (ValueError, TypeError, RecursionError):
        return None
    return (log, compile_s) if isinstance(log, str) and type(compile_s) in (int, float) else None


def _compile(module: ModuleType, arch: str, *, anew: bool = False) -> tuple[Any, str, float]:
    """Triton's compiled kernel, the log of the assembler it ran (empty if it ran none), and the seconds it took."""
    start = time.perf_counter()
    with kept_assembler_log(anew=anew) as log:
        kernel = compile_module(module, arch)
    return kernel, log.getvalue(), round(time.perf_counter() - start, 3)


def _brief(error: Exception) -> str:
    """One error as text of bounded length: the end says what is wrong, the start where."""
    text = str(error) if isinstance(error, FaAutotuneError) else f"{type(error).__name__}: {error}"
    text = text.partition("\nRepro command:")[0].strip()  # a path of this machine, and of a file that is gone
    if len(text) <= MAX_ERROR_CHARACTERS:
        return text
    head, tail = MAX_ERROR_CHARACTERS // 4, 3 * MAX_ERROR_CHARACTERS // 4
    return f"{text[:head]} […] {text[-tail:]}"


# --- the pool ---------------------------------------------------------------------------------------------------------


def compile_environ() -> dict[str, str | None]:
    """What a compiling process's environment must override: no interpreter, and the cache that all processes share."""
    return {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(triton_cache_dir())}


def available_cpus() -> int:
    """CPUs that this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)))


class CompilePool:
    """Compile workers. Equal requests are compiled once; one that hangs or crashes its worker is a result too.

    A future raises OSError or MachineError where the machine is to blame; the next equal request then compiles again.
    """

    def __init__(self, size: int | None = None, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._workers = WorkerPool(
            available_cpus() if size is None else size,
            name="compile",
            environ=compile_environ(),
            max_jobs=_JOBS_PER_PROCESS,
        )
        self._futures: dict[CompileRequest, Future[CompileResult]] = {}
        self._lock = Lock()

    def submit(self, request: CompileRequest) -> Future[CompileResult]:
        """Start compiling, or find the same request already under way or done."""
        with self._lock:
            known = self._futures.get(request)
            if known is None or known.cancelled() or (known.done() and known.exception()):  # the machine's fault
                known = self._workers.submit(
                    compile_request, request, deadline_s=self._deadline_s, recover=_result_of_failure
                )
                self._futures[request] = known
            return known

    def close(self, *, cancel: bool = True) -> None:
        """Stop the workers, with `cancel` in the middle of what they do."""
        self._workers.close(cancel=cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def _result_of_failure(error: Exception) -> CompileResult:
    if is_machines(error) and not isinstance(error, OSError):
        raise MachineError(_brief(error)) from error
    if isinstance(error, WorkerTimeout):
        return CompileResult(status=TrialStatus.TIMED_OUT, error=_brief(error))
    if isinstance(error, WorkerDied):
        return CompileResult(status=TrialStatus.CRASHED, error=_brief(error))
    raise error
