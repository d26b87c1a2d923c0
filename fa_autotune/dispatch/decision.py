"""Problem, device and winners → the kernel to run, and why: a pure function.

A row of a database counts only if its variant serves the call and its config passes every constraint of today on this
device and shape, so a foreign or hostile file can make a call slower, never wrong.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from fa_autotune.dispatch.winners import Snapshot, Source, WinnerRow
from fa_autotune.errors import FaAutotuneError, NoKernelError
from fa_autotune.problem.device import DeviceSpec, parse_triton_version
from fa_autotune.problem.distance import shape_distance
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import (
    config_label,
)
from fa_autotune.space.registry import VARIANTS, compile_form, rejection, supported_variants
from fa_autotune.space.seeds import fallback_configs

DigestOf = Callable[[Candidate], str]

# Past this distance the tile that was best there says less than the default.
MAX_DISTANCE = 8.0
_MAX_SKIPS_TOLD = 4
TUNE_COMMAND = "`fa-autotune tune --missed`"


class Origin(StrEnum):
    """Where a decision comes from, the best first."""

    EXACT = "exact"  # a winner of this problem on this device
    NEAREST = "nearest"  # a winner of another shape of the family on this device
    SIBLING = "sibling"  # a winner on another device of the same arch
    DEFAULT = "default"  # untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The kernel to run for a problem. `row` is the winner it comes from and `median_ms` that row's tuned time.

    `stale`: the row was measured with another kernel text or another Triton than today's. `trace` says how it came.
    """

    problem: AttentionProblem
    candidate: Candidate
    origin: Origin
    source: Source | None
    stale: bool
    median_ms: float | None
    row: WinnerRow | None
    trace: tuple[str, ...]

    def describe(self) -> str:
        """The decision and its trace, for people."""
        lines = [self.problem.label, f"  kernel  {self.candidate.variant} {config_label(self.candidate.config)}"]
        if self.row is None:
            lines.append(f"  origin  {self.origin}, untuned")
        else:
            age = "stale" if self.stale else "fresh"
            tuned = f"{self.median_ms:.4g} ms on {self.row.problem.shape.label}, {self.row.device_name}"
            lines += [f"  origin  {self.origin}, {age} row of {self.row.path} ({self.source})", f"  tuned   {tuned}"]
        return "\n".join([*lines, "  why", *(f"    {line}" for line in self.trace)])

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        row = self.row
        return {
            "problem": {**self.problem.family.as_json(), **self.problem.shape.as_json()},
            "variant": self.candidate.variant.value,
            "config": asdict(self.candidate.config),
            "origin": self.origin.value,
            "source": self.source and self.source.value,
            "stale": self.stale,
            "median_ms": self.median_ms,
            "row": row
            and {
                "problem": row.problem.key,
                "device": row.device_name,
                "device_fingerprint": row.device_fingerprint,
                "triton": row.triton,
                "confirmed_at": row.confirmed_at,
                "path": str(row.path),
            },
            "trace": list(self.trace),
        }


def decide(
    problem: AttentionProblem,
    *,
    device: DeviceSpec,
    triton_version: str,
    snapshot: Snapshot,
    digest_of: DigestOf | None = None,
) -> Decision:
    """Choose the kernel for a problem: exact winner, else nearest shape, else sibling device, else a default.

    A pure function of its arguments. Without `digest_of` only another Triton makes a row stale. NoKernelError if no
    variant serves the family on this device.
    """
    search = _Search(problem=problem, device=device, triton_version=triton_version, digest_of=digest_of)
    related = search.served(snapshot.related(problem.family))
    for origin, groups_of in (
        (Origin.EXACT, search.exact),
        (Origin.NEAREST, search.nearest),
        (Origin.SIBLING, search.siblings),
    ):
        for group in groups_of(related):
            if choice := search.choose(group, origin):
                return search.tuned(choice, group, origin)
    return search.untuned()


