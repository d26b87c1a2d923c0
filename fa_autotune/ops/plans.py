"""What a call runs: a plan for each way that its tensors lie, found by one dict look-up.

A plan's key holds what follows from tensors (shapes, strides, dtypes, alignment) and the kind of mask. Numbers that
kernels take at run time (scale, softcap, window, dropout_p) are no part of it: first found is the plan with those that
came last, and then its siblings, for the same tensors and other numbers.
"""

import logging
import threading
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fa_autotune.ops.arguments import MAX_SCALE, MIN_SCALE, check_dropout, check_scale, check_seed, check_softcap
from fa_autotune.ops.call import REFERENCE, Call, Extras, Gradients, Into, Needed, Saved
from fa_autotune.ops.kernel_plan import KernelPlan
from fa_autotune.ops.rows.kinds import ROWS
from fa_autotune.ops.rows.rows import Rows
from fa_autotune.paths import interpreting
from fa_autotune.reference.features import sink_gradient

MAX_REMEMBERED_CALLS = 16_384  # a stream of ever new lengths must not fill memory
MAX_REMEMBERED_SIBLINGS = 4096  # nor one of ever new numbers; a model may have other numbers in each layer

_logger = logging.getLogger("fa_autotune")
_lock = threading.RLock()
_plans: "dict[tuple[Any, ...], Plan]" = {}
_siblings: "dict[tuple[tuple[Any, ...], Call], Plan]" = {}  # with other numbers


class Plan(Protocol):
    """How calls of one kind run. `gradient_refusal` says why none of them can be differentiated, where that is so."""

    call: Call

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes and strides that it keeps."""
        ...

    @property
    def gradient_refusal(self) -> str | None: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """(out, lse), as the call's kind of rows has them."""
        ...

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """The needed gradients; a gradient of out or lse that is None counts as 0. Those of k and v, and of q where it
        has a place, are written to `into`."""
        ...


