"""Which probabilities dropout keeps: by a seed alone, whatever part of a call is looked at."""

from typing import Any

import numpy as np
import pytest
import torch

from fa_autotune.errors import InvalidProblemError
from fa_autotune.reference.dropout import (
    STEPS,
    draw_seed,
    dropout_mask,
    head_numbers,
    kept_of,
    scale_of,
    threshold_of,
)

CPU = torch.device("cpu")
SEED = torch.tensor([0x123_4567_89AB_CDEF])


def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 7) -> tuple[int, ...]:
    """Philox 4x32 as its authors write it (Salmon et al., 2011), on Python's own numbers."""
    for _ in range(rounds):
        first, third = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (third >> 32) ^ counter[1] ^ key[0],
            third & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        )
        key = ((key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF)
    return counter


@pytest.mark.parametrize(
    ("row", "key", "head"), [(0, 0, 0), (3, 5, 1), (8, 0, 2), (21, 42, 0), (7, 9, 5), (1000, 2047, 3)]
)
def test_each_probability_has_16_bits_of_philox_of_its_own(row: int, key: int, head: int) -> None:
    seed = int(SEED)
    words = philox((row & ~8, key & ~9, head, 0), (seed & 0xFFFFFFFF, seed >> 32))
    bits = words[2 * bool(row & 8) + bool(key & 8)] >> (16 * (key & 1)) & 0xFFFF
    heads = torch.full((1, 1), head)
    for threshold in (bits, bits + 1):  # kept from its own number of steps on
        p = threshold / STEPS
        assert bool(kept_of(SEED, heads, range(row, row + 1), range(key, key + 1), p)) is (threshold == bits)


def test_a_part_of_a_call_keeps_what_the_call_keeps() -> None:
    heads = head_numbers(3, 4, CPU)
    whole = kept_of(SEED, heads, range(60), range(70), 0.3)
    part = kept_of(SEED, heads[1:2, 2:4], range(13, 40), range(5, 66), 0.3)
    assert torch.equal(part, whole[1:2, 2:4, 13:40, 5:66])


@pytest.mark.parametrize(("dropout_p", "steps"), [(0.0, 0), (0.5, STEPS // 2), (1e-9, 0), (1 - 1e-9, STEPS - 1)])
def test_p_is_rounded_to_steps_of_which_one_is_left(dropout_p: float, steps: int) -> None:
    assert threshold_of(dropout_p) == steps
    assert scale_of(dropout_p) == STEPS / (STEPS - steps)


def test_nothing_is_dropped_at_0() -> None:
    assert dropout_mask(SEED, 1, 2, 9, 17, dropout_p=0.0).all()


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(dropout_p: float) -> None:
    with pytest.raises(InvalidProblemError, match=r"dropout_p=.* is not from 0 to less than 1; 0.0 means none"):
        dropout_mask(SEED, 1, 1, 1, 1, dropout_p=dropout_p)


def test_seeds_are_torchs_own_and_one_follows_another() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn += [draw_seed(CPU), draw_seed(CPU)]
    assert [tuple(seed.shape) for seed in drawn] == [(1,)] * 4
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


@pytest.mark.parametrize("seed", [None, 3, [3], torch.tensor(3.0), torch.tensor([3, 4])], ids=repr)
def test_what_is_no_seed_is_named(seed: Any) -> None:
    with pytest.raises(InvalidProblemError, match="is no seed; draw_seed"):
        dropout_mask(seed, 1, 1, 2, 2, dropout_p=0.5)


@pytest.mark.parametrize("dropout_p", [None, "0.1", True, 1.0, -0.1], ids=repr)
def test_what_is_no_share_is_named(dropout_p: Any) -> None:
    with pytest.raises(InvalidProblemError, match="is not from 0 to less than 1"):
        dropout_mask(torch.tensor([3]), 1, 1, 2, 2, dropout_p=dropout_p)


@pytest.mark.parametrize("share", [np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_of_any_kind_are_numbers(share: Any) -> None:
    expected = dropout_mask(SEED, 1, 2, 3, 4, dropout_p=0.5)
    assert torch.equal(dropout_mask(SEED, np.int64(1), torch.tensor(2), 3, 4, dropout_p=share), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [None, 2.0, -1, "2", torch.ones(2)], ids=repr)
def test_what_is_no_size_is_named(size: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"seqlen_k=.* is no size; it is an integer from 0 on"):
        dropout_mask(SEED, 1, 2, 3, size, dropout_p=0.5)
