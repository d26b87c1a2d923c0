"""What a backward computes and what is kept for it; that it repeats to the last bit, whatever memory held.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention
from fa_autotune.kernels.fast_launch import Counts, Launch
from fa_autotune.kernels.loaded import LoadedKernel
from fa_autotune.ops import call_kernels, memory
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    FLOAT32,
    assert_gradients_right,
    causal_or_not,
    forget_plans,
    gradient_of,
    gradients,
    make_small,
    requiring,
    runs_kernels,
)
from kit.views import every_second_column, every_second_row, transposed

# --- only what is asked for -------------------------------------------------------------------------------------------


@pytest.fixture
def launches(cold: None, monkeypatch: pytest.MonkeyPatch) -> Counter[Pass]:
    """How often a kernel of each pass ran since the process was cold."""
    counted: Counter[Pass] = Counter()
    bind = call_kernels.bind

    def counting(kernel: LoadedKernel, *arguments: Any, **options: Any) -> Launch:
        launch = bind(kernel, *arguments, **options)

        def run(_self: Launch, counts: Counts | None, *tensors: Tensor) -> None:
            counted[kernel.candidate.family.kernel_pass] += 1
            launch(counts, *tensors)

        return Launch(run)

    monkeypatch.setattr(call_kernels, "bind", counting)
    return counted


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_exactly_the_needed_gradients_are_computed(which: str, launches: Counter[Pass]) -> None:
    tensors = dict(zip("qkv", make_small(dtype=FLOAT32), strict=True))  # whose backward is split on every GPU
    everything = dict(zip("qkv", gradients(*tensors.values(), causal=True), strict=True))
    launches.clear()
    for name in which:
        tensors[name].requires_grad_()
    out = attention(*tensors.values(), causal=True)
    out.backward(gradient_of(out.shape, FLOAT32))
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in which)
        assert tensor.grad is None or torch.equal(tensor.grad, everything[name])
    expected = {Pass.FWD: 1, Pass.BWD_DELTA: 1}
    expected |= {Pass.BWD_DQ: 1} if "q" in which else {}
    expected |= {Pass.BWD_DKDV: 1} if which != "q" else {}
    assert launches == expected


@runs_kernels
def test_a_call_whose_result_is_not_used_runs_no_backward(launches: Counter[Pass]) -> None:
    q, k, v = requiring(*make_small())
    (attention(q, k, v).detach().sum() + q.sum()).backward()
    assert launches == {Pass.FWD: 1}


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
def test_nothing_is_kept_where_nothing_needs_a_gradient(mode: Any) -> None:
    q, k, v = make_small()
    if mode is None:
        out, lse = attention(q, k, v, return_lse=True)
    else:
        with mode():
            out, lse = attention(q.requires_grad_(), k, v, return_lse=True)
    assert out.grad_fn is lse.grad_fn is None
    watched = [weakref.ref(tensor) for tensor in (k, v, lse)]
    del q, k, v, lse
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


@runs_kernels
def test_only_inputs_results_and_lse_are_kept_for_the_backward() -> None:
    q, k, v = requiring(*make_small())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = attention(q, k, v)
    addresses = {tensor.data_ptr() for tensor in (q, k, v, out)}
    assert {tensor.data_ptr() for tensor in kept if tensor.ndim == 4} == addresses
    assert [(tensor.shape, tensor.dtype) for tensor in kept if tensor.ndim != 4] == [((1, 2, 37), FLOAT32)]


@runs_kernels
def test_a_changed_input_is_noticed_before_the_backward() -> None:
    q, k, v = make_small()
    out = attention(q.requires_grad_(), k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@runs_kernels
def test_saved_tensors_may_come_back_with_other_strides() -> None:
    q, k, v = (transposed(tensor) for tensor in make_small())
    inputs, plain = requiring(q, k, v), gradients(q, k, v, causal=True)
    with torch.autograd.graph.save_on_cpu():  # gives contiguous tensors back
        out = attention(*inputs, causal=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    assert all(map(torch.equal, found, plain))


# --- repeatable -------------------------------------------------------------------------------------------------------


@runs_kernels
def test_repeated_backwards_give_the_same_bits() -> None:
    inputs = requiring(*make_small(70, 90))
    out = attention(*inputs, causal=True)
    first, *others = (torch.autograd.grad(out, inputs, gradient_of(out.shape), retain_graph=True) for _ in range(5))
    assert all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Every fresh buffer holds NaN."""
    filled: list[Tensor] = []

    def poisoning(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            tensor = plain(*arguments, **options)
            filled.append(tensor)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(memory, "empty_strided_cuda", None)  # past torch's own names
    forget_plans(monkeypatch)
    call_kernels._home_of.cache_clear()
    yield filled
    call_kernels._home_of.cache_clear()


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 20), (20, 150), (130, 131)])
def test_a_poisoned_allocator_changes_nothing(
    seqlen_q: int, seqlen_k: int, causal: bool, request: pytest.FixtureRequest
) -> None:
    tensors = make_small(seqlen_q, seqlen_k)
    d_out = gradient_of(tensors[0].shape)
    clean_out, clean = attention(*tensors, causal=causal), gradients(*tensors, d_out, causal=causal)
    filled = request.getfixturevalue("poisoned")
    assert torch.equal(attention(*tensors, causal=causal), clean_out)
    assert all(map(torch.equal, gradients(*tensors, d_out, causal=causal), clean))
    assert len(filled) >= 8


@runs_kernels
@pytest.mark.parametrize("access", [None, every_second_row, every_second_column])
def test_kernels_with_blocks_of_different_sizes_work_together(
    access: Callable[[Tensor], Tensor] | None, loads: list[Candidate], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("poisoned")
    q, k, v = make_small(150, 140, dtype=FLOAT32)  # whose backward is split on every GPU
    if access is not None:
        q, k, v = access(q), access(k), access(v)
    assert_gradients_right(q, k, v, causal=True)
    rows = {candidate.family.kernel_pass: candidate.config.BLOCK_M for candidate in loads}
    assert set(rows) == {Pass.FWD, *SPLIT_BACKWARD}
    assert len(set(rows.values())) > 1
