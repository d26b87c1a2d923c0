"""`fa-autotune doctor`: what is here, what works, and what would go wrong.

`look_round` asks the machine, `examine` judges what it found, `show` prints that.
"""

import json
import os
import platform
import sqlite3
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

import click

from fa_autotune import __version__, paths
from fa_autotune.cli.terminal import echo, say
from fa_autotune.cli.versions import PACKAGES, installed_version
from fa_autotune.dispatch.winners import Snapshot, Source, load_snapshot
from fa_autotune.errors import FaAutotuneError
from fa_autotune.files import is_writable, written_by_others
from fa_autotune.problem.device import DeviceSpec, parse_triton_version
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import VARIANTS, VariantSpec
from fa_autotune.space.seeds import default_config
from fa_autotune.space.support import MIN_TRITON, TESTED_TRITONS, untested

# What a variant serves is asked for the commonest family; `fa-autotune explain --problem …` answers for any other.
_FAMILY = AttentionFamily(dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, bounded_right=True)


AnswerT = TypeVar("AnswerT")
_Torch: TypeAlias = tuple[tuple[DeviceSpec, ...], str | None, str | None, str | None]


def _family_of(spec: VariantSpec) -> AttentionFamily:
    """A common family that a variant is for."""
    head_dim = 256 if spec.variant is Variant.HOPPER_WIDE else _FAMILY.head_dim
    return replace(_FAMILY, head_dim=head_dim, head_dim_v=head_dim).for_pass(spec.kernel_pass)


class Verdict(StrEnum):
    """How `attention` would run here, best first."""

    TUNED = "tuned"
    UNTUNED = "untuned"
    REFERENCE = "reference"
    BROKEN = "broken"


_SUMMARIES = {
    Verdict.TUNED: "attention runs tuned kernels on this machine.",
    Verdict.UNTUNED: "attention runs on this machine, with configs that nobody measured on it.",
    Verdict.REFERENCE: "no GPU that torch can use: attention of CPU tensors is computed by plain torch.",
    Verdict.BROKEN: "attention does not run on this machine.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to know or to do. A fatal one keeps generated kernels from running."""

    fatal: bool
    text: str
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """One GPU: what serves it (None) or why a variant does not, and how many problems have a winner on it.

    `lost`: the variants that would serve it, but for the Triton that is installed.
    """

    name: str
    arch: str
    fingerprint: str
    variants: Mapping[str, str | None]
    lost: tuple[str, ...]
    winners: int
    sibling_winners: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseReport:
    """One database of the look-up order, and the winners it gives."""

    source: Source
    path: str
    exists: bool
    winners: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found. `torch_error` says why torch can't be imported, `triton_error` the same of Triton.

    `failures`: what could not be asked, and why; where a folder could not, it is None.
    """

    versions: Mapping[str, str | None]
    torch_error: str | None
    triton_error: str | None
    interpreting: bool
    devices: tuple[DeviceSpec, ...]
    c_compiler: str | None
    python_header: Path
    cache_dir: Path | None
    database: Path | None
    packs: tuple[Path, ...]
    snapshot: Snapshot
    failures: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The whole answer."""

    verdict: Verdict
    summary: str
    versions: Mapping[str, str | None]
    interpreting: bool
    gpus: tuple[GpuReport, ...]
    c_compiler: str | None
    databases: tuple[DatabaseReport, ...]
    cache_dir: str | None
    cache_writable: bool
    findings: tuple[Finding, ...]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def doctor_command(ctx: click.Context, *, as_json: bool) -> None:
    """Say what is here, what works, and what would go wrong.

    Exit code 0 if attention runs on this machine, tuned or not; 1 if it does not.
    """
    paths.require_working_folder()
    report = examine(look_round())
    if as_json:
        echo(json.dumps(asdict(report), indent=2))
    else:
        say("\n".join(show(report)))
    if report.verdict is Verdict.BROKEN:
        ctx.exit(1)


# --- asking the machine -----------------------------------------------------------------------------------------------


def look_round() -> Machine:
    """Ask the machine. A part that is missing or broken is an answer, not an error, and hides no other part."""
    failures: list[str] = []

    def ask(what: str, question: Callable[[], AnswerT], otherwise: AnswerT) -> AnswerT:
        try:
            return question()
        except Exception as error:  # noqa: BLE001  whatever is wrong here is what is to be told
            failures.append(f"{what} can't be told: {str(error) or type(error).__name__}")
            return otherwise

    no_torch: _Torch = ((), None, None, None)
    devices, driver, cuda, torch_error = ask("what torch sees", _ask_torch, no_torch)
    no_path: Path | None = None
    no_packs: tuple[Path, ...] = ()
    database = ask("where your database is", paths.database_path, no_path)
    packs = ask("which packs there are", lambda: tuple(paths.pack_paths()), no_packs)
    return Machine(
        versions={**ask("which packages there are", _package_versions, {}), "driver": driver, "cuda": cuda},
        torch_error=torch_error,
        triton_error=_import_error("triton"),
        interpreting=paths.interpreting(),
        devices=devices,
        c_compiler=ask("which C compiler there is", paths.c_compiler, None),
        python_header=Path(sysconfig.get_path("include")) / "Python.h",
        cache_dir=ask("where the cache is", paths.cache_dir, no_path),
        database=database,
        packs=packs,
        snapshot=ask("what is tuned", lambda: load_snapshot(database, packs), Snapshot(rows=())),
        lost=ask("which variants compile", lambda: _lost(devices), {}),
        failures=tuple(failures),
    )


def _package_versions() -> dict[str, str | None]:
    return {
        "fa_autotune": __version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in PACKAGES},
        "sqlite": sqlite3.sqlite_version,
    }


