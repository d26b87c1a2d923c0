"""Misses: counted in memory, handed on once, and never a reason to fail."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from fa_autotune.dispatch.misses import MAX_PROBLEMS, MissLog
from fa_autotune.problem.problem import AttentionProblem
from kit.winners import PROBLEM


def test_misses_survive_a_store_that_fails() -> None:
    def failing(misses: Mapping[AttentionProblem, int]) -> None:
        raise OSError("read-only")

    log = MissLog(failing, at_exit=lambda flush: None)
    log.add(PROBLEM)
    with pytest.raises(OSError, match="read-only"):
        log.flush()
    assert log.counts == {PROBLEM: 1}


def test_failure_at_exit_is_told_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def failing(misses: Mapping[AttentionProblem, int]) -> None:
        raise OSError("read-only")

    at_exit: list[Callable[[], None]] = []
    log = MissLog(failing, at_exit=at_exit.append)
    log.add(PROBLEM)
    log.add(PROBLEM)
    (flush,) = at_exit
    with caplog.at_level(logging.INFO, "fa_autotune"):
        flush()
    assert "not recorded: read-only" in caplog.text


def test_a_fork_stores_nothing_at_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[object] = []
    at_exit: list[Callable[[], None]] = []
    log = MissLog(stored.append, at_exit=at_exit.append)
    log.add(PROBLEM)
    monkeypatch.setattr("os.getpid", lambda: -1)
    at_exit[0]()
    assert not stored


def test_misses_in_memory_are_bounded() -> None:
    log = MissLog(lambda misses: None, at_exit=lambda flush: None)
    for length in range(1, MAX_PROBLEMS + 10):
        log.add(replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=length)))
    assert len(log.counts) == MAX_PROBLEMS
    first = next(iter(log.counts))
    log.add(first)
    assert (log.counts[first], len(log.counts)) == (2, MAX_PROBLEMS)
