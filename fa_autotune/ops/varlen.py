"""Attention of sequences that lie one after another, of any lengths, with its gradient.

Nothing here waits for the GPU: lengths stay there, in cu_seqlens, and kernels read them. So a call can be captured in a
CUDA graph and replayed with other lengths.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.api import check_features
from fa_autotune.ops.arguments import (
    BOTTOM_RIGHT,
    FULL,
    GENERATED,
    OPEN,
    REFERENCE,
    as_dropout,
    as_heads_numbers,
    as_scale,
    as_softcap,
    as_tf32,
    check_tensor,
    mask_of,
)
from fa_autotune.ops.autograd import cast_as_autocast, is_autocast, is_plain, is_seen_by_others
from fa_autotune.ops.library import check_tangents, refuse_forward_mode
from fa_autotune.ops.varlen_calls import Plan, check_max_seqlen, varlen_plan_of, write_varlen_gradients
from fa_autotune.ops.varlen_library import varlen_gradients_op, varlen_op
from fa_autotune.ops.varlen_plan import VarlenTensors
from fa_autotune.reference.dropout import draw_seed

_is_compiling = torch.compiler.is_compiling
_is_transforming = torch._C._are_functorch_transforms_active
_PLAIN = (Tensor, torch.nn.Parameter)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Any:
    """`attention` of each of many sequences, which see nothing of one another; gives out, or (out, lse).

    q is (total_q, num_q_heads, head_dim), k (total_k, num_kv_heads, head_dim), v (total_k, num_kv_heads, head_dim_v);
    any strides. cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,) on q's device, contiguous, say where each
    sequence starts and where the last one ends: sequence b has rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1 and keys
    cu_seqlens_k[b] … cu_seqlens_k[b + 1] − 1. Either may be none, and a row without keys gives 0. Rows after the last
    sequence belong to none: their out and gradients are 0, their lse −inf, whatever they hold.

    causal, window_size, softcap, alibi_slopes, sinks, dropout_p and fp32_precision mean for each sequence what they
    mean in `attention`, aligned bottom-right; alibi_slopes may be (sequences, num_q_heads), and dropout keeps what it
    keeps of a padded batch with the same seed. max_seqlen_q and max_seqlen_k are taken for compatibility and never
    read: they may be numbers, tensors or left out. return_lse: also the natural-log log-sum-exp, fp32 (num_q_heads,
    total_q), differentiable. Results and gradients are bit-for-bit repeatable, also with deterministic=False.

    The host never waits for the GPU, so what lies in cu_seqlens is not checked: it is to start at 0, not to fall, and
    to end at or before the totals. Where it does not, results are of no use, but nothing outside of the tensors is
    read or written. Raises InvalidProblemError for tensors that do not fit together, and UnsupportedError for what this
    release does not serve, before any kernel runs.
    """
    if not attn_mask is score_mod is mask_mod is q_scale is k_scale is v_scale is None:
        check_features(
            attn_mask=attn_mask,
            score_mod=score_mod,
            mask_mod=mask_mod,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    if backend not in ("generated", "reference"):
        raise InvalidProblemError(f'backend={backend!r} is not "generated" or "reference"; leave it out for kernels')
    check_lengths(max_seqlen_q, max_seqlen_k)
    runs = REFERENCE if backend == "reference" else GENERATED
    if fp32_precision != "ieee":
        runs = as_tf32(runs, fp32_precision)
    call = varlen_call(softmax_scale, causal, window_size, softcap, runs, dropout_p)
    tensors = varlen_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, call[-1])
    return attend_varlen(tensors, call, return_lse)


def check_lengths(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """InvalidProblemError for maxima that are no lengths; a graph that looked at them would be one of these numbers."""
    if not _is_compiling():
        check_max_seqlen("max_seqlen_q", max_seqlen_q)
        check_max_seqlen("max_seqlen_k", max_seqlen_k)


def varlen_call(
    softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, backend: int, dropout_p: Any
) -> tuple[Any, ...]:
    """The fields of `varlen_plan.VarlenArguments` for arguments as users give them."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_scale(softmax_scale)
    if type(softcap) is not float:
        softcap = as_softcap(softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = as_dropout(dropout_p)
    mask, left, right = mask_of(causal, window_size)
    if mask in (FULL, BOTTOM_RIGHT):
        left, right = OPEN, 0 if mask == BOTTOM_RIGHT else OPEN
    return softmax_scale, left, right, softcap, backend, dropout_p


def varlen_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
) -> VarlenTensors:
    """A call's tensors as plans take them, with a new seed for dropout; InvalidProblemError for slopes and sinks that
    are none."""
    if alibi_slopes is sinks is None and dropout_p == 0.0:
        return VarlenTensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    for name, tensor, ndim in (("q", q, 3), ("cu_seqlens_q", cu_seqlens_q, 1)):
        check_tensor(name, tensor)
        if tensor.ndim != ndim:
            raise InvalidProblemError(f"{name} has shape {tuple(tensor.shape)}, it takes {ndim} dimensions")
    heads, count = q.shape[1], cu_seqlens_q.shape[0] - 1
    slopes = as_heads_numbers("alibi_slopes", alibi_slopes, q, count, heads, batched=True)
    scores = as_heads_numbers("sinks", sinks, q, 1, heads, batched=False)
    seed = draw_seed(q.device) if dropout_p != 0.0 else None
    return VarlenTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, None if scores is None else scores[0], seed)


