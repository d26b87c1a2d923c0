"""Attention with its gradient: which way a call takes through torch, and the autograd functions of eager calls.

A call in eager mode goes straight to its plan, past torch's dispatcher. While a graph is recorded, and under modes and
transforms that must see the operation, it goes through the operators of `library`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.call import NO_EXTRAS, PACKED, Call, Extras, Gradients, Into, Needed, Saved
from fa_autotune.ops.library import (
    TransformableAttention,
    attention_op,
    extras_of,
    gradients_op,
    needed_of,
)
from fa_autotune.ops.plans import Plan, plan_of
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.sharding import prepared, registered
from fa_autotune.ops.tangents import check_tangents, refuse_forward_mode
from fa_autotune.ops.tensor_kinds import PLAIN, ask, check_tensor, in_memory, is_in_memory
from fa_autotune.ops.torch_private import (
    apply_of,
    has_forward_mode,
    is_batched,
    is_functionalizing,
    is_in_dispatch_mode,
    is_profiling,
    is_transforming,
    is_without_memory,
    tracing_state,
    unwrap_dead_wrappers,
)

Attended = Tensor | tuple[Tensor, Tensor]  # out, or (out, lse)

_is_compiling = torch.compiler.is_compiling


def attend(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call, with_lse: bool, *, is_named: bool = False
) -> Attended:
    """Attention of a call's tensors: out, or (out, lse). `is_named`: a range of the profiler is open for it."""
    if (
        not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or is_seen_by_others()
        or (q.is_neg() or k.is_neg() or v.is_neg())
        or (is_without_memory(q) or is_without_memory(k) or is_without_memory(v))
        or (extras is not NO_EXTRAS and not all(map(_is_usual, extras.given())))
        or (is_profiling() and not is_named)
    ):
        return _attend_with_care(q, k, v, extras, call, with_lse)
    if is_autocast(q):
        q, k, v, extras = cast_as_autocast(q, k, v, extras)
    try:
        plan = plan_of(q, k, v, extras, call)
    except RuntimeError:  # perhaps tensors that outlived a transform of torch.func, which have no memory of their own
        alive = unwrap_dead_wrappers((q, k, v, *extras))
        if all(one is other for one, other in zip(alive, (q, k, v, *extras), strict=True)):
            raise
        q, k, v, *of_extras = alive
        return attend(q, k, v, extras_of(of_extras), call, with_lse, is_named=is_named)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (extras is not NO_EXTRAS and any(tensor.requires_grad for tensor in extras.given()))
    ):
        found: Attended = _apply(q, k, v, plan, with_lse, *(() if extras is NO_EXTRAS else extras))
        return found
    if has_forward_mode():
        check_tangents(q, k, v, *extras.given())
    results = plan.forward(q, k, v, extras)
    if with_lse:
        return results
    out, _ = results
    return out


