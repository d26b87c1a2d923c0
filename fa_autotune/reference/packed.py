"""Plain-torch attention of packed sequences: `reference`, sequence by sequence.

Tensors are (1, heads, total, head_dim). `diagonal` and the left one of `features` count from each sequence's own
bottom-right, and the slopes and sinks of `features` are (sequences, num_q_heads).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import (
    attention_gradients,
    attention_reference,
    attention_same_precision,
    backward_statistics,
    gradients_from_statistics,
    reference_dtype,
    signed_probabilities,
)
from fa_autotune.reference.features import NO_FEATURES, Features, seeing_rows, seen_keys
from fa_autotune.space.workspace import STATISTIC_ROWS, packed_statistics_size

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall:
    """A call on packed sequences, less its tensors."""

    sequences: Sequences
    softmax_scale: float
    diagonal: int | None = None
    features: Features = NO_FEATURES

    def parts(self) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """The rows and keys of each sequence that has rows, and what the reference is told of it."""
        for number, (rows, keys) in enumerate(self.sequences.rows()):
            if rows.stop > rows.start:
                yield rows, keys, self.told_of(number, rows, keys)

    def told_of(self, number: int, rows: slice, keys: slice) -> dict[str, Any]:
        """What the reference is told of one sequence."""
        offset = (keys.stop - keys.start) - (rows.stop - rows.start)
        diagonal, left = (
            side if side is None else side + offset for side in (self.diagonal, self.features.left_diagonal)
        )
        features = self.features.of_heads(slice(number, number + 1), slice(None))
        return {
            "softmax_scale": self.softmax_scale,
            "diagonal": diagonal,
            "features": replace(features, left_diagonal=left, key_offset=offset),
        }

    def unseen_keys(self) -> Tensor:
        """(total_k,) mask of the keys that no row sees."""
        unseen = torch.ones(self.sequences.total_k, dtype=torch.bool)
        for rows, keys, call in self.parts():
            lengths = rows.stop - rows.start, keys.stop - keys.start
            first, end = seen_keys(*lengths, call["diagonal"], call["features"].left_diagonal)
            unseen[keys][first:end] = False
        return unseen

    def blind_rows(self) -> Tensor:
        """(total_q,) mask of the rows that see no key, those of no sequence among them."""
        blind = torch.ones(self.sequences.total_q, dtype=torch.bool)
        for rows, keys, call in self.parts():
            lengths = rows.stop - rows.start, keys.stop - keys.start
            first, end = seeing_rows(*lengths, call["diagonal"], call["features"].left_diagonal)
            blind[rows][first:end] = keys.stop == keys.start
        return blind


def sequences_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> Sequences:
    """The lengths that cu_seqlens say, cut to the totals. Waits for the device."""
    lengths, unused = [], []
    for cu_seqlens, total in ((cu_seqlens_q, total_q), (cu_seqlens_k, total_k)):
        ends = cu_seqlens.clamp(0, total).cummax(0).values
        lengths.append(tuple(ends.diff().tolist()))
        unused.append(total - int(ends[-1]))
    return Sequences(lengths_q=lengths[0], lengths_k=lengths[1], unused_q=unused[0], unused_k=unused[1])


def packed_reference(q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """(out, lse) in the reference precision: rows of no sequence, and those that see no key, give 0 and −inf."""
    out = v.new_zeros((*q.shape[:3], v.shape[3]), dtype=reference_dtype(q.dtype))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    for rows, keys, told in call.parts():
        found = attention_reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], **told)
        out[:, :, rows], lse[:, :, rows] = found
    return out, lse


def packed_probabilities(q: Tensor, k: Tensor, call: PackedCall, maxima: tuple[Any, Any]) -> Tensor:
    """Those of each sequence, negative where dropout hides them: (sequences, num_q_heads, max_seqlen_q, max_seqlen_k).

    0 behind a sequence's end. Maxima that are no integers, or too few, are the longest sequences' lengths.
    """
    lengths = call.sequences.lengths_q, call.sequences.lengths_k
    sizes = [max((_length(asked), *longest)) for asked, longest in zip(maxima, lengths, strict=True)]
    found = q.new_zeros(len(lengths[0]), q.shape[1], *sizes)
    for number, (rows, keys) in enumerate(call.sequences.rows()):
        if rows.stop > rows.start and keys.stop > keys.start:
            told = call.told_of(number, rows, keys)
            (signed,) = signed_probabilities(q[:, :, rows], k[:, :, keys], **told)
            found[number, :, : signed.shape[1], : signed.shape[2]] = signed
    return found


def _length(maximum: Any) -> int:
    return 0 if maximum is None or isinstance(maximum, Tensor) else index(maximum)


def packed_same_precision(q: Tensor, k: Tensor, v: Tensor, call: PackedCall, *, tf32: bool = False) -> Tensor:
    """out in the inputs' own precision: the error that plain torch makes, or with `tf32` that of products in tf32."""
    out = v.new_zeros((*q.shape[:3], v.shape[3]))
    for rows, keys, told in call.parts():
        if keys.stop > keys.start:
            parts = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            out[:, :, rows] = attention_same_precision(*parts, **told, tf32=tf32)
    return out


