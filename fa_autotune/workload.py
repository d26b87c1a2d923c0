"""One call of a kernel, for checks and timings: its inputs, the outputs that it writes, and its scalars."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa_autotune.dropout import head_numbers
from fa_autotune.family import KEYLESS_PASSES, AttentionFamily, Pass
from fa_autotune.features import NO_FEATURES, Features, seeing_rows
from fa_autotune.fused_workspace import (
    DQ_LANES,
    dq_acc_size,
    fused_tile,
    packed_dq_acc_size,
    packed_statistics_size,
    packed_turns_size,
    row_blocks,
    statistics_size,
    turns_size,
)
from fa_autotune.packed_rows import LOG2_E, packed_lse_and_delta, packed_statistics_of, padded_places
from fa_autotune.problem import AttentionProblem, AttentionShape
from fa_autotune.reference import TORCH_DTYPES, backward_statistics, seeded_inputs, seeded_output
from fa_autotune.sequences import Sequences
from fa_autotune.varlen_reference import VarlenCall, varlen_statistics


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
    """A call of a family's kernel. `inputs` are in the order in which the kernel takes them:

    fwd: q, k, v; bwd_delta: out, do; bwd_dkdv and bwd_dq: q, k, v, do, lse, delta;
    bwd_preprocess: out, do, lse; bwd_fused: q, k, v, do, statistics, turns; bwd_postprocess: dq_acc.

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
    def varlen_call(self) -> VarlenCall:
        """What the reference of sequences in a row is told."""
        assert self.sequences is not None
        return VarlenCall(
            sequences=self.sequences,
            softmax_scale=self.softmax_scale,
            diagonal=self.diagonal,
            features=self.features,
        )

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the kernel writes, in the order in which it takes them."""
        family, shape = self.family, self.shape
        rows = (shape.batch_size, shape.num_q_heads, shape.seqlen_q)
        keys = (shape.batch_size, shape.num_kv_heads, shape.seqlen_k)
        if self.sequences is not None:
            rows = (1, shape.num_q_heads, self.sequences.total_q)
            keys = (1, shape.num_kv_heads, self.sequences.total_k)
        dtype = TORCH_DTYPES[family.dtype]
        out, dq = (
            Output(name=name, size=(*rows, dim), dtype=dtype)
            for name, dim in (("out", family.head_dim_v), ("dq", family.head_dim))
        )
        dk, dv = (
            Output(name=name, size=(*keys, dim), dtype=dtype)
            for name, dim in (("dk", family.head_dim), ("dv", family.head_dim_v))
        )
        match family.kernel_pass:
            case Pass.FWD:
                return out, Output(name="lse", size=rows, dtype=torch.float32)
            case Pass.BWD_DELTA:
                return (Output(name="delta", size=rows, dtype=torch.float32),)
            case Pass.BWD_DKDV:
                return dk, dv
            case Pass.BWD_DQ if family.mask_gradient:
                is_partial = family.bounded_left or family.bounded_right
                whole = (*rows, whole_mask_rows(shape.seqlen_k))
                return dq, Output(name="d_mask", size=whole, dtype=torch.float32, zeroed=is_partial)
            case Pass.BWD_DQ | Pass.BWD_POSTPROCESS:
                return (dq,)
            case Pass.BWD_PREPROCESS:
                sizes: tuple[tuple[int, ...], ...] = (statistics_size(shape), turns_size(shape))
                if self.sequences is not None:
                    sizes = tuple(size(*self._packed) for size in (packed_statistics_size, packed_turns_size))
                statistics = Output(name="statistics", size=sizes[0], dtype=torch.float32)
                return statistics, Output(name="turns", size=sizes[1], dtype=torch.int32)
            case Pass.BWD_FUSED:
                packed = self.sequences is not None
                size = packed_dq_acc_size(family, *self._packed) if packed else dq_acc_size(family, shape)
                return dk, dv, Output(name="dq_acc", size=size, dtype=torch.float32, adds_up=family.unordered)

    @property
    def _packed(self) -> tuple[int, int, int]:
        """What the sizes of a workspace of sequences in a row depend on."""
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
        """Where the rows of sequences in a row lie among those of whole tiles of dq."""
        assert self.sequences is not None
        assert self.features.cu_seqlens_q is not None
        block_m = fused_tile(self.family).block_m
        return padded_places(self.features.cu_seqlens_q, self.sequences.total_q, block_m)

    @property
    def lse_and_delta(self) -> tuple[Tensor, Tensor]:
        """What the statistics of a fused backward were made of, (batch, q heads, seqlen_q) or (1, q heads, total_q)."""
        statistics = self.inputs[4]
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
        return self.inputs[5] if self.family.kernel_pass is Pass.BWD_FUSED else None

    def arguments(self, outputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the kernel is called with."""
        if self.family.kernel_pass in KEYLESS_PASSES:
            return (*self.inputs, *outputs, *self.features.tensors(self.family))
        tensors, numbers = self.features.tensors(self.family), self.features.numbers(self.family)
        return (*self.inputs, *outputs, *tensors, self.softmax_scale, self.diagonal, *numbers)


