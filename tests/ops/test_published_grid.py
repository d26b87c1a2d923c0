"""flash-attention's published test grid: what is taken of it, and a share of it in Triton's interpreter."""

from collections import Counter

import pytest
import torch

from kit.attention_calls import BFLOAT16, FLOAT16, interpreted
from kit.published_grid import (
    COMBINATIONS,
    DTYPES,
    HEAD_DIMS,
    KV_HEADS,
    PAIRS,
    Combination,
    check,
    sample,
)


def test_the_grid_has_the_points_that_are_published() -> None:
    assert len(DTYPES) * len(KV_HEADS) * 2 * len(set(COMBINATIONS)) * len(HEAD_DIMS) * len(set(PAIRS)) == 23_040


def test_the_sample_meets_every_feature_on_and_off_beside_every_dtype_and_head_dim() -> None:
    chosen = sample()
    assert len(set(chosen)) == len(chosen) == 48
    assert set(Counter(combination for _, _, combination in chosen).values()) == {3}
    for feature in ("causal", "local", "alibi", "softcap"):
        met = {(dtype, head_dim, getattr(one, feature)) for dtype, head_dim, one in chosen}
        assert len(met) == 2 * len(DTYPES) * len(HEAD_DIMS)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "head_dim", "features", "lengths"),
    [
        (FLOAT16, 59, "plain", (113, 203)),
        (BFLOAT16, 40, "causal", (3, 239)),
        (FLOAT16, 111, "local-softcap", (64, 32)),
        (BFLOAT16, 80, "causal-local-alibi", (128, 65)),
        (BFLOAT16, 32, "alibi-softcap", (1, 239)),
        (FLOAT16, 96, "causal-alibi-softcap", (108, 64)),
    ],
)
def test_a_small_share_of_the_grid(dtype: torch.dtype, head_dim: int, features: str, lengths: tuple[int, int]) -> None:
    combination = next(one for one in COMBINATIONS if one.label == features)
    check(dtype, head_dim, combination, lengths, kv_heads=1, heads=2, batch_size=1, deterministic=True)


@interpreted
def test_the_check_finds_a_cap_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a check which compares nothing could not pass the tests above."""
    import kit.published_grid as grid
    from kit import attention_calls

    told = attention_calls.referred
    monkeypatch.setattr(attention_calls, "referred", lambda *q, **call: told(*q, **{**call, "softcap": 40.0}))
    with pytest.raises(AssertionError):
        grid.check(
            BFLOAT16, 32, Combination(softcap=True), (9, 20), kv_heads=1, heads=2, batch_size=1, deterministic=True
        )
