"""Gradients of `attention` as its callers see them: values, edges, and those into lse.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fa_autotune import (
    attention,
)
from fa_autotune.reference.attention import attention_gradients
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    assert_gradients_right,
    causal_or_not,
    gradient_of,
    gradients,
    in_larger_buffers,
    make_small,
    requiring,
    runs_kernels,
    swapped,
)
from kit.views import every_second_column

# --- values -----------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_gradients_follow_the_numerics_rule(dtype: torch.dtype, causal: bool) -> None:
    assert_gradients_right(*make_small(70, 50, dtype=dtype), causal=causal)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (33, 20), (1, 17), (17, 1)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_float32_gradients_equal_those_of_float64_to_1e_5(
    heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    q, k, v = make_small(seqlen_q, seqlen_k, heads=heads, kv_heads=kv_heads, dtype=FLOAT32)
    inputs = requiring(*(tensor.double() for tensor in (q, k, v)))
    keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in inputs[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs[0], keys) / 32**0.5
    if causal:
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~seen, -1e300)  # an explicit mask; rows that see nothing are zeroed below
        weights = torch.softmax(scores, -1) * seen.any(-1)[:, None]
    else:
        weights = torch.softmax(scores, -1)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    d_out = gradient_of(exact.shape, FLOAT32)
    for gradient, expected in zip(
        gradients(q, k, v, d_out, causal=causal), torch.autograd.grad(exact, inputs, d_out.double()), strict=True
    ):
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_passes_gradcheck_in_what_precision_it_has(causal: bool, reference_only: None) -> None:
    inputs = requiring(*make_small(5, 7, head_dim=8, dtype=FLOAT32, device=torch.device("cpu")))
    with pytest.warns(UserWarning, match="double precision"):
        assert gradcheck(lambda *x: attention(*x, causal=causal), inputs, eps=1e-2, atol=1e-3, rtol=1e-2)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (2, 3), (3, 2), (5, 15), (15, 5), (17, 17), (1, 100), (5, 1)]
)
def test_lengths_below_a_block(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    assert_gradients_right(*make_small(seqlen_q, seqlen_k), causal=causal)


@runs_kernels
@causal_or_not
def test_rows_and_keys_next_to_a_blocks_edge_survive_large_magnitudes(causal: bool, loads: list[Candidate]) -> None:
    gradients(*make_small(200, 200), causal=causal)
    sizes = (getattr(candidate.config, name, None) for candidate in loads for name in ("BLOCK_M", "BLOCK_N"))
    blocks = {size for size in sizes if size is not None}  # a kernel over rows has no BLOCK_N, a fused tile neither
    for block in blocks:
        for seqlen_q, seqlen_k in ((block - 1, block + 1), (block, block), (block + 1, block - 1)):
            q, k, v = make_small(seqlen_q, seqlen_k, heads=2, kv_heads=1)
            assert_gradients_right(q * 5, k * 3, v, causal=causal, factor=5.0)


@runs_kernels
@pytest.mark.parametrize("magnitude", [1, 4, 10])
def test_float16_gradients_do_not_overflow(magnitude: int) -> None:
    q, k, v = make_small(dtype=FLOAT16)
    found = assert_gradients_right(q * magnitude, k * magnitude, v * magnitude, causal=True, factor=5.0)
    assert all(torch.isfinite(gradient).all() for gradient in found)


@runs_kernels
@pytest.mark.parametrize("head_dim", [8, 16, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    assert_gradients_right(*make_small(20, 20, head_dim=head_dim), causal=True)


@runs_kernels
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_head_dim_256_in_bfloat16_with_shared_kv_heads(kv_heads: int) -> None:
    assert_gradients_right(*make_small(40, 40, heads=4, kv_heads=kv_heads, head_dim=256), causal=True, factor=3.0)


@runs_kernels
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (32, 80), (64, 9), (8, 256)])
def test_value_columns_may_differ_from_key_columns(head_dim: int, head_dim_v: int) -> None:
    assert_gradients_right(*make_small(20, 30, head_dim=head_dim, head_dim_v=head_dim_v), causal=True)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("softmax_scale", [1.0, 0.03, -0.2, 0.0, 1e-46, -1e-46])
def test_gradients_of_any_finite_scale(softmax_scale: float, causal: bool) -> None:
    dq, dk, _ = assert_gradients_right(*make_small(41, 37), softmax_scale=softmax_scale, causal=causal)
    if abs(softmax_scale) < 1e-40:
        assert (dq == 0).all()
        assert (dk == 0).all()


@runs_kernels
def test_bhsd_has_the_same_gradients_with_axes_exchanged() -> None:
    q, k, v = make_small()
    d_out = gradient_of(q.shape)
    usual = gradients(q, k, v, d_out, causal=True)
    other = gradients(*swapped(q, k, v, d_out), causal=True, layout="bhsd")
    assert all(map(torch.equal, usual, swapped(*other)))


@runs_kernels
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_are_contiguous_in_the_callers_layout(layout: str) -> None:
    q, k, v = make_small(head_dim_v=48)
    tensors = (q, k, v) if layout == "bshd" else tuple(tensor.contiguous() for tensor in swapped(q, k, v))
    strided = (every_second_column(tensor) for tensor in tensors)
    assert all(gradient.is_contiguous() for gradient in gradients(*strided, layout=layout))


# --- rows and keys that see nothing -----------------------------------------------------------------------------------


@runs_kernels
def test_rows_without_a_visible_key_have_zero_gradients_and_spoil_no_other() -> None:
    q, k, v = make_small(50, 20)
    q.data[:, :30] = 3e4  # what a row without keys holds is nobody's business
    dq, dk, dv = assert_gradients_right(q, k, v, causal=True)
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, dk, dv))


@runs_kernels
def test_rows_that_meet_their_first_key_late_keep_no_nan() -> None:
    assert_gradients_right(*make_small(150, 20), causal=True)  # whole blocks of rows see nothing, one is mixed


@causal_or_not
def test_without_keys_the_queries_have_zero_gradients(causal: bool) -> None:
    dq, dk, dv = gradients(*make_small(5, 0), causal=causal)
    assert dq.shape == (1, 5, 2, 32)
    assert (dq == 0).all()
    assert dk.shape == dv.shape == (1, 0, 1, 32)


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}],
    ids=lambda sizes: "-".join(sizes),
)
def test_empty_queries_give_the_keys_zero_gradients(sizes: dict[str, int]) -> None:
    tensors = make_small(**sizes)
    found = gradients(*tensors)
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in tensors]
    assert all((gradient == 0).all() for gradient in found)


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [32, 59])
@causal_or_not
def test_garbage_behind_the_last_row_and_column_never_leaks(poison: float, head_dim: int, causal: bool) -> None:
    q, k, v = make_small(head_dim=head_dim)
    d_out = gradient_of(q.shape)
    found = []
    for fill in (0.0, poison):
        *tensors, d_out_part = in_larger_buffers(q, k, v, d_out, fill=fill)
        found.append(gradients(*tensors, d_out_part, causal=causal))
    assert all(map(torch.equal, *found))


# --- lse --------------------------------------------------------------------------------------------------------------


def lse_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, d_lse: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    inputs = requiring(q, k, v)
    out, lse = attention(*inputs, causal=causal, return_lse=True)
    outputs, given = ([lse], [d_lse]) if d_out is None else ([out, lse], [d_out, d_lse])
    return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("with_out", [True, False], ids=["beside out", "alone"])
def test_a_gradient_into_lse_is_honoured(with_out: bool, causal: bool) -> None:
    q, k, v = make_small(40, 30, dtype=FLOAT32)
    d_out = gradient_of(q.shape, FLOAT32) if with_out else None
    d_lse = gradient_of(torch.Size((1, 2, 40)), FLOAT32)
    found = lse_gradients(q, k, v, d_out, d_lse, causal)
    exact = attention_gradients(
        *swapped(q, k, v, torch.zeros_like(q) if d_out is None else d_out),
        d_lse,
        softmax_scale=32**-0.5,
        diagonal=-10 if causal else None,
    )
    for gradient, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(swapped(gradient)[0].double(), expected, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_a_gradient_into_lse_of_any_strides() -> None:
    q, k, v = make_small(batch=2, dtype=FLOAT32)
    d_lse = gradient_of(torch.Size((2, 2, 37)), FLOAT32)
    dense = lse_gradients(q, k, v, None, d_lse, causal=True)
    strided = torch.stack([d_lse, d_lse], -1)[..., 0]
    assert all(map(torch.equal, lse_gradients(q, k, v, None, strided, causal=True), dense))
    expanded = d_lse[:1, :1, :1].expand(2, 2, 37)
    dense = lse_gradients(q, k, v, None, expanded.contiguous(), causal=True)
    assert all(map(torch.equal, lse_gradients(q, k, v, None, expanded, causal=True), dense))


@runs_kernels
def test_returning_lse_without_using_it_changes_no_gradient() -> None:
    q, k, v = make_small()
    inputs = requiring(q, k, v)
    out, _ = attention(*inputs, causal=True, return_lse=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    assert all(map(torch.equal, found, gradients(q, k, v, causal=True)))


@runs_kernels
def test_gradients_through_parts_that_are_merged_by_their_lse_are_those_of_the_whole() -> None:
    q, k, v = make_small(20, 60, dtype=FLOAT32)
    inputs = requiring(q, k, v)
    parts = [
        attention(inputs[0], *(t[:, keys] for t in inputs[1:]), return_lse=True) for keys in (slice(25), slice(25, 60))
    ]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    found = torch.autograd.grad(merged, inputs, gradient_of(q.shape, FLOAT32))
    for gradient, expected in zip(found, gradients(q, k, v), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
