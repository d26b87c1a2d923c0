"""The fused backward with ALiBi and dropout: what its kernels compute, without a GPU, and who is served."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import Probe
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.fast_launch import Counts, Launch
from fa_autotune.kernels.modules import load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.ops import call_kernels
from fa_autotune.ops.backward import FusedBackward, Targets
from fa_autotune.ops.call import BHSD, FULL, GENERATED, Call, Extras, Saved
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.dropout import kept_of, threshold_of
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.workspace import is_wide
from kit.gluon_emulator import Emulator
from kit.loaded_kernels import as_loaded
from kit.ptx_warp import LANES, run_warp
from kit.sabotage import Sabotage, instead_of, render_with

CPU = torch.device("cpu")
PROBE_SEEDS = count()


def make_candidate(text: str, **knobs: KnobValue) -> Candidate:
    family = AttentionProblem.parse(text).family
    variant = Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS
    return Candidate(family=family, variant=variant, config=variant_spec(Pass.BWD_FUSED, variant).config(**knobs))


def failures(
    text: str, folder: Path, sabotage: Sabotage | None = None, *, top_left: bool = False, **knobs: KnobValue
) -> tuple[str, ...]:
    """What is wrong with a kernel, its text changed or not, in two launches on a problem."""
    problem, candidate = AttentionProblem.parse(text), make_candidate(text, **knobs)
    source = render_with({candidate: sabotage} if sabotage else {})(candidate)
    kernel = Emulator(load_module(write_module(source, folder)))
    probe = Probe(shape=problem.shape, top_left=top_left, seed=next(PROBE_SEEDS) % 12)
    try:
        return verify(kernel, problem.family, [probe], CPU).failures
    except AssertionError as error:  # a hang or a race
        return (str(error),)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("1x4x2x150x300x128,causal,alibi,bwd_fused", {}),
        ("2x2x1x100x200x64,alibi,bwd_fused,unordered", {"top_left": True}),
        ("1x2x1x300x100x96x40,fp16,left=60,right=90,alibi,bwd_fused", {"top_left": True, "DIAGONAL_FIRST": True}),
        ("1x4x2x130x200x64,left=30,softcap,alibi,bwd_fused", {}),
        ("1x4x2x70x150x256,causal,alibi,bwd_fused", {"DIAGONAL_FIRST": True}),
        ("1x2x1x128x128x192x128,alibi,bwd_fused", {"EXACT_LENGTHS": True}),
        ("2x4x2x150x300x128,causal,dropout,bwd_fused", {}),
        ("1x2x1x128x256x64,dropout,bwd_fused", {}),
        ("1x2x1x300x200x64,fp16,causal,left=70,alibi,dropout,bwd_fused,unordered", {"top_left": True}),
        ("2x4x2x100x70x192,causal,left=40,dropout,bwd_fused", {"DIAGONAL_FIRST": True}),
        ("1x2x1x150x130x256x128,softcap,dropout,bwd_fused", {"DO_STAGES": 2, "DQ_STAGES": 1}),
    ],
)
def test_gradients_follow_the_numerics_rule(text: str, run: dict[str, Any], tmp_path: Path) -> None:
    assert failures(text, tmp_path, **run) == ()


ALIBI, DROPOUT = "2x4x2x150x300x128,causal,alibi,bwd_fused", "2x4x2x150x130x64,causal,dropout,bwd_fused"
BOTH, WIDE = "1x2x1x150x200x64,left=60,right=90,alibi,bwd_fused", "1x4x2x100x70x192,dropout,bwd_fused"


@pytest.mark.parametrize(
    ("text", "sabotage"),
    [
        (BOTH, instead_of("uniform(key_offset - diagonal)", "uniform(0)")),
        (ALIBI, instead_of("gl.load(slopes_at + head * slopes_step)", "gl.load(slopes_at)")),
        (BOTH, instead_of("gl.abs(of_thread - of_value)", "(of_thread - of_value)")),
        (DROPOUT, instead_of("first_number + head,", "first_number,")),
        (DROPOUT, instead_of("gl.where(p_signed >= 0.0, dp", "gl.where(p_signed < 9.0, dp")),
        (DROPOUT, instead_of("(dv * dropout_scale)", "dv")),
        (DROPOUT, instead_of("row_of_walked = uniform(", "row_of_walked = 16 + uniform(")),
        (WIDE, instead_of("dp * dropout_scale - delta[None, :]", "dp - delta[None, :]")),
        (WIDE, instead_of("dv_0 * dropout_scale", "dv_0")),
    ],
    ids=[
        "own-key", "slope-of-the-first-head", "signed-distance", "bits-of-the-first-head", "dp-not-dropped",
        "dv-not-scaled", "bits-of-other-rows", "wide-dp-not-scaled", "wide-dv-not-scaled",
    ],
)  # fmt: skip
def test_a_fault_is_noticed(text: str, sabotage: Sabotage, tmp_path: Path) -> None:
    folders = tmp_path / "right", tmp_path / "wrong"
    for folder in folders:
        folder.mkdir()
    assert failures(text, folders[0]) == ()
    assert any(failures(text, folders[1], sabotage) for _ in range(2))


# --- random bits ------------------------------------------------------------------------------------------------------

DROP = re.search(
    r'def drop\(.*?"""(\{.*?\})"""', render(make_candidate("1x1x1x64x64x64,dropout,bwd_fused")).text, re.DOTALL
)


@pytest.mark.parametrize(("first_row", "first_key", "head", "p"), [(0, 0, 0, 0.3), (4096, 65_584, 70_001, 0.999)])
def test_a_thread_keeps_what_dropout_says_of_its_values(first_row: int, first_key: int, head: int, p: float) -> None:
    """As registers lie: values of rows 0, 1 and keys 0, 8 from the thread's own, then those of rows 8 and 9."""
    assert DROP is not None
    seed = 0x0123_4567_89AB_CDEF
    ones, others = 0x3F80_3F80, 0x4000_4000  # pairs of 1 and of 2 in bfloat16

    def spread(number: int) -> list[list[int]]:
        return [[number] * len(LANES)] * 8

    rows = [[first_row + 2 * (lane % 4) + value % 2 + value // 4 * 8 for lane in LANES] for value in range(8)]
    keys = [[first_key + lane // 4 + value // 2 % 2 * 8 for lane in LANES] for value in range(8)]
    pairs = [[ones] * len(LANES)] * 4 + [[others] * len(LANES)] * 4
    scalars = (head, seed & 0xFFFFFFFF, seed >> 32, threshold_of(p))
    found = run_warp(DROP[1], [*pairs, *rows, *keys, *(one for number in scalars for one in spread(number))], 8)
    kept = kept_of(
        torch.tensor([seed]), torch.tensor([[head]]), range(first_row, first_row + 16),
        range(first_key, first_key + 16), p,
    )[0, 0]  # fmt: skip
    for value in range(8):
        shift = 16 * (value % 2)
        for lane in LANES:
            is_kept = bool(kept[rows[value][lane] - first_row, keys[value][lane] - first_key])
            for_dv, for_ds = (found[place + value // 2][lane] >> shift & 0xFFFF for place in (0, 4))
            assert (for_dv, for_ds) == ((0x3F80, 0x4000) if is_kept else (0, 0xC000))


# --- round the fused kernel -------------------------------------------------------------------------------------------


def test_the_fused_kernel_alone_is_given_slopes_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Pass, int, list[int]]] = []
    slopes, seed = torch.empty(1, 2), torch.zeros(1, dtype=torch.int64)

    def bind(kernel: Any, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Launch:
        def run(_self: Launch, counts: Counts | None, *actual: Tensor) -> None:
            places = [place for place, one in enumerate(actual) if one is slopes or one is seed]
            given.append((kernel.candidate.family.kernel_pass, len(actual), places))
            assert [one.shape for one in actual] == [one.shape for one in tensors]

        return Launch(run)

    def kernel_for(problem: AttentionProblem, index: int) -> Any:
        return as_loaded(problem.family)

    monkeypatch.setattr(call_kernels, "bind", bind)
    monkeypatch.setattr(call_kernels, "kernel_for", kernel_for)
    q, lse = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16), torch.empty(1, 2, 64)
    extras = Extras(alibi_slopes=slopes, dropout_seed=seed)
    kernels = CallKernels(rows_of(BHSD), q, q, q, extras, Call(0.5, FULL, BHSD, GENERATED, dropout_p=0.1))
    saved = Saved(q, q, q, q, lse, extras)
    FusedBackward(kernels, saved, q, q, unordered=False)(saved, q, None, Targets(q, q, q), wants_sinks=False)
    assert given == [(Pass.BWD_PREPROCESS, 5, []), (Pass.BWD_FUSED, 11, [9, 10]), (Pass.BWD_POSTPROCESS, 2, [])]


SERVED = ["64,alibi", "128,causal,alibi", "256,left=9,alibi", "64,causal,softcap,dropout", "128,causal,dropout"]
REFUSED = {
    "64,left=9,softcap,dropout": "dropout of capped scores in a window spills",
    "64,softcap,alibi,dropout": "dropout of capped scores with ALiBi spills",
    "128,softcap,alibi": "capped scores with ALiBi spill",
    "256,softcap,alibi": "capped scores with ALiBi spill",
    "128,left=9,dropout": "dropout in a window spills",
    "128,alibi,dropout": "dropout beside ALiBi spills",
    "128,softcap,dropout": "dropout of capped scores spills",
    "256,dropout": "dropout spills above head_dim_v 192",
}


@pytest.mark.parametrize("triton", [(3, 6), (3, 7)])
def test_what_spills_is_refused_with_its_reason(triton: tuple[int, int]) -> None:
    def reason(words: str) -> str | None:
        family = AttentionProblem.parse(f"4x16x16x4096x4096x{words},bwd_fused").family
        spec = variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS)
        return spec.supports(family, "sm_90", triton)

    assert [words for words in [*SERVED, "192,left=9,softcap,dropout", "256x128,dropout"] if reason(words)] == []
    for words, says in REFUSED.items():
        assert says in str(reason(words))


@pytest.mark.parametrize("words", SERVED)
def test_kernels_without_a_feature_have_no_line_of_it(words: str) -> None:
    candidate = make_candidate(f"1x1x1x64x64x{words},bwd_fused")
    plain = replace(candidate, family=replace(candidate.family, alibi=False, dropout=False))
    assert not re.search("slope_of|slopes|dropout|seed|p_signed|mul.wide", render(plain).text)