# --- one search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The winners of one shape, compile form and device: what may be compared by time."""

    rows: tuple[WinnerRow, ...]
    distance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    row: WinnerRow
    candidate: Candidate
    stale_because: str | None
    remark: str | None

    @property
    def rung(self) -> tuple[bool, bool]:
        """Smaller comes first: user fresh, pack fresh, user stale, pack stale."""
        return self.stale_because is not None, self.row.source is Source.PACK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One decision being made: its fixed inputs, and the trace so far."""

    problem: AttentionProblem
    device: DeviceSpec
    triton_version: str
    digest_of: DigestOf | None
    told: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def served(self, rows: Iterable[WinnerRow]) -> list[WinnerRow]:
        """The rows whose variant can serve this call."""
        refused = self.refused_variants()
        self.told.extend(f"{variant} can't serve this call: {reason}" for variant, reason in refused.items())
        return [row for row in rows if row.candidate.variant not in refused]

    def refused_variants(self) -> dict[Variant, str]:
        family, version = self.problem.family, parse_triton_version(self.triton_version)
        specs = [spec for spec in VARIANTS if spec.kernel_pass is family.kernel_pass]
        return {spec.variant: why for spec in specs if (why := spec.supports(family, self.device.arch, version))}

    def exact(self, related: list[WinnerRow]) -> list[_Group]:
        """The winners of this very problem; access may differ where the compiled kernel is the same."""
        rows = tuple(row for row in related if self.is_here(row) and self.is_exact(row))
        return [_Group(rows=rows)] if rows else []

    def nearest(self, related: list[WinnerRow]) -> list[_Group]:
        return self.by_distance(row for row in related if self.is_here(row) and not self.is_exact(row))

    def siblings(self, related: list[WinnerRow]) -> list[_Group]:
        return self.by_distance(row for row in related if row.device_arch == self.device.arch and not self.is_here(row))

    def is_here(self, row: WinnerRow) -> bool:
        return row.device_fingerprint == self.device.fingerprint and row.device_arch == self.device.arch

    def is_exact(self, row: WinnerRow) -> bool:
        return row.problem.shape == self.problem.shape and self.same_form(row)

    def same_form(self, row: WinnerRow) -> bool:
        return compile_form(row.problem.family) is compile_form(self.problem.family)

    def by_distance(self, rows: Iterable[WinnerRow]) -> list[_Group]:
        gathered: dict[tuple[AttentionShape, bool, str], list[WinnerRow]] = {}
        for row in rows:
            gathered.setdefault((row.problem.shape, self.same_form(row), row.device_fingerprint), []).append(row)
        groups: list[tuple[tuple[float, float, float], _Group]] = []
        for (_, same_form, fingerprint), members in gathered.items():
            # Another compile form moves data differently: as far off as a doubling of the loop.
            distance = shape_distance(self.problem, members[0].problem, self.device.num_sms) + (not same_form)
            if distance <= MAX_DISTANCE:
                order = (distance, _device_gap(self.device, fingerprint), min(row.median_ms for row in members))
                groups.append((order, _Group(rows=tuple(members), distance=distance)))
            else:
                self.skip(f"{members[0].problem.label} is {distance:.1f} doublings away, the limit is {MAX_DISTANCE:g}")
        # Sorting is stable and a snapshot's rows have one order, so ties fall alike on every rank; as in `choose`.
        return [group for _, group in sorted(groups, key=lambda pair: pair[0])]

    def choose(self, group: _Group, origin: Origin) -> _Choice | None:
        """The fastest usable row of the first of: user fresh, pack fresh, user stale, pack stale."""
        choices = [choice for row in group.rows if (choice := self.usable(row, origin))]
        if not choices:
            return None
        rung = min(choice.rung for choice in choices)
        level = [choice for choice in choices if choice.rung == rung]
        # Figures of different regimes can't be compared; those of the newest measurement are.
        regime = max(level, key=lambda choice: choice.row.confirmed_at).row.regime
        own_access = self.problem.family.access
        return min(
            (choice for choice in level if choice.row.regime is regime),
            key=lambda choice: (choice.row.median_ms, choice.row.problem.family.access is not own_access),
        )

    def usable(self, row: WinnerRow, origin: Origin) -> _Choice | None:
        """The row's config as a candidate of this call's family, or None (told in the trace) if it can't run."""
        candidate = Candidate(family=self.problem.family, variant=row.candidate.variant, config=row.candidate.config)
        remark = None
        rejected = rejection(candidate, self.problem.shape, self.device)
        if rejected and rejected.constraint == "exact_lengths" and origin is not Origin.EXACT:
            remark = f"EXACT_LENGTHS is turned off: {rejected.reason}"
            candidate = replace(candidate, config=replace(candidate.config, EXACT_LENGTHS=False))  # type: ignore[arg-type]
            rejected = rejection(candidate, self.problem.shape, self.device)
        if rejected:
            self.skip(f"{_row_label(row)} can't run here: {rejected.constraint}: {rejected.reason}")
            return None
        return _Choice(row=row, candidate=candidate, stale_because=self.stale_because(row), remark=remark)

    def stale_because(self, row: WinnerRow) -> str | None:
        if _public_version(row.triton) != _public_version(self.triton_version):
            return f"measured with Triton {row.triton}, this is {self.triton_version}"
        if self.digest_of is None:
            return None
        try:
            digest = self.digest_of(row.candidate)
        except FaAutotuneError as error:
            return f"its kernel does not render: {error}"
        if digest == row.kernel_digest:
            return None
        return f"its template changed: kernel {row.kernel_digest} is now {digest}"

    def skip(self, reason: str) -> None:
        self.skipped.append(reason)

    def tuned(self, choice: _Choice, group: _Group, origin: Origin) -> Decision:
        row = choice.row
        where = "" if origin is Origin.EXACT else f" of {row.problem.label}, {group.distance:.2f} doublings away"
        device = f" on {row.device_name} ({row.device_fingerprint})" if origin is Origin.SIBLING else ""
        lines = [f"{origin}: {_row_label(row)}{where}{device}, fastest of {len(group.rows)} winners there"]
        if row.problem.family.access is not self.problem.family.access:
            lines.append(f"tuned with access={row.problem.family.access}, called with {self.problem.family.access}")
        if choice.remark:
            lines.append(choice.remark)
        if choice.stale_because:
            lines.append(f"stale: {choice.stale_because}; `fa-autotune tune` on that problem measures it again")
        return Decision(
            problem=self.problem,
            candidate=choice.candidate,
            origin=origin,
            source=row.source,
            stale=choice.stale_because is not None,
            median_ms=row.median_ms,
            row=row,
            trace=self.full_trace(lines),
        )

    def untuned(self) -> Decision:
        family = self.problem.family
        for spec in supported_variants(family, self.device.arch, parse_triton_version(self.triton_version)):
            for attempt, config in enumerate(fallback_configs(spec, self.problem, self.device.arch)):
                candidate = Candidate(family=family, variant=spec.variant, config=config)
                if (rejected := rejection(candidate, self.problem.shape, self.device)) is None:
                    return self.default(candidate)
                if attempt == 0:
                    self.skip(f"default {spec.variant} {config_label(config)}: {rejected.reason}")
        raise NoKernelError(
            f"no kernel serves {self.problem.label} on {self.device.name} ({self.device.arch}), Triton "
            f"{self.triton_version}: {'; '.join([*self.told, *self.skipped[-_MAX_SKIPS_TOLD:]])}"
        )

    def default(self, candidate: Candidate) -> Decision:
        label = f"{candidate.variant} {config_label(candidate.config)}"
        return Decision(
            problem=self.problem,
            candidate=candidate,
            origin=Origin.DEFAULT,
            source=None,
            stale=False,
            median_ms=None,
            row=None,
            trace=self.full_trace(
                [f"default: {label}; no winner serves this call, {TUNE_COMMAND} tunes what was missed"]
            ),
        )

    def full_trace(self, lines: list[str]) -> tuple[str, ...]:
        skipped = [f"passed over: {reason}" for reason in self.skipped[:_MAX_SKIPS_TOLD]]
        if len(self.skipped) > _MAX_SKIPS_TOLD:
            skipped.append(f"passed over: {len(self.skipped) - _MAX_SKIPS_TOLD} more")
        start = f"{self.device.name} ({self.device.fingerprint}), Triton {self.triton_version}"
        return (start, *self.told, *skipped, *lines)


def _row_label(row: WinnerRow) -> str:
    config = config_label(row.candidate.config)
    return f"{row.candidate.variant} {config}, {row.median_ms:.4g} ms ({row.source} {row.path.name})"


def _public_version(version: str) -> str:
    return version.partition("+")[0]


def _device_gap(device: DeviceSpec, fingerprint: str) -> float:
    """How many doublings another device's SM count is away; its fingerprint is all that a row says about it."""
    match = re.search(r"/(\d{1,6})sm/", fingerprint)
    return round(abs(math.log2(int(match[1]) / device.num_sms)), 6) if match and int(match[1]) else math.inf
