"""From rows to dataclasses: the one place that decides what a row may hold.

Rows may come from a foreign file, so every value is checked for its type, length and range before it is used;
InvalidPackError names the table, the row and the rule that it breaks.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from fa_autotune.database.entries import (
    CompileStatus,
    KernelRow,
    MeasurementRow,
    Miss,
    RejectionCount,
    SessionKind,
    SessionRow,
    SessionState,
    TrialRow,
    utc_now,
)
from fa_autotune.errors import FaAutotuneError, InvalidPackError
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.family import (
    FAMILY_OPTIONS,
    SHAPE_OPTIONS,
    AttentionFamily,
    canonical_json,
    parse_json,
)
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import config_from_key
from fa_autotune.space.registry import compile_form, variant_spec

Row = Mapping[str, Any]
EnumT = TypeVar("EnumT", bound=StrEnum)

MAX_NAME = 200  # characters of a name, version or digest
MAX_KEY = 4_000  # characters of a canonical key
MAX_ERROR = 8_000  # characters kept of an error's text
MAX_ARGUMENTS = 100_000  # characters of a session's arguments
MAX_NOTES = 50  # compiler warnings, accuracy failures
MIN_TIME_MS = 1e-6
MAX_TIME_MS = 1e9
MAX_TIME_S = 1e9
_MAX_INT = 2**62
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_ARCH = re.compile(r"sm_[1-9][0-9]{1,2}|gfx[0-9a-f]{3,5}|interpreter")
_WORD = re.compile(r"[0-9A-Za-z_-]{1,128}")  # nothing that could lead a path elsewhere

# The columns that are read of each table. Those that say once more what a key says must say the same.
COLUMNS: dict[str, tuple[str, ...]] = {
    "devices": (
        *("id", "fingerprint", "name", "arch", "num_sms", "smem_optin_bytes", "smem_per_sm_bytes", "l2_bytes"),
        *("memory_gb", "regs_per_sm", "max_threads_per_sm", "warp_size"),
    ),
    "toolchains": ("id", "triton", "cuda", "driver"),
    "problems": (
        *("id", "key", "kernel_pass", "dtype", "head_dim", "head_dim_v", "bounded_right", "access"),
        *("batch_size", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k"),
    ),
    "sessions": (
        *("id", "uid", "kind", "state", "device_id", "toolchain_id", "parent_id", "torch", "power_limit_w"),
        *("arguments", "started_at", "ended_at"),
    ),
    "kernels": (
        *("id", "digest", "arch", "form", "toolchain_id", "kernel_pass", "variant", "family", "config"),
        *("block_m", "block_n", "num_warps", "num_stages", "maxnreg", "compile_status"),
        *("registers", "spill_bytes", "smem_bytes", "compile_s", "compile_warnings", "code_digest", "measured_as"),
    ),
    "trials": (
        *("id", "kernel_id", "problem_id", "device_id", "session_id", "status", "constraint_name", "error"),
        *("max_error", "max_error_ratio", "mean_error_ratio", "lse_error", "probes", "accuracy_failures"),
        *("duration_s", "ended_at"),
    ),
    "measurements": (
        *("id", "trial_id", "session_id", "role", "regime", "launches", "p20_ms", "median_ms", "p80_ms"),
        *("early_stopped", "rank", "sm_clock_mhz", "power_w", "temperature_c", "measured_at"),
    ),
}


def utc_text(moment: datetime) -> str:
    """A moment as the database has it: UTC, ISO-8601, always with microseconds, so that text sorts as time."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now_text() -> str:
    """This moment, as the database has it."""
    return utc_text(utc_now())


