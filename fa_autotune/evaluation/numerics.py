"""What a kernel should give for a workload, from plain torch, and by how much it may err."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa_autotune.evaluation.expectations import (
    MAX_ERROR_FACTOR,
    STATISTIC_TOLERANCE,
    Expectation,
    ExpectedDelta,
    ExpectedLse,
    ExpectedNumbers,
    ExpectedStatistics,
    ExpectedZeros,
    largest,
)
from fa_autotune.evaluation.probes import Probe
from fa_autotune.evaluation.seeded import seeded_features, seeded_workload
from fa_autotune.evaluation.workload import Workload, statistics_of
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import TENSORS, Extent, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import (
    TORCH_DTYPES,
    attention_reference,
    attention_same_precision,
    backward_from_statistics,
    cut_to_tf32,
)
from fa_autotune.reference.features import seeing_rows, seen_keys
from fa_autotune.reference.packed import (
    packed_gradients_from_statistics,
    packed_reference,
    packed_same_precision,
    packed_statistics_of,
)

LENIENT_GRADIENT_FACTOR = 3.0


BIAS_ERROR = 2.0**-22  # of the largest bias: fp32 roundings of a slope, of its product and of the sum


TANH_ERROR = 2.0**-11  # the largest relative one of tanh.approx.f32 (PTX ISA), which kernels may cap scores with


@lru_cache(maxsize=64)
def expected_of(family: AttentionFamily, probe: Probe, device_name: str) -> tuple[Workload, list[Expectation]]:
    """A probe's call, and what is expected of each output; then the keys that no row sees are made NaN."""
    problem, diagonal = AttentionProblem(family=family, shape=probe.shape), probe.diagonal(family)
    device = torch.device(device_name)
    workload = seeded_workload(
        problem,
        device=device,
        diagonal=diagonal,
        seed=probe.seed,
        scale=probe.scale,
        features=seeded_features(problem, device=device, offset=probe.offset, seed=probe.seed),
        sequences=probe.sequences,
    )
    expected = expectations_of(workload, workload.inputs)
    if workload.sequences is not None:
        _spoil_unused(workload)
    else:
        first, end = _seen_keys(workload)
        for name, tensor in workload.named_inputs.items():
            if TENSORS[name].rows is Extent.KEYS:
                tensor[:, :, :first] = float("nan")
                tensor[:, :, end:] = float("nan")
    return workload, expected


def _spoil_unused(workload: Workload) -> None:
    """Make NaN what no result may depend on: rows of no sequence, and keys that no row sees."""
    assert workload.sequences is not None
    unused = slice(sum(workload.sequences.lengths_q), None)
    unseen = workload.packed_call.unseen_keys().to(workload.inputs[0].device)
    for name, tensor in workload.named_inputs.items():
        if TENSORS[name].in_blocks:
            continue
        if TENSORS[name].rows is Extent.KEYS:
            tensor[:, :, unseen] = float("nan")
        elif name != "lse" or not workload.family.kernel_pass.spec.knows_keys:  # whose lse is −inf there
            tensor[:, :, unused] = float("nan")


