"""Where the fused backward keeps what belongs to the rows of sequences in a row, whose rows it pads to whole blocks.

Tensors of rows are (…, heads, total_q), or (1, heads, total_q) with columns behind; `starts` is int32 (sequences + 1).
"""

import math

import torch
from torch import Tensor

from fa_autotune.fused_workspace import STATISTIC_ROWS, packed_statistics_size

LOG2_E = math.log2(math.e)


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
