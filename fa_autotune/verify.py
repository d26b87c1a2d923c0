"""Check a kernel against the reference before it may be timed or win.

The rule (design §2): max|x − ref| ≤ 2·max|pt − ref| + atol and mean error ≤ 1.5·pt's, where pt is plain torch in the
inputs' precision and atol two roundings, (ref + 0.3 − 0.3) − ref, of the output dtype; 3 in place of 2 for gradients of
bfloat16 with head dim 256 and grouped heads, and of capped scores. It holds for out and for gradients; lse and delta
must be within 1e-5, the lse of capped scores within what a GPU's own tanh makes of it; exact zeros and −inf are checked
exactly. A fused backward's dq is checked as the postprocessing would give it.
Outputs are poisoned with NaN and surrounded by canaries, unused keys hold NaN, and every launch is repeated: the two
results must be equal bit for bit. A kernel that adds up in any order runs ten times on each probe instead, and every
result must follow the rule.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from fa_autotune.expectations import (
    MAX_ERROR_FACTOR,
    STATISTIC_TOLERANCE,
    Expectation,
    ExpectedDelta,
    ExpectedLse,
    ExpectedNumbers,
    ExpectedStatistics,
    ExpectedZeros,
    WorstErrors,
    largest,
    unwritten,
)
from fa_autotune.family import KEYLESS_PASSES, AttentionFamily, DType, Pass
from fa_autotune.features import Features, seeing_rows, seen_keys
from fa_autotune.fused_workspace import turns_size
from fa_autotune.packed_rows import packed_statistics_of
from fa_autotune.probes import Probe
from fa_autotune.problem import AttentionProblem
from fa_autotune.records import AccuracyReport
from fa_autotune.reference import (
    MAX_SCORES,
    TORCH_DTYPES,
    attention_reference,
    attention_same_precision,
    backward_from_statistics,
    cut_to_tf32,
)
from fa_autotune.sequences import Sequences
from fa_autotune.varlen_reference import varlen_gradients_from_statistics, varlen_reference, varlen_same_precision
from fa_autotune.workload import (
    Output,
    Workload,
    bottom_right_diagonal,
    seeded_features,
    seeded_workload,
    statistics_of,
)

Kernel = Callable[..., None]  # takes what `launch.LoadedKernel` takes for its pass, and writes the outputs among it

LENIENT_GRADIENT_FACTOR = 3.0
BIAS_ERROR = 2.0**-22  # of the largest bias: fp32 roundings of a slope, of its product and of the sum
TANH_ERROR = 2.0**-11  # the largest relative one of tanh.approx.f32 (PTX ISA), which kernels may cap scores with
CANARY_ROWS = 3  # rows of the output's storage before and after it that must stay untouched
UNORDERED_RUNS = 10
SAMPLED_HEADS = 4
SAMPLED_ROWS = 256  # fewer where their scores would not fit memory, but not fewer than
MIN_SAMPLED_ROWS = 16


def verify(
    kernel: Kernel, family: AttentionFamily, probe_list: Sequence[Probe], device: torch.device
) -> AccuracyReport:
    """Run a kernel on every probe, twice, and compare with the reference. Launch errors propagate."""
    worst = WorstErrors()
    for probe in probe_list:
        workload, expected = _expected(family, probe, str(device))
        first, *others = _launched(kernel, workload)
        failures = [*first.damage(), *first.differences(others[0])]
        for outputs in (first, *others) if family.unordered else (first,):
            for one, value in zip(expected, _results(workload, outputs.tensors), strict=True):
                failures += one.failures(value, worst)
        name = f"{probe.shape.label}{' top-left' if probe.top_left else ''}"
        worst.failures += [f"{name}: {text}" for text in failures]
    return worst.report(len(probe_list))


def verify_sampled(
    kernel: Kernel,
    problem: AttentionProblem,
    inputs: tuple[Tensor, ...],
    softmax_scale: float,
    features: Features | None = None,
) -> AccuracyReport:
    """Check a kernel at a problem's own size: sampled heads and rows against the reference, all of it bit-equal twice.

    The rows (dk and dv: keys) are the first, the last and a middle stretch of each sampled head: the reference of all
    would not fit. `inputs` are those of `Workload`, and so are `features` unless they are given.
    """
    workload = Workload(
        family=problem.family,
        shape=problem.shape,
        inputs=inputs,
        softmax_scale=softmax_scale,
        diagonal=bottom_right_diagonal(problem),
        features=seeded_features(problem, device=inputs[0].device) if features is None else features,
        sequences=Sequences.equal(problem.shape) if problem.family.varlen else None,
    )
    first, second = islice(_launched(kernel, workload), 2)
    worst = WorstErrors()
    worst.failures += [*first.damage(), *first.differences(second)]
    results = _results(workload, first.tensors)
    if problem.family.kernel_pass in (Pass.BWD_PREPROCESS, Pass.BWD_POSTPROCESS):  # whose reference is as cheap
        for expected, value in zip(_expectations(workload, inputs), results, strict=True):
            worst.failures += expected.failures(value, worst)
        return worst.report(1)
    for output, value in zip(workload.outputs, results, strict=True):
        if output.name != "lse" and not torch.isfinite(value).all():
            worst.failures.append(unwritten(output.name))
    if workload.sequences is not None:
        workload, results = _as_batch(workload, results)
    count = 0
    for part, numbers in _parts(workload):
        for batch, head, start, stop in _samples(part):
            place = f"batch {batch} head {head} rows {start}…{stop - 1}"
            stretches = [results[number][batch : batch + 1, head : head + 1, start:stop] for number in numbers]
            for expected, value in zip(_expected_stretch(part, batch, head, start, stop), stretches, strict=True):
                worst.failures += [f"{place}: {text}" for text in expected.failures(value, worst)]
            count += 1
    return worst.report(count)


# --- outputs ----------------------------------------------------------------------------------------------------------


class _Outputs:
    """NaN-poisoned outputs, each inside a larger poisoned buffer whose margins a kernel must not touch."""

    def __init__(self, workload: Workload) -> None:
        self.tensors: list[Tensor] = []
        self._turns_left = False
        self._places: list[tuple[Output, Tensor, int]] = []
        for output in workload.outputs:
            # Whole 16-byte units before the output, so that its pointer keeps the alignment that the family promises.
            margin = 16 * CANARY_ROWS * (output.size[3] if len(output.size) == 4 else 1)
            count = prod(output.size)
            buffer = torch.full(
                (count + 2 * margin,), _poison(output), dtype=output.dtype, device=workload.inputs[0].device
            )
            self._places.append((output, buffer, margin))
            self.tensors.append(buffer[margin : margin + count].view(output.size))
            if output.adds_up or output.zeroed:
                self.tensors[-1].zero_()

    def set_back(self, turns: Tensor) -> None:
        """Note turns that a launch did not leave at 0, and set them to 0: the next launch would wait for good."""
        self._turns_left = bool(turns.any())
        turns.zero_()

    def damage(self) -> Iterator[str]:
        """What was written outside of the outputs, or left behind in turns."""
        if self._turns_left:
            yield "left turns at another value than 0"
        for output, buffer, margin in self._places:
            untouched = buffer.isnan() if buffer.is_floating_point() else buffer == _poison(output)
            if not (untouched[:margin].all() and untouched[-margin:].all()):
                yield f"wrote outside of {output.name}"

    def differences(self, other: "_Outputs") -> Iterator[str]:
        """Bitwise: NaN equals NaN only as the same bits, so a race is seen even where both runs are wrong."""
        for (output, _, _), one, another in zip(self._places, self.tensors, other.tensors, strict=True):
            if not output.adds_up and not same_bits(one, another):
                yield f"two launches gave different bits in {output.name}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal bit for bit, NaN included."""
    integers = torch.int32 if one.element_size() == 4 else torch.int16
    return torch.equal(one.view(integers), other.view(integers))


