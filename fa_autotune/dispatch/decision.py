"""Problem, device and winners → the kernel to run, and why: a pure function.

A row of a database counts only if its variant serves the call and its config passes every constraint of today on this
device and shape, so a foreign or hostile file can make a call slower, never wrong.

What does not depend on the shape is worked out once for a family, so that choosing for one more shape is a few
comparisons of numbers. A trace is the same choice, made again and told.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from fa_autotune.dispatch.winners import Snapshot, Source, StoppedKernel, WinnerRow
from fa_autotune.errors import FaAutotuneError, NoKernelError
from fa_autotune.problem.device import DeviceSpec, parse_triton_version, triton_release
from fa_autotune.problem.distance import ROUNDED_BY, ShapeFeatures, distance, shape_features, unrounded_distance
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig, config_label
from fa_autotune.space.constraints import Rejected, ShapeNeeds
from fa_autotune.space.registry import (
    VARIANTS,
    VariantSpec,
    compile_form,
    rejection,
    supported_variants,
    variant_spec,
)
from fa_autotune.space.seeds import fallback_configs
from fa_autotune.space.support import untested

DigestOf = Callable[[Candidate], str]

# Past this distance the tile that was best there says less than the default.
MAX_DISTANCE = 8.0
_MAX_SKIPS_TOLD = 4
_RELEASES_OF_A_MAJOR = 1_000
TUNE_COMMAND = "`fa-autotune tune --missed`"


class Origin(StrEnum):
    """Where a decision comes from, the best first."""

    EXACT = "exact"  # a winner of this problem on this device
    NEAREST = "nearest"  # a winner of another shape of the family on this device
    SIBLING = "sibling"  # a winner on another device of the same arch
    DEFAULT = "default"  # untuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The kernel to run. `row` is the winner it comes from; `stale`: that was measured with another kernel text or
    another release of Triton (its major and minor version) than today's."""

    candidate: Candidate
    origin: Origin
    stale: bool = False
    row: WinnerRow | None = None

    @property
    def source(self) -> Source | None:
        """Whose winner it is."""
        return self.row.source if self.row else None

    @property
    def median_ms(self) -> float | None:
        """The winner's tuned time."""
        return self.row.median_ms if self.row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Choice):
    """The kernel to run for a problem; `trace` says how it came."""

    problem: AttentionProblem
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
    choices = FamilyChoices(
        problem.family, device=device, triton_version=triton_version, snapshot=snapshot, digest_of=digest_of
    )
    return choices.decide(problem.shape)