def _import_error(module: str) -> str | None:
    try:
        __import__(module)
    except Exception as error:  # noqa: BLE001  a broken install raises anything
        return str(error) or type(error).__name__
    return None


def _ask_torch() -> _Torch:
    """The GPUs, the driver's and CUDA's versions, and why torch can't be imported."""
    if error := _import_error("torch"):
        return (), None, None, error
    from fa_autotune.kernels.gpu import live_toolchain

    devices = tuple(_live_devices())
    if _import_error("triton"):
        return devices, None, None, None
    toolchain = live_toolchain()
    return devices, toolchain.driver, toolchain.cuda, None


def _live_devices() -> Iterator[DeviceSpec]:
    from fa_autotune.kernels.gpu import live_device

    if paths.interpreting():
        return  # what live_device names then is no GPU
    try:
        for index in range(1024):
            yield live_device(index)
    except FaAutotuneError:
        return


def _lost(devices: Sequence[DeviceSpec]) -> dict[str, str]:
    """The variants whose kernels a Triton that nothing was tested with does not compile, by pass and name; why not."""
    if not devices or _import_error("triton"):
        return {}
    from fa_autotune.kernels.gpu import live_toolchain
    from fa_autotune.kernels.loaded import load_kernel

    triton, lost = parse_triton_version(live_toolchain().triton), dict[str, str]()
    for arch in sorted({device.arch for device in devices}) if untested(triton) else ():
        for spec in VARIANTS:
            family = _family_of(spec)
            if spec.supports(family, arch, triton):
                continue
            try:
                config = default_config(spec, family, arch)
                load_kernel(Candidate(family=family, variant=spec.variant, config=config), arch)
            except FaAutotuneError as error:
                lost[f"{spec.kernel_pass}/{spec.variant}"] = f"its kernel does not compile: {error}"
    return lost


# --- judging ----------------------------------------------------------------------------------------------------------


def examine(machine: Machine) -> DoctorReport:
    """Judge what was found. Pure, but for looking at the folders that it names."""
    gpus = tuple(_gpu_report(device, machine) for device in machine.devices)
    findings = tuple(_findings(machine, gpus))
    verdict = _verdict(machine, gpus, findings)
    return DoctorReport(
        verdict=verdict,
        summary=_SUMMARIES[verdict],
        versions=machine.versions,
        interpreting=machine.interpreting,
        gpus=gpus,
        c_compiler=machine.c_compiler,
        databases=tuple(_database_reports(machine)),
        cache_dir=None if machine.cache_dir is None else str(machine.cache_dir),
        cache_writable=machine.cache_dir is not None and is_writable(machine.cache_dir),
        findings=findings,
    )