def _poison(output: Output) -> float:
    return float("nan") if output.dtype.is_floating_point else torch.iinfo(output.dtype).min


def _results(workload: Workload, outputs: Sequence[Tensor]) -> list[Tensor]:
    """What is compared: the outputs, and in place of a fused backward's dq_acc the dq that would be made of it."""
    if workload.family.mask_gradient:
        dq, d_mask = outputs
        return [dq, d_mask[..., : workload.shape.seqlen_k]]
    if workload.family.kernel_pass is not Pass.BWD_FUSED:
        return list(outputs)
    dk, dv, dq_acc = outputs
    dq = workload.dq_of(dq_acc) * workload.softmax_scale
    dq[:, :, _blind_rows(workload)] = 0.0  # rows that see no key may lie in a tile that nobody writes
    return [dk, dv, dq.to(dk.dtype)]


def _launched(kernel: Kernel, workload: Workload) -> Iterator[_Outputs]:
    for _ in range(UNORDERED_RUNS if workload.family.unordered else 2):
        outputs = _Outputs(workload)
        kernel(*workload.arguments(outputs.tensors))
        if workload.turns is not None:
            outputs.set_back(workload.turns)
        yield outputs


# --- what is expected -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _expected(family: AttentionFamily, probe: Probe, device_name: str) -> tuple[Workload, list[Expectation]]:
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
    expected = _expectations(workload, workload.inputs)
    if workload.sequences is not None:
        _spoil_unused(workload)
    elif family.kernel_pass not in KEYLESS_PASSES:
        first, end = _seen_keys(workload)
        for tensor in workload.inputs[1:3]:  # k and v
            tensor[:, :, :first] = float("nan")
            tensor[:, :, end:] = float("nan")
    return workload, expected