def plan_of(q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> Plan:
    """The plan of a call, made once; InvalidProblemError and UnsupportedError for a call that can't be served."""
    rows = ROWS[call.layout]
    try:
        key = rows.key(q, k, v, extras, call)
    except (AttributeError, RuntimeError, IndexError, TypeError, ValueError):  # no tensors, or no dense ones
        rows.check_kinds(q, k, v, extras)
        raise
    plan = _plans.get(key)
    if plan is not None and (plan.call is call or plan.call == call):
        return plan
    return _other_plan(plan, key, rows, q, k, v, extras, call)


def _other_plan(
    known: Plan | None, key: tuple[Any, ...], rows: Rows, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call
) -> Plan:
    """A plan that is new, or a sibling of the one that is known; it is found first from now on."""
    plan = None if known is None else _siblings.get((key, call))
    if plan is None:
        if known is None:
            rows.check(q, k, v, extras, call)
        plan = _new_plan(rows, q, k, v, extras, call, known)
        key = _compact(key, plan.sizes)
        for one in () if known is None else (known, plan):
            _remember(_siblings, (key, one.call), one, MAX_REMEMBERED_SIBLINGS)
    _remember(_plans, key, plan, MAX_REMEMBERED_CALLS)
    return plan


def _remember(memory: dict[Any, Plan], key: tuple[Any, ...], plan: Plan, most: int) -> None:
    with _lock:
        while key not in memory and len(memory) >= most:
            del memory[next(iter(memory))]
        memory[key] = plan


def _compact(key: tuple[Any, ...], sizes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """A key that is kept: its shapes are plain tuples, and equal ones the same, those of its plan too."""
    shared: dict[tuple[Any, ...], tuple[Any, ...]] = {size: size for size in sizes}
    return tuple([shared.setdefault(tuple(part), tuple(part)) if isinstance(part, tuple) else part for part in key])


def _new_plan(rows: Rows, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call, known: Plan | None) -> Plan:
    """For tensors that were checked; `known` is for the same ones."""
    scale = call.softmax_scale
    if scale is not None:
        check_scale(scale)
    check_softcap(call.softcap)
    check_dropout(call.dropout_p)
    check_seed(extras.dropout_seed, call.dropout_p, q.device)
    if q.device.type == "meta":
        return _MetaPlan(rows, call)
    if rows.is_empty(q, k, extras):
        return _EmptyPlan(rows, call)
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        return _SignPlan(q, k, v, extras, call)
    if call.backend != REFERENCE and runs_kernels(q):
        if isinstance(known, KernelPlan) and known.serves(call):
            return known.with_numbers(call)
        return KernelPlan(rows, q, k, v, extras, call)
    if call.backend != REFERENCE:
        with _lock:  # once, however many threads come first
            tell_of_reference()
    return _ReferencePlan(rows, call)


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


# --- plans without kernels --------------------------------------------------------------------------------------------


class _PlainPlan:
    """What plans in plain torch have in common: results and gradients that are allocated first."""

    gradient_refusal: str | None = None
    sizes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, rows: Rows, call: Call) -> None:
        self.call = call
        self._rows = rows

    def _results(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out_size, out_strides, lse_size, lse_strides = self._rows.results(q, v)
        out = torch.empty_strided(out_size, out_strides, dtype=q.dtype, device=q.device)
        return out, torch.empty_strided(lse_size, lse_strides, dtype=torch.float32, device=q.device)

    def _gradients(self, saved: Saved, needed: Needed, into: Into | None) -> tuple[Tensor | None, ...]:
        """Of q, k and v."""
        places = into or (None, None, None)
        return tuple(
            (tensor.new_empty_strided(*self._rows.gradient(tensor)) if place is None else place) if wanted else None
            for tensor, wanted, place in zip(
                (saved.q, saved.k, saved.v), (needed.q, needed.k, needed.v), places, strict=True
            )
        )


class _MetaPlan(_PlainPlan):
    """Tensors on the meta device, which have no memory: results of the right shapes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Where they would lie."""
        return self._results(q, v)

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """Where they would lie."""
        dq, dk, dv = self._gradients(saved, needed, into)
        sinks, mask = saved.extras.sinks, saved.extras.attn_mask
        d_sinks = torch.empty_like(sinks) if sinks is not None and needed.sinks else None
        return Gradients(dq, dk, dv, d_sinks, torch.empty_like(mask) if mask is not None and needed.attn_mask else None)


class _EmptyPlan(_PlainPlan):
    """No query, no key, or no sequence: nothing to compute."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Zeros."""
        out, lse = self._results(q, v)
        return out.zero_(), self._rows.lse_without_keys(lse, extras)

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """Zeros, but for sinks, which lse alone depends on."""
        dq, dk, dv = (None if one is None else one.zero_() for one in self._gradients(saved, needed, into))
        sinks, mask, d_sinks = saved.extras.sinks, saved.extras.attn_mask, None
        if sinks is not None and needed.sinks:
            d_sinks = sink_gradient(sinks, saved.lse, torch.zeros_like(saved.lse) if d_lse is None else -d_lse)
        return Gradients(dq, dk, dv, d_sinks, torch.zeros_like(mask) if mask is not None and needed.attn_mask else None)


class _ReferencePlan(_PlainPlan):
    """Plain torch: exact, slow, and O(seqlen_q · seqlen_k) in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """The reference's results, rounded."""
        out, lse = self._results(q, v)
        with torch.autocast(q.device.type, enabled=False):  # it would round the reference's products
            result, result_lse = self._rows.reference_forward(q, k, v, extras, self.call)
        self._rows.view(out).copy_(result)
        return out, lse.copy_(result_lse)

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """The reference's gradients, rounded."""
        d_out = torch.zeros_like(saved.out) if d_out is None else d_out
        with torch.autocast(d_out.device.type, enabled=False):
            exact = self._rows.reference_backward(saved, self.call, d_out, d_lse, needed)
        dq, dk, dv = self._gradients(saved, needed, into)
        for gradient, found in ((dq, exact.q), (dk, exact.k), (dv, exact.v)):
            if gradient is not None and found is not None:
                self._rows.view(gradient).copy_(found)
        return exact._replace(q=dq, k=dk, v=dv)


class _SignPlan:
    """Kernels fold the scale into an fp32 exponent, where it must be positive: a sign, or a zero, is moved into q."""

    sizes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        scale = call.softmax_scale
        assert scale is not None
        self.call = call
        self._is_zero = abs(scale) < MIN_SCALE
        self._positive = call._replace(softmax_scale=1.0 if self._is_zero else -scale)
        self.gradient_refusal = plan_of(self._moved(q), k, v, extras, self._positive).gradient_refusal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """That of the positive scale."""
        moved = self._moved(q)
        return plan_of(moved, k, v, extras, self._positive).forward(moved, k, v, extras)

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """That of the positive scale, with q's gradient moved back."""
        saved = saved._replace(q=self._moved(saved.q))
        plan = plan_of(saved.q, saved.k, saved.v, saved.extras, self._positive)
        found = plan.backward(saved, d_out, d_lse, needed, into)
        if found.q is not None:
            found = found._replace(q=found.q.zero_() if self._is_zero else found.q.neg_())
        return found

    def _moved(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q) if self._is_zero else q.neg()
