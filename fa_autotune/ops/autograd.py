"""Attention with its gradient: which way a call takes through torch, and the autograd function of eager calls.

A call in eager mode goes straight to its plan, past torch's dispatcher. While a graph is recorded, and under modes and
transforms that must see the operation, it goes through the operators of `library`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.arguments import MASK, Extras, check_kinds, extra_of
from fa_autotune.ops.kernel_plan import Call
from fa_autotune.ops.library import (
    TransformableAttention,
    attention_op,
    check_tangents,
    gradients_op,
    needed_of,
    refuse_forward_mode,
)
from fa_autotune.ops.plans import Plan, plan_of, write_gradients

_PLAIN = (Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_is_transforming = torch._C._are_functorch_transforms_active
_tracing_state: Any = torch._C._get_tracing_state
_is_batched: Any = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, with_lse: bool, extras: Extras = ()) -> Any:
    """Attention of a call's tensors: out, or (out, lse). `call` and `extras` are those of `plans.plan_of`."""
    if (
        not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or is_seen_by_others()
        or (q.is_neg() or k.is_neg() or v.is_neg())
        or (extras and any(tensor is not None and not _is_usual(tensor) for tensor in extras))
    ):
        return _attend_with_care(q, k, v, call, with_lse, extras)
    if is_autocast(q):
        q, k, v, extras = cast_as_autocast(q, k, v, extras)
    try:
        plan = plan_of(q, k, v, call, extras)
    except RuntimeError:  # perhaps tensors that outlived a transform of torch.func, which have no memory of their own
        alive = unwrap_dead_wrappers((q, k, v, *extras))
        if all(one is other for one, other in zip(alive, (q, k, v, *extras), strict=True)):
            raise
        q, k, v, *extras_alive = alive
        return attend(q, k, v, call, with_lse, tuple(extras_alive))
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (extras and any(tensor is not None and tensor.requires_grad for tensor in extras))
    ):
        return _apply(q, k, v, plan, with_lse, *extras)
    if forward_ad._current_level >= 0:
        check_tangents(q, k, v, *(tensor for tensor in extras if tensor is not None))
    results = plan.forward(q, k, v, *extras)
    return results if with_lse else results[0]