def bottom_right_diagonal(problem: AttentionProblem) -> int | None:
    """The diagonal by which the last row sees the last key (and its window's next ones); None where it is unbounded."""
    shape = problem.shape
    if problem.family.varlen:  # which counts from there
        return shape.window_right if problem.family.bounded_right else None
    return shape.seqlen_k - shape.seqlen_q + shape.window_right if problem.family.bounded_right else None


def whole_mask_rows(seqlen_k: int) -> int:
    """Elements of a row of a mask's gradient as kernels write it: whole stores of 16 elements."""
    return -(-seqlen_k // 16) * 16


DROPOUTS = (0.2, 0.5, 0.07)  # of seeds in turn
SOFTCAPS = (2.0, 30.0, 0.5)  # of seeds in turn: some that bend every score, some that bend the largest


def seeded_features(
    problem: AttentionProblem, *, device: torch.device, offset: int | None = None, seed: int = 0
) -> Features:
    """Values of a problem's features; row i's own key is i + `offset`, bottom-right where that is None.

    Slopes and sinks are those of heads for even seeds (stride 0 over the batch), else of each batch and head; odd seeds
    have a sink of −inf, which is none, and a very large one. The mask is `seeded_mask`.
    """
    family, shape = problem.family, problem.shape
    bottom_right = 0 if family.varlen else shape.seqlen_k - shape.seqlen_q
    offset = bottom_right if offset is None else offset
    size = (shape.batch_size, shape.num_q_heads)
    generator = torch.Generator(device=device).manual_seed(seed + 2**22)
    slopes, sinks = (torch.randn(size if seed % 2 else size[1:], generator=generator, device=device) for _ in range(2))
    if seed % 2:
        sinks[0, 0], sinks[-1, -1] = float("-inf"), 80.0
    return Features(
        left_diagonal=offset - shape.window_left if family.bounded_left else None,
        softcap=SOFTCAPS[seed % len(SOFTCAPS)] if family.softcap else 0.0,
        alibi_slopes=(0.3 * slopes.abs()).expand(size) if family.alibi else None,
        sinks=(2.0 * sinks).expand(size) if family.sinks else None,
        attn_mask=seeded_mask(problem, device=device, seed=seed) if family.has_mask else None,
        dropout_p=DROPOUTS[seed % len(DROPOUTS)] if family.dropout else 0.0,
        dropout_seed=torch.tensor([(seed + 1) * 0x9E3779B97F4A7C1], device=device) if family.dropout else None,
        head_numbers=head_numbers(*size, device) if family.dropout else None,
        key_offset=shape.seqlen_k - shape.seqlen_q,
    )


def seeded_mask(problem: AttentionProblem, *, device: torch.device, seed: int = 0) -> Tensor:
    """A mask of a problem: one for all heads (seed 0), for each head, for the keys of each batch, or for everything.

    It hides a fifth of the keys, by −inf where it is added, and every key from the first and some later rows. Its rows
    are whole 16 bytes apart, or if it is loose, its elements two apart (for some seeds all one).
    """
    family, shape = problem.family, problem.shape
    batch, heads, rows, keys = shape.batch_size, shape.num_q_heads, shape.seqlen_q, shape.seqlen_k
    sizes = ((1, 1, rows, keys), (1, heads, rows, keys), (batch, 1, 1, keys), (batch, heads, rows, keys))
    size: tuple[int, ...] = sizes[seed % 4]
    if family.loose_mask and seed % 8 >= 4:
        size = (*size[:3], 1)
    generator = torch.Generator(device=device).manual_seed(seed + 2**23)
    dtype = torch.bool if family.bool_mask else torch.float32 if family.wide_bias else TORCH_DTYPES[family.dtype]
    step = 2 if family.loose_mask else 1
    whole = 16 * -(-size[3] // 16)
    mask = torch.empty((*size[:3], step * whole), dtype=dtype, device=device)[..., : step * size[3] : step]
    shown = torch.rand(size, generator=generator, device=device) < 0.8
    if size[2] > 1:
        shown[:, :, ::11] = False
    if family.bool_mask:
        return mask.copy_(shown)
    numbers = torch.randn(size, generator=generator, device=device)
    return mask.copy_(numbers.masked_fill_(~shown, float("-inf")))


def seeded_workload(
    problem: AttentionProblem,
    *,
    device: torch.device,
    diagonal: int | None,
    seed: int = 0,
    scale: float = 1.0,
    features: Features | None = None,
    sequences: Sequences | None = None,
) -> Workload:
    """A call with random normal inputs, q, k and v times `scale`, and the usual softmax_scale: same seed, same values.

    lse and delta are those of the call's own forward. do grows with √seqlen_k, by which the mean over as many keys
    shrinks its effect: so gradients stay of order 1, above what the numerics rule allows for rounding. `features` are
    bottom-right ones unless given, and the `sequences` of a varlen family all of the shape's lengths.
    """
    features = seeded_features(problem, device=device, seed=seed) if features is None else features
    family, shape = problem.family, problem.shape
    softmax_scale = family.head_dim**-0.5
    if family.varlen:
        sequences = sequences or Sequences.equal(shape)
        return _seeded_in_a_row(problem, sequences, device, diagonal, seed, scale, features)
    kernel_pass = family.kernel_pass
    inputs: tuple[Tensor, ...]
    if kernel_pass is Pass.BWD_POSTPROCESS:
        inputs = (_seeded_dq_acc(problem, device, diagonal, features.left_diagonal, seed, scale),)
    elif kernel_pass in KEYLESS_PASSES:
        inputs = (seeded_output(family, shape, device=device, seed=seed, scale=scale),)
    else:
        inputs = seeded_inputs(family, shape, device=device, seed=seed, scale=scale)
    if kernel_pass not in (Pass.FWD, Pass.BWD_POSTPROCESS):
        other_seed = seed + 2**20
        inputs = (*inputs, seeded_output(family, shape, device=device, seed=other_seed, scale=shape.seqlen_k**0.5))
    if kernel_pass is Pass.BWD_PREPROCESS:
        inputs = (*inputs, _seeded_lse(shape, device, seed))
    if kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ, Pass.BWD_FUSED):
        call: dict[str, Any] = {"softmax_scale": softmax_scale, "diagonal": diagonal, "features": features}
        inputs = (*inputs, *backward_statistics(*inputs, **call))
    if kernel_pass is Pass.BWD_FUSED:
        *inputs_before, lse, delta = inputs
        turns = torch.zeros(turns_size(shape), dtype=torch.int32, device=device)
        inputs = (*inputs_before, statistics_of(shape, lse, delta), turns)
    return Workload(
        family=family,
        shape=shape,
        inputs=inputs,
        softmax_scale=softmax_scale,
        diagonal=diagonal,
        features=features,
    )


def _seeded_in_a_row(
    problem: AttentionProblem,
    sequences: Sequences,
    device: torch.device,
    diagonal: int | None,
    seed: int,
    scale: float,
    features: Features,
) -> Workload:
    family, shape = problem.family, problem.shape
    starts = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (sequences.starts_q, sequences.starts_k))
    cu_seqlens_q, cu_seqlens_k = starts
    rows = replace(shape, batch_size=1, seqlen_q=max(1, sequences.total_q), seqlen_k=max(1, sequences.total_k))
    q, k, v = seeded_inputs(family, rows, device=device, seed=seed, scale=scale)
    k, v = k[:, :, : sequences.total_k], v[:, :, : sequences.total_k]
    workload = Workload(
        family=family,
        shape=shape,
        inputs=(q, k, v),
        softmax_scale=family.head_dim**-0.5,
        diagonal=diagonal,
        features=replace(features, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k),
        sequences=sequences,
    )
    if family.kernel_pass is Pass.FWD:
        return workload
    if family.kernel_pass is Pass.BWD_POSTPROCESS:
        return replace(workload, inputs=(_packed_dq_acc(workload, seed, scale),))
    do = seeded_output(family, rows, device=device, seed=seed + 2**20, scale=shape.seqlen_k**0.5)
    if family.kernel_pass is Pass.BWD_PREPROCESS:
        out = seeded_output(family, rows, device=device, seed=seed, scale=scale)
        return replace(workload, inputs=(out, do, _seeded_lse(rows, device, seed)))
    lse, delta = varlen_statistics(q, k, v, do, workload.varlen_call)
    if family.kernel_pass is not Pass.BWD_FUSED:
        return replace(workload, inputs=(q, k, v, do, lse, delta))
    turns = torch.zeros(packed_turns_size(*workload._packed), dtype=torch.int32, device=device)
    statistics = packed_statistics_of(cu_seqlens_q, lse, delta)
    return replace(workload, inputs=(q, k, v, do, statistics, turns))


