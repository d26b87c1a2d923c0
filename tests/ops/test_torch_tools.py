"""What PyTorch's own tools see of attention: tensors without memory, functionalize, vmap of nothing, the profiler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from fa_autotune import (
    attention,
    attention_varlen,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    scaled_dot_product_attention,
)
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from kit.attention_calls import make_small

CPU = torch.device("cpu")
META = torch.device("meta")


def small() -> tuple[Tensor, Tensor, Tensor]:
    return make_small(8, 12, head_dim=16, dtype=torch.float32, device=CPU)


# --- tensors without memory -------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v, sinks, starts: attention(q, k, v, sinks=sinks, causal=True, return_lse=True),
    "dropout": lambda q, k, v, sinks, starts: attention(q, k, v, sinks=sinks, dropout_p=0.3, return_lse=True),
    "bhsd": lambda q, k, v, sinks, starts: attention(
        *(x.transpose(1, 2) for x in (q, k, v)), sinks=sinks, layout="bhsd", return_lse=True
    ),
    "varlen": lambda q, k, v, sinks, starts: attention_varlen(
        q[0], k[0], v[0], starts, starts, sinks=sinks, return_lse=True
    ),
    "sdpa": lambda q, k, v, sinks, starts: (
        scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
        flash_attn_func(q, k, v, learnable_sink=sinks),
    ),
}


def made(device: torch.device) -> list[Tensor]:
    tensors = [torch.ones(x.shape, device=device, requires_grad=True) for x in small()]
    sinks = torch.ones(2, device=device, requires_grad=True)
    return [*tensors, sinks, torch.zeros(2, dtype=torch.int32, device=device)]


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake meta"])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_memory_have_results_and_gradients_of_the_real_ones_shapes(
    name: str, fake: bool, reference_only: None
) -> None:
    def geometry(device: torch.device) -> list[Any]:
        *inputs, starts = made(device)
        results = CALLS[name](*inputs, starts)
        gradients = torch.autograd.grad([result.sum() for result in results], inputs)
        return [(one.shape, one.stride(), one.dtype, one.device == device) for one in (*results, *gradients)]

    expected = geometry(CPU)
    if not fake:
        assert geometry(META) == expected
        return
    with FakeTensorMode():
        assert geometry(META) == expected


def test_a_mask_without_memory_has_a_gradient_of_its_shape() -> None:
    q, k, v = (x.to(META) for x in small())
    mask = torch.ones(8, 12, device=META, requires_grad=True)
    attention(q, k, v, attn_mask=mask).sum().backward()
    assert mask.grad is not None
    assert mask.grad.shape == (8, 12)


def test_rules_hold_for_tensors_without_memory_too() -> None:
    x = torch.empty(1, 8, 2, 16, device=META)
    with pytest.raises(InvalidProblemError, match="q has head_dim 16 and k 8; they must be equal"):
        attention(x, x[..., :8], x)
    with pytest.raises(InvalidProblemError, match="k is on cpu and q on meta; move one of them"):
        attention(x, torch.empty(1, 8, 2, 16), x)


# --- functionalize ----------------------------------------------------------------------------------------------------


def test_functionalize_runs_the_operator(reference_only: None) -> None:
    q, k, v = small()
    assert torch.equal(torch.func.functionalize(attention)(q, k, v), attention(q, k, v))
    traced = make_fx(torch.func.functionalize(lambda *x: attention(*x, causal=True)))(q, k, v)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert torch.ops.fa_autotune.forward.default in called
    assert torch.equal(traced(q, k, v), attention(q, k, v, causal=True))
    starts = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    packed = q[0], k[0], v[0], *starts
    assert torch.equal(torch.func.functionalize(attention_varlen)(*packed), attention_varlen(*packed))


def test_functionalize_goes_with_vmap(reference_only: None) -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in small())
    expected = torch.vmap(attention)(q, k, v)
    assert torch.equal(torch.func.functionalize(torch.vmap(attention))(q, k, v), expected)
    assert torch.equal(torch.vmap(torch.func.functionalize(attention))(q, k, v), expected)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.functionalize(torch.func.grad(f)),
        lambda f: torch.func.grad(torch.func.functionalize(f)),
    ],
    ids=["of grad", "in grad"],
)
def test_functionalize_with_grad_is_refused_by_name(transform: Any, reference_only: None) -> None:
    q, k, v = small()
    with pytest.raises(UnsupportedError, match=r"by torch\.func\.grad .* where torch\.func\.functionalize meets it"):
        transform(lambda x: attention(x, k, v).sum())(q)


# --- vmap of nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (0, None, None)], ids=str)
def test_vmap_over_no_example_gives_no_result(in_dims: tuple[int | None, ...], reference_only: None) -> None:
    tensors = [
        x if dim is None else x.new_empty([*x.shape[:dim], 0, *x.shape[dim:]])
        for x, dim in zip(small(), in_dims, strict=True)
    ]
    out, lse = torch.vmap(lambda *x: attention(*x, return_lse=True), in_dims=in_dims)(*tensors)
    assert (out.shape, lse.shape) == ((0, 1, 8, 2, 16), (0, 1, 2, 8))
    gradients = torch.func.grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))
    found = torch.vmap(gradients, in_dims=in_dims)(*tensors)
    assert [x.shape for x in found] == [(0, *x.shape) for x in small()]


# --- the profiler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: attention(x, x, x),
        lambda x: flash_attn_qkvpacked_func(torch.stack([x, x, x], 2)),
        lambda x: attention(x, x, x, sinks=torch.ones(2), dropout_p=0.5),
    ],
    ids=["attention", "stacked", "features"],
)
def test_the_profiler_sees_each_direction_by_its_name(call: Callable[[Tensor], Tensor], reference_only: None) -> None:
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call(x).sum().backward()
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("fa_autotune")}
    assert counts == {"fa_autotune::forward": 1, "fa_autotune::backward": 1}


def test_a_profiled_call_has_the_same_bits(reference_only: None) -> None:
    q, k, v = small()
    with profile(activities=[ProfilerActivity.CPU]):
        found = attention(q, k, v, causal=True)
    assert torch.equal(found, attention(q, k, v, causal=True))