class FamilyChoices:
    """The kernels of one family on a device, for one shape after another.

    Nothing is kept of a shape. What is worked out when it is first asked for (whether a row is stale, how small a
    default can be) holds for all of them, and the same row or default gives the same objects again. Not thread-safe.
    """

    def __init__(
        self,
        family: AttentionFamily,
        *,
        device: DeviceSpec,
        triton_version: str,
        snapshot: Snapshot,
        digest_of: DigestOf | None = None,
        lost: Mapping[Variant, str] = MappingProxyType({}),
    ) -> None:
        """Arguments as of `decide`; `lost`: variants of the pass that do not compile here, and why."""
        version = parse_triton_version(triton_version)
        self._setting = setting = _Setting(
            family=family, device=device, triton_version=triton_version, digest_of=digest_of
        )
        specs = [spec for spec in VARIANTS if spec.kernel_pass is family.kernel_pass]
        self._refused: dict[Variant, str] = {
            spec.variant: why
            for spec in specs
            if (why := lost.get(spec.variant) or spec.supports(family, device.arch, version))
        }
        self._untested = untested(version)
        rows = [
            row
            for row in snapshot.related(family)
            if row.candidate.variant not in self._refused and row.device_arch == device.arch
        ]
        self._stopped = setting.stopped(rows, snapshot.stopped)
        rows = [row for row in rows if row not in self._stopped]
        fingerprint = device.fingerprint
        self._here = setting.groups(row for row in rows if row.device_fingerprint == fingerprint)
        self._siblings = setting.groups(row for row in rows if row.device_fingerprint != fingerprint)
        # Access may differ where the compiled kernel is the same.
        self._exact = {group.shape: group for group in self._here if group.same_form}
        served = supported_variants(family, device.arch, version)
        self._defaults = [_Defaults(setting, spec) for spec in served if spec.variant not in lost]

    def choose(self, shape: AttentionShape) -> Choice:
        """The kernel for a shape; NoKernelError if none serves."""
        return self.find(shape) or self.decide(shape)  # which raises, and says why

    def find(self, shape: AttentionShape) -> Choice | None:
        """The kernel for a shape, or None if none serves."""
        return self._find(shape, None)

    def find_exact(self, shape: AttentionShape) -> Choice | None:
        """The kernel for a shape if that is a winner of this very shape, else None."""
        group = self._exact.get(shape)
        return group.best(shape, Origin.EXACT, None) if group else None

    def serves(self, shape: AttentionShape) -> bool:
        """Whether there is a kernel for a shape."""
        return any(one.find(shape, None) for one in self._defaults) or self.find(shape) is not None

    def decide(self, shape: AttentionShape) -> Decision:
        """The kernel for a shape, and why; NoKernelError if none serves."""
        setting, trace = self._setting, _Trace()
        problem, device = AttentionProblem(family=setting.family, shape=shape), setting.device
        choice = self._find(shape, trace)
        told = [self._untested] if self._untested else []
        told += [f"{variant} can't serve this call: {reason}" for variant, reason in self._refused.items()]
        told += list(dict.fromkeys(f"{_row_label(row)} is passed over: {why}" for row, why in self._stopped.items()))
        if choice is None:
            raise NoKernelError(
                f"no kernel serves {problem.label} on {device.name} ({device.arch}), Triton {setting.triton_version}: "
                f"{'; '.join([*told, *trace.skipped[-_MAX_SKIPS_TOLD:]])}"
            )
        start = f"{device.name} ({device.fingerprint}), Triton {setting.triton_version}"
        if choice.row is not None and trace.group is not None:
            lines = trace.group.reasons(choice, choice.row, shape)
        else:
            label = f"{choice.candidate.variant} {config_label(choice.candidate.config)}"
            lines = [f"default: {label}; no winner serves this call, {TUNE_COMMAND} tunes what was missed"]
        return Decision(
            candidate=choice.candidate,
            origin=choice.origin,
            stale=choice.stale,
            row=choice.row,
            problem=problem,
            trace=(start, *told, *trace.first_skipped(), *lines),
        )

    def _find(self, shape: AttentionShape, trace: "_Trace | None") -> Choice | None:
        """The rules: the first of these that may run; what is passed over is told to a trace, if there is one."""
        exact = self._exact.get(shape)
        if exact and (choice := exact.best(shape, Origin.EXACT, trace)):
            return choice
        for origin, groups in ((Origin.NEAREST, self._here), (Origin.SIBLING, self._siblings)):
            others = [group for group in groups if group is not exact]
            for group in self._nearest_first(others, shape, trace):
                if choice := group.best(shape, origin, trace):
                    return choice
        for default in self._defaults:
            if choice := default.find(shape, trace):
                return choice
        return None

    def _nearest_first(
        self, groups: "Sequence[_Group]", shape: AttentionShape, trace: "_Trace | None"
    ) -> "Iterator[_Group]":
        """Those of the groups that are near enough."""
        if not groups:
            return
        features = shape_features(self._setting.family, shape, self._setting.device.num_sms)
        if trace is not None:
            trace.pass_over_far(groups, features)
        # Nearly always one is asked for. Rounding takes as long as all else, and is for those that it may make equal.
        apart = [unrounded_distance(features, group.features) + group.form_gap for group in groups]
        limit = min(apart) + 2 * ROUNDED_BY
        nearest = min(
            [group for group, far in zip(groups, apart, strict=True) if far <= limit],
            key=lambda group: group.order(features),
        )
        if nearest.distance(features) > MAX_DISTANCE:
            return
        yield nearest
        # Sorting is stable and a snapshot's rows have one order, so ties fall alike on every rank; as with `min`.
        for group in sorted(groups, key=lambda group: group.order(features)):
            if group is not nearest and group.distance(features) <= MAX_DISTANCE:
                yield group


# --- what holds for every shape of a family ---------------------------------------------------------------------------