def _gpu_report(device: DeviceSpec, machine: Machine) -> GpuReport:
    triton = machine.versions.get("triton")
    rows = machine.snapshot.rows
    here = {row.problem for row in rows if row.device_fingerprint == device.fingerprint}
    arch = {row.problem for row in rows if row.device_arch == device.arch}
    return GpuReport(
        name=device.name,
        arch=device.arch,
        fingerprint=device.fingerprint,
        variants={
            name: machine.lost.get(name) or spec.supports(_family_of(spec), device.arch, parse_triton_version(triton))
            if triton
            else "Triton is not installed"
            for name, spec in ((f"{spec.kernel_pass}/{spec.variant}", spec) for spec in VARIANTS)
        },
        lost=tuple(machine.lost),
        winners=len(here),
        sibling_winners=len(arch - here),
    )


def _database_reports(machine: Machine) -> Iterator[DatabaseReport]:
    own = [] if machine.database is None else [(Source.USER, machine.database)]
    for source, path in [*own, *((Source.PACK, pack) for pack in machine.packs)]:
        winners = sum(row.path == path and row.source is source for row in machine.snapshot.rows)
        yield DatabaseReport(source=source, path=str(path), exists=os.path.exists(path), winners=winners)


def _verdict(machine: Machine, gpus: tuple[GpuReport, ...], findings: tuple[Finding, ...]) -> Verdict:
    if any(finding.fatal for finding in findings):
        return Verdict.BROKEN
    if machine.interpreting:
        return Verdict.UNTUNED
    if not gpus:
        return Verdict.REFERENCE
    return Verdict.TUNED if all(gpu.winners for gpu in gpus) else Verdict.UNTUNED


def _findings(machine: Machine, gpus: tuple[GpuReport, ...]) -> Iterator[Finding]:
    for failure in machine.failures:
        yield Finding(fatal=False, text=failure, next_step="mend what it names; the rest of this report holds")
    if machine.torch_error:
        yield _fatal(f"torch can't be imported: {machine.torch_error}", "pip install torch")
        return
    if gpus or machine.interpreting:
        yield from _triton_findings(machine)
    if gpus:
        yield from _launch_findings(machine)
    if gpus and not any(reason is None for gpu in gpus for reason in gpu.variants.values()):
        yield _fatal(
            "no variant serves these GPUs; the reasons are above", "use a GPU from sm_75 (NVIDIA) or gfx9 (AMD)"
        )
    yield from _gpu_findings(machine, gpus)
    yield from _folder_findings(machine)
    for note in machine.snapshot.notes:
        yield Finding(fatal=False, text=note, next_step="nothing else is lost by it; mend or remove that database")


def _triton_findings(machine: Machine) -> Iterator[Finding]:
    needed = ".".join(map(str, MIN_TRITON))
    if machine.triton_error:
        yield _fatal(f"Triton can't be imported: {machine.triton_error}", f"pip install 'triton>={needed}'")
    elif (found := machine.versions.get("triton")) and parse_triton_version(found) < MIN_TRITON:
        yield _fatal(f"Triton {found} is older than {needed}", "install a newer torch, which brings its Triton")
    elif found and (newer := untested(parse_triton_version(found))):
        newest = ".".join(map(str, TESTED_TRITONS[-1]))
        for name, reason in machine.lost.items():
            yield Finding(
                fatal=False,
                text=f"{newer}, and {name} is lost: {reason}. Others serve, on a Hopper in up to 1.3 times the time",
                next_step=f"pip install 'triton=={newest}.*' if your torch allows it",
            )
        yield Finding(fatal=False, text=f"{newer}; its kernels are tried", next_step="fa-autotune tune verifies them")


def _launch_findings(machine: Machine) -> Iterator[Finding]:
    if machine.c_compiler is None:
        yield _fatal("no C compiler: Triton builds its launcher with one at the first call", "install gcc, or set CC")
    if not os.path.isfile(machine.python_header):
        yield _fatal(
            f"{machine.python_header} is missing: Triton's launcher is built against it",
            "install Python's headers (python3-dev, python3-devel)",
        )