def _spoil_unused(workload: Workload) -> None:
    """Make NaN what no result may depend on: rows of no sequence, and keys that no row sees."""
    assert workload.sequences is not None
    unused = slice(sum(workload.sequences.lengths_q), None)
    unseen = workload.varlen_call.unseen_keys().to(workload.inputs[0].device)
    kernel_pass = workload.family.kernel_pass
    for place, tensor in enumerate(workload.inputs):
        if kernel_pass is Pass.BWD_POSTPROCESS or (kernel_pass is Pass.BWD_FUSED and place > 3):
            continue  # what lies in blocks
        if place in (1, 2) and kernel_pass is not Pass.BWD_PREPROCESS:  # k and v
            tensor[:, :, unseen] = float("nan")
        elif place != 4:  # lse is −inf there
            tensor[:, :, unused] = float("nan")


def _expectations(
    workload: Workload, inputs: tuple[Tensor, ...], *, first_row: int = 0, first_key: int = 0
) -> list[Expectation]:
    """What is expected of each output, for inputs that may be stretches that start at a row or key."""
    family = workload.family
    if workload.sequences is not None and family.kernel_pass in (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ):
        return _varlen_expectations(workload)
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
        return [one for part, _ in _parts(workload) for one in _expectations(part, part.inputs)]
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
    refs = backward_from_statistics(*inputs, **call, first_key=first_key)
    pts = backward_from_statistics(*inputs, **call, first_key=first_key, dtype=inputs[0].dtype, tf32=family.tf32)
    factor = _gradient_factor(workload)
    if family.kernel_pass is Pass.BWD_DQ:
        empty, why = inputs[4] == float("-inf"), "rows that see no key"
        shared: dict[str, Any] = {"zero": empty, "why": why, "factor": factor}
        found: list[Expectation] = [ExpectedNumbers(name="dq", ref=refs[0], pt=pts[0], **shared)]
        if family.mask_gradient:
            found.append(ExpectedNumbers(name="d_mask", ref=refs[3], pt=pts[3], terms=family.head_dim_v, **shared))
        return found
    unseen, why = _unseen_keys(workload, inputs[1], first_key), "keys that no row sees"
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
    empty = _blind_rows(workload).expand(ref.shape[:3])
    ref = torch.where(empty[..., None], 0.0, ref)
    pt = ref.to(TORCH_DTYPES[workload.family.dtype])
    return ExpectedNumbers(name="dq", ref=ref, pt=pt, zero=empty, why="rows that see no key")


def _varlen_expectations(workload: Workload) -> list[Expectation]:
    """The same of sequences in a row."""
    call, family, inputs = workload.varlen_call, workload.family, workload.inputs
    q, k, v, *of_rows = inputs
    why = "rows that see no key"
    if family.kernel_pass is Pass.FWD:
        ref, lse = varlen_reference(q, k, v, call)
        bare = replace(call, features=replace(call.features, sinks=None))
        empty = varlen_reference(q, k, v, bare)[1] == float("-inf")
        pt, lse_error = varlen_same_precision(q, k, v, call, tf32=family.tf32), 0.0
        if family.tf32:
            lse_error = _tf32_error(lse, varlen_reference(cut_to_tf32(q), cut_to_tf32(k), v, call)[1])
        return [
            ExpectedNumbers(name="out", ref=ref, pt=pt, zero=empty, why=why),
            ExpectedLse(ref=lse, tolerance=_lse_tolerance(workload) + MAX_ERROR_FACTOR * lse_error),
        ]
    d_out, lse, delta = of_rows
    refs = varlen_gradients_from_statistics(q, k, v, d_out, lse, delta, call)
    pts = varlen_gradients_from_statistics(q, k, v, d_out, lse, delta, call, dtype=q.dtype, tf32=family.tf32)
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


