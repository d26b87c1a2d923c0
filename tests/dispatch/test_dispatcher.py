"""What a process remembers: its decisions, what it has told, and what it missed."""

import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fa_autotune.dispatch.decision import Decision
from fa_autotune.dispatch.dispatcher import MAX_REMEMBERED, Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import NoKernelError
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.problem import AttentionProblem
from kit.winners import H200, PROBLEM, T4, TRITON, dispatcher, winner

# --- decisions --------------------------------------------------------------------------------------------------------


def test_a_problem_is_decided_once() -> None:
    remembering = dispatcher(winner())
    assert remembering.decide(PROBLEM) is remembering.decide(AttentionProblem.from_key(PROBLEM.key))


def test_databases_are_read_once_and_only_on_the_first_decision() -> None:
    loads: list[int] = []

    def load() -> Snapshot:
        loads.append(1)
        return Snapshot(rows=(winner(),))

    lazy = Dispatcher(device=H200, triton_version=TRITON, load=load, digest_of=None, store_misses=lambda misses: None)
    assert not loads
    lazy.decide(PROBLEM)
    lazy.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    assert len(loads) == 1


def test_no_database_is_opened_after_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = Dispatcher(
        device=H200, triton_version=TRITON, digest_of=lambda candidate: "today", store_misses=lambda misses: None
    )
    assert remembering.snapshot.rows is not None

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a database was opened")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert remembering.decide(PROBLEM).candidate.family == PROBLEM.family


def test_eight_threads_start_one_dispatcher_cold() -> None:
    loads: list[int] = []
    start = threading.Barrier(8)

    def load() -> Snapshot:
        loads.append(1)
        return Snapshot(rows=(winner(),))

    shared = Dispatcher(device=H200, triton_version=TRITON, load=load, digest_of=None, store_misses=lambda misses: None)

    def work(_: int) -> Decision:
        start.wait(timeout=60)
        return shared.decide(PROBLEM)

    with ThreadPoolExecutor(8) as threads:
        decisions = list(threads.map(work, range(8)))
    assert len(loads) == 1
    assert len({id(decision) for decision in decisions}) == 1


def test_memory_of_decisions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.dispatch.dispatcher.MAX_REMEMBERED", 4)
    remembering = dispatcher()
    for length in range(1, 20):
        remembering.decide(replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=length)))
    assert len(remembering._remembered) == 4
    assert MAX_REMEMBERED > 1000


def test_a_problem_that_no_variant_serves_fails_the_same_way_again() -> None:
    turing = dispatcher(device=T4)
    messages = set()
    for _ in range(2):
        with pytest.raises(NoKernelError) as caught:
            turing.decide(PROBLEM)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_default_is_told_once_with_the_command_that_tunes(caplog: pytest.LogCaptureFixture) -> None:
    untuned = dispatcher()
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        untuned.decide(PROBLEM)
        untuned.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    (record,) = caplog.records
    assert "fa-autotune tune --missed" in record.getMessage()


def test_stale_winner_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stale = dispatcher(winner(triton="3.6.0"), winner("4x32x8x64x64x128,causal", triton="3.6.0"))
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        stale.decide(PROBLEM)
        stale.decide(AttentionProblem.parse("4x32x8x64x64x128,causal"))
    (record,) = caplog.records
    assert "measured with Triton 3.6.0" in record.getMessage()


def test_unreadable_databases_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    noted = Dispatcher(
        device=INTERPRETER,
        triton_version=TRITON,
        load=lambda: Snapshot(rows=(), notes=("x.db is not used",)),
        digest_of=None,
    )
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        noted.decide(PROBLEM)
        noted.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    assert [record.getMessage() for record in caplog.records] == ["tuning databases: x.db is not used"]


def test_tuned_problem_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        dispatcher(winner()).decide(PROBLEM)
    assert not caplog.records


# --- misses -----------------------------------------------------------------------------------------------------------


def test_what_is_not_exact_counts_as_a_miss() -> None:
    counting = dispatcher(winner())
    near = AttentionProblem.parse("4x32x8x4000x4000x128,causal")
    for problem in (PROBLEM, near, near):
        counting.decide(problem)
    assert counting.misses == {near: 2}


def test_flushed_misses_are_stored_and_forgotten() -> None:
    stored: list[dict[AttentionProblem, int]] = []
    counting = dispatcher(store=lambda misses: stored.append(dict(misses)))
    counting.decide(PROBLEM)
    assert (counting.flush_misses(), counting.flush_misses()) == (1, 0)
    assert stored == [{PROBLEM: 1}]


def test_interpreter_counts_no_misses() -> None:
    interpreting = dispatcher(device=INTERPRETER)
    interpreting.decide(PROBLEM)
    assert interpreting.misses == {}
