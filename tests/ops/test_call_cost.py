"""What calls cost, and what they share: kernels loaded, plans remembered, threads that come together."""

import threading
from collections import Counter

import pytest
import torch

from fa_autotune import attention, warmup
from fa_autotune.dispatch import loaded_kernels as live_kernels
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.errors import InvalidProblemError
from fa_autotune.kernels import loaded as launch
from fa_autotune.ops import call_kernels, kernel_plan
from fa_autotune.ops import plans as calls
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    FLOAT32,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    make,
    make_small,
    runs_kernels,
    together,
)
from kit.views import every_second_column

# --- forward ----------------------------------------------------------------------------------------------------------


@runs_kernels
def test_threads_that_cold_start_together_load_one_kernel(loads: list[Candidate]) -> None:
    q, k, v = make()
    results = together(lambda: attention(q, k, v, causal=True))
    assert len(loads) == 1
    assert all(torch.equal(result, results[0]) for result in results)


@runs_kernels
def test_threads_with_different_problems_do_not_disturb_each_other(cold: None) -> None:
    lengths = iter(range(20, 28))
    lock = threading.Lock()

    def call() -> None:
        with lock:
            tensors = make(next(lengths), 40, head_dim=16)
        assert_right(*tensors, causal=True)

    together(call)


@runs_kernels
@pytest.mark.parametrize("softmax_scale", [None, -0.3])
def test_a_shapes_second_call_decides_renders_and_loads_nothing(
    softmax_scale: float | None, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make()
    first = attention(q, k, v, causal=True, softmax_scale=softmax_scale)
    for module, name in (
        (Dispatcher, "decide"),
        (launch, "render"),
        (live_kernels, "load_kernel"),
        (calls, "KernelPlan"),
    ):
        monkeypatch.setattr(module, name, None)  # not to be called
    assert torch.equal(attention(q.clone(), k, v, causal=True, softmax_scale=softmax_scale), first)


@runs_kernels
def test_new_lengths_reuse_the_kernels_of_old_ones(loads: list[Candidate]) -> None:
    lengths = [1, 7, 16, 17, 33, 64, 65, 90, 127, 128, 129, 150]
    for seqlen in lengths:
        attention(*make(seqlen, seqlen, batch=1), causal=True)
    assert len(loads) <= 5


@runs_kernels
def test_a_stream_of_lengths_compiles_a_bounded_number_of_kernels(loads: list[Candidate]) -> None:
    warmup(f"1x4x2x{seqlen}x{seqlen}x32,causal" for seqlen in range(1, 4097, 5))
    warmup(f"1x4x2x1x{seqlen}x32" for seqlen in range(1, 4097, 5))
    assert len(loads) <= 12


@runs_kernels
def test_a_stream_of_lengths_does_not_fill_memory(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_REMEMBERED_CALLS", 3)
    for seqlen in range(20, 26):
        assert_right(*make(seqlen, seqlen, batch=1))
    assert len(calls._plans) == 3


@runs_kernels
def test_a_call_after_warmup_loads_nothing(loads: list[Candidate]) -> None:
    warmup(["2x4x2x37x41x32,causal", AttentionProblem.parse("2x4x2x37x41x32")])
    before = len(loads)
    attention(*make(), causal=True)
    attention(*make())
    assert len(loads) == before == 2


@runs_kernels
def test_warmup_of_a_causal_decoding_step_is_what_its_call_needs(loads: list[Candidate]) -> None:
    warmup(["2x4x2x1x300x32,causal"])
    attention(*make(1, 300), causal=True)
    assert len(loads) == 1


def test_warmup_refuses_what_is_no_problem() -> None:
    with pytest.raises(InvalidProblemError, match="no problem: write"):
        warmup(["4x32"])


@pytest.mark.parametrize("device", ["cpu", "gpu0", "cuda:x"])
def test_warmup_on_what_is_no_gpu_is_an_error(device: str, reference_only: None) -> None:
    with pytest.raises(InvalidProblemError, match=f"device='{device}' is no .*cuda:0"):
        warmup(["1x1x1x16x16x16"], device=device)


# --- backward ---------------------------------------------------------------------------------------------------------


@runs_kernels
def test_a_second_backward_decides_binds_and_loads_nothing(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_small()
    first = gradients(q, k, v, causal=True)
    for module, name in (
        (call_kernels, "bind"),
        (call_kernels, "kernel_for"),
        (kernel_plan, "backward_of"),
        (calls, "KernelPlan"),
    ):
        monkeypatch.setattr(module, name, None)  # not to be called
    assert all(map(torch.equal, gradients(q.clone(), k, v, causal=True), first))


@runs_kernels
def test_new_lengths_reuse_the_backward_kernels_of_old_ones(loads: list[Candidate]) -> None:
    for seqlen in (1, 17, 33, 64, 65, 90, 128, 150):
        gradients(*make_small(seqlen, seqlen), causal=True)
    assert len(loads) <= 20


@runs_kernels
def test_a_gradient_of_many_strides_does_not_fill_memory(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "MAX_REMEMBERED_BACKWARDS", 2)
    q, k, v = make_small(20, 20)
    for padding in range(1, 6):
        d_out = torch.nn.functional.pad(gradient_of(q.shape), (0, 8 * padding))[..., :32]
        assert_gradients_right(q, k, v, d_out=d_out)
    (plan,) = calls._plans.values()
    assert len(plan._backwards) <= 2


@runs_kernels
def test_a_backward_after_warmup_loads_nothing(loads: list[Candidate]) -> None:
    warmup(["1x2x1x37x41x32,causal"], backward=True)
    before = len(loads)
    gradients(*make_small(), causal=True)
    assert len(loads) == before == 4


@runs_kernels
def test_a_worse_gradient_of_out_is_copied_rather_than_slowing_the_kernels(loads: list[Candidate]) -> None:
    q, k, v = make_small()
    gradients(q, k, v, every_second_column(gradient_of(q.shape)))
    assert {candidate.family.access for candidate in loads} == {Access.TMA}


@runs_kernels
def test_threads_that_cold_start_together_load_each_backward_kernel_once(loads: list[Candidate]) -> None:
    q, k, v = make_small(dtype=FLOAT32)  # whose backward is split on every GPU
    results = together(lambda: gradients(q, k, v, causal=True))
    assert Counter(candidate.family.kernel_pass for candidate in loads) == dict.fromkeys((Pass.FWD, *SPLIT_BACKWARD), 1)
    assert all(torch.equal(one, other) for found in results for one, other in zip(found, results[0], strict=True))
