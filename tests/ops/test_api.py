"""`attention` as its callers see it: results, lse, scales, edges.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from fa_autotune import attention
from fa_autotune.errors import InvalidProblemError
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    MINUS_INF,
    assert_right,
    causal_or_not,
    in_larger_buffers,
    make,
    runs_kernels,
    swapped,
)

# --- results ----------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_every_dtype_follows_the_numerics_rule(dtype: torch.dtype, causal: bool) -> None:
    assert_right(*make(dtype=dtype), causal=causal)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (2, 3), (3, 2), (5, 15), (15, 5), (17, 17), (1, 5), (1, 300), (5, 1), (130, 3), (63, 65), (65, 63)],
)
def test_lengths_below_a_block_and_off_its_multiples(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    assert_right(*make(seqlen_q, seqlen_k), causal=causal)


@runs_kernels
@causal_or_not
def test_rows_next_to_the_blocks_edge_survive_large_magnitudes(causal: bool, loads: list[Candidate]) -> None:
    q, k, v = make(200, 200)
    attention(q, k, v, causal=causal)
    block_m, block_n = loads[0].config.BLOCK_M, loads[0].config.BLOCK_N
    for seqlen_q in (block_m - 1, block_m, block_m + 1):
        for seqlen_k in (block_n - 1, block_n, block_n + 1):
            q, k, v = make(seqlen_q, seqlen_k, batch=1, heads=2)
            assert_right(q * 5, k * 3, v, causal=causal)


@runs_kernels
@pytest.mark.parametrize("magnitude", [1, 2, 4, 10])
def test_float16_scores_do_not_overflow(magnitude: int) -> None:
    q, k, v = make(dtype=FLOAT16)
    assert_right(q * magnitude, k * magnitude, v * magnitude, causal=True)


@runs_kernels
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 59, 80, 96, 111, 160, 192, 224, 255, 256])
def test_head_dims_that_are_no_power_of_two_use_all_their_columns(head_dim: int) -> None:
    q, k, v = make(20, 20, batch=1, head_dim=head_dim)
    q[..., -1], k[..., -1] = 3.0, torch.arange(20, device=DEVICE)[None, :, None] / 4  # the last column decides
    assert_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (32, 80), (64, 9), (8, 256)])
def test_value_columns_may_differ_from_key_columns(head_dim: int, head_dim_v: int) -> None:
    out, _ = assert_right(*make(20, 30, batch=1, head_dim=head_dim, head_dim_v=head_dim_v), causal=True)
    assert out.shape[3] == head_dim_v


@runs_kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1), (5, 1), (1, 1)])
def test_query_heads_share_kv_heads_in_order(heads: int, kv_heads: int) -> None:
    q, k, v = make(heads=heads, kv_heads=kv_heads, dtype=FLOAT32)
    repeated = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (k, v))
    sdpa = F.scaled_dot_product_attention(*swapped(q, *repeated))
    torch.testing.assert_close(attention(q, k, v), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_float32_is_not_rounded_to_tf32() -> None:
    q, k, v = make(head_dim=64, dtype=FLOAT32)
    exact = F.scaled_dot_product_attention(*swapped(q.double(), k.double(), v.double()), enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v).double(), *swapped(exact), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_causal_of_a_square_is_what_sdpa_calls_causal() -> None:
    q, k, v = make(40, 40, kv_heads=4, dtype=FLOAT32)
    sdpa = F.scaled_dot_product_attention(*swapped(q, k, v), is_causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (1, 33), (33, 40), (39, 40)])
def test_causal_of_a_rectangle_is_bottom_right(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = make(seqlen_q, seqlen_k, kv_heads=4, dtype=FLOAT32)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE).tril(seqlen_k - seqlen_q)
    sdpa = F.scaled_dot_product_attention(*swapped(q, k, v), attn_mask=seen)
    torch.testing.assert_close(attention(q, k, v, causal=True), *swapped(sdpa), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_rows_without_a_visible_key_give_zero_not_nan() -> None:
    out, lse = attention(*make(50, 20), causal=True, return_lse=True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[:, :, 30:]).all()


@runs_kernels
def test_rows_that_meet_their_first_key_late_keep_no_nan() -> None:
    assert_right(*make(150, 20), causal=True)  # whole blocks of rows see nothing, one is mixed


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [32, 59])
@causal_or_not
def test_garbage_behind_the_last_key_and_column_never_leaks(poison: float, head_dim: int, causal: bool) -> None:
    q, k, v = make(head_dim=head_dim)
    clean = attention(*in_larger_buffers(q, k, v, fill=0.0), causal=causal, return_lse=True)
    dirty = attention(*in_larger_buffers(q, k, v, fill=poison), causal=causal, return_lse=True)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@runs_kernels
def test_nan_in_a_key_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = make(40, 40)
    clean = attention(q, k, v, causal=True)
    k[:, 25] = float("nan")
    dirty = attention(q, k, v, causal=True)
    assert torch.equal(clean[:, :25], dirty[:, :25])
    assert dirty[:, 25:].isnan().all()


@runs_kernels
def test_rows_of_nan_give_nan_without_a_warning() -> None:
    """Tests run with warnings as errors, so one of numpy's would fail the call."""
    q, k, v = make(70, 90)
    assert attention(torch.full_like(q, float("nan")), k, v).isnan().all()


