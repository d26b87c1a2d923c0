"""Problems of packed sequences, for `bench`: what a batch (batch, heads, seqlen, head_dim) is, one after another."""

from collections.abc import Callable

import torch
from torch import Tensor

from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences

# (batch, head, row, key) → whether that row sees that key: what FlexAttention calls a mask_mod.
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def packed(tensor: Tensor) -> Tensor:
    """The sequences of a batch one after another: (1, heads, total, head_dim), differentiable."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def lengths_of(problem: AttentionProblem, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of a problem's sequences, all of the same lengths."""
    sequences = Sequences.equal(problem.shape)
    starts_q, starts_k = (
        torch.tensor(starts, dtype=torch.int32, device=device) for starts in (sequences.starts_q, sequences.starts_k)
    )
    return starts_q, starts_k


def document_mask(problem: AttentionProblem) -> Visible:
    """Which keys a row sees where a problem's sequences are packed."""
    seqlen_q, seqlen_k = problem.shape.seqlen_q, problem.shape.seqlen_k
    left, right = problem.window
    offset = seqlen_k - seqlen_q

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        own = row % seqlen_q + offset
        seen = row // seqlen_q == key // seqlen_k
        if right >= 0:
            seen = seen & (key % seqlen_k <= own + right)
        if left >= 0:
            seen = seen & (key % seqlen_k >= own - left)
        return seen

    return visible
