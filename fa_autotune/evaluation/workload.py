"""One call of a kernel, for checks and timings: its inputs, the outputs that it writes, and its scalars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import TENSORS, Element, Extent
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import TORCH_DTYPES
from fa_autotune.reference.features import NO_FEATURES, Features
from fa_autotune.reference.packed import LOG2_E, PackedCall, packed_lse_and_delta, padded_places
from fa_autotune.space.workspace import (
    DQ_LANES,
    dq_acc_size,
    fused_tile,
    packed_dq_acc_size,
    packed_statistics_size,
    packed_turns_size,
    statistics_size,
    turns_size,
    whole_mask_rows,
)

_FIXED_DTYPES = {Element.FLOAT32: torch.float32, Element.INT32: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A contiguous tensor that a kernel writes whole: (batch, heads, seqlen, columns), or in a form of its own.

    `adds_up`: the kernel adds to it, in any order: it is to be 0 before, and two launches may differ in the last bits.
    `zeroed`: it is to be 0 before, since the kernel writes what some row sees.
    """

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    adds_up: bool = False
    zeroed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A call of a family's kernel: `inputs` are what its pass takes, in that order.

    `sequences` are those of a varlen family, whose tensors are (1, heads, total, head_dim).
    """

    family: AttentionFamily
    shape: AttentionShape
    inputs: tuple[Tensor, ...]
    softmax_scale: float
    diagonal: int | None
    features: Features = NO_FEATURES
    sequences: Sequences | None = None

    @property
    def named_inputs(self) -> dict[str, Tensor]:
        """The inputs by their names in `passes.TENSORS`."""
        return dict(zip(self.family.kernel_pass.spec.takes, self.inputs, strict=True))

    @property
    def packed_call(self) -> PackedCall:
        """What the reference of packed sequences is told."""
        assert self.sequences is not None
        return PackedCall(
            sequences=self.sequences,
            softmax_scale=self.softmax_scale,
            diagonal=self.diagonal,
            features=self.features,
        )

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the kernel writes, in the order in which it takes them."""
        return tuple(map(self._output, self.family.outputs))

    def _output(self, name: str) -> Output:
        family, element = self.family, TENSORS[name].element
        return Output(
            name=name,
            size=self._size_in_blocks(name) if TENSORS[name].in_blocks else self._size(name),
            dtype=TORCH_DTYPES[family.dtype] if element is Element.OF_CALL else _FIXED_DTYPES[element],
            adds_up=name == "dq_acc" and family.unordered,
            zeroed=name == "d_mask" and (family.bounded_left or family.bounded_right),
        )

    def _size(self, name: str) -> tuple[int, ...]:
        shape, sequences, tensor = self.shape, self.sequences, TENSORS[name]
        batch_size = shape.batch_size if sequences is None else 1
        if tensor.rows is Extent.KEYS:
            rows = shape.num_kv_heads, shape.seqlen_k if sequences is None else sequences.total_k
        else:
            rows = shape.num_q_heads, shape.seqlen_q if sequences is None else sequences.total_q
        if tensor.columns == 1:
            return batch_size, *rows
        columns = whole_mask_rows(shape.seqlen_k) if name == "d_mask" else getattr(self.family, str(tensor.columns))
        return batch_size, *rows, columns

    def _size_in_blocks(self, name: str) -> tuple[int, ...]:
        if self.sequences is not None:
            if name == "dq_acc":
                return packed_dq_acc_size(self.family, *self._packed)
            return {"statistics": packed_statistics_size, "turns": packed_turns_size}[name](*self._packed)
        if name == "dq_acc":
            return dq_acc_size(self.family, self.shape)
        return {"statistics": statistics_size, "turns": turns_size}[name](self.shape)

    @property
    def _packed(self) -> tuple[int, int, int]:
        """What the sizes of a workspace of packed sequences depend on."""
        assert self.sequences is not None
        return self.shape.num_q_heads, len(self.sequences.lengths_q), self.sequences.total_q

    def allocate(self) -> tuple[Tensor, ...]:
        """Outputs with whatever memory holds; 0 where the kernel adds to it."""
        device = self.inputs[0].device
        return tuple(
            (torch.zeros if output.adds_up or output.zeroed else torch.empty)(
                output.size, dtype=output.dtype, device=device
            )
            for output in self.outputs
        )

    @property
    def padded_rows(self) -> Tensor:
        """Where the rows of packed sequences lie among those of whole tiles of dq."""
        assert self.sequences is not None
        assert self.features.cu_seqlens_q is not None
        block_m = fused_tile(self.family).block_m
        return padded_places(self.features.cu_seqlens_q, self.sequences.total_q, block_m)

    @property
    def lse_and_delta(self) -> tuple[Tensor, Tensor]:
        """What the statistics of a fused backward were made of, (batch, q heads, seqlen_q) or (1, q heads, total_q)."""
        statistics = self.named_inputs["statistics"]
        if self.sequences is None:
            return lse_and_delta_of(self.shape, statistics)
        assert self.features.cu_seqlens_q is not None
        return packed_lse_and_delta(self.features.cu_seqlens_q, statistics, self.sequences.total_q)

    def dq_of(self, dq_acc: Tensor) -> Tensor:
        """dq / softmax_scale, fp32, as the call's q lies; any numbers in rows that see no key."""
        if self.sequences is None:
            return dq_of_acc(self.family, self.shape, dq_acc)
        tiles = tiles_of_acc(self.family, dq_acc)
        by_head = tiles.reshape(1, self.shape.num_q_heads, -1, tiles.shape[-1])
        return by_head[:, :, self.padded_rows, : self.family.head_dim]

    @property
    def turns(self) -> Tensor | None:
        """What a fused backward counts in and must leave at 0; None for other passes."""
        return self.named_inputs.get("turns")

    def arguments(self, outputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the kernel is called with."""
        tensors = (*self.inputs, *outputs, *self.features.tensors(self.family))
        if not self.family.kernel_pass.spec.knows_keys:
            return tensors
        return (*tensors, self.softmax_scale, self.diagonal, *self.features.numbers(self.family))


def bottom_right_diagonal(problem: AttentionProblem) -> int | None:
    """The diagonal by which the last row sees the last key (and its window's next ones); None where it is unbounded."""
    shape = problem.shape
    if problem.family.varlen:  # which counts from there
        return shape.window_right if problem.family.bounded_right else None
    return shape.seqlen_k - shape.seqlen_q + shape.window_right if problem.family.bounded_right else None


# --- what the kernels of the fused backward hand to each other --------------------------------------------------------


def statistics_of(shape: AttentionShape, lse: Tensor, delta: Tensor) -> Tensor:
    """What the preprocessing gives for lse (natural log) and delta, both (batch, q heads, seqlen_q)."""
    statistics = torch.zeros(statistics_size(shape), dtype=torch.float32, device=lse.device)
    statistics[0] = float("inf")
    exponent = torch.where(lse == float("-inf"), float("inf"), lse.to(torch.float64) * LOG2_E)
    statistics[0, :, : shape.seqlen_q] = exponent.flatten(0, 1).to(torch.float32)
    statistics[1, :, : shape.seqlen_q] = delta.flatten(0, 1)
    return statistics


def lse_and_delta_of(shape: AttentionShape, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The lse (natural log) and delta that statistics were made of."""
    rows = (shape.batch_size, shape.num_q_heads, shape.seqlen_q)
    exponent, delta = (part[:, : shape.seqlen_q].reshape(rows) for part in statistics)
    return torch.where(exponent == float("inf"), float("-inf"), exponent / LOG2_E), delta


def dq_of_acc(family: AttentionFamily, shape: AttentionShape, dq_acc: Tensor) -> Tensor:
    """dq / softmax_scale, fp32 (batch, q heads, seqlen_q, head_dim), from the order of the accumulators."""
    tiles = tiles_of_acc(family, dq_acc).reshape(shape.batch_size, shape.num_q_heads, -1, fused_tile(family).columns)
    return tiles[:, :, : shape.seqlen_q, : family.head_dim]


def tiles_of_acc(family: AttentionFamily, dq_acc: Tensor) -> Tensor:
    """The rows of dq_acc's tiles, (tiles · block_m, columns), from the order of the accumulators."""
    tile = fused_tile(family)
    by_register = dq_acc.view(-1, *tile.register_axes)
    rows_first = by_register.permute(0, *(axis + 1 for axis in tile.register_order))
    return rows_first.reshape(-1, tile.columns)


def acc_of_dq(family: AttentionFamily, dq: Tensor) -> Tensor:
    """The inverse of `dq_of_acc`, for dq / softmax_scale in whole tiles: (batch, q heads, rows, columns)."""
    axes, order = fused_tile(family).register_axes, fused_tile(family).register_order
    rows_first = dq.reshape(-1, *(axes[axis] for axis in order))
    by_register = rows_first.permute(0, *(order.index(axis) + 1 for axis in range(len(order))))
    return by_register.reshape(-1, DQ_LANES)
