"""A call's features: which keys and rows see each other, what a part of a call has of them, and their gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import attention_reference
from fa_autotune.reference.dropout import head_numbers, scale_of
from fa_autotune.reference.features import (
    NO_FEATURES,
    Features,
    seeing_rows,
    seen_keys,
    sink_gradient,
    summed_like,
    window_diagonals,
)

LENGTHS = st.integers(1, 12)
SIDES = st.one_of(st.none(), st.integers(-15, 15))


def visible(seqlen_q: int, seqlen_k: int, diagonal: int | None, left: int | None) -> torch.Tensor:
    """Which keys each row sees, by the definition."""
    row, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    shown &= True if diagonal is None else key <= row + diagonal
    return shown & (True if left is None else key >= row + left)


@given(LENGTHS, LENGTHS, SIDES, SIDES)
def test_seen_keys_and_seeing_rows_are_those_of_the_mask(
    seqlen_q: int, seqlen_k: int, diagonal: int | None, left: int | None
) -> None:
    if diagonal is not None and left is not None and left > diagonal:
        left, diagonal = diagonal, left
    shown = visible(seqlen_q, seqlen_k, diagonal, left)
    for (first, end), flags in (
        (seen_keys(seqlen_q, seqlen_k, diagonal, left), shown.any(0)),
        (seeing_rows(seqlen_q, seqlen_k, diagonal, left), shown.any(1)),
    ):
        assert flags.nonzero().flatten().tolist() == list(range(first, end))


@given(LENGTHS, LENGTHS, st.integers(-1, 15), st.integers(-1, 15), st.booleans())
def test_window_sides_are_inclusive_and_one_that_hides_nothing_is_open(
    seqlen_q: int, seqlen_k: int, left: int, right: int, top_left: bool
) -> None:
    offset = 0 if top_left else seqlen_k - seqlen_q
    row, key = torch.arange(seqlen_q)[:, None] + offset, torch.arange(seqlen_k)[None, :]
    expected = ((key >= row - left) if left >= 0 else key >= 0) & ((key <= row + right) if right >= 0 else key >= 0)
    left_diagonal, diagonal = window_diagonals((left, right), seqlen_q, seqlen_k, top_left=top_left)
    assert torch.equal(visible(seqlen_q, seqlen_k, diagonal, left_diagonal), expected.expand(seqlen_q, seqlen_k))
    if expected.all():
        assert (left_diagonal, diagonal) == (None, None)


# --- parts of a call --------------------------------------------------------------------------------------------------


def make_features() -> Features:
    return Features(
        alibi_slopes=torch.rand(3, 4),
        sinks=torch.randn(3, 4),
        attn_mask=torch.randn(3, 1, 5, 6),
        dropout_p=0.5,
        dropout_seed=torch.tensor([7]),
        head_numbers=head_numbers(3, 4, torch.device("cpu")),
    )


def test_a_part_of_batch_and_heads_has_its_own_values() -> None:
    whole, batch, heads = make_features(), slice(1, 2), slice(2, 4)
    part = whole.of_heads(batch, heads)
    for name in ("alibi_slopes", "sinks", "head_numbers"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[1:2, 2:4])
    assert torch.equal(part.attn_mask, whole.attn_mask[1:2])  # one for all heads
    assert all(getattr(NO_FEATURES.of_heads(batch, heads), name) is None for name in ("alibi_slopes", "attn_mask"))


def test_a_mask_of_a_stretch_keeps_what_is_broadcast() -> None:
    rows, keys = slice(1, 3), slice(2, 6)
    mask = torch.randn(3, 1, 5, 6)
    assert torch.equal(Features(attn_mask=mask).mask_of(rows, keys), mask[:, :, 1:3, 2:6])
    assert Features(attn_mask=mask[:, :, :1]).mask_of(rows, keys).shape == (3, 1, 1, 4)
    assert Features(attn_mask=mask[..., :1]).mask_of(rows, keys).shape == (3, 1, 2, 1)
    assert NO_FEATURES.mask_of(rows, keys) is None


def test_a_part_drops_what_the_whole_drops_and_scales_what_is_kept() -> None:
    features, weights = make_features(), torch.rand(3, 4, 20, 24) + 0.5
    whole = features.dropped(weights)
    torch.testing.assert_close(whole[whole != 0], (weights * scale_of(0.5))[whole != 0])
    assert 0.4 < (whole == 0).float().mean() < 0.6
    part = features.of_heads(slice(2, 3), slice(1, 3)).dropped(weights[2:3, 1:3, 4:12, 8:20], 4, 8)
    assert torch.equal(part, whole[2:3, 1:3, 4:12, 8:20])
    assert NO_FEATURES.dropped(weights) is weights


def test_a_kernel_gets_what_its_family_names_in_its_order() -> None:
    features = replace(make_features(), softcap=3.0, left_diagonal=-2)
    family = AttentionProblem.parse("3x4x2x5x6x16,left=2,softcap,alibi,sinks").family
    assert features.tensors(family) == (features.alibi_slopes, features.sinks)
    assert features.numbers(family) == (-2, 3.0)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_the_gradient_of_sinks_is_autograds() -> None:
    q, k, v, d_out = (torch.randn(2, 2, 5, 8, dtype=torch.float64) for _ in range(4))
    sinks = torch.randn(2, 2, dtype=torch.float64)

    def out_of(sinks: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([q @ k.transpose(2, 3) * 0.3, sinks[..., None, None].expand(2, 2, 5, 1)], -1)
        return scores.softmax(-1)[..., :5] @ v

    leaf = sinks.clone().requires_grad_()
    (expected,) = torch.autograd.grad(out_of(leaf), leaf, d_out)
    out, lse = attention_reference(
        q.float(), k.float(), v.float(), softmax_scale=0.3, features=Features(sinks=sinks.float())
    )
    delta = (out.double() * d_out).sum(-1)
    torch.testing.assert_close(sink_gradient(sinks, lse.double(), delta), expected, atol=1e-5, rtol=1e-4)


def test_rows_that_see_neither_key_nor_sink_give_sinks_no_gradient() -> None:
    lse = torch.tensor([[[float("-inf"), 1.0]]])
    found = sink_gradient(torch.tensor([[0.0]]), lse, torch.tensor([[[5.0, 2.0]]]))
    torch.testing.assert_close(found, torch.tensor([[-2.0 * torch.tensor(-1.0).exp()]]))


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (1, 1, 4, 1), (1, 1, 1, 1)])
def test_a_masks_gradient_is_summed_where_the_mask_is_broadcast(size: tuple[int, ...]) -> None:
    mask = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad((mask * weights).sum(), mask)
    torch.testing.assert_close(summed_like(mask, weights), expected)
