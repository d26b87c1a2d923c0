"""Where the rows of sequences lie once they are padded to whole blocks, and the reference sequence by sequence."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import attention_gradients, attention_reference
from fa_autotune.reference.features import Features
from fa_autotune.reference.packed import (
    PackedCall,
    packed_gradients,
    packed_gradients_from_statistics,
    packed_lse_and_delta,
    packed_reference,
    packed_same_precision,
    packed_statistics,
    packed_statistics_of,
    padded_places,
    sequences_of,
)
from fa_autotune.space.workspace import packed_statistics_size, row_blocks


def starts_of(*lengths: int) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("lengths", [(1,), (0, 0, 5), (128, 127, 129, 0, 1, 64), (300, 0, 0, 2, 2, 2, 1000, 0)])
def test_every_sequence_has_whole_blocks_of_its_own(lengths: tuple[int, ...], block: int) -> None:
    starts, total = starts_of(*lengths), sum(lengths) + 3
    places = padded_places(starts, total, block)
    blocks = [set((places[first:end] // block).tolist()) for first, end in pairwise([*starts.tolist(), total])]
    for number, own in enumerate(blocks):
        assert all(own.isdisjoint(other) for other in blocks[number + 1 :])
        first = int(starts[number])
        if own:
            assert places[first] == (first // block + number) * block
    assert max(places) < row_blocks(total, len(lengths), block) * block
    assert (places.diff() >= 1).all()


@pytest.mark.parametrize("starts", [[0, 500, 20], [-7, 3, 30], [5, 2, 9], [0, 2**31 - 1, 2**31 - 1]])
def test_places_of_starts_that_make_no_sense_are_there_all_the_same(starts: list[int]) -> None:
    places = padded_places(torch.tensor(starts, dtype=torch.int32), 20, 64)
    assert places.min() >= 0
    assert places.max() < row_blocks(20, 2, 64) * 64


def test_statistics_are_made_of_lse_and_delta_and_back() -> None:
    starts = starts_of(130, 0, 7)
    lse, delta = torch.randn(1, 3, 140), torch.randn(1, 3, 140)
    lse[:, :, 4] = lse[:, :, 137:] = float("-inf")
    delta[:, :, 137:] = 0.0
    statistics = packed_statistics_of(starts, lse, delta)
    assert tuple(statistics.shape) == packed_statistics_size(3, 3, 140)
    found = packed_lse_and_delta(starts, statistics, 140)
    torch.testing.assert_close(found[0], lse)
    assert torch.equal(found[1], delta)


# --- sequence by sequence ---------------------------------------------------------------------------------------------

SEQUENCES = Sequences(lengths_q=(5, 0, 3, 7), lengths_k=(9, 4, 0, 6), unused_q=2, unused_k=1)
WINDOW = PackedCall(
    sequences=SEQUENCES,
    softmax_scale=0.3,
    diagonal=1,
    features=Features(left_diagonal=-2, alibi_slopes=torch.rand(4, 2), sinks=torch.randn(4, 2)),
)


def make_rows() -> tuple[Tensor, ...]:
    """q, k, v and the gradient of out, as one call on all sequences has them."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, SEQUENCES.total_q, 8), (1, SEQUENCES.total_k, 8), (1, SEQUENCES.total_k, 6), (2, SEQUENCES.total_q, 6))
    return tuple(torch.randn(1, *size, generator=generator, dtype=torch.float64) for size in sizes)


def own_call(number: int) -> tuple[slice, slice, dict[str, Any]]:
    """The rows and keys of a sequence, and what the reference of a batch is told of it."""
    rows, keys = list(SEQUENCES.rows())[number]
    offset = SEQUENCES.lengths_k[number] - SEQUENCES.lengths_q[number]
    features = replace(
        WINDOW.features,
        left_diagonal=offset - 2,
        key_offset=offset,
        alibi_slopes=WINDOW.features.alibi_slopes[number : number + 1],
        sinks=WINDOW.features.sinks[number : number + 1],
    )
    return rows, keys, {"softmax_scale": 0.3, "diagonal": offset + 1, "features": features}