def packed_statistics(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """(lse, delta), fp32 (1, num_q_heads, total_q): what the forward and the delta kernel leave for a backward."""
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    delta = torch.zeros_like(lse)
    for rows, keys, told in call.parts():
        if keys.stop > keys.start:
            parts = q[:, :, rows], k[:, :, keys], v[:, :, keys], d_out[:, :, rows]
            lse[:, :, rows], delta[:, :, rows] = backward_statistics(*parts, **told)
        elif told["features"].sinks is not None:
            lse[:, :, rows] = told["features"].sinks[..., None]
    return lse, delta


def packed_gradients_from_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    call: PackedCall,
    *,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what a backward kernel gets, computed and rounded in `dtype`; `tf32` as in
    `gradients_from_statistics`."""
    dtype = dtype or reference_dtype(q.dtype)
    dq, dk, dv = (tensor.new_zeros(tensor.shape, dtype=dtype) for tensor in (q, k, v))
    for rows, keys, told in call.parts():
        if keys.stop > keys.start:
            of_rows = (tensor[:, :, rows] for tensor in (d_out, lse, delta))
            found = gradients_from_statistics(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows, **told, dtype=dtype, tf32=tf32
            )
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = found
    return dq, dk, dv


def packed_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor | None, call: PackedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in the reference precision, from those of out and (if any) of lse."""
    dq, dk, dv = (tensor.new_zeros(tensor.shape, dtype=reference_dtype(q.dtype)) for tensor in (q, k, v))
    for rows, keys, told in call.parts():
        if keys.stop > keys.start:
            of_rows = d_out[:, :, rows], None if d_lse is None else d_lse[:, :, rows]
            found = attention_gradients(q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows, **told)
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = found
    return dq, dk, dv


# --- where the fused backward keeps what belongs to the rows of packed sequences, which it pads to whole blocks -------


def padded_places(starts: Tensor, total_q: int, block: int) -> Tensor:
    """(total_q,) int64: the place of each row among rows that are padded to whole blocks, of no sequence too.

    Nothing waits for the device. Starts that decrease, or end past the total, give places that are there all the same.
    """
    ends = starts.to(torch.int64).clamp(0, total_q).cummax(0).values
    rows = torch.arange(total_q, device=starts.device)
    sequence = torch.searchsorted(ends[1:], rows, right=True)
    first = ends[sequence]
    return (rows - first + (first // block + sequence) * block).clamp(min=0)  # before the first start, too


def used_rows(starts: Tensor, total_q: int) -> Tensor:
    """(total_q,) mask of the rows that belong to a sequence."""
    return torch.arange(total_q, device=starts.device) < starts[-1]


def packed_statistics_of(starts: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """What the preprocessing gives for lse (natural log) and delta, both (1, q heads, total_q)."""
    _, heads, total_q = lse.shape
    size = packed_statistics_size(heads, starts.shape[0] - 1, total_q)
    statistics = torch.zeros(size, dtype=torch.float32, device=lse.device)
    statistics[0] = float("inf")
    places, used = padded_places(starts, total_q, STATISTIC_ROWS), used_rows(starts, total_q)
    exponent = torch.where(lse == float("-inf"), float("inf"), lse.to(torch.float64) * LOG2_E)
    statistics[0][:, places[used]] = exponent[0][:, used].to(torch.float32)
    statistics[1][:, places[used]] = delta[0][:, used]
    return statistics


def packed_lse_and_delta(starts: Tensor, statistics: Tensor, total_q: int) -> tuple[Tensor, Tensor]:
    """The lse (natural log) and delta that statistics were made of, both (1, q heads, total_q); −inf and 0 in rows of
    no sequence."""
    exponent, delta = statistics[:, None, :, padded_places(starts, total_q, STATISTIC_ROWS)]
    blind = (exponent == float("inf")) | ~used_rows(starts, total_q)
    return torch.where(blind, float("-inf"), exponent / LOG2_E), torch.where(used_rows(starts, total_q), delta, 0.0)
