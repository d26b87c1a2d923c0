"""The evaluator with kernels made to fail: each is a record that says how, and the job goes on."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fa_autotune.errors import FaAutotuneError, MachineError, TemplateError, WorkerDied
from fa_autotune.evaluation.evaluator import Deadlines, LocalEvaluator, rank_finalists
from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.problem.device import INTERPRETER, known_device
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import MachineFault, Measurement, Regime, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig, PortableFwdConfig, TmaFwdConfig
from kit.combinations import rest
from kit.sabotage import Sabotage, before_each_launch, instead_of, launches, log_launches, render_with

kernel = pytest.mark.kernel

# A worker that starts may take long on a busy machine; a tiny kernel must still be done well before it is killed.
DEADLINES = Deadlines(start_s=120.0, verify_s=8.0, measure_s=8.0, confirm_s=30.0)
PROBES = 6
FAMILY = AttentionFamily(dtype=DType.FLOAT16, head_dim=16, head_dim_v=16, bounded_right=True)
PROBLEM = AttentionProblem.parse("7x2x1x18x20x16,causal,fp16")  # no probe has its batch size
OTHER_PROBLEM = AttentionProblem.parse("8x1x1x5x33x16,causal,fp16")

Screen = Callable[..., list[TrialRecord]]
Sabotages = dict[Candidate, Sabotage]


def make_candidates() -> Iterator[Candidate]:
    """Candidates that differ in knobs which cost nothing here, so that no test meets another one's kernel."""
    for maxnreg, heads in product(range(96, 256, 8), (1, 2, 4, 8, 16)):
        config = PortableFwdConfig(
            BLOCK_M=16, BLOCK_N=16, num_warps=1, num_stages=1, maxnreg=maxnreg, HEADS_PER_GROUP=heads
        )
        yield Candidate(family=FAMILY, variant=Variant.PORTABLE, config=config)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Candidate]:
    """Candidates that no test of this module has used."""
    return make_candidates()


@pytest.fixture(scope="module")
def evaluator() -> Iterator[LocalEvaluator]:
    with LocalEvaluator(device=INTERPRETER, device_index=None, compile_workers=1, deadlines=DEADLINES) as evaluator:
        assert evaluator.toolchain.triton  # starts the worker: the first test is not allowed the time of the start
        yield evaluator


@pytest.fixture(scope="module")
def good(evaluator: LocalEvaluator, fresh: Iterator[Candidate]) -> Candidate:
    """A candidate whose kernel is right, compiled and verified."""
    candidate = next(fresh)
    assert screened(evaluator, candidate).status is TrialStatus.OK
    return candidate


@pytest.fixture(scope="module")
def worker_process(
    evaluator: LocalEvaluator, fresh: Iterator[Candidate], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], int]:
    """Ask for the process id of the measuring worker, by a kernel that writes it to a file."""
    candidate, log = next(fresh), tmp_path_factory.mktemp("worker") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fa_autotune.evaluation.evaluator.render", render_with({candidate: log_launches(log)}))
        screened(evaluator, candidate)

    def ask() -> int:
        screened(evaluator, candidate)
        return launches(log)[-1][0]

    return ask


@pytest.fixture
def sabotages(monkeypatch: pytest.MonkeyPatch) -> Sabotages:
    """What is done to the modules of candidates that the test puts in."""
    chosen: Sabotages = {}
    monkeypatch.setattr("fa_autotune.evaluation.evaluator.render", render_with(chosen))
    return chosen


def screened(evaluator: LocalEvaluator, candidate: Candidate, problem: AttentionProblem = PROBLEM) -> TrialRecord:
    (record,) = evaluator.screen([candidate], [problem])
    assert isinstance(record, TrialRecord), record
    return record


