"""The fused backward with windows to the left and capped scores: what its kernels compute, and in which order.

Gluon has no interpreter: kernels run in `gluon_emulator`, the arithmetic of their order on numbers.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.evaluation.workload import dq_of_acc
from fa_autotune.kernels.fast_launch import Launch
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.kernels.modules import candidates_dir, load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.ops import backward, call_kernels
from fa_autotune.ops.backward import Targets, backward_of
from fa_autotune.ops.call import BHSD, GENERATED, NO_EXTRAS, WINDOW, Call, Saved
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.space.workspace import is_wide
from kit.gluon_emulator import Emulator
from kit.loaded_kernels import as_loaded
from kit.sabotage import Sabotage, instead_of, render_with, without
from kit.winners import dispatcher

PROBE_SEEDS = count()  # the inputs of a probe are kept, and so would be turns that a failed kernel left
TRIES = 10  # orders of events in which a missing wait may show
CPU = torch.device("cpu")
Function = Callable[..., Any]


def make_candidate(problem: AttentionProblem, **knobs: KnobValue) -> Candidate:
    variant = Variant.HOPPER_WIDE if is_wide(problem.family) else Variant.HOPPER_WS
    config = variant_spec(Pass.BWD_FUSED, variant).config(**knobs)
    return Candidate(family=problem.family, variant=variant, config=config)


def failures(
    text: str,
    folder: Path,
    sabotage: Sabotage | None = None,
    *,
    seed: int = 0,
    top_left: bool = False,
    num_sms: int = 3,
    **knobs: KnobValue,
) -> tuple[str, ...]:
    """What is wrong with a kernel, its text changed or not, in two launches on a problem."""
    problem = AttentionProblem.parse(text)
    candidate = make_candidate(problem, **knobs)
    source = render_with({candidate: sabotage} if sabotage else {})(candidate)
    kernel = Emulator(load_module(write_module(source, folder)), seed=seed, num_sms=num_sms)
    probe = Probe(shape=problem.shape, top_left=top_left, seed=3 * next(PROBE_SEEDS) + seed % 3)  # of three caps
    try:
        return verify(kernel, problem.family, [probe], CPU).failures
    except AssertionError as error:  # a hang or a race
        return (str(error),)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_left", "diagonal_first"), [(False, False), (True, True)], ids=["bottom-right", "top-left-diagonal-first"]
)
@pytest.mark.parametrize(
    "text",
    [
        "1x4x2x150x300x128,causal,left=70,bwd_fused",
        "2x2x1x300x100x96x40,fp16,left=200,right=90,bwd_fused",
        "1x2x1x140x400x64,left=130,bwd_fused,unordered",
        "1x2x2x200x200x64,causal,softcap,bwd_fused",
        "1x2x1x150x300x128,left=3,right=1,softcap,bwd_fused",
        "1x4x2x150x200x256,causal,left=60,bwd_fused",
        "1x2x1x70x200x192x128,fp16,left=0,softcap,bwd_fused",
    ],
)
def test_gradients_of_windows_and_caps(text: str, top_left: bool, diagonal_first: bool, tmp_path: Path) -> None:
    assert failures(text, tmp_path, top_left=top_left, DIAGONAL_FIRST=diagonal_first) == ()


@pytest.mark.parametrize(
    "text",
    [
        "1x2x1x150x200x64,softcap,bwd_fused",
        "1x2x1x150x200x128,softcap,bwd_fused",
        "1x2x1x130x256x136x64,softcap,bwd_fused",
        "1x2x1x128x256x128,left=70,bwd_fused",
    ],
)
def test_gradients_of_caps_and_windows_of_whole_tiles_and_of_others(text: str, tmp_path: Path) -> None:
    exact = "128x256x" in text
    assert failures(text, tmp_path, EXACT_LENGTHS=exact) == ()


def drawn_call(seed: int) -> tuple[str, dict[str, Any]]:
    """A random problem round the tiles, and how it runs; the same seed gives the same."""
    draw = random.Random(seed)
    head_dims = draw.choice(["64", "128", "8", "40x64", "96x40", "128", "64", "192", "136x64", "64x256"])

    def length() -> int:
        return max(1, draw.choice([64, 128, 192, 256, 384]) + draw.choice([-1, 0, 1, 5, -30, 17, 40]))

    side = f"left={draw.choice([0, 1, 31, 63, 64, 65, 100, 127, 128, 129, 200, draw.randint(0, 400)])}"
    flags = [side, *draw.choice([[], ["causal"], [f"right={draw.choice([0, 5, 63, 64, 127, draw.randint(0, 300)])}"]])]
    flags += ["softcap"] * draw.randint(0, 1) + ["fp16"] * draw.randint(0, 1)
    kv_heads, group = draw.choice([1, 1, 2]), draw.choice([1, 2, 3])
    text = f"{draw.choice([1, 1, 2])}x{kv_heads * group}x{kv_heads}x{length()}x{length()}x{head_dims}"
    knobs = {"HEADS_PER_GROUP": draw.choice([1, 2, 8]), "DIAGONAL_FIRST": draw.choice([False, True])}
    run = {"top_left": draw.choice([False, True]), "num_sms": draw.choice([1, 2, 3, 7]), "seed": seed}
    return f"{text},{','.join(flags)},bwd_fused", {**run, **knobs}


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_random_windows(seed: int, tmp_path: Path) -> None:
    text, run = drawn_call(seed)
    assert failures(text, tmp_path, **run) == (), f"{text} {run}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 400))
def test_gradients_of_many_random_windows(seed: int, tmp_path: Path) -> None:
    text, run = drawn_call(seed)
    assert failures(text, tmp_path, **run) == (), f"{text} {run}"


def test_the_tanh_of_float16_is_that_of_its_definition() -> None:
    """On numbers, as the GPU would compute it but for the last bits of a quotient; the emulator has torch's own."""
    problem = AttentionProblem.parse("1x1x1x64x64x128,fp16,softcap,bwd_fused")
    module = load_module(write_module(render(make_candidate(problem)), candidates_dir()))
    language = SimpleNamespace(exp2=torch.exp2, where=torch.where, abs=torch.abs)
    tanh = FunctionType(module.tanh.fn.__code__, {"gl": language, "reciprocal": torch.reciprocal})
    x = torch.cat([torch.logspace(-30, 3, 5000), torch.tensor([0.0, float("inf")])])
    x = torch.cat([x, -x])
    torch.testing.assert_close(tanh(x), torch.tanh(x), rtol=2e-5, atol=0.0)


