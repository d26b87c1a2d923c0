"""What the measuring worker does: verify, screen, soak and confirm kernels on one device.

These functions run in a subprocess that may hang or crash. What they are given and what they give back is plain data;
loaded kernels and inputs stay in the worker's caches. They never see a user's tensors.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from fa_autotune.evaluation.measure import MeasurePolicy, TimedRun, Timer, confirm, make_timer, regime_for, screen
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import same_bits, verify, verify_sampled
from fa_autotune.evaluation.workload import Workload, bottom_right_diagonal
from fa_autotune.kernels.faults import MAX_ERROR_CHARACTERS, is_machines
from fa_autotune.kernels.gpu import live_toolchain
from fa_autotune.kernels.loaded import LoadedKernel
from fa_autotune.kernels.modules import ModuleFile
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, TrialStatus
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import BwdPostprocessConfig, FusedConfig
from fa_autotune.space.workspace import STATISTIC_ROWS, fused_tile

P = ParamSpec("P")
T = TypeVar("T")

SOAK_LAUNCHES = 1000
SOAK_S = 0.25

# After one of these the CUDA context is lost and every later call fails: the worker must be replaced.
_STICKY_ERRORS = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "device-side assert",
    "an illegal barrier",
    "not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "launch timed out",
)

# The GPU's own faults; they lose the context too.
_GPU_FAULTS = (
    "uncorrectable",
    "busy or unavailable",
    "no CUDA-capable device",
    "GPU is lost",
    "fallen off the bus",
    "driver shutting down",
    "system not yet initialized",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetting:
    """Where a job runs: the device and its index (None: the interpreter, on the CPU), and how long it may measure."""

    device: DeviceSpec
    device_index: int | None
    policy: MeasurePolicy

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cpu") if self.device_index is None else torch.device("cuda", self.device_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A candidate and its generated module, already compiled for the device."""

    candidate: Candidate
    module: ModuleFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job gave no result. `sticky`: the worker can't be used any more.

    Without a status the machine is to blame, and nothing is known of the kernel.
    """

    status: TrialStatus | None
    error: str
    sticky: bool = False


def _on_device(
    run: Callable[Concatenate[TrialSetting, P], T | Failure],
) -> Callable[Concatenate[TrialSetting, P], T | Failure]:
    """A job that runs with its own GPU as the current one, and gives what it raises as a Failure."""

    @wraps(run)
    def job(bench: TrialSetting, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        # Events, graphs and synchronize() belong to the current GPU, whatever GPU the tensors are on.
        current = nullcontext() if bench.device_index is None else torch.cuda.device(bench.device_index)
        try:
            with current:
                return run(bench, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - Triton and torch raise all sorts; a bad kernel is a result
            return _failure(error)

    return job


def toolchain_job() -> Toolchain:
    """The versions that compile and run kernels in the worker."""
    return live_toolchain()


@_on_device
def verify_job(bench: TrialSetting, built: Built) -> AccuracyReport | Failure:
    """Check a candidate's kernel on the probes round its blocks."""
    family = built.candidate.family
    kernel = _loaded(built, bench.device.arch, bench.device_index)
    block_m, block_n = _blocks(built.candidate)
    many = kernel.is_persistent or family.kernel_pass is Pass.BWD_FUSED  # programs that wait for one another
    probe_list = probes(
        family,
        block_m=block_m,
        block_n=block_n,
        exact_lengths=getattr(built.candidate.config, "EXACT_LENGTHS", False),
        programs=bench.device.num_sms if many else 0,
    )
    return verify(kernel, family, probe_list, bench.torch_device)


def _blocks(candidate: Candidate) -> tuple[int, int]:
    """Rows of queries and of keys that a kernel takes together; those of queries twice where it knows no keys."""
    family, config = candidate.family, candidate.config
    if isinstance(config, FusedConfig | BwdPostprocessConfig):
        tile = fused_tile(family)
        return tile.block_m, tile.block_n
    if family.varlen and family.kernel_pass is Pass.BWD_PREPROCESS:
        return STATISTIC_ROWS, STATISTIC_ROWS  # whose blocks sequences are padded to
    return config.BLOCK_M, getattr(config, "BLOCK_N", config.BLOCK_M)