def _is_usual(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_neg()


def _attend_with_care(q: Tensor, k: Tensor, v: Tensor, call: Call, with_lse: bool, extras: Extras) -> Any:
    """`attend` for tensors that are not what they seem, and where others look on."""
    is_plain = all(type(tensor) in _PLAIN for tensor in (q, k, v, *extras) if tensor is not None)
    if not is_plain:
        check_kinds(q, k, v)
    if is_autocast(q):
        q, k, v, extras = cast_as_autocast(q, k, v, extras)
    if not _is_compiling():
        # Views such as z.conj().imag, whose memory holds the opposite sign; a graph's operators resolve them.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        extras = tuple(tensor if tensor is None else tensor.resolve_neg() for tensor in extras)
    if is_plain and not is_seen_by_others():
        return attend(q, k, v, call, with_lse, extras)
    op: Any = attention_op if _is_compiling() or not _is_transforming() else TransformableAttention.apply
    results = op(q, k, v, *call, *extras)
    return results if with_lse else results[0]


def attend_packed(q: Tensor | None, packed: Tensor, call: Call, with_lse: bool, extras: Extras = ()) -> Any:
    """Attention of kv (batch, seqlen_k, 2, heads, head_dim) and q, or of qkv (batch, seqlen, 3, heads, head_dim); the
    call's layout is BSHD.

    Where autograd records it, the gradient of the packed tensor is written in one piece, unless there are extras.
    """
    if (
        not extras
        and type(packed) in _PLAIN
        and (q is None or type(q) in _PLAIN)
        and torch.is_grad_enabled()
        and packed.requires_grad
        and not is_autocast(packed)
        and not is_seen_by_others()
        and not (packed.is_neg() or (q is not None and q.is_neg()))
    ):
        return _apply_packed(q, packed, call, with_lse)
    return attend(*parts_of(q, packed), call, with_lse, extras)


def parts_of(q: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed call."""
    if q is None:
        q, k, v = packed.unbind(2)
    else:
        k, v = packed.unbind(2)
    return q, k, v


def is_autocast(q: Tensor) -> bool:
    """Whether autocast is on for a tensor's device."""
    return torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")


def cast_as_autocast(q: Tensor, k: Tensor, v: Tensor, extras: Extras = ()) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """As autocast does with the operands of torch's own attention: float64 and integers stay.

    So does a mask in float32, which kernels read as it is.
    """
    dtype = torch.get_autocast_dtype("cuda" if q.is_cuda else "cpu")

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    mask = extra_of(extras, MASK)
    if mask is not None and mask.dtype not in (dtype, torch.float32):
        extras = (*extras[:MASK], cast(mask), *extras[MASK + 1 :])
    return cast(q), cast(k), cast(v), extras


def is_seen_by_others() -> bool:
    """True while somebody records operations or changes their meaning."""
    return _is_compiling() or is_in_torch_dispatch_mode() or _is_transforming() or _tracing_state() is not None


def is_plain(gradient: Tensor | None) -> bool:
    """False for a gradient that is more than its memory: a subclass, or many at once (is_grads_batched)."""
    return gradient is None or (type(gradient) in _PLAIN and not _is_batched(gradient))


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out, lse and the extras; the backward runs only what is needed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, with_lse: bool, *extras: Tensor | None) -> Any:
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        out, lse = plan.forward(q, k, v, *extras)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        count = len(ctx.needs_input_grad)
        if d_out is None and d_lse is None:
            return (None,) * count
        saved, needed = ctx.saved_tensors, needed_of(ctx.needs_input_grad, 5)
        d_out = None if d_out is None else d_out.resolve_neg()
        if torch.is_grad_enabled() or is_seen_by_others() or not (is_plain(d_out) and is_plain(d_lse)):
            # The operator refuses to be differentiated again, should anybody try.
            dq, dk, dv, *of_extras = gradients_op(saved, d_out, d_lse, ctx.plan.arguments, needed)
        else:
            dq, dk, dv, *of_extras = ctx.plan.backward(saved, d_out, d_lse, needed)
        return (dq, dk, dv, None, None) if count == 5 else (dq, dk, dv, None, None, None, *of_extras, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


class _PackedAttention(torch.autograd.Function):
    """`_Attention` of a packed tensor, which requires a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, packed: Tensor, call: Call, with_lse: bool) -> Any:
        parts = parts_of(q, packed)
        plan = plan_of(*parts, call)
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        out, lse = plan.forward(*parts)
        ctx.save_for_backward(q, packed, out, lse)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return None, None, None, None
        q, packed, out, lse = ctx.saved_tensors
        d_out = None if d_out is None else d_out.resolve_neg()
        saved, needed = (
            (*parts_of(q, packed), out, lse),
            (q is None or ctx.needs_input_grad[0], True, True, False, False),
        )
        if torch.is_grad_enabled() or is_seen_by_others() or not (is_plain(d_out) and is_plain(d_lse)):
            gradients: Any = gradients_op(saved, d_out, d_lse, ctx.plan.arguments, needed)
            dq, whole = gradients[0], torch.stack(gradients[0 if q is None else 1 : 3], dim=2)
        else:
            whole = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
            into: Any = whole.unbind(2) if q is None else (None, *whole.unbind(2))
            dq = write_gradients(ctx.plan, saved, d_out, d_lse, needed, into)
        return None if q is None else dq, whole, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


# Function.apply unwraps and looks for transforms first, which is known by then; this is what it calls at last.
_apply: Any = super(torch.autograd.Function, _Attention).apply
_apply_packed: Any = super(torch.autograd.Function, _PackedAttention).apply
