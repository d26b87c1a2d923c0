"""Jobs that may hang or crash, run in subprocesses with a deadline.

A worker is started as `python -m fa_autotune.worker`, never by multiprocessing, so the user's `__main__` is not
imported again. Pickles with a length prefix travel over pipes of their own: what a job prints can't be mistaken for
its result. Each worker leads a process group, which is killed as a whole: compilers start assemblers.
"""

import faulthandler
import fcntl
import os
import pickle
import queue
import resource
import select
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType, TracebackType
from typing import BinaryIO, Self, TypeVar, TypeVarTuple, cast

from fa_autotune.errors import WorkerDied, WorkerError, WorkerTimeout

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 65536
_TAIL_BYTES = 16384  # of a job's output, kept in case it fails: compilers print pages of intermediate code
_SHOWN_CHARACTERS = 2000
_DEATH_GRACE_S = 2.0  # between the end of a worker's pipe and the end of its process
_LONGEST_WAIT_S = 3600.0
_NO_OVERRIDES: Mapping[str, str | None] = MappingProxyType({})

# The kinds of reply: the job's value, the exception it raised, or text where neither can be pickled.
_VALUE, _RAISED, _FAILED = "value", "raised", "failed"


class Worker:
    """One subprocess that runs picklable jobs one at a time, each with a deadline.

    It starts with the first job and again after a job that hung or crashed. `environ` overrides this process's
    environment; None removes a variable. After `max_jobs` jobs a fresh process takes over. Safe for several threads.
    """

    def __init__(
        self, *, name: str, environ: Mapping[str, str | None] = _NO_OVERRIDES, max_jobs: int | None = None
    ) -> None:
        self._name = name
        self._environ = dict(environ)
        self._max_jobs = max_jobs
        self._process: _Process | None = None
        self._closed = False
        self._lock = threading.Lock()

    def call(self, job: Callable[[*Ts], T], /, *args: *Ts, deadline_s: float) -> T:
        """Run `job(*args)` in the subprocess; the deadline includes starting it.

        The job must be a function of an importable module. Its own exception is raised again here, caused by a
        WorkerError with its traceback and output. Raises WorkerTimeout or WorkerDied, and WorkerError where the job,
        its result or its exception can't be pickled.
        """
        request = _pickled_job(job, args)
        with self._lock:
            deadline = time.monotonic() + deadline_s
            process = self._ready_process()
            try:
                if self._closed:
                    raise WorkerError(f"worker {self._name} was closed; start another one")
                reply = process.exchange(request, deadline)
            except BaseException as error:
                self._discard()
                if self._closed and isinstance(error, WorkerDied):
                    raise WorkerError(f"worker {self._name} was closed while it ran {_job_name(job)}") from None
                if isinstance(error, _DeadlinePassed):
                    raise WorkerTimeout(
                        f"{_job_name(job)} passed its deadline of {deadline_s:g} s in worker {self._name}; it and its "
                        f"children were killed. On a slow machine allow it more time{process.shown_tail()}"
                    ) from None
                raise
            output = process.shown_tail()
            if process.jobs_done == self._max_jobs:
                self._discard()
        return cast(T, _unpacked(reply, self._name, output))

    def close(self) -> None:
        """Kill the subprocess and its children, also in the middle of a job; later calls raise WorkerError."""
        self._closed = True
        if process := self._process:
            process.kill()
        with self._lock:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready_process(self) -> "_Process":
        if self._process is not None and not self._process.is_alive():
            self._discard()  # it died while idle; the next job is not to blame
        if self._process is None:
            self._process = _Process(self._name, self._environ)
        return self._process

    def _discard(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


class WorkerPool:
    """Workers that share one queue of jobs, first come first served; each starts when it gets its first job."""

    def __init__(
        self,
        size: int,
        *,
        name: str,
        environ: Mapping[str, str | None] = _NO_OVERRIDES,
        max_jobs: int | None = None,
    ) -> None:
        if size < 1:
            raise WorkerError(f"size={size} leaves pool {name} without workers; use at least 1")
        self._name = name
        self._closed = False
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[Worker | None], None] | None] = queue.SimpleQueue()
        self._workers = [Worker(name=f"{name}-{i}", environ=environ, max_jobs=max_jobs) for i in range(size)]
        self._threads = [
            threading.Thread(target=_serve, args=(self._tasks, worker), name=f"{name}-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        job: Callable[[*Ts], T],
        /,
        *args: *Ts,
        deadline_s: float,
        recover: Callable[[Exception], T] | None = None,
    ) -> Future[T]:
        """Queue `job(*args)`; its deadline starts when a worker takes it.

        `recover` may turn what `Worker.call` raised into the result; it runs in a thread of the pool.
        """
        future: Future[T] = Future()

        def task(worker: Worker | None) -> None:
            if worker is None:
                future.cancel()
                return
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(_recovered(lambda: worker.call(job, *args, deadline_s=deadline_s), recover))
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever holds the future
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise WorkerError(f"pool {self._name} is closed; start another one")
            self._tasks.put(task)
        return future

    def close(self, *, cancel: bool) -> None:
        """Stop the workers: after the queued jobs, or with `cancel` at once.

        Canceled jobs that have not started have canceled futures; one that runs is killed and gets a WorkerError.
        """
        with self._lock:
            self._closed = True
        if cancel:
            while (task := _next_task(self._tasks)) is not None:
                task(None)
            for worker in self._workers:
                worker.close()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def _serve(tasks: "queue.SimpleQueue[Callable[[Worker | None], None] | None]", worker: Worker) -> None:
    while (task := tasks.get()) is not None:
        task(worker)


def _next_task(
    tasks: "queue.SimpleQueue[Callable[[Worker | None], None] | None]",
) -> Callable[[Worker | None], None] | None:
    try:
        return tasks.get_nowait()
    except queue.Empty:
        return None


def _recovered(call: Callable[[], T], recover: Callable[[Exception], T] | None) -> T:
    try:
        return call()
    except Exception as error:
        if recover is None:
            raise
        return recover(error)


# --- the parent's side of one subprocess ------------------------------------------------------------------------------


class _DeadlinePassed(Exception):
    """Between `_Process` and `Worker`, which knows what to say about it."""


class _Process:
    """A running worker: its process group and the parent's ends of its pipes."""

    def __init__(self, name: str, environ: Mapping[str, str | None]) -> None:
        self.jobs_done = 0
        self._name = name
        self._tail = bytearray()
        self._kill_lock = threading.Lock()
        self._reaped = False
        jobs_read, self._jobs = os.pipe()
        self._results, results_write = os.pipe()
        self._output, output_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        childs_ends = (jobs_read, results_write, lifeline_read)
        values = {**os.environ, **environ}
        original_path = values.get("PYTHONPATH")
        values["PYTHONPATH"] = os.pathsep.join(_search_path())
        command = [sys.executable, "-P", "-m", "fa_autotune.worker", *map(str, childs_ends)]
        try:
            self._popen = subprocess.Popen(
                command if original_path is None else [*command, original_path],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=childs_ends,
                start_new_session=True,  # a process group of its own, out of reach of the terminal's Ctrl-C
                env={key: value for key, value in values.items() if value is not None},
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for descriptor in (*childs_ends, output_write):
                os.close(descriptor)
        os.set_blocking(self._jobs, False)
        os.set_blocking(self._output, False)

    def is_alive(self) -> bool:
        """True unless the process has ended."""
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """Kill the process group. Until it is reaped its number can't belong to another one."""
        with self._kill_lock:
            if not self._reaped:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill, reap and close everything."""
        self.kill()
        with self._kill_lock:
            self._popen.wait()
            self._reaped = True
        self._close_pipes()

    def exchange(self, request: bytes, deadline: float) -> bytes:
        """Send a job and wait for its reply. Output is read all the while, so a job that prints a lot goes on."""
        self._read_output()
        self._tail.clear()
        outgoing = memoryview(_LENGTH.pack(len(request)) + request)
        incoming = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._jobs, selectors.EVENT_WRITE)
            selector.register(self._results, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            while len(incoming) < _LENGTH.size or len(incoming) < _LENGTH.size + _LENGTH.unpack_from(incoming)[0]:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise _DeadlinePassed
                for key, _ in selector.select(min(remaining_s, _LONGEST_WAIT_S)):
                    if key.fd == self._jobs:
                        outgoing = outgoing[self._send(outgoing) :]
                        if not outgoing:
                            selector.unregister(self._jobs)
                    elif key.fd == self._output:
                        if not self._read_output():
                            selector.unregister(self._output)
                    else:
                        incoming += self._receive()
        self._read_output()
        self.jobs_done += 1
        return bytes(incoming[_LENGTH.size :])

    def shown_tail(self) -> str:
        """The last lines that the job printed, as the end of a message; empty if there are none."""
        text = self._tail.decode(errors="replace").strip()
        if not text:
            return ""
        shown = text if len(text) <= _SHOWN_CHARACTERS else f"[…]{text[-_SHOWN_CHARACTERS:]}"
        return f"\nIts last output:\n{shown}"

    def _send(self, outgoing: memoryview) -> int:
        try:
            return os.write(self._jobs, outgoing[:_CHUNK_BYTES])
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> bytes:
        if chunk := os.read(self._results, _CHUNK_BYTES):
            return chunk
        raise self._death()

    def _read_output(self) -> bool:
        """Move what was printed into the bounded tail; False once nobody can print any more."""
        while True:
            try:
                chunk = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]
            if len(chunk) < _CHUNK_BYTES:
                return True

    def _death(self) -> WorkerDied:
        patience = time.monotonic() + _DEATH_GRACE_S
        while self.is_alive() and time.monotonic() < patience:
            time.sleep(0.002)
        self._read_output()
        how, number = "closed its pipes without an answer", None
        if ended := os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            how = f"exited with code {ended.si_status}"
            if ended.si_code != os.CLD_EXITED:
                number = ended.si_status
                how = f"was killed by {signal.Signals(number).name}"
                if number == signal.SIGKILL:
                    how += " (by the system, if memory ran out)"
        death = WorkerDied(f"worker {self._name} {how} in the middle of a job{self.shown_tail()}")
        death.signal = number
        return death

    def _close_pipes(self) -> None:
        for descriptor in (self._jobs, self._results, self._output, self._lifeline):
            os.close(descriptor)


def _search_path() -> list[str]:
    """This process's module search path, independent of the working directory."""
    return [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]


def _job_name(job: Callable[..., object]) -> str:
    return getattr(job, "__qualname__", repr(job))


def _pickled_job(job: Callable[..., object], args: tuple[object, ...]) -> bytes:
    if getattr(job, "__module__", None) == "__main__":
        raise WorkerError(
            f"{_job_name(job)} is a function of __main__, which a worker never imports; move it to a module"
        )
    try:
        return pickle.dumps((_search_path(), pickle.dumps((job, args))))
    except Exception as error:
        raise WorkerError(
            f"{_job_name(job)} can't be sent to a worker ({type(error).__name__}: {error}); "
            "use a function at the top of a module and picklable arguments"
        ) from error


def _unpacked(reply: bytes, name: str, output: str) -> object:
    kind, payload, text = pickle.loads(reply)
    if kind == _FAILED:
        raise WorkerError(f"worker {name}: {text}{output}")
    try:
        value = pickle.loads(payload)
    except Exception as error:
        raise WorkerError(
            f"worker {name}: the job's result can't be read here ({type(error).__name__}: {error})"
        ) from error
    if kind == _RAISED:
        raise value from WorkerError(f"raised in worker {name}:\n{text}{output}")
    return value


# --- the subprocess's side --------------------------------------------------------------------------------------------


def _main(jobs_fd: int, results_fd: int, lifeline_fd: int, python_path: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (jobs_fd, results_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)  # or an assembler left behind would keep them open
    _die_with_parent(lifeline_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=False)
    sys.stdout = sys.stderr
    del os.environ["PYTHONPATH"]  # meant for this interpreter only, not for programs that a job starts
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path
    with os.fdopen(jobs_fd, "rb") as jobs, os.fdopen(results_fd, "wb") as results:
        while (request := _read_frame(jobs)) is not None:
            reply = _run(request)
            sys.stderr.flush()
            results.write(_LENGTH.pack(len(reply)) + reply)
            results.flush()


def _die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process group once the parent's end of the lifeline closes.

    A watching thread could not: a compiler that hangs may hold the interpreter lock. PR_SET_PDEATHSIG could not either:
    it fires when the parent's thread ends.
    """
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # closed before the kernel was told
        os.killpg(0, signal.SIGKILL)


def _read_frame(jobs: BinaryIO) -> bytes | None:
    header = jobs.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    body = jobs.read(_LENGTH.unpack(header)[0])
    return body if len(body) == _LENGTH.unpack(header)[0] else None


def _run(request: bytes) -> bytes:
    search_path, pickled = pickle.loads(request)
    sys.path[:] = search_path
    try:
        job, args = pickle.loads(pickled)
    except Exception as error:  # noqa: BLE001 - importing the job's module may raise anything
        return _reply(_FAILED, text=f"the job can't be loaded: {type(error).__name__}: {error}")
    try:
        value = job(*args)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return _pickled_exception(error)
    try:
        return _reply(_VALUE, pickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - pickling calls code of the value's class
        kind = type(value).__qualname__
        return _reply(_FAILED, text=f"the job's result, a {kind}, can't be pickled: {type(error).__name__}: {error}")


def _pickled_exception(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).strip()
    if not isinstance(error, Exception):  # SystemExit must not end the parent
        return _reply(_FAILED, text=f"the job raised {type(error).__name__}: {error}")
    try:
        payload = pickle.dumps(error.with_traceback(None))
        if type(pickle.loads(payload)) is type(error):
            return _reply(_RAISED, payload, text)
    except Exception:  # noqa: BLE001 - then it travels as text
        pass
    return _reply(_FAILED, text=f"the job raised an exception that can't be pickled:\n{text}")


def _reply(kind: str, payload: bytes = b"", text: str = "") -> bytes:
    return pickle.dumps((kind, payload, text))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
