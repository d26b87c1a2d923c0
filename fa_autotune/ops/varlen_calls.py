"""What a call of attention on sequences in a row runs: a plan for each kind of call, found by one dict look-up.

The number of sequences and the totals are no part of a kind, but in which powers of two they and the mean lengths lie:
a stream of ever new totals makes few plans.
"""

import threading
from operator import index as as_index
from typing import Any, Protocol

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.arguments import (
    MAX_SCALE,
    MIN_SCALE,
    OPEN,
    REFERENCE,
    check_dropout,
    check_scale,
    check_seed,
    check_softcap,
    check_tensor,
    check_tensors,
)
from fa_autotune.ops.plans import runs_kernels, tell_of_reference
from fa_autotune.ops.varlen_plan import Gradients, Into, Needed, VarlenArguments, VarlenPlan, VarlenTensors, rows_last
from fa_autotune.reference.dropout import head_numbers
from fa_autotune.reference.features import Features, sink_gradient
from fa_autotune.reference.packed import VarlenCall, sequences_of, varlen_gradients, varlen_reference, varlen_statistics

MAX_REMEMBERED_CALLS = 4096
MAX_TOTAL = 2**30  # positions and their differences are 32-bit in every kernel

_lock = threading.RLock()
_plans: dict[tuple[Any, ...], "Plan"] = {}


