"""Which kernels are loaded, and when they may not be."""

from dataclasses import replace
from typing import Any

import pytest

from fa_autotune.dispatch import loaded_kernels
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.errors import LaunchError, NoKernelError
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate
from kit.winners import PORTABLE, PROBLEM, T4, dispatcher, winner

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
