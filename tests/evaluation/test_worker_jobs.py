"""What the measuring worker does, called in this process: results, kinds of failure, and what stays in memory."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from fa_autotune.evaluation import worker_jobs as trial_jobs
from fa_autotune.evaluation.evaluator import INTERPRETER_POLICY
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
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER, known_device
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, Role, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from kit.sabotage import Sabotage, before_each_launch, instead_of, render_with

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu.py runs the same jobs"),
]

BENCH = TrialSetting(device=INTERPRETER, device_index=None, policy=INTERPRETER_POLICY)
FAMILY = AttentionFamily(dtype=DType.FLOAT16, head_dim=16, head_dim_v=16, bounded_right=True)
CONFIG = PortableFwdConfig(BLOCK_M=16, BLOCK_N=16, num_warps=1, num_stages=1)
PROBLEM = AttentionProblem.parse("7x2x1x18x20x16,causal,fp16")
OTHER_PROBLEM = AttentionProblem.parse("8x1x1x5x33x16,causal,fp16")
LONG_PROBLEM = AttentionProblem.parse("1x1x1x300x8x16,causal,fp16")  # its first rows see no key

Build = Callable[..., Built]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write a right kernel's module, or what a sabotage makes of it."""

    def build(sabotage: Sabotage = lambda text: text) -> Built:
        candidate = Candidate(family=FAMILY, variant=Variant.PORTABLE, config=CONFIG)
        source = render_with({candidate: sabotage})(candidate)
        return Built(candidate=candidate, module=write_module(source, tmp_path))

    return build


JOBS: dict[str, Callable[[TrialSetting, Built], Any]] = {
    "verify": verify_job,
    "screen": lambda bench, built: screen_job(bench, built, PROBLEM, None),
    "soak": lambda bench, built: soak_job(bench, built, PROBLEM),
    "confirm": lambda bench, built: confirm_job(bench, [built], PROBLEM),
}
each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


def failed(result: object) -> Failure:
    assert isinstance(result, Failure)
    return result


class TestResults:
    def test_verifying_gives_a_report(self, build: Build) -> None:
        report = verify_job(BENCH, build())
        assert isinstance(report, AccuracyReport)
        assert report.passed

    def test_verifying_a_wrong_kernel_gives_a_report_too(self, build: Build) -> None:
        report = verify_job(BENCH, build(before_each_launch("softmax_scale *= 2")))
        assert isinstance(report, AccuracyReport)
        assert not report.passed

    def test_screening_gives_a_measurement(self, build: Build) -> None:
        measurement = screen_job(BENCH, build(), PROBLEM, None)
        assert isinstance(measurement, Measurement)
        assert (measurement.role, measurement.regime) == (Role.SCREEN, Regime.WALL)

    def test_screening_heeds_the_incumbent(self, build: Build) -> None:
        measurement = screen_job(BENCH, build(), PROBLEM, 1e-9)
        assert isinstance(measurement, Measurement)
        assert measurement.early_stopped

    @pytest.mark.parametrize("problem", [PROBLEM, OTHER_PROBLEM, LONG_PROBLEM], ids=lambda problem: problem.label)
    def test_soaking_a_right_kernel_passes(self, build: Build, problem: AttentionProblem) -> None:
        report = soak_job(BENCH, build(), problem)
        assert isinstance(report, AccuracyReport)
        assert report.failures == ()

    def test_soaking_sees_what_is_wrong_at_the_problems_size(self, build: Build) -> None:
        report = soak_job(BENCH, build(before_each_launch("if q.shape[0] == 7: softmax_scale *= 2")), PROBLEM)
        assert isinstance(report, AccuracyReport)
        assert not report.passed

    def test_confirming_gives_a_measurement_for_each_finalist(self, build: Build) -> None:
        finalists = [
            build(),
            build(instead_of("HEADS_PER_GROUP = tl.constexpr(8)", "HEADS_PER_GROUP = tl.constexpr(2)")),
        ]
        measured = confirm_job(BENCH, finalists, PROBLEM)
        assert isinstance(measured, list)
        assert [one.role for one in measured] == [Role.CONFIRM] * 2

    def test_the_toolchain_has_the_versions_of_this_process(self) -> None:
        toolchain = toolchain_job()
        assert (toolchain.triton, toolchain.torch) == (triton.__version__, torch.__version__)


STICKY = [
    "CUDA error: an illegal memory access was encountered",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "Triton Error [CUDA]: unspecified launch failure",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: operation not supported on global/shared address space",
    "CUDA error: invalid program counter",
    "CUDA error: hardware stack error",
    "CUDA error: the launch timed out and was terminated",
    "HIP error: an illegal memory access was encountered",
]