def _is_usual(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and is_in_memory(tensor)


def _attend_with_care(q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call, with_lse: bool) -> Attended:
    """`attend` for tensors that are not what they seem, and where others look on."""
    is_plain = all(type(tensor) in PLAIN for tensor in (q, k, v, *extras.given()))
    if not is_plain:
        rows_of(call.layout).check_kinds(q, k, v, extras)
        if _is_compiling():
            registered()
        else:
            extras = prepared(q, k, v, extras)
    if call.layout == PACKED and is_transforming() and (_is_compiling() or not is_functionalizing()):
        raise UnsupportedError(
            "attention_varlen is not served under torch.func's transforms (vmap, grad, vjp, jvp) by this release of "
            "fa_autotune; use torch.autograd, or `attention` on a padded batch"
        )
    if is_autocast(q):
        q, k, v, extras = cast_as_autocast(q, k, v, extras)
    # Views such as z.conj().imag, whose memory holds the opposite sign.
    q, k, v = in_memory(q), in_memory(k), in_memory(v)
    extras = extras_of(tensor if tensor is None else in_memory(tensor) for tensor in extras)
    if is_plain and not is_seen_by_others():
        if not is_profiling():
            return attend(q, k, v, extras, call, with_lse)
        with record_function("fa_autotune::forward"):
            return attend(q, k, v, extras, call, with_lse, is_named=True)
    arguments = q, k, v, *call, *extras
    if _is_compiling():
        out, lse = attention_op(*arguments)
    else:
        is_operator = not is_transforming() or is_functionalizing()
        out, lse = ask(attention_op if is_operator else TransformableAttention.apply, arguments)
    return (out, lse) if with_lse else out


def attend_stacked(q: Tensor | None, stacked: Tensor, extras: Extras, call: Call, with_lse: bool) -> Attended:
    """Attention of k and v stacked in one tensor beside q, or of q, k and v in one.

    Where autograd records it, the gradient of that tensor is written in one piece.
    """
    if (
        torch.is_grad_enabled()
        and stacked.requires_grad
        and not is_seen_by_others()
        and not is_autocast(stacked)
        and all(map(_is_usual, (stacked, *extras.given())))
        and (q is None or _is_usual(q))
    ):
        if not is_profiling():
            found: Attended = _apply_stacked(q, stacked, call, with_lse, *extras)
            return found
        with record_function("fa_autotune::forward"):
            found = _apply_stacked(q, stacked, call, with_lse, *extras)
        return found
    q, k, v = parts_of(q, stacked, rows_of(call.layout).stack_axis)
    return attend(q, k, v, extras, call, with_lse)


def parts_of(q: Tensor | None, stacked: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of stacked tensors."""
    if q is None:
        q, k, v = stacked.unbind(axis)
    else:
        k, v = stacked.unbind(axis)
    return q, k, v


def is_autocast(q: Tensor) -> bool:
    """Whether autocast is on for a tensor's device."""
    return torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")


def cast_as_autocast(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """As autocast does with the operands of torch's own attention: float64 and integers stay.

    So does a mask in float32, which kernels read as it is.
    """
    dtype = torch.get_autocast_dtype("cuda" if q.is_cuda else "cpu")

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = extras.attn_mask
    if mask is not None and mask.dtype not in (dtype, torch.float32):
        extras = extras._replace(attn_mask=cast(mask))
    return cast(q), cast(k), cast(v), extras


def is_seen_by_others() -> bool:
    """True while somebody records operations or changes their meaning."""
    return _is_compiling() or is_in_dispatch_mode() or is_transforming() or tracing_state() is not None


def _is_plain(gradient: Tensor | None) -> bool:
    """False for a gradient that is more than its memory: a subclass, or many at once (is_grads_batched)."""
    return gradient is None or (type(gradient) in PLAIN and not is_batched(gradient))


def _gradients_of(
    plan: Plan, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
) -> Gradients | None:
    """What an eager backward gives; None where its operator must be seen, or is to refuse a second derivative."""
    if has_forward_mode():
        check_tangents(d_out, d_lse, *saved, *saved.extras)
    if torch.is_grad_enabled() or is_seen_by_others() or not (_is_plain(d_out) and _is_plain(d_lse)):
        if not _is_compiling():
            _check_gradients(d_out, d_lse)
        return None
    try:
        if not is_profiling():
            return plan.backward(saved, d_out, d_lse, needed, into)
        with record_function("fa_autotune::backward"):
            return plan.backward(saved, d_out, d_lse, needed, into)
    except RuntimeError:  # perhaps a gradient that is not dense
        _check_gradients(d_out, d_lse)
        raise


def _check_gradients(d_out: Tensor | None, d_lse: Tensor | None) -> None:
    for name, gradient in (("the gradient of out", d_out), ("the gradient of lse", d_lse)):
        if gradient is not None:
            check_tensor(name, gradient)


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out, lse and the extras; the backward runs only what is needed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, with_lse: bool, *extras: Tensor | None) -> Any:
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        out, lse = plan.forward(q, k, v, Extras(*extras) if extras else NO_EXTRAS)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *extras = ctx.saved_tensors
        for_q, for_k, for_v, _, _, *for_extras = ctx.needs_input_grad
        saved = Saved(q, k, v, out, lse, Extras(*extras) if extras else NO_EXTRAS)
        needed = needed_of(for_q, for_k, for_v, for_extras)
        d_out = None if d_out is None else in_memory(d_out)
        found = _gradients_of(ctx.plan, saved, d_out, d_lse, needed)
        if found is None:
            found = gradients_op(saved, d_out, d_lse, ctx.plan.call, needed)
        if not extras:
            return found.q, found.k, found.v, None, None
        return found.q, found.k, found.v, None, None, *found.of_extras()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


class _StackedAttention(torch.autograd.Function):
    """`_Attention` of a stacked tensor, which requires a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, stacked: Tensor, call: Call, with_lse: bool, *extras: Tensor | None) -> Any:
        parts, given = parts_of(q, stacked, rows_of(call.layout).stack_axis), extras_of(extras)
        plan = plan_of(*parts, given, call)
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        out, lse = plan.forward(*parts, given)
        ctx.save_for_backward(q, stacked, out, lse, *extras)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, stacked, out, lse, *extras = ctx.saved_tensors
        axis = rows_of(ctx.plan.call.layout).stack_axis
        saved = Saved(*parts_of(q, stacked, axis), out, lse, extras_of(extras))
        for_q, _, _, _, *for_extras = ctx.needs_input_grad
        needed = needed_of(q is None or for_q, True, True, for_extras)
        d_out = None if d_out is None else in_memory(d_out)
        whole = torch.empty(stacked.shape, dtype=stacked.dtype, device=stacked.device)
        places: tuple[Tensor, ...] = whole.unbind(axis)
        into = Into(*places) if q is None else Into(None, *places)
        found = _gradients_of(ctx.plan, saved, d_out, d_lse, needed, into)
        if found is None:
            found = gradients_op(saved, d_out, d_lse, ctx.plan.call, needed)
            parts: Any = (found.q, found.k, found.v) if q is None else (found.k, found.v)
            whole = torch.stack(parts, dim=axis)
        return None if q is None else found.q, whole, None, None, *found.of_extras()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


_apply = apply_of(_Attention)
_apply_stacked = apply_of(_StackedAttention)
