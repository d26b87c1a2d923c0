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
from itertools import islice
from math import prod

import torch
from torch import Tensor

from fa_autotune.evaluation.expectations import (
    WorstErrors,
    unwritten,
)
from fa_autotune.evaluation.numerics import blind_rows, expectations_of, expected_of, expected_stretch, parts_of
from fa_autotune.evaluation.probes import Probe
from fa_autotune.evaluation.seeded import seeded_features
from fa_autotune.evaluation.workload import Output, Workload, bottom_right_diagonal, statistics_of
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences
from fa_autotune.records import AccuracyReport
from fa_autotune.reference.attention import (
    MAX_SCORES,
)
from fa_autotune.reference.features import Features
from fa_autotune.space.workspace import turns_size

Kernel = Callable[..., None]  # takes what `loaded.LoadedKernel` takes for its pass, and writes the outputs among it

CANARY_ROWS = 3  # rows of the output's storage before and after it that must stay untouched
UNORDERED_RUNS = 10
SAMPLED_HEADS = 4
SAMPLED_ROWS = 256  # fewer where their scores would not fit memory, but not fewer than
MIN_SAMPLED_ROWS = 16


def verify(
    kernel: Kernel, family: AttentionFamily, probe_list: Sequence[Probe], device: torch.device, *, repeated: bool = True
) -> AccuracyReport:
    """Run a kernel on every probe and compare with the reference. Launch errors propagate.

    `repeated`: false where launches can't differ, as in the interpreter, which runs the programs of a kernel one after
    another; each probe is then launched once.
    """
    worst = WorstErrors()
    for probe in probe_list:
        workload, expected = expected_of(family, probe, str(device))
        results = list(islice(_launched(kernel, workload), None if repeated else 1))
        failures = list(results[0].damage())
        if repeated:
            failures += results[0].differences(results[1])
        for outputs in results if family.unordered else results[:1]:
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
        for expected, value in zip(expectations_of(workload, inputs), results, strict=True):
            worst.failures += expected.failures(value, worst)
        return worst.report(1)
    for output, value in zip(workload.outputs, results, strict=True):
        if output.name != "lse" and not torch.isfinite(value).all():
            worst.failures.append(unwritten(output.name))
    if workload.sequences is not None:
        workload, results = _as_batch(workload, results)
    count = 0
    for part, numbers in parts_of(workload):
        for batch, head, start, stop in _samples(part):
            place = f"batch {batch} head {head} rows {start}…{stop - 1}"
            stretches = [results[number][batch : batch + 1, head : head + 1, start:stop] for number in numbers]
            for expected, value in zip(expected_stretch(part, batch, head, start, stop), stretches, strict=True):
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
    dq[:, :, blind_rows(workload)] = 0.0  # rows that see no key may lie in a tile that nobody writes
    return [dk, dv, dq.to(dk.dtype)]


def _launched(kernel: Kernel, workload: Workload) -> Iterator[_Outputs]:
    for _ in range(UNORDERED_RUNS if workload.family.unordered else 2):
        outputs = _Outputs(workload)
        kernel(*workload.arguments(outputs.tensors))
        if workload.turns is not None:
            outputs.set_back(workload.turns)
        yield outputs


# --- what is expected -------------------------------------------------------------------------------------------------


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


def _samples(workload: Workload) -> Iterator[tuple[int, int, int, int]]:
    """(batch, head, first row, end) of the sampled stretches; for dk and dv, of kv heads and keys."""
    shape = workload.shape
    batch_size, num_heads, seqlen, *_ = workload.outputs[0].size
    scores = shape.seqlen_k
    if workload.family.kernel_pass.spec.owns_keys:  # a key's gradient takes every row of its group's heads
        scores = shape.seqlen_q * shape.gqa_group_size
    rows = min(SAMPLED_ROWS, seqlen, max(MIN_SAMPLED_ROWS, MAX_SCORES // scores))
    total = batch_size * num_heads
    for place in sorted({0, total // 3, 2 * total // 3, total - 1})[:SAMPLED_HEADS]:
        batch, head = divmod(place, num_heads)
        for start in sorted({0, (seqlen - rows) // 2, seqlen - rows}):
            yield batch, head, start, start + rows
