"""What a call of attention runs: a plan for each kind of call, found by one dict look-up.

All that follows from shapes, strides, dtypes, mask and scale is in the plan: the checks are done, the kernels chosen,
loaded and bound.
"""

import logging
import threading
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.arguments import (
    MASK,
    MAX_SCALE,
    MIN_SCALE,
    REFERENCE,
    SEED,
    SINKS,
    Extras,
    check_dropout,
    check_kinds,
    check_mask,
    check_scale,
    check_seed,
    check_softcap,
    check_tensors,
    extra_of,
)
from fa_autotune.ops.kernel_plan import Call, CallArguments, Gradients, Into, KernelPlan, Needed, Saved
from fa_autotune.ops.memory import Quad, dense, heads_first, lse_size, out_size, quad
from fa_autotune.paths import interpreting
from fa_autotune.reference.attention import attention_backward, attention_reference, backward_statistics
from fa_autotune.reference.dropout import head_numbers
from fa_autotune.reference.features import sink_gradient, summed_like

MAX_REMEMBERED_CALLS = 16_384  # a stream of ever new lengths must not fill memory

_logger = logging.getLogger("fa_autotune")
_lock = threading.RLock()
_plans: dict[tuple[Any, ...], "Plan"] = {}


class Plan(Protocol):
    """How calls of one kind run. `gradient_refusal` says why none of them can be differentiated, where that is so."""

    arguments: CallArguments
    gradient_refusal: str | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse): out dense in the call's layout, lse fp32 (batch, num_q_heads, seqlen_q)."""
        ...

    def backward(self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed) -> Gradients:
        """Needed gradients of q, k, v, dense in the call's layout, of sinks and mask. One that is None counts as 0."""
        ...


def plan_of(q: Tensor, k: Tensor, v: Tensor, call: Call, extras: Extras = ()) -> Plan:
    """The plan of a call, made once; InvalidProblemError and UnsupportedError for a call that can't be served.

    `call` holds the fields of `CallArguments`, whose integers are those of `arguments`; `extras` are what `as_extras`
    gives.
    """
    try:
        index = q.get_device()
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            index, k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            call,
        )  # fmt: skip
        if index < 0:  # not a GPU; a device's own hash would cost more
            key += (q.device.type, k.device.type, v.device.type)
    except (AttributeError, RuntimeError):  # lists have no shape, sparse tensors no strides
        check_kinds(q, k, v)
        raise
    if extras:
        key += tuple(
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            for tensor in extras
        )
        mask = extra_of(extras, MASK)
        key += (None if mask is None else mask.data_ptr() & 15,)
    plan = _plans.get(key)
    if plan is None:
        plan = _new_plan(q, k, v, CallArguments(*call), extras)
        with _lock:
            while len(_plans) >= MAX_REMEMBERED_CALLS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan


def write_gradients(
    plan: Plan, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into
) -> Tensor | None:
    """A plan's `backward` with its dk and dv, and dq where it has a place, written to `into`; gives dq."""
    if isinstance(plan, KernelPlan):
        return plan.backward(saved, d_out, d_lse, needed, into)[0]
    gradients = plan.backward(saved, d_out, d_lse, needed)
    for gradient, target in zip(gradients[:3], into, strict=True):
        if gradient is not None and target is not None:
            target.copy_(gradient)
    return gradients[0]


def _new_plan(q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments, extras: Extras) -> Plan:
    check_kinds(q, k, v)
    scale = arguments.softmax_scale
    if scale is not None:
        check_scale(scale)
    check_softcap(arguments.softcap)
    check_dropout(arguments.dropout_p)
    check_tensors(*(heads_first(tensor, arguments.layout) for tensor in (q, k, v)))
    _check_extras(q, k, arguments, extras)
    if q.numel() == 0 or k.numel() == 0:
        return _EmptyPlan(arguments)
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        return _SignPlan(arguments, scale)
    if arguments.runs != REFERENCE and runs_kernels(q):
        return KernelPlan(arguments, q, k, v, extras)
    if arguments.runs != REFERENCE:
        with _lock:  # once, however many threads come first
            tell_of_reference()
    return _ReferencePlan(arguments)


def _check_extras(q: Tensor, k: Tensor, arguments: CallArguments, extras: Extras) -> None:
    """What `as_extras` gives passes, but for a mask that does not fit; operators may be called with anything."""
    layout = arguments.layout
    batch_size, num_heads, seqlen_q = lse_size(q, layout)
    mask = extra_of(extras, MASK)
    if mask is not None:
        check_mask(mask, (batch_size, num_heads, seqlen_q, heads_first(k, layout).shape[2]), q)
    check_seed(extra_of(extras, SEED), arguments.dropout_p, q.device)
    for name, tensor in zip(("alibi_slopes", "sinks"), extras, strict=False):
        if tensor is not None and (
            tensor.shape != (q.shape[0], num_heads) or tensor.dtype != torch.float32 or tensor.device != q.device
        ):
            raise InvalidProblemError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; kernels take float32 "
                f"{(q.shape[0], num_heads)} on {q.device}: expand it"
            )


def runs_kernels(q: Tensor) -> bool:
    """Whether calls on a tensor's device run generated kernels."""
    return q.is_cuda or interpreting()