def attend_varlen(tensors: VarlenTensors, call: tuple[Any, ...], with_lse: bool) -> Any:
    """Attention of a call's tensors: out, or (out, lse). `call` is that of `varlen_calls.varlen_plan_of`."""
    if is_seen_by_others() or _are_odd(*tensors):
        return _attend_with_care(tensors, call, with_lse)
    if is_autocast(tensors.q):
        tensors = _cast(tensors)
    plan = varlen_plan_of(tensors, call)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _apply(plan, with_lse, *tensors)
    if forward_ad._current_level >= 0:
        check_tangents(*(tensor for tensor in tensors if tensor is not None))
    results = plan.forward(tensors)
    return results if with_lse else results[0]


def _are_odd(*tensors: Tensor | None) -> bool:
    """Whether some tensor is more than its memory: a subclass, or a view of negative bits."""
    return any(tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()) for tensor in tensors)


def _attend_with_care(tensors: VarlenTensors, call: tuple[Any, ...], with_lse: bool) -> Any:
    """`attend_varlen` for tensors that are not what they seem, and where others look on."""
    if _is_transforming():
        raise UnsupportedError(
            "attention_varlen is not served under torch.func's transforms (vmap, grad, vjp, jvp) by this release of "
            "fa_autotune; use torch.autograd, or `attention` on a padded batch"
        )
    for name, tensor in zip(VarlenTensors._fields, tensors, strict=True):
        if tensor is not None:
            check_tensor(name, tensor)
    if is_autocast(tensors.q):
        tensors = _cast(tensors)
    if not _is_compiling():
        # Views such as z.conj().imag, whose memory holds the opposite sign; a graph's operators resolve them.
        found: Any = (tensor if tensor is None else tensor.resolve_neg() for tensor in tensors)
        resolved = VarlenTensors(*found)
        if not is_seen_by_others() and all(type(tensor) in _PLAIN for tensor in resolved if tensor is not None):
            return attend_varlen(resolved, call, with_lse)
        tensors = resolved
    results = varlen_op(tensors, call)
    return results if with_lse else results[0]


