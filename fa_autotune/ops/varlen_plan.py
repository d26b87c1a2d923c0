"""The generated kernels of one kind of call on sequences in a row: whatever their number and lengths.

Tensors are (total, heads, head_dim), lse is (num_q_heads, total_q). Kernels are bound to all but the totals and the
number of sequences, which come with each launch.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, dispatcher_of, kernel_for
from fa_autotune.errors import InvalidProblemError
from fa_autotune.kernels.fast_launch import Counts, bind_varlen
from fa_autotune.ops.arguments import DTYPES, OPEN, TF32
from fa_autotune.ops.kernel_plan import gradient_refusal
from fa_autotune.ops.memory import access_of, allocator
from fa_autotune.ops.varlen_backward import PackedBackward, delta_of
from fa_autotune.problem.family import Access, AttentionFamily, Pass
from fa_autotune.problem.problem import AttentionProblem, varlen_shape
from fa_autotune.reference.features import Features, sink_gradient
from fa_autotune.space.estimates import WIDEST_PIECE

MAX_REMEMBERED_BACKWARDS = 16  # of one kind of call: one for each way that its gradient lies in memory

Needed = tuple[bool, bool, bool, bool]  # the gradient of q, of k, of v, of sinks
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Into = tuple[Tensor | None, Tensor, Tensor]  # where gradients are to be written: dq (None: allocate), dk, dv

_WEAKNESS = {access: weakness for weakness, access in enumerate(Access)}
_lock = threading.Lock()
_current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class VarlenArguments(NamedTuple):
    """What a call says beside its tensors: the arguments of the operators. A window's side is OPEN where no key is
    hidden; `backend` as in `tensors`; dropout_p is 0 where nothing is dropped."""

    softmax_scale: float | None
    window_left: int
    window_right: int
    softcap: float
    backend: int
    dropout_p: float

    @property
    def runs(self) -> int:
        """REFERENCE or GENERATED."""
        return self.backend & ~TF32

    @property
    def diagonals(self) -> tuple[int | None, int | None]:
        """(left diagonal, diagonal), which count from a sequence's own bottom-right."""
        left, right = self.window_left, self.window_right
        return None if left == OPEN else -left, None if right == OPEN else right


class VarlenTensors(NamedTuple):
    """A call's tensors: cu_seqlens are int32 (sequences + 1), slopes fp32 (sequences, num_q_heads), sinks fp32
    (num_q_heads,), the seed what `dropout.draw_seed` gives."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None

    @property
    def counts(self) -> Counts:
        """How many sequences, rows of q and rows of k there are."""
        return Counts(self.cu_seqlens_q.shape[0] - 1, self.q.shape[0], self.k.shape[0])


def rows_last(tensor: Tensor) -> Tensor:
    """The view (1, heads, total, head_dim) of a call's tensor."""
    return tensor.transpose(0, 1).unsqueeze(0)


