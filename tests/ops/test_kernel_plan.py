"""A plan that runs kernels: what it remembers of its backwards, what it copies, refuses and asks once.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen
from fa_autotune.errors import InvalidProblemError, NoKernelError
from fa_autotune.ops import call_kernels, kernel_plan, plans
from fa_autotune.ops.call import BHSD, FULL, GENERATED, NO_EXTRAS, Call, Needed, Saved
from fa_autotune.ops.kernel_plan import KernelPlan
from fa_autotune.ops.plans import plan_of
from kit.attention_calls import BFLOAT16, DEVICE, gradient_of, make_small, requiring, runs_kernels
from kit.views import every_second_column


def plan_for(*tensors: Tensor, **said: Any) -> KernelPlan:
    plan = plan_of(*tensors, NO_EXTRAS, Call(None, FULL, BHSD, GENERATED, **said))
    assert isinstance(plan, KernelPlan)
    return plan


def heads_first(head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, rows, head_dim).to(DEVICE, BFLOAT16) for rows in (9, 11, 11))
    return q, k, v


# --- bound once -------------------------------------------------------------------------------------------------------


@runs_kernels
def test_kernels_are_chosen_with_the_plan_and_bound_by_the_first_launch(
    cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[int] = []
    bind = call_kernels.bind
    monkeypatch.setattr(
        call_kernels, "bind", lambda kernel, *rest, **options: bound.append(1) or bind(kernel, *rest, **options)
    )
    q, k, v = heads_first()
    plan = plan_for(q, k, v)
    assert bound == []
    monkeypatch.setattr(call_kernels, "kernel_for", None)  # not to be called
    first = plan.forward(q, k, v, NO_EXTRAS)
    again = plan.forward(q.clone(), k.clone(), v.clone(), NO_EXTRAS)
    assert bound == [1]
    assert all(map(torch.equal, first, again))


@runs_kernels
def test_each_way_that_gradients_are_needed_and_lie_has_its_own_backward(cold: None) -> None:
    q, k, v = heads_first()
    plan = plan_for(q, k, v)
    out, lse = plan.forward(q, k, v, NO_EXTRAS)
    saved, d_out = Saved(q, k, v, out, lse), gradient_of(out.shape)
    everything = Needed(True, True, True)
    full = plan.backward(saved, d_out, None, everything)
    ways: list[tuple[Tensor, Needed]] = [
        (d_out, Needed(True, False, False)),
        (d_out.transpose(1, 2).contiguous().transpose(1, 2), everything),
        (d_out.clone(), everything),
    ]
    for given, needed in ways:
        found = plan.backward(saved, given, None, needed)
        for name in "qkv":
            one, other = getattr(found, name), getattr(full, name)
            assert (one is None) is not getattr(needed, name)
            if one is not None:
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    assert plan._backwards is not None
    assert len(plan._backwards) == 3


@runs_kernels
@pytest.mark.parametrize("which", ["k", "v"])
def test_k_and_v_share_a_kernel_and_only_what_is_needed_is_given(which: str) -> None:
    q, k, v = heads_first()
    plan = plan_for(q, k, v)
    out, lse = plan.forward(q, k, v, NO_EXTRAS)
    found = plan.backward(Saved(q, k, v, out, lse), out, None, Needed(False, which == "k", which == "v"))
    assert [name for name, gradient in found._asdict().items() if gradient is not None] == [which]


@runs_kernels
def test_no_gradient_of_out_counts_as_zeros() -> None:
    q, k, v = heads_first()
    plan = plan_for(q, k, v)
    out, lse = plan.forward(q, k, v, NO_EXTRAS)
    saved, d_lse = Saved(q, k, v, out, lse), torch.ones_like(lse)
    found, expected = (
        plan.backward(saved, d_out, d_lse, Needed(True, True, True)) for d_out in (None, torch.zeros_like(out))
    )
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in "qkv")
    assert found.q.any()


# --- what it copies ---------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(
    ("view", "is_copied"),
    [
        (lambda tensor: tensor, False),
        (every_second_column, True),
        (lambda tensor: tensor[:, :1].expand(tensor.shape), True),
    ],
    ids=["dense", "every second column", "expanded"],
)
def test_a_gradient_of_out_that_is_harder_to_read_than_the_inputs_is_copied(
    view: Callable[[Tensor], Tensor], is_copied: bool
) -> None:
    q, k, v = heads_first()
    plan = plan_for(q, k, v)
    out, lse = plan.forward(q, k, v, NO_EXTRAS)
    assert plan._copies(Saved(q, k, v, out, lse), view(gradient_of(out.shape))) is is_copied
    worse = plan_for(every_second_column(q), k, v)
    saved = Saved(every_second_column(q), k, v, out, lse)
    assert not worse._copies(saved, view(gradient_of(out.shape)))  # all are read in the weakest way anyway


# --- what it refuses --------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "attn_mask"])
def test_a_hook_that_changes_what_was_saved_beside_q_k_and_v_is_told(name: str) -> None:
    q, k, v = requiring(*make_small(9, 11))
    given = {"alibi_slopes": torch.rand(2), "sinks": torch.rand(2), "attn_mask": torch.rand(9, 11)}[name].to(DEVICE)
    size = {"attn_mask": (1, 1, 9, 11)}.get(name, (1, 2))

    def changed(tensor: Tensor) -> Tensor:
        return tensor.half() if tensor.shape == size else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, changed):
        out = attention(q, k, v, **{name: given})
    with pytest.raises(InvalidProblemError, match=r"mask, seed or cu_seqlens came to the backward as .*float16"):
        out.sum().backward()


def packed_call(lengths: list[int]) -> tuple[Tensor, ...]:
    """q, k, v with a gradient and the starts of sequences, those of q and of k apart."""
    q, k, v = requiring(*(tensor[0] for tensor in make_small(sum(lengths), sum(lengths))))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    return q, k, v, starts, starts.clone()


@runs_kernels
@pytest.mark.parametrize(
    "changed",
    [
        lambda tensor: torch.stack([tensor, tensor], 1)[:, 0],
        lambda tensor: tensor.long(),
        lambda tensor: tensor[:2],
    ],
    ids=["stride", "dtype", "number of one only"],
)
def test_a_hook_that_changes_where_sequences_lie_is_told(changed: Callable[[Tensor], Tensor]) -> None:
    *tensors, starts_q, starts_k = packed_call([5, 8])
    address = starts_q.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor, tensor.data_ptr() == address), lambda kept: changed(kept[0]) if kept[1] else kept[0]
    ):
        out = attention_varlen(*tensors, starts_q, starts_k, causal=True)
    with pytest.raises(InvalidProblemError, match="mask, seed or cu_seqlens came to the backward as"):
        out.sum().backward()


@runs_kernels
def test_a_hook_that_changes_the_device_is_told() -> None:
    q, k, v = requiring(*make_small(9, 11))

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("meta") if 11 in tensor.shape else tensor

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        out = attention(q, k, v)
    with pytest.raises(InvalidProblemError, match="on meta"):
        out.sum().backward()


@runs_kernels
def test_tensors_that_are_less_aligned_have_a_backward_of_their_own(cold: None) -> None:
    """Whichever they are: kernels read q, k and v, out, and its gradient apart."""
    memory = torch.zeros(1 << 12, dtype=BFLOAT16, device=DEVICE)

    def at(offset: int, tensor: Tensor) -> Tensor:
        placed = memory[offset : offset + tensor.numel()].view(tensor.shape)
        return placed if offset else tensor

    q, k, v = heads_first()
    q = torch.cat([q.new_zeros(4), q.flatten()])[4:].view(q.shape)  # 8 bytes past 16
    plan = plan_for(q, k, v)
    out, lse = plan.forward(q, k, v, NO_EXTRAS)
    d_out = gradient_of(out.shape)
    for offset in (0, 4):
        plan.backward(Saved(q, k, v, out, lse), at(offset, d_out), None, Needed(True, True, True))
    assert plan._backwards is not None
    assert len(plan._backwards) == 2


@runs_kernels
@pytest.mark.parametrize("totals", [(0, 5), (5, 0), (0, 0)])
def test_no_kernel_is_bound_to_tensors_without_rows(
    totals: tuple[int, int], cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_kernels, "bind", None)  # not to be called
    q, k, _ = (tensor[0] for tensor in make_small(max(totals[0], 1), max(totals[1], 1)))
    q, k = q[: totals[0]], k[: totals[1]]
    starts = [torch.tensor([0, total], dtype=torch.int32, device=DEVICE) for total in totals]
    sinks = torch.rand(q.shape[1], device=DEVICE)
    out, lse = attention_varlen(q, k, k, *starts, sinks=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks[:, None].expand(lse.shape))


class NoBackward:
    """A dispatcher of a GPU that has no kernel for a backward."""

    def __init__(self) -> None:
        self.asked = 0

    def peek(self, problem: Any) -> None:
        self.asked += 1
        raise NoKernelError("it takes more shared memory than there is")


@runs_kernels
@pytest.mark.parametrize(("head_dim", "times"), [(512, 1), (64, 0)])
def test_whether_gradients_are_served_is_asked_once_and_for_wide_heads_only(
    head_dim: int, times: int, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = NoBackward()
    monkeypatch.setattr(kernel_plan, "dispatcher_of", lambda index: dispatcher)
    plan = plan_for(*heads_first(head_dim))
    refusals = {plan.gradient_refusal for _ in range(3)}
    assert dispatcher.asked == times
    (refusal,) = refusals
    assert (refusal is None) is (times == 0)
    assert refusal is None or refusal.startswith("it takes more shared memory than there is; gradients are served up")
    assert len(plans._plans) == 1


@runs_kernels
def test_what_is_refused_of_a_scale_is_refused_of_its_opposite(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "dispatcher_of", lambda index: NoBackward())
    for scale in (-0.5, 0.0):
        plan = plan_of(*heads_first(512), NO_EXTRAS, Call(scale, FULL, BHSD, GENERATED))
        assert plan.gradient_refusal == plan_for(*heads_first(512)).gradient_refusal
        assert plan.gradient_refusal
