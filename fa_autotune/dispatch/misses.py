"""Problems that a process met without an exact winner: counted in memory, handed to a store when flushed or at exit."""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem, AttentionShape

MAX_PROBLEMS = 4096  # distinct problems kept between two flushes; later ones are not worth more memory

Store = Callable[[Mapping[AttentionProblem, int]], None]

_logger = logging.getLogger("fa_autotune")


class MissLog:
    """Counts misses of one device. Thread-safe; the process that counted them stores them, not its forks.

    Of a problem its shape alone is kept, beside its family's others.
    """

    def __init__(self, store: Store, *, at_exit: Callable[[Callable[[], None]], object] = atexit.register) -> None:
        """`store` may raise; `at_exit` is called once, with what is to run at exit, on the first miss."""
        self._store = store
        self._at_exit = at_exit
        self._counts: dict[AttentionFamily, dict[AttentionShape, int]] = {}
        self._size = 0
        self._lock = threading.Lock()
        self._owner_pid: int | None = None

    @property
    def counts(self) -> dict[AttentionProblem, int]:
        """How often each problem was met since the last flush."""
        with self._lock:
            return _by_problem(self._counts)

    def add(self, problem: AttentionProblem, count: int = 1) -> None:
        """Count a miss; new problems past MAX_PROBLEMS are dropped."""
        with self._lock:
            if self._owner_pid is None:
                self._owner_pid = os.getpid()
                self._at_exit(self._flush_at_exit)
            self._add(problem, count)

    def flush(self) -> int:
        """Hand the counts to the store and forget them; gives their number. If the store raises, they are kept."""
        with self._lock:
            pending = _by_problem(self._counts)
            self._counts, self._size = {}, 0
        if not pending:
            return 0
        try:
            self._store(pending)
        except BaseException:
            with self._lock:
                for problem, count in pending.items():
                    self._add(problem, count)
            raise
        return len(pending)

    def _add(self, problem: AttentionProblem, count: int) -> None:
        shapes = self._counts.get(problem.family)
        if shapes is None:
            shapes = self._counts[problem.family] = {}
        known = shapes.get(problem.shape)
        if known is None and self._size >= MAX_PROBLEMS:
            return
        shapes[problem.shape] = count + (known or 0)
        self._size += known is None

    def _flush_at_exit(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001  a process that ends well must not end with our noise
            _logger.info("misses are not recorded: %s", error)


def _by_problem(counts: Mapping[AttentionFamily, Mapping[AttentionShape, int]]) -> dict[AttentionProblem, int]:
    return {
        AttentionProblem(family=family, shape=shape): count
        for family, shapes in counts.items()
        for shape, count in shapes.items()
    }
