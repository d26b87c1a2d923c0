"""How calls of one kind run on generated kernels: the forward's, and backwards as they come.

What is left to a call is to allocate its results and launch.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.dispatch.loaded_kernels import dispatcher_of
from fa_autotune.errors import InvalidProblemError, NoKernelError
from fa_autotune.kernels.fast_launch import Launch
from fa_autotune.ops.backward import Backward, Targets, backward_of
from fa_autotune.ops.call import NO_EXTRAS, Call, Extras, Gradients, Into, Needed, Saved
from fa_autotune.ops.call_kernels import CallKernels
from fa_autotune.ops.memory import Geometry, access_of, contiguous
from fa_autotune.ops.rows.rows import Results, Rows
from fa_autotune.ops.torch_private import current_gpu
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import Pass
from fa_autotune.reference.features import summed_like
from fa_autotune.space.estimates import WIDEST_PIECE
from fa_autotune.space.workspace import whole_mask_rows

MAX_REMEMBERED_BACKWARDS = 16  # of one plan: one for each way that its gradient lies in memory

_WEAKNESS = {access: weakness for weakness, access in enumerate(Access)}
_lock = threading.Lock()


class _Found(NamedTuple):
    """What runs a backward, and whether d_out is copied into dense memory first."""

    run: Backward
    copies_d_out: bool


class KernelPlan(CallKernels):
    """Kernels chosen and loaded for one way that tensors lie and the numbers of a call."""

    __slots__ = ("_backwards", "_forward_kernel", "_given", "_launch", "_like", "_refusal", "_results")

    def __init__(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        """Choose and load the forward's kernel; NoKernelError, CompileError, LaunchError."""
        super().__init__(rows, q, k, v, extras, call)
        self._forward_kernel = self.kernel_for(Pass.FWD, self.family.access)
        self._launch: Launch | None = None  # bound by the first call
        self._like: Launch | None = None
        self._results: Results | None = None if rows.is_packed else rows.results(q, v)
        self._backwards: dict[tuple[Any, ...], _Found] | None = None
        self._refusal: str | None = None  # "" for none; wide heads are asked about once
        self._given = None if extras is NO_EXTRAS else rows.kinds(extras)

    def serves(self, call: Call) -> bool:
        """Whether the same kernels are chosen for a call on the same tensors: but for window and cap, they are."""
        mine = self.call
        return call.window == mine.window and (call.softcap != 0.0) is (mine.softcap != 0.0)

    def with_numbers(self, call: Call) -> "KernelPlan":
        """A plan for the same tensors and other numbers, which `serves` has passed."""
        plan = object.__new__(KernelPlan)
        plan.call, plan.rows, plan.home, plan.family, plan.shape = call, self.rows, self.home, self.family, self.shape
        plan._bounds, plan._forward_kernel, plan._results = self._bounds, self._forward_kernel, self._results
        plan._launch = plan._backwards = None
        plan._like, plan._given, plan._refusal = self._launch, self._given, self._refusal
        return plan

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes and strides of its results, where lengths are its own."""
        return self._results or ()

    @property
    def gradient_refusal(self) -> str | None:
        """Why no kernel of this GPU gives the gradients of a call; it may be so for wide head dims."""
        if max(self.family.head_dim, self.family.head_dim_v) <= WIDEST_PIECE:
            return None
        if self._refusal is None:
            self._refusal = self._refusal_of_wide_heads()
        return self._refusal or None

    def _refusal_of_wide_heads(self) -> str:
        try:
            for kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ):
                dispatcher_of(self.home.index).peek(self.problem.for_pass(kernel_pass))
        except NoKernelError as error:
            return (
                f"{error}; gradients are served up to head_dim {WIDEST_PIECE} on every GPU: call this under "
                "torch.no_grad(), or split the heads"
            )
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        home = self.home
        if home.index >= 0 and current_gpu() != home.index:
            with torch.cuda.device(home.index):
                return self.forward(q, k, v, extras)
        out_size, out_strides, lse_size, lse_strides = self._results or self.rows.results(q, v)
        out = home.allocate(out_size, out_strides, home.dtype)
        lse = home.allocate(lse_size, lse_strides, torch.float32)
        counts = None if extras is NO_EXTRAS else self.rows.counts(q, k, extras)
        if counts is not None and 0 in (counts.total_q, counts.total_k):  # no kernel is bound to tensors without rows
            return out.zero_(), self.rows.lse_without_keys(lse, extras)
        launch = self._launch
        if launch is None:
            self._launch = launch = self.bound(self._forward_kernel, (q, k, v, out, lse), extras, self._like)
            self._like = None
        if extras is NO_EXTRAS:
            launch.run(launch, None, q, k, v, out, lse)
        else:
            launch.run(launch, counts, q, k, v, out, lse, *extras.given())
        return out, lse

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """The needed gradients; the saved tensors may have come back with other strides and addresses (from hooks).

        InvalidProblemError if they came back with another shape, dtype or device.
        """
        if self.home.index >= 0 and current_gpu() != self.home.index:
            with torch.cuda.device(self.home.index):
                return self.backward(saved, d_out, d_lse, needed, into)
        self._check_saved(saved)
        q, k, v, out, lse, extras = saved
        if not lse.is_contiguous() or lse.data_ptr() & 15:
            saved = saved._replace(lse=lse.clone(memory_format=torch.contiguous_format))
        if d_out is None:
            d_out = torch.zeros_like(out)
        slopes, mask = extras.alibi_slopes, extras.attn_mask
        key = (
            q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(), needed,
            None if into is None else into.k.stride(),  # parts of one new tensor, so that one tells of all
            # Apart, since kernels read them apart: q, k and v; out; d_out.
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, out.data_ptr() & 15, d_out.data_ptr() & 15,
            None if slopes is None else slopes.stride(),
            None if mask is None else (mask.stride(), mask.data_ptr() & 15),
        )  # fmt: skip
        found = None if self._backwards is None else self._backwards.get(key)
        copies_d_out = self._copies(saved, d_out) if found is None else found.copies_d_out
        if copies_d_out:
            d_out = self._new(self.rows.gradient(out)).copy_(d_out)
        targets = self._targets(saved, needed, into)
        if found is None:
            found = _Found(backward_of(self, saved, d_out, targets), copies_d_out)
            with _lock:
                if self._backwards is None or len(self._backwards) >= MAX_REMEMBERED_BACKWARDS:
                    self._backwards = {}
                self._backwards[key] = found
        d_sinks = found.run(saved, d_out, d_lse, targets, wants_sinks=needed.sinks)
        dq, dk, dv, d_scores = targets
        d_mask = None
        if mask is not None and d_scores is not None:
            d_mask = summed_like(mask, d_scores[..., : self.shape.seqlen_k])
        return Gradients(dq if needed.q else None, dk if needed.k else None, dv if needed.v else None, d_sinks, d_mask)

    def _new(self, geometry: Geometry) -> Tensor:
        return self.home.allocate(*geometry, self.home.dtype)

    def _copies(self, saved: Saved, d_out: Tensor) -> bool:
        """Whether d_out is copied into dense memory first: one pass over it costs less than slower kernels for all."""
        return _WEAKNESS[access_of(d_out)] > _WEAKNESS[access_of(saved.q, saved.k, saved.v)]

    def _targets(self, saved: Saved, needed: Needed, into: Into | None) -> Targets:
        gradient = self.rows.gradient
        dq, dk, dv = into or (None, None, None)
        d_mask = None
        if saved.extras.attn_mask is not None and needed.attn_mask:
            d_mask = self._scores_gradient(saved)
        if dq is None and (needed.q or d_mask is not None):
            dq = self._new(gradient(saved.q))
        if dk is None and (needed.k or needed.v):
            dk, dv = self._new(gradient(saved.k)), self._new(gradient(saved.v))
        return Targets(dq, dk, dv, d_mask)

    def _scores_gradient(self, saved: Saved) -> Tensor:
        """Where the gradient of what a mask adds is written, for every row and key; 0 where no kernel writes."""
        geometry = contiguous((*saved.lse.shape, whole_mask_rows(self.shape.seqlen_k)))
        found = self.home.allocate(*geometry, torch.float32)
        return found.zero_() if self.family.bounded_left or self.family.bounded_right else found

    def _check_saved(self, saved: Saved) -> None:
        expected = self.rows.saved_sizes(self.family, self.shape, saved)
        q, k, v, out, lse, _ = saved
        if (q.shape, k.shape, v.shape, out.shape, lse.shape) != expected or not (
            q.dtype is k.dtype is v.dtype is out.dtype is self.home.dtype
            and lse.dtype is torch.float32
            and q.device == k.device == v.device == out.device == lse.device
            and q.get_device() == self.home.index
        ):
            found = ", ".join(
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in (q, k, v, out, lse)
            )
            raise InvalidProblemError(
                f"q, k, v, out and lse came to the backward as {found}; the forward saved "
                f"{', '.join(map(str, expected))}, {self.home.dtype} and lse in float32, all where the call was. "
                "A hook on saved tensors must give back what it was given"
            )
        if self._given is not None and (kinds := self.rows.kinds(saved.extras)) != self._given:
            raise InvalidProblemError(
                f"slopes, sinks, mask, seed or cu_seqlens came to the backward as {kinds}; the forward saved "
                f"{self._given}. A hook on saved tensors must give back what it was given"
            )
