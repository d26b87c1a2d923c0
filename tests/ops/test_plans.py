"""What plans are remembered by: how tensors lie, and no number that kernels take at run time.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, attention_varlen
from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops import call_kernels, plans
from fa_autotune.ops.call import BHSD, FULL, GENERATED, NO_EXTRAS, Call
from fa_autotune.ops.kernel_plan import KernelPlan
from fa_autotune.ops.plans import plan_of
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    FLOAT32,
    assert_gradients_right,
    assert_right,
    gradient_of,
    make_small,
    requiring,
    runs_kernels,
    together,
)
from kit.packed_calls import assert_packed_gradients_right, assert_packed_right, make_packed

SMALL: dict[str, Any] = {"head_dim": 16, "dtype": FLOAT32}
LENGTHS = [(20, 24), (0, 3), (3, 5)]
# Two values each of what a kernel takes as a number, and with which kernel.
NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({}, {"softmax_scale": 0.1}),
    "scale and softcap": ({"softmax_scale": 0.5, "softcap": 2.0}, {"softmax_scale": 0.1, "softcap": 0.5}),
    "left": ({"window_size": (3, 0)}, {"window_size": (9, 0)}),
    "left and right": ({"window_size": (3, 1)}, {"window_size": (5, 7)}),
}
# And of what makes other kernels of one kind of tensors.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a cap and none": ({"softcap": 2.0}, {}),
    "a window and one past every key": ({"window_size": (3, 1)}, {"window_size": (90, 90)}),
    "a side and the other": ({"window_size": (3, -1)}, {"window_size": (-1, 3)}),
    "a scale and its sign": ({"softmax_scale": 0.3}, {"softmax_scale": -0.3}),
    "a scale and none at all": ({"softmax_scale": 0.3}, {"softmax_scale": 0.0}),
}


def fixed(**arguments: Any) -> None:
    """A call of fixed lengths with these arguments, and its gradients, are right."""
    assert_right(*make_small(20, 24, **SMALL), **arguments)
    assert_gradients_right(*make_small(20, 24, **SMALL), **arguments, factor=3.0)


def packed(**arguments: Any) -> None:
    """A call of packed sequences with these arguments, and its gradients, are right."""
    tensors = make_packed(LENGTHS, heads=2, kv_heads=1, **SMALL)
    assert_packed_right(tensors, LENGTHS, **arguments)
    assert_packed_gradients_right(tensors, LENGTHS, **arguments, factor=3.0)


either_kind = pytest.mark.parametrize("call", [fixed, packed])
Calls = Callable[..., None]


@pytest.fixture
def nothing_new(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on calls may neither make a plan, nor choose, load or bind a kernel."""

    def forbid() -> None:
        for module, name in ((plans, "KernelPlan"), (call_kernels, "kernel_for"), (call_kernels, "bind")):
            monkeypatch.setattr(module, name, None)

    return forbid


# --- numbers ----------------------------------------------------------------------------------------------------------


@runs_kernels
@either_kind
@pytest.mark.parametrize("name", NUMBERS)
def test_a_model_that_alternates_between_two_numbers_has_one_key_one_kernel_and_right_results(
    name: str, call: Calls, loads: list[Candidate], nothing_new: Callable[[], None]
) -> None:
    one, other = NUMBERS[name]
    call(**one)
    count = len(loads)
    call(**other)
    assert len(loads) == count
    assert len(plans._plans) == 1
    nothing_new()
    for arguments in (one, other):
        call(**arguments)
    assert len(plans._plans) == 1


@runs_kernels
@either_kind
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_that_ask_for_other_kernels_have_one_key_all_the_same(
    name: str, call: Calls, cold: None, nothing_new: Callable[[], None]
) -> None:
    one, other = FAMILIES[name]
    for arguments in (one, other):
        call(**arguments)
    assert len(plans._plans) == 1
    nothing_new()
    for arguments in (one, other):
        call(**arguments)
    assert len(plans._plans) == 1


