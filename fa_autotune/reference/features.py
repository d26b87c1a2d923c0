"""What a call of attention does beside softmax(q·kᵀ·scale)·v up to one diagonal, as its kernels take it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.reference.dropout import head_numbers, kept_of, scale_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """The values of a call's features, all off by default; a family says which of them its kernel takes.

    left_diagonal: query row i sees keys j >= i + left_diagonal only; None where nothing bounds the keys to the left.
    softcap: scores become softcap · tanh(score / softcap); 0 leaves them as they are.
    alibi_slopes: fp32 (batch, num_q_heads); score (i, j) gets −slope · |i + key_offset − j| after the cap.
    sinks: fp32 (batch, num_q_heads), one more score for each row, whose value is 0.
    attn_mask: (batch, num_q_heads, seqlen_q, seqlen_k), or 1 in place of any; bool, true where a row sees a key, or
    numbers that are added to the scores last.
    dropout_p, dropout_seed: the share of probabilities that become 0, and the int64 (1,) of `dropout` that says which.
    head_numbers: those of `dropout` for each (batch, query head), where tensors may be parts of a call.
    key_offset: seqlen_k − seqlen_q of the whole call, where tensors may be parts of it.
    cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1), where each sequence's rows start and the last one's end. Both
    diagonals then count from the sequence's own seqlen_k − seqlen_q, slopes and sinks are (sequences, num_q_heads).
    """

    left_diagonal: int | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    head_numbers: Tensor | None = None
    key_offset: int = 0
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def tensors(self, family: AttentionFamily) -> tuple[Tensor, ...]:
        """What a family's kernel takes after its outputs."""
        return tuple(getattr(self, name) for name in family.extra_tensors)

    def numbers(self, family: AttentionFamily) -> tuple[float | int | None, ...]:
        """What a family's kernel takes after the diagonal."""
        return tuple(getattr(self, name) for name in family.feature_numbers)

    def of_heads(self, batch: slice, heads: slice) -> Self:
        """Those of a part of the batch and of the query heads."""
        slopes, sinks = (t if t is None else t[batch, heads] for t in (self.alibi_slopes, self.sinks))
        mask = self.attn_mask
        if mask is not None:
            mask = mask[_unless_broadcast(mask, 0, batch), _unless_broadcast(mask, 1, heads)]
        numbers = None if self.head_numbers is None else self.head_numbers[batch, heads]
        return replace(self, alibi_slopes=slopes, sinks=sinks, attn_mask=mask, head_numbers=numbers)

    def dropped(self, weights: Tensor, first_row: int = 0, first_key: int = 0) -> Tensor:
        """Probabilities, or their gradients, of stretches of rows and keys: 0, or scaled where they are kept."""
        if self.dropout_seed is None:
            return weights
        batch_size, heads, rows, keys = weights.shape
        numbers = head_numbers(batch_size, heads, weights.device) if self.head_numbers is None else self.head_numbers
        kept = kept_of(
            self.dropout_seed,
            numbers,
            range(first_row, first_row + rows),
            range(first_key, first_key + keys),
            self.dropout_p,
        )
        return torch.where(kept, weights * scale_of(self.dropout_p), 0.0)

    def mask_of(self, rows: slice, keys: slice) -> Tensor | None:
        """The mask of some rows and keys."""
        mask = self.attn_mask
        if mask is None:
            return None
        return mask[:, :, _unless_broadcast(mask, 2, rows), _unless_broadcast(mask, 3, keys)]


def _unless_broadcast(mask: Tensor, axis: int, part: slice) -> slice:
    return slice(None) if mask.shape[axis] == 1 else part


NO_FEATURES = Features()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of sinks (batch, num_q_heads), from lse and delta = rowsum(d_out ∘ out) − d_lse, both (…, seqlen_q)."""
    weights = torch.exp(sinks[..., None] - lse)
    return -torch.where(lse == float("-inf"), 0.0, weights * delta).sum(-1)


def summed_like(mask: Tensor, gradient: Tensor) -> Tensor:
    """A mask's gradient, from that of every (batch, query head, row, key): summed where the mask is broadcast."""
    axes = [axis for axis in range(4) if mask.shape[axis] == 1 != gradient.shape[axis]]
    return (gradient.sum(axes, keepdim=True) if axes else gradient).to(mask.dtype)


def seen_keys(seqlen_q: int, seqlen_k: int, diagonal: int | None, left_diagonal: int | None) -> tuple[int, int]:
    """(first, end) of the keys that some query row sees; first == end where none does."""
    end = seqlen_k if diagonal is None else max(0, min(seqlen_k, seqlen_q + diagonal))
    return (0 if left_diagonal is None else max(0, min(left_diagonal, end))), end


def seeing_rows(seqlen_q: int, seqlen_k: int, diagonal: int | None, left_diagonal: int | None) -> tuple[int, int]:
    """(first, end) of the query rows that see some key; first == end where none does."""
    end = seqlen_q if left_diagonal is None else max(0, min(seqlen_q, seqlen_k - left_diagonal))
    return (0 if diagonal is None else min(end, max(0, -diagonal))), end


def window_diagonals(
    window: Sequence[int], seqlen_q: int, seqlen_k: int, *, top_left: bool = False
) -> tuple[int | None, int | None]:
    """(left diagonal, right diagonal) of window sides, inclusive and -1 for open; None where a side hides no key.

    A row's own key is that of bottom-right alignment: the last row's is the last key; or, top-left, the first row's is
    the first key.
    """
    left, right = window
    offset = 0 if top_left else seqlen_k - seqlen_q
    left_diagonal = None if left < 0 or offset - left <= 1 - seqlen_q else offset - left
    diagonal = None if right < 0 or offset + right >= seqlen_k - 1 else offset + right
    return left_diagonal, diagonal
