"""Check a kernel against the reference before it may be timed or win.

The rule (design §2): max|out − ref| ≤ 2·max|pt − ref| + atol and mean error ≤ 1.5·pt's, where pt is plain torch in the
inputs' precision and atol two roundings, (ref + 0.3 − 0.3) − ref, of the output dtype; lse within 1e-5; exact zeros and
−inf are checked exactly.
Outputs are poisoned with NaN and surrounded by canaries, unused keys hold NaN, and every launch is repeated: the two
results must be equal bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fa_autotune.problem import AttentionFamily, AttentionProblem, AttentionShape
from fa_autotune.records import AccuracyReport
from fa_autotune.reference import (
    TORCH_DTYPES,
    attention_reference,
    attention_same_precision,
    seeded_inputs,
)

# (q, k, v, out, lse, softmax_scale, diagonal) -> None, writing out and lse: `launch.LoadedKernel`.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], None]

MAX_ERROR_FACTOR = 2.0
MEAN_ERROR_FACTOR = 1.5
LSE_TOLERANCE = 1e-5
CANARY_ROWS = 3  # rows of the output's storage before and after it that must stay untouched
SAMPLED_HEADS = 4
SAMPLED_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One small call that a kernel must get right. `top_left` puts the diagonal at 0 instead of bottom-right."""

    shape: AttentionShape
    scale: float = 1.0
    top_left: bool = False
    seed: int = 0

    def diagonal(self, family: AttentionFamily) -> int | None:
        """The kernel's diagonal argument for this probe."""
        if not family.bounded_right:
            return None
        return 0 if self.top_left else self.shape.seqlen_k - self.shape.seqlen_q


