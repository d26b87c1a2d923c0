"""The worker: every way a job can go wrong is a named error, and the next job works."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from fa_autotune.errors import WorkerDied, WorkerError, WorkerTimeout
from fa_autotune.worker import Worker, WorkerPool
from kit import worker_jobs as jobs

PATIENCE_S = 60.0  # deadlines that are not meant to pass; generous, since the machine may be busy
SHORT_S = 1.0  # deadlines that are


def is_gone(pid: int) -> bool:
    """True if no such process runs (a zombie does not run)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(holds: Callable[[], bool]) -> bool:
    patience = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > patience:
            return False
        time.sleep(0.01)
    return True


def pid_in(file: Path) -> int:
    assert wait_until(lambda: file.is_file() and bool(file.read_text()))
    return int(file.read_text())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(name="test") as worker:
        yield worker


def assert_works(worker: Worker) -> None:
    assert worker.call(jobs.add, 2, 3, deadline_s=PATIENCE_S) == 5


class TestAJobThatWorks:
    def test_returns_its_result(self, worker: Worker) -> None:
        assert worker.call(jobs.add, 2, 3, deadline_s=PATIENCE_S) == 5

    def test_runs_in_another_process(self, worker: Worker) -> None:
        assert worker.call(jobs.process_id, deadline_s=PATIENCE_S) != os.getpid()

    def test_finds_the_same_process_as_the_one_before(self, worker: Worker) -> None:
        worker.call(jobs.count_calls, deadline_s=PATIENCE_S)
        assert worker.call(jobs.count_calls, deadline_s=PATIENCE_S) == 2

    def test_may_take_and_return_more_than_a_pipe_holds(self, worker: Worker) -> None:
        payload = os.urandom(3_000_000)
        assert worker.call(jobs.echo, payload, deadline_s=PATIENCE_S) == payload

    def test_may_print_megabytes(self, worker: Worker) -> None:
        assert worker.call(jobs.print_megabytes, 8, deadline_s=PATIENCE_S) == 8

    def test_sees_the_parents_search_path(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend("/somewhere/of/our/own")
        assert worker.call(jobs.search_path, deadline_s=PATIENCE_S) == [os.path.abspath(entry) for entry in sys.path]

    def test_leaves_programs_it_starts_with_the_parents_python_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/the/users/own")
        with Worker(name="test") as worker:
            assert worker.call(jobs.environ, "PYTHONPATH", deadline_s=PATIENCE_S) == "/the/users/own"

    def test_does_not_import_the_users_script_again(self, tmp_path: Path) -> None:
        script = tmp_path / "users_script.py"
        script.write_text(
            "from kit import worker_jobs\nfrom fa_autotune.worker import Worker\nprint('imported')\n"
            "with Worker(name='w') as worker:\n    print(worker.call(worker_jobs.add, 1, 2, deadline_s=60))\n"
        )
        done = subprocess.run(
            [sys.executable, script], env=script_environ(), capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["imported", "3"]


class TestTheEnvironment:
    def test_is_the_parents_at_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FA_TEST_VALUE", "inherited")
        with Worker(name="test") as worker:
            assert worker.call(jobs.environ, "FA_TEST_VALUE", deadline_s=PATIENCE_S) == "inherited"

    def test_takes_overrides(self) -> None:
        with Worker(name="test", environ={"FA_TEST_VALUE": "ours"}) as worker:
            assert worker.call(jobs.environ, "FA_TEST_VALUE", deadline_s=PATIENCE_S) == "ours"

    def test_lacks_what_is_overridden_with_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FA_TEST_VALUE", "inherited")
        with Worker(name="test", environ={"FA_TEST_VALUE": None}) as worker:
            assert worker.call(jobs.environ, "FA_TEST_VALUE", deadline_s=PATIENCE_S) is None


class TestAJobThatFails:
    def test_raises_its_own_exception(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match=r"^no such tile$"):
            worker.call(jobs.fail, "no such tile", deadline_s=PATIENCE_S)

    def test_says_where_it_raised(self, worker: Worker) -> None:
        with pytest.raises(ValueError, match="no such tile") as caught:
            worker.call(jobs.fail, "no such tile", deadline_s=PATIENCE_S)
        assert "in fail" in str(caught.value.__cause__)

    def test_with_an_unpicklable_exception_is_a_worker_error_with_its_text(self, worker: Worker) -> None:
        with pytest.raises(WorkerError, match="salt and pepper"):
            worker.call(jobs.fail_unpicklably, deadline_s=PATIENCE_S)

    def test_with_an_unpicklable_result_is_a_worker_error(self, worker: Worker) -> None:
        with pytest.raises(WorkerError, match="result, a function, can't be pickled"):
            worker.call(jobs.return_lambda, deadline_s=PATIENCE_S)

    def test_by_sys_exit_does_not_end_the_parent(self, worker: Worker) -> None:
        with pytest.raises(WorkerError, match="SystemExit: 7"):
            worker.call(jobs.exit_softly, 7, deadline_s=PATIENCE_S)

    def test_leaves_the_same_process_for_the_next_job(self, worker: Worker) -> None:
        before = worker.call(jobs.process_id, deadline_s=PATIENCE_S)
        with pytest.raises(ValueError, match="oh"):
            worker.call(jobs.fail, "oh", deadline_s=PATIENCE_S)
        assert worker.call(jobs.process_id, deadline_s=PATIENCE_S) == before

    def test_because_it_is_no_module_function_says_so(self, worker: Worker) -> None:
        with pytest.raises(WorkerError, match="function at the top of a module"):
            worker.call(lambda: None, deadline_s=PATIENCE_S)

    def test_because_its_module_is_missing_says_so(self, worker: Worker, tmp_path: Path) -> None:
        class Stranger:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return __import__, ("module_that_is_nowhere",)

        with pytest.raises(WorkerError, match="can't be loaded: ModuleNotFoundError"):
            worker.call(jobs.echo, Stranger(), deadline_s=PATIENCE_S)  # type: ignore[arg-type]


class TestAJobThatKillsItsProcess:
    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
    def test_by_a_signal_names_it(self, worker: Worker, number: signal.Signals) -> None:
        with pytest.raises(WorkerDied, match=f"killed by {number.name}"):
            worker.call(jobs.die_by, int(number), deadline_s=PATIENCE_S)

    def test_by_a_real_segmentation_fault_says_in_which_function(self, worker: Worker) -> None:
        with pytest.raises(WorkerDied, match=r"(?s)killed by SIGSEGV.*touch_null"):
            worker.call(jobs.touch_null, deadline_s=PATIENCE_S)

    def test_by_exit_names_the_code_and_shows_what_it_printed(self, worker: Worker) -> None:
        with pytest.raises(WorkerDied, match=r"(?s)exited with code 3.*last words"):
            worker.call(jobs.exit_hard, 3, deadline_s=PATIENCE_S)

    def test_after_printing_megabytes_shows_only_the_end(self, worker: Worker) -> None:
        with pytest.raises(WorkerDied, match="the end is near") as caught:
            worker.call(jobs.print_and_die, 4, deadline_s=PATIENCE_S)
        assert len(str(caught.value)) < 4000

    def test_leaves_a_fresh_process_for_the_next_job(self, worker: Worker) -> None:
        with pytest.raises(WorkerDied):
            worker.call(jobs.exit_hard, 3, deadline_s=PATIENCE_S)
        assert_works(worker)

    def test_takes_its_children_along(self, worker: Worker, tmp_path: Path) -> None:
        with pytest.raises(WorkerDied, match="exited with code 1"):
            worker.call(jobs.leave_child_behind, tmp_path / "pid", deadline_s=PATIENCE_S)
        assert wait_until(lambda: is_gone(pid_in(tmp_path / "pid")))

    def test_while_idle_is_not_the_next_jobs_fault(self, worker: Worker) -> None:
        pid = worker.call(jobs.process_id, deadline_s=PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: is_gone(pid))
        assert_works(worker)


class TestAJobPastItsDeadline:
    def test_is_a_timeout_that_names_job_and_deadline(self, worker: Worker) -> None:
        with pytest.raises(WorkerTimeout, match="sleep passed its deadline of 1 s"):
            worker.call(jobs.sleep, 300.0, deadline_s=SHORT_S)

    def test_in_an_endless_loop_is_killed(self, worker: Worker, tmp_path: Path) -> None:
        assert_works(worker)
        with pytest.raises(WorkerTimeout):
            worker.call(jobs.announce_and_spin, tmp_path / "pid", deadline_s=SHORT_S)
        assert is_gone(pid_in(tmp_path / "pid"))

    def test_while_it_holds_the_interpreter_lock_is_killed(self, worker: Worker) -> None:
        with pytest.raises(WorkerTimeout):
            worker.call(jobs.hang_holding_the_interpreter_lock, 300, deadline_s=SHORT_S)

    def test_takes_its_children_along(self, worker: Worker, tmp_path: Path) -> None:
        assert_works(worker)
        with pytest.raises(WorkerTimeout):
            worker.call(jobs.wait_for_child, tmp_path / "pid", deadline_s=SHORT_S)
        assert wait_until(lambda: is_gone(pid_in(tmp_path / "pid")))

    def test_leaves_a_fresh_process_for_the_next_job(self, worker: Worker) -> None:
        with pytest.raises(WorkerTimeout):
            worker.call(jobs.spin, deadline_s=SHORT_S)
        assert_works(worker)


class TestEndings:
    def test_interrupting_a_call_kills_the_job(self, worker: Worker, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        interrupter = threading.Thread(target=lambda: pid_in(file) and os.kill(os.getpid(), signal.SIGINT))
        # A run that was started in the background inherits that interrupts are ignored.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                worker.call(jobs.announce_and_spin, file, deadline_s=PATIENCE_S)
            interrupter.join()
        finally:
            signal.signal(signal.SIGINT, inherited)
        assert is_gone(pid_in(file))

    def test_a_worker_ignores_an_interrupt_of_its_own(self, worker: Worker) -> None:
        os.kill(worker.call(jobs.process_id, deadline_s=PATIENCE_S), signal.SIGINT)
        assert_works(worker)

    def test_a_closed_worker_refuses_jobs(self, worker: Worker) -> None:
        worker.close()
        with pytest.raises(WorkerError, match="was closed"):
            worker.call(jobs.add, 1, 2, deadline_s=PATIENCE_S)

    def test_closing_stops_a_running_job(self, worker: Worker, tmp_path: Path) -> None:
        closer = threading.Thread(target=lambda: pid_in(tmp_path / "pid") and worker.close())
        closer.start()
        with pytest.raises(WorkerError, match="closed while it ran announce_and_spin"):
            worker.call(jobs.announce_and_spin, tmp_path / "pid", deadline_s=PATIENCE_S)
        closer.join()

    @pytest.mark.parametrize("job", [jobs.announce_and_spin, jobs.announce_and_hold_the_interpreter_lock])
    def test_a_worker_dies_with_its_parent(self, job: Callable[[Path], None], tmp_path: Path) -> None:
        script = (
            "import pathlib, sys\nfrom kit import worker_jobs\nfrom fa_autotune.worker import Worker\n"
            f"Worker(name='w').call(worker_jobs.{job.__name__}, pathlib.Path(sys.argv[1]), deadline_s=300)"
        )
        file = tmp_path / "pid"
        parent = subprocess.Popen([sys.executable, "-c", script, file], env=script_environ())
        pid = pid_in(file)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: is_gone(pid))

    def test_many_cycles_leak_no_descriptors(self) -> None:
        with Worker(name="warm") as worker:
            assert_works(worker)
        before = open_descriptors()
        for _ in range(8):
            with Worker(name="test") as worker, pytest.raises(WorkerDied):
                worker.call(jobs.exit_hard, 1, deadline_s=PATIENCE_S)
        assert open_descriptors() == before

    def test_a_closed_worker_leaves_no_zombie(self, worker: Worker) -> None:
        pid = worker.call(jobs.process_id, deadline_s=PATIENCE_S)
        worker.close()
        assert not Path(f"/proc/{pid}").exists()

    def test_a_fresh_process_takes_over_after_max_jobs(self) -> None:
        with Worker(name="test", max_jobs=2) as worker:
            assert [worker.call(jobs.count_calls, deadline_s=PATIENCE_S) for _ in range(3)] == [1, 2, 1]


class TestPool:
    def test_runs_more_jobs_than_it_has_workers(self) -> None:
        with WorkerPool(2, name="pool") as pool:
            futures = [pool.submit(jobs.add, i, i, deadline_s=PATIENCE_S) for i in range(5)]
            assert [future.result() for future in futures] == [0, 2, 4, 6, 8]

    def test_runs_jobs_side_by_side(self, tmp_path: Path) -> None:
        with WorkerPool(2, name="pool") as pool:
            for name in ("first", "second"):
                pool.submit(jobs.announce_and_spin, tmp_path / name, deadline_s=PATIENCE_S)
            assert pid_in(tmp_path / "first") != pid_in(tmp_path / "second")
            pool.close(cancel=True)

    def test_goes_on_after_a_crash(self) -> None:
        with WorkerPool(1, name="pool") as pool:
            crash = pool.submit(jobs.exit_hard, 1, deadline_s=PATIENCE_S)
            after = pool.submit(jobs.add, 1, 2, deadline_s=PATIENCE_S)
            assert isinstance(crash.exception(), WorkerDied)
            assert after.result() == 3

    def test_turns_a_failure_into_a_result_where_asked(self) -> None:
        with WorkerPool(1, name="pool") as pool:
            future = pool.submit(jobs.sleep, 300.0, deadline_s=SHORT_S, recover=lambda error: type(error).__name__)
            assert future.result() == "WorkerTimeout"

    def test_closing_waits_for_queued_jobs(self) -> None:
        pool = WorkerPool(1, name="pool")
        futures = [pool.submit(jobs.add, i, 1, deadline_s=PATIENCE_S) for i in range(3)]
        pool.close(cancel=False)
        assert [future.result(timeout=0) for future in futures] == [1, 2, 3]

    def test_closing_with_cancel_kills_running_jobs_and_cancels_queued_ones(self, tmp_path: Path) -> None:
        pool = WorkerPool(1, name="pool")
        running = pool.submit(jobs.announce_and_spin, tmp_path / "pid", deadline_s=PATIENCE_S)
        queued = pool.submit(jobs.add, 1, 2, deadline_s=PATIENCE_S)
        pid_in(tmp_path / "pid")
        pool.close(cancel=True)
        assert isinstance(running.exception(), WorkerError)
        with pytest.raises(CancelledError):
            queued.result()

    def test_does_not_run_a_canceled_job(self, tmp_path: Path) -> None:
        with WorkerPool(1, name="pool") as pool:
            pool.submit(jobs.sleep, 0.2, deadline_s=PATIENCE_S)
            canceled = pool.submit(jobs.wait_for_child, tmp_path / "pid", deadline_s=PATIENCE_S)
            assert canceled.cancel()
        assert not (tmp_path / "pid").exists()

    def test_refuses_jobs_once_closed(self) -> None:
        pool = WorkerPool(1, name="pool")
        pool.close(cancel=False)
        with pytest.raises(WorkerError, match="is closed"):
            pool.submit(jobs.add, 1, 2, deadline_s=PATIENCE_S)

    def test_without_workers_is_refused(self) -> None:
        with pytest.raises(WorkerError, match="size=0"):
            WorkerPool(0, name="pool")


def script_environ() -> dict[str, str]:
    """Environment in which a script finds this checkout and these tests."""
    tests = Path(__file__).resolve().parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