@cache
def tell_of_reference() -> None:
    """Say, once, that there is no GPU to run kernels."""
    _logger.warning(
        "attention got CPU tensors and runs a plain torch reference: exact, but slow and O(seqlen_q · seqlen_k) in "
        "memory. Generated kernels need a GPU (or TRITON_INTERPRET=1, for tests). Told once."
    )


def _empty(size: Quad, like: Tensor, layout: int) -> Tensor:
    return torch.empty_strided(*dense(size, layout), dtype=like.dtype, device=like.device)


def _empty_results(q: Tensor, v: Tensor, layout: int) -> tuple[Tensor, Tensor]:
    lse = torch.empty(lse_size(q, layout), dtype=torch.float32, device=q.device)
    return _empty(out_size(q, v), q, layout), lse


class _EmptyPlan:
    """No query, or no key: nothing to compute."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: CallArguments) -> None:
        self.arguments = arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _empty_results(q, v, self.arguments.layout)
        sinks = extra_of(extras, SINKS)
        if sinks is not None:
            return out.zero_(), lse.copy_(sinks[..., None].expand_as(lse))
        return out.zero_(), lse.fill_(float("-inf"))

    def backward(self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed) -> Gradients:
        layout = self.arguments.layout
        tensors = zip(saved[:3], needed[:3], strict=True)
        dq, dk, dv = (_empty(quad(tensor), tensor, layout).zero_() if wanted else None for tensor, wanted in tensors)
        sinks, d_sinks = extra_of(saved[5:], SINKS), None
        if sinks is not None and needed[3]:
            lse = saved[4]
            d_sinks = sink_gradient(sinks, lse, torch.zeros_like(lse) if d_lse is None else -d_lse)
        mask = extra_of(saved[5:], MASK)
        return dq, dk, dv, d_sinks, torch.zeros_like(mask) if mask is not None and needed[4] else None


class _SignPlan:
    """Kernels fold the scale into an fp32 exponent, where it must be positive: a sign, or a zero, is moved into q."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: CallArguments, scale: float) -> None:
        self.arguments = arguments
        self._is_zero = abs(scale) < MIN_SCALE
        self._positive = arguments._replace(softmax_scale=1.0 if self._is_zero else -scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        q = self._moved(q)
        return plan_of(q, k, v, self._positive, extras).forward(q, k, v, *extras)

    def backward(self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed) -> Gradients:
        q, k, v, out, lse, *extras = saved
        q = self._moved(q)
        plan = plan_of(q, k, v, self._positive, tuple(extras))
        dq, *others = plan.backward((q, k, v, out, lse, *extras), d_out, d_lse, needed)
        if dq is not None:
            dq = dq.zero_() if self._is_zero else dq.neg_()
        dk, dv, d_sinks, d_mask = others
        return dq, dk, dv, d_sinks, d_mask

    def _moved(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q) if self._is_zero else q.neg()


class _ReferencePlan:
    """Plain torch: exact, slow, and O(seqlen_q · seqlen_k) in memory."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: CallArguments) -> None:
        self.arguments = arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        layout = self.arguments.layout
        out, lse = _empty_results(q, v, layout)
        q, k, v = (heads_first(tensor, layout) for tensor in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):  # it would round the reference's products
            result, result_lse = attention_reference(q, k, v, **self._numbers(q, k, extras))
        heads_first(out, layout).copy_(result)
        return out, lse.copy_(result_lse)

    def backward(self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed) -> Gradients:
        layout = self.arguments.layout
        d_out = torch.zeros_like(saved[3]) if d_out is None else d_out
        q, k, v, d_out = (heads_first(tensor, layout) for tensor in (*saved[:3], d_out))
        with torch.autocast(q.device.type, enabled=False):
            numbers = self._numbers(q, k, saved[5:])
            exact = attention_backward(q, k, v, d_out, d_lse, **numbers)
            d_sinks = None
            sinks, mask = extra_of(saved[5:], SINKS), extra_of(saved[5:], MASK)
            if sinks is not None and needed[3]:
                lse, delta = backward_statistics(q, k, v, d_out, **numbers)
                d_sinks = sink_gradient(sinks, lse, delta if d_lse is None else delta - d_lse)
        gradients: list[Tensor | None] = [None, None, None]
        for number, tensor in enumerate(saved[:3]):
            if needed[number]:
                gradients[number] = gradient = _empty(quad(tensor), tensor, layout)
                heads_first(gradient, layout).copy_(exact[number])
        dq, dk, dv = gradients
        return dq, dk, dv, d_sinks, summed_like(mask, exact[3]) if mask is not None and needed[4] else None

    def _numbers(self, q: Tensor, k: Tensor, extras: Extras) -> dict[str, Any]:
        scale = self.arguments.softmax_scale
        features, diagonal = self.arguments.features(q.shape[2], k.shape[2], extras)
        if features.dropout_seed is not None:
            features = replace(features, head_numbers=head_numbers(q.shape[0], q.shape[1], q.device))
        return {
            "softmax_scale": q.shape[3] ** -0.5 if scale is None else scale,
            "diagonal": diagonal,
            "features": features,
        }