def probes(family: AttentionFamily, *, block_m: int, block_n: int, exact_lengths: bool) -> list[Probe]:
    """Calls around a kernel's blocks: ragged ends, both orders of the lengths, GQA, empty rows, large magnitudes."""

    def shape(seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads: int = 2, group: int = 1) -> AttentionShape:
        return AttentionShape(
            batch_size=batch, num_q_heads=heads, num_kv_heads=heads // group, seqlen_q=seqlen_q, seqlen_k=seqlen_k
        )

    if exact_lengths:
        return [
            Probe(shape=shape(2 * block_m, (2 * block_m // block_n + 1) * block_n, batch=2, heads=4, group=2)),
            Probe(shape=shape((block_n // block_m + 2) * block_m, block_n), scale=4.0, seed=1),
            Probe(shape=shape(block_m, (block_m // block_n + 1) * block_n), top_left=True, seed=2),
        ]
    long = 2 * max(block_m, block_n)
    return [
        Probe(shape=shape(block_m + 1, block_m + 2 * block_n - 1, batch=2, heads=6, group=3)),
        Probe(shape=shape(long + 3, block_n - 1), seed=1),  # causal: rows without a visible key
        Probe(shape=shape(long + 1, long + 1), scale=4.0, seed=2),
        Probe(shape=shape(1, block_n + 1, batch=3), seed=3),
        Probe(shape=shape(long, long), top_left=True, seed=4),
        Probe(shape=shape(block_m - 1, long + 5), top_left=True, scale=4.0, seed=5),
    ]


def verify(
    kernel: Kernel, family: AttentionFamily, probe_list: Sequence[Probe], device: torch.device
) -> AccuracyReport:
    """Run a kernel on every probe, twice, and compare with the reference. Launch errors propagate."""
    worst = _Worst()
    for probe in probe_list:
        expected = _expected(family, probe, str(device))
        first = _Output(family, probe.shape, device)
        second = _Output(family, probe.shape, device)
        for output in (first, second):
            kernel(
                expected.q, expected.k, expected.v, output.out, output.lse, expected.softmax_scale, expected.diagonal
            )
        name = f"{probe.shape.label}{' top-left' if probe.top_left else ''}"
        worst.failures += [f"{name}: {text}" for text in _compare(expected, first, second, worst)]
    return worst.report(len(probe_list))


def verify_sampled(
    kernel: Kernel, problem: AttentionProblem, inputs: tuple[Tensor, Tensor, Tensor], softmax_scale: float
) -> AccuracyReport:
    """Check a kernel at a problem's own size: sampled heads and rows against the reference, all of it bit-equal twice.

    The rows are the first, the last and a middle stretch of each sampled head: the reference of all would not fit.
    """
    q, k, v = inputs
    family, shape = problem.family, problem.shape
    diagonal = shape.seqlen_k - shape.seqlen_q if family.bounded_right else None
    first, second = _Output(family, shape, q.device), _Output(family, shape, q.device)
    for output in (first, second):
        kernel(q, k, v, output.out, output.lse, softmax_scale, diagonal)
    worst = _Worst()
    worst.failures += [*first.damage(), *_unequal(first, second)]
    if not torch.isfinite(first.out).all():
        worst.failures.append("outputs were left unwritten or are not finite")
    count = 0
    for batch, head, start, stop in _samples(shape):
        kv_head = head // shape.gqa_group_size
        q_part = q[batch : batch + 1, head : head + 1, start:stop]
        k_part, v_part = (tensor[batch : batch + 1, kv_head : kv_head + 1] for tensor in (k, v))
        ref, lse = attention_reference(
            q_part, k_part, v_part, softmax_scale=softmax_scale, diagonal=diagonal, first_row=start
        )
        out = first.out[batch : batch + 1, head : head + 1, start:stop]
        # Plain torch in the same precision would err by about a rounding of P and one of the output.
        allowed = 2 * MAX_ERROR_FACTOR * _roundings(ref, out.dtype).max().item()
        error = (out.to(ref.dtype) - ref).abs().max().item()
        lse_error = _lse_error(first.lse[batch, head, start:stop], lse[0, 0])
        worst.add(max_error=error, max_ratio=_ratio(error, allowed), lse_error=lse_error)
        place = f"batch {batch} head {head} rows {start}…{stop - 1}"
        if error > allowed:
            worst.failures.append(f"{place}: error {error:.3g} > {allowed:.3g}")
        if (out[lse == float("-inf")] != 0).any():
            worst.failures.append(f"{place}: rows that see no key are not exactly 0")
        if not lse_error <= LSE_TOLERANCE:
            worst.failures.append(f"{place}: lse error {lse_error:.3g} > {LSE_TOLERANCE}")
        count += 1
    return worst.report(count)


@dataclass(slots=True)
class _Expected:
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    diagonal: int | None
    ref: Tensor
    lse: Tensor
    pt: Tensor


class _Worst:
    """Collects the largest errors over probes."""

    def __init__(self) -> None:
        self.max_error = self.max_ratio = self.mean_ratio = self.lse_error = 0.0
        self.failures: list[str] = []

    def add(self, *, max_error: float, max_ratio: float, lse_error: float, mean_ratio: float = 0.0) -> None:
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


class _Output:
    """NaN-poisoned out and lse, each inside a larger poisoned buffer whose margins a kernel must not touch."""

    def __init__(self, family: AttentionFamily, shape: AttentionShape, device: torch.device) -> None:
        rows = shape.batch_size * shape.num_q_heads * shape.seqlen_q
        size = (shape.batch_size, shape.num_q_heads, shape.seqlen_q)
        # Whole 16-byte units before the output, so that its pointer keeps the alignment that the family promises.
        self._margin = 16 * CANARY_ROWS * family.head_dim_v
        self._lse_margin = 16 * CANARY_ROWS
        values = rows * family.head_dim_v
        self._buffer = torch.full(
            (values + 2 * self._margin,), float("nan"), dtype=TORCH_DTYPES[family.dtype], device=device
        )
        self._lse_buffer = torch.full((rows + 2 * self._lse_margin,), float("nan"), dtype=torch.float32, device=device)
        self.out = self._buffer[self._margin : self._margin + values].view(*size, family.head_dim_v)
        self.lse = self._lse_buffer[self._lse_margin : self._lse_margin + rows].view(*size)

    def damage(self) -> Iterator[str]:
        """What was written outside of the outputs."""
        for name, buffer, margin in (("out", self._buffer, self._margin), ("lse", self._lse_buffer, self._lse_margin)):
            if not (torch.isnan(buffer[:margin]).all() and torch.isnan(buffer[-margin:]).all()):
                yield f"wrote outside of {name}"


@lru_cache(maxsize=64)
def _expected(family: AttentionFamily, probe: Probe, device_name: str) -> _Expected:
    device = torch.device(device_name)
    q, k, v = seeded_inputs(family, probe.shape, device=device, seed=probe.seed, scale=probe.scale)
    diagonal = probe.diagonal(family)
    softmax_scale = family.head_dim**-0.5
    ref, lse = attention_reference(q, k, v, softmax_scale=softmax_scale, diagonal=diagonal)
    pt = attention_same_precision(q, k, v, softmax_scale=softmax_scale, diagonal=diagonal)
    if diagonal is not None and (unseen := max(0, probe.shape.seqlen_q + diagonal)) < probe.shape.seqlen_k:
        k[:, :, unseen:] = float("nan")  # keys that no row sees
        v[:, :, unseen:] = float("nan")
    return _Expected(q=q, k=k, v=v, softmax_scale=softmax_scale, diagonal=diagonal, ref=ref, lse=lse, pt=pt)


def _compare(expected: _Expected, first: _Output, second: _Output, worst: _Worst) -> Iterator[str]:
    yield from first.damage()
    yield from _unequal(first, second)
    out, ref = first.out.to(expected.ref.dtype), expected.ref
    if not torch.isfinite(out).all():
        yield "outputs were left unwritten or are not finite"
        return
    empty = expected.lse == float("-inf")
    if not torch.equal(first.lse == float("-inf"), empty):
        yield "lse is not −inf at exactly the rows that see no key"
    if (out[empty] != 0).any():
        yield "rows that see no key are not exactly 0"
    error, pt_error = (out - ref).abs(), (expected.pt.to(ref.dtype) - ref).abs()
    roundings = _roundings(ref, first.out.dtype)
    allowed = MAX_ERROR_FACTOR * (pt_error.max().item() + roundings.max().item())
    # GPUs' exp2 is good to two units in the last place: in fp32 that shows, in 16 bits it does not.
    units = 2 if first.out.dtype is torch.float32 else 1
    mean_allowed = MEAN_ERROR_FACTOR * pt_error.mean().item() + units * roundings.mean().item()
    max_error, mean_error = error.max().item(), error.mean().item()
    lse_error = _lse_error(first.lse, expected.lse)
    worst.add(
        max_error=max_error,
        max_ratio=_ratio(max_error, allowed),
        mean_ratio=_ratio(mean_error, mean_allowed),
        lse_error=lse_error,
    )
    if max_error > allowed:
        yield f"error {max_error:.3g} > {allowed:.3g} (plain torch errs by {pt_error.max().item():.3g})"
    if mean_error > mean_allowed:
        yield f"mean error {mean_error:.3g} > {mean_allowed:.3g}"
    if not lse_error <= LSE_TOLERANCE:
        yield f"lse error {lse_error:.3g} > {LSE_TOLERANCE}"


def _unequal(first: _Output, second: _Output) -> Iterator[str]:
    """Bitwise: NaN equals NaN only as the same bits, so a race is seen even where both runs are wrong."""
    for name, one, other in (("out", first.out, second.out), ("lse", first.lse, second.lse)):
        integers = torch.int32 if one.element_size() == 4 else torch.int16
        if not torch.equal(one.view(integers), other.view(integers)):
            yield f"two launches gave different bits in {name}"


def _ratio(error: float, allowed: float) -> float:
    """error / allowed; rows that see no key allow none."""
    return error / allowed if allowed else float("inf") if error else 0.0


def _roundings(ref: Tensor, dtype: torch.dtype) -> Tensor:
    """Error of a rounding to the output's dtype, for each value of the reference."""
    rounded = ref.to(dtype)
    return (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)


def _lse_error(lse: Tensor, expected: Tensor) -> float:
    """Largest error, absolute or relative, whichever is smaller; −inf equals −inf."""
    difference = torch.where(lse == expected, 0.0, (lse - expected).abs())
    return (difference / expected.abs().clamp(min=1.0)).nan_to_num(nan=float("inf")).max().item()


def _samples(shape: AttentionShape) -> Iterator[tuple[int, int, int, int]]:
    """(batch, head, first row, end) of the sampled stretches."""
    total = shape.batch_size * shape.num_q_heads
    for place in sorted({0, total // 3, 2 * total // 3, total - 1})[:SAMPLED_HEADS]:
        batch, head = divmod(place, shape.num_q_heads)
        rows = min(SAMPLED_ROWS, shape.seqlen_q)
        for start in sorted({0, (shape.seqlen_q - rows) // 2, shape.seqlen_q - rows}):
            yield batch, head, start, start + rows
