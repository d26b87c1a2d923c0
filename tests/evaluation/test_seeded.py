"""Seeded inputs: the same seed gives the same values, and values are such that errors show."""

from dataclasses import fields

import pytest
import torch

from fa_autotune.evaluation.seeded import DROPOUTS, SOFTCAPS, seeded_features, seeded_mask, seeded_workload
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import gradients_from_statistics

CPU = torch.device("cpu")
CALL = AttentionProblem.parse("2x4x2x10x12x16x24,causal")


@pytest.mark.parametrize("kernel_pass", Pass)
def test_the_same_seed_gives_the_same_values_and_another_seed_others(kernel_pass: Pass) -> None:
    one, same, other = (
        seeded_workload(CALL.for_pass(kernel_pass), device=CPU, diagonal=2, seed=seed).inputs for seed in (3, 3, 4)
    )
    assert all(map(torch.equal, one, same))
    if kernel_pass is Pass.BWD_FUSED:
        one, other = one[:-1], other[:-1]  # turns are 0 always
    assert not any(map(torch.equal, one, other))


def test_the_scale_is_that_of_q_k_and_v() -> None:
    problem = CALL.for_pass(Pass.BWD_DQ)
    plain, larger = (seeded_workload(problem, device=CPU, diagonal=2, scale=scale).inputs for scale in (1.0, 4.0))
    assert [torch.equal(4 * one, other) for one, other in zip(plain[:4], larger[:4], strict=True)] == [True] * 3 + [
        False
    ]


def test_gradients_stay_of_order_1_at_any_length() -> None:
    """Where they shrank with the length, the absolute part of the numerics rule would let anything pass."""
    for length in (64, 1024):
        problem = AttentionProblem.parse(f"1x1x1x{length}x{length}x32,bwd_dq")
        workload = seeded_workload(problem, device=CPU, diagonal=None)
        for gradient in gradients_from_statistics(*workload.inputs, softmax_scale=workload.softmax_scale):
            assert 0.1 < gradient.std() < 10


def test_inputs_of_any_access_are_strided_and_unaligned() -> None:
    problem = AttentionProblem.parse("1x2x2x8x8x16,any,bwd_dkdv")
    workload = seeded_workload(problem, device=CPU, diagonal=None)
    assert problem.family.access is Access.ANY
    assert [tensor.stride(-1) for tensor in workload.inputs[:4]] == [2] * 4


# --- features ---------------------------------------------------------------------------------------------------------


def test_features_that_a_family_lacks_are_off() -> None:
    found = seeded_features(CALL, device=CPU)
    assert {field.name for field in fields(found) if getattr(found, field.name)} == {"key_offset"}


def test_a_windows_diagonal_counts_from_a_rows_own_key() -> None:
    problem = AttentionProblem.parse("1x2x2x8x30x16,causal,left=5")
    assert seeded_features(problem, device=CPU).left_diagonal == 22 - 5
    assert seeded_features(problem, device=CPU, offset=0).left_diagonal == -5
    packed = AttentionProblem.parse("3x2x2x8x30x16,causal,left=5,varlen")
    assert seeded_features(packed, device=CPU).left_diagonal == -5


def test_slopes_and_sinks_are_those_of_heads_or_of_each_batch_and_some_sinks_decide_all() -> None:
    problem = AttentionProblem.parse("3x4x2x8x8x16,alibi,sinks")
    even, odd = (seeded_features(problem, device=CPU, seed=seed) for seed in (0, 1))
    for found in (even, odd):
        assert found.alibi_slopes is not None
        assert found.alibi_slopes.shape == found.sinks.shape == (3, 4)
        assert (found.alibi_slopes >= 0).all()
    assert (even.alibi_slopes.stride(0), even.sinks.stride(0)) == (0, 0)
    assert odd.alibi_slopes.stride(0) == 4
    assert (odd.sinks[0, 0], odd.sinks[-1, -1]) == (float("-inf"), 160.0)


def test_caps_and_dropped_shares_differ_between_seeds() -> None:
    problem = AttentionProblem.parse("1x2x2x8x8x16,softcap,dropout")
    found = [seeded_features(problem, device=CPU, seed=seed) for seed in range(3)]
    assert {one.softcap for one in found} == set(SOFTCAPS)
    assert {one.dropout_p for one in found} == set(DROPOUTS)
    assert len({int(one.dropout_seed) for one in found}) == 3


@pytest.mark.parametrize(
    ("seed", "size"), [(0, (1, 1, 33, 40)), (1, (1, 4, 33, 40)), (2, (2, 1, 1, 40)), (3, (2, 4, 33, 40))]
)
@pytest.mark.parametrize("words", ["bool_mask", "bias", "wide_bias", "bias,loose_mask"])
def test_masks_of_every_broadcast_hide_some_keys_and_from_some_rows_all(
    words: str, seed: int, size: tuple[int, ...]
) -> None:
    problem = AttentionProblem.parse(f"2x4x2x33x40x16,{words}")
    mask = seeded_mask(problem, device=CPU, seed=seed)
    shown = mask if mask.dtype is torch.bool else mask != float("-inf")
    assert tuple(mask.shape) == size
    assert 0.5 < shown.float().mean() < 0.9
    assert size[2] == 1 or not shown[:, :, [0, 11, 22]].any()
    assert mask.element_size() == problem.family.mask_itemsize
    apart = 2 if problem.family.loose_mask else 1
    assert mask.stride(3) == apart
    assert (mask.stride(2) * mask.element_size() % 16 == 0) or apart == 2


def test_rows_of_a_seeded_preprocessing_and_dq_that_see_no_key_are_marked() -> None:
    before = seeded_workload(CALL.for_pass(Pass.BWD_PREPROCESS), device=CPU, diagonal=None)
    assert (before.inputs[2] == float("-inf")).nonzero()[:, 2].unique().tolist() == [0, 8]
    after = seeded_workload(CALL.for_pass(Pass.BWD_POSTPROCESS), device=CPU, diagonal=-3)
    blind = after.dq_of(after.inputs[0]).isnan().all(-1).all(0).all(0)
    assert blind.nonzero().flatten().tolist() == [0, 1, 2]
