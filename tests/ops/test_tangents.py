"""A tangent is refused wherever a call meets one: of its tensors, of its numbers, of a gradient in its backward."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from fa_autotune import attention, attention_varlen, flash_attn_kvpacked_func
from fa_autotune.errors import UnsupportedError
from kit.attention_calls import DEVICE, make_small, of_torch, requiring, runs_kernels

REFUSED = pytest.raises(UnsupportedError, match=r"no forward-mode derivative.* reverse mode")
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "padded": lambda x: attention(x, x, x, return_lse=True),
    "stacked": lambda x: flash_attn_kvpacked_func(x, torch.stack((x, x), 2), return_attn_probs=True),
    "packed": lambda x: attention_varlen(x[0], x[0], x[0], *(starts(x),) * 2, return_lse=True),
}


def starts(x: Tensor) -> Tensor:
    return torch.tensor([0, x.shape[1]], dtype=torch.int32, device=x.device)


@runs_kernels
@of_torch
@pytest.mark.parametrize("looks_on", [nullcontext, lambda: FlopCounterMode(display=False)], ids=["eager", "mode"])
@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_that_of_a_gradient_is_refused_not_lost(
    call: Callable[[Tensor], Any], which: int, looks_on: Callable[[], Any]
) -> None:
    x, *_ = requiring(*make_small())
    with forward_ad.dual_level(), looks_on():
        result = call(x)[which]
        factor = forward_ad.make_dual(torch.ones_like(result), torch.ones_like(result))
        with REFUSED:
            torch.autograd.grad((result * factor).sum(), x)


@runs_kernels
@of_torch
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_level_without_one_changes_no_gradient(call: Callable[[Tensor], Any]) -> None:
    x, *_ = requiring(*make_small())
    (expected,) = torch.autograd.grad(call(x)[0].square().sum(), x)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(call(x)[0].square().sum(), x)
    assert torch.equal(found, expected)


@of_torch
@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_that_of_a_number_is_refused_not_lost(name: str) -> None:
    q, k, v = make_small(device=DEVICE)
    number, one = torch.tensor(0.3), torch.tensor(1.0)
    with forward_ad.dual_level(), REFUSED:
        attention(q, k, v, **{name: forward_ad.make_dual(number, one)})
    with REFUSED:
        torch.func.jvp(lambda x: attention(q, k, v, **{name: x}), (number,), (one,))
    with forward_ad.dual_level():
        attention(q, k, v, **{name: number})
