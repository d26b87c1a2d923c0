"""Which problem the kernels of a call solve, and what they are told beside tensors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.ops import call_kernels
from fa_autotune.ops.call import (
    BHSD,
    BOTTOM_RIGHT,
    BSHD,
    FULL,
    GENERATED,
    NO_EXTRAS,
    PACKED,
    TOP_LEFT,
    WINDOW,
    Call,
    Extras,
)
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import KEYLESS_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem
from kit.loaded_kernels import as_loaded

SLOPES, SINKS, SEED = torch.rand(2, 4), torch.rand(2, 4), torch.zeros(1, dtype=torch.int64)


def kernels_of(
    extras: Extras = NO_EXTRAS, *, layout: int = BHSD, dtype: torch.dtype = torch.bfloat16, dim: int = 32, **said: Any
) -> CallKernels:
    """Those of a call of 2 batches, 4 heads that share 2, 37 rows and 41 keys; or of as many packed sequences."""
    call = Call(**{"softmax_scale": None, "mask": FULL, "layout": layout, "backend": GENERATED, **said})
    q, k, v = (torch.empty(2, heads, rows, dim, dtype=dtype) for heads, rows in ((4, 37), (2, 41), (2, 41)))
    if layout == BSHD:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    if layout == PACKED:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        starts = (torch.tensor([0, rows, 2 * rows], dtype=torch.int32) for rows in (37, 41))
        extras = extras._replace(**dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)))
    return CallKernels(rows_of(layout), q, k, v, extras, call)


def bias(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A mask whose rows can be read 16 bytes at a time."""
    return torch.zeros(1, 1, 37, 48, dtype=dtype)[..., :41]


# --- which problem ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [BHSD, BSHD], ids=["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("said", "extras", "words"),
    [
        ({}, {}, ""),
        ({"mask": BOTTOM_RIGHT}, {}, ",causal"),
        ({"mask": TOP_LEFT}, {}, ",causal"),
        ({"mask": WINDOW, "window_left": 5, "window_right": 2}, {}, ",left=5,right=2"),
        ({"mask": WINDOW, "window_left": 5, "window_right": 0}, {}, ",causal,left=5"),
        ({"mask": WINDOW, "window_left": 40, "window_right": 36}, {}, ""),  # past every key
        ({"softcap": 2.0}, {}, ",softcap"),
        ({}, {"alibi_slopes": SLOPES}, ",alibi"),
        ({}, {"sinks": SINKS}, ",sinks"),
        ({}, {"attn_mask": bias()}, ",bias"),
        ({}, {"attn_mask": bias(torch.float32)}, ",wide_bias"),
        ({}, {"attn_mask": bias(torch.bool)}, ",bool_mask"),
        ({}, {"attn_mask": torch.zeros(1, 1, 37, 41, dtype=torch.bool)}, ",bool_mask,loose_mask"),
        ({"dropout_p": 0.1}, {"dropout_seed": SEED}, ",dropout"),
        ({"tf32": True}, {}, ""),  # of 16 bits
    ],
    ids=lambda value: value.strip(",") or "plain" if isinstance(value, str) else "",
)
def test_the_problem_of_a_call(said: dict[str, Any], extras: dict[str, Tensor], words: str, layout: int) -> None:
    assert kernels_of(Extras(**extras), layout=layout, **said).problem == AttentionProblem.parse(
        f"2x4x2x37x41x32{words}"
    )


@pytest.mark.parametrize(
    ("said", "extras", "words"),
    [
        ({}, {}, ""),
        ({"mask": BOTTOM_RIGHT}, {}, ",causal"),
        ({"mask": WINDOW, "window_left": 5, "window_right": 2}, {}, ",left=5,right=2"),
        ({"softcap": 2.0, "dropout_p": 0.1}, {"dropout_seed": SEED}, ",softcap,dropout"),
        ({}, {"alibi_slopes": SLOPES, "sinks": torch.rand(4)}, ",alibi,sinks"),
    ],
)
def test_the_problem_of_packed_sequences_is_of_rounded_lengths(
    said: dict[str, Any], extras: dict[str, Tensor], words: str
) -> None:
    found = kernels_of(Extras(**extras), layout=PACKED, **said).problem
    assert found == AttentionProblem.parse(f"2x4x2x64x64x32{words},varlen")


@pytest.mark.parametrize(
    ("dtype", "dim", "is_asked", "is_tf32"),
    [
        (torch.float32, 32, True, True),
        (torch.float32, 32, False, False),
        (torch.float32, 512, True, False),
        (torch.float16, 32, True, False),
    ],
)
def test_products_are_in_tf32_where_that_is_asked_for_and_helps(
    dtype: torch.dtype, dim: int, is_asked: bool, is_tf32: bool
) -> None:
    kernels = kernels_of(dtype=dtype, dim=dim, tf32=is_asked)
    assert kernels.family.tf32 is is_tf32


def test_a_family_is_made_once_for_all_lengths() -> None:
    """Checking one costs more than a launch."""
    q, k = torch.empty(1, 4, 5, 32), torch.empty(1, 2, 9, 32)
    call = Call(None, BOTTOM_RIGHT, BHSD, GENERATED)
    families = [
        CallKernels(rows_of(BHSD), q[:, :, :rows], k, k, NO_EXTRAS, call._replace(softmax_scale=scale)).family
        for rows, scale in ((5, None), (4, None), (5, 0.3))
    ]
    assert families[0] is families[1] is families[2]


