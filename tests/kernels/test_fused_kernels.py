"""The kernels round the fused backward in Triton's interpreter, and the arithmetic that decides its order on numbers.

Gluon has no interpreter: what the fused kernels themselves compute is tested on a GPU, and by `test_fused_emulated.py`.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.kernels.modules import candidates_dir, load_module, write_module
from fa_autotune.kernels.render import render
from fa_autotune.kernels.triton_private import install_interpreter_shim
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.workspace import DQ_LANES, dq_acc_size, fused_tile, is_wide, statistics_size, turns_size

pytestmark = pytest.mark.kernel
interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
NAN = float("nan")


def make_candidate(
    kernel_pass: Pass,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    dtype: DType = DType.BFLOAT16,
    causal: bool = False,
    access: Access | None = None,
    **knobs: Any,
) -> Candidate:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    family = AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
    )
    fused = Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS
    variant = fused if kernel_pass is Pass.BWD_FUSED else Variant.PORTABLE
    return Candidate(family=family, variant=variant, config=variant_spec(kernel_pass, variant).config(**knobs))


def run(candidate: Candidate, owner: Tensor, *values: Any) -> None:
    """A kernel on its arguments; the programs are those of `owner`."""
    install_interpreter_shim()
    kernel = load_kernel(candidate, INTERPRETER.arch)
    grid = kernel.module.grid(owner.shape[0], owner.shape[1], owner.shape[2])
    kernel.run(grid, kernel.module.arguments(*values))


# --- by themselves ----------------------------------------------------------------------------------------------------


def module_of(candidate: Candidate) -> Any:
    install_interpreter_shim()
    return load_kernel(candidate, INTERPRETER.arch).module


# NumPy's word on Triton 3.6, which `launch` silences: here nothing of ours runs the kernel.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@interpreted
@pytest.mark.parametrize("heads", [1, 2])
def test_a_preprocessing_module_runs_by_itself(heads: int) -> None:
    out, d_out = (torch.randn(1, heads, 40, 64).to(torch.bfloat16) for _ in range(2))
    lse = torch.randn(1, heads, 40)
    statistics, turns = module_of(make_candidate(Pass.BWD_PREPROCESS, BLOCK_M=32, num_warps=4)).launch(out, d_out, lse)
    torch.testing.assert_close(statistics[0, :, :40], lse[0] * LOG2_E)
    torch.testing.assert_close(statistics[1, :, :40], (out.float() * d_out.float()).sum(-1)[0])
    assert not turns.any()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@interpreted
@pytest.mark.parametrize("diagonal", [None, -30])
def test_a_postprocessing_module_runs_by_itself(diagonal: int | None) -> None:
    candidate = make_candidate(Pass.BWD_POSTPROCESS, causal=diagonal is not None, num_warps=4)
    values = torch.randn(128, 64)
    dq_acc = values.reshape(2, 4, 2, 8, 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, DQ_LANES)
    dq = torch.empty(1, 1, 100, 64, dtype=torch.bfloat16)
    assert module_of(candidate).launch(dq_acc, dq, diagonal=diagonal, softmax_scale=0.5) is dq
    expected = values[:100].clone() * 0.5
    expected[: -(diagonal or 0)] = 0.0
    torch.testing.assert_close(dq[0, 0], expected.to(torch.bfloat16))


# --- preprocessing ----------------------------------------------------------------------------------------------------


def statistics_of(
    candidate: Candidate, out: Tensor, d_out: Tensor, lse: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((lse, delta), turns) that a preprocessing writes over NaN and rubbish."""
    shape = AttentionShape(
        batch_size=out.shape[0],
        num_q_heads=out.shape[1],
        num_kv_heads=out.shape[1],
        seqlen_q=out.shape[2],
        seqlen_k=out.shape[2],
    )
    statistics = torch.full(statistics_size(shape), NAN)
    turns = torch.full(turns_size(shape), 7, dtype=torch.int32)
    run(candidate, out, out, d_out, lse, statistics, turns)
    return (statistics[0], statistics[1]), turns


