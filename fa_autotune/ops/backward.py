"""The two ways to compute a backward on generated kernels.

Split: delta, then dk and dv, then dq, each from its own kernel. Fused: one kernel computes all three, which saves two
of seven matrix products, between one that prepares the statistics and one that puts dq in order.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.dispatch.loaded_kernels import dispatcher_of
from fa_autotune.errors import NoKernelError
from fa_autotune.kernels.fast_launch import Counts, Launch
from fa_autotune.kernels.loaded import LoadedKernel
from fa_autotune.ops.call import UNORDERED, Extras, Saved
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.memory import access_of
from fa_autotune.ops.rows.rows import Workspaces
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import Pass
from fa_autotune.reference.features import sink_gradient


class Targets(NamedTuple):
    """Where a backward's kernels write; None for what is not needed, and k and v together.

    d_mask: the gradient of what a mask adds to each score, fp32 (batch, num_q_heads, seqlen_q, `whole_mask_rows`), 0
    before where the call bounds the keys; it goes with q.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    d_mask: Tensor | None = None


class Backward(Protocol):
    """The launches of a backward."""

    def __call__(
        self, saved: Saved, d_out: Tensor, d_lse: Tensor | None, into: Targets, *, wants_sinks: bool
    ) -> Tensor | None:
        """Write the gradients; gives that of sinks, if it is wanted. Only the addresses of tensors are read."""
        ...


def backward_of(kernels: CallKernels, saved: Saved, d_out: Tensor, into: Targets) -> Backward:
    """The faster way for a call whose tensors lie so, its kernels loaded; NoKernelError, CompileError."""
    access = access_of(saved.q, saved.k, saved.v, d_out)
    if into.q is None or into.k is None or into.v is None:
        return SplitBackward(kernels, access, saved, d_out, into)
    if not access is access_of(into.k, into.v) is Access.TMA:
        return SplitBackward(kernels, access, saved, d_out, into)
    dispatcher, unordered = dispatcher_of(kernels.home.index), kernels.call.backend == UNORDERED
    way = dispatcher.backward_way(kernels.problem_as(access), unordered=unordered)
    if way is BackwardWay.SPLIT:
        return SplitBackward(kernels, access, saved, d_out, into)
    try:
        return FusedBackward(kernels, saved, d_out, into.q, unordered=way is BackwardWay.FUSED_UNORDERED)
    except NoKernelError:  # its kernel did not compile, with a Triton that is not known
        return SplitBackward(kernels, access, saved, d_out, into)


class _Step:
    """One of a backward's kernels; bound by its first launch to how the tensors lie."""

    def __init__(self, kernels: CallKernels, kernel: LoadedKernel) -> None:
        self._kernels, self._kernel = kernels, kernel
        self._extras = kernel.extra_tensors
        self._launch: Launch | None = None

    def __call__(self, counts: Counts | None, extras: Extras, *tensors: Tensor) -> None:
        """Launch it on what its pass takes and gives."""
        if self._launch is None:
            self._launch = self._kernels.bound(self._kernel, tensors, extras)
        launch = self._launch
        if self._extras:
            launch.run(launch, counts, *tensors, *(getattr(extras, name) for name in self._extras))
        else:
            launch.run(launch, counts, *tensors)


class SplitBackward:
    """delta, dk and dv, dq: three kernels, and only those that are needed."""

    def __init__(self, kernels: CallKernels, access: Access, saved: Saved, d_out: Tensor, into: Targets) -> None:
        self._kernels = kernels
        mask = saved.extras.attn_mask
        of_rows = kernels.kernel_for(Pass.BWD_DELTA, access_of(saved.out, d_out))
        self._delta = _Step(kernels, of_rows)
        self._dkdv = self._dq = None
        if into.k is not None:
            self._dkdv = _Step(kernels, kernels.kernel_for(Pass.BWD_DKDV, access, mask))
        if into.q is not None:
            mask_gradient = into.d_mask is not None
            self._dq = _Step(kernels, kernels.kernel_for(Pass.BWD_DQ, access, mask, mask_gradient=mask_gradient))

    def __call__(
        self, saved: Saved, d_out: Tensor, d_lse: Tensor | None, into: Targets, *, wants_sinks: bool
    ) -> Tensor | None:
        q, k, v, out, lse, extras = saved
        counts = self._kernels.rows.counts(q, k, extras)
        delta = self._kernels.home.allocate(tuple(lse.shape), lse.stride(), torch.float32)
        self._delta(counts, extras, out, d_out, delta)
        if d_lse is not None:
            delta.sub_(d_lse)
        if self._dkdv is not None and into.k is not None and into.v is not None:
            self._dkdv(counts, extras, q, k, v, d_out, lse, delta, into.k, into.v)
        if self._dq is not None and into.q is not None:
            d_mask = () if into.d_mask is None else (into.d_mask,)
            self._dq(counts, extras, q, k, v, d_out, lse, delta, into.q, *d_mask)
        return sink_gradient(extras.sinks, lse, delta) if wants_sinks and extras.sinks is not None else None


class FusedBackward:
    """All three gradients from one kernel, between its preprocessing and its postprocessing."""

    def __init__(self, kernels: CallKernels, saved: Saved, d_out: Tensor, dq: Tensor, *, unordered: bool) -> None:
        self._kernels, self._unordered = kernels, unordered
        before = kernels.kernel_for(Pass.BWD_PREPROCESS, access_of(saved.out, d_out))
        fused = kernels.kernel_for(Pass.BWD_FUSED, Access.TMA, unordered=unordered)
        after = kernels.kernel_for(Pass.BWD_POSTPROCESS, access_of(dq))
        self._preprocess, self._fused, self._postprocess = (_Step(kernels, kernel) for kernel in (before, fused, after))
        self._workspaces: Workspaces | None = None  # where lengths are a plan's

    def __call__(
        self, saved: Saved, d_out: Tensor, d_lse: Tensor | None, into: Targets, *, wants_sinks: bool
    ) -> Tensor | None:
        q, k, v, out, lse, extras = saved
        kernels, rows = self._kernels, self._kernels.rows
        counts = rows.counts(q, k, extras)
        sizes = self._workspaces or rows.workspaces(kernels.family, kernels.shape, counts)
        if counts is None:
            self._workspaces = sizes
        allocate = kernels.home.allocate
        statistics = allocate(*sizes.statistics, torch.float32)
        turns = allocate(*sizes.turns, torch.int32)
        self._preprocess(counts, extras, out, d_out, lse, statistics, turns)
        if d_lse is not None:
            rows.subtract(statistics, d_lse, saved)
        assert into.q is not None
        assert into.k is not None
        assert into.v is not None
        if counts is not None and 0 in (counts.total_q, counts.total_k):  # descriptors address no tensor without rows
            for gradient in (into.q, into.k, into.v):
                gradient.zero_()
        else:
            dq_acc = allocate(*sizes.dq_acc, torch.float32)
            if self._unordered:
                dq_acc.zero_()
            self._fused(counts, extras, q, k, v, d_out, statistics, turns, into.k, into.v, dq_acc)
            self._postprocess(counts, extras, dq_acc, into.q)
        if not wants_sinks or extras.sinks is None:
            return None
        return sink_gradient(extras.sinks, lse, rows.delta(statistics, saved))
