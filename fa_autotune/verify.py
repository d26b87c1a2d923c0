"""Check a kernel against the reference before it may be timed or win.

The rule (design §2): max|x − ref| ≤ 2·max|pt − ref| + atol and mean error ≤ 1.5·pt's, where pt is plain torch in the
inputs' precision and atol two roundings, (ref + 0.3 − 0.3) − ref, of the output dtype; 3 in place of 2 for gradients of
bfloat16 with head dim 256 and grouped heads, and of capped scores. It holds for out and for gradients; lse and delta
must be within 1e-5; exact zeros and −inf are checked exactly. A fused backward's dq is checked as the postprocessing
would give it.
Outputs are poisoned with NaN and surrounded by canaries, unused keys hold NaN, and every launch is repeated: the two
results must be equal bit for bit. A kernel that adds up in any order runs ten times on each probe instead, and every
result must follow the rule.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from fa_autotune.family import KEYLESS_PASSES, AttentionFamily, DType, Pass
from fa_autotune.features import Features, seen_keys
from fa_autotune.probes import Probe
from fa_autotune.problem import AttentionProblem
from fa_autotune.records import AccuracyReport
from fa_autotune.reference import (
    MAX_SCORES,
    TORCH_DTYPES,
    attention_reference,
    attention_same_precision,
    cut_to_tf32,
    gradients_from_statistics,
)
from fa_autotune.workload import (
    Output,
    Workload,
    bottom_right_diagonal,
    dq_of_acc,
    lse_and_delta_of,
    seeded_features,
    seeded_workload,
    statistics_of,
)

Kernel = Callable[..., None]  # takes what `launch.LoadedKernel` takes for its pass, and writes the outputs among it

MAX_ERROR_FACTOR = 2.0
LENIENT_GRADIENT_FACTOR = 3.0
MEAN_ERROR_FACTOR = 1.5
STATISTIC_TOLERANCE = 1e-5
CANARY_ROWS = 3  # rows of the output's storage before and after it that must stay untouched
UNORDERED_RUNS = 10
SAMPLED_HEADS = 4
SAMPLED_ROWS = 256  # fewer where their scores would not fit memory, but not fewer than
MIN_SAMPLED_ROWS = 16


def verify(
    kernel: Kernel, family: AttentionFamily, probe_list: Sequence[Probe], device: torch.device
) -> AccuracyReport:
    """Run a kernel on every probe, twice, and compare with the reference. Launch errors propagate."""
    worst = _Worst()
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
    )
    first, second = islice(_launched(kernel, workload), 2)
    worst = _Worst()
    worst.failures += [*first.damage(), *first.differences(second)]
    results = _results(workload, first.tensors)
    if problem.family.kernel_pass in (Pass.BWD_PREPROCESS, Pass.BWD_POSTPROCESS):  # whose reference is as cheap
        for expected, value in zip(_expectations(workload, inputs), results, strict=True):
            worst.failures += expected.failures(value, worst)
        return worst.report(1)
    for output, value in zip(workload.outputs, results, strict=True):
        if output.name != "lse" and not torch.isfinite(value).all():
            worst.failures.append(_unwritten(output.name))
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
            if output.adds_up:
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
    if workload.family.kernel_pass is not Pass.BWD_FUSED:
        return list(outputs)
    dk, dv, dq_acc = outputs
    dq = dq_of_acc(workload.family, workload.shape, dq_acc) * workload.softmax_scale
    if workload.diagonal is not None:
        dq[:, :, : max(0, -workload.diagonal)] = 0.0  # rows that see no key may lie in a tile that nobody writes
    return [dk, dv, dq.to(dk.dtype)]


def _launched(kernel: Kernel, workload: Workload) -> Iterator[_Outputs]:
    for _ in range(UNORDERED_RUNS if workload.family.unordered else 2):
        outputs = _Outputs(workload)
        kernel(*workload.arguments(outputs.tensors))
        if workload.turns is not None:
            outputs.set_back(workload.turns)
        yield outputs


def _unwritten(name: str) -> str:
    return f"{name} was left unwritten or is not finite"


# --- what is expected -------------------------------------------------------------------------------------------------


class _Worst:
    """Collects the largest errors over probes."""

    def __init__(self) -> None:
        self.max_error = self.max_ratio = self.mean_ratio = self.lse_error = 0.0
        self.failures: list[str] = []

    def add(
        self, *, max_error: float = 0.0, max_ratio: float = 0.0, mean_ratio: float = 0.0, lse_error: float = 0.0
    ) -> None:
        self.max_error = max(self.max_error, max_error)
        self.max_ratio = max(self.max_ratio, max_ratio)
        self.mean_ratio = max(self.mean_ratio, mean_ratio)
        self.lse_error = max(self.lse_error, lse_error)

    def report(self, count: int) -> AccuracyReport:
        return AccuracyReport(
            max_error=self.max_error,
            max_error_ratio=self.max_ratio,
            mean_error_ratio=self.mean_ratio,
            lse_error=self.lse_error,
            probes=count,
            failures=tuple(self.failures),
        )


@dataclass(slots=True, kw_only=True)
class _Numbers:
    """An output that follows the numerics rule. `zero` marks rows that must be exactly 0, `why` says which they are."""

    name: str
    ref: Tensor
    pt: Tensor
    zero: Tensor
    why: str
    factor: float = MAX_ERROR_FACTOR

    def failures(self, written: Tensor, worst: _Worst) -> Iterator[str]:
        """What is wrong with an output."""
        value = written.to(self.ref.dtype)
        if not torch.isfinite(value).all():
            yield _unwritten(self.name)
            return
        if (value[self.zero] != 0).any():
            yield f"{self.name}: {self.why} are not exactly 0"
        error, pt_error = (value - self.ref).abs(), (self.pt.to(self.ref.dtype) - self.ref).abs()
        roundings = _roundings(self.ref, written.dtype)
        allowed = self.factor * (pt_error.max().item() + roundings.max().item())
        # GPUs' exp2 is good to two units in the last place: in fp32 that shows, in 16 bits it does not.
        units = 2 if written.dtype is torch.float32 else 1
        mean_allowed = MEAN_ERROR_FACTOR * pt_error.mean().item() + units * roundings.mean().item()
        max_error, mean_error = error.max().item(), error.mean().item()
        worst.add(
            max_error=max_error,
            max_ratio=_ratio(max_error, allowed),
            mean_ratio=_ratio(mean_error, mean_allowed),
        )
        if max_error > allowed:
            yield f"{self.name} error {max_error:.3g} > {allowed:.3g} (plain torch errs by {pt_error.max().item():.3g})"
        elif mean_error > mean_allowed:
            yield f"{self.name} mean error {mean_error:.3g} > {mean_allowed:.3g}"


@dataclass(slots=True, kw_only=True)
class _Lse:
    """The forward's lse: close, absolutely or relatively, and −inf exactly where a row sees no key.

    `more` is allowed on top: what tf32 does to it.
    """

    ref: Tensor
    more: float = 0.0

    def failures(self, written: Tensor, worst: _Worst) -> Iterator[str]:
        """What is wrong with an output."""
        if not torch.equal(written == float("-inf"), self.ref == float("-inf")):
            yield "lse is not −inf at exactly the rows that see no key"
        difference = torch.where(written == self.ref, 0.0, (written - self.ref).abs())
        error = _largest(difference / self.ref.abs().clamp(min=1.0))
        worst.add(lse_error=error)
        allowed = STATISTIC_TOLERANCE + self.more
        if not error <= allowed:
            yield f"lse error {error:.3g} > {allowed:.3g}"


@dataclass(slots=True, kw_only=True)
class _Delta:
    """delta = rowsum(do ∘ out): close, absolutely or relative to the sum of the magnitudes."""

    ref: Tensor
    magnitude: Tensor

    def failures(self, written: Tensor, worst: _Worst) -> Iterator[str]:
        """What is wrong with an output."""
        error = (written - self.ref).abs()
        relative = _largest(error / self.magnitude.clamp(min=1.0))
        worst.add(max_error=_largest(error), max_ratio=relative / STATISTIC_TOLERANCE)
        if not torch.isfinite(written).all():
            yield _unwritten("delta")
        elif relative > STATISTIC_TOLERANCE:
            yield f"delta error {relative:.3g} > {STATISTIC_TOLERANCE}"


@dataclass(slots=True, kw_only=True)
class _Statistics:
    """What the preprocessing gives: lse in base 2 and delta, with rows of no effect at the end."""

    ref: Tensor
    magnitude: Tensor

    def failures(self, written: Tensor, worst: _Worst) -> Iterator[str]:
        """What is wrong with an output."""
        if not torch.equal(written[0] == float("inf"), self.ref[0] == float("inf")):
            yield "lse is not +inf at exactly the rows that see no key and those past the end"
        difference = torch.where(written == self.ref, 0.0, (written - self.ref).abs())
        error = _largest(difference / self.magnitude.clamp(min=1.0))
        worst.add(lse_error=error)
        if not error <= STATISTIC_TOLERANCE:
            yield f"statistics error {error:.3g} > {STATISTIC_TOLERANCE}"


@dataclass(slots=True, kw_only=True)
class _Zeros:
    """An output that must be 0 everywhere."""

    name: str

    def failures(self, written: Tensor, worst: _Worst) -> Iterator[str]:
        """What is wrong with an output."""
        if written.any():
            yield f"{self.name} is not 0 everywhere"


_Expectation = _Numbers | _Lse | _Delta | _Statistics | _Zeros


@lru_cache(maxsize=64)
def _expected(family: AttentionFamily, probe: Probe, device_name: str) -> tuple[Workload, list[_Expectation]]:
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
    )
    expected = _expectations(workload, workload.inputs)
    if family.kernel_pass not in KEYLESS_PASSES:
        first, end = _seen_keys(workload)
        for tensor in workload.inputs[1:3]:  # k and v
            tensor[:, :, :first] = float("nan")
            tensor[:, :, end:] = float("nan")
    return workload, expected


def _expectations(
    workload: Workload, inputs: tuple[Tensor, ...], *, first_row: int = 0, first_key: int = 0
) -> list[_Expectation]:
    """What is expected of each output, for inputs that may be stretches that start at a row or key."""
    family = workload.family
    call: dict[str, Any] = {
        "softmax_scale": workload.softmax_scale,
        "diagonal": workload.diagonal,
        "first_row": first_row,
        "features": workload.features,
    }
    if family.kernel_pass is Pass.BWD_DELTA:
        out, d_out = (tensor.to(torch.float64) for tensor in inputs)
        return [_Delta(ref=(out * d_out).sum(-1), magnitude=(out * d_out).abs().sum(-1))]
    if family.kernel_pass is Pass.BWD_PREPROCESS:
        out, d_out, lse = inputs
        products = out.to(torch.float64) * d_out.to(torch.float64)
        ref, magnitude = (
            statistics_of(workload.shape, lse, delta.to(torch.float32))
            for delta in (products.sum(-1), products.abs().sum(-1))
        )
        finite = magnitude.abs().nan_to_num(posinf=1.0)
        return [_Statistics(ref=ref, magnitude=finite), _Zeros(name="turns")]
    if family.kernel_pass is Pass.BWD_POSTPROCESS:
        ref = dq_of_acc(family, workload.shape, inputs[0]) * workload.softmax_scale
        empty = torch.zeros(ref.shape[:3], dtype=torch.bool, device=ref.device)
        if workload.diagonal is not None:
            empty[:, :, : max(0, -workload.diagonal)] = True
        ref = torch.where(empty[..., None], 0.0, ref)
        pt = ref.to(TORCH_DTYPES[family.dtype])
        return [_Numbers(name="dq", ref=ref, pt=pt, zero=empty, why="rows that see no key")]
    if family.kernel_pass is Pass.BWD_FUSED:
        return [one for part, _ in _parts(workload) for one in _expectations(part, part.inputs)]
    if family.kernel_pass is Pass.FWD:
        ref, lse = attention_reference(*inputs, **call)
        pt, empty = attention_same_precision(*inputs, **call, tf32=family.tf32), lse == float("-inf")
        lse_error = _tf32_error(inputs, call, lse) if family.tf32 else 0.0
        if workload.features.sinks is not None:  # which are in the lse of rows that see no key
            call["features"] = replace(workload.features, sinks=None)
            empty = attention_reference(*inputs, **call)[1] == float("-inf")
        numbers = _Numbers(name="out", ref=ref, pt=pt, zero=empty, why="rows that see no key")
        return [numbers, _Lse(ref=lse, more=MAX_ERROR_FACTOR * lse_error)]
    refs = gradients_from_statistics(*inputs, **call, first_key=first_key)
    pts = gradients_from_statistics(*inputs, **call, first_key=first_key, dtype=inputs[0].dtype, tf32=family.tf32)
    factor = MAX_ERROR_FACTOR
    widest = max(family.head_dim, family.head_dim_v)
    if family.softcap or (family.dtype is DType.BFLOAT16 and widest == 256 and workload.shape.gqa_group_size > 1):
        factor = LENIENT_GRADIENT_FACTOR
    if family.kernel_pass is Pass.BWD_DQ:
        empty, why = inputs[4] == float("-inf"), "rows that see no key"
        return [_Numbers(name="dq", ref=refs[0], pt=pts[0], zero=empty, why=why, factor=factor)]
    unseen, why = _unseen_keys(workload, inputs[1], first_key), "keys that no row sees"
    return [
        _Numbers(name=name, ref=refs[i], pt=pts[i], zero=unseen, why=why, factor=factor)
        for i, name in ((1, "dk"), (2, "dv"))
    ]


def _tf32_error(inputs: tuple[Tensor, ...], call: dict[str, Any], lse: Tensor) -> float:
    """The largest error that products in tf32 make in lse, relative to it where it is large."""
    q, k, v = inputs
    _, cut = attention_reference(cut_to_tf32(q), cut_to_tf32(k), v, **call)
    difference = torch.where(cut == lse, 0.0, (cut - lse).abs())
    return _largest(difference / lse.abs().clamp(min=1.0))


def _parts(workload: Workload) -> list[tuple[Workload, tuple[int, ...]]]:
    """Calls that give what a kernel gives, each with rows of one kind, and the numbers of their results among the
    kernel's: a fused backward's are that of dk and dv, and that of dq."""
    family = workload.family
    if family.kernel_pass is not Pass.BWD_FUSED:
        return [(workload, tuple(range(len(workload.outputs))))]
    *inputs, statistics, _ = workload.inputs
    inputs += lse_and_delta_of(workload.shape, statistics)
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


def _expected_stretch(workload: Workload, batch: int, head: int, start: int, stop: int) -> list[_Expectation]:
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


def _ratio(error: float, allowed: float) -> float:
    """error / allowed; rows that see no key allow none."""
    return error / allowed if allowed else float("inf") if error else 0.0


def _roundings(ref: Tensor, dtype: torch.dtype) -> Tensor:
    """Error of a rounding to the output's dtype, for each value of the reference."""
    rounded = ref.to(dtype)
    return (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)


def _largest(errors: Tensor) -> float:
    """The largest error; NaN is the largest of all."""
    return errors.nan_to_num(nan=float("inf")).max().item()