@interpreted
@pytest.mark.parametrize("seqlen", [1, 128, 150])
@pytest.mark.parametrize(("block_m", "num_warps"), [(32, 1), (64, 4), (128, 8)])
def test_statistics_are_those_of_the_rows_and_harmless_ones_where_there_is_no_row(
    block_m: int, num_warps: int, seqlen: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    out, d_out = (torch.randn(2, 3, seqlen, 40, generator=generator).bfloat16() for _ in range(2))
    lse = torch.randn(2, 3, seqlen, generator=generator)
    lse[0, 1, 0] = -INFINITY  # a row that sees no key
    candidate = make_candidate(Pass.BWD_PREPROCESS, 40, BLOCK_M=block_m, num_warps=num_warps)
    (lse_2, delta), turns = statistics_of(candidate, out, d_out, lse)
    expected = torch.where(lse == -INFINITY, INFINITY, lse * LOG2_E).view(6, seqlen)
    torch.testing.assert_close(lse_2[:, :seqlen], expected)
    torch.testing.assert_close(delta[:, :seqlen], (out.float() * d_out.float()).sum(-1).view(6, seqlen))
    assert (lse_2[:, seqlen:] == INFINITY).all()
    assert (delta[:, seqlen:] == 0.0).all()
    assert (turns == 0).all()


@interpreted
def test_statistics_are_read_by_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 2, 70, 40, generator=generator).half()
    ones = torch.ones(1, dtype=torch.float16).expand(dense.shape)
    lse = torch.zeros(2, 2, 70)
    candidate = make_candidate(Pass.BWD_PREPROCESS, 40, dtype=DType.FLOAT16, access=Access.ANY, BLOCK_M=32, num_warps=2)
    transposed = dense.transpose(1, 3).contiguous().transpose(1, 3)
    (_, delta), _ = statistics_of(candidate, transposed, ones, lse)
    torch.testing.assert_close(delta[:, :70], dense.float().sum(-1).view(4, 70))


# --- postprocessing ---------------------------------------------------------------------------------------------------


def as_added_up(dq: Tensor, family: AttentionFamily) -> Tensor:
    """dq_acc that holds dq, value by value as a warpgroup's accumulators hold each part; NaN where dq has nothing."""
    tile = fused_tile(family)
    batch_size, heads, seqlen, head_dim = dq.shape
    shape = AttentionShape(batch_size=batch_size, num_q_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=1)
    dq_acc = torch.full(dq_acc_size(family, shape), NAN)
    blocks = -(-seqlen // tile.block_m)
    padded = torch.full((batch_size * heads, blocks * tile.block_m, tile.columns), NAN)
    padded[:, :seqlen, :head_dim] = dq.reshape(batch_size * heads, seqlen, head_dim)
    tiles = padded.view(-1, tile.block_m, tile.columns)
    flat = dq_acc.view(tiles.shape[0], tile.parts, 64 * 64)
    for part in range(tile.parts):
        rows = slice(part * 64, part * 64 + 64) if tile.block_m == 128 else slice(0, 64)
        columns = slice(0, 64) if tile.block_m == 128 else slice(part * 64, part * 64 + 64)
        own = tiles[:, rows, columns]
        for row in range(64):
            for column in range(64):
                warp, half, lane_row = row // 16, row // 8 % 2, row % 8
                group, lane_column, side = column // 8, column // 2 % 4, column % 2
                place = ((((group * 4 + warp) * 8 + lane_row) * 4 + lane_column) * 2 + half) * 2 + side
                flat[:, part, place] = own[:, row, column]
    return dq_acc


@interpreted
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "access"),
    [
        (64, 64, Access.TMA),
        (40, 8, Access.TMA),
        (24, 24, Access.ANY),
        (128, 128, Access.TMA),
        (64, 96, Access.TMA),
        (40, 192, Access.TMA),
        (96, 136, Access.TMA),
        (192, 192, Access.TMA),
        (200, 64, Access.ANY),
    ],
)
def test_dq_is_put_in_order_scaled_and_rounded(head_dim: int, head_dim_v: int, access: Access, causal: bool) -> None:
    candidate = make_candidate(Pass.BWD_POSTPROCESS, head_dim, head_dim_v, causal=causal, access=access, num_warps=4)
    generator = torch.Generator().manual_seed(0)
    dq = torch.randn(2, 2, 150, head_dim, generator=generator)
    dq_acc = as_added_up(dq, candidate.family)
    assert dq_acc.shape[1] == DQ_LANES
    found = torch.full((2, 150, 2, head_dim), NAN, dtype=torch.bfloat16).transpose(1, 2)
    run(candidate, found, dq_acc, found, 0.25, 0 if causal else None)
    assert torch.equal(found, (dq * 0.25).bfloat16())