def dense_rows(total: int, heads: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of a contiguous tensor (total, heads, columns)."""
    return (total, heads, columns), (heads * columns, columns, 1)


class VarlenPlan:
    """How calls of one kind run on generated kernels; see `varlen_calls.varlen_plan_of` for what makes a kind."""

    def __init__(self, arguments: VarlenArguments, tensors: VarlenTensors) -> None:
        """Choose, load and bind the forward's kernel; NoKernelError, CompileError."""
        self.arguments = arguments
        q, k, v = tensors[:3]
        self._index = q.device.index if q.is_cuda else INTERPRETER_INDEX
        self._dtype = q.dtype
        self._allocate = allocator(q.device)
        self._heads, self._columns = q.shape[1], v.shape[2]
        self._scale = q.shape[2] ** -0.5 if arguments.softmax_scale is None else arguments.softmax_scale
        left_diagonal, self._diagonal = arguments.diagonals
        has_tf32 = q.dtype is torch.float32 and max(q.shape[2], v.shape[2]) <= WIDEST_PIECE
        # No tensor of a call is kept.
        self._features = Features(left_diagonal=left_diagonal, softcap=arguments.softcap, dropout_p=arguments.dropout_p)
        self._problem = AttentionProblem(
            family=AttentionFamily(
                dtype=DTYPES[q.dtype],
                head_dim=q.shape[2],
                head_dim_v=v.shape[2],
                bounded_right=self._diagonal is not None,
                bounded_left=left_diagonal is not None,
                softcap=arguments.softcap != 0.0,
                alibi=tensors.alibi_slopes is not None,
                sinks=tensors.sinks is not None,
                dropout=tensors.dropout_seed is not None,
                tf32=has_tf32 and arguments.backend & TF32 != 0,
                varlen=True,
                access=access_of(*map(rows_last, (q, k, v))),
            ),
            shape=varlen_shape(
                **tensors.counts._asdict(),
                num_q_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                window=(max(0, arguments.window_left), max(0, arguments.window_right)),
            ),
        )
        self._backwards: dict[tuple[Any, ...], tuple[_Backward | PackedBackward, bool]] = {}
        out, lse = self._sketches(tensors.counts)
        self._launch = self._bound(Pass.FWD, self._problem.family.access, tensors, q, k, v, out, lse)
        self.gradient_refusal = gradient_refusal(self._problem, self._index)

    def forward(self, tensors: VarlenTensors) -> tuple[Tensor, Tensor]:
        """(out, lse), both contiguous."""
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.forward(tensors)
        q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks, seed = tensors
        counts = tensors.counts
        total, heads = counts.total_q, self._heads
        out = self._allocate(*dense_rows(total, heads, self._columns), self._dtype)
        lse = self._allocate((heads, total), (total, 1), torch.float32)
        if slopes is sinks is seed is None:
            self._launch(counts, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        else:
            more = (tensor for tensor in (slopes, sinks, seed) if tensor is not None)
            self._launch(counts, q, k, v, out, lse, *more, cu_seqlens_q, cu_seqlens_k)
        return out, lse

    def backward(
        self,
        tensors: VarlenTensors,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        needed: Needed,
        into: Into | None = None,
    ) -> Gradients:
        """The needed gradients, contiguous; the tensors may have come back with other strides (from hooks).

        InvalidProblemError if they came back with another shape or dtype.
        """
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.backward(tensors, out, lse, d_out, d_lse, needed, into)
        self._check_saved(tensors, out, lse)
        q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks, seed = tensors
        if not lse.is_contiguous() or lse.data_ptr() & 15:
            lse = lse.clone(memory_format=torch.contiguous_format)
        if d_out is None:
            d_out = torch.zeros_like(out)
        run, copies_d_out = self._backward_of(tensors, out, d_out, needed, into)
        if copies_d_out:
            d_out = self._allocate(*dense_rows(*out.shape), self._dtype).copy_(d_out)
        dq, dk, dv = into or (None, None, None)
        if dq is None and needed[0]:
            dq = self._allocate(*dense_rows(*q.shape), self._dtype)
        if dk is None and (needed[1] or needed[2]):
            dk = self._allocate(*dense_rows(*k.shape), self._dtype)
            dv = self._allocate(*dense_rows(*v.shape), self._dtype)
        counts, wants_sinks = tensors.counts, sinks is not None and needed[3]
        lengths = cu_seqlens_q, cu_seqlens_k
        if isinstance(run, PackedBackward):
            assert dq is not None
            assert dk is not None
            assert dv is not None
            statistics = run(counts, q, k, v, *lengths, out, lse, d_out, d_lse, dq, dk, dv)
            delta = delta_of(statistics, cu_seqlens_q, counts.total_q) if wants_sinks else lse
        else:
            delta = self._allocate((self._heads, counts.total_q), (counts.total_q, 1), torch.float32)
            run.delta(counts, out, d_out, delta)
            if d_lse is not None:
                delta.sub_(d_lse)
            more = tuple(tensor for tensor in (slopes, seed, *lengths) if tensor is not None)
            if run.dkdv is not None:
                run.dkdv(counts, q, k, v, d_out, lse, delta, dk, dv, *more)
            if run.dq is not None:
                run.dq(counts, q, k, v, d_out, lse, delta, dq, *more)
        d_sinks = sink_gradient(sinks, lse, delta) if sinks is not None and wants_sinks else None
        return dq, dk if needed[1] else None, dv if needed[2] else None, d_sinks

    def _is_elsewhere(self) -> bool:
        return self._index >= 0 and _current_gpu() != self._index

    def _sketches(self, counts: Counts) -> tuple[Tensor, Tensor]:
        """What binding needs of out and lse before they are allocated."""
        out = torch.empty(counts.total_q, self._heads, self._columns, dtype=self._dtype, device="meta")
        return out, torch.empty(self._heads, counts.total_q, device="meta")

    def _bound(self, kernel_pass: Pass, access: Access, call: VarlenTensors, *tensors: Tensor) -> Callable[..., None]:
        """`_bound_to` tensors of a call; those of two dimensions are statistics."""
        views = (rows_last(tensor) if tensor.ndim == 3 else tensor.unsqueeze(0) for tensor in tensors)
        return self._bound_to(call, kernel_pass, access, *views)

    def _bound_to(self, call: VarlenTensors, kernel_pass: Pass, access: Access, *views: Tensor) -> Callable[..., None]:
        """The kernel that dispatch chooses for a pass, bound to tensors as it takes them."""
        problem = self._problem.for_pass(kernel_pass)
        problem = replace(problem, family=replace(problem.family, access=access))
        numbers: tuple[float | int | None, ...] = ()
        more: tuple[Tensor, ...] = ()
        if kernel_pass is not Pass.BWD_DELTA:
            if kernel_pass is not Pass.BWD_PREPROCESS:
                numbers = (self._scale, self._diagonal, *self._features.numbers(problem.family))
            sinks = None if call.sinks is None else call.sinks.expand(2, self._heads)  # for any number of sequences
            features = replace(
                self._features,
                alibi_slopes=call.alibi_slopes,
                sinks=sinks,
                dropout_seed=call.dropout_seed,
                cu_seqlens_q=call.cu_seqlens_q,
                cu_seqlens_k=call.cu_seqlens_k,
            )
            more = features.tensors(problem.family)
        gpu = self._index if self._index >= 0 else None
        return bind_varlen(kernel_for(problem, self._index), (*views, *more), *numbers, gpu=gpu)

    def _check_saved(self, tensors: VarlenTensors, out: Tensor, lse: Tensor) -> None:
        q, k, v = tensors[:3]
        family = self._problem.family
        heads, kv_heads = self._heads, self._problem.shape.num_kv_heads
        expected = (
            (q.shape[0], heads, family.head_dim),
            (k.shape[0], kv_heads, family.head_dim),
            (k.shape[0], kv_heads, family.head_dim_v),
            (q.shape[0], heads, family.head_dim_v),
            (heads, q.shape[0]),
        )
        given = (q, k, v, out, lse)
        if tuple(tuple(tensor.shape) for tensor in given) != expected or not (
            q.dtype is k.dtype is v.dtype is out.dtype is self._dtype and lse.dtype is torch.float32
        ):
            found = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given)
            raise InvalidProblemError(
                f"q, k, v, out and lse came to the backward as {found}; the forward saved "
                f"{', '.join(map(str, expected))}, {self._dtype} and lse in float32. A hook on saved tensors must give "
                "back what it was given"
            )

    def _backward_of(
        self, tensors: VarlenTensors, out: Tensor, d_out: Tensor, needed: Needed, into: Into | None
    ) -> tuple["_Backward | PackedBackward", bool]:
        """The launches of a backward, and whether d_out is to be copied into dense memory first."""
        q, k, v, *_, slopes, _, _ = tensors
        key = (
            q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(), needed,
            into and into[1].stride(),  # parts of one new tensor, so that one tells of all
            (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | d_out.data_ptr()) & 15,
            None if slopes is None else slopes.stride(),
        )  # fmt: skip
        found = self._backwards.get(key)
        if found is None:
            found = self._new_backward(tensors, out, d_out, needed, into)
            with _lock:
                if len(self._backwards) >= MAX_REMEMBERED_BACKWARDS:
                    self._backwards.clear()
                self._backwards[key] = found
        return found

    def _new_backward(
        self, tensors: VarlenTensors, out: Tensor, d_out: Tensor, needed: Needed, into: Into | None
    ) -> tuple["_Backward | PackedBackward", bool]:
        q, k, v = tensors[:3]
        copies = _WEAKNESS[access_of(rows_last(d_out))] > _WEAKNESS[access_of(*map(rows_last, (q, k, v)))]
        _, statistic = self._sketches(tensors.counts)
        if copies:
            d_out = torch.empty(d_out.shape, dtype=self._dtype, device="meta")
        wanted = (needed[0], needed[1] or needed[2], needed[1] or needed[2])
        dq, dk, dv = (
            (torch.empty(one.shape, dtype=self._dtype, device="meta") if target is None else target) if need else None
            for one, target, need in zip((q, k, v), into or (None, None, None), wanted, strict=True)
        )
        access, inputs = access_of(*map(rows_last, (q, k, v, d_out))), (q, k, v, d_out, statistic, statistic.clone())
        of_rows = access_of(rows_last(out), rows_last(d_out))
        if dq is not None and dk is not None and dv is not None and self._is_fused(access, dk, dv):
            views = [rows_last(tensor) for tensor in (q, k, v, out, d_out, dq, dk, dv)]
            return self._packed(tensors, statistic.unsqueeze(0), *views), copies
        return _Backward(
            delta=self._bound(Pass.BWD_DELTA, of_rows, tensors, out, d_out, statistic),
            dkdv=None if dk is None or dv is None else self._bound(Pass.BWD_DKDV, access, tensors, *inputs, dk, dv),
            dq=None if dq is None else self._bound(Pass.BWD_DQ, access, tensors, *inputs, dq),
        ), copies

    def _is_fused(self, access: Access, dk: Tensor, dv: Tensor) -> bool:
        """Whether the fused way computes a backward of all gradients, whose inputs are read so."""
        if not access is access_of(rows_last(dk), rows_last(dv)) is Access.TMA:
            return False
        problem = replace(self._problem, family=replace(self._problem.family, access=access))
        return dispatcher_of(self._index).backward_choice(problem).way is BackwardWay.FUSED

    def _packed(
        self, call: VarlenTensors, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> PackedBackward:  # fmt: skip
        family = self._problem.family
        bind = partial(self._bound_to, call)
        return PackedBackward(bind, family, self._allocate, call.counts, q, k, v, out, lse, d_out, dq, dk, dv)


@dataclass(frozen=True, slots=True)
class _Backward:
    """The launches of a backward, None for what is not needed."""

    delta: Callable[..., None]
    dkdv: Callable[..., None] | None
    dq: Callable[..., None] | None
