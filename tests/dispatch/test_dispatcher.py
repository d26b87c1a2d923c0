"""What a process remembers and chooses, what it has told, and what it missed."""

import gc
import logging
import random
import sqlite3
import sys
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType

import pytest

from fa_autotune.dispatch.decision import Decision
from fa_autotune.dispatch.dispatcher import MAX_REMEMBERED, Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import NoKernelError
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.problem import AttentionProblem
from kit.winners import A100, H100, H200, PORTABLE, PROBLEM, T4, TMA, TRITON, dispatcher, winner

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


def test_memory_of_families_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.dispatch.dispatcher.MAX_REMEMBERED_FAMILIES", 4)
    remembering = dispatcher()
    for head_dim in range(16, 256, 8):
        remembering.choose(AttentionProblem.parse(f"1x8x8x512x512x{head_dim}"))
    assert len(remembering._families) == 4


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


# --- choices ----------------------------------------------------------------------------------------------------------


def lengths(*numbers: int) -> list[AttentionProblem]:
    return [replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_q=n, seqlen_k=n)) for n in numbers]


def test_a_choice_is_what_is_explained() -> None:
    chosen = dispatcher(winner(), winner("4x32x8x64x64x128,causal", TMA, triton="3.6.0"))
    for problem in lengths(4096, 3000, 64, 100, 1):
        choice, decision = chosen.choose(problem), chosen.decide(problem)
        assert (choice.candidate, choice.origin, choice.stale) == (decision.candidate, decision.origin, decision.stale)
        assert (choice.source, choice.median_ms, choice.row) == (decision.source, decision.median_ms, decision.row)


def test_shapes_that_a_winner_serves_get_the_same_objects() -> None:
    row = winner(config=replace(PORTABLE, EXACT_LENGTHS=True))
    chosen = dispatcher(row)
    choices = [chosen.choose(problem) for problem in lengths(3000, 2048, 3001, 1024)]
    assert (choices[0] is choices[2], choices[1] is choices[3]) == (True, True)
    assert choices[1].candidate is chosen.choose(PROBLEM).candidate
    untuned = dispatcher()
    assert len({id(untuned.choose(problem)) for problem in lengths(1000, 2000, 3000)}) == 1


def test_winners_of_one_config_share_their_candidate() -> None:
    chosen = dispatcher(winner(), winner("4x32x8x64x64x128,causal"))
    first, second = (chosen.choose(problem) for problem in lengths(4096, 64))
    assert first is not second
    assert first.candidate is second.candidate


def test_what_is_chosen_ahead_counts_no_miss_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    untuned = dispatcher()
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        untuned.choose(PROBLEM, ahead=True)
        assert not caplog.records
        untuned.choose(PROBLEM)
    assert untuned.misses == {PROBLEM: 1}
    assert len(caplog.records) == 1


def test_a_new_shape_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("_Trace", "Decision", "config_label", "rejection"):
        monkeypatch.setattr(f"fa_autotune.dispatch.decision.{name}", lambda *_, name=name, **__: told.append(name))
    tuned, untuned = dispatcher(winner(), winner(config=TMA, device=H100)), dispatcher(winner(), device=A100)
    for problem in lengths(*range(1, 4100, 41)):
        for one in (tuned, untuned):
            one._warned.add("default")
            one.choose(problem)
            one.backward_way(problem, unordered=True)
    assert told == []


def test_a_new_shape_takes_few_calls() -> None:
    """By the number of Python functions that run: a measure that no busy machine changes."""
    tuned = dispatcher(*(winner(problem) for problem in lengths(*range(100, 2100, 100))))
    problems = lengths(*range(1001, 1099))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        calls[event] += 1

    for ask, most in ((tuned.choose, 70), (tuned.backward_way, 80)):
        for problem in problems:  # what follows from the family is worked out
            ask(problem)
        calls.clear()
        gc.disable()  # other tests' libraries have functions of theirs called when it collects
        sys.setprofile(count)
        try:
            for problem in problems:
                ask(problem)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert calls["call"] / len(problems) <= most


def test_a_new_shape_takes_little_memory() -> None:
    """A miss is all that is kept of it; its numbers are part of that, its family is not."""
    growing = dispatcher(winner())
    texts = [f"4x32x8x{n}x{n}x128,causal" for n in range(5000, 6000)]
    growing.choose(PROBLEM)
    tracemalloc.start()
    try:
        for text in texts:
            growing.choose(AttentionProblem.parse(text))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(growing.misses) == len(texts)
    assert size / len(texts) <= 400


def test_eight_threads_choose_alike() -> None:
    shared, problems = dispatcher(winner(), winner(config=TMA, device=H100)), lengths(*range(1, 400))
    start = threading.Barrier(8)

    def work(seed: int) -> dict[AttentionProblem, int]:
        start.wait(timeout=60)
        order = random.Random(seed).sample(problems, len(problems))
        return {problem: id(shared.choose(problem)) for problem in order}

    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(work, range(8))
    assert all(other == first for other in others)
    assert set(shared.misses.values()) == {8}


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
