"""Packed sequences in graphs: torch.compile, fake tensors, and the operators that those see."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from fa_autotune import attention_varlen, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops import autograd
from fa_autotune.ops.call import FULL, GENERATED, PACKED, Call, Extras, Needed
from kit.attention_calls import FLOAT32, of_torch, requiring, runs_kernels
from kit.packed_calls import gradient_like, make_packed

OPS = torch.ops.fa_autotune
CALL = Call(None, FULL, PACKED, GENERATED)
SMALL = [(20, 24), (0, 3), (3, 5)]
pytestmark = of_torch


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """One graph without breaks, or an error."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def small(lengths: list[tuple[int, int]] = SMALL, **sizes: Any) -> tuple[Tensor, ...]:
    return make_packed(lengths, **{"heads": 2, "kv_heads": 1, "head_dim": 16, **sizes})


def step(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, maximum: Any = None) -> Any:
    return flash_attn_varlen_func(q, k, v, starts_q, starts_k, maximum, maximum, causal=True) * 2


def results(function: Callable[..., Any], tensors: tuple[Tensor, ...], *more: Any) -> list[Tensor]:
    """The result and the gradients of a function."""
    inputs = requiring(*tensors[:3])
    out = function(*inputs, *tensors[3:], *more)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient_like(tensors))]


@runs_kernels
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_compiled_step_is_one_graph_with_the_results_of_the_eager_one(dynamic: bool | None) -> None:
    tensors = small()
    assert all(map(torch.equal, results(compiled(step, dynamic=dynamic), tensors), results(step, tensors)))
    assert counters["stats"]["unique_graphs"] == 1


@runs_kernels
def test_a_compiled_step_with_sinks_and_slopes() -> None:
    def with_extras(*tensors: Tensor) -> Any:
        *call, slopes, sinks = tensors
        out, lse = attention_varlen(*call, alibi_slopes=slopes, sinks=sinks, window_size=(9, 0), return_lse=True)
        return out.float().sum() + lse.sum()

    gradients = []
    for function in (with_extras, compiled(with_extras)):
        q, k, v, sinks = requiring(*small([(20, 24), (3, 5)])[:3], torch.tensor([0.5, -1.0]).to(small()[0].device))
        starts = small([(20, 24), (3, 5)])[3:]
        loss = function(
            q, k, v, *starts, torch.rand(2, 2, generator=torch.Generator().manual_seed(0)).to(q.device), sinks
        )
        gradients.append(torch.autograd.grad(loss, (q, k, v, sinks)))
    assert all(map(torch.equal, *gradients))


def test_ever_new_totals_and_maxima_recompile_nothing(reference_only: None) -> None:
    """Once lengths have changed they are symbols, and a maximum is never looked at."""
    function = compiled(step, dynamic=True)
    for count in range(5, 15):
        tensors = small([(count, count + 3), (4, 2), *[(1, 1)] * (count % 4)], dtype=FLOAT32)
        tensors = tuple(tensor.cpu() for tensor in tensors)
        torch.testing.assert_close(function(*tensors, count), step(*tensors))
    assert counters["stats"]["unique_graphs"] == 1


def test_the_packed_form_compiles(reference_only: None) -> None:
    q, k, v, starts, _ = (tensor.cpu() for tensor in small([(9, 9), (4, 4)], kv_heads=2, dtype=FLOAT32))

    def packed_step(qkv: Tensor) -> Any:
        return flash_attn_varlen_qkvpacked_func(qkv, starts, 9, causal=True).sum()

    gradients = []
    for function in (packed_step, compiled(packed_step)):
        (qkv,) = requiring(torch.stack([q, k, v], 1))
        function(qkv).backward()
        gradients.append(qkv.grad)
    torch.testing.assert_close(*gradients)


def call_of(tensors: Iterable[Tensor], **extras: Tensor) -> tuple[list[Tensor], Extras]:
    """q, k and v, and a call's extras."""
    q, k, v, starts_q, starts_k = tensors
    return [q, k, v], Extras(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **extras)


@pytest.mark.parametrize("more", [{}, {"alibi_slopes": torch.rand(3, 2), "sinks": torch.rand(2, requires_grad=True)}])
def test_the_forward_operator_keeps_its_promises(more: dict[str, Tensor], reference_only: None) -> None:
    tensors, extras = call_of((tensor.cpu() for tensor in small(dtype=FLOAT32)), **more)
    torch.library.opcheck(OPS.forward.default, (*tensors, *CALL, *extras))
    torch.library.opcheck(OPS.forward.default, (*requiring(*tensors), *CALL, *extras))


@pytest.mark.parametrize(
    "needed", [Needed(True, True, True, sinks=True), Needed(True, False, False), Needed(False, False, True)]
)
def test_the_backward_operator_keeps_its_promises(needed: Needed, reference_only: None) -> None:
    more = {"alibi_slopes": torch.rand(3, 2), "sinks": torch.rand(2)}
    tensors, extras = call_of((tensor.cpu() for tensor in small(dtype=FLOAT32)), **more)
    out, lse = OPS.forward(*tensors, *CALL, *extras)
    for d_out, d_lse in ((torch.randn_like(out), None), (None, torch.randn_like(lse))):
        arguments = (d_out, d_lse, *tensors, out, lse, list(needed), *CALL, *extras)
        torch.library.opcheck(OPS.backward.default, arguments)


@runs_kernels
def test_the_operators_keep_their_promises_with_kernels() -> None:
    tensors, extras = call_of(small())
    torch.library.opcheck(OPS.forward.default, (*requiring(*tensors), *CALL, *extras))


def test_fake_tensors_have_the_shapes_of_the_results() -> None:
    with FakeTensorMode():
        q, k = torch.empty(70, 4, 32, dtype=torch.bfloat16), torch.empty(50, 2, 32, dtype=torch.bfloat16)
        v, starts = torch.empty(50, 2, 16, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int32)
        out, lse = attention_varlen(q, k, v, starts, starts, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((70, 4, 16), torch.bfloat16, (4, 70), FLOAT32)
        with pytest.raises(InvalidProblemError, match="cu_seqlens_q says 8 sequences and cu_seqlens_k 7"):
            attention_varlen(q, k, v, starts, starts[1:])


def test_nothing_in_eager_mode_goes_through_the_operators(
    reference_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "attention_op", None)  # not to be called
    monkeypatch.setattr(autograd, "gradients_op", None)
    tensors = [tensor.cpu() for tensor in small()]
    inputs = requiring(*tensors[:3])
    attention_varlen(*inputs, *tensors[3:]).sum().backward()
    assert inputs[0].grad is not None


def test_forward_mode_is_refused(reference_only: None) -> None:
    tensors = [tensor.cpu() for tensor in small(dtype=FLOAT32)]
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            attention_varlen(q, *tensors[1:])
