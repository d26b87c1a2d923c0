"""What a call is: its tensors and gradients by name, the same names and order for operators, autograd and kernels."""

import ast
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_autotune.ops
from fa_autotune import attention, attention_varlen
from fa_autotune.ops.call import (
    BHSD,
    BOTTOM_RIGHT,
    FULL,
    GENERATED,
    NO_EXTRAS,
    OPEN,
    PACKED,
    TOP_LEFT,
    WINDOW,
    Call,
    Extras,
    Gradients,
    Needed,
    Saved,
)
from fa_autotune.ops.library import attention_op, extras_of, gradients_op, needed_of
from fa_autotune.problem.family import AttentionFamily, DType
from kit.attention_calls import gradient_of

OPS = torch.ops.fa_autotune


# --- names and their order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("is_on", list(product([False, True], repeat=4)))
def test_extras_come_in_the_order_in_which_kernels_take_them(is_on: tuple[bool, ...], varlen: bool) -> None:
    alibi, sinks, bias, dropout = is_on
    family = AttentionFamily(
        dtype=DType.BFLOAT16, head_dim=64, head_dim_v=64, bounded_right=False,
        alibi=alibi, sinks=sinks, bias=bias and not varlen, dropout=dropout, varlen=varlen,
    )  # fmt: skip
    named = {name: torch.empty(place) for place, name in enumerate(Extras._fields) if name in family.extra_tensors}
    given = Extras(**named).given()
    assert [id(tensor) for tensor in given] == [id(named[name]) for name in family.extra_tensors]


def test_operators_take_the_fields_of_a_call_and_its_tensors_by_name() -> None:
    forward, backward = OPS.forward.default._schema, OPS.backward.default._schema
    said = [*Call._fields, *Extras._fields, "numbers"]  # those that a graph left open
    assert [one.name for one in forward.arguments] == ["q", "k", "v", *said]
    saved = [name for name in Saved._fields if name != "extras"]
    assert [one.name for one in backward.arguments] == ["d_out", "d_lse", *saved, "needed", *said]
    assert [one.name for one in backward.returns] == [f"d_{name}" for name in Gradients._fields]


def test_gradients_are_those_of_tensors_of_a_call() -> None:
    assert Gradients._fields == Needed._fields
    assert set(Gradients._fields) <= {"q", "k", "v", *Extras._fields}


@pytest.mark.parametrize("name", Extras._fields)
def test_a_gradient_of_an_extra_has_its_place(name: str) -> None:
    if name in Gradients._fields:
        gradient = torch.empty(1)
        found = Gradients(**{name: gradient}).of_extras()
        assert [one is gradient for one in found] == [field == name for field in Extras._fields]
    needed = needed_of(False, False, False, [field == name for field in Extras._fields])
    assert needed == Needed(False, False, False)._replace(**dict.fromkeys({name} & {*Needed._fields}, True))


def test_extras_at_the_end_may_be_left_out_and_none_at_all_are_one_object() -> None:
    slopes = torch.empty(1)
    assert extras_of([]) is extras_of([None] * len(Extras._fields)) is NO_EXTRAS
    assert extras_of([slopes]).alibi_slopes is slopes
    assert needed_of(True, False, True, [False, True]) == Needed(True, False, True, sinks=True)


# --- what a call says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "window"), [(FULL, (OPEN, OPEN)), (BOTTOM_RIGHT, (OPEN, 0)), (TOP_LEFT, (OPEN, 0)), (WINDOW, (5, 2))]
)
def test_the_sizes_of_a_window_count_where_the_mask_is_one(mask: int, window: tuple[int, int]) -> None:
    assert Call(None, mask, BHSD, GENERATED, window_left=5, window_right=2).window == window


def test_scores_are_scaled_by_the_head_dim_unless_the_call_says_it() -> None:
    assert Call(None, FULL, BHSD, GENERATED).scale_for(torch.empty(1, 1, 1, 64)) == 0.125
    assert Call(0.0, FULL, BHSD, GENERATED).scale_for(torch.empty(1, 1, 1, 64)) == 0.0


# --- gradients by name, whichever way a call takes through torch ------------------------------------------------------

FIXED = ("q", "k", "v", "sinks", "attn_mask")
ROWS_AND_KEYS = ("q", "k", "v", "sinks")


def fixed(names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of a call; those named require a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (1, 5, 2, 8), "k": (1, 6, 1, 8), "v": (1, 6, 1, 8), "sinks": (2,), "attn_mask": (1, 2, 5, 6)}
    return {name: torch.randn(size, generator=generator).requires_grad_(name in names) for name, size in sizes.items()}


def packed(names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of a packed call; those named require a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (5, 2, 8), "k": (6, 1, 8), "v": (6, 1, 8), "sinks": (2,)}
    tensors = {
        name: torch.randn(size, generator=generator).requires_grad_(name in names) for name, size in sizes.items()
    }
    return {
        **tensors,
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 6], dtype=torch.int32),
    }


