"""The kinds of rows: what calls on tensors of a fixed length and on packed sequences do differently, each by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.kernels.fast_launch import Counts
from fa_autotune.ops.call import (
    BHSD,
    BHSD_STORED_AS_BSHD,
    BOTTOM_RIGHT,
    BSHD,
    FULL,
    GENERATED,
    NO_EXTRAS,
    OPEN,
    PACKED,
    TOP_LEFT,
    UNORDERED,
    WINDOW,
    Call,
    Extras,
    Saved,
)
from fa_autotune.ops.memory import Geometry
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.rows.packed import MAX_TOTAL
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.reference.packed import padded_places
from fa_autotune.space.workspace import STATISTIC_ROWS

LAYOUTS = {"bhsd": BHSD, "bshd": BSHD, "bhsd stored as bshd": BHSD_STORED_AS_BSHD}
FIXED = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
EVERY = pytest.mark.parametrize("layout", [*LAYOUTS.values(), PACKED], ids=[*LAYOUTS, "packed"])
LENGTHS_Q, LENGTHS_K = [3, 4], [2, 8]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def tensors_of(layout: int) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """q, k and v with 4 heads that share 2 and head dims 16 and 24, and what says where their rows are."""
    if layout == PACKED:
        q, k, v = (torch.randn(total, heads, dim) for total, heads, dim in ((7, 4, 16), (10, 2, 16), (10, 2, 24)))
        return q, k, v, Extras(cu_seqlens_q=starts_of(LENGTHS_Q), cu_seqlens_k=starts_of(LENGTHS_K))
    q, k, v = (torch.randn(2, heads, rows, dim) for heads, rows, dim in ((4, 7, 16), (2, 10, 16), (2, 10, 24)))
    if layout == BSHD:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    return q, k, v, NO_EXTRAS


def call_of(layout: int, mask: int = FULL, **others: Any) -> Call:
    return Call(None, mask, layout, GENERATED, **others)


def allocated(geometry: Geometry) -> Tensor:
    return torch.empty_strided(*geometry)


def results_of(layout: int) -> tuple[Tensor, Tensor]:
    """out and lse, unset."""
    q, _, v, _ = tensors_of(layout)
    results = rows_of(layout).results(q, v)
    return (
        torch.empty_strided(results.out_size, results.out_strides),
        torch.empty_strided(results.lse_size, results.lse_strides),
    )


# --- where rows are ---------------------------------------------------------------------------------------------------


@EVERY
def test_kernels_take_views_of_one_order_of_axes(layout: int) -> None:
    q, k, v, _ = tensors_of(layout)
    rows = rows_of(layout)
    sizes = [(4, 7, 16), (2, 10, 16), (2, 10, 24)]
    for tensor, (heads, length, dim) in zip((q, k, v), sizes, strict=True):
        view = rows.view(tensor)
        assert view.shape == (1 if layout == PACKED else 2, heads, length, dim)
        assert view.data_ptr() == tensor.data_ptr()


@EVERY
def test_results_and_gradients_are_dense_in_the_calls_layout(layout: int) -> None:
    q, k, v, _ = tensors_of(layout)
    rows = rows_of(layout)
    out, lse = results_of(layout)
    assert out.shape == (*q.shape[:-1], 24)
    assert rows.row_numbers(lse).shape == rows.view(q).shape[:3]
    assert lse.is_contiguous()
    gradients = [allocated(rows.gradient(tensor)) for tensor in (q, k, v)]
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in (q, k, v)]
    for tensor in (out, *gradients):
        stored = tensor.transpose(1, 2) if layout == BHSD_STORED_AS_BSHD else tensor
        assert stored.is_contiguous()


@pytest.mark.parametrize("layout", [BSHD, PACKED], ids=["bshd", "packed"])
def test_q_k_and_v_are_stacked_before_their_heads(layout: int) -> None:
    q, *_ = tensors_of(layout)
    assert rows_of(layout).stack_axis == q.ndim - 2


@EVERY
def test_what_was_saved_has_the_sizes_of_the_calls_tensors(layout: int) -> None:
    q, k, v, extras = tensors_of(layout)
    rows, call = rows_of(layout), call_of(layout)
    family = AttentionFamily(dtype=DType.FLOAT32, head_dim=16, head_dim_v=24, bounded_right=False)
    shape = rows.shape(call, rows.bounds(call, q, k), q, k, extras)
    saved = Saved(q, k, v, *results_of(layout), extras)
    assert rows.saved_sizes(family, shape, saved) == tuple(tuple(tensor.shape) for tensor in saved[:5])
    other = saved._replace(k=k[..., :8])
    assert rows.saved_sizes(family, shape, other) == rows.saved_sizes(family, shape, saved)


@EVERY
def test_launches_are_told_what_changes_among_calls_of_one_plan(layout: int) -> None:
    q, k, _, extras = tensors_of(layout)
    assert rows_of(layout).counts(q, k, extras) == (Counts(2, 7, 10) if layout == PACKED else None)


def test_no_key_and_one_key_on_average_are_one_kind() -> None:
    """And two are another: kernels are chosen by powers of two, and the same on every rank."""
    q, _, _, extras = tensors_of(PACKED)
    none, one, two = (
        rows_of(PACKED).key(q, torch.empty(total, 2, 16), torch.empty(total, 2, 24), extras, call_of(PACKED))
        for total in (0, 2, 4)
    )
    assert none == one != two


# --- which keys are seen ----------------------------------------------------------------------------------------------


@FIXED
@pytest.mark.parametrize(
    ("mask", "window", "bounds", "sides"),
    [
        (FULL, (9, 9), (None, None), (0, 0)),
        (BOTTOM_RIGHT, (9, 9), (None, 3), (0, 0)),
        (TOP_LEFT, (9, 9), (None, 0), (0, 0)),
        (WINDOW, (2, 1), (1, 4), (2, 1)),
        (WINDOW, (OPEN, 1), (None, 4), (0, 1)),
        (WINDOW, (2, OPEN), (1, None), (2, 0)),
        (WINDOW, (20, 30), (None, None), (0, 0)),  # past every key
    ],
)
def test_diagonals_of_fixed_lengths_count_from_the_tensors(
    mask: int, window: tuple[int, int], bounds: Any, sides: tuple[int, int], layout: int
) -> None:
    """7 rows and 10 keys."""
    q, k, _, extras = tensors_of(layout)
    left, right = window
    call, rows = call_of(layout, mask, window_left=left, window_right=right), rows_of(layout)
    assert rows.bounds(call, q, k) == bounds
    shape = rows.shape(call, bounds, q, k, extras)
    assert (shape.window_left, shape.window_right) == sides
    assert (shape.batch_size, shape.num_q_heads, shape.num_kv_heads, shape.seqlen_q, shape.seqlen_k) == (2, 4, 2, 7, 10)


@pytest.mark.parametrize(
    ("mask", "window", "bounds"),
    [
        (FULL, (9, 9), (None, None)),
        (BOTTOM_RIGHT, (9, 9), (None, 0)),
        (WINDOW, (2, 1), (-2, 1)),
        (WINDOW, (OPEN, 1), (None, 1)),
        (WINDOW, (2, OPEN), (-2, None)),
        (WINDOW, (MAX_TOTAL, MAX_TOTAL - 1), (None, MAX_TOTAL - 1)),
    ],
)
def test_diagonals_of_packed_sequences_count_from_each_ones_own(
    mask: int, window: tuple[int, int], bounds: Any
) -> None:
    q, k, _, extras = tensors_of(PACKED)
    left, right = window
    call, rows = call_of(PACKED, mask, window_left=left, window_right=right), rows_of(PACKED)
    assert rows.bounds(call, q, k) == bounds
    shape = rows.shape(call, bounds, q, k, extras)
    assert (shape.batch_size, shape.seqlen_q, shape.seqlen_k) == (2, 4, 8)  # means in powers of two


# --- which calls share a plan -----------------------------------------------------------------------------------------


def key_of(layout: int, call: Call, *tensors: Tensor, **extras: Tensor) -> Any:
    q, k, v, of_call = tensors_of(layout)
    given = of_call if not extras else of_call._replace(**extras)
    q, k, v = tensors or (q, k, v)
    return rows_of(layout).key(q, k, v, given, call)


@EVERY
def test_numbers_that_kernels_take_are_in_no_key(layout: int) -> None:
    plain = key_of(layout, call_of(layout, WINDOW))
    for others in (
        {"softmax_scale": 0.3},
        {"window_left": 3},
        {"window_right": 3},
        {"softcap": 2.0},
        {"dropout_p": 0.1},
    ):
        assert key_of(layout, call_of(layout, WINDOW)._replace(**others)) == plain
    assert set(Call._fields) == {
        *("softmax_scale", "window_left", "window_right", "softcap", "dropout_p"),
        *("mask", "layout", "backend", "tf32"),
    }


@EVERY
def test_what_decides_how_tensors_are_read_is_in_the_key(layout: int) -> None:
    q, k, v, _ = tensors_of(layout)
    call = call_of(layout)
    late = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    wide = torch.stack([k, k], -1)[..., 0]
    keys = [
        key_of(layout, call, q, k, v),
        key_of(layout, call, q.half(), k.half(), v.half()),
        key_of(layout, call, late, k, v),
        key_of(layout, call, q, wide, v),
        key_of(layout, call, q, k, v[..., :8].contiguous()),
        key_of(layout, call, q[..., :8], k[..., :8], v),
        key_of(layout, call._replace(mask=BOTTOM_RIGHT), q, k, v),
        key_of(layout, call._replace(backend=UNORDERED), q, k, v),
        key_of(layout, call, q, k, v, alibi_slopes=torch.ones(2, 4)),
        key_of(layout, call, q, k, v, dropout_seed=torch.zeros(1, dtype=torch.int64)),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(layout, call, q.clone(), k.clone(), v.clone()) == keys[0]


@FIXED
def test_every_length_of_fixed_rows_is_in_the_key(layout: int) -> None:
    q, k, v, _ = tensors_of(layout)
    axis = 1 if layout == BSHD else 2
    shorter = key_of(layout, call_of(layout), q.narrow(axis, 0, 6), k, v)
    assert shorter != key_of(layout, call_of(layout), q, k, v)


def packed_key(lengths: list[int]) -> Any:
    total = sum(lengths)
    q, k, v = (torch.empty(total, heads, 16) for heads in (4, 2, 2))
    starts = starts_of(lengths)
    extras = Extras(cu_seqlens_q=starts, cu_seqlens_k=starts)
    return rows_of(PACKED).key(q, k, v, extras, call_of(PACKED))


def test_totals_and_numbers_of_sequences_are_in_the_key_by_powers_of_two() -> None:
    base = packed_key([30, 20, 50, 4])  # 4 sequences, 26 rows each
    assert packed_key([32, 32, 32]) == packed_key([17, 17, 17]) == base
    assert packed_key([17] * 5) != base
    assert packed_key([33] * 4) != base
    assert packed_key([16] * 4) != base
    empty = packed_key([])
    assert empty not in (packed_key([0]), base)


def test_packed_tensors_that_do_not_agree_are_refused_also_where_a_plan_is_known() -> None:
    """Their number is in no key."""
    q, k, v, extras = tensors_of(PACKED)
    rows, call = rows_of(PACKED), call_of(PACKED)
    for tensors, given, says in (
        ((q, k, v[:-1]), extras, "2 heads × 10 keys and v 2 × 9"),
        ((q, k, v), extras._replace(cu_seqlens_k=extras.cu_seqlens_k[:-1]), "says 2 sequences and cu_seqlens_k 1"),
        ((q, k, v), extras._replace(alibi_slopes=torch.ones(3, 4)), r"alibi_slopes is torch.float32 \(3, 4\)"),
        ((q, k, v), extras._replace(sinks=torch.ones(3, 4)), r"sinks is torch.float32 \(3, 4\)"),
        ((q, k, v), extras._replace(attn_mask=torch.ones(1, 1, 7, 10)), "attn_mask is given with cu_seqlens"),
    ):
        with pytest.raises(InvalidProblemError, match=says):
            rows.key(*tensors, given, call)


# --- what is refused --------------------------------------------------------------------------------------------------


@EVERY
def test_tensors_of_another_kind_are_refused(layout: int) -> None:
    rows, call = rows_of(layout), call_of(layout)
    other = BHSD if layout == PACKED else PACKED
    q, k, v, extras = tensors_of(other)
    with pytest.raises(InvalidProblemError, match=r"q has shape .* takes \d dimensions"):
        rows.check(q, k, v, extras, call)
    q, k, v, extras = tensors_of(layout)
    rows.check(q, k, v, extras, call)
    with pytest.raises(
        InvalidProblemError, match="cu_seqlens_q is a NoneType" if layout == PACKED else "cu_seqlens is"
    ):
        rows.check(q, k, v, NO_EXTRAS if layout == PACKED else Extras(cu_seqlens_q=starts_of([7])), call)


def test_packed_sequences_have_no_top_left() -> None:
    q, k, v, extras = tensors_of(PACKED)
    with pytest.raises(InvalidProblemError, match=r"mask=2 \(top-left\) is given with cu_seqlens; .*: pass 1"):
        rows_of(PACKED).check(q, k, v, extras, call_of(PACKED, TOP_LEFT))


@EVERY
def test_a_call_is_empty_where_nothing_is_to_be_computed(layout: int) -> None:
    q, k, _, extras = tensors_of(layout)
    rows = rows_of(layout)
    assert not rows.is_empty(q, k, extras)
    if layout == PACKED:
        none = torch.zeros(1, dtype=torch.int32)
        assert rows.is_empty(q, k, Extras(cu_seqlens_q=none, cu_seqlens_k=none))
        assert rows.is_empty(q[:, :0], k[:, :0], extras)
        assert not rows.is_empty(q[:0], k, extras)  # kernels write zeros, or launch no program
    else:
        assert rows.is_empty(q[:0], k[:0], extras)
        assert rows.is_empty(q, k[:, :0], extras)


# --- lse and delta ----------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("with_sinks", [False, True])
def test_lse_of_rows_without_keys_is_their_sink_where_they_belong_to_a_sequence(with_sinks: bool, layout: int) -> None:
    _, _, _, extras = tensors_of(layout)
    sinks = torch.arange(4.0)
    given = extras._replace(sinks=sinks if layout == PACKED else sinks.expand(2, 4)) if with_sinks else extras
    lse = rows_of(layout).lse_without_keys(results_of(layout)[1], given)
    if with_sinks and layout != PACKED:
        assert torch.equal(lse, sinks[None, :, None].expand(2, 4, 7))
    elif with_sinks:
        assert torch.equal(lse, sinks[:, None].expand(4, 7))
        shorter = given._replace(cu_seqlens_q=starts_of([3, 2]))
        assert (rows_of(layout).lse_without_keys(lse, shorter)[:, 5:] == float("-inf")).all()
    else:
        assert (lse == float("-inf")).all()


@EVERY
def test_delta_of_a_fused_backward_lies_as_lse_does_and_a_gradient_of_lse_is_taken_off_there(layout: int) -> None:
    q, k, v, extras = tensors_of(layout)
    rows, call = rows_of(layout), call_of(layout)
    lse = results_of(layout)[1].normal_()
    saved = Saved(q, k, v, q, lse, extras)
    family = AttentionFamily(dtype=DType.BFLOAT16, head_dim=64, head_dim_v=64, bounded_right=False)
    shape = rows.shape(call, rows.bounds(call, q, k), q, k, extras)
    sizes = rows.workspaces(family, shape, rows.counts(q, k, extras))
    statistics = allocated(sizes.statistics).fill_(9.0)
    expected = torch.randn(lse.shape)
    if layout == PACKED:
        statistics.unbind()[1][:, padded_places(extras.cu_seqlens_q, 7, STATISTIC_ROWS)] = expected
    else:
        statistics.unbind()[1].view(2, 4, -1)[..., :7] = expected
    assert torch.equal(rows.delta(statistics, saved), expected)
    before, d_lse = statistics.clone(), torch.randn(lse.shape)
    rows.subtract(statistics, d_lse, saved)
    torch.testing.assert_close(rows.delta(statistics, saved), expected - d_lse)
    changed = statistics != before
    assert int(changed.sum()) == lse.numel()
    assert not changed[0].any()  # lse itself