def _as_batch(workload: Workload, results: Sequence[Tensor]) -> tuple[Workload, list[Tensor]]:
    """Sequences of equal lengths in a row, and their results, as a batch of them."""
    shape, features = workload.shape, workload.features
    offset = shape.seqlen_k - shape.seqlen_q
    left = features.left_diagonal

    def batched(tensor: Tensor) -> Tensor:
        return tensor[0].reshape(tensor.shape[1], shape.batch_size, -1, *tensor.shape[3:]).transpose(0, 1)

    inputs = workload.inputs
    if workload.family.kernel_pass is Pass.BWD_FUSED:
        statistics = statistics_of(shape, *map(batched, workload.lse_and_delta))
        inputs = (*map(batched, inputs[:4]), statistics, torch.zeros(turns_size(shape), dtype=torch.int32))
    else:
        inputs = tuple(map(batched, inputs))
    batch = replace(
        workload,
        family=replace(workload.family, varlen=False),
        inputs=inputs,
        diagonal=None if workload.diagonal is None else workload.diagonal + offset,
        features=replace(features, left_diagonal=None if left is None else left + offset, key_offset=offset),
        sequences=None,
    )
    return batch, list(map(batched, results))


def _tf32_error(lse: Tensor, cut: Tensor) -> float:
    """The largest error that products in tf32 make in lse, relative to it where it is large; `cut` is that of q and k
    cut to tf32."""
    difference = torch.where(cut == lse, 0.0, (cut - lse).abs())
    return largest(difference / lse.abs().clamp(min=1.0))


def _parts(workload: Workload) -> list[tuple[Workload, tuple[int, ...]]]:
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


def _unseen_keys(workload: Workload, k: Tensor, first_key: int) -> Tensor:
    """(batch, kv heads, keys) mask of the keys that no row sees."""
    keys = torch.arange(first_key, first_key + k.shape[2], device=k.device)
    first, end = _seen_keys(workload)
    return ((keys < first) | (keys >= end)).expand(k.shape[:3])


def _seen_keys(workload: Workload) -> tuple[int, int]:
    """The keys that some row sees."""
    shape = workload.shape
    return seen_keys(shape.seqlen_q, shape.seqlen_k, workload.diagonal, workload.features.left_diagonal)


def _blind_rows(workload: Workload) -> Tensor:
    """(seqlen_q,) mask, or (total_q,), of the query rows that see no key."""
    device, shape = workload.inputs[0].device, workload.shape
    if workload.sequences is not None:
        return workload.varlen_call.blind_rows().to(device)
    first, end = seeing_rows(shape.seqlen_q, shape.seqlen_k, workload.diagonal, workload.features.left_diagonal)
    rows = torch.arange(shape.seqlen_q, device=device)
    return (rows < first) | (rows >= end)


def _expected_stretch(workload: Workload, batch: int, head: int, start: int, stop: int) -> list[Expectation]:
    """What is expected of rows start … stop − 1 of a head; for dk and dv, of keys of a kv head."""
    group = workload.shape.gqa_group_size
    one, whole, rows = slice(batch, batch + 1), slice(None), slice(start, stop)
    if workload.family.kernel_pass is Pass.BWD_DKDV:
        keys_of, rows_of = (one, slice(head, head + 1), rows), (one, slice(head * group, (head + 1) * group), whole)
        first = {"first_key": start}
    else:
        keys_of, rows_of = (one, slice(head // group, head // group + 1), whole), (one, slice(head, head + 1), rows)
        first = {"first_row": start}
    inputs = workload.inputs
    if workload.family.kernel_pass is Pass.BWD_DELTA:
        parts = [tensor[rows_of] for tensor in inputs]
    else:
        parts = [tensor[keys_of if place in (1, 2) else rows_of] for place, tensor in enumerate(inputs)]
    part = replace(workload, features=workload.features.of_heads(one, rows_of[1]))
    return _expectations(part, tuple(parts), **first)


def _samples(workload: Workload) -> Iterator[tuple[int, int, int, int]]:
    """(batch, head, first row, end) of the sampled stretches; for dk and dv, of kv heads and keys."""
    shape = workload.shape
    batch_size, num_heads, seqlen, *_ = workload.outputs[0].size
    scores = shape.seqlen_k
    if workload.family.kernel_pass is Pass.BWD_DKDV:  # a key's gradient takes every row of its group's heads
        scores = shape.seqlen_q * shape.gqa_group_size
    rows = min(SAMPLED_ROWS, seqlen, max(MIN_SAMPLED_ROWS, MAX_SCORES // scores))
    total = batch_size * num_heads
    for place in sorted({0, total // 3, 2 * total // 3, total - 1})[:SAMPLED_HEADS]:
        batch, head = divmod(place, num_heads)
        for start in sorted({0, (seqlen - rows) // 2, seqlen - rows}):
            yield batch, head, start, start + rows