# --- which kernel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AttentionProblem]:
    """The problems for which a kernel was asked."""
    found: list[AttentionProblem] = []
    monkeypatch.setattr(call_kernels, "kernel_for", lambda problem, index: found.append(problem))
    return found


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("kernel_pass", [Pass.BWD_DELTA, Pass.BWD_DKDV, Pass.BWD_DQ])
def test_tensors_of_a_pass_may_be_readable_in_another_way(
    kernel_pass: Pass, access: Access, asked: list[AttentionProblem]
) -> None:
    kernels = kernels_of(mask=BOTTOM_RIGHT)
    kernels.kernel_for(kernel_pass, access)
    (problem,) = asked
    assert (problem.family.kernel_pass, problem.family.access) == (kernel_pass, access)
    assert problem.shape == kernels.problem.for_pass(kernel_pass).shape


@pytest.mark.parametrize("was_loose", [False, True])
@pytest.mark.parametrize("is_loose", [False, True])
def test_a_saved_mask_may_lie_elsewhere_by_now(is_loose: bool, was_loose: bool, asked: list[AttentionProblem]) -> None:
    masks = [bias(), torch.zeros(1, 1, 37, 41, dtype=torch.bfloat16)]
    kernels = kernels_of(Extras(attn_mask=masks[was_loose]))
    assert kernels.family.loose_mask is was_loose
    kernels.kernel_for(Pass.BWD_DQ, Access.TMA, masks[is_loose], mask_gradient=True)
    (problem,) = asked
    assert problem.family.loose_mask is is_loose
    assert problem.family.mask_gradient
    kernels.kernel_for(Pass.BWD_DELTA, Access.TMA, masks[is_loose])
    assert not asked[-1].family.has_mask


# --- what it is told --------------------------------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, kernels: CallKernels, kernel_pass: Pass, extras: Extras) -> tuple[Any, ...]:
    """The further tensors of a pass's kernel, its numbers, and whether its launches are counted."""
    found: list[tuple[Any, ...]] = []

    def bind(kernel: Any, tensors: Sequence[Tensor], numbers: Sequence[Any], *, is_counted: bool, like: None) -> None:
        found.append((list(tensors), list(numbers), is_counted))

    monkeypatch.setattr(call_kernels, "bind", bind)
    family = kernels.problem.for_pass(kernel_pass).family
    kernel = as_loaded(family)
    names = (*kernel_pass.spec.takes, *family.outputs)
    kernels.bound(kernel, [torch.empty(1, 1, 1)] * len(names), extras)
    tensors, numbers, is_counted = found[0]
    return tensors[len(names) :], numbers, is_counted


EVERYTHING: dict[str, Any] = {
    "softmax_scale": 0.3, "mask": WINDOW, "window_left": 9, "window_right": 2, "softcap": 30.0, "dropout_p": 0.25,
}  # fmt: skip


@pytest.mark.parametrize("kernel_pass", [Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ])
def test_a_kernel_is_told_the_numbers_of_the_call_in_its_order(
    kernel_pass: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = Extras(alibi_slopes=SLOPES, sinks=SINKS, attn_mask=bias(), dropout_seed=SEED)
    kernels = kernels_of(extras, **EVERYTHING)
    more, numbers, is_counted = told(monkeypatch, kernels, kernel_pass, extras)
    assert numbers == [0.3, 41 - 37 + 2, 41 - 37 - 9, 30.0, 0.25]
    assert not is_counted
    names = kernels.problem.for_pass(kernel_pass).family.extra_tensors
    assert [id(tensor) for tensor in more] == [id(getattr(extras, name)) for name in names]
    assert ("sinks" in names) is (kernel_pass is Pass.FWD)  # a backward finds them in lse


@pytest.mark.parametrize("kernel_pass", sorted(KEYLESS_PASSES))
def test_a_kernel_without_keys_is_told_no_number(kernel_pass: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = Extras(alibi_slopes=SLOPES, dropout_seed=SEED)
    kernels = kernels_of(extras, **EVERYTHING)
    more, numbers, _ = told(monkeypatch, kernels, kernel_pass, extras)
    assert (more, numbers) == ([], [])


def test_a_kernel_of_packed_sequences_is_told_their_lengths_and_sinks_for_any_number_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = kernels_of(Extras(sinks=torch.rand(4)), layout=PACKED, **{**EVERYTHING, "dropout_p": 0.0})
    starts = torch.tensor([0, 37, 74], dtype=torch.int32), torch.tensor([0, 41, 82], dtype=torch.int32)
    extras = Extras(sinks=torch.rand(4), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    (sinks, *lengths), numbers, is_counted = told(monkeypatch, kernels, Pass.FWD, extras)
    assert numbers == [0.3, 2, -9, 30.0]
    assert is_counted
    assert (sinks.shape, sinks.stride(0), sinks.data_ptr()) == ((2, 4), 0, extras.sinks.data_ptr())
    assert [id(tensor) for tensor in lengths] == [id(tensor) for tensor in starts]


# --- where ------------------------------------------------------------------------------------------------------------


def test_calls_on_one_device_share_what_allocates_there() -> None:
    assert kernels_of().home is kernels_of(layout=PACKED, mask=BOTTOM_RIGHT).home
    assert kernels_of().home is not kernels_of(dtype=torch.float16).home
    tensor = kernels_of().home.allocate((2, 3), (1, 2), torch.float32)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), torch.float32)