def eager(tensors: dict[str, Tensor]) -> Any:
    call = attention_varlen if "cu_seqlens_q" in tensors else attention
    return call(**tensors, alibi_slopes=torch.tensor([0.5, 0.1]), causal=True, return_lse=True)


def by_operator(tensors: dict[str, Tensor]) -> Any:
    is_packed = "cu_seqlens_q" in tensors
    q, k, v = (tensors[name] if is_packed else tensors[name].transpose(1, 2) for name in "qkv")
    extras = {name: tensor for name, tensor in tensors.items() if name in Extras._fields}
    sinks = tensors["sinks"] if is_packed else tensors["sinks"].expand(1, 2)
    extras |= {"alibi_slopes": torch.tensor([0.5, 0.1]).expand(2 if is_packed else 1, 2), "sinks": sinks}
    call = Call(None, BOTTOM_RIGHT, PACKED if is_packed else BHSD, GENERATED)
    out, lse = attention_op(q, k, v, *call, *Extras(**extras))
    return out if is_packed else out.transpose(1, 2), lse


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for chosen in product([False, True], repeat=len(names)):
        if any(chosen):
            yield tuple(name for name, is_in in zip(names, chosen, strict=True) if is_in)


def gradients(way: Any, tensors: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    out, lse = way(tensors)
    given = gradient_of(out.shape, torch.float32).cpu(), gradient_of(lse.shape, torch.float32).cpu()
    found = torch.autograd.grad((out, lse), [tensors[name] for name in names], given)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("way", [eager, by_operator])
@pytest.mark.parametrize(("make", "all_names"), [(fixed, FIXED), (packed, ROWS_AND_KEYS)])
def test_each_tensor_gets_its_own_gradient_whichever_others_do(
    make: Any, all_names: tuple[str, ...], way: Any, reference_only: None
) -> None:
    everything = gradients(eager, make(all_names), all_names)
    assert len({gradient.shape for gradient in everything.values()}) >= 3  # a swap would not go unnoticed
    assert not torch.equal(everything["k"], everything["v"])
    for names in subsets(all_names):
        for name, gradient in gradients(way, make(names), names).items():
            assert torch.equal(gradient, everything[name]), f"{name} of {names}"


@pytest.mark.parametrize("which", list(subsets(("q", "k", "v", "sinks", "attn_mask"))), ids="-".join)
def test_an_operator_gives_exactly_the_needed_gradients(which: tuple[str, ...], reference_only: None) -> None:
    tensors = {name: tensor.detach() for name, tensor in fixed(()).items()}
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
    extras = Extras(sinks=tensors["sinks"].expand(1, 2), attn_mask=tensors["attn_mask"])
    call = Call(None, FULL, BHSD, GENERATED)
    out, lse = attention_op(q, k, v, *call, *extras)
    needed = Needed(**{name: name in which for name in Needed._fields})
    found = gradients_op(Saved(q, k, v, out, lse, extras), torch.ones_like(out), None, call, needed)
    assert [name for name, gradient in found._asdict().items() if gradient is not None] == list(which)
    sizes = {"q": q.shape, "k": k.shape, "v": v.shape, "sinks": (1, 2), "attn_mask": extras.attn_mask.shape}
    assert all(getattr(found, name).shape == sizes[name] for name in which)


# --- no tuple is read by number ---------------------------------------------------------------------------------------


def numbered(text: str) -> list[str]:
    """What a module reads by number that is no extent of a tensor."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Subscript)
        and _is_number(node.slice)
        and not (isinstance(node.value, ast.Attribute) and node.value.attr == "shape")
        and not (isinstance(node.value, ast.Name) and node.value.id == "Literal")
    ]


def _is_number(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Slice):
        return any(map(_is_number, (node.lower, node.upper, node.step)))
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


@pytest.mark.parametrize(
    "path",
    sorted(Path(fa_autotune.ops.__file__).parent.rglob("*.py")),
    ids=lambda path: path.relative_to(Path(fa_autotune.ops.__file__).parent).as_posix(),
)
def test_no_tuple_is_read_by_number(path: Path) -> None:
    assert numbered(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "call[-1]",
        "saved[5:]",
        "needed[3]",
        "into and into[1].stride()",
        "self.arguments[:3]",
        "f(x)[0]",
        "q.shape[0][1]",
    ],
)
def test_a_tuple_that_is_read_by_number_is_noticed(text: str) -> None:
    assert numbered(text)


def test_extents_names_and_variables_are_not_taken_for_it() -> None:
    assert (
        numbered("q.shape[0], q.shape[-2:], known[name], Literal[True], mask[..., : keys], arguments[:_NUM_CALL]") == []
    )