@runs_kernels
def test_two_calls_give_the_same_bits() -> None:
    q, k, v = make(70, 90)
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=True))


@runs_kernels
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_autocast_casts_as_it_does_for_sdpa(dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype, kv_heads=4)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        out = attention(q, k, v)
        sdpa = F.scaled_dot_product_attention(*swapped(q, k, v))
    assert out.dtype == sdpa.dtype == BFLOAT16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


# --- lse and outputs --------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
def test_lse_is_the_natural_logarithm(causal: bool) -> None:
    q, k, v = make(30, 40, kv_heads=4, dtype=FLOAT32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 32**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(30, 40, dtype=torch.bool, device=DEVICE).tril(10), MINUS_INF)
    _, lse = attention(q, k, v, causal=causal, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1).float(), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_parts_merge_to_the_whole_by_their_lse() -> None:
    q, k, v = make(20, 60, dtype=FLOAT32)
    whole = attention(q, k, v)
    parts = [attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 25), slice(25, 60))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_bhsd_is_the_same_call_with_axes_exchanged() -> None:
    q, k, v = make()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    other, other_lse = attention(*swapped(q, k, v), causal=True, return_lse=True, layout="bhsd")
    assert torch.equal(*swapped(other), out)
    assert torch.equal(other_lse, lse)


@runs_kernels
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_outputs_are_contiguous_in_the_callers_layout(layout: str) -> None:
    q, k, v = make(head_dim_v=48)
    tensors = (q, k, v) if layout == "bshd" else swapped(q, k, v)
    out, lse = attention(*tensors, return_lse=True, layout=layout)
    assert (out.shape, out.is_contiguous()) == ((*tensors[0].shape[:3], 48), True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 37), FLOAT32, True)


@runs_kernels
@pytest.mark.parametrize("softmax_scale", [None, -0.5, 0.0])
def test_the_callers_tensors_are_never_written(softmax_scale: float | None) -> None:
    tensors = make()
    before = [tensor.clone() for tensor in tensors]
    attention(*tensors, causal=True, softmax_scale=softmax_scale)
    assert all(map(torch.equal, tensors, before))


# --- scale ------------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("softmax_scale", [1.0, 0.03, 0.0, -0.2, 1e-46, -1e-46, 1e-30])
def test_any_finite_scale_works(softmax_scale: float, causal: bool) -> None:
    assert_right(*make(41, 37), softmax_scale=softmax_scale, causal=causal)


@runs_kernels
@pytest.mark.parametrize("scale", [numpy.float32(0.5), numpy.float64(0.5), numpy.int64(1), 1, torch.tensor(0.5)])
def test_a_scale_of_any_number_type_runs_the_same_kernel(scale: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    plain = attention(q, k, v, softmax_scale=float(scale))
    assert torch.equal(attention(q, k, v, softmax_scale=scale), plain)
    assert len(loads) == 1


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_scale_that_is_not_finite_is_an_error(scale: float) -> None:
    with pytest.raises(InvalidProblemError, match=r"softmax_scale=\S+ is not finite.* None means"):
        attention(*make(device=torch.device("cpu")), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["large", 1j, torch.ones(2), 10**400], ids=["text", "complex", "two", "huge"])
def test_a_scale_that_is_no_number_is_an_error(scale: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"softmax_scale=.* is not a number; None means"):
        attention(*make(device=torch.device("cpu")), softmax_scale=scale)


@runs_kernels
@pytest.mark.parametrize("truth", [1, numpy.int64(1), numpy.bool_(True)])
def test_causal_of_any_kind_of_bool_is_one_call(truth: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=truth))
    assert len(loads) == 1


# --- nothing to do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}],
    ids=lambda sizes: "-".join(sizes),
)
def test_empty_queries_give_empty_results(sizes: dict[str, int]) -> None:
    q, k, v = make(**sizes, head_dim_v=48, device=torch.device("cpu"))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (*q.shape[:3], 48)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])


@causal_or_not
def test_without_keys_every_row_is_zero(causal: bool) -> None:
    out, lse = attention(*make(5, 0, device=torch.device("cpu")), causal=causal, return_lse=True)
    assert (out == 0).all()
    assert (lse == MINUS_INF).all()


def test_an_empty_call_is_checked_like_any_other() -> None:
    q, k, v = make(batch=0, device=torch.device("cpu"))
    with pytest.raises(InvalidProblemError, match="head_dim"):
        attention(q, k[..., :16], v)