def _packed_dq_acc(workload: Workload, seed: int, scale: float) -> Tensor:
    """`_seeded_dq_acc` of sequences in a row."""
    family, device = workload.family, workload.inputs[0].device
    tile, (heads, num_sequences, total_q) = fused_tile(family), workload._packed
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (1, heads, row_blocks(total_q, num_sequences, tile.block_m) * tile.block_m, tile.columns)
    dq = torch.randn(size, generator=generator, device=device) * scale
    blind = workload.varlen_call.blind_rows().to(device)
    dq[:, :, workload.padded_rows[blind]] = float("nan")
    return acc_of_dq(family, dq)


def _seeded_lse(shape: AttentionShape, device: torch.device, seed: int) -> Tensor:
    """A random lse (batch, q heads, seqlen_q), −inf in every eighth row as where a row sees no key."""
    generator = torch.Generator(device=device).manual_seed(seed + 2**21)
    size = (shape.batch_size, shape.num_q_heads, shape.seqlen_q)
    lse = torch.randn(size, generator=generator, device=device)
    lse[..., ::8] = float("-inf")
    return lse


def _seeded_dq_acc(
    problem: AttentionProblem,
    device: torch.device,
    diagonal: int | None,
    left_diagonal: int | None,
    seed: int,
    scale: float,
) -> Tensor:
    """A random dq_acc; NaN in the rows that see no key, which the fused kernel may leave unwritten."""
    family, shape = problem.family, problem.shape
    tile = fused_tile(family)
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = -(-shape.seqlen_q // tile.block_m) * tile.block_m
    size = (shape.batch_size, shape.num_q_heads, rows, tile.columns)
    dq = torch.randn(size, generator=generator, device=device) * scale
    first, end = seeing_rows(shape.seqlen_q, shape.seqlen_k, diagonal, left_diagonal)
    dq[:, :, :first] = dq[:, :, end : shape.seqlen_q] = float("nan")
    return acc_of_dq(family, dq)


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