class TestFailures:
    @pytest.mark.parametrize("text", STICKY)
    def test_that_lose_the_device_are_crashes_of_the_worker(self, build: Build, text: str) -> None:
        failure = failed(screen_job(BENCH, build(before_each_launch(f"raise RuntimeError({text!r})")), PROBLEM, None))
        assert (failure.status, failure.sticky) == (TrialStatus.CRASHED, True)

    @pytest.mark.parametrize(
        ("statement", "is_sticky"),
        [
            ("raise OSError(28, 'No space left on device')", False),
            ("raise MemoryError", False),
            ("import subprocess; raise subprocess.CalledProcessError(1, 'gcc')", False),
            ("raise RuntimeError('Failed to find C compiler')", False),
            ("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')", True),
            ("raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')", True),
        ],
    )
    def test_of_the_machine_have_no_status(self, build: Build, statement: str, is_sticky: bool) -> None:
        failure = failed(screen_job(BENCH, build(before_each_launch(statement)), PROBLEM, None))
        assert (failure.status, failure.sticky) == (None, is_sticky)

    @pytest.mark.parametrize(
        ("statement", "status"),
        [
            ("raise RuntimeError('Triton Error [CUDA]: out of memory')", TrialStatus.OUT_OF_MEMORY),
            ("raise torch.OutOfMemoryError('planted')", TrialStatus.OUT_OF_MEMORY),
            (
                "from triton.runtime.errors import OutOfResources; raise OutOfResources(300, 200, 'shared memory')",
                TrialStatus.OVER_RESOURCES,
            ),
            ("raise RuntimeError('Triton Error [CUDA]: invalid argument')", TrialStatus.LAUNCH_FAILED),
            ("raise KeyError('planted')", TrialStatus.LAUNCH_FAILED),
            ("raise AssertionError", TrialStatus.LAUNCH_FAILED),
        ],
    )
    def test_that_leave_the_device_usable_keep_the_worker(
        self, build: Build, statement: str, status: TrialStatus
    ) -> None:
        failure = failed(screen_job(BENCH, build(before_each_launch(statement)), PROBLEM, None))
        assert (failure.status, failure.sticky) == (status, False)

    def test_say_what_was_raised(self, build: Build) -> None:
        failure = failed(screen_job(BENCH, build(before_each_launch("raise KeyError('planted')")), PROBLEM, None))
        assert failure.error == "KeyError: 'planted'"

    def test_have_a_text_of_bounded_length(self, build: Build) -> None:
        failure = failed(screen_job(BENCH, build(before_each_launch("raise ValueError('x' * 10**6)")), PROBLEM, None))
        assert len(failure.error) <= 1000

    @each_job
    def test_are_the_result_of_every_job(self, build: Build, job: Callable[[TrialSetting, Built], Any]) -> None:
        failure = failed(job(BENCH, build(before_each_launch("raise RuntimeError('planted')"))))
        assert failure.status is TrialStatus.LAUNCH_FAILED

    def test_include_a_module_that_does_not_import(self, build: Build) -> None:
        failure = failed(verify_job(BENCH, build(instead_of("def attention_fwd(", "def attention_fwd(:"))))
        assert (failure.status, "SyntaxError" in failure.error) == (TrialStatus.LAUNCH_FAILED, True)


def remember(name: str) -> Sabotage:
    """Keep weak references to a tensor of each launch in the module's SEEN."""
    kept = before_each_launch("import weakref", f"SEEN.append(weakref.ref({name}))")
    return lambda text: kept(text) + "\n\nSEEN = []\n"


def seen(built: Built) -> list["weakref.ref[torch.Tensor]"]:
    found: list[weakref.ref[torch.Tensor]] = load_module(built.module).SEEN
    return found


class TestMemory:
    def test_holds_the_inputs_of_one_problem_at_a_time(self, build: Build) -> None:
        built = build(remember("q"))
        screen_job(BENCH, built, PROBLEM, None)
        first = seen(built)[-1]
        assert first() is not None
        screen_job(BENCH, built, OTHER_PROBLEM, None)
        assert first() is None

    def test_measures_all_kernels_of_a_problem_on_the_same_inputs(self, build: Build) -> None:
        built = build(remember("q"))
        screen_job(BENCH, built, PROBLEM, None)
        screen_job(BENCH, build(), PROBLEM, None)
        screen_job(BENCH, built, PROBLEM, None)
        assert seen(built)[0]() is seen(built)[-1]() is not None

    def test_lets_the_output_of_a_trial_go(self, build: Build) -> None:
        built = build(remember("out"))
        screen_job(BENCH, built, PROBLEM, None)
        assert {reference() for reference in seen(built)} == {None}

    def test_lets_the_output_of_a_failed_trial_go(self, build: Build) -> None:
        remembering, failing = remember("out"), before_each_launch("if True: raise ValueError('planted')")
        built = build(lambda text: remembering(failing(text)))
        screen_job(BENCH, built, PROBLEM, None)
        assert [reference() for reference in seen(built)] == [None]


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that were made current, though there need be none."""
    indices: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        indices.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    return indices


class TestDevice:
    @each_job
    def test_of_the_bench_is_current_before_a_kernel_is_loaded(
        self,
        job: Callable[[TrialSetting, Built], Any],
        build: Build,
        made_current: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def loaded(built: Built, arch: str, index: int | None) -> None:
            raise RuntimeError(f"current were {made_current}")

        monkeypatch.setattr(trial_jobs, "_loaded", loaded)
        bench = TrialSetting(device=known_device("h200"), device_index=3, policy=MeasurePolicy())
        assert failed(job(bench, build())).error == "RuntimeError: current were [3]"

    @each_job
    def test_is_no_gpu_for_the_interpreter(
        self, job: Callable[[TrialSetting, Built], Any], build: Build, made_current: list[int]
    ) -> None:
        assert not isinstance(job(BENCH, build()), Failure)
        assert made_current == []
