"""The generated kernels of one kind of call, bound to its shapes and strides: a forward, and backwards as they come.

What is left to a call is to allocate its results and launch.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_autotune.dispatch.loaded_kernels import INTERPRETER_INDEX, dispatcher_of, kernel_for
from fa_autotune.errors import InvalidProblemError, NoKernelError
from fa_autotune.kernels.fast_launch import bind
from fa_autotune.ops.arguments import (
    ALIBI,
    DTYPES,
    FULL,
    MASK,
    OPEN,
    SEED,
    SINKS,
    TF32,
    TOP_LEFT,
    UNORDERED,
    WINDOW,
    Extras,
    extra_of,
    mask_options,
)
from fa_autotune.ops.backward import Backward, BackwardCall, bind_backward
from fa_autotune.ops.memory import (
    access_of,
    allocator,
    contiguous,
    dense,
    heads_first,
    lse_geometry,
    out_size,
    quad,
    sketch,
)
from fa_autotune.problem.family import Access, AttentionFamily, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.reference.features import Features, sink_gradient, summed_like, window_diagonals
from fa_autotune.space.estimates import WIDEST_PIECE
from fa_autotune.space.workspace import whole_mask_rows

MAX_REMEMBERED_BACKWARDS = 16  # of one kind of call: one for each way that its gradient lies in memory

Saved = tuple[Any, ...]  # q, k, v, out, lse, and the extras
GRADIENTS = ("q", "k", "v", "sinks", "attn_mask")
Needed = tuple[bool, bool, bool, bool, bool]  # which of them
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Into = tuple[Tensor | None, Tensor, Tensor]  # where gradients are to be written: dq (None: allocate), dk, dv

_WEAKNESS = {access: weakness for weakness, access in enumerate(Access)}
_lock = threading.Lock()
_current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class CallArguments(NamedTuple):
    """What a call says beside its tensors: the arguments of the operators.

    The window's sizes count where the mask is WINDOW.
    """

    softmax_scale: float | None
    mask: int
    layout: int
    backend: int
    window_left: int = OPEN
    window_right: int = OPEN
    softcap: float = 0.0
    dropout_p: float = 0.0

    @property
    def runs(self) -> int:
        """REFERENCE, GENERATED or UNORDERED."""
        return self.backend & ~TF32

    @property
    def window(self) -> tuple[int, int]:
        """Keys that a row sees before and after its own, OPEN for all."""
        if self.mask == WINDOW:
            return self.window_left, self.window_right
        return OPEN, OPEN if self.mask == FULL else 0

    def bounds(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
        """(left diagonal, diagonal): query row i sees the keys from i + left diagonal to i + diagonal.

        None where a side hides no key.
        """
        return window_diagonals(self.window, seqlen_q, seqlen_k, top_left=self.mask == TOP_LEFT)

    def features(self, seqlen_q: int, seqlen_k: int, extras: Extras) -> tuple[Features, int | None]:
        """(features, diagonal) of a call on tensors of such lengths."""
        left_diagonal, diagonal = self.bounds(seqlen_q, seqlen_k)
        features = Features(
            left_diagonal=left_diagonal,
            softcap=self.softcap,
            alibi_slopes=extra_of(extras, ALIBI),
            sinks=extra_of(extras, SINKS),
            attn_mask=extra_of(extras, MASK),
            dropout_p=self.dropout_p,
            dropout_seed=extra_of(extras, SEED),
            key_offset=seqlen_k - seqlen_q,
        )
        return features, diagonal


# The same as a plain tuple, which costs a call less to make.
Call = tuple[float | None, int, int, int, int, int, float, float]


def gradient_refusal(problem: AttentionProblem, index: int) -> str | None:
    """Why no kernel of a GPU gives the gradients of a forward's call; asked for the head dims where that may be so."""
    if max(problem.family.head_dim, problem.family.head_dim_v) <= WIDEST_PIECE:
        return None
    try:
        for kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ):
            dispatcher_of(index).peek(problem.for_pass(kernel_pass))
    except NoKernelError as error:
        return (
            f"{error}; gradients are served up to head_dim {WIDEST_PIECE} on every GPU: call this under "
            "torch.no_grad(), or split the heads"
        )
    return None


