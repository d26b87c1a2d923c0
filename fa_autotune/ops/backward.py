"""The two ways to compute a backward on generated kernels, bound to one kind of call.

Split: delta, then dk and dv, then dq, each from its own kernel. Fused: one kernel computes all three, which saves two
of seven matrix products, between one that prepares the statistics and one that puts dq in order.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.dispatch.loaded_kernels import dispatcher_of, kernel_for
from fa_autotune.kernels.fast_launch import Launch, bind
from fa_autotune.ops.arguments import is_loose
from fa_autotune.ops.memory import Allocate, access_of, contiguous, sketch
from fa_autotune.problem.family import KEYLESS_PASSES, Access, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.features import NO_FEATURES, Features
from fa_autotune.space.workspace import dq_acc_size, statistics_size, turns_size, whole_mask_rows


class Backward(Protocol):
    """The launches of a backward."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *features: Tensor, d_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write dq, dk and dv, those of them that are needed, and give delta (batch, num_q_heads, seqlen_q).

        `features`: a backward's `feature_tensors`. `d_mask` takes the gradient of what a mask adds, if that is needed:
        fp32 (batch, num_q_heads, seqlen_q, `whole_mask_rows`), 0 before where the call bounds the keys. Only the
        addresses of the other tensors are read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCall:
    """A kind of backward: the forward's problem, the index of its GPU (negative: the interpreter's), its scalars and
    features, and what allocates memory beside the tensors.

    The tensors are (batch, heads, seqlen, head_dim), those that are yet to be allocated on the meta device.
    """

    problem: AttentionProblem
    index: int
    softmax_scale: float
    diagonal: int | None
    allocate: Allocate
    features: Features = NO_FEATURES
    mask_gradient: bool = False

    def bound(self, kernel_pass: Pass, access: Access, *tensors: Tensor, unordered: bool = False) -> Launch:
        """The kernel that dispatch chooses for a pass, bound to tensors."""
        mask_gradient = self.mask_gradient and kernel_pass is Pass.BWD_DQ
        problem = self.problem.for_pass(kernel_pass, unordered=unordered, mask_gradient=mask_gradient)
        problem = replace(problem, family=replace(problem.family, access=access))
        if kernel_pass not in KEYLESS_PASSES and self.features.attn_mask is not None:  # saved ones may lie elsewhere
            loose = is_loose(self.features.attn_mask)
            problem = replace(problem, family=replace(problem.family, loose_mask=loose))
        numbers: tuple[float | int | None, ...] = ()
        if kernel_pass not in KEYLESS_PASSES:
            numbers = (self.softmax_scale, self.diagonal, *self.features.numbers(problem.family))
        gpu = self.index if self.index >= 0 else None
        every = (*tensors, *self.features.tensors(problem.family))
        return bind(kernel_for(problem, self.index), every, *numbers, gpu=gpu)


def bind_backward(
    call: BackwardCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *, unordered: bool,
) -> Backward:  # fmt: skip
    """The faster way for a call, bound; gradients that are None are not needed. NoKernelError, CompileError."""
    access = access_of(q, k, v, d_out)
    family = replace(call.problem.family, access=access)
    problem = replace(call.problem, family=family)
    if dq is not None and dk is not None and dv is not None and access is access_of(dk, dv) is Access.TMA:
        way = dispatcher_of(call.index).backward_choice(problem, unordered=unordered).way
        if way is not BackwardWay.SPLIT:
            is_free = way is BackwardWay.FUSED_UNORDERED
            return FusedBackward(call, q, k, v, out, lse, d_out, dq, dk, dv, unordered=is_free)
    return SplitBackward(call, q, k, v, out, lse, d_out, dq, dk, dv)


class SplitBackward:
    """delta, dk and dv, dq: three kernels, and only those that are needed."""

    def __init__(
        self, call: BackwardCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    ) -> None:  # fmt: skip
        self._allocate = call.allocate
        self._statistic = tuple(lse.shape), lse.stride()
        delta = sketch(self._statistic, torch.float32)
        access, inputs = access_of(q, k, v, d_out), (q, k, v, d_out, lse, delta)
        self._delta = call.bound(Pass.BWD_DELTA, access_of(out, d_out), out, d_out, delta)
        self._dkdv = None if dk is None or dv is None else call.bound(Pass.BWD_DKDV, access, *inputs, dk, dv)
        d_mask = self._d_mask_of(call) if call.mask_gradient else ()
        self._dq = None if dq is None else call.bound(Pass.BWD_DQ, access, *inputs, dq, *d_mask)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *features: Tensor, d_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        delta = self._allocate(*self._statistic, torch.float32)
        self._delta(out, d_out, delta)
        if d_lse is not None:
            delta.sub_(d_lse)
        if self._dkdv is not None:
            self._dkdv(q, k, v, d_out, lse, delta, dk, dv, *features)
        if self._dq is not None:
            self._dq(q, k, v, d_out, lse, delta, dq, *(() if d_mask is None else (d_mask,)), *features)
        return delta

    @staticmethod
    def _d_mask_of(call: BackwardCall) -> tuple[Tensor]:
        shape = call.problem.shape
        size = (shape.batch_size, shape.num_q_heads, shape.seqlen_q, whole_mask_rows(shape.seqlen_k))
        return (sketch(contiguous(size), torch.float32),)


class FusedBackward:
    """All three gradients from one kernel, between its preprocessing and its postprocessing."""

    def __init__(
        self, call: BackwardCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, *, unordered: bool,
    ) -> None:  # fmt: skip
        self._allocate = call.allocate
        self._unordered = unordered
        family, shape = call.problem.family, call.problem.shape
        self._statistics = contiguous(statistics_size(shape))
        self._turns = contiguous(turns_size(shape))
        self._dq_acc = contiguous(dq_acc_size(family, shape))
        self._rows = lse.shape
        statistics, turns = sketch(self._statistics, torch.float32), sketch(self._turns, torch.int32)
        dq_acc = sketch(self._dq_acc, torch.float32)
        self._preprocess = call.bound(Pass.BWD_PREPROCESS, access_of(out, d_out), out, d_out, lse, statistics, turns)
        inputs = (q, k, v, d_out, statistics, turns)
        self._fused = call.bound(Pass.BWD_FUSED, Access.TMA, *inputs, dk, dv, dq_acc, unordered=unordered)
        self._postprocess = call.bound(Pass.BWD_POSTPROCESS, access_of(dq), dq_acc, dq)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *features: Tensor, d_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        statistics = self._allocate(*self._statistics, torch.float32)
        turns = self._allocate(*self._turns, torch.int32)
        dq_acc = self._allocate(*self._dq_acc, torch.float32)
        self._preprocess(out, d_out, lse, statistics, turns)
        *heads, seqlen_q = self._rows
        delta = statistics[1].view(*heads, -1)[..., :seqlen_q]
        if d_lse is not None:
            delta.sub_(d_lse)
        if self._unordered:
            dq_acc.zero_()
        self._fused(q, k, v, d_out, statistics, turns, dk, dv, dq_acc, *features)
        self._postprocess(dq_acc, dq)
        return delta
