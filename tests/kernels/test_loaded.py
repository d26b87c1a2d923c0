"""Loaded kernels: their programs, their device, and what a failure to load says."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa_autotune.errors import CompileError, LaunchError, TemplateError
from fa_autotune.kernels import loaded
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}


def make_candidate(words: str) -> Candidate:
    """A small candidate of the variant through pointers."""
    family = AttentionProblem.parse(f"1x1x1x64x64x{words}").family
    config = variant_spec(family.kernel_pass, Variant.PORTABLE).config(**SMALL)
    return Candidate(family=family, variant=Variant.PORTABLE, config=config)


def make_kernel(words: str) -> LoadedKernel:
    return load_kernel(make_candidate(words), INTERPRETER.arch)


@interpreted
def test_a_grid_that_no_launch_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel("32,causal,varlen")
    monkeypatch.setattr("fa_autotune.kernels.loaded.MAX_GRID", 10)
    assert kernel.grid_of(2, 2, 64) == (10, 1, 1)
    with pytest.raises(LaunchError, match="12 programs, a launch takes at most 10: split the batch"):
        kernel.grid_of(3, 2, 64)


@interpreted
def test_a_launch_has_a_program_for_each_block_of_the_rows_that_it_owns() -> None:
    """Queries, or keys for dk and dv; of sequences, as many blocks as any of them may have."""
    q, k = torch.empty(2, 4, 70, 32), torch.empty(2, 2, 33, 32)
    assert make_kernel("32").grid(q, k, k, q, q[..., 0]) == (2 * 4 * 3, 1, 1)
    backward = make_kernel("32,bwd_dkdv")
    assert backward.grid(q, k, k, q, q[..., 0], q[..., 0], k, k) == (2 * 2 * 3, 1, 1)
    packed, starts = make_kernel("32,varlen"), torch.tensor([0, 30, 30, 70], dtype=torch.int32)
    rows = q[:1]
    assert packed.grid(rows, rows, rows, rows, rows[..., 0], starts, starts) == (4 * (70 // 32 + 3 + 1), 1, 1)


@interpreted
def test_a_kernel_without_a_tile_counter_takes_no_scratch() -> None:
    kernel = make_kernel("32")
    assert (kernel.is_persistent, kernel.scratch(torch.device("cpu"))) == (False, ())


def test_a_kernel_that_does_not_compile_says_for_which_gpu_where_it_lies_and_what_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded, "interpreting", lambda: False)

    def broken(module: object, arch: str) -> None:
        raise RuntimeError("planted " * 1000)

    monkeypatch.setattr(loaded, "compile_module", broken)
    with pytest.raises(CompileError) as caught:
        load_kernel(make_candidate("32"), "sm_90")
    text = str(caught.value)
    assert text.startswith("the portable kernel of fwd bf16 d32 full does not compile or load for sm_90: RuntimeError:")
    assert text.endswith("`fa-autotune doctor` says what may be missing")
    assert len(text) < 1500
    assert Path(text.rpartition("it is ")[2].partition(",")[0]).is_file()


def test_an_error_of_ours_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(candidate: Candidate, *where: object) -> None:
        raise TemplateError("planted")

    monkeypatch.setattr(loaded, "LoadedKernel", broken)
    with pytest.raises(TemplateError, match=r"^planted$"):
        load_kernel(make_candidate("32"), "sm_90")


def test_a_kernel_for_a_gpu_is_put_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton loads a binary on the current GPU, when its launcher is first asked for."""
    current, loaded_on = [0], []

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Compiled:
        @property
        def run(self) -> None:
            loaded_on.append(current[-1])

    monkeypatch.setattr(loaded, "interpreting", lambda: False)
    monkeypatch.setattr(loaded, "compile_module", lambda module, arch: Compiled())
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    for index in (3, None):  # without one, it is put on the GPU of the first call
        load_kernel(make_candidate("32"), "sm_90", index)
    assert loaded_on == [3]


def test_a_persistent_kernel_has_its_counter_ready_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(loaded, "interpreting", lambda: False)
    monkeypatch.setattr(loaded, "load_module", lambda path: SimpleNamespace(SCRATCH_INTS=2))
    monkeypatch.setattr(loaded, "compile_module", lambda module, arch: SimpleNamespace(run=None))
    monkeypatch.setattr(loaded, "prepare_scratch", prepared.append)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    kernel = LoadedKernel(make_candidate("32"), tmp_path, "sm_90", 1)
    assert (kernel.is_persistent, prepared) == (True, [1])
