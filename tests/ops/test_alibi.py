"""ALiBi: slopes for heads, or for each of a batch; their bias at every edge, forward and backward.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.family import Access
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    DEVICE,
    FLOAT32,
    MINUS_INF,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    make,
    make_small,
    requiring,
    runs_kernels,
)
from kit.combinations import one_in

SLOPES = torch.tensor([0.5, 0.25, 0.03, 0.0], device=DEVICE)


def by_definition(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch and fp64, for autograd; slopes (heads,) or (batch, heads)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    own = torch.arange(q.shape[2], device=DEVICE)[:, None] + k.shape[2] - q.shape[2]
    distance = (own - torch.arange(k.shape[2], device=DEVICE)[None, :]).abs()
    bias = slopes.double().expand(q.shape[:2])[:, :, None, None] * distance
    scores = q @ k.transpose(-1, -2) / q.shape[3] ** 0.5 - bias
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[2], device=DEVICE)[None, :] > own, MINUS_INF)
    weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


@runs_kernels
@pytest.mark.parametrize(
    ("lengths", "batched", "causal"),
    one_in(1, [(37, 41), (41, 60), (1, 50), (5, 90), (33, 33)], [False, True], [False, True], default=2),
)
def test_a_bias_is_what_its_definition_is(lengths: tuple[int, int], batched: bool, causal: bool) -> None:
    slopes = torch.stack([SLOPES, SLOPES.flip(0)]) if batched else SLOPES
    tensors = requiring(*make(*lengths, head_dim=16, dtype=FLOAT32))
    out, lse = attention(*tensors, alibi_slopes=slopes, causal=causal, return_lse=True)
    expected, expected_lse = by_definition(*tensors, slopes, causal=causal)
    torch.testing.assert_close(lse, expected_lse.to(FLOAT32), atol=1e-5, rtol=1e-5)
    d_out = gradient_of(out.shape, FLOAT32)
    found = [out, *torch.autograd.grad(out, tensors, d_out)]
    exact = [expected, *torch.autograd.grad(expected, tensors, d_out.double())]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(FLOAT32), atol=1e-5, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize(
    "arguments", [{}, {"causal": True}, {"window_size": (20, 3)}, {"softcap": 3.0, "causal": True}]
)
def test_a_bias_follows_the_numerics_rule(arguments: dict[str, Any]) -> None:
    assert_right(*make(90, 100), alibi_slopes=SLOPES, **arguments)
    assert_gradients_right(*make_small(90, 100), alibi_slopes=SLOPES[:2], **arguments, factor=3.0)


@runs_kernels
def test_slopes_of_zero_change_nothing_beyond_rounding() -> None:
    q, k, v = make(50, 60, dtype=FLOAT32)
    plain = attention(q, k, v, causal=True)
    biased = attention(q, k, v, causal=True, alibi_slopes=torch.zeros(4, device=DEVICE))
    torch.testing.assert_close(biased, plain, atol=1e-6, rtol=1e-6)


@runs_kernels
@pytest.mark.parametrize("slope", [1e-30, 100.0, 1e30])
def test_slopes_of_any_size_leave_no_nan(slope: float) -> None:
    """A large slope leaves each row its own key alone."""
    q, k, v = make(40, 40, kv_heads=4)
    out, lse = attention(q, k, v, alibi_slopes=torch.full((4,), slope, device=DEVICE), return_lse=True)
    assert torch.isfinite(lse).all()
    if slope > 1:
        torch.testing.assert_close(out, v)
    grads = gradients(q, k, v, alibi_slopes=torch.full((4,), slope, device=DEVICE))
    assert all(torch.isfinite(gradient).all() for gradient in grads)


@runs_kernels
def test_rows_without_a_visible_key_stay_zero_under_a_bias() -> None:
    tensors = requiring(*make_small(50, 20))
    out, lse = attention(*tensors, causal=True, alibi_slopes=SLOPES[:2], return_lse=True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()
    dq, *others = torch.autograd.grad(out, tensors, gradient_of(out.shape))
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, *others))


@runs_kernels
def test_keys_before_every_window_keep_the_distance_of_the_others() -> None:
    assert_right(*make(20, 100), alibi_slopes=SLOPES, window_size=(9, 0))
    assert_gradients_right(*make_small(20, 100), alibi_slopes=SLOPES[:2], window_size=(9, 0))


@runs_kernels
def test_slopes_of_any_strides_and_dtype_are_read() -> None:
    q, k, v = make()
    plain = attention(q, k, v, alibi_slopes=SLOPES)
    for slopes in (SLOPES.repeat_interleave(2)[::2], SLOPES.expand(2, 4), SLOPES.bfloat16().double()):
        expected = plain if slopes.dtype == FLOAT32 else attention(q, k, v, alibi_slopes=slopes.to(FLOAT32))
        assert torch.equal(attention(q, k, v, alibi_slopes=slopes), expected)


@runs_kernels
def test_later_slopes_of_one_shape_are_read_anew(loads: list[Candidate]) -> None:
    q, k, v = make_small()
    for slopes in (SLOPES[:2].clone(), SLOPES[2:].clone()):
        assert_right(q, k, v, alibi_slopes=slopes)
        assert_gradients_right(q, k, v, alibi_slopes=slopes)
    assert len(loads) == 4


@runs_kernels
def test_unaligned_tensors_with_a_bias() -> None:
    q, k, v = make_small(head_dim=33)
    assert_right(q, k, v, alibi_slopes=SLOPES[:2])
    assert_gradients_right(q, k, v, alibi_slopes=SLOPES[:2])


@runs_kernels
def test_bhsd_takes_the_same_slopes(loads: list[Candidate]) -> None:
    q, k, v = make(20, 30)
    swapped = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    out = attention(*swapped, alibi_slopes=SLOPES, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), attention(q, k, v, alibi_slopes=SLOPES))
    assert {candidate.family.access for candidate in loads} == {Access.TMA}


@runs_kernels
def test_flash_attn_functions_take_slopes_and_give_gradients() -> None:
    q, k, v = make_small(30, 30, heads=2, kv_heads=2)
    options: dict[str, Any] = {"alibi_slopes": SLOPES[:2], "causal": True}
    expected, grads = attention(q, k, v, **options), gradients(q, k, v, **options)
    assert torch.equal(flash_attn_func(q, k, v, **options), expected)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), expected)
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(out, expected)
    (gradient,) = torch.autograd.grad(out, qkv, gradient_of(out.shape))
    assert all(map(torch.equal, gradient.unbind(2), grads))


@runs_kernels
def test_vmap_gives_each_example_its_slopes() -> None:
    q, k, v = (torch.stack([tensor, tensor.flip(1)]) for tensor in make(20, 30, batch=1))
    slopes = torch.stack([SLOPES, SLOPES.flip(0)])
    mapped = torch.func.vmap(lambda q, k, v, s: attention(q, k, v, alibi_slopes=s))(q, k, v, slopes)
    for number in range(2):
        assert torch.equal(mapped[number], attention(q[number], k[number], v[number], alibi_slopes=slopes[number]))


@pytest.mark.parametrize(
    ("slopes", "says"),
    [
        (torch.ones(3), r"alibi_slopes has shape \(3,\); it is \(4,\) or \(2, 4\), a number for each query head"),
        (torch.ones(1, 4), r"alibi_slopes has shape \(1, 4\); it is"),
        (torch.ones(2, 4, 1), r"alibi_slopes has shape \(2, 4, 1\); it is"),
        (torch.ones(4, dtype=torch.int64), "alibi_slopes is torch.int64, .* cast it"),
        (torch.ones(4, device="meta"), "alibi_slopes is on meta and q on cpu; move one"),
        ([0.5] * 4, "alibi_slopes is a list, attention takes torch tensors; convert it"),
        (torch.ones(4, requires_grad=True), r"alibi_slopes requires a gradient, .* alibi_slopes\.detach\(\)"),
    ],
)
def test_slopes_that_do_not_fit_are_an_error(slopes: Any, says: str) -> None:
    with pytest.raises(InvalidProblemError, match=says):
        attention(*make(device=torch.device("cpu")), alibi_slopes=slopes)
