"""CPU tensors without the interpreter, and backend="reference": plain torch with the contract of the kernels."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from fa_autotune import attention
from fa_autotune.ops import plans as calls
from fa_autotune.reference.attention import attention_gradients, attention_reference
from kit.attention_calls import (
    BFLOAT16,
    MINUS_INF,
    causal_or_not,
    gradient_of,
    gradients,
    make,
    make_small,
    requiring,
    swapped,
    together,
)

# --- forward ----------------------------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "plain torch reference" in record.getMessage()]


def test_cpu_tensors_run_the_reference_and_say_so_once(reference_only: None, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make(device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING, logger="fa_autotune"):
        first = attention(q, k, v, causal=True)
        second = attention(q, k, v, causal=True)
    ref, _ = attention_reference(*swapped(q, k, v), softmax_scale=32**-0.5, diagonal=4)
    assert torch.equal(first, *swapped(ref.to(BFLOAT16)))
    assert torch.equal(first, second)
    assert len(told(caplog)) == 1


def test_threads_that_come_first_together_say_it_once(reference_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []

    def slow_warning(text: str) -> None:
        notices.append(text)
        time.sleep(0.05)  # long enough for the other threads to come here

    monkeypatch.setattr(calls, "_logger", SimpleNamespace(warning=slow_warning))
    q, k, v = make(device=torch.device("cpu"))
    together(lambda: attention(q, k, v))
    assert len(notices) == 1


def test_asking_for_the_reference_says_nothing(reference_only: None, caplog: pytest.LogCaptureFixture) -> None:
    attention(*make(device=torch.device("cpu")), backend="reference")
    assert caplog.records == []


def test_the_reference_keeps_its_precision_under_autocast(reference_only: None) -> None:
    tensors = make(device=torch.device("cpu"))
    with torch.autocast("cpu", dtype=BFLOAT16):
        out = attention(*tensors, backend="reference")
    assert torch.equal(out, attention(*tensors, backend="reference"))


@pytest.mark.parametrize("softmax_scale", [None, -0.2, 0.0])
def test_the_reference_has_the_contract_of_the_kernels(softmax_scale: float | None, reference_only: None) -> None:
    tensors = make(50, 20, head_dim_v=48, device=torch.device("cpu"))
    out, lse = attention(*tensors, causal=True, softmax_scale=softmax_scale, backend="reference", return_lse=True)
    assert (out.dtype, out.shape, out.is_contiguous()) == (BFLOAT16, (2, 50, 4, 48), True)
    assert (out[:, :30] == 0).all()
    assert (lse[:, :, :30] == MINUS_INF).all()


# --- backward ---------------------------------------------------------------------------------------------------------


@causal_or_not
@pytest.mark.parametrize("softmax_scale", [None, -0.3, 0.0])
def test_the_reference_is_differentiable_with_zero_rows(
    softmax_scale: float | None, causal: bool, reference_only: None
) -> None:
    q, k, v = make_small(50, 20, device=torch.device("cpu"))
    dq, _, _ = found = gradients(q, k, v, causal=causal, softmax_scale=softmax_scale)
    exact = attention_gradients(
        *swapped(q, k, v, gradient_of(q.shape)),
        softmax_scale=32**-0.5 if softmax_scale is None else softmax_scale,
        diagonal=-30 if causal else None,
    )
    for gradient, expected in zip(found, exact, strict=True):
        assert torch.equal(gradient, *swapped(expected.to(BFLOAT16)))
    assert not causal or (dq[:, :30] == 0).all()


def test_the_written_out_gradients_are_those_of_autograd_on_the_reference() -> None:
    inputs = requiring(*(t.double() for t in swapped(*make_small(20, 30, device=torch.device("cpu")))))
    out, _ = attention_reference(*inputs, softmax_scale=0.3, diagonal=-5)
    d_out = torch.randn(out.shape, dtype=torch.float64)
    written = attention_gradients(*(t.detach() for t in inputs), d_out, softmax_scale=0.3, diagonal=-5)
    for gradient, expected in zip(written, torch.autograd.grad(out, inputs, d_out), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_the_reference_backend_has_the_gradients_of_the_kernels_contract() -> None:
    q, k, v = make_small(device=torch.device("cpu"))
    inputs = requiring(q, k, v)
    out = attention(*inputs, causal=True, backend="reference")
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    exact = attention_gradients(*swapped(q, k, v, torch.ones_like(q)), softmax_scale=32**-0.5, diagonal=4)
    assert all(torch.equal(g, *swapped(e.to(BFLOAT16))) for g, e in zip(found, exact, strict=True))