class KernelPlan:
    """How calls of one kind run on generated kernels."""

    def __init__(self, arguments: CallArguments, q: Tensor, k: Tensor, v: Tensor, extras: Extras = ()) -> None:
        """Choose, load and bind the forward's kernel; NoKernelError, CompileError, LaunchError."""
        self.arguments = arguments
        layout = arguments.layout
        q_view, k_view, v_view = (heads_first(tensor, layout) for tensor in (q, k, v))
        batch_size, num_q_heads, seqlen_q, head_dim = q_view.shape
        _, num_kv_heads, seqlen_k, head_dim_v = v_view.shape
        widest = max(head_dim, head_dim_v)
        self._scale = head_dim**-0.5 if arguments.softmax_scale is None else arguments.softmax_scale
        features, self._diagonal = arguments.features(seqlen_q, seqlen_k, extras)
        no_tensors: dict[str, Any] = dict.fromkeys(("alibi_slopes", "sinks", "attn_mask", "dropout_seed"))
        self._features = replace(features, **no_tensors)  # no tensor of a call is kept
        left_diagonal = features.left_diagonal
        window_left, window_right = arguments.window
        self._dtype = q.dtype
        self._allocate = allocator(q.device)
        self._index = q.device.index if q.is_cuda else INTERPRETER_INDEX
        self._lse = lse_geometry(q, layout)
        self._out = dense(out_size(q, v), layout)
        self._gradients = [dense(quad(tensor), layout) for tensor in (q, k, v)]
        self._saved_shapes = (q.shape, k.shape, v.shape, self._out[0], self._lse[0])
        self._backwards: dict[tuple[Any, ...], tuple[Backward, bool]] = {}
        self._problem = AttentionProblem(
            family=AttentionFamily(
                dtype=DTYPES[q.dtype],
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                bounded_right=self._diagonal is not None,
                bounded_left=left_diagonal is not None,
                softcap=arguments.softcap != 0.0,
                alibi=features.alibi_slopes is not None,
                sinks=features.sinks is not None,
                **mask_options(features.attn_mask, q.dtype),
                dropout=features.dropout_seed is not None,
                tf32=arguments.backend & TF32 != 0 and q.dtype is torch.float32 and widest <= WIDEST_PIECE,
                access=access_of(q_view, k_view, v_view),
            ),
            shape=AttentionShape(
                batch_size=batch_size,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                window_left=0 if left_diagonal is None else window_left,
                window_right=0 if self._diagonal is None else window_right,
            ),
        )
        out, lse = sketch(self._out, self._dtype), sketch(self._lse, torch.float32)
        self._extras = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in extras]
        more = features.tensors(self._problem.family)
        tensors = (q_view, k_view, v_view, heads_first(out, layout), lse, *more)
        numbers = (self._scale, self._diagonal, *self._features.numbers(self._problem.family))
        self._launch = bind(kernel_for(self._problem, self._index), tensors, *numbers)
        self.gradient_refusal = gradient_refusal(self._problem, self._index)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), out dense in the call's layout."""
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.forward(q, k, v, *extras)
        out = self._allocate(*self._out, self._dtype)
        lse = self._allocate(*self._lse, torch.float32)
        if extras:
            self._launch(q, k, v, out, lse, *(tensor for tensor in extras if tensor is not None))
        else:
            self._launch(q, k, v, out, lse)
        return out, lse

    def backward(
        self, saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, needed: Needed, into: Into | None = None
    ) -> Gradients:
        """The needed gradients; the saved tensors may have come back with other strides and addresses (from hooks).

        InvalidProblemError if they came back with another shape or dtype.
        """
        if self._is_elsewhere():
            with torch.cuda.device(self._index):
                return self.backward(saved, d_out, d_lse, needed, into)
        q, k, v, out, lse = saved[:5]
        self._check_saved(saved)
        if not lse.is_contiguous() or lse.data_ptr() & 15:
            lse = lse.clone(memory_format=torch.contiguous_format)
            saved = (q, k, v, out, lse, *saved[5:])
        alibi_slopes, sinks, mask, seed = (extra_of(saved[5:], place) for place in (ALIBI, SINKS, MASK, SEED))
        if d_out is None:
            d_out = torch.zeros_like(out)
        key = (
            q.stride(), k.stride(), v.stride(), out.stride(), d_out.stride(), needed,
            into and into[1].stride(),  # parts of one new tensor, so that one tells of all
            (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | d_out.data_ptr()) & 15,
            None if alibi_slopes is None else alibi_slopes.stride(),
            None if mask is None else (mask.stride(), mask.data_ptr() & 15),
        )  # fmt: skip
        found = self._backwards.get(key)
        if found is None:
            found = self._new_backward(saved, d_out, needed, into)
            with _lock:
                if len(self._backwards) >= MAX_REMEMBERED_BACKWARDS:
                    self._backwards.clear()
                self._backwards[key] = found
        run, copies_d_out = found
        if copies_d_out:
            d_out = self._allocate(*self._out, self._dtype).copy_(d_out)
        dq, dk, dv = into or (None, None, None)
        if dq is None and needed[0]:
            dq = self._allocate(*self._gradients[0], self._dtype)
        if dk is None and (needed[1] or needed[2]):
            dk = self._allocate(*self._gradients[1], self._dtype)
            dv = self._allocate(*self._gradients[2], self._dtype)
        scores_gradient = self._scores_gradient() if mask is not None and needed[4] else None
        if scores_gradient is not None and dq is None:
            dq = self._allocate(*self._gradients[0], self._dtype)
        more = tuple(tensor for tensor in (alibi_slopes, mask, seed) if tensor is not None)
        delta = run(q, k, v, out, lse, d_out, d_lse, dq, dk, dv, *more, d_mask=scores_gradient)
        d_sinks = sink_gradient(sinks, lse, delta) if sinks is not None and needed[3] else None
        d_mask = None
        if mask is not None and scores_gradient is not None:
            d_mask = summed_like(mask, scores_gradient[..., : self._problem.shape.seqlen_k])
        return dq if needed[0] else None, dk if needed[1] else None, dv if needed[2] else None, d_sinks, d_mask

    def _scores_gradient(self) -> Tensor:
        """Where the gradient of what a mask adds is written, for every row and key; 0 where no kernel writes."""
        geometry = contiguous((*self._lse[0], whole_mask_rows(self._problem.shape.seqlen_k)))
        found = self._allocate(*geometry, torch.float32)
        family = self._problem.family
        return found.zero_() if family.bounded_left or family.bounded_right else found

    def _check_saved(self, saved: Saved) -> None:
        q, k, v, out, lse = saved[:5]
        if (q.shape, k.shape, v.shape, out.shape, lse.shape) != self._saved_shapes or not (
            q.dtype is k.dtype is v.dtype is out.dtype is self._dtype and lse.dtype is torch.float32
        ):
            found = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in saved[:5])
            raise InvalidProblemError(
                f"q, k, v, out and lse came to the backward as {found}; the forward saved "
                f"{', '.join(str(tuple(shape)) for shape in self._saved_shapes)}, {self._dtype} and lse in float32. A "
                "hook on saved tensors must give back what it was given"
            )

        for tensor, expected in zip(saved[5:], self._extras, strict=True):
            if tensor is not None and (tensor.shape, tensor.dtype) != expected:
                raise InvalidProblemError(
                    f"slopes, sinks, mask or seed came to the backward as {tuple(tensor.shape)} {tensor.dtype}; the "
                    f"forward saved {expected}. A hook on saved tensors must give back what it was given"
                )

    def _is_elsewhere(self) -> bool:
        return self._index >= 0 and _current_gpu() != self._index

    def _new_backward(self, saved: Saved, d_out: Tensor, needed: Needed, into: Into | None) -> tuple[Backward, bool]:
        """The backward, and whether d_out is to be copied into dense memory first: that one pass over it costs less
        than slower kernels for all."""
        layout = self.arguments.layout
        q, k, v, out, d_out = (heads_first(tensor, layout) for tensor in (*saved[:4], d_out))
        copies = _WEAKNESS[access_of(d_out)] > _WEAKNESS[access_of(q, k, v)]
        if copies:
            d_out = heads_first(sketch(self._out, self._dtype), layout)
        dq, dk, dv = (
            heads_first(sketch(geometry, self._dtype) if target is None else target, layout) if wanted else None
            for geometry, target, wanted in zip(
                self._gradients,
                into or (None, None, None),
                (needed[0] or needed[4], needed[1] or needed[2], needed[1] or needed[2]),
                strict=True,
            )
        )
        call = BackwardCall(
            problem=self._problem,
            index=self._index,
            softmax_scale=self._scale,
            diagonal=self._diagonal,
            features=replace(
                self._features,
                alibi_slopes=extra_of(saved[5:], ALIBI),
                attn_mask=extra_of(saved[5:], MASK),
                dropout_seed=extra_of(saved[5:], SEED),
            ),
            allocate=self._allocate,
            mask_gradient=needed[4],
        )
        unordered = self.arguments.runs == UNORDERED
        return bind_backward(call, q, k, v, out, saved[4], d_out, dq, dk, dv, unordered=unordered), copies