@pytest.mark.parametrize("number", [0, 3])
def test_a_sequence_gets_what_a_call_of_its_own_gives(number: int) -> None:
    q, k, v, d_out = make_rows()
    rows, keys, call = own_call(number)
    one = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    out, lse = packed_reference(q, k, v, WINDOW)
    expected_out, expected_lse = attention_reference(*one, **call)
    assert torch.equal(out[:, :, rows], expected_out)
    assert torch.equal(lse[:, :, rows], expected_lse)
    dq, dk, dv = packed_gradients(q, k, v, d_out, None, WINDOW)
    for found, expected in zip(
        (dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]),
        attention_gradients(*one, d_out[:, :, rows], None, **call),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_rows_of_no_sequence_or_without_keys_give_zero_and_what_their_sink_says() -> None:
    q, k, v, d_out = make_rows()
    out, lse = packed_reference(q, k, v, WINDOW)
    without_keys, unused = slice(5, 8), slice(15, 17)
    assert not out[:, :, without_keys].any()
    assert not out[:, :, unused].any()
    assert torch.equal(lse[0, :, without_keys], WINDOW.features.sinks[2][:, None].expand(2, 3))
    assert (lse[:, :, unused] == float("-inf")).all()
    dq, dk, dv = packed_gradients(q, k, v, d_out, None, WINDOW)
    assert not dq[:, :, [5, 6, 7, 15, 16]].any()
    unseen = WINDOW.unseen_keys()
    assert unseen[9:13].all()  # of a sequence without rows
    assert unseen[19:].all()  # of no sequence
    assert not dk[:, :, unseen].any()
    assert not dv[:, :, unseen].any()


def test_blind_rows_are_those_that_see_no_key() -> None:
    blind = WINDOW.blind_rows()
    assert blind.nonzero().flatten().tolist() == [5, 6, 7, 15, 16]
    narrow = replace(WINDOW, diagonal=-8, features=replace(WINDOW.features, left_diagonal=None, sinks=None))
    assert narrow.blind_rows()[:5].tolist() == [offset + 4 - 8 < 0 for offset in range(5)]


def test_gradients_follow_from_the_statistics_that_a_forward_leaves() -> None:
    q, k, v, d_out = (tensor.float() for tensor in make_rows())
    lse, delta = packed_statistics(q, k, v, d_out, WINDOW)
    found = packed_gradients_from_statistics(q, k, v, d_out, lse, delta, WINDOW)
    for one, expected in zip(found, packed_gradients(q, k, v, d_out, None, WINDOW), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, packed_reference(q, k, v, WINDOW)[1])


def test_plain_torch_errs_by_what_its_precision_is() -> None:
    q, k, v, _ = (tensor.to(torch.bfloat16) for tensor in make_rows())
    same, exact = packed_same_precision(q, k, v, WINDOW), packed_reference(q, k, v, WINDOW)[0]
    assert same.dtype is torch.bfloat16
    assert 0 < (same.float() - exact).abs().max() < 0.1


@pytest.mark.parametrize(
    ("starts_q", "lengths"),
    [([0, 3, 3, 10], (3, 0, 7)), ([0, 30, 3, 10], (10, 0, 0)), ([0, 3, 5, 8], (3, 2, 3)), ([-4, 2, 9, 99], (2, 7, 1))],
)
def test_lengths_are_cut_to_the_rows_that_are_there(starts_q: list[int], lengths: tuple[int, ...]) -> None:
    starts_k = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    found = sequences_of(torch.tensor(starts_q, dtype=torch.int32), starts_k, 10, 6)
    assert found.lengths_q == lengths
    assert (found.lengths_k, found.unused_k) == ((1, 1, 2), 2)
    assert found.total_q == 10