# --- what a fault would do --------------------------------------------------------------------------------------------

LEFT, BOTH = "1x2x1x200x400x128,left=60,bwd_fused", "1x1x1x260x260x128,causal,left=60,bwd_fused"
WIDE, CAPPED = "1x1x1x140x330x256,causal,left=60,bwd_fused", "1x1x1x260x260x128,causal,softcap,bwd_fused"

HIDE_WIDE = "            hide({}_tile_0.index(0).reshape([64, 256]).slice({}, 128, dim=1), unseen, BLOCK_128)"
SLOPE_STORED = "ds_tiles.index((next_step % DS_STAGES) * 2 + WARPGROUP).store(p_slope)"


@pytest.mark.parametrize(
    ("text", "sabotage"),
    [
        (BOTH, instead_of("return n_block - first_block, ", "return n_block, ")),
        (BOTH, instead_of("last_block - first_block\n", "last_block\n")),
        (LEFT, without("            hide(k_own, unseen, GRADIENTS)")),
        (LEFT, without("            hide(v_own, unseen, GRADIENTS)")),
        (WIDE, without(HIDE_WIDE.format("k", 0))),
        (WIDE, without(HIDE_WIDE.format("v", 128))),
        (BOTH, instead_of(" | (last_seen - span > 1 - BLOCK_M)", "")),
        (BOTH, without("    seen = seen & (last_seen - span + of_thread <= of_value)")),
        (CAPPED, without(f"        {SLOPE_STORED}")),
        (CAPPED, instead_of(SLOPE_STORED, SLOPE_STORED.replace("next_step", "i"))),
        (CAPPED, instead_of("1.0 - qk * qk", "1.0")),
    ],
    ids=[
        "turns-counted-from-block-0", "last-turn-counted-from-block-0", "keys-not-hidden", "values-not-hidden",
        "wide-keys-not-hidden", "wide-values-not-hidden", "left-edge-not-masked", "left-edge-not-compared",
        "no-slope", "slope-where-dS-is-read", "a-slope-of-1",
    ],
)  # fmt: skip
def test_a_fault_is_noticed(text: str, sabotage: Sabotage, tmp_path: Path) -> None:
    assert failures(text, tmp_path) == ()
    assert failures(text, tmp_path, sabotage)


