"""The reference itself against torch's own attention, and at the edges that the contract names."""

import pytest
import torch
from torch import Tensor

from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference import attention as reference
from fa_autotune.reference.attention import (
    TORCH_DTYPES,
    attention_reference,
    attention_same_precision,
    backward_statistics,
    gradients_from_statistics,
    hidden_keys,
    reference_dtype,
    seeded_inputs,
    seeded_output,
)

CPU = torch.device("cpu")
SCALE = 0.3


def make_family(dtype: DType = DType.FLOAT32, access: Access = Access.TMA, head_dim: int = 16) -> AttentionFamily:
    return AttentionFamily(dtype=dtype, head_dim=head_dim, head_dim_v=24, bounded_right=True, access=access)


def make_shape(seqlen_q: int = 7, seqlen_k: int = 9, *, group: int = 1) -> AttentionShape:
    return AttentionShape(batch_size=2, num_q_heads=2 * group, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def make_inputs(seqlen_q: int = 7, seqlen_k: int = 9, *, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return seeded_inputs(make_family(), make_shape(seqlen_q, seqlen_k, group=group), device=CPU, seed=0)


def by_torch(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """F.scaled_dot_product_attention's math in fp64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=visible, scale=SCALE
        )


class TestReference:
    def test_of_a_full_problem_is_torchs(self) -> None:
        q, k, v = make_inputs()
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE)
        torch.testing.assert_close(out, by_torch(q, k, v))

    @pytest.mark.parametrize("group", [1, 3])
    def test_of_grouped_heads_gives_each_group_its_kv_head(self, group: int) -> None:
        q, k, v = make_inputs(group=group)
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE)
        torch.testing.assert_close(out, by_torch(q, k, v))

    def test_of_a_square_causal_problem_is_torchs(self) -> None:
        q, k, v = make_inputs(8, 8)
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=0)
        torch.testing.assert_close(out, by_torch(q, k, v, torch.ones(8, 8, dtype=torch.bool).tril()))

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (1, 9), (9, 5)])
    def test_at_diagonal_zero_is_top_left_as_torchs_is_causal(self, seqlen_q: int, seqlen_k: int) -> None:
        q, k, v = make_inputs(seqlen_q, seqlen_k)
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=0)
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()
        torch.testing.assert_close(out, by_torch(q, k, v, visible))

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (1, 9)])
    def test_at_the_lengths_difference_is_bottom_right(self, seqlen_q: int, seqlen_k: int) -> None:
        q, k, v = make_inputs(seqlen_q, seqlen_k)
        diagonal = seqlen_k - seqlen_q
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=diagonal)
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal)
        torch.testing.assert_close(out, by_torch(q, k, v, visible))

    def test_gives_rows_without_a_key_zero(self) -> None:
        q, k, v = make_inputs(9, 5)
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=-4)
        assert (out == 0).all(-1).sum(-1).unique().tolist() == [4]

    def test_gives_rows_without_a_key_an_lse_of_minus_infinity(self) -> None:
        q, k, v = make_inputs(9, 5)
        _, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=-4)
        assert torch.equal(lse == float("-inf"), (torch.arange(9) < 4).expand_as(lse))

    @pytest.mark.parametrize("diagonal", [None, 0, 3])
    def test_gives_the_natural_lse(self, diagonal: int | None) -> None:
        q, k, v = make_inputs()
        _, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=diagonal)
        scores = q.double() @ k.double().transpose(-1, -2) * SCALE
        if diagonal is not None:
            scores = scores.masked_fill(~torch.ones(7, 9, dtype=torch.bool).tril(diagonal), float("-inf"))
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1).float())

    def test_of_a_slice_of_rows_is_that_slice(self) -> None:
        q, k, v = make_inputs()
        out, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=2)
        part, part_lse = attention_reference(q[:, :, 3:6], k, v, softmax_scale=SCALE, diagonal=2, first_row=3)
        torch.testing.assert_close(part, out[:, :, 3:6])
        torch.testing.assert_close(part_lse, lse[:, :, 3:6])

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("which", ["k", "v"])
    def test_keeps_what_lies_in_hidden_keys_from_the_rows_above(self, which: str, value: float) -> None:
        q, k, v = make_inputs(8, 8)
        clean, clean_lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=0)
        {"k": k, "v": v}[which][:, :, 5] = value
        out, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=0)
        torch.testing.assert_close(out[:, :, :5], clean[:, :, :5])
        torch.testing.assert_close(lse[:, :, :5], clean_lse[:, :, :5])

    def test_shows_a_nan_to_the_rows_that_see_it(self) -> None:
        q, k, v = make_inputs(8, 8)
        v[:, :, 5] = float("nan")
        out, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=0)
        assert out.isnan().any(-1)[0, 0].tolist() == [row >= 5 for row in range(8)]

    @pytest.mark.parametrize("dtype", DType)
    def test_computes_in_a_higher_precision_than_its_inputs(self, dtype: DType) -> None:
        q, k, v = (tensor.to(TORCH_DTYPES[dtype]) for tensor in make_inputs())
        out, lse = attention_reference(q, k, v, softmax_scale=SCALE)
        assert (out.dtype, lse.dtype) == (reference_dtype(q.dtype), torch.float32)
        assert torch.finfo(out.dtype).eps < torch.finfo(q.dtype).eps


class TestSamePrecision:
    @pytest.mark.parametrize("diagonal", [None, 0, 2, -3])
    def test_agrees_with_the_reference(self, diagonal: int | None) -> None:
        q, k, v = make_inputs(group=3)
        ref, _ = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=diagonal)
        torch.testing.assert_close(
            attention_same_precision(q, k, v, softmax_scale=SCALE, diagonal=diagonal), ref.float()
        )

    def test_stays_in_the_inputs_precision(self) -> None:
        q, k, v = (tensor.bfloat16() for tensor in make_inputs())
        assert attention_same_precision(q, k, v, softmax_scale=SCALE).dtype is torch.bfloat16

    def test_gives_rows_without_a_key_zero(self) -> None:
        q, k, v = make_inputs(9, 5)
        assert (attention_same_precision(q, k, v, softmax_scale=SCALE, diagonal=-4)[:, :, :4] == 0).all()


def test_hidden_keys_lie_right_of_the_diagonal() -> None:
    hidden = hidden_keys(2, 4, 1, CPU, first_row=1)
    assert hidden.tolist() == [[False, False, False, True], [False, False, False, False]]


class TestSeededInputs:
    def test_are_the_same_for_a_seed(self) -> None:
        one, other = make_inputs(), make_inputs()
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))

    def test_differ_between_seeds(self) -> None:
        one, other = (seeded_inputs(make_family(), make_shape(), device=CPU, seed=seed)[0] for seed in (0, 1))
        assert not torch.equal(one, other)

    def test_have_the_shapes_of_the_problem(self) -> None:
        q, k, v = make_inputs(group=3)
        assert [tuple(tensor.shape) for tensor in (q, k, v)] == [(2, 6, 7, 16), (2, 2, 9, 16), (2, 2, 9, 24)]

    @pytest.mark.parametrize("dtype", DType)
    def test_have_the_familys_dtype(self, dtype: DType) -> None:
        inputs = seeded_inputs(make_family(dtype), make_shape(), device=CPU, seed=0)
        assert {tensor.dtype for tensor in inputs} == {TORCH_DTYPES[dtype]}

    def test_keep_the_16_byte_rules_where_the_family_promises_them(self) -> None:
        for tensor in seeded_inputs(make_family(DType.BFLOAT16), make_shape(), device=CPU, seed=0):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.is_contiguous()

    def test_break_the_16_byte_rules_where_access_is_any(self) -> None:
        for tensor in seeded_inputs(make_family(DType.BFLOAT16, Access.ANY), make_shape(), device=CPU, seed=0):
            assert tensor.data_ptr() % 16 != 0
            assert tensor.stride(-1) == 2

    def test_have_the_same_values_whatever_the_access(self) -> None:
        one, other = (
            seeded_inputs(make_family(access=access), make_shape(), device=CPU, seed=0)
            for access in (Access.TMA, Access.ANY)
        )
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))

    def test_scale_with_the_scale(self) -> None:
        one, four = (
            seeded_inputs(make_family(), make_shape(), device=CPU, seed=0, scale=scale)[0] for scale in (1.0, 4.0)
        )
        torch.testing.assert_close(4 * one, four)


def gradients_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor, diagonal: int | None
) -> tuple[Tensor, ...]:
    """Torch's own gradients in fp64, where every row sees a key."""
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    keys, values = (leaf.repeat_interleave(q.shape[1] // k.shape[1], 1) for leaf in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * SCALE
    if diagonal is not None:
        scores = scores.masked_fill(hidden_keys(q.shape[2], k.shape[2], diagonal, CPU), -float("inf"))
    out, lse = torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)
    return torch.autograd.grad((out * d_out.double()).sum() + (lse * d_lse.double()).sum(), leaves)


def make_gradients(seqlen_q: int, seqlen_k: int, *, group: int = 1) -> tuple[Tensor, Tensor]:
    """d_out and d_lse."""
    shape = make_shape(seqlen_q, seqlen_k, group=group)
    d_out = seeded_output(make_family(), shape, device=CPU, seed=1)
    return d_out, torch.randn(d_out.shape[:3], generator=torch.Generator().manual_seed(2))


class TestGradients:
    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize(
        ("seqlen_q", "seqlen_k", "diagonal"), [(7, 9, None), (9, 7, None), (7, 9, 2), (8, 8, 0), (9, 5, 0), (1, 9, 8)]
    )
    def test_are_torchs_own(self, seqlen_q: int, seqlen_k: int, diagonal: int | None, group: int) -> None:
        q, k, v = make_inputs(seqlen_q, seqlen_k, group=group)
        d_out, d_lse = make_gradients(seqlen_q, seqlen_k, group=group)
        lse, delta = backward_statistics(q, k, v, d_out, softmax_scale=SCALE, diagonal=diagonal)
        found = gradients_from_statistics(q, k, v, d_out, lse, delta - d_lse, softmax_scale=SCALE, diagonal=diagonal)
        expected = gradients_by_autograd(q, k, v, d_out, d_lse, diagonal)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    def test_of_rows_and_keys_that_see_nothing_are_zero(self) -> None:
        q, k, v = make_inputs(9, 9)
        d_out, _ = make_gradients(9, 9)
        lse, delta = backward_statistics(q, k, v, d_out, softmax_scale=SCALE, diagonal=-3)
        dq, dk, dv = gradients_from_statistics(q, k, v, d_out, lse, delta, softmax_scale=SCALE, diagonal=-3)
        assert [tensor.isfinite().all().item() for tensor in (dq, dk, dv)] == [True] * 3
        assert not dq[:, :, :3].any()
        assert not dk[:, :, 6:].any()
        assert not dv[:, :, 6:].any()

    def test_of_a_stretch_are_that_part_of_all(self) -> None:
        q, k, v = make_inputs(12, 15, group=2)
        d_out, _ = make_gradients(12, 15, group=2)
        call = {"softmax_scale": SCALE, "diagonal": 3}
        lse, delta = backward_statistics(q, k, v, d_out, **call)
        dq, dk, dv = gradients_from_statistics(q, k, v, d_out, lse, delta, **call)
        rows, keys = slice(4, 9), slice(6, 13)
        some_rows = (q[:, :, rows], k, v, d_out[:, :, rows], lse[:, :, rows], delta[:, :, rows])
        some_keys = (q, k[:, :, keys], v[:, :, keys], d_out, lse, delta)
        torch.testing.assert_close(gradients_from_statistics(*some_rows, **call, first_row=4)[0], dq[:, :, rows])
        for place, whole in ((1, dk), (2, dv)):
            part = gradients_from_statistics(*some_keys, **call, first_key=6)[place]
            torch.testing.assert_close(part, whole[:, :, keys])

    @pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
    def test_in_the_inputs_precision_err_by_some_roundings(self, dtype: DType) -> None:
        q, k, v = (tensor.to(TORCH_DTYPES[dtype]) for tensor in make_inputs(20, 30))
        d_out = make_gradients(20, 30)[0].to(q.dtype)
        statistics = backward_statistics(q, k, v, d_out, softmax_scale=SCALE)
        exact = gradients_from_statistics(q, k, v, d_out, *statistics, softmax_scale=SCALE)
        rounded = gradients_from_statistics(q, k, v, d_out, *statistics, softmax_scale=SCALE, dtype=q.dtype)
        for one, other in zip(rounded, exact, strict=True):
            assert one.dtype is q.dtype
            assert 0 < (one - other).abs().max() < 20 * torch.finfo(q.dtype).eps * other.abs().max()


class TestStatistics:
    @pytest.mark.parametrize("max_scores", [1, 40, 200, 10_000])
    def test_are_the_same_computed_in_parts(self, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
        q, k, v = make_inputs(12, 15, group=2)
        d_out, _ = make_gradients(12, 15, group=2)
        whole = backward_statistics(q, k, v, d_out, softmax_scale=SCALE, diagonal=3)
        monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
        parts = backward_statistics(q, k, v, d_out, softmax_scale=SCALE, diagonal=3)
        for one, other in zip(parts, whole, strict=True):
            torch.testing.assert_close(one, other)

    def test_are_lse_and_the_row_sums_of_out_times_its_gradient(self) -> None:
        q, k, v = make_inputs(6, 4)
        d_out, _ = make_gradients(6, 4)
        out, lse = attention_reference(q, k, v, softmax_scale=SCALE, diagonal=-2)
        found_lse, delta = backward_statistics(q, k, v, d_out, softmax_scale=SCALE, diagonal=-2)
        assert torch.equal(found_lse, lse)
        torch.testing.assert_close(delta, (out * d_out).sum(-1).float())