def clean_text(text: str, limit: int) -> str:
    """Text that is safe to store and to print: no control characters or surrogates, cut in its middle to `limit`."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    if len(shown) <= limit:
        return shown
    tail = limit // 2
    return f"{shown[: limit - tail - 3]}\n…\n{shown[-tail:]}"


# --- rows to dataclasses ----------------------------------------------------------------------------------------------


def device_from(row: Row, power_limit_w: float | None = None) -> DeviceSpec:
    """Parse a row of `devices`; the power limit comes from a session."""
    with _naming("devices", row):
        sizes = {name: _int(row, name) for name in COLUMNS["devices"][4:]}
        arch = _match(row, "arch", _ARCH)
        device = DeviceSpec(name=_text(row, "name"), arch=arch, power_limit_w=power_limit_w, **sizes)
        if row["fingerprint"] != device.fingerprint:
            raise InvalidPackError(
                f"fingerprint={row['fingerprint']!r} is not {device.fingerprint!r}, as its figures say"
            )
        return device


def toolchain_from(row: Row, torch: str | None = None) -> Toolchain:
    """Parse a row of `toolchains`; the torch version comes from a session."""
    with _naming("toolchains", row):
        return Toolchain(
            triton=_text(row, "triton"), cuda=_opt(_text, row, "cuda"), driver=_opt(_text, row, "driver"), torch=torch
        )


def problem_from(row: Row) -> AttentionProblem:
    """Parse a row of `problems`."""
    with _naming("problems", row):
        key = _text(row, "key", MAX_KEY)
        problem = _canonical("key", key, AttentionProblem.from_key(key))
        _require_agreement(row, problem_columns(problem), "key")
        return problem


def candidate_from(family: AttentionFamily, row: Row) -> Candidate:
    """Parse `variant` and `config` of any row that has both."""
    variant = _enum(row, "variant", Variant)
    parse: Callable[[Any, str], Any] = config_from_key
    text = _text(row, "config", MAX_KEY)
    config = parse(variant_spec(family.kernel_pass, variant).config_type, text)
    if canonical_json(parse_json(text)) != text:  # not config_key: an older release knew fewer fields
        raise InvalidPackError(f"config={text!r} is not in canonical form")
    return Candidate(family=family, variant=variant, config=config)


def kernel_from(row: Row) -> KernelRow:
    """Parse a row of `kernels`."""
    with _naming("kernels", row):
        key = _text(row, "family", MAX_KEY)
        candidate = candidate_from(_canonical("family", key, AttentionFamily.from_key(key)), row)
        _require_agreement(row, knob_columns(candidate), "config")
        if row["form"] != compile_form(candidate.family):
            raise InvalidPackError(f"form={_short(row['form'])} does not serve access={candidate.family.access.value}")
        return KernelRow(
            candidate=candidate,
            arch=_match(row, "arch", _ARCH),
            form=_enum(row, "form", CompileForm),
            digest=_opt_word(row, "digest"),
            measured_as=_opt_word(row, "measured_as"),
            compile_status=_enum(row, "compile_status", CompileStatus),
            resources=_resources_from(row),
        )


def problem_columns(problem: AttentionProblem) -> dict[str, str | int]:
    """What the key of a problem says, once more in columns, for people and queries; an option is in the key alone."""
    family = {name: value for name, value in problem.family.as_json().items() if name not in FAMILY_OPTIONS}
    shape = {name: value for name, value in problem.shape.as_json().items() if name not in SHAPE_OPTIONS}
    return {"kernel_pass": family.pop("pass"), **family, **shape}


def knob_columns(candidate: Candidate) -> dict[str, str | int | None]:
    """What a candidate's keys say, once more in columns; a knob that it lacks is NULL."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg")
    knobs = {name.lower(): getattr(candidate.config, name, None) for name in names}
    return {"kernel_pass": candidate.family.kernel_pass.value, **knobs}


def trial_from(row: Row) -> TrialRow:
    """Parse a row of `trials`."""
    with _naming("trials", row):
        return TrialRow(
            status=_enum(row, "status", TrialStatus),
            constraint=_opt(_text, row, "constraint_name"),
            error=None if row["error"] is None else _long_text(row, "error", MAX_ERROR),
            accuracy=_accuracy_from(row),
            duration_s=_seconds(row, "duration_s"),
            ended_at=_time(row, "ended_at"),
        )


def measurement_from(row: Row) -> MeasurementRow:
    """Parse a row of `measurements`."""
    with _naming("measurements", row):
        measurement = Measurement(
            role=_enum(row, "role", Role),
            regime=_enum(row, "regime", Regime),
            launches=_int(row, "launches", 1),
            p20_ms=positive_ms(row, "p20_ms"),
            median_ms=positive_ms(row, "median_ms"),
            p80_ms=positive_ms(row, "p80_ms"),
            early_stopped=bool(_int(row, "early_stopped", 0, 1)),
            rank=None if row["rank"] is None else _int(row, "rank", 1),
            sm_clock_mhz=_opt(_int, row, "sm_clock_mhz"),
            power_w=_opt(_float, row, "power_w"),
            temperature_c=None if row["temperature_c"] is None else _int(row, "temperature_c", -300, 1000),
        )
        if not measurement.p20_ms <= measurement.median_ms <= measurement.p80_ms:
            raise InvalidPackError(
                f"median_ms={measurement.median_ms} is not between {measurement.p20_ms} and {measurement.p80_ms}"
            )
        return MeasurementRow(measurement=measurement, measured_at=_time(row, "measured_at"))


