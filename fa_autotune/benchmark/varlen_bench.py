"""Problems of sequences in a row, for `bench`: what a batch (batch, heads, seqlen, head_dim) is, one after another."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fa_autotune.evaluation.seeded import seeded_features
from fa_autotune.ops.arguments import GENERATED, TF32
from fa_autotune.ops.varlen_calls import varlen_plan_of
from fa_autotune.ops.varlen_plan import VarlenTensors
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences

# (batch, head, row, key) → whether that row sees that key: what FlexAttention calls a mask_mod.
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def in_a_row(tensor: Tensor) -> Tensor:
    """The sequences of a batch one after another: (1, heads, total, head_dim), differentiable."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def lengths_of(problem: AttentionProblem, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of a problem's sequences, all of the same lengths."""
    sequences = Sequences.equal(problem.shape)
    starts_q, starts_k = (
        torch.tensor(starts, dtype=torch.int32, device=device) for starts in (sequences.starts_q, sequences.starts_k)
    )
    return starts_q, starts_k


def backward_in_a_row(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """What a training step launches after the forward, and the memory that it allocates."""
    features = seeded_features(problem, device=q.device)
    rows = (in_a_row(tensor)[0].transpose(0, 1) for tensor in (q, k, v))
    sinks = None if features.sinks is None else features.sinks[0]
    starts_q, starts_k = lengths_of(problem, q.device)
    q_rows, k_rows, v_rows = rows
    tensors = VarlenTensors(
        q_rows, k_rows, v_rows, starts_q, starts_k, features.alibi_slopes, sinks, features.dropout_seed
    )
    runs = GENERATED | TF32 if problem.family.tf32 else GENERATED
    plan = varlen_plan_of(tensors, (None, *problem.window, features.softcap, runs, features.dropout_p))
    out, lse = plan.forward(tensors)
    return partial(plan.backward, tensors, out, lse, torch.randn_like(out), None, (True, True, True, sinks is not None))


def document_mask(problem: AttentionProblem) -> Visible:
    """Which keys a row sees where a problem's sequences lie one after another."""
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