def dropped(dropout_p: float, *, is_packed: bool) -> list[Tensor]:
    """Results and gradients of a call with dropout, by kernels and by the reference."""
    torch.manual_seed(0)
    q, k, v, *starts = make_packed(LENGTHS, heads=2, kv_heads=1, **SMALL) if is_packed else make_small(20, 24, **SMALL)
    function: Any = attention_varlen if is_packed else attention
    found = []
    for backend in ("generated", "reference"):
        torch.manual_seed(0)
        inputs = requiring(q, k, v)
        out = function(*inputs, *starts, dropout_p=dropout_p, backend=backend)
        found.append([out, *torch.autograd.grad(out, inputs, gradient_of(out.shape, FLOAT32))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    return found[0]


@runs_kernels
@pytest.mark.parametrize("is_packed", [False, True], ids=["fixed", "packed"])
def test_a_new_share_of_dropout_makes_no_new_key_and_drops_its_own(
    is_packed: bool, loads: list[Candidate], nothing_new: Callable[[], None]
) -> None:
    low = dropped(0.2, is_packed=is_packed)
    keys, count = set(plans._plans), len(loads)
    high = dropped(0.6, is_packed=is_packed)
    assert (set(plans._plans), len(loads)) == (keys, count)
    assert not torch.equal(low[0], high[0])
    nothing_new()
    for dropout_p, expected in ((0.2, low), (0.6, high)):
        assert all(map(torch.equal, dropped(dropout_p, is_packed=is_packed), expected))


@runs_kernels
def test_a_number_for_each_of_many_layers_is_remembered(cold: None, nothing_new: Callable[[], None]) -> None:
    """As GPT-2 scales by the inverse of a layer's number."""
    q, k, v = make_small(9, 11, **SMALL)
    scales = [0.25 / layer for layer in range(1, 49)]
    expected = [attention(q, k, v, softmax_scale=scale) for scale in scales]
    nothing_new()
    for _ in range(2):
        assert all(
            torch.equal(attention(q, k, v, softmax_scale=scale), out)
            for scale, out in zip(scales, expected, strict=True)
        )
    assert len(plans._plans) == 1


@runs_kernels
def test_the_last_numbers_are_found_first(cold: None) -> None:
    q, k, v = make_small(9, 11, **SMALL)
    for scale in (0.5, 0.1, 0.5, 0.5, 0.1):
        attention(q, k, v, softmax_scale=scale)
        (plan,) = plans._plans.values()
        assert plan.call.softmax_scale == scale


@runs_kernels
def test_a_stream_of_numbers_does_not_fill_memory(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REMEMBERED_SIBLINGS", 3)
    for scale in (0.5, 0.4, 0.3, 0.2, 0.1, 0.5, 0.1):
        assert_right(*make_small(9, 11, **SMALL), softmax_scale=scale)
        assert len(plans._siblings) <= 3
    assert len(plans._plans) == 1


@runs_kernels
def test_a_number_that_is_refused_leaves_the_others_as_they_were(cold: None) -> None:
    q, k, v = make_small(9, 11, **SMALL)
    expected = attention(q, k, v)
    for arguments in ({"softcap": -1.0}, {"softmax_scale": float("nan")}, {"softmax_scale": float("inf")}):
        with pytest.raises(InvalidProblemError):
            attention(q, k, v, **arguments)
        assert torch.equal(attention(q, k, v), expected)


@runs_kernels
def test_threads_with_numbers_of_their_own_do_not_disturb_each_other(cold: None) -> None:
    q, k, v = make_small(20, 24, **SMALL)
    scales = [0.5, 0.4, 0.3, 0.2]
    expected = {scale: attention(q, k, v, softmax_scale=scale, backend="reference") for scale in scales}
    own: Iterator[float] = iter(scales)

    def call() -> None:
        scale = next(own)
        for one in (scale, *scales):
            out = attention(q, k, v, softmax_scale=one)
            torch.testing.assert_close(out, expected[one], atol=1e-5, rtol=1e-5)

    together(call, len(scales))


# --- keys -------------------------------------------------------------------------------------------------------------


def numbers_in(key: Any) -> Iterator[float]:
    for part in key:
        if isinstance(part, tuple):
            yield from numbers_in(part)
        elif isinstance(part, float):
            yield part


@runs_kernels
def test_keys_are_plain_tuples_whose_equal_parts_are_one_object_and_hold_no_fraction(cold: None) -> None:
    """A process remembers thousands of them."""
    slopes = torch.rand(2).to(make_small(9, 9)[0].device)
    attention(*make_small(9, 9, kv_heads=2), softmax_scale=0.3, softcap=2.0, dropout_p=0.1, alibi_slopes=slopes)
    (key,) = plans._plans

    def parts(value: Any) -> Iterator[Any]:
        yield value
        if isinstance(value, tuple):
            for part in value:
                yield from parts(part)

    seen: dict[Any, Any] = {}
    for part in parts(key):
        assert not isinstance(part, torch.Size)
        if isinstance(part, tuple):
            assert seen.setdefault(part, part) is part
    assert list(numbers_in(key)) == []


@runs_kernels
def test_a_plan_is_known_by_its_tensors_alone(cold: None) -> None:
    q, k, v = (torch.randn(1, 2, rows, 16).to(make_small(1, 1)[0].device) for rows in (9, 11, 11))
    call = Call(None, FULL, BHSD, GENERATED)
    plan = plan_of(q, k, v, NO_EXTRAS, call)
    assert isinstance(plan, KernelPlan)
    assert plan_of(q.clone(), k.clone(), v.clone(), NO_EXTRAS, call._replace()) is plan
    sibling = plan_of(q, k, v, NO_EXTRAS, call._replace(softmax_scale=0.1))
    assert sibling is not plan
    assert plan_of(q, k, v, NO_EXTRAS, call) is plan
    assert plan_of(q, k, v, NO_EXTRAS, call._replace(softmax_scale=0.1)) is sibling
    assert plan_of(q[:, :, :8], k, v, NO_EXTRAS, call) not in (plan, sibling)


def test_a_gradient_is_computed_with_the_numbers_of_its_own_forward(reference_only: None) -> None:
    """Though calls with others came in between, whose plan is found first by then."""
    q, k, v = requiring(*(tensor.cpu() for tensor in make_small(9, 11, **SMALL)))
    outs = {scale: attention(q, k, v, softmax_scale=scale) for scale in (0.5, 0.1)}
    for scale, out in outs.items():
        found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        again = attention(q, k, v, softmax_scale=scale)
        assert all(map(torch.equal, found, torch.autograd.grad(again, (q, k, v), torch.ones_like(out))))
