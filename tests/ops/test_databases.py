"""Calls and the databases that they read and write: winners, files that are none, misses."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_autotune import attention, explain, flush_misses, warmup
from fa_autotune.database import SessionKind, TuningDatabase
from fa_autotune.dispatch import loaded_kernels as live_kernels
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from kit.attention_calls import assert_right, interpreted, make, runs_kernels
from kit.tuning_samples import confirmed

PROBLEM = AttentionProblem.parse("2x4x2x37x41x32,causal")
WINNER = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)


@pytest.fixture
def user_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None) -> Path:
    """Where a cold process finds its user's database."""
    path = tmp_path / "tuning.db"
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(path))
    return path


def store_winner(path: Path) -> None:
    """WINNER as PROBLEM's winner on the interpreter, where tma would be the default."""
    with TuningDatabase(path) as database:
        session = database.begin_session(
            kind=SessionKind.CONFIRM, device=INTERPRETER, toolchain=Toolchain(triton="3.7.1")
        )
        database.save_trial(session, confirmed(1.0, 1, WINNER.BLOCK_M, problem=PROBLEM))


def tamper(path: Path, statement: str, value: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement, (value,)).rowcount == 1


@runs_kernels
@interpreted
def test_a_winner_of_the_users_database_runs(user_database: Path, loads: list[Candidate]) -> None:
    store_winner(user_database)
    assert_right(*make(), causal=True)
    assert [(loaded.variant, loaded.config) for loaded in loads] == [(Variant.PORTABLE, WINNER)]


@runs_kernels
@interpreted
@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE kernels SET config = replace(config, '\"BLOCK_M\":64', ?)", f'"BLOCK_M":{value}')
        for value in ("1048576", "0", "-32", "48", "true", "32.0", "null", '"32"', '"{{ 7 * 7 }}"', '"__import__(1)"')
    ]
    + [
        ("UPDATE kernels SET config = replace(config, '\"num_warps\":4', ?)", '"num_warps":64'),
        ("UPDATE kernels SET config = replace(config, '\"EXACT_LENGTHS\":false', ?)", '"EXACT_LENGTHS":true'),
        ("UPDATE kernels SET config = ?", "[" * 100_000),
        ("UPDATE kernels SET config = ?", "{}"),
        ("UPDATE kernels SET variant = ?", "../../evil"),
        ("UPDATE problems SET key = ?", "{}"),
        ("UPDATE measurements SET median_ms = ?", 1e-300),
        ("UPDATE toolchains SET triton = ?", "99.0.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_tampered_winner_never_breaks_a_call(
    user_database: Path, statement: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    store_winner(user_database)
    tamper(user_database, statement, value)
    assert_right(*make(), causal=True)


@runs_kernels
@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + bytes(100), None])
def test_a_file_that_is_no_database_never_breaks_a_call(
    user_database: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    if content is None:
        user_database.mkdir()
    else:
        user_database.write_bytes(content)
    assert_right(*make(), causal=True)


@runs_kernels
def test_explain_tells_the_origin_and_the_reasons(user_database: Path) -> None:
    text = explain("2x4x2x37x41x32,causal")
    assert "fwd bf16 d32 causal 2×4×2×37×41" in text
    assert "default, untuned" in text


@runs_kernels
@interpreted
def test_explain_names_the_winner_and_its_database(user_database: Path) -> None:
    store_winner(user_database)
    text = explain(PROBLEM)
    assert "portable 64x64 w4 s2" in text
    assert str(user_database) in text


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, cold: None) -> dict[AttentionProblem, int]:
    """A process whose GPU 0 is an untuned H200; gives the misses that it stores."""
    stored: dict[AttentionProblem, int] = {}
    monkeypatch.setattr(live_kernels, "interpreting", lambda: False)
    dispatcher = Dispatcher(
        device=KNOWN_DEVICES["h200"],
        triton_version="3.7.1",
        load=lambda: Snapshot(rows=()),
        store_misses=stored.update,
    )
    monkeypatch.setattr(live_kernels, "_dispatchers", {0: dispatcher})
    monkeypatch.setattr(live_kernels, "load_kernel", lambda candidate, *where: candidate)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stored


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 0), 0])
def test_what_ran_without_a_winner_is_stored_as_a_miss(device: Any, on_h200: dict[AttentionProblem, int]) -> None:
    warmup([PROBLEM, PROBLEM], device=device)
    assert flush_misses() == 1
    assert on_h200 == {PROBLEM: 2}
    assert flush_misses() == 0


def test_explaining_a_problem_is_no_miss(on_h200: dict[AttentionProblem, int]) -> None:
    assert "NVIDIA H200" in explain(PROBLEM, device="cuda:0")
    assert flush_misses() == 0


def test_warmup_puts_the_kernel_on_the_named_gpu(
    on_h200: dict[AttentionProblem, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[object, ...]] = []
    monkeypatch.setattr(live_kernels, "load_kernel", lambda candidate, *where: places.append(where))
    warmup([PROBLEM], device="cuda:0")
    assert places == [("sm_90", 0)]


def test_nothing_is_loaded_inside_a_capture(
    on_h200: dict[AttentionProblem, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(FaAutotuneError, match=r"not loaded and a CUDA-graph capture is under way; call .*warmup"):
        warmup([PROBLEM], device=0)


@runs_kernels
@interpreted
def test_what_the_interpreter_ran_is_no_miss(cold: None) -> None:
    attention(*make())
    assert flush_misses() == 0