class _Setting:
    """A family and what its kernels run on."""

    def __init__(
        self, *, family: AttentionFamily, device: DeviceSpec, triton_version: str, digest_of: DigestOf | None
    ) -> None:
        self.family = family
        self.device = device
        self.triton_version = triton_version
        self._digest_of = digest_of
        self._candidates: dict[tuple[Variant, KernelConfig], Candidate] = {}

    def candidate(self, variant: Variant, config: KernelConfig) -> Candidate:
        """The family's candidate with a config, one object however many rows have it."""
        found = Candidate(family=self.family, variant=variant, config=config)
        return self._candidates.setdefault((variant, config), found)

    def needs(self, candidate: Candidate) -> ShapeNeeds | Rejected:
        """What a candidate asks of a shape, or why it can't run on any."""
        spec = variant_spec(self.family.kernel_pass, candidate.variant)
        return spec.shape_needs(candidate.config, family=self.family, device=self.device)

    def groups(self, rows: Iterable[WinnerRow]) -> "list[_Group]":
        """The rows by what may be compared, in their order."""
        form = compile_form(self.family)
        gathered: dict[tuple[AttentionShape, bool, str], list[WinnerRow]] = {}
        for row in rows:
            same_form = compile_form(row.problem.family) is form
            gathered.setdefault((row.problem.shape, same_form, row.device_fingerprint), []).append(row)
        return [_Group(self, members, same_form=same_form) for (_, same_form, _), members in gathered.items()]

    def stopped(self, rows: Iterable[WinnerRow], kernels: Iterable[StoppedKernel]) -> dict[WinnerRow, str]:
        """The rows of other releases whose kernel, in today's text, a gate stops with this one; and why."""
        release = triton_release(self.triton_version)
        here = [one for one in kernels if (one.arch, one.release) == (self.device.arch, release)]
        gates = {(one.candidate, one.digest): one.gate for one in here}
        candidates = {one.candidate for one in here}  # rendered only where it may matter
        others = [row for row in rows if row.candidate in candidates and self.releases_away(row)]
        found = {row: gates.get((row.candidate, self._digest(row))) for row in others}
        return {row: f"the gate {gate} stopped it with Triton {release}" for row, gate in found.items() if gate}

    def _digest(self, row: WinnerRow) -> str:
        """The digest of a row's kernel today; the one that it was measured with where that is not asked for."""
        if self._digest_of is None:
            return row.kernel_digest
        try:
            return self._digest_of(row.candidate)
        except FaAutotuneError:
            return ""  # it does not render, and nothing is served by it

    def releases_away(self, row: WinnerRow) -> int:
        """How many releases lie between the Triton that a row was measured with and this one: 0 for the same one."""
        if triton_release(row.triton) == triton_release(self.triton_version):
            return 0
        return max(1, abs(_place(row.triton) - _place(self.triton_version)))

    def stale_because(self, row: WinnerRow) -> str | None:
        """Why a row no longer tells the time of its kernel, or None."""
        if self.releases_away(row):
            return f"measured with Triton {row.triton}, this is {self.triton_version}"
        if self._digest_of is None:
            return None
        try:
            digest = self._digest_of(row.candidate)
        except FaAutotuneError as error:
            return f"its kernel does not render: {error}"
        if digest == row.kernel_digest:
            return None
        return f"its template changed: kernel {row.kernel_digest} is now {digest}"