def _gpu_findings(machine: Machine, gpus: tuple[GpuReport, ...]) -> Iterator[Finding]:
    if machine.interpreting:
        yield Finding(
            fatal=False,
            text="TRITON_INTERPRET is set: kernels of CPU tensors run in Triton's interpreter, GPUs are not used",
            next_step="unset it to use a GPU",
        )
    elif not gpus:
        yield Finding(
            fatal=False,
            text="torch sees no GPU",
            next_step="where there is one: check its driver, and that torch is a GPU build (torch.cuda.is_available())",
        )
    for name in dict.fromkeys(gpu.name for gpu in gpus if not gpu.winners):
        yield Finding(fatal=False, text=f"no problem is tuned on {name}", next_step="fa-autotune tune")


def _folder_findings(machine: Machine) -> Iterator[Finding]:
    if machine.cache_dir is not None and not is_writable(machine.cache_dir):
        yield Finding(
            fatal=bool(machine.devices) or machine.interpreting,
            text=f"the cache folder {machine.cache_dir} can't be written: generated kernels are put there",
            next_step="set FA_AUTOTUNE_CACHE to a folder that can",
        )
    elif machine.cache_dir is not None and (reason := _others_may_write(machine.cache_dir)):
        yield Finding(
            fatal=bool(machine.devices) or machine.interpreting,
            text=f"the cache folder is not used, since what is in it is run: {reason}",
            next_step="mend its rights if nobody else put anything there, or set FA_AUTOTUNE_CACHE to another folder",
        )
    if machine.database is not None and not is_writable(machine.database):
        yield Finding(
            fatal=False,
            text=f"the database {machine.database} can't be written: tuning has nowhere to put results",
            next_step="set FA_AUTOTUNE_DB to a file that can, or give --db",
        )


def _others_may_write(folder: Path) -> str | None:
    try:
        return written_by_others(folder)
    except OSError:  # not there yet
        return None


def _fatal(text: str, next_step: str) -> Finding:
    return Finding(fatal=True, text=text, next_step=next_step)


# --- showing ----------------------------------------------------------------------------------------------------------


def show(report: DoctorReport) -> Iterator[str]:
    """Lines for people."""
    yield f"{report.verdict.value.upper()}: {report.summary}"
    for gpu in report.gpus:
        yield f"{gpu.name}: {_fast_variants(gpu)}"
    yield ""
    yield _line("versions", ", ".join(f"{name} {found or 'missing'}" for name, found in _shown(report.versions)))
    for index, gpu in enumerate(report.gpus):
        yield _line(f"GPU {index}", f"{gpu.name} ({gpu.fingerprint})")
        yield _line("", f"winners: {gpu.winners} of its own, {gpu.sibling_winners} more of {gpu.arch}")
        for variant, reason in gpu.variants.items():
            yield _line("", f"{variant}: {reason or 'serves it'}")
    if not report.gpus:
        yield _line("GPU", "none")
    yield _line("C compiler", report.c_compiler or "none")
    for database in report.databases:
        state = f"{database.winners} winners" if database.exists else "not there yet"
        yield _line("your database" if database.source is Source.USER else "pack", f"{database.path}: {state}")
    yield _line("cache folder", f"{report.cache_dir or 'unknown'}{'' if report.cache_writable else ': not writable'}")
    for finding in report.findings:
        yield ""
        yield f"{'PROBLEM' if finding.fatal else 'note'}: {finding.text}"
        yield f"  next: {finding.next_step}"


def _fast_variants(gpu: GpuReport) -> str:
    """Which variants beside the portable one this installation has, and which it has lost."""
    fast = {name: reason for name, reason in gpu.variants.items() if not name.endswith(f"/{Variant.PORTABLE}")}
    served = ", ".join(name for name, reason in fast.items() if reason is None)
    lost = ", ".join(name for name in fast if name in gpu.lost)
    return f"fast variants: {served or 'none'}{f'; lost: {lost}, as told below' if lost else ''}"


def _shown(versions: Mapping[str, str | None]) -> Iterator[tuple[str, str | None]]:
    for name, found in versions.items():
        if found or name not in ("driver", "cuda"):
            yield name, found


def _line(label: str, text: str) -> str:
    return f"{label:<14} {text}"