def session_from(row: Row) -> SessionRow:
    """Parse a row of `sessions`."""
    with _naming("sessions", row):
        return SessionRow(
            uid=_match(row, "uid", _WORD),
            kind=_enum(row, "kind", SessionKind),
            state=_enum(row, "state", SessionState),
            torch=_opt(_text, row, "torch"),
            power_limit_w=_opt(_float, row, "power_limit_w"),
            arguments=canonical_json(arguments_from(row)),
            started_at=_time(row, "started_at"),
            ended_at=_opt(_time, row, "ended_at"),
        )


def arguments_from(row: Row) -> dict[str, Any]:
    """Parse a session's arguments, a JSON object."""
    try:
        arguments = parse_json(_long_text(row, "arguments", MAX_ARGUMENTS))
    except ValueError as error:
        raise InvalidPackError(f"arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidPackError("arguments are not a JSON object")
    return arguments


def record_from(
    kernel: KernelRow, problem: AttentionProblem, device: DeviceSpec, trial: TrialRow, measured: MeasurementRow | None
) -> TrialRecord:
    """Put a record together. Only an OK one has a measurement, even if the trial was timed before it failed."""
    if kernel.arch != device.arch:
        raise InvalidPackError(f"its kernel is for {kernel.arch}, its device has {device.arch}")
    is_ok = trial.status is TrialStatus.OK
    if is_ok and measured is None:
        raise InvalidPackError("a trial has status ok, but no measurement; ok says that it was timed")
    if is_ok and kernel.digest is None:
        raise InvalidPackError("a trial has status ok, but its kernel no digest; ok says that it was rendered")
    if kernel.candidate.family != problem.family:
        raise InvalidPackError(
            f"a trial has a kernel of family {kernel.candidate.family.label} on problem {problem.label}"
        )
    return TrialRecord(
        candidate=kernel.candidate,
        problem=problem,
        status=trial.status,
        form=kernel.form,
        kernel_digest=kernel.digest,
        resources=kernel.resources,
        accuracy=trial.accuracy,
        measurement=measured.measurement if is_ok and measured else None,
        error=trial.error,
        constraint=trial.constraint,
        duration_s=trial.duration_s,
    )


# --- rows of the views ------------------------------------------------------------------------------------------------


def rejection_from(row: Row) -> RejectionCount:
    """Parse a row of `rejections`."""
    with _naming("rejections", {"id": row["status"]}):
        return RejectionCount(
            device_fingerprint=_text(row, "device_fingerprint"),
            problem=view_problem(row),
            variant=_enum(row, "variant", Variant),
            status=_enum(row, "status", TrialStatus),
            constraint=_opt(_text, row, "constraint_name"),
            trials=_int(row, "trials"),
        )


def miss_from(row: Row) -> Miss:
    """Parse a row of `misses` with its problem's key."""
    with _naming("misses", row):
        return Miss(
            problem=view_problem(row),
            device_fingerprint=_text(row, "device_fingerprint"),
            count=_int(row, "count", 1),
            last_seen=parse_time(_time(row, "last_seen")),
        )


def view_problem(row: Row) -> AttentionProblem:
    """Parse `problem_key` of a view's row."""
    key = _text(row, "problem_key", MAX_KEY)
    return _canonical("problem_key", key, AttentionProblem.from_key(key))


# --- parts of a row ---------------------------------------------------------------------------------------------------


def _resources_from(row: Row) -> ResourceReport | None:
    if row["spill_bytes"] is None:
        return None
    return ResourceReport(
        registers=_opt(_int, row, "registers"),
        spill_bytes=_int(row, "spill_bytes"),
        smem_bytes=_int(row, "smem_bytes"),
        compile_s=_seconds(row, "compile_s"),
        warnings=_notes(row, "compile_warnings"),
        code_digest=_opt_word(row, "code_digest"),
    )


def _accuracy_from(row: Row) -> AccuracyReport | None:
    if row["probes"] is None:
        return None
    # A figure that was not finite was stored as NULL: beyond every bound.
    names = ("max_error", "max_error_ratio", "mean_error_ratio", "lse_error")
    figures = {name: math.inf if row[name] is None else _float(row, name, 0.0) for name in names}
    return AccuracyReport(probes=_int(row, "probes"), failures=_notes(row, "accuracy_failures"), **figures)


# --- one value --------------------------------------------------------------------------------------------------------


@contextmanager
def _naming(table: str, row: Row) -> Iterator[None]:
    try:
        yield
    except FaAutotuneError as error:
        text = " ".join(clean_text(str(error), 600).split())
        key = str(row["id"])[:40]
        key = key if key.isprintable() else _short(key)
        raise InvalidPackError(f"{table} row {key}: {text}") from None


def _text(row: Row, name: str, limit: int = MAX_NAME) -> str:
    value = row[name]
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise InvalidPackError(f"{name}={_short(value)} is not 1 to {limit} printable characters")
    return value


def _long_text(row: Row, name: str, limit: int) -> str:
    value = row[name]
    if not isinstance(value, str) or len(value) > limit or clean_text(value, limit) != value:
        raise InvalidPackError(f"{name}={_short(value)} is not text of at most {limit} printable characters")
    return value


def _opt_word(row: Row, name: str) -> str | None:
    return None if row[name] is None else _match(row, name, _WORD)


def _match(row: Row, name: str, rule: re.Pattern[str]) -> str:
    value = _text(row, name)
    if not rule.fullmatch(value):
        raise InvalidPackError(f"{name}={_short(value)} does not match {rule.pattern}")
    return value


def _enum(row: Row, name: str, kind: type[EnumT]) -> EnumT:
    try:
        return kind(row[name])
    except ValueError:
        raise InvalidPackError(f"{name}={_short(row[name])} is not one of: {', '.join(kind)}") from None


def _int(row: Row, name: str, low: int = 0, high: int = _MAX_INT) -> int:
    value = row[name]
    if type(value) is not int or not low <= value <= high:
        raise InvalidPackError(f"{name}={_short(value)} is not an integer from {low} to {high}")
    return value


def _float(row: Row, name: str, low: float = 0.0) -> float:
    value = row[name]
    if type(value) not in (int, float) or not low <= value < math.inf:
        raise InvalidPackError(f"{name}={_short(value)} is not a finite number of at least {low}")
    return float(value)


def _seconds(row: Row, name: str) -> float:
    value = row[name]
    if type(value) not in (int, float) or not 0 <= value < MAX_TIME_S:
        raise InvalidPackError(f"{name}={_short(value)} is not a time from 0 to {MAX_TIME_S:g} s")
    return float(value)


def positive_ms(row: Row, name: str) -> float:
    """A time in milliseconds: no less than a clock tells, and of a size that someone waited for."""
    value = _float(row, name)
    if not MIN_TIME_MS <= value < MAX_TIME_MS:
        raise InvalidPackError(f"{name}={value} is not a time from {MIN_TIME_MS:g} to {MAX_TIME_MS:g} ms")
    return value


def _time(row: Row, name: str) -> str:
    value = _text(row, name)
    # A row from the future would be the newest for ever.
    if not _TIME.fullmatch(value) or parse_time(value) > utc_now() + timedelta(days=1):
        raise InvalidPackError(f"{name}={_short(value)} is not a past moment written as 2026-01-31T12:00:00.000000Z")
    return value


def parse_time(text: str) -> datetime:
    """Read a moment of ours."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidPackError(f"{_short(text)} is not a moment in ISO-8601") from None


def _notes(row: Row, name: str) -> tuple[str, ...]:
    try:
        notes = parse_json(_long_text(row, name, MAX_NOTES * (6 * MAX_NAME + 4)))
    except ValueError as error:
        raise InvalidPackError(f"{name} is not JSON: {error}") from None
    if not isinstance(notes, list) or not all(
        isinstance(note, str) and clean_text(note, MAX_NAME) == note for note in notes
    ):
        raise InvalidPackError(f"{name}={_short(row[name])} is not a list of short texts")
    return tuple(notes)


ValueT = TypeVar("ValueT")


def _opt(parse: Callable[[Row, str], ValueT], row: Row, name: str) -> ValueT | None:
    return None if row[name] is None else parse(row, name)


def _require_agreement(row: Row, columns: Mapping[str, object], key: str) -> None:
    for name, value in columns.items():
        if row[name] != value or isinstance(row[name], float):
            raise InvalidPackError(f"{name}={_short(row[name])} is not {value!r}, as its {key} says")


KeyedT = TypeVar("KeyedT", AttentionProblem, AttentionFamily)


def _canonical(name: str, text: str, parsed: KeyedT) -> KeyedT:
    if parsed.key != text:
        raise InvalidPackError(f"{name}={_short(text)} is not in canonical form")
    return parsed


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:120] + "…"