UNSEEN = (
    "1x1x1x260x400x128,causal,left=100,softcap,bwd_fused"  # some keys of the first warpgroup come before all windows
)


@pytest.mark.rest
def test_a_wait_that_is_left_out_is_missed(tmp_path: Path) -> None:
    module = render(make_candidate(AttentionProblem.parse(UNSEEN))).text
    waits = re.findall(r"^ +(?:mbarrier\.wait|tma\.store_wait|meet\(\)|while now < turn).*", module, re.MULTILINE)
    unnoticed = {
        wait.strip()
        for wait in sorted(set(waits))
        if not any(failures(UNSEEN, tmp_path, without(wait), seed=2 * attempt) for attempt in range(TRIES))
    }
    assert unnoticed == set()


# --- the order of dq --------------------------------------------------------------------------------------------------


@cache
def scalar_functions(mask: str, diagonal_first: bool, head_dim: int, heads_per_group: int) -> tuple[Function, int, int]:
    """The scalar functions of a fused kernel, on numbers and with Python's own in place of the language module; and its
    query rows and keys in a tile."""
    problem = AttentionProblem.parse(f"1x1x1x64x64x{head_dim},{mask},bwd_fused")
    candidate = make_candidate(problem, DIAGONAL_FIRST=diagonal_first, HEADS_PER_GROUP=heads_per_group)
    module = load_module(write_module(render(candidate), candidates_dir()))
    language = SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, one, other: one if condition else other
    )
    names: dict[str, Any] = {"gl": language}
    names.update({name: getattr(module, name).value for name in ("BLOCK_M", "BLOCK_N", "HEADS_PER_GROUP")})
    for name in ("block_of_program", "key_block_of_program", "walk_of", "next_tile", "turn_of", "change_of"):
        names[name] = FunctionType(getattr(module, name).fn.__code__, names)
    return lambda name, *values: names[name](*values), names["BLOCK_M"], names["BLOCK_N"]


