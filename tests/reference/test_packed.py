"""Where the rows of sequences lie once they are padded to whole blocks, and the reference sequence by sequence."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from fa_autotune.reference.packed import packed_lse_and_delta, packed_statistics_of, padded_places
from fa_autotune.space.workspace import (
    packed_statistics_size,
    row_blocks,
)


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