@_on_device
def screen_job(
    bench: TrialSetting, built: Built, problem: AttentionProblem, incumbent_ms: float | None
) -> Measurement | Failure:
    """Time a verified kernel on a problem."""
    regime = regime_for(problem, bench.device)
    return screen(
        _timed_run(built, problem, bench),
        timer=_timer(regime, bench),
        regime=regime,
        policy=bench.policy,
        incumbent_ms=incumbent_ms,
        device_index=bench.device_index,
    )


@_on_device
def soak_job(bench: TrialSetting, built: Built, problem: AttentionProblem) -> AccuracyReport | Failure:
    """Check a finalist at the problem's own size, then launch it many times: the last result must be the first, bit
    for bit."""
    kernel = _loaded(built, bench.device.arch, bench.device_index)
    workload = _workload(problem, str(bench.torch_device))
    report = verify_sampled(kernel, problem, workload.inputs, workload.softmax_scale, workload.features)
    if not report.passed or bench.device_index is None:
        return report
    return _soaked(report, kernel, workload)


@_on_device
def confirm_job(
    bench: TrialSetting, finalists: Sequence[Built], problem: AttentionProblem
) -> list[Measurement] | Failure:
    """Time finalists interleaved; one measurement for each, in their order."""
    regime = regime_for(problem, bench.device)
    return confirm(
        [_timed_run(built, problem, bench) for built in finalists],
        timer=_timer(regime, bench),
        regime=regime,
        policy=bench.policy,
        device_index=bench.device_index,
    )


def _soaked(report: AccuracyReport, kernel: LoadedKernel, workload: Workload) -> AccuracyReport | Failure:
    outputs = workload.allocate()
    arguments = workload.arguments(outputs)
    kernel(*arguments)
    repeatable = [tensor for output, tensor in zip(workload.outputs, outputs, strict=True) if not output.adds_up]
    expected = [tensor.clone() for tensor in repeatable]
    deadline = time.monotonic() + SOAK_S
    for count in range(SOAK_LAUNCHES):
        kernel(*arguments)
        if count % 16 == 15:
            torch.cuda.synchronize()
            if time.monotonic() > deadline:
                break
    torch.cuda.synchronize()
    if not all(map(same_bits, repeatable, expected)):
        return Failure(status=TrialStatus.WRONG_RESULT, error="repeated launches changed the result")
    return report


@lru_cache(maxsize=64)
def _loaded(built: Built, arch: str, index: int | None) -> LoadedKernel:
    return LoadedKernel(built.candidate, built.module, arch, index)


@lru_cache(maxsize=1)
def _workload(problem: AttentionProblem, device_name: str) -> Workload:
    return seeded_workload(problem, device=torch.device(device_name), diagonal=bottom_right_diagonal(problem))


@lru_cache(maxsize=2)
def _timer(regime: Regime, bench: TrialSetting) -> Timer:
    return make_timer(regime, bench.device, bench.device_index)


def _timed_run(built: Built, problem: AttentionProblem, bench: TrialSetting) -> TimedRun:
    kernel = _loaded(built, bench.device.arch, bench.device_index)
    workload = _workload(problem, str(bench.torch_device))
    outputs = workload.allocate()
    launch = partial(kernel, *workload.arguments(outputs))
    zeroed = [tensor for output, tensor in zip(workload.outputs, outputs, strict=True) if output.adds_up]
    if not zeroed:
        return launch

    def launch_on_zeros() -> None:
        for tensor in zeroed:
            tensor.zero_()
        launch()

    return launch_on_zeros


def _failure(error: Exception) -> Failure:
    """A typed failure without the traceback: that would keep the tensors of its frames alive."""
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    if isinstance(error, torch.OutOfMemoryError) or "CUDA]: out of memory" in text or "CUDA error: out of mem" in text:
        torch.cuda.empty_cache()
        return Failure(status=TrialStatus.OUT_OF_MEMORY, error=text)
    if (is_gpus := any(phrase in text for phrase in _GPU_FAULTS)) or is_machines(error):
        return Failure(status=None, error=text, sticky=is_gpus)
    if type(error).__name__ == "OutOfResources":
        return Failure(status=TrialStatus.OVER_RESOURCES, error=text)
    if any(phrase in text for phrase in _STICKY_ERRORS):
        return Failure(status=TrialStatus.CRASHED, error=text, sticky=True)
    return Failure(status=TrialStatus.LAUNCH_FAILED, error=text)
