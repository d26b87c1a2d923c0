"""Rows of fixed lengths: tensors (batch, seqlen, heads, head_dim), or with heads before seqlen."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.kernels.fast_launch import Counts
from fa_autotune.ops.arguments import are_right, check_mask, check_seed, check_tensors
from fa_autotune.ops.call import (
    BHSD_STORED_AS_BSHD,
    BSHD,
    NO_EXTRAS,
    TOP_LEFT,
    Call,
    Extras,
    Gradients,
    Needed,
    Saved,
)
from fa_autotune.ops.memory import Geometry, contiguous
from fa_autotune.ops.rows.rows import Bounds, Results, Workspaces
from fa_autotune.ops.tensor_kinds import check_tensor
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference.attention import (
    attention_backward,
    attention_reference,
    backward_statistics,
    signed_probabilities,
)
from fa_autotune.reference.dropout import head_numbers
from fa_autotune.reference.features import Features, sink_gradient, summed_like, window_diagonals
from fa_autotune.space.workspace import dq_acc_size, statistics_size, turns_size


class FixedRows:
    """Every batch has the same rows and keys, all of a tensor's; the layout says in which order axes lie."""

    stack_axis = 2
    is_packed = False

    def __init__(self, layout: int) -> None:
        self._rows_first = layout == BSHD
        self._stored_rows_first = layout == BHSD_STORED_AS_BSHD

    def key(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Any, ...]:
        """Everything but numbers that kernels take at run time."""
        index = q.get_device()
        key: tuple[Any, ...] = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            index, k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            call.layout, call.mask, call.backend, call.tf32,
        )  # fmt: skip
        if index < 0:  # not a GPU; a device's own hash would cost more
            key += (q.device.type, k.device.type, v.device.type)
        if extras is not NO_EXTRAS:
            for tensor in extras:
                key += (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if extras.attn_mask is not None:
                key += (extras.attn_mask.data_ptr() & 15,)
        return key

    def check_kinds(self, q: Any, k: Any, v: Any, extras: Extras) -> None:
        """Dense torch tensors with four axes."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, tensor)
            if tensor.ndim != 4:
                raise InvalidProblemError(
                    f"{name} has shape {tuple(tensor.shape)}, attention takes 4 dimensions: batch, seqlen, heads, "
                    'head_dim (layout="bhsd": heads before seqlen); add what is missing with unsqueeze'
                )

    def check(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        """What `as_extras` gives passes, but for a mask that does not fit; operators may be called with anything."""
        if extras is NO_EXTRAS and are_right(q, k, v, rows_first=self._rows_first):
            return
        self.check_kinds(q, k, v, extras)
        q_view, k_view = self.view(q), self.view(k)
        check_tensors(q_view, k_view, self.view(v))
        batch_size, heads, seqlen_q, _ = q_view.shape
        if extras.cu_seqlens_q is not None or extras.cu_seqlens_k is not None:
            raise InvalidProblemError(
                f"cu_seqlens is given with layout={call.layout}, whose sequences have one length; leave it out, or "
                "pack them: `attention_varlen` takes (total, heads, head_dim)"
            )
        if extras.attn_mask is not None:
            check_mask(extras.attn_mask, (batch_size, heads, seqlen_q, k_view.shape[2]), q)
        check_seed(extras.dropout_seed, call.dropout_p, q.device)
        for name, tensor in (("alibi_slopes", extras.alibi_slopes), ("sinks", extras.sinks)):
            if tensor is not None and (
                tensor.shape != (batch_size, heads) or tensor.dtype != torch.float32 or tensor.device != q.device
            ):
                raise InvalidProblemError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; kernels take float32 "
                    f"{(batch_size, heads)} on {q.device}: expand it"
                )

    def kinds(self, extras: Extras) -> tuple[Any, ...]:
        """Shape, dtype and device of each."""
        return tuple(None if one is None else (tuple(one.shape), one.dtype, one.device) for one in extras)

    def is_empty(self, q: Tensor, k: Tensor, extras: Extras) -> bool:
        """No query, or no key."""
        return q.numel() == 0 or k.numel() == 0

    def view(self, tensor: Tensor) -> Tensor:
        """(batch, heads, seqlen, head_dim)."""
        return tensor.transpose(1, 2) if self._rows_first else tensor

    def row_numbers(self, tensor: Tensor) -> Tensor:
        """As it is: (batch, num_q_heads, seqlen_q)."""
        return tensor

    def extra(self, name: str, tensor: Tensor) -> Tensor:
        """As it is."""
        return tensor

    def counts(self, q: Tensor, k: Tensor, extras: Extras) -> Counts | None:
        """Nothing: all lengths are a plan's."""
        return None

    def results(self, q: Tensor, v: Tensor) -> Results:
        """out as q's axes are ordered, dense in the call's layout; lse (batch, num_q_heads, seqlen_q), contiguous."""
        batch_size, second, third, _ = q.shape
        heads, seqlen_q = (third, second) if self._rows_first else (second, third)
        out = self._dense(batch_size, second, third, v.shape[3])
        return Results(*out, (batch_size, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1))

    def gradient(self, tensor: Tensor) -> Geometry:
        """Dense in the call's layout."""
        first, second, third, last = tensor.shape
        return self._dense(first, second, third, last)

    def _dense(self, first: int, second: int, third: int, last: int) -> Geometry:
        """A tensor of that size: contiguous in the layout that it is stored in."""
        size = first, second, third, last
        if self._stored_rows_first:
            return size, (second * third * last, last, second * last, 1)
        return size, (second * third * last, third * last, last, 1)

    def bounds(self, call: Call, q: Tensor, k: Tensor) -> Bounds:
        """Query row i sees the keys from i + left diagonal to i + diagonal."""
        axis = 1 if self._rows_first else 2
        return window_diagonals(call.window, q.shape[axis], k.shape[axis], top_left=call.mask == TOP_LEFT)

    def shape(self, call: Call, bounds: Bounds, q: Tensor, k: Tensor, extras: Extras) -> AttentionShape:
        """The tensors' own extents."""
        left, right = call.window
        left_diagonal, diagonal = bounds
        batch_size, heads, seqlen_q, _ = q.shape
        _, kv_heads, seqlen_k, _ = k.shape
        if self._rows_first:
            heads, seqlen_q, kv_heads, seqlen_k = seqlen_q, heads, seqlen_k, kv_heads
        return AttentionShape(
            batch_size=batch_size,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window_left=0 if left_diagonal is None else left,
            window_right=0 if diagonal is None else right,
        )

    def saved_sizes(self, family: AttentionFamily, shape: AttentionShape, saved: Saved) -> tuple[tuple[int, ...], ...]:
        """Those of the plan."""
        batch_size, rows, keys = shape.batch_size, shape.seqlen_q, shape.seqlen_k
        of_rows, of_keys = (batch_size, rows, shape.num_q_heads), (batch_size, keys, shape.num_kv_heads)
        if not self._rows_first:
            of_rows, of_keys = (batch_size, shape.num_q_heads, rows), (batch_size, shape.num_kv_heads, keys)
        head_dim, head_dim_v = family.head_dim, family.head_dim_v
        lse = batch_size, shape.num_q_heads, rows
        return (*of_rows, head_dim), (*of_keys, head_dim), (*of_keys, head_dim_v), (*of_rows, head_dim_v), lse

    def workspaces(self, family: AttentionFamily, shape: AttentionShape, counts: Counts | None) -> Workspaces:
        """Of a batch of heads."""
        sizes = statistics_size(shape), turns_size(shape), dq_acc_size(family, shape)
        return Workspaces(*map(contiguous, sizes))

    def delta(self, statistics: Tensor, saved: Saved) -> Tensor:
        """A view."""
        _, delta = statistics.unbind()
        return delta.view(*saved.lse.shape[:2], -1)[..., : saved.lse.shape[2]]

    def subtract(self, statistics: Tensor, d_lse: Tensor, saved: Saved) -> None:
        """In place."""
        self.delta(statistics, saved).sub_(d_lse)

    def lse_without_keys(self, lse: Tensor, extras: Extras) -> Tensor:
        """−inf, or the sinks."""
        if extras.sinks is None:
            return lse.fill_(float("-inf"))
        return lse.copy_(extras.sinks[..., None].expand_as(lse))

    def probabilities(self, q: Tensor, k: Tensor, extras: Extras, call: Call, maxima: tuple[Any, Any]) -> Tensor:
        """Of all rows and keys."""
        said = self._said(q, k, extras, call)
        return signed_probabilities(self.view(q), self.view(k), **said)

    def reference_forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) of views (batch, heads, seqlen, head_dim)."""
        return attention_reference(self.view(q), self.view(k), self.view(v), **self._said(q, k, extras, call))

    def reference_backward(
        self, saved: Saved, call: Call, d_out: Tensor, d_lse: Tensor | None, needed: Needed
    ) -> Gradients:
        """Exact, of views (batch, heads, seqlen, head_dim)."""
        q, k, v, extras = saved.q, saved.k, saved.v, saved.extras
        views = self.view(q), self.view(k), self.view(v), self.view(d_out)
        said = self._said(q, k, extras, call)
        dq, dk, dv, d_scores = attention_backward(*views, d_lse, **said)
        d_sinks = d_mask = None
        if extras.sinks is not None and needed.sinks:
            lse, delta = backward_statistics(*views, **said)
            d_sinks = sink_gradient(extras.sinks, lse, delta if d_lse is None else delta - d_lse)
        if extras.attn_mask is not None and needed.attn_mask:
            d_mask = summed_like(extras.attn_mask, d_scores)
        return Gradients(dq, dk, dv, d_sinks, d_mask)

    def features(self, q: Tensor, k: Tensor, extras: Extras, call: Call) -> tuple[Features, int | None]:
        """(features, diagonal) of a call, as the reference takes them."""
        left_diagonal, diagonal = self.bounds(call, q, k)
        q_view = self.view(q)
        features = Features(
            left_diagonal=left_diagonal,
            softcap=call.softcap,
            alibi_slopes=extras.alibi_slopes,
            sinks=extras.sinks,
            attn_mask=extras.attn_mask,
            dropout_p=call.dropout_p,
            dropout_seed=extras.dropout_seed,
            key_offset=self.view(k).shape[2] - q_view.shape[2],
        )
        if extras.dropout_seed is not None:
            batch_size, heads, *_ = q_view.shape
            features = replace(features, head_numbers=head_numbers(batch_size, heads, q.device))
        return features, diagonal

    def _said(self, q: Tensor, k: Tensor, extras: Extras, call: Call) -> dict[str, Any]:
        features, diagonal = self.features(q, k, extras, call)
        return {"softmax_scale": call.scale_for(q), "diagonal": diagonal, "features": features}
