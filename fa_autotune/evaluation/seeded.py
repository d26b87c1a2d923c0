"""Workloads with seeded random inputs: same seed, same values."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_autotune.evaluation.workload import Workload, acc_of_dq, statistics_of
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.problem.sequences import Sequences
from fa_autotune.reference.attention import TORCH_DTYPES, backward_statistics, seeded_inputs, seeded_output
from fa_autotune.reference.dropout import head_numbers
from fa_autotune.reference.features import Features, seeing_rows
from fa_autotune.reference.packed import packed_statistics, packed_statistics_of
from fa_autotune.space.workspace import (
    fused_tile,
    packed_turns_size,
    row_blocks,
    turns_size,
)

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
        return _seeded_packed(problem, sequences, device, diagonal, seed, scale, features)
    takes = family.kernel_pass.spec.takes
    made: dict[str, Tensor] = {}
    if "dq_acc" in takes:
        made["dq_acc"] = _seeded_dq_acc(problem, device, diagonal, features.left_diagonal, seed, scale)
    if "out" in takes:
        made["out"] = seeded_output(family, shape, device=device, seed=seed, scale=scale)
        made["lse"] = _seeded_lse(shape, device, seed)
    if "q" in takes:
        made["q"], made["k"], made["v"] = seeded_inputs(family, shape, device=device, seed=seed, scale=scale)
    if "do" in takes:
        made["do"] = seeded_output(family, shape, device=device, seed=seed + 2**20, scale=shape.seqlen_k**0.5)
    if {"q", "do"} <= set(takes):
        call: dict[str, Any] = {"softmax_scale": softmax_scale, "diagonal": diagonal, "features": features}
        lse, delta = backward_statistics(made["q"], made["k"], made["v"], made["do"], **call)
        made |= {"lse": lse, "delta": delta, "statistics": statistics_of(shape, lse, delta)}
        made["turns"] = torch.zeros(turns_size(shape), dtype=torch.int32, device=device)
    return Workload(
        family=family,
        shape=shape,
        inputs=tuple(made[name] for name in takes),
        softmax_scale=softmax_scale,
        diagonal=diagonal,
        features=features,
    )


def _seeded_packed(
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
    takes = family.kernel_pass.spec.takes
    made = {"q": q, "k": k, "v": v}
    if "dq_acc" in takes:
        made["dq_acc"] = _packed_dq_acc(workload, seed, scale)
    if "out" in takes:
        made["out"] = seeded_output(family, rows, device=device, seed=seed, scale=scale)
        made["lse"] = _seeded_lse(rows, device, seed)
    if "do" in takes:
        made["do"] = seeded_output(family, rows, device=device, seed=seed + 2**20, scale=shape.seqlen_k**0.5)
    if {"q", "do"} <= set(takes):
        lse, delta = packed_statistics(q, k, v, made["do"], workload.packed_call)
        made |= {"lse": lse, "delta": delta, "statistics": packed_statistics_of(cu_seqlens_q, lse, delta)}
        made["turns"] = torch.zeros(packed_turns_size(*workload._packed), dtype=torch.int32, device=device)
    return replace(workload, inputs=tuple(made[name] for name in takes))


def _packed_dq_acc(workload: Workload, seed: int, scale: float) -> Tensor:
    """`_seeded_dq_acc` of packed sequences."""
    family, device = workload.family, workload.inputs[0].device
    tile, (heads, num_sequences, total_q) = fused_tile(family), workload._packed
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (1, heads, row_blocks(total_q, num_sequences, tile.block_m) * tile.block_m, tile.columns)
    dq = torch.randn(size, generator=generator, device=device) * scale
    blind = workload.packed_call.blind_rows().to(device)
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