CUDA_FAULT = "CUDA error: an illegal memory access was encountered"
FAULTS: dict[str, tuple[Sabotage, TrialStatus, str]] = {
    "hangs": (before_each_launch("time.sleep(1000)"), TrialStatus.TIMED_OUT, "passed its deadline"),
    "aborts": (before_each_launch("os.abort()"), TrialStatus.CRASHED, "SIGABRT"),
    "exits": (before_each_launch("os._exit(3)"), TrialStatus.CRASHED, "exited with code 3"),
    "raises SystemExit": (before_each_launch("raise SystemExit(3)"), TrialStatus.LAUNCH_FAILED, "SystemExit"),
    "segfaults": (
        before_each_launch("import ctypes", "ctypes.string_at(0)"),
        TrialStatus.CRASHED,
        "SIGSEGV",
    ),
    "accesses memory that is not its own": (
        before_each_launch(f"raise RuntimeError({CUDA_FAULT!r})"),
        TrialStatus.CRASHED,
        "illegal memory access",
    ),
    "runs out of memory": (
        before_each_launch("raise torch.OutOfMemoryError('planted')"),
        TrialStatus.OUT_OF_MEMORY,
        "planted",
    ),
    "does not launch": (before_each_launch("raise RuntimeError('planted')"), TrialStatus.LAUNCH_FAILED, "planted"),
    "scales its result": (
        instead_of("acc_0 * inverse_l[:, None]", "acc_0 * inverse_l[:, None] * 1.01"),
        TrialStatus.WRONG_RESULT,
        "out error",
    ),
    "gives NaN": (
        instead_of("acc_0 * inverse_l[:, None]", "acc_0 * inverse_l[:, None] * float('nan')"),
        TrialStatus.WRONG_RESULT,
        "not finite",
    ),
    "leaves the tail unwritten": (
        instead_of("mask=rows_left[:, None])", "mask=(offs_m < seqlen_q - 1)[:, None])"),
        TrialStatus.WRONG_RESULT,
        "unwritten",
    ),
    "writes past the end": (
        instead_of("mask=rows_left[:, None])", "mask=(offs_m < seqlen_q + 1)[:, None])"),
        TrialStatus.WRONG_RESULT,
        "wrote outside of out",
    ),
    "gives an lse in base 2": (
        instead_of("LN_2 = tl.constexpr(0.6931471805599453)", "LN_2 = tl.constexpr(1.0)"),
        TrialStatus.WRONG_RESULT,
        "lse error",
    ),
    "sees one key too many": (
        instead_of("tl.minimum(offs_m + diagonal,", "tl.minimum(offs_m + diagonal + 1,"),
        TrialStatus.WRONG_RESULT,
        "error",
    ),
    "gives another result each time": (
        before_each_launch("softmax_scale = softmax_scale * (1 + time.monotonic_ns() % 997 * 1e-3)"),
        TrialStatus.WRONG_RESULT,
        "different bits",
    ),
    "is no Python": (
        instead_of("def attention_fwd(", "def attention_fwd(:"),
        TrialStatus.COMPILE_FAILED,
        "SyntaxError",
    ),
    "uses an unknown name": (
        instead_of("tl.cdiv(seqlen_q,", "tl.cdiv(nowhere,"),
        TrialStatus.COMPILE_FAILED,
        "nowhere",
    ),
}


# Left to `scripts/test --rest`: more ways to die, and more results that are wrong.
REST = [
    *("exits", "segfaults", "scales its result", "gives NaN", "leaves the tail unwritten"),
    *("gives an lse in base 2", "sees one key too many"),
]


@kernel
@pytest.mark.parametrize("fault", [*(fault for fault in FAULTS if fault not in REST), *rest(REST)])
def test_a_kernel_that(
    fault: str, evaluator: LocalEvaluator, fresh: Iterator[Candidate], good: Candidate, sabotages: Sabotages
) -> None:
    """… is a record that says how it failed, and the next candidate is evaluated."""
    bad = next(fresh)
    sabotages[bad], status, reason = FAULTS[fault]
    record = screened(evaluator, bad)
    assert (record.status, reason in (record.error or "")) == (status, True), record.error
    assert screened(evaluator, good).status is TrialStatus.OK


