"""Capped scores: their values and gradients at every size of the cap, and how a cap reaches the kernels.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fa_autotune import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from fa_autotune.errors import InvalidProblemError
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.attention_calls import (
    DEVICE,
    FLOAT16,
    FLOAT32,
    MINUS_INF,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    interpreted,
    make,
    make_small,
    requiring,
    runs_kernels,
)


def by_definition(q: Tensor, k: Tensor, v: Tensor, softcap: float, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch and fp64, for autograd."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) / q.shape[3] ** 0.5 / softcap)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, MINUS_INF)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)


@runs_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [1e-3, 0.5, 5.0, 50.0, 1e4, 1e20])
def test_a_cap_is_what_its_definition_is(softcap: float, causal: bool) -> None:
    """Small caps flatten every score, large ones leave them as they are; both exact in fp32."""
    tensors = requiring(*make(37, 41, head_dim=16, dtype=FLOAT32, batch=1))
    out, lse = attention(*tensors, softcap=softcap, causal=causal, return_lse=True)
    expected, expected_lse = by_definition(*tensors, softcap, causal=causal)
    torch.testing.assert_close(lse, expected_lse.to(FLOAT32), atol=1e-5, rtol=1e-5)
    d_out, d_lse = gradient_of(out.shape, FLOAT32), gradient_of(lse.shape, FLOAT32)
    found = [out, *torch.autograd.grad([out, lse], tensors, [d_out, d_lse])]
    exact = [expected, *torch.autograd.grad([expected, expected_lse], tensors, [d_out.double(), d_lse.double()])]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(FLOAT32), atol=1e-5, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_a_cap_follows_the_numerics_rule(softcap: float) -> None:
    assert_right(*make(90, 100), softcap=softcap, softmax_scale=1.0)
    assert_gradients_right(*make_small(90, 100), softcap=softcap, softmax_scale=1.0, factor=3.0)


@runs_kernels
def test_scores_far_beyond_the_cap_neither_overflow_nor_turn_to_nan() -> None:
    q, k, v = make_small(40, 50, dtype=FLOAT16)
    q, k = q * 100, k * 100
    assert_right(q, k, v, softcap=15.0, softmax_scale=1.0)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(q, k, v, softcap=15.0, softmax_scale=1.0))


@runs_kernels
@pytest.mark.parametrize("softcap", [2.0**-125, 1e-30, 1e37])
@pytest.mark.parametrize("softmax_scale", [1e-30, 1e30, 0.0, -0.5])
def test_any_cap_goes_with_any_scale(softmax_scale: float, softcap: float) -> None:
    q, k, v = make_small(30, 20)
    out, lse = attention(q, k, v, softcap=softcap, softmax_scale=softmax_scale, causal=True, return_lse=True)
    assert (out[:, :10] == 0).all()
    assert torch.isfinite(out).all()
    assert (lse[:, :, :10] == MINUS_INF).all()
    assert torch.isfinite(lse[:, :, 10:]).all()


@runs_kernels
def test_rows_without_a_visible_key_stay_zero_under_a_cap() -> None:
    tensors = requiring(*make_small(50, 20))
    out, lse = attention(*tensors, causal=True, softcap=3.0, return_lse=True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()
    dq, *others = torch.autograd.grad(out, tensors, gradient_of(out.shape))
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, *others))


@runs_kernels
def test_one_kernel_serves_caps_of_every_size(loads: list[Candidate]) -> None:
    q, k, v = make()
    for softcap in (1.0, 7.5, 50.0):
        assert_right(q, k, v, softcap=softcap)
    assert len(loads) == 1


@runs_kernels
@pytest.mark.parametrize("softcap", [numpy.float32(2.0), numpy.int64(2), 2, torch.tensor(2.0)])
def test_a_cap_of_any_number_type_is_one_call(softcap: Any, loads: list[Candidate]) -> None:
    q, k, v = make()
    plain = attention(q, k, v, softcap=2.0)
    assert torch.equal(attention(q, k, v, softcap=softcap), plain)
    assert len(loads) == 1


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf"), 1e39, 1e-45])
def test_a_cap_that_is_no_positive_number_is_an_error(softcap: float) -> None:
    with pytest.raises(InvalidProblemError, match=r"softcap=\S+ is not a positive number .*; 0\.0 means none"):
        attention(*make(device=torch.device("cpu")), softcap=softcap)


@pytest.mark.parametrize("softcap", ["large", None, torch.ones(2)])
def test_a_cap_that_is_no_number_is_an_error(softcap: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r"softcap=.* is not a number; 0\.0 means none"):
        attention(*make(device=torch.device("cpu")), softcap=softcap)


def test_a_cap_that_wants_a_gradient_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r"softcap requires a gradient, .* pass it detached"):
        attention(*make(device=torch.device("cpu")), softcap=torch.tensor(2.0, requires_grad=True))


@runs_kernels
def test_flash_attn_functions_take_a_cap_and_read_what_is_not_positive_as_none() -> None:
    q, k, v = make_small(30, 30, heads=2, kv_heads=2)
    for softcap in (3.0, -1.0, 0.0):
        expected = attention(q, k, v, softcap=max(softcap, 0.0), causal=True)
        options: dict[str, Any] = {"softcap": softcap, "causal": True}
        assert torch.equal(flash_attn_func(q, k, v, **options), expected)
        assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), expected)
        assert torch.equal(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options), expected)


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("exponent", range(-30, 8))
def test_the_kernels_tanh_is_good_to_a_few_units_in_the_last_place(exponent: int) -> None:
    """Read through a kernel: one key and softmax_scale 1 give lse = softcap · tanh(x / softcap)."""
    family = AttentionProblem.parse("1x1x1x64x1x16,softcap,fp32").family
    config = default_config(variant_spec(family.kernel_pass, Variant.PORTABLE), family, "sm_90")
    kernel = load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)
    x = torch.linspace(1.0, 2.0, 64) * 2.0**exponent
    q, k, v = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    q[0, 0, :, 0], k[0, 0, 0, 0] = x, 1.0
    lse = torch.empty(1, 1, 64)
    kernel(q, k, v, torch.empty_like(q), lse, 1.0, None, 1.0)
    exact = torch.tanh(x.double())
    assert ((lse[0, 0].double() - exact).abs() / exact).max() < 6e-7