@settings(max_examples=100)
@given(
    is_window=st.booleans(),
    diagonal_first=st.booleans(),
    head_dim=st.sampled_from([64, 128, 256]),
    heads_per_group=st.sampled_from([1, 2, 8]),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    sides=st.tuples(st.integers(0, 500), st.integers(0, 300)),
    offset=st.one_of(st.none(), st.just(0), st.integers(-700, 700)),  # None is bottom-right
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),  # (batch, kv head) pairs, and query heads for each
)
def test_every_key_block_that_a_tile_sees_adds_once_in_the_order_in_which_programs_start(
    is_window: bool,
    diagonal_first: bool,
    head_dim: int,
    heads_per_group: int,
    lengths: tuple[int, int],
    sides: tuple[int, int],
    offset: int | None,
    heads: tuple[int, int],
) -> None:
    (seqlen_q, seqlen_k), (batch_heads, group) = lengths, heads
    mask = "left=1,right=1" if is_window else "left=1"
    call, block_m, block_n = scalar_functions(mask, diagonal_first, head_dim, heads_per_group)
    offset = seqlen_k - seqlen_q if offset is None else offset
    left_diagonal, diagonal = offset - sides[0], offset + sides[1]
    where = (seqlen_q, seqlen_k, diagonal, left_diagonal) if is_window else (seqlen_q, seqlen_k, left_diagonal)
    blocks = -(-seqlen_k // block_n)
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (query head, first row) to (block, turn, last turn)
    for program in range(blocks * batch_heads):
        n_block, batch_head = call("key_block_of_program", program, blocks, batch_heads)
        tiles, start_m = call("walk_of", n_block, *where)
        first_head = q_head = batch_head * group
        for _ in range(tiles * group):
            turn = call("turn_of", n_block, start_m, *(where if is_window else where[1:]))
            parts.setdefault((q_head, start_m), []).append((n_block, *turn))
            q_head, start_m = call("next_tile", q_head, start_m, first_head, group)
        assert q_head == first_head
    for q_head in range(batch_heads * group):
        for start_m in range(0, seqlen_q, block_m):
            last_row = min(start_m + block_m, seqlen_q) - 1
            last_key = min(seqlen_k - 1, last_row + diagonal) if is_window else seqlen_k - 1
            first_key = max(0, start_m + left_diagonal)
            seen = list(range(first_key // block_n, last_key // block_n + 1)) if first_key <= last_key else []
            counter = 0
            added = parts.pop((q_head, start_m), [])  # as programs start: one may only wait for those before it
            for _, turn, last in added:
                assert counter == turn
                counter += call("change_of", turn, last)
            assert sorted(block for block, _, _ in added) == seen
            assert counter == 0
    assert parts == {}


# --- round the fused kernel -------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("head_dim", "mask"), [(64, "left=3"), (128, "causal,left=3"), (192, "left=30,right=2")])
def test_dq_of_rows_past_every_window_is_put_in_order_as_zeros(head_dim: int, mask: str) -> None:
    problem = AttentionProblem.parse(f"1x2x1x64x64x{head_dim},{mask},bwd_postprocess")
    spec = variant_spec(Pass.BWD_POSTPROCESS, Variant.PORTABLE)
    candidate = Candidate(family=problem.family, variant=spec.variant, config=spec.config(num_warps=4))
    blind = Probe(shape=AttentionProblem.parse("1x2x1x300x90x64").shape, top_left=True, seed=9)
    around = probes(problem.family, block_m=64, block_n=64, exact_lengths=False)[:3]
    kernel = load_kernel(candidate, INTERPRETER.arch)
    assert verify(kernel, problem.family, [*around, blind], CPU, repeated=False).failures == ()


@pytest.mark.parametrize("spared", [0, 1])
def test_a_row_past_every_window_that_is_not_zeroed_is_caught(spared: int) -> None:
    problem = AttentionProblem.parse("1x2x1x300x90x64,causal,left=3,bwd_postprocess")

    def kernel(dq_acc: Tensor, dq: Tensor, scale: float, diagonal: int, left_diagonal: int, key_offset: int) -> None:
        assert (diagonal, left_diagonal, key_offset) == (0, -3, -210)
        dq.copy_(dq_of_acc(problem.family, problem.shape, dq_acc) * scale)
        dq[:, :, 90 + 3 + spared :] = 0.0

    found = verify(kernel, problem.family, [Probe(shape=problem.shape, top_left=True)], CPU).failures
    assert any("dq was left unwritten" in text for text in found) is bool(spared)


class Bound(NamedTuple):
    """What a launch was bound to beside its tensors."""

    kernel_pass: Pass
    numbers: tuple[float | int | None, ...]


def test_the_fused_kernels_are_given_what_the_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Bound] = []

    def bind(
        kernel: Any, tensors: Any, numbers: Sequence[float | int | None], *, is_counted: bool, like: Launch | None
    ) -> Launch:
        bound.append(Bound(kernel.candidate.family.kernel_pass, tuple(numbers)))
        return Launch(lambda *_: None)

    def kernel_for(problem: AttentionProblem, index: int) -> Any:
        return as_loaded(problem.family)

    monkeypatch.setattr(call_kernels, "bind", bind)
    monkeypatch.setattr(call_kernels, "kernel_for", kernel_for)
    monkeypatch.setattr(backward, "dispatcher_of", lambda index: dispatcher())
    q, k = (torch.empty(1, heads, seqlen, 64, dtype=torch.bfloat16) for heads, seqlen in ((2, 128), (1, 300)))
    call = Call(0.5, WINDOW, BHSD, GENERATED, window_left=20, window_right=3, softcap=30.0)
    kernels = CallKernels(rows_of(BHSD), q, k, k, NO_EXTRAS, call)
    saved, into = Saved(q, k, k, q, torch.empty(1, 2, 128)), Targets(q, k, k)
    backward_of(kernels, saved, q, into)(saved, q, None, into, wants_sinks=False)
    assert bound == [
        (Pass.BWD_PREPROCESS, ()),
        (Pass.BWD_FUSED, (0.5, 175, 152, 30.0)),
        (Pass.BWD_POSTPROCESS, (0.5, 175, 152, 172)),
    ]