@kernel
class TestScreen:
    def test_gives_a_right_kernel_its_accuracy_resources_and_time(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate]
    ) -> None:
        record = screened(evaluator, next(fresh))
        assert record.status is TrialStatus.OK
        assert record.accuracy is not None
        assert record.accuracy.passed
        assert record.resources is not None
        assert record.measurement is not None
        assert (record.measurement.role, record.measurement.regime) == (Role.SCREEN, Regime.WALL)

    def test_names_the_gate_that_stopped_a_spilling_tile(self, evaluator: LocalEvaluator) -> None:
        family = AttentionFamily(dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, bounded_right=True)
        config = PortableFwdConfig(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=2)
        candidate = Candidate(family=family, variant=Variant.PORTABLE, config=config)
        record = screened(evaluator, candidate, AttentionProblem.parse("1x1x1x128x128x128,causal"))
        assert (record.status, record.constraint) == (TrialStatus.OVER_RESOURCES, "spills")

    def test_makes_a_candidate_that_does_not_render_a_record(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(candidate: Candidate) -> None:
            raise TemplateError("planted")

        monkeypatch.setattr("fa_autotune.evaluation.evaluator.render", broken)
        record = screened(evaluator, next(fresh))
        assert (record.status, record.error, record.kernel_digest) == (TrialStatus.COMPILE_FAILED, "planted", None)

    @pytest.mark.rest
    def test_kills_a_kernel_that_hangs_only_at_the_problems_size(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], sabotages: Sabotages
    ) -> None:
        bad = next(fresh)
        sabotages[bad] = before_each_launch("if q.shape[0] == 7: time.sleep(1000)")
        record = screened(evaluator, bad)
        assert record.status is TrialStatus.TIMED_OUT
        assert record.accuracy is not None  # it passed that far

    @pytest.mark.parametrize(
        ("fault", "is_replaced"),
        [("os.abort()", True), (f"raise RuntimeError({CUDA_FAULT!r})", True), ("raise ValueError('planted')", False)],
        ids=["died", "lost_its_device", "only_failed"],
    )
    def test_replaces_a_worker_that(
        self,
        fault: str,
        is_replaced: bool,
        evaluator: LocalEvaluator,
        fresh: Iterator[Candidate],
        sabotages: Sabotages,
        worker_process: Callable[[], int],
    ) -> None:
        """A worker that lost its device still answers, but every later call in it would fail."""
        bad = next(fresh)
        sabotages[bad] = before_each_launch(fault)
        before = worker_process()
        screened(evaluator, bad)
        assert (worker_process() != before) is is_replaced

    def test_verifies_a_kernel_once_for_all_its_problems(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], sabotages: Sabotages, tmp_path: Path
    ) -> None:
        candidate = next(fresh)
        sabotages[candidate] = log_launches(tmp_path / "log")
        records = list(evaluator.screen([candidate], [PROBLEM, OTHER_PROBLEM]))
        assert [record.status for record in records] == [TrialStatus.OK] * 2
        of_probes = [batch for _, batch in launches(tmp_path / "log") if batch not in (7, 8)]
        assert len(of_probes) == 2 * PROBES  # each launched twice

    def test_does_not_verify_again_what_was_wrong(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], sabotages: Sabotages, tmp_path: Path
    ) -> None:
        candidate = next(fresh)
        log = log_launches(tmp_path / "log")
        wrong = instead_of("acc_0 * inverse_l[:, None]", "acc_0 * 2.0")
        sabotages[candidate] = lambda text: log(wrong(text))
        records = list(evaluator.screen([candidate], [PROBLEM, OTHER_PROBLEM]))
        assert [record.status for record in records] == [TrialStatus.WRONG_RESULT] * 2
        assert len(launches(tmp_path / "log")) == 2 * PROBES

    def test_finds_what_was_prefetched(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rendered once, and so submitted to the compilers once."""
        candidate, rendered = next(fresh), []
        plain = render_with({})
        monkeypatch.setattr("fa_autotune.evaluation.evaluator.render", lambda one: rendered.append(one) or plain(one))
        evaluator.prefetch([candidate])
        list(evaluator.screen([candidate], [PROBLEM]))
        list(evaluator.screen([candidate], [OTHER_PROBLEM]))
        assert rendered == [candidate]

    def test_gives_a_record_for_each_candidate_on_each_problem(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate]
    ) -> None:
        pair = [next(fresh), next(fresh)]
        records = list(evaluator.screen(pair, [PROBLEM, OTHER_PROBLEM], incumbents_ms=[None, 1e-9]))
        found = {(record.candidate, record.problem) for record in records}
        assert (len(records), found) == (4, set(product(pair, [PROBLEM, OTHER_PROBLEM])))

    def test_stops_early_against_the_incumbent_of_its_problem(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate]
    ) -> None:
        records = evaluator.screen([next(fresh)], [PROBLEM, OTHER_PROBLEM], incumbents_ms=[None, 1e-9])
        stopped = {record.problem: record.measurement and record.measurement.early_stopped for record in records}
        assert stopped == {PROBLEM: False, OTHER_PROBLEM: True}

    def test_of_no_candidates_is_nothing(self, evaluator: LocalEvaluator) -> None:
        assert list(evaluator.screen([], [PROBLEM])) == []

    def test_runs_tma_kernels_too(self, evaluator: LocalEvaluator) -> None:
        config = TmaFwdConfig(BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=1)
        candidate = Candidate(family=FAMILY, variant=Variant.TMA, config=config)
        assert screened(evaluator, candidate, PROBLEM).status is TrialStatus.OK


@kernel
class TestConfirm:
    def test_ranks_all_finalists(self, evaluator: LocalEvaluator, fresh: Iterator[Candidate]) -> None:
        records = evaluator.confirm([next(fresh), next(fresh), next(fresh)], PROBLEM)
        assert {record.measurement and record.measurement.rank for record in records} == {1, 2, 3}
        assert {record.measurement and record.measurement.role for record in records} == {Role.CONFIRM}

    def test_puts_a_finalist_that_is_wrong_at_the_problems_size_last_without_a_rank(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], good: Candidate, sabotages: Sabotages
    ) -> None:
        wrong = next(fresh)
        sabotages[wrong] = before_each_launch("if q.shape[0] == 7: softmax_scale *= 2")
        first, last = evaluator.confirm([wrong, good], PROBLEM)
        assert (first.candidate, first.status) == (good, TrialStatus.OK)
        assert (last.candidate, last.status, last.measurement) == (wrong, TrialStatus.WRONG_RESULT, None)

    def test_puts_a_finalist_that_kills_the_worker_last_and_goes_on(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], good: Candidate, sabotages: Sabotages
    ) -> None:
        deadly = next(fresh)
        sabotages[deadly] = before_each_launch("if q.shape[0] == 7: os.abort()")
        statuses = [record.status for record in evaluator.confirm([deadly, good], PROBLEM)]
        assert statuses == [TrialStatus.OK, TrialStatus.CRASHED]

    def test_puts_a_finalist_that_does_not_compile_last_and_says_so(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], good: Candidate, sabotages: Sabotages
    ) -> None:
        broken = next(fresh)
        sabotages[broken] = instead_of("tl.cdiv(seqlen_q,", "tl.cdiv(nowhere,")
        statuses = [record.status for record in evaluator.confirm([broken, good], PROBLEM)]
        assert statuses == [TrialStatus.OK, TrialStatus.COMPILE_FAILED]

    def test_of_failures_alone_gives_them(
        self, evaluator: LocalEvaluator, fresh: Iterator[Candidate], sabotages: Sabotages
    ) -> None:
        wrong = next(fresh)
        sabotages[wrong] = before_each_launch("softmax_scale *= 2")
        (record,) = evaluator.confirm([wrong], PROBLEM)
        assert record.status is TrialStatus.WRONG_RESULT


@kernel
def test_the_toolchain_is_the_workers(evaluator: LocalEvaluator) -> None:
    import triton

    assert evaluator.toolchain.triton == triton.__version__


@kernel
def test_a_closed_evaluator_leaves_no_worker(fresh: Iterator[Candidate], tmp_path: Path) -> None:
    candidate = next(fresh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fa_autotune.evaluation.evaluator.render", render_with({candidate: log_launches(tmp_path / "log")})
        )
        with LocalEvaluator(device=INTERPRETER, device_index=None, compile_workers=1, deadlines=DEADLINES) as evaluator:
            screened(evaluator, candidate)
    process, _ = launches(tmp_path / "log")[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


# --- the lock on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LocalEvaluator]:
    """Open an evaluator on a GPU of a given UUID; nothing is run there."""

    def open_evaluator(uuid: str) -> LocalEvaluator:
        monkeypatch.setattr("fa_autotune.evaluation.evaluator.gpu_uuid", lambda index: uuid)
        return LocalEvaluator(device=known_device("h200"), device_index=0, compile_workers=1)

    return open_evaluator


class TestDeviceLock:
    def test_refuses_a_second_job_and_names_the_first(self, on_gpu: Callable[[str], LocalEvaluator]) -> None:
        with on_gpu("one"), pytest.raises(FaAutotuneError, match=f"tuned by process {os.getpid()};"):
            on_gpu("one")

    def test_lets_jobs_on_two_gpus_run(self, on_gpu: Callable[[str], LocalEvaluator]) -> None:
        with on_gpu("one"), on_gpu("two") as second:
            assert second is not None

    def test_is_free_again_after_the_job(self, on_gpu: Callable[[str], LocalEvaluator]) -> None:
        on_gpu("one").close()
        with on_gpu("one") as second:
            assert second is not None

    def test_is_not_needed_in_the_interpreter(self) -> None:
        with (
            LocalEvaluator(device=INTERPRETER, device_index=None, compile_workers=1),
            LocalEvaluator(device=INTERPRETER, device_index=None, compile_workers=1) as second,
        ):
            assert second is not None


# --- ranking ----------------------------------------------------------------------------------------------------------

SIMPLE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


def timed(median_ms: float, spread_ms: float = 0.0) -> Measurement:
    return Measurement(
        role=Role.CONFIRM,
        regime=Regime.EVENTS,
        launches=50,
        p20_ms=median_ms - spread_ms,
        median_ms=median_ms,
        p80_ms=median_ms + spread_ms,
    )


def finalist(config: KernelConfig, median_ms: float, spread_ms: float = 0.0) -> tuple[Candidate, Measurement]:
    variant = Variant.TMA if isinstance(config, TmaFwdConfig) else Variant.PORTABLE
    return Candidate(family=FAMILY, variant=variant, config=config), timed(median_ms, spread_ms)


def ranks(*finalists: tuple[Candidate, Measurement]) -> dict[KernelConfig, int | None]:
    return {candidate.config: measurement.rank for candidate, measurement in rank_finalists(finalists)}


class TestRanking:
    def test_is_by_time(self) -> None:
        configs = [replace(SIMPLE, BLOCK_N=block_n) for block_n in (16, 32, 128)]
        finalists = [finalist(config, time) for config, time in zip(configs, (3.0, 1.0, 2.0), strict=True)]
        assert ranks(*finalists) == dict(zip(configs, (3, 1, 2), strict=True))

    def test_is_within_each_variant(self) -> None:
        tma = TmaFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
        other = replace(SIMPLE, BLOCK_N=16)
        assert ranks(finalist(SIMPLE, 2.0), finalist(other, 3.0), finalist(tma, 1.0)) == {SIMPLE: 1, other: 2, tma: 1}

    def test_gives_the_fastest_of_all_first(self) -> None:
        tma = TmaFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
        ordered = rank_finalists([finalist(SIMPLE, 2.0), finalist(tma, 1.0), finalist(replace(tma, BLOCK_N=16), 1.5)])
        assert [measurement.median_ms for _, measurement in ordered] == [1.0, 2.0, 1.5]  # winners before the others

    @pytest.mark.parametrize(
        "knobs",
        [
            {"ROW_SUM_LANES": 8},
            {"maxnreg": 128},
            {"HEADS_PER_GROUP": 1},
            {"num_stages": 3},
            {"BLOCK_N": 128},
            {"num_warps": 8},
            {"BLOCK_M": 128},
        ],
        ids=str,
    )
    def test_prefers_the_simpler_of_two_that_are_equally_fast(self, knobs: dict[str, int]) -> None:
        other = replace(SIMPLE, **knobs)
        assert ranks(finalist(other, 1.0), finalist(SIMPLE, 1.002)) == {SIMPLE: 1, other: 2}

    def test_prefers_the_faster_outside_of_the_noise(self) -> None:
        other = replace(SIMPLE, maxnreg=128)
        assert ranks(finalist(other, 1.0), finalist(SIMPLE, 1.004)) == {other: 1, SIMPLE: 2}

    def test_takes_the_noise_from_the_fastest_ones_spread(self) -> None:
        other = replace(SIMPLE, maxnreg=128)
        assert ranks(finalist(other, 1.0, 0.005), finalist(SIMPLE, 1.004)) == {SIMPLE: 1, other: 2}

    def test_never_takes_more_than_a_hundredth_for_noise(self) -> None:
        other = replace(SIMPLE, maxnreg=128)
        assert ranks(finalist(other, 1.0, 0.2), finalist(SIMPLE, 1.011)) == {other: 1, SIMPLE: 2}

    def test_of_one_is_the_winner(self) -> None:
        assert ranks(finalist(SIMPLE, 1.0)) == {SIMPLE: 1}

    def test_does_not_depend_on_the_order_of_the_finalists(self) -> None:
        finalists = [finalist(replace(SIMPLE, BLOCK_N=n), time) for n, time in ((16, 1.0), (32, 1.001), (64, 1.002))]
        assert ranks(*finalists) == ranks(*reversed(finalists))


@kernel
def test_a_compiler_that_fails_for_a_reason_of_the_machine_ends_the_job_with_our_error(
    evaluator: LocalEvaluator, fresh: Iterator[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: Future[CompileResult] = Future()
    broken.set_exception(OSError(28, "No space left on device"))
    monkeypatch.setattr(evaluator._compilers, "submit", lambda request: broken)
    with pytest.raises(FaAutotuneError, match=r"outside of the kernels.*No space left.*FA_AUTOTUNE_CACHE"):
        screened(evaluator, next(fresh))


def ended(result: CompileResult | Exception) -> Future[CompileResult]:
    future: Future[CompileResult] = Future()
    if isinstance(result, CompileResult):
        future.set_result(result)
    else:
        future.set_exception(result)
    return future


@kernel
def test_a_compiler_that_is_killed_is_a_fault_and_the_kernel_is_compiled_when_it_is_tried_again(
    evaluator: LocalEvaluator, fresh: Iterator[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = next(fresh)
    failed = CompileResult(status=TrialStatus.COMPILE_FAILED, error="planted")
    futures = [ended(MachineError("was killed by SIGKILL")), ended(failed)]
    monkeypatch.setattr(evaluator._compilers, "submit", lambda request: futures.pop(0))
    (fault,) = evaluator.screen([candidate], [PROBLEM])
    assert isinstance(fault, MachineFault)
    assert "SIGKILL" in fault.error
    assert screened(evaluator, candidate).error == "planted"


@kernel
def test_a_measuring_worker_that_is_killed_or_can_not_be_started_is_a_fault(
    evaluator: LocalEvaluator, fresh: Iterator[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate, killed = next(fresh), WorkerDied("was killed by SIGKILL")
    killed.signal = 9
    for error in (killed, OSError(12, "Cannot allocate memory")):

        def failing(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(evaluator._compilers, "submit", lambda request: ended(CompileResult(status=TrialStatus.OK)))
            patch.setattr(evaluator, "_call", failing)
            patch.setattr(evaluator, "_end_worker", lambda: None)
            assert [type(one) for one in evaluator.screen([candidate], [PROBLEM])] == [MachineFault]
            assert [type(one) for one in evaluator.confirm([candidate], PROBLEM)] == [MachineFault]


@kernel
@pytest.mark.rest
@pytest.mark.parametrize("statement", ["raise OSError(28, 'No space left on device')", "os.kill(os.getpid(), 9)"])
def test_a_fault_of_the_machine_while_a_kernel_runs_is_no_status_of_the_kernel(
    statement: str,
    evaluator: LocalEvaluator,
    fresh: Iterator[Candidate],
    good: Candidate,
    sabotages: Sabotages,
    tmp_path: Path,
) -> None:
    """… and where the machine is well again, the kernel is."""
    candidate, sick = next(fresh), tmp_path / "sick"
    sick.touch()
    sabotages[candidate] = before_each_launch("import os", f"if os.path.exists({str(sick)!r}): {statement}")
    (fault,) = evaluator.screen([candidate], [PROBLEM])
    assert isinstance(fault, MachineFault)
    good_record, fault = evaluator.confirm([candidate, good], PROBLEM)
    assert (good_record.candidate, isinstance(fault, MachineFault)) == (good, True)
    sick.unlink()
    assert screened(evaluator, candidate).status is TrialStatus.OK


def test_a_lock_that_can_not_be_written_is_our_error(
    on_gpu: Callable[[str], LocalEvaluator], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("fa_autotune.evaluation.evaluator.cache_dir", lambda: tmp_path / "file")
    with pytest.raises(FaAutotuneError, match=r"lock of GPU 0.*FA_AUTOTUNE_CACHE"):
        on_gpu("GPU-1")
