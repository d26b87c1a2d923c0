"""What is expected of a kernel's outputs, how far each may be off, and the largest errors that were found.

The rule of `numerics` for single outputs: every kind of output has its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from fa_autotune.records import AccuracyReport

MAX_ERROR_FACTOR = 2.0
MEAN_ERROR_FACTOR = 1.5
STATISTIC_TOLERANCE = 1e-5


class WorstErrors:
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
class ExpectedNumbers:
    """An output that follows the numerics rule. `zero` marks rows that must be exactly 0, `why` says which they are.

    `terms` is the number of products behind a value; without it, as many as the output has columns.
    """

    name: str
    ref: Tensor
    pt: Tensor
    zero: Tensor
    why: str
    factor: float = MAX_ERROR_FACTOR
    terms: int | None = None

    def failures(self, written: Tensor, worst: WorstErrors) -> Iterator[str]:
        """What is wrong with an output."""
        value = written.to(self.ref.dtype)
        if not torch.isfinite(value).all():
            yield unwritten(self.name)
            return
        if (value[self.zero] != 0).any():
            yield f"{self.name}: {self.why} are not exactly 0"
        error, pt_error = (value - self.ref).abs(), (self.pt.to(self.ref.dtype) - self.ref).abs()
        roundings = _roundings(self.ref, written.dtype)
        # GPUs' exp2 is good to two units in the last place, and its argument is a product that one thread sums term by
        # term, where plain torch sums in blocks: in fp32 that shows, in 16 bits it does not.
        terms = self.ref.shape[-1] if self.terms is None else self.terms
        units = max(4.0, sqrt(terms)) if written.dtype is torch.float32 else 1.0
        allowed = self.factor * (pt_error.max().item() + units * roundings.max().item())
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
class ExpectedLse:
    """The forward's lse: close, absolutely or relatively, and −inf exactly where a row sees no key."""

    ref: Tensor
    tolerance: float

    def failures(self, written: Tensor, worst: WorstErrors) -> Iterator[str]:
        """What is wrong with an output."""
        if not torch.equal(written == float("-inf"), self.ref == float("-inf")):
            yield "lse is not −inf at exactly the rows that see no key"
        difference = torch.where(written == self.ref, 0.0, (written - self.ref).abs())
        error = largest(difference / self.ref.abs().clamp(min=1.0))
        worst.add(lse_error=error)
        if not error <= self.tolerance:
            yield f"lse error {error:.3g} > {self.tolerance:.3g}"


@dataclass(slots=True, kw_only=True)
class ExpectedDelta:
    """delta = rowsum(do ∘ out): close, absolutely or relative to the sum of the magnitudes."""

    ref: Tensor
    magnitude: Tensor

    def failures(self, written: Tensor, worst: WorstErrors) -> Iterator[str]:
        """What is wrong with an output."""
        error = (written - self.ref).abs()
        relative = largest(error / self.magnitude.clamp(min=1.0))
        worst.add(max_error=largest(error), max_ratio=relative / STATISTIC_TOLERANCE)
        if not torch.isfinite(written).all():
            yield unwritten("delta")
        elif relative > STATISTIC_TOLERANCE:
            yield f"delta error {relative:.3g} > {STATISTIC_TOLERANCE}"


@dataclass(slots=True, kw_only=True)
class ExpectedStatistics:
    """What the preprocessing gives: lse in base 2 and delta, with rows of no effect at the end."""

    ref: Tensor
    magnitude: Tensor

    def failures(self, written: Tensor, worst: WorstErrors) -> Iterator[str]:
        """What is wrong with an output."""
        if not torch.equal(written[0] == float("inf"), self.ref[0] == float("inf")):
            yield "lse is not +inf at exactly the rows that see no key and those past the end"
        difference = torch.where(written == self.ref, 0.0, (written - self.ref).abs())
        error = largest(difference / self.magnitude.clamp(min=1.0))
        worst.add(lse_error=error)
        if not error <= STATISTIC_TOLERANCE:
            yield f"statistics error {error:.3g} > {STATISTIC_TOLERANCE}"


@dataclass(slots=True, kw_only=True)
class ExpectedZeros:
    """An output that must be 0 everywhere."""

    name: str

    def failures(self, written: Tensor, worst: WorstErrors) -> Iterator[str]:
        """What is wrong with an output."""
        if written.any():
            yield f"{self.name} is not 0 everywhere"


Expectation = ExpectedNumbers | ExpectedLse | ExpectedDelta | ExpectedStatistics | ExpectedZeros


def _ratio(error: float, allowed: float) -> float:
    """error / allowed; rows that see no key allow none."""
    return error / allowed if allowed else float("inf") if error else 0.0


def _roundings(ref: Tensor, dtype: torch.dtype) -> Tensor:
    """Error of a rounding to the output's dtype, for each value of the reference."""
    rounded = ref.to(dtype)
    return (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)


def largest(errors: Tensor) -> float:
    """The largest error; NaN is the largest of all."""
    return errors.nan_to_num(nan=float("inf")).max().item()


def unwritten(name: str) -> str:
    """What is wrong with an output that holds NaN or infinities."""
    return f"{name} was left unwritten or is not finite"