class _Group:
    """The winners of one shape, compile form and device: what may be compared by time."""

    def __init__(self, setting: _Setting, rows: Sequence[WinnerRow], *, same_form: bool) -> None:
        self._setting = setting
        self._winners = [_Winner(setting, row) for row in rows]
        self.problem = rows[0].problem
        self.shape = self.problem.shape
        self.same_form = same_form
        # Another compile form moves data differently: as far off as a doubling of the loop.
        self.form_gap = 0 if same_form else 1
        self.features = shape_features(self.problem.family, self.shape, setting.device.num_sms)
        self._tie = _device_gap(setting.device, rows[0].device_fingerprint), min(row.median_ms for row in rows)

    def distance(self, features: ShapeFeatures) -> float:
        """How far a shape is from these winners' own, in doublings."""
        return distance(features, self.features) + self.form_gap

    def order(self, features: ShapeFeatures) -> tuple[float, float, float]:
        """What is least where these winners serve a shape best."""
        return (self.distance(features), *self._tie)

    def best(self, shape: AttentionShape, origin: Origin, trace: "_Trace | None") -> Choice | None:
        """The fastest usable row of the first of: user fresh, pack fresh, user stale, pack stale; of the stale ones,
        those whose release of Triton is nearest."""
        if trace is not None:
            trace.group = self
            trace.skipped += [why for winner in self._winners if (why := winner.refusal(shape, origin))]
        compared = self._compared(shape, origin)
        return compared[0].choice(origin) if compared else None

    def _compared(self, shape: AttentionShape, origin: Origin) -> "list[_Form]":
        """The usable rows that are compared by time, since they go before the others; the fastest first."""
        usable = [form for winner in self._winners if (form := winner.form_for(shape, origin))]
        if len(usable) < 2:
            return usable
        rung = min(form.rung for form in usable)
        level = [form for form in usable if form.rung == rung]
        # Figures of different regimes can't be compared; those of the newest measurement are.
        regime = max(level, key=lambda form: form.row.confirmed_at).row.regime
        return sorted((form for form in level if form.row.regime is regime), key=lambda form: form.speed)

    def reasons(self, choice: Choice, row: WinnerRow, shape: AttentionShape) -> list[str]:
        """Why it is that row of these, and what else is to be said of it."""
        setting, where, device = self._setting, "", ""
        if choice.origin is not Origin.EXACT:
            doublings = self.distance(shape_features(setting.family, shape, setting.device.num_sms))
            where = f" of {row.problem.label}, {doublings:.2f} doublings away"
        if choice.origin is Origin.SIBLING:
            device = f" on {row.device_name} ({row.device_fingerprint})"
        compared, known = len(self._compared(shape, choice.origin)), len(self._winners)
        among = f"fastest of {known} winners there"
        if compared < known:
            among = f"fastest of the {compared} that go first of {known} winners there"
        lines = [f"{choice.origin}: {_row_label(row)}{where}{device}, {among}"]
        if row.problem.family.access is not setting.family.access:
            lines.append(f"tuned with access={row.problem.family.access}, called with {setting.family.access}")
        if choice.candidate.config != row.candidate.config:
            as_tuned = replace(choice.candidate, config=row.candidate.config)
            rejected = rejection(as_tuned, shape, setting.device)
            lines.append(f"EXACT_LENGTHS is turned off: {rejected and rejected.reason}")
        if row.measured_as:
            lines.append(f"timed as kernel {row.measured_as}, which is the same machine code")
        if because := setting.stale_because(row):
            lines.append(f"stale: {because}; `fa-autotune tune` on that problem measures it again")
        return lines


class _Winner:
    """A row and the forms in which its kernel may run for a family: as it was tuned, and without EXACT_LENGTHS."""

    def __init__(self, setting: _Setting, row: WinnerRow) -> None:
        self._setting = setting
        self._row = row

    @cached_property
    def _as_tuned(self) -> "_Form":
        return _Form(self._setting, self._row, self._row.candidate.config)

    @cached_property
    def _for_any_lengths(self) -> "_Form | None":
        """Only for a row that nothing but exact lengths can keep from running."""
        config, rejected = self._row.candidate.config, self._as_tuned.rejected
        if not getattr(config, "EXACT_LENGTHS", False) or (rejected and rejected.constraint != "exact_lengths"):
            return None
        return _Form(self._setting, self._row, replace(config, EXACT_LENGTHS=False))  # type: ignore[arg-type]

    def form_for(self, shape: AttentionShape, origin: Origin) -> "_Form | None":
        """The form that may run on a shape, if there is one; a winner of the very shape runs as it was tuned."""
        if self._as_tuned.may_run(shape):
            return self._as_tuned
        other = None if origin is Origin.EXACT else self._for_any_lengths
        return other if other and other.may_run(shape) else None

    def refusal(self, shape: AttentionShape, origin: Origin) -> str | None:
        """Why it can't run on a shape, for people; None where it can."""
        if self.form_for(shape, origin):
            return None
        device = self._setting.device
        rejected = rejection(self._as_tuned.candidate, shape, device)
        if rejected and rejected.constraint == "exact_lengths" and origin is not Origin.EXACT and self._for_any_lengths:
            rejected = rejection(self._for_any_lengths.candidate, shape, device)
        assert rejected is not None
        return f"{_row_label(self._row)} can't run here: {rejected.constraint}: {rejected.reason}"


