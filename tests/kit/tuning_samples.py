"""Records and databases for tests: small, valid, and changed by keyword."""

from pathlib import Path
from typing import Any

from fa_autotune.database import SessionKind, SessionState, TuningDatabase
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import AccuracyReport, Measurement, Regime, ResourceReport, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import PortableFwdConfig, TmaFwdConfig

H200 = KNOWN_DEVICES["h200"]
TOOLCHAIN = Toolchain(triton="3.7.1", cuda="12.8", driver="570.86.15", torch="2.13.0")
PROBLEM = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
OTHER_PROBLEM = AttentionProblem.parse("4x32x8x2048x2048x128")
RESOURCES = ResourceReport(registers=168, spill_bytes=0, smem_bytes=98304, compile_s=1.25, warnings=("slow path",))
ACCURACY = AccuracyReport(max_error=0.002, max_error_ratio=0.5, mean_error_ratio=0.25, lse_error=1e-6, probes=3)


def candidate(
    block_m: int = 64, *, problem: AttentionProblem = PROBLEM, variant: Variant = Variant.PORTABLE
) -> Candidate:
    """A candidate, told from others by its BLOCK_M."""
    kind = {Variant.PORTABLE: PortableFwdConfig, Variant.TMA: TmaFwdConfig}[variant]
    config = kind(BLOCK_M=block_m, BLOCK_N=64, num_warps=4, num_stages=2)
    return Candidate(family=problem.family, variant=variant, config=config)


def measurement(median_ms: float = 1.0, **changes: Any) -> Measurement:
    """A screen measurement."""
    values: dict[str, Any] = {
        "role": Role.SCREEN,
        "regime": Regime.EVENTS,
        "launches": 100,
        "p20_ms": 0.75 * median_ms,
        "median_ms": median_ms,
        "p80_ms": 1.25 * median_ms,
        "sm_clock_mhz": 1980,
        "power_w": 650.5,
        "temperature_c": 61,
    }
    return Measurement(**{**values, **changes})


def ok_record(
    median_ms: float = 1.0,
    block_m: int = 64,
    *,
    problem: AttentionProblem = PROBLEM,
    variant: Variant = Variant.PORTABLE,
    digest: str | None = None,
    **measured: Any,
) -> TrialRecord:
    """A record that was timed."""
    return TrialRecord(
        candidate=candidate(block_m, problem=problem, variant=variant),
        problem=problem,
        status=TrialStatus.OK,
        form=CompileForm.ALIGNED,
        kernel_digest=digest or f"{variant}-{block_m:04x}",
        resources=RESOURCES,
        accuracy=ACCURACY,
        measurement=measurement(median_ms, **measured),
        duration_s=2.5,
    )


def confirmed(median_ms: float, rank: int | None, block_m: int = 64, **changes: Any) -> TrialRecord:
    """A finalist's record."""
    return ok_record(median_ms, block_m, role=Role.CONFIRM, rank=rank, **changes)


def failed_record(status: TrialStatus, block_m: int = 64, *, error: str = "no", **changes: Any) -> TrialRecord:
    """A record that failed; a rejected one was never rendered."""
    rendered = status is not TrialStatus.REJECTED
    values: dict[str, Any] = {
        "candidate": candidate(block_m),
        "problem": PROBLEM,
        "status": status,
        "form": CompileForm.ALIGNED,
        "kernel_digest": f"portable-{block_m:04x}" if rendered else None,
        "error": error,
        "constraint": None if rendered else "shared_memory",
    }
    return TrialRecord(**{**values, **changes})


def begin(
    database: TuningDatabase, kind: SessionKind = SessionKind.TUNE, *, device: DeviceSpec = H200, **more: Any
) -> int:
    """Begin a session on an H200, unless told otherwise."""
    return database.begin_session(kind=kind, device=device, toolchain=more.pop("toolchain", TOOLCHAIN), **more)


def fill(database: TuningDatabase, *, device: DeviceSpec = H200) -> None:
    """A tuning job's usual outcome: screened and failed trials, two confirmed finalists, 64 the winner."""
    tune = begin(database, device=device, arguments={"trials": 4, "path": "/home/somebody"})
    for block_m in (16, 32, 64):
        database.save_trial(tune, ok_record(1.0 + 1.0 / block_m, block_m))
    database.save_trial(tune, failed_record(TrialStatus.WRONG_RESULT, 128, error="max error 3.0"))
    database.save_trial(tune, failed_record(TrialStatus.REJECTED, 256, error="needs 300000 bytes"))
    confirm = begin(database, SessionKind.CONFIRM, device=device, parent_id=tune)
    database.save_trial(confirm, confirmed(0.9, 1, 64))
    database.save_trial(confirm, confirmed(0.95, 2, 32))
    for session_id in (confirm, tune):
        database.end_session(session_id, state=SessionState.FINISHED)


def write_pack(folder: Path, name: str = "pack.db") -> Path:
    """A pack of `fill`'s winner and the finalist that it beat."""
    pack = folder / name
    with TuningDatabase(":memory:") as database:
        fill(database)
        database.export(pack)
    return pack