def expectations_of(
    workload: Workload, inputs: tuple[Tensor, ...], *, first_row: int = 0, first_key: int = 0
) -> list[Expectation]:
    """What is expected of each output, for inputs that may be stretches that start at a row or key."""
    family = workload.family
    if workload.sequences is not None and family.kernel_pass in (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ):
        return _packed_expectations(workload)
    call: dict[str, Any] = {
        "softmax_scale": workload.softmax_scale,
        "diagonal": workload.diagonal,
        "first_row": first_row,
        "features": workload.features,
    }
    if family.kernel_pass is Pass.BWD_DELTA:
        out, d_out = (tensor.to(torch.float64) for tensor in inputs)
        return [ExpectedDelta(ref=(out * d_out).sum(-1), magnitude=(out * d_out).abs().sum(-1))]
    if family.kernel_pass is Pass.BWD_PREPROCESS:
        out, d_out, lse = inputs
        products = out.to(torch.float64) * d_out.to(torch.float64)
        ref, magnitude = (
            _statistics(workload, lse, delta.to(torch.float32)) for delta in (products.sum(-1), products.abs().sum(-1))
        )
        finite = magnitude.abs().nan_to_num(posinf=1.0)
        return [ExpectedStatistics(ref=ref, magnitude=finite), ExpectedZeros(name="turns")]
    if family.kernel_pass is Pass.BWD_POSTPROCESS:
        return [_expected_dq(workload, inputs[0])]
    if family.kernel_pass is Pass.BWD_FUSED:
        return [one for part, _ in parts_of(workload) for one in expectations_of(part, part.inputs)]
    if family.kernel_pass is Pass.FWD:
        ref, lse = attention_reference(*inputs, **call)
        pt, empty = attention_same_precision(*inputs, **call, tf32=family.tf32), lse == float("-inf")
        lse_error = 0.0
        if family.tf32:
            q, k, v = inputs
            lse_error = _tf32_error(lse, attention_reference(cut_to_tf32(q), cut_to_tf32(k), v, **call)[1])
        if workload.features.sinks is not None:  # which are in the lse of rows that see no key
            call["features"] = replace(workload.features, sinks=None)
            empty = attention_reference(*inputs, **call)[1] == float("-inf")
        return [
            ExpectedNumbers(name="out", ref=ref, pt=pt, zero=empty, why="rows that see no key"),
            ExpectedLse(ref=lse, tolerance=_lse_tolerance(workload) + MAX_ERROR_FACTOR * lse_error),
        ]
    q, k, _, _, lse, _ = inputs
    refs = backward_from_statistics(*inputs, **call, first_key=first_key)
    pts = backward_from_statistics(*inputs, **call, first_key=first_key, dtype=q.dtype, tf32=family.tf32)
    factor = _gradient_factor(workload)
    if family.kernel_pass is Pass.BWD_DQ:
        empty, why = lse == float("-inf"), "rows that see no key"
        shared: dict[str, Any] = {"zero": empty, "why": why, "factor": factor}
        found: list[Expectation] = [ExpectedNumbers(name="dq", ref=refs[0], pt=pts[0], **shared)]
        if family.mask_gradient:
            found.append(ExpectedNumbers(name="d_mask", ref=refs[3], pt=pts[3], terms=family.head_dim_v, **shared))
        return found
    unseen, why = _unseen_keys(workload, k, first_key), "keys that no row sees"
    return [
        ExpectedNumbers(name=name, ref=refs[i], pt=pts[i], zero=unseen, why=why, factor=factor)
        for i, name in ((1, "dk"), (2, "dv"))
    ]


def _statistics(workload: Workload, lse: Tensor, delta: Tensor) -> Tensor:
    """What the preprocessing gives for lse and delta."""
    starts = workload.features.cu_seqlens_q
    if workload.sequences is None or starts is None:
        return statistics_of(workload.shape, lse, delta)
    return packed_statistics_of(starts, lse, delta)


def _expected_dq(workload: Workload, dq_acc: Tensor) -> ExpectedNumbers:
    """What is expected of the postprocessing."""
    ref = workload.dq_of(dq_acc) * workload.softmax_scale
    empty = blind_rows(workload).expand(ref.shape[:3])
    ref = torch.where(empty[..., None], 0.0, ref)
    pt = ref.to(TORCH_DTYPES[workload.family.dtype])
    return ExpectedNumbers(name="dq", ref=ref, pt=pt, zero=empty, why="rows that see no key")


def _packed_expectations(workload: Workload) -> list[Expectation]:
    """The same of packed sequences."""
    call, family, inputs = workload.packed_call, workload.family, workload.inputs
    q, k, v, *of_rows = inputs
    why = "rows that see no key"
    if family.kernel_pass is Pass.FWD:
        ref, lse = packed_reference(q, k, v, call)
        bare = replace(call, features=replace(call.features, sinks=None))
        empty = packed_reference(q, k, v, bare)[1] == float("-inf")
        pt, lse_error = packed_same_precision(q, k, v, call, tf32=family.tf32), 0.0
        if family.tf32:
            lse_error = _tf32_error(lse, packed_reference(cut_to_tf32(q), cut_to_tf32(k), v, call)[1])
        return [
            ExpectedNumbers(name="out", ref=ref, pt=pt, zero=empty, why=why),
            ExpectedLse(ref=lse, tolerance=_lse_tolerance(workload) + MAX_ERROR_FACTOR * lse_error),
        ]
    d_out, lse, delta = of_rows
    refs = packed_gradients_from_statistics(q, k, v, d_out, lse, delta, call)
    pts = packed_gradients_from_statistics(q, k, v, d_out, lse, delta, call, dtype=q.dtype, tf32=family.tf32)
    factor = _gradient_factor(workload)
    if family.kernel_pass is Pass.BWD_DQ:
        empty = lse == float("-inf")
        return [ExpectedNumbers(name="dq", ref=refs[0], pt=pts[0], zero=empty, why=why, factor=factor)]
    unseen = call.unseen_keys().to(k.device).expand(k.shape[:3])
    return [
        ExpectedNumbers(name=name, ref=refs[i], pt=pts[i], zero=unseen, why="keys that no row sees", factor=factor)
        for i, name in ((1, "dk"), (2, "dv"))
    ]


