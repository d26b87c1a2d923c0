"""Kernels that a process has decided on: loaded once for each GPU, and never where that would break a capture."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fa_autotune.dispatch import loaded_kernels
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, device_index, dispatcher_of, flush_misses, kernel_for
from fa_autotune.errors import CompileError, InvalidProblemError, LaunchError, NoKernelError
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from kit.winners import H100, H200, HOPPER, PORTABLE, PROBLEM, T4, TMA, dispatcher, winner

Places = list[tuple[Candidate, str, int | None]]


@pytest.fixture
def placed(cold: None, monkeypatch: pytest.MonkeyPatch) -> Places:
    """What is loaded, for which arch and on which GPU, in a cold process with two untuned GPUs and no capture."""
    loaded: Places = []

    def load(candidate: Candidate, *where: Any) -> object:
        loaded.append((candidate, *where))
        return object()

    monkeypatch.setattr(loaded_kernels, "load_kernel", load)
    monkeypatch.setattr(loaded_kernels, "_dispatchers", {0: dispatcher(), 1: dispatcher(device=H100)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return loaded


def test_a_kernel_is_loaded_once_on_each_gpu(placed: Places) -> None:
    first, again, elsewhere = (kernel_for(PROBLEM, index) for index in (0, 0, 1))
    assert first is again is not elsewhere
    assert [(arch, index) for _, arch, index in placed] == [("sm_90", 0), ("sm_90", 1)]


def test_problems_of_one_candidate_share_its_kernel(placed: Places) -> None:
    longer = AttentionProblem.parse("4x32x8x8192x8192x128,causal")
    assert kernel_for(PROBLEM, 0) is kernel_for(longer, 0)
    assert len(placed) == 1


def test_the_winner_is_what_is_loaded(placed: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    row = winner(config=TMA)
    monkeypatch.setattr(loaded_kernels, "_dispatchers", {0: dispatcher(row)})
    kernel_for(PROBLEM, 0)
    assert [candidate for candidate, *_ in placed] == [row.candidate]


def test_the_interpreter_loads_for_no_gpu(placed: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "_dispatchers", {INTERPRETER_INDEX: dispatcher()})
    kernel_for(PROBLEM, INTERPRETER_INDEX)
    assert [index for *_, index in placed] == [None]


@pytest.mark.parametrize(("ahead", "misses"), [(False, {PROBLEM: 1}), (True, {})])
def test_what_may_never_run_is_no_miss(ahead: bool, misses: dict[AttentionProblem, int], placed: Places) -> None:
    kernel_for(PROBLEM, 0, ahead=ahead)
    assert dispatcher_of(0).misses == misses


def test_misses_of_all_gpus_are_flushed(placed: Places) -> None:
    for index in (0, 1):
        kernel_for(PROBLEM, index)
    assert (flush_misses(), flush_misses()) == (2, 0)


def test_a_loaded_kernel_is_found_inside_a_capture_and_another_is_refused(
    placed: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_for(PROBLEM, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel_for(PROBLEM, 0) is kernel
    other = AttentionProblem.parse("1x2x2x64x64x64")
    with pytest.raises(LaunchError, match=r"is not loaded and a CUDA-graph capture is under way; call\s.*warmup"):
        kernel_for(other, 0)
    assert len(placed) == 1


def test_a_gpus_dispatcher_is_made_when_it_is_first_asked_for(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loaded_kernels, "live_device", lambda index: asked.append(index) or H200)
    assert dispatcher_of(1) is dispatcher_of(1)
    assert (asked, dispatcher_of(1).device) == ([1], H200)


# --- which GPU is meant -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "index"), [("cuda:3", 3), (torch.device("cuda", 2), 2), (1, 1), (None, 0), ("cuda", 0)]
)
def test_a_gpu_is_named_in_any_of_torchs_ways(device: Any, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_index(device) == index


def test_no_name_means_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert device_index(None) == 5


def test_whatever_is_named_where_kernels_are_interpreted_is_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "interpreting", lambda: True)
    assert {device_index(device) for device in ("cuda:3", None, 0)} == {INTERPRETER_INDEX}


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cpu", "device='cpu' is no GPU; kernels run on cuda devices"),
        ("gpu", "device='gpu' is no device: .*; write it"),
    ],
)
def test_what_is_no_gpu_is_refused(device: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_kernels, "interpreting", lambda: False)
    with pytest.raises(InvalidProblemError, match=says):
        device_index(device)


# --- new lengths ------------------------------------------------------------------------------------------------------

NEW_LENGTHS = [replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=n)) for n in range(3000, 4000, 7)]


@pytest.fixture
def loads(cold: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Candidate, int | None]]:
    """What is loaded, and for which GPU; nothing is compiled."""
    loaded: list[tuple[Candidate, int | None]] = []

    def load(candidate: Candidate, arch: str, index: int | None) -> Any:
        loaded.append((candidate, index))
        return object()

    monkeypatch.setattr(loaded_kernels, "load_kernel", load)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return loaded


def use(monkeypatch: pytest.MonkeyPatch, chosen: Dispatcher, *indices: int) -> Dispatcher:
    for index in indices:
        monkeypatch.setitem(loaded_kernels._dispatchers, index, chosen)
    return chosen


def test_lengths_that_one_candidate_serves_share_a_kernel(
    loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = winner()
    use(monkeypatch, dispatcher(row), 0)
    kernels = {id(loaded_kernels.kernel_for(problem, 0)) for problem in NEW_LENGTHS}
    assert len(kernels) == 1
    assert loads == [(row.candidate, 0)]


def test_equal_candidates_are_loaded_once_and_for_each_gpu(
    loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (0, 1):
        use(monkeypatch, dispatcher(winner(), winner("4x32x8x3000x3000x128,causal")), index)
    shapes = [PROBLEM, AttentionProblem.parse("4x32x8x3000x3000x128,causal")]
    for index in (0, 1):
        first, second = (loaded_kernels.kernel_for(problem, index) for problem in shapes)
        assert first is second
    assert [index for _, index in loads] == [0, 1]


def test_a_form_for_other_lengths_is_a_kernel_of_its_own(
    loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, dispatcher(winner(config=replace(PORTABLE, EXACT_LENGTHS=True))), 0)
    for length in (2048, 2049, 1024, 1025):
        shape = replace(PROBLEM.shape, seqlen_q=length, seqlen_k=length)
        kernel = loaded_kernels.kernel_for(replace(PROBLEM, shape=shape), 0)
        assert kernel is loaded_kernels.kernel_for(replace(PROBLEM, shape=shape), 0)
    assert [candidate.config for candidate, _ in loads] == [replace(PORTABLE, EXACT_LENGTHS=True), PORTABLE]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_may_never_run_is_not_missed(
    ahead: bool, loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    untuned = use(monkeypatch, dispatcher(), 0)
    loaded_kernels.kernel_for(PROBLEM, 0, ahead=ahead)
    assert len(loads) == 1
    assert untuned.misses == ({} if ahead else {PROBLEM: 1})


def test_in_a_capture_only_loaded_kernels_serve(
    loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, dispatcher(winner()), 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(
        LaunchError, match=r"is not loaded and a CUDA-graph capture is under way; call fa_autotune\.warmup"
    ):
        loaded_kernels.kernel_for(PROBLEM, 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    kernel = loaded_kernels.kernel_for(PROBLEM, 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert [loaded_kernels.kernel_for(problem, 0) for problem in NEW_LENGTHS[:3]] == [kernel] * 3
    assert len(loads) == 1


def test_what_nothing_serves_loads_nothing(
    loads: list[tuple[Candidate, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, dispatcher(device=T4), 0)
    with pytest.raises(NoKernelError, match="bfloat16 matrix products need sm_80"):
        loaded_kernels.kernel_for(PROBLEM, 0)
    assert loads == []


def break_variants(monkeypatch: pytest.MonkeyPatch, *broken: Variant) -> list[Variant]:
    """Let kernels of these not compile; gives what was asked for."""
    asked: list[Variant] = []

    def load(candidate: Candidate, arch: str, index: int | None) -> object:
        asked.append(candidate.variant)
        if candidate.variant in broken:
            raise CompileError("tma has no async_load")
        return candidate

    monkeypatch.setattr(loaded_kernels, "load_kernel", load)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return asked


def test_what_does_not_compile_with_an_untested_triton_leaves_its_calls_to_others(
    cold: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = break_variants(monkeypatch, Variant.HOPPER_WS)
    found = use(monkeypatch, dispatcher(winner(config=HOPPER), triton="3.10.0"), 0)
    chosen: Any = kernel_for(PROBLEM, 0)
    assert (asked, chosen.variant) == ([Variant.HOPPER_WS, Variant.TMA], Variant.TMA)
    assert [kernel_for(problem, 0) for problem in NEW_LENGTHS[:2]] == [chosen] * 2
    assert asked[2:] == []
    assert "3.10 is newer" in found.peek(PROBLEM).describe()
    assert "tma has no async_load" in found.peek(PROBLEM).describe()
    told = [record.getMessage() for record in caplog.records if "3.10 is newer" in record.getMessage()]
    assert len(told) == 2  # once that it is new, once what is lost


def test_where_nothing_is_left_the_reasons_are_told(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = break_variants(monkeypatch, *Variant)
    use(monkeypatch, dispatcher(triton="3.10.0"), 0)
    with pytest.raises(NoKernelError, match=r"hopper_ws can't serve this call: .*does not compile: tma has no"):
        kernel_for(PROBLEM, 0)
    assert asked == [Variant.HOPPER_WS, Variant.TMA, Variant.PORTABLE]


def test_what_does_not_compile_with_a_tested_triton_is_an_error(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = break_variants(monkeypatch, Variant.HOPPER_WS)
    use(monkeypatch, dispatcher(winner(config=HOPPER)), 0)
    for _ in range(2):
        with pytest.raises(CompileError, match="tma has no async_load"):
            kernel_for(PROBLEM, 0)
    assert asked == [Variant.HOPPER_WS] * 2