class Plan(Protocol):
    """How calls of one kind run. `gradient_refusal` says why none of them can be differentiated, where that is so."""

    arguments: VarlenArguments
    gradient_refusal: str | None

    def forward(self, tensors: VarlenTensors) -> tuple[Tensor, Tensor]:
        """(out, lse): out (total_q, num_q_heads, head_dim_v) contiguous, lse fp32 (num_q_heads, total_q)."""
        ...

    def backward(
        self,
        tensors: VarlenTensors,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        """The needed gradients of q, k, v, contiguous, and of sinks. One that is None counts as 0."""
        ...


def varlen_plan_of(tensors: VarlenTensors, call: tuple[Any, ...]) -> Plan:
    """The plan of a call, made once; InvalidProblemError and UnsupportedError for a call that can't be served.

    `call` holds the fields of `VarlenArguments`.
    """
    q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks, seed = tensors
    try:
        total_q, heads, head_dim = q.shape
        total_k, kv_heads, key_dim = k.shape
        num_sequences = cu_seqlens_q.shape[0] - 1
        count = num_sequences or 1
        index = q.get_device()
        key: tuple[Any, ...] = (
            heads, head_dim, kv_heads, key_dim, v.shape[1:], q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
            v.dtype, index, k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            # Powers of two that hold the number of sequences and the mean lengths; 0 is a kind of its own.
            (num_sequences - 1).bit_length(), ((total_q - 1) // count).bit_length(),
            ((total_k - 1) // count).bit_length(), num_sequences == 0,
            cu_seqlens_q.dtype, cu_seqlens_q.stride(), cu_seqlens_q.get_device(),
            cu_seqlens_k is cu_seqlens_q
            or (cu_seqlens_k.dtype, cu_seqlens_k.stride(), cu_seqlens_k.get_device()),
            call,
        )  # fmt: skip
        agree = (
            num_sequences >= 0
            and total_k == v.shape[0]
            and total_q <= MAX_TOTAL >= total_k
            and (cu_seqlens_k is cu_seqlens_q or cu_seqlens_k.shape == cu_seqlens_q.shape)
            and (slopes is None or slopes.shape == (num_sequences, heads))
            and (sinks is None or sinks.shape == (heads,))
        )
        if index < 0:  # not a GPU; a device's own hash would cost more
            key += (q.device.type, k.device.type, v.device.type, cu_seqlens_q.device.type, cu_seqlens_k.device.type)
    except (AttributeError, RuntimeError, IndexError, ValueError):  # no tensors, or none with rows
        _check_kinds(tensors)
        raise
    if slopes is not None:
        key += ("slopes", slopes.stride(), slopes.dtype, slopes.device)
    if sinks is not None:
        key += ("sinks", sinks.stride(), sinks.dtype, sinks.device)
    if seed is not None:
        key += ("dropout", seed.shape, seed.stride(), seed.dtype, seed.device)
    plan = _plans.get(key)
    if plan is None or not agree:
        plan = _new_plan(tensors, VarlenArguments(*call))
        with _lock:
            while len(_plans) >= MAX_REMEMBERED_CALLS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan


def write_varlen_gradients(
    plan: Plan,
    tensors: VarlenTensors,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    needed: Needed,
    into: Into,
) -> Tensor | None:
    """A plan's `backward` with its dk and dv, and dq where it has a place, written to `into`; gives dq."""
    if isinstance(plan, VarlenPlan):
        return plan.backward(tensors, out, lse, d_out, d_lse, needed, into)[0]
    gradients = plan.backward(tensors, out, lse, d_out, d_lse, needed)
    for gradient, target in zip(gradients[:3], into, strict=True):
        if gradient is not None and target is not None:
            target.copy_(gradient)
    return gradients[0]


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_kinds(tensors: VarlenTensors) -> None:
    """What must hold before a tensor's dimensions and strides can be read."""
    for name, tensor in zip(("q", "k", "v"), tensors[:3], strict=True):
        check_tensor(name, tensor)
        if tensor.ndim != 3:
            raise InvalidProblemError(
                f"{name} has shape {tuple(tensor.shape)}, attention of sequences in a row takes 3 dimensions: total, "
                "heads, head_dim; a batch of one length is for `attention`"
            )
    for name, tensor in (("cu_seqlens_q", tensors.cu_seqlens_q), ("cu_seqlens_k", tensors.cu_seqlens_k)):
        check_tensor(name, tensor)
        if tensor.ndim != 1 or tensor.shape[0] == 0 or tensor.dtype != torch.int32 or tensor.stride(0) != 1:
            raise InvalidProblemError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with stride {tensor.stride()}; it is int32 (sequences "
                "+ 1,), contiguous: where each sequence starts, and the last one's end; write it as "
                f"{name}.to(torch.int32).contiguous()"
            )
        if tensor.device != tensors.q.device:
            raise InvalidProblemError(
                f"{name} is on {tensor.device} and q on {tensors.q.device}; move one of them (kernels read it there, "
                "so that nothing waits for the host)"
            )


def check_varlen(tensors: VarlenTensors, dropout_p: float) -> None:
    """All rules of a call's tensors; InvalidProblemError names the first that is broken.

    What lies in cu_seqlens is not read: that would wait for the GPU.
    """
    _check_kinds(tensors)
    q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks, seed = tensors
    check_tensors(*map(rows_last, (q, k, v)))
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InvalidProblemError(
            f"cu_seqlens_q says {cu_seqlens_q.shape[0] - 1} sequences and cu_seqlens_k {cu_seqlens_k.shape[0] - 1}; "
            "they must be equal: a sequence may have no rows or no keys"
        )
    for name, total in (("q", q.shape[0]), ("k", k.shape[0])):
        if total > MAX_TOTAL:
            raise InvalidProblemError(f"{name} has {total} rows, kernels count up to {MAX_TOTAL}; split the sequences")
    heads, count = q.shape[1], cu_seqlens_q.shape[0] - 1
    for name, tensor, size in (("alibi_slopes", slopes, (count, heads)), ("sinks", sinks, (heads,))):
        if tensor is not None and (
            tuple(tensor.shape) != size or tensor.dtype != torch.float32 or tensor.device != q.device
        ):
            raise InvalidProblemError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; kernels take float32 {size} on "
                f"{q.device}: cast and expand it"
            )
    check_seed(seed, dropout_p, q.device)


def check_max_seqlen(name: str, value: Any) -> None:
    """InvalidProblemError for what is no length. Its value is never read: no kernel needs it."""
    if value is None or type(value) is int or isinstance(value, Tensor):
        return
    try:
        as_index(value)
    except TypeError:
        raise InvalidProblemError(f"{name}={value!r} is no integer; leave it out, no kernel needs it") from None


def _new_plan(tensors: VarlenTensors, arguments: VarlenArguments) -> Plan:
    scale = arguments.softmax_scale
    if scale is not None:
        check_scale(scale)
    check_softcap(arguments.softcap)
    check_dropout(arguments.dropout_p)
    check_varlen(tensors, arguments.dropout_p)
    if tensors.q.shape[1] == 0 or tensors.cu_seqlens_q.shape[0] == 1:
        return _EmptyPlan(arguments)
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        return _SignPlan(arguments, scale)
    if arguments.runs != REFERENCE and runs_kernels(tensors.q):
        return VarlenPlan(_within_reach(arguments), tensors)
    if arguments.runs != REFERENCE:
        with _lock:  # once, however many threads come first
            tell_of_reference()
    return _ReferencePlan(arguments)


def _within_reach(arguments: VarlenArguments) -> VarlenArguments:
    """A side of a window that reaches past every key is an open one: kernels count positions in 32 bits."""
    left, right = (OPEN if side >= MAX_TOTAL else side for side in (arguments.window_left, arguments.window_right))
    return arguments._replace(window_left=left, window_right=right)


# --- plans without kernels --------------------------------------------------------------------------------------------


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


def _zeros_where(needed: Needed, tensors: VarlenTensors) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted else None
        for tensor, wanted in zip(tensors[:3], needed[:3], strict=True)
    )


class _EmptyPlan:
    """No sequence, or no head: rows of none."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: VarlenArguments) -> None:
        self.arguments = arguments

    def forward(self, tensors: VarlenTensors) -> tuple[Tensor, Tensor]:
        out, lse = _empty_results(tensors.q, tensors.v)
        return out.zero_(), lse.fill_(float("-inf"))

    def backward(
        self,
        tensors: VarlenTensors,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        dq, dk, dv = _zeros_where(needed, tensors)
        sinks = tensors.sinks
        return dq, dk, dv, torch.zeros_like(sinks) if sinks is not None and needed[3] else None


class _SignPlan:
    """Kernels fold the scale into an fp32 exponent, where it must be positive: a sign, or a zero, is moved into q."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: VarlenArguments, scale: float) -> None:
        self.arguments = arguments
        self._is_zero = abs(scale) < MIN_SCALE
        self._positive = tuple(arguments._replace(softmax_scale=1.0 if self._is_zero else -scale))

    def forward(self, tensors: VarlenTensors) -> tuple[Tensor, Tensor]:
        moved = self._moved(tensors)
        return varlen_plan_of(moved, self._positive).forward(moved)

    def backward(
        self,
        tensors: VarlenTensors,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        moved = self._moved(tensors)
        plan = varlen_plan_of(moved, self._positive)
        dq, dk, dv, d_sinks = plan.backward(moved, out, lse, d_out, d_lse, needed)
        if dq is not None:
            dq = dq.zero_() if self._is_zero else dq.neg_()
        return dq, dk, dv, d_sinks

    def _moved(self, tensors: VarlenTensors) -> VarlenTensors:
        return tensors._replace(q=torch.zeros_like(tensors.q) if self._is_zero else tensors.q.neg())


class _ReferencePlan:
    """Plain torch, sequence by sequence: exact and slow, and it waits for the device."""

    gradient_refusal: str | None = None

    def __init__(self, arguments: VarlenArguments) -> None:
        self.arguments = arguments

    def forward(self, tensors: VarlenTensors) -> tuple[Tensor, Tensor]:
        out, lse = _empty_results(tensors.q, tensors.v)
        q, k, v = map(rows_last, tensors[:3])
        with torch.autocast(q.device.type, enabled=False):  # it would round the reference's products
            result, result_lse = varlen_reference(q, k, v, self._call(tensors))
        rows_last(out).copy_(result)
        return out, lse.copy_(result_lse[0])

    def backward(
        self,
        tensors: VarlenTensors,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        needed: Needed,
    ) -> Gradients:
        call, sinks = self._call(tensors), tensors.sinks
        d_out = torch.zeros_like(out) if d_out is None else d_out
        q, k, v, d_rows = map(rows_last, (*tensors[:3], d_out))
        d_lse = None if d_lse is None else d_lse.unsqueeze(0)
        d_sinks = None
        with torch.autocast(q.device.type, enabled=False):
            exact = varlen_gradients(q, k, v, d_rows, d_lse, call)
            if sinks is not None and needed[3]:
                exact_lse, delta = varlen_statistics(q, k, v, d_rows, call)
                delta = delta if d_lse is None else delta - d_lse
                d_sinks = sink_gradient(sinks, exact_lse[0], delta[0])
        gradients: list[Tensor | None] = [None, None, None]
        for number, tensor in enumerate(tensors[:3]):
            if needed[number]:
                gradients[number] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
                    exact[number][0].transpose(0, 1)
                )
        dq, dk, dv = gradients
        return dq, dk, dv, d_sinks

    def _call(self, tensors: VarlenTensors) -> VarlenCall:
        scale, counts = self.arguments.softmax_scale, tensors.counts
        left_diagonal, diagonal = self.arguments.diagonals
        sinks = tensors.sinks
        return VarlenCall(
            sequences=sequences_of(tensors.cu_seqlens_q, tensors.cu_seqlens_k, counts.total_q, counts.total_k),
            softmax_scale=tensors.q.shape[2] ** -0.5 if scale is None else scale,
            diagonal=diagonal,
            features=Features(
                left_diagonal=left_diagonal,
                softcap=self.arguments.softcap,
                alibi_slopes=tensors.alibi_slopes,
                sinks=None if sinks is None else sinks.expand(counts.num_sequences, -1),
                dropout_p=self.arguments.dropout_p,
                dropout_seed=tensors.dropout_seed,
                head_numbers=head_numbers(counts.num_sequences, tensors.q.shape[1], tensors.q.device),
            ),
        )