def _cast(tensors: VarlenTensors) -> VarlenTensors:
    q, k, v, _ = cast_as_autocast(*tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


class _VarlenAttention(torch.autograd.Function):
    """Saves the call's tensors, out and lse; the backward runs only what is needed."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, with_lse: bool, *tensors: Tensor | None) -> Any:
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        call = VarlenTensors(*tensors)  # type: ignore[arg-type]
        out, lse = plan.forward(call)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * (len(VarlenTensors._fields) + 2)
        *saved, out, lse = ctx.saved_tensors
        tensors, plan = VarlenTensors(*saved), ctx.plan
        needed = (*ctx.needs_input_grad[2:5], ctx.needs_input_grad[8])
        d_out = None if d_out is None else d_out.resolve_neg()
        if torch.is_grad_enabled() or is_seen_by_others() or not (is_plain(d_out) and is_plain(d_lse)):
            # The operator refuses to be differentiated again, should anybody try.
            found = varlen_gradients_op(tensors, tuple(plan.arguments), out, lse, d_out, d_lse, needed)
        else:
            found = plan.backward(tensors, out, lse, d_out, d_lse, needed)
        dq, dk, dv, d_sinks = found
        return None, None, dq, dk, dv, None, None, None, d_sinks, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


class _PackedVarlenAttention(torch.autograd.Function):
    """`_VarlenAttention` of a packed tensor, which requires a gradient: that is written in one piece."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Any, ...],
        with_lse: bool,
        q: Tensor | None,
        packed: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
    ) -> Any:
        tensors = VarlenTensors(*packed_parts(q, packed), cu_seqlens_q, cu_seqlens_k)
        plan = varlen_plan_of(tensors, call)
        if plan.gradient_refusal:
            raise UnsupportedError(plan.gradient_refusal)
        out, lse = plan.forward(tensors)
        ctx.save_for_backward(q, packed, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Any, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 6
        q, packed, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        d_out = None if d_out is None else d_out.resolve_neg()
        tensors, plan = VarlenTensors(*packed_parts(q, packed), cu_seqlens_q, cu_seqlens_k), ctx.plan
        needed = (q is None or ctx.needs_input_grad[2], True, True, False)
        if torch.is_grad_enabled() or is_seen_by_others() or not (is_plain(d_out) and is_plain(d_lse)):
            found: Any = varlen_gradients_op(tensors, tuple(plan.arguments), out, lse, d_out, d_lse, needed)
            dq, whole = found[0], torch.stack(found[0 if q is None else 1 : 3], dim=1)
        else:
            whole = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
            into: Any = whole.unbind(1) if q is None else (None, *whole.unbind(1))
            dq = write_varlen_gradients(plan, tensors, out, lse, d_out, d_lse, needed, into)
        return None, None, None if q is None else dq, whole, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


# Function.apply unwraps and looks for transforms first, which is known by then; this is what it calls at last.
_apply: Any = super(torch.autograd.Function, _VarlenAttention).apply
_apply_packed: Any = super(torch.autograd.Function, _PackedVarlenAttention).apply


def packed_parts(q: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of kv (total_k, 2, heads, head_dim) beside q, or of qkv (total, 3, heads, head_dim)."""
    if q is None:
        q, k, v = packed.unbind(1)
    else:
        k, v = packed.unbind(1)
    return q, k, v


def attend_varlen_packed(
    q: Tensor | None,
    packed: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    call: tuple[Any, ...],
    with_lse: bool,
    alibi_slopes: Tensor | None = None,
) -> Any:
    """Attention of a packed tensor; where autograd records it, without slopes and dropout, its gradient is one
    tensor."""
    if (
        alibi_slopes is None
        and call[-1] == 0.0
        and torch.is_grad_enabled()
        and packed.requires_grad
        and not is_seen_by_others()
        and not is_autocast(packed)
        and not _are_odd(q, packed, cu_seqlens_q, cu_seqlens_k)
    ):
        return _apply_packed(call, with_lse, q, packed, cu_seqlens_q, cu_seqlens_k)
    parts = packed_parts(q, packed)
    tensors = varlen_tensors(*parts, cu_seqlens_q, cu_seqlens_k, alibi_slopes, dropout_p=call[-1])
    return attend_varlen(tensors, call, with_lse)