def _lse_tolerance(workload: Workload) -> float:
    """How far an lse may be off: by more where scores are capped, or where a bias is rounded that they outweigh."""
    features, slopes = workload.features, workload.features.alibi_slopes
    bias = 0.0 if slopes is None else slopes.abs().max().item() * max(workload.shape.seqlen_q, workload.shape.seqlen_k)
    return STATISTIC_TOLERANCE + TANH_ERROR * features.softcap + BIAS_ERROR * bias


def _gradient_factor(workload: Workload) -> float:
    """How much more than plain torch's error a gradient may have."""
    family = workload.family
    widest = max(family.head_dim, family.head_dim_v)
    if family.softcap or (family.dtype is DType.BFLOAT16 and widest == 256 and workload.shape.gqa_group_size > 1):
        return LENIENT_GRADIENT_FACTOR
    return MAX_ERROR_FACTOR


def _tf32_error(lse: Tensor, cut: Tensor) -> float:
    """The largest error that products in tf32 make in lse, relative to it where it is large; `cut` is that of q and k
    cut to tf32."""
    difference = torch.where(cut == lse, 0.0, (cut - lse).abs())
    return largest(difference / lse.abs().clamp(min=1.0))


def _unseen_keys(workload: Workload, k: Tensor, first_key: int) -> Tensor:
    """(batch, kv heads, keys) mask of the keys that no row sees."""
    keys = torch.arange(first_key, first_key + k.shape[2], device=k.device)
    first, end = _seen_keys(workload)
    return ((keys < first) | (keys >= end)).expand(k.shape[:3])


def _seen_keys(workload: Workload) -> tuple[int, int]:
    """The keys that some row sees."""
    shape = workload.shape
    return seen_keys(shape.seqlen_q, shape.seqlen_k, workload.diagonal, workload.features.left_diagonal)


def blind_rows(workload: Workload) -> Tensor:
    """(seqlen_q,) mask, or (total_q,), of the query rows that see no key."""
    device, shape = workload.inputs[0].device, workload.shape
    if workload.sequences is not None:
        return workload.packed_call.blind_rows().to(device)
    first, end = seeing_rows(shape.seqlen_q, shape.seqlen_k, workload.diagonal, workload.features.left_diagonal)
    rows = torch.arange(shape.seqlen_q, device=device)
    return (rows < first) | (rows >= end)


def expected_stretch(workload: Workload, batch: int, head: int, start: int, stop: int) -> list[Expectation]:
    """What is expected of rows start … stop − 1 of a head; for dk and dv, of keys of a kv head."""
    group = workload.shape.gqa_group_size
    one, whole, rows = slice(batch, batch + 1), slice(None), slice(start, stop)
    if workload.family.kernel_pass.spec.owns_keys:
        keys_of, rows_of = (one, slice(head, head + 1), rows), (one, slice(head * group, (head + 1) * group), whole)
        first = {"first_key": start}
    else:
        keys_of, rows_of = (one, slice(head // group, head // group + 1), whole), (one, slice(head, head + 1), rows)
        first = {"first_row": start}
    parts = [
        tensor[keys_of if TENSORS[name].rows is Extent.KEYS else rows_of]
        for name, tensor in workload.named_inputs.items()
    ]
    part = replace(workload, features=workload.features.of_heads(one, rows_of[1]))
    return expectations_of(part, tuple(parts), **first)


def parts_of(workload: Workload) -> list[tuple[Workload, tuple[int, ...]]]:
    """Calls that give what a kernel gives, each with rows of one kind, and the numbers of their results among the
    kernel's: a fused backward's are that of dk and dv, and that of dq."""
    family = workload.family
    if family.kernel_pass is not Pass.BWD_FUSED:
        return [(workload, tuple(range(len(workload.outputs))))]
    inputs = [*workload.inputs[:4], *workload.lse_and_delta]
    return [
        (
            replace(workload, family=replace(family, kernel_pass=kernel_pass, unordered=False), inputs=tuple(inputs)),
            numbers,
        )
        for kernel_pass, numbers in ((Pass.BWD_DKDV, (0, 1)), (Pass.BWD_DQ, (2,)))
    ]
