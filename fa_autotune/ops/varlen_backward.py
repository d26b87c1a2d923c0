"""The fused way to compute the backward of sequences in a row, for any number and lengths of them.

As `backward_plan.FusedBackward`, but for the workspaces, whose sizes come with each launch.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fa_autotune.kernels.fast_launch import Counts
from fa_autotune.ops.memory import Allocate, access_of, contiguous, sketch
from fa_autotune.problem.family import Access, AttentionFamily, Pass
from fa_autotune.reference.packed import padded_places
from fa_autotune.space.workspace import STATISTIC_ROWS, packed_dq_acc_size, packed_statistics_size, packed_turns_size


class Binder(Protocol):
    """Binds the kernel that dispatch chooses for a pass to tensors as it takes them: (1, heads, total, columns), or a
    workspace."""

    def __call__(self, kernel_pass: Pass, access: Access, *tensors: Tensor) -> Callable[..., None]: ...


class PackedBackward:
    """All three gradients from one kernel, between its preprocessing and its postprocessing."""

    def __init__(
        self, bind: Binder, family: AttentionFamily, allocate: Allocate, counts: Counts,
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """`counts` are those of the tensors, which are (1, heads, total, columns), those yet to be allocated on the
        meta device."""
        self._family, self._heads, self._allocate = family, q.shape[1], allocate
        statistics, turns, dq_acc = (
            sketch(contiguous(size), dtype)
            for size, dtype in zip(self._sizes(counts), (torch.float32, torch.int32, torch.float32), strict=True)
        )
        of_rows = access_of(out, d_out)
        self._preprocess = bind(Pass.BWD_PREPROCESS, of_rows, out, d_out, lse, statistics, turns)
        self._fused = bind(Pass.BWD_FUSED, Access.TMA, q, k, v, d_out, statistics, turns, dk, dv, dq_acc)
        self._postprocess = bind(Pass.BWD_POSTPROCESS, access_of(dq), dq_acc, dq)

    def _sizes(self, counts: Counts) -> tuple[tuple[int, ...], ...]:
        """Of statistics, turns and dq_acc."""
        packed = self._heads, counts.num_sequences, counts.total_q
        return packed_statistics_size(*packed), packed_turns_size(*packed), packed_dq_acc_size(self._family, *packed)

    def __call__(
        self, counts: Counts, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor,
        lse: Tensor, d_out: Tensor, d_lse: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> Tensor:  # fmt: skip
        """Write dq, dk and dv; gives the statistics, for `delta_of`."""
        sizes, lengths = self._sizes(counts), (cu_seqlens_q, cu_seqlens_k)
        statistics = self._allocate(*contiguous(sizes[0]), torch.float32)
        turns = self._allocate(*contiguous(sizes[1]), torch.int32)
        self._preprocess(counts, out, d_out, lse, statistics, turns, *lengths)
        if d_lse is not None:
            places = padded_places(cu_seqlens_q, counts.total_q, STATISTIC_ROWS)
            delta = statistics[1]
            delta[:, places] = delta[:, places] - d_lse
        if counts.total_q == 0 or counts.total_k == 0:  # descriptors address no tensor without rows
            for gradient in (dq, dk, dv):
                gradient.zero_()
            return statistics
        dq_acc = self._allocate(*contiguous(sizes[2]), torch.float32)
        self._fused(counts, q, k, v, d_out, statistics, turns, dk, dv, dq_acc, *lengths)
        self._postprocess(counts, dq_acc, dq, *lengths)
        return statistics


def delta_of(statistics: Tensor, cu_seqlens_q: Tensor, total_q: int) -> Tensor:
    """delta less d_lse, (num_q_heads, total_q), of what a backward gave."""
    return statistics[1][:, padded_places(cu_seqlens_q, total_q, STATISTIC_ROWS)]