@interpreted
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dq_of_rows_that_see_no_key_is_zero_whatever_was_there(head_dim: int) -> None:
    candidate = make_candidate(Pass.BWD_POSTPROCESS, head_dim, causal=True, num_warps=2)
    dq = torch.ones(1, 1, 300, head_dim)
    dq[:, :, :137] = NAN
    found = torch.full_like(dq, NAN).bfloat16()
    run(candidate, found, as_added_up(dq, candidate.family), found, 1.0, -137)
    assert (found[:, :, :137] == 0).all()
    assert (found[:, :, 137:] == 1).all()


# --- the order of dq --------------------------------------------------------------------------------------------------


Call = Callable[..., Any]


@cache
def scalar_functions(causal: bool, diagonal_first: bool, head_dim: int, heads_per_group: int) -> tuple[Call, int, int]:
    """The scalar functions of a fused kernel, on numbers and with Python's own in place of the language module; and its
    query rows and keys in a tile."""
    candidate = make_candidate(
        Pass.BWD_FUSED, head_dim, causal=causal, DIAGONAL_FIRST=diagonal_first, HEADS_PER_GROUP=heads_per_group
    )
    module = load_module(write_module(render(candidate), candidates_dir()))
    language = SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, one, other: one if condition else other
    )
    names: dict[str, Any] = {"gl": language}
    names.update({name: getattr(module, name).value for name in ("BLOCK_M", "BLOCK_N", "HEADS_PER_GROUP")})
    for name in ("block_of_program", "key_block_of_program", "walk_of", "next_tile", "turn_of", "change_of"):
        names[name] = FunctionType(getattr(module, name).fn.__code__, names)
    return lambda name, *values: names[name](*values), names["BLOCK_M"], names["BLOCK_N"]


@settings(max_examples=200)
@given(
    order=st.sampled_from([(False, False), (True, False), (True, True)]),
    head_dim=st.sampled_from([64, 128, 256]),
    heads_per_group=st.sampled_from([1, 2, 8]),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    diagonal=st.one_of(st.none(), st.just(0), st.integers(-700, 700)),  # None is bottom-right
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),  # (batch, kv head) pairs, and query heads for each
)
def test_every_key_block_that_a_tile_sees_adds_once_in_the_order_in_which_programs_start(
    order: tuple[bool, bool],
    head_dim: int,
    heads_per_group: int,
    lengths: tuple[int, int],
    diagonal: int | None,
    heads: tuple[int, int],
) -> None:
    (causal, diagonal_first), (seqlen_q, seqlen_k), (batch_heads, group) = order, lengths, heads
    call, block_m, block_n = scalar_functions(causal, diagonal_first, head_dim, heads_per_group)
    diagonal = seqlen_k - seqlen_q if diagonal is None else diagonal
    blocks = -(-seqlen_k // block_n)
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (query head, first row) to (block, turn, last turn)
    for program in range(blocks * batch_heads):
        n_block, batch_head = call("key_block_of_program", program, blocks, batch_heads)
        tiles, start_m = call("walk_of", n_block, seqlen_q, diagonal) if causal else call("walk_of", seqlen_q)
        first_head = q_head = batch_head * group
        for _ in range(tiles * group):
            where = (start_m, seqlen_q, seqlen_k, diagonal) if causal else (seqlen_k,)
            parts.setdefault((q_head, start_m), []).append((n_block, *call("turn_of", n_block, *where)))
            q_head, start_m = call("next_tile", q_head, start_m, first_head, group)
        assert q_head == first_head
    for q_head in range(batch_heads * group):
        for start_m in range(0, seqlen_q, block_m):
            last_row = min(start_m + block_m, seqlen_q) - 1
            seen = [block for block in range(blocks) if not causal or block * block_n <= last_row + diagonal]
            counter = 0
            added = parts.pop((q_head, start_m), [])  # as programs start: one may only wait for those before it
            for _, turn, last in added:
                assert counter == turn
                counter += call("change_of", turn, last)
            assert sorted(block for block, _, _ in added) == seen
            assert counter == 0
    assert parts == {}