class _Form:
    """A kernel that a row gives a family: what it asks of a shape, and the choices that it can be."""

    def __init__(self, setting: _Setting, row: WinnerRow, config: KernelConfig) -> None:
        self._setting = setting
        self.row = row
        self.candidate = setting.candidate(row.candidate.variant, config)
        found = setting.needs(self.candidate)
        self.rejected = found if isinstance(found, Rejected) else None
        self._needs = found if isinstance(found, ShapeNeeds) else None
        self._choices: dict[Origin, Choice] = {}

    def may_run(self, shape: AttentionShape) -> bool:
        return self._needs is not None and self._needs.are_met_by(shape)

    @cached_property
    def is_stale(self) -> bool:
        return self._setting.stale_because(self.row) is not None

    @cached_property
    def rung(self) -> tuple[bool, bool, int]:
        """Smaller comes first: user fresh, pack fresh, user stale, pack stale, each the nearest release first."""
        return self.is_stale, self.row.source is Source.PACK, self._setting.releases_away(self.row)

    @cached_property
    def speed(self) -> tuple[float, bool]:
        """Smaller comes first: the faster, then what was tuned with the family's own access."""
        return self.row.median_ms, self.row.problem.family.access is not self._setting.family.access

    def choice(self, origin: Origin) -> Choice:
        found = self._choices.get(origin)
        if found is None:
            found = Choice(candidate=self.candidate, origin=origin, stale=self.is_stale, row=self.row)
            self._choices[origin] = found
        return found


class _Defaults:
    """A variant's untuned kernels for a family, the default first, then smaller ones as far as shapes ask for them."""

    def __init__(self, setting: _Setting, spec: VariantSpec) -> None:
        self._setting = setting
        self._spec = spec
        self._configs = fallback_configs(spec, setting.family, setting.device.arch)
        self._made: list[tuple[ShapeNeeds, Choice]] = []

    def find(self, shape: AttentionShape, trace: "_Trace | None") -> Choice | None:
        """The first that may run on a shape, if there is one."""
        if trace is not None:
            trace.skipped += self._refusals_of_first(shape)
        for needs, choice in chain(self._made, self._others()):
            if needs.are_met_by(shape):
                return choice
        return None

    def _others(self) -> Iterator[tuple[ShapeNeeds, Choice]]:
        for config in self._configs:
            candidate = self._setting.candidate(self._spec.variant, config)
            needs = self._setting.needs(candidate)
            if isinstance(needs, ShapeNeeds):
                self._made.append((needs, Choice(candidate=candidate, origin=Origin.DEFAULT)))
                yield self._made[-1]

    def _refusals_of_first(self, shape: AttentionShape) -> list[str]:
        setting, variant = self._setting, self._spec.variant
        config = next(fallback_configs(self._spec, setting.family, setting.device.arch))
        rejected = rejection(setting.candidate(variant, config), shape, setting.device)
        return [f"default {variant} {config_label(config)}: {rejected.reason}"] if rejected else []


# --- what is told -----------------------------------------------------------------------------------------------------


class _Trace:
    """What a search passed over, and the winners among which it ended."""

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.group: _Group | None = None

    def pass_over_far(self, groups: Sequence[_Group], features: ShapeFeatures) -> None:
        """Tell of groups that are not near enough."""
        for group in groups:
            if (doublings := group.distance(features)) > MAX_DISTANCE:
                limit = f"the limit is {MAX_DISTANCE:g}"
                self.skipped.append(f"{group.problem.label} is {doublings:.1f} doublings away, {limit}")

    def first_skipped(self) -> list[str]:
        """The lines on what was passed over, a few of them."""
        lines = [f"passed over: {reason}" for reason in self.skipped[:_MAX_SKIPS_TOLD]]
        if len(self.skipped) > _MAX_SKIPS_TOLD:
            lines.append(f"passed over: {len(self.skipped) - _MAX_SKIPS_TOLD} more")
        return lines


def _row_label(row: WinnerRow) -> str:
    config = config_label(row.candidate.config)
    return f"{row.candidate.variant} {config}, {row.median_ms:.4g} ms ({row.source} {row.path.name})"


def _place(version: str) -> int:
    """Where a release of Triton stands among others; what names none stands far off."""
    try:
        major, minor = parse_triton_version(version)
    except FaAutotuneError:
        return -_RELEASES_OF_A_MAJOR
    return major * _RELEASES_OF_A_MAJOR + minor


def _device_gap(device: DeviceSpec, fingerprint: str) -> float:
    """How many doublings another device's SM count is away; its fingerprint is all that a row says about it."""
    match = re.search(r"/([0-9]{1,6})sm/", fingerprint)
    return round(abs(math.log2(int(match[1]) / device.num_sms)), 6) if match and int(match[1]) else math.inf
