"""Packed sequences: rows of any lengths one after another, tensors (total, heads, head_dim), lse (heads, total_q).

Lengths stay on the device, in cu_seqlens. The number of sequences and the totals are no part of a plan, but in which
powers of two they and the mean lengths lie: a stream of ever new totals makes few plans.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.kernels.fast_launch import Counts
from fa_autotune.ops.arguments import check_seed, check_tensors
from fa_autotune.ops.call import BOTTOM_RIGHT, OPEN, TOP_LEFT, Call, Extras, Gradients, Needed, Saved
from fa_autotune.ops.memory import Geometry, contiguous
from fa_autotune.ops.rows.rows import Bounds, Results, Workspaces
from fa_autotune.ops.tensor_kinds import check_tensor
from fa_autotune.ops.torch_private import is_fake
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionShape, packed_shape
from fa_autotune.reference.dropout import head_numbers
from fa_autotune.reference.features import Features, sink_gradient
from fa_autotune.reference.packed import (
    PackedCall,
    packed_gradients,
    packed_probabilities,
    packed_reference,
    packed_statistics,
    padded_places,
    sequences_of,
)
from fa_autotune.space.workspace import (
    STATISTIC_ROWS,
    packed_dq_acc_size,
    packed_statistics_size,
    packed_turns_size,
)

MAX_TOTAL = 2**30  # positions and their differences are 32-bit in every kernel


class PackedRows:
    """Sequence b has rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1, and keys by cu_seqlens_k."""

    stack_axis = 1
    is_packed = True

    def key(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Any, ...]:
        """Everything but numbers, totals, and how many sequences there are; what these must keep is checked."""
        slopes, sinks, mask, seed, cu_seqlens_q, cu_seqlens_k = extras
        if cu_seqlens_q is None or cu_seqlens_k is None:
            self.check_kinds(q, k, v, extras)
            raise AssertionError("check_kinds refuses a packed call without cu_seqlens")
        total_q, heads, head_dim = q.shape
        total_k, kv_heads, key_dim = k.shape
        num_sequences = cu_seqlens_q.shape[0] - 1
        count = num_sequences or 1
        index = q.get_device()
        key: tuple[Any, ...] = (
            heads, head_dim, kv_heads, key_dim, v.shape[1:], q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
            v.dtype, index, k.get_device(), v.get_device(), (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            # Powers of two that hold the number of sequences, of which 0 is a kind of its own, and the mean lengths.
            (num_sequences - 1).bit_length(), (((total_q or 1) - 1) // count).bit_length(),
            (((total_k or 1) - 1) // count).bit_length(), num_sequences == 0,
            cu_seqlens_q.dtype, cu_seqlens_q.stride(), cu_seqlens_q.get_device(),
            cu_seqlens_k is cu_seqlens_q
            or (cu_seqlens_k.dtype, cu_seqlens_k.stride(), cu_seqlens_k.get_device()),
            call.layout, call.mask, call.backend, call.tf32,
        )  # fmt: skip
        agree = (
            num_sequences >= 0
            and total_k == v.shape[0]
            and total_q <= MAX_TOTAL >= total_k
            and (cu_seqlens_k is cu_seqlens_q or cu_seqlens_k.shape == cu_seqlens_q.shape)
            and (slopes is None or slopes.shape == (num_sequences, heads))
            and (sinks is None or sinks.shape == (heads,))
            and mask is None
        )
        if not agree:
            self.check(q, k, v, extras, call)
        if index < 0:  # not a GPU; a device's own hash would cost more
            key += tuple(tensor.device.type for tensor in (q, k, v, cu_seqlens_q, cu_seqlens_k))
        for tensor in (slopes, sinks, seed):
            key += (None,) if tensor is None else (tensor.ndim, tensor.stride(), tensor.dtype, tensor.device)
        if seed is not None:
            key += (seed.shape,)
        return key

    def check_kinds(self, q: Any, k: Any, v: Any, extras: Extras) -> None:
        """Dense torch tensors with three axes, and cu_seqlens."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, tensor)
            if tensor.ndim != 3:
                raise InvalidProblemError(
                    f"{name} has shape {tuple(tensor.shape)}, attention of packed sequences takes 3 dimensions: total, "
                    "heads, head_dim; a batch of one length is for `attention`"
                )
        for name, tensor in (("cu_seqlens_q", extras.cu_seqlens_q), ("cu_seqlens_k", extras.cu_seqlens_k)):
            check_tensor(name, tensor, beside=True)
            assert tensor is not None  # which check_tensor refuses
            if tensor.ndim != 1 or tensor.shape[0] == 0 or tensor.dtype != torch.int32 or tensor.stride() != (1,):
                raise InvalidProblemError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} with stride {tensor.stride()}; it is int32 "
                    "(sequences + 1,), contiguous: where each sequence starts, and the last one's end; write it as "
                    f"{name}.to(torch.int32).contiguous()"
                )
            if tensor.device != q.device:
                raise InvalidProblemError(
                    f"{name} is on {tensor.device} and q on {q.device}; move one of them (kernels read it there, so "
                    "that nothing waits for the host)"
                )

    def check(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        """What lies in cu_seqlens is not read: that would wait for the GPU."""
        self.check_kinds(q, k, v, extras)
        check_tensors(self.view(q), self.view(k), self.view(v))
        count, count_k = (starts.shape[0] - 1 for starts in _starts(extras))
        if count != count_k:
            raise InvalidProblemError(
                f"cu_seqlens_q says {count} sequences and cu_seqlens_k {count_k}; they must be equal: a sequence may "
                "have no rows or no keys"
            )
        for name, total in (("q", q.shape[0]), ("k", k.shape[0])):
            if total > MAX_TOTAL:
                raise InvalidProblemError(
                    f"{name} has {total} rows, kernels count up to {MAX_TOTAL}; split the sequences"
                )
        heads = q.shape[1]
        of_heads = ("alibi_slopes", extras.alibi_slopes, (count, heads)), ("sinks", extras.sinks, (heads,))
        for name, tensor, size in of_heads:
            if tensor is not None and (
                tuple(tensor.shape) != size or tensor.dtype != torch.float32 or tensor.device != q.device
            ):
                raise InvalidProblemError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; kernels take float32 {size} "
                    f"on {q.device}: cast and expand it"
                )
        if extras.attn_mask is not None:
            raise InvalidProblemError("attn_mask is given with cu_seqlens; masks of packed sequences are not served")
        if call.mask == TOP_LEFT:
            raise InvalidProblemError(
                f"mask={call.mask} (top-left) is given with cu_seqlens; packed sequences are aligned bottom-right: "
                f"pass {BOTTOM_RIGHT}"
            )
        check_seed(extras.dropout_seed, call.dropout_p, q.device)

    def kinds(self, extras: Extras) -> tuple[Any, ...]:
        """Dtype and device of each, the seed's shape, and whether all others are for the same number of sequences."""
        starts_q, starts_k = _starts(extras)
        slopes, seed = extras.alibi_slopes, extras.dropout_seed
        return (
            *(None if one is None else (one.ndim, one.dtype, one.device) for one in extras),
            None if seed is None else tuple(seed.shape),
            starts_q.is_contiguous() and starts_k.is_contiguous(),
            starts_q.shape == starts_k.shape and (slopes is None or slopes.shape[0] == starts_q.shape[0] - 1),
        )

    def is_empty(self, q: Tensor, k: Tensor, extras: Extras) -> bool:
        """No sequence, or no head: rows of none."""
        starts_q, _ = _starts(extras)
        return q.shape[1] == 0 or starts_q.shape[0] == 1

    def view(self, tensor: Tensor) -> Tensor:
        """(1, heads, total, head_dim)."""
        return tensor.transpose(0, 1).unsqueeze(0)

    def row_numbers(self, tensor: Tensor) -> Tensor:
        """(1, num_q_heads, total_q)."""
        return tensor.unsqueeze(0)

    def extra(self, name: str, tensor: Tensor) -> Tensor:
        """Sinks as (sequences, num_q_heads), for any number of sequences."""
        return tensor.expand(2, -1) if name == "sinks" else tensor

    def counts(self, q: Tensor, k: Tensor, extras: Extras) -> Counts | None:
        """How many sequences, rows of q and rows of k there are."""
        starts_q, _ = _starts(extras)
        return Counts(starts_q.shape[0] - 1, q.shape[0], k.shape[0])

    def results(self, q: Tensor, v: Tensor) -> Results:
        """out (total_q, num_q_heads, head_dim_v) and lse (num_q_heads, total_q), contiguous."""
        total, heads, _ = q.shape
        columns = v.shape[2]
        return Results((total, heads, columns), (heads * columns, columns, 1), (heads, total), (total, 1))

    def gradient(self, tensor: Tensor) -> Geometry:
        """Contiguous."""
        total, heads, columns = tensor.shape
        return (total, heads, columns), (heads * columns, columns, 1)

    def bounds(self, call: Call, q: Tensor, k: Tensor) -> Bounds:
        """Both count from each sequence's own bottom-right; a side past every key is an open one."""
        left, right = (OPEN if side >= MAX_TOTAL else side for side in call.window)
        return None if left == OPEN else -left, None if right == OPEN else right

    def shape(self, call: Call, bounds: Bounds, q: Tensor, k: Tensor, extras: Extras) -> AttentionShape:
        """Of the number of sequences and their mean lengths, each in powers of two."""
        left_diagonal, diagonal = bounds
        starts_q, _ = _starts(extras)
        return packed_shape(
            num_sequences=starts_q.shape[0] - 1,
            total_q=q.shape[0],
            total_k=k.shape[0],
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            window=(-(left_diagonal or 0), diagonal or 0),
        )

    def saved_sizes(self, family: AttentionFamily, shape: AttentionShape, saved: Saved) -> tuple[tuple[int, ...], ...]:
        """With the totals that came."""
        total_q, total_k, heads = saved.q.shape[0], saved.k.shape[0], shape.num_q_heads
        of_rows, of_keys = (total_q, heads), (total_k, shape.num_kv_heads)
        head_dim, head_dim_v = family.head_dim, family.head_dim_v
        return (
            (*of_rows, head_dim),
            (*of_keys, head_dim),
            (*of_keys, head_dim_v),
            (*of_rows, head_dim_v),
            (heads, total_q),
        )

    def workspaces(self, family: AttentionFamily, shape: AttentionShape, counts: Counts | None) -> Workspaces:
        """Each sequence's rows are padded to whole blocks."""
        assert counts is not None
        packed = shape.num_q_heads, counts.num_sequences, counts.total_q
        sizes = packed_statistics_size(*packed), packed_turns_size(*packed), packed_dq_acc_size(family, *packed)
        return Workspaces(*map(contiguous, sizes))

    def delta(self, statistics: Tensor, saved: Saved) -> Tensor:
        """Gathered: (num_q_heads, total_q)."""
        _, delta = statistics.unbind()
        return delta[:, _places(saved)]

    def subtract(self, statistics: Tensor, d_lse: Tensor, saved: Saved) -> None:
        """Scattered."""
        places, (_, delta) = _places(saved), statistics.unbind()
        delta[:, places] = delta[:, places] - d_lse

    def lse_without_keys(self, lse: Tensor, extras: Extras) -> Tensor:
        """−inf, but the sink of rows that belong to a sequence."""
        lse.fill_(float("-inf"))
        if extras.sinks is None:
            return lse
        starts_q, _ = _starts(extras)
        is_row = torch.arange(lse.shape[1], device=lse.device) < starts_q.max()
        return lse.copy_(torch.where(is_row, extras.sinks[:, None], lse))

    def probabilities(self, q: Tensor, k: Tensor, extras: Extras, call: Call, maxima: tuple[Any, Any]) -> Tensor:
        """Of as many rows and keys as `maxima` say, or as the longest sequences have: it waits for the device."""
        said = None
        if not (torch.compiler.is_compiling() or q.device.type == "meta" or is_fake(q)):
            with suppress(RuntimeError):  # of a trace, which takes no values out
                said = self._said(q, k, extras, call)
        if said is None:
            raise UnsupportedError(
                "S_dmask of packed sequences has the lengths that cu_seqlens holds, which a graph, or a tensor without "
                "memory, can't tell; leave return_attn_probs out there"
            )
        return packed_probabilities(self.view(q), self.view(k), said, maxima)

    def reference_forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Tensor, Tensor]:
        """Sequence by sequence: it waits for the device."""
        out, lse = packed_reference(self.view(q), self.view(k), self.view(v), self._said(q, k, extras, call))
        return out, lse.squeeze(0)

    def reference_backward(
        self, saved: Saved, call: Call, d_out: Tensor, d_lse: Tensor | None, needed: Needed
    ) -> Gradients:
        """Sequence by sequence: it waits for the device."""
        said = self._said(saved.q, saved.k, saved.extras, call)
        views = self.view(saved.q), self.view(saved.k), self.view(saved.v), self.view(d_out)
        d_rows = None if d_lse is None else d_lse.unsqueeze(0)
        dq, dk, dv = packed_gradients(*views, d_rows, said)
        d_sinks, sinks = None, saved.extras.sinks
        if sinks is not None and needed.sinks:
            lse, delta = packed_statistics(*views, said)
            delta = delta if d_rows is None else delta - d_rows
            d_sinks = sink_gradient(sinks, lse.squeeze(0), delta.squeeze(0))
        return Gradients(dq, dk, dv, d_sinks)

    def _said(self, q: Tensor, k: Tensor, extras: Extras, call: Call) -> PackedCall:
        (left_diagonal, diagonal), (starts_q, starts_k) = self.bounds(call, q, k), _starts(extras)
        count = starts_q.shape[0] - 1
        return PackedCall(
            sequences=sequences_of(starts_q, starts_k, q.shape[0], k.shape[0]),
            softmax_scale=call.scale_for(q),
            diagonal=diagonal,
            features=Features(
                left_diagonal=left_diagonal,
                softcap=call.softcap,
                alibi_slopes=extras.alibi_slopes,
                sinks=None if extras.sinks is None else extras.sinks.expand(count, -1),
                dropout_p=call.dropout_p,
                dropout_seed=extras.dropout_seed,
                head_numbers=head_numbers(count, q.shape[1], q.device),
            ),
        )


def _starts(extras: Extras) -> tuple[Tensor, Tensor]:
    assert extras.cu_seqlens_q is not None
    assert extras.cu_seqlens_k is not None
    return extras.cu_seqlens_q, extras.cu_seqlens_k


def _places(saved: Saved) -> Tensor:
    """Where each row is among those of whole blocks."""
    starts_q, _ = _starts(saved.extras)
    return padded_places(starts_q, saved.q.shape[0], STATISTIC_ROWS)
