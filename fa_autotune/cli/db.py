"""`fa-autotune db`: look into the tuning database, and exchange packs. Needs neither torch nor a GPU."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fa_autotune.cli.terminal import echo, echo_path, print_table, say, shown
from fa_autotune.cli.values import DatabaseFile, FilePath, WholeNumber
from fa_autotune.cli.versions import installed_version
from fa_autotune.errors import DatabaseError, FaAutotuneError
from fa_autotune.paths import database_path, pack_paths, shell_command
from fa_autotune.problem.device import INTERPRETER_ARCH
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import config_label

if TYPE_CHECKING:
    from fa_autotune.database import ImportSummary, LeaderboardEntry, StoredTrial, TuningDatabase, Winner
    from fa_autotune.problem.device import DeviceSpec

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_TIMES = ("ms", "TFLOP/s")
_RESOURCES = ("registers", "spill bytes", "smem bytes")  # the entries' fields, with spaces

_db_option = click.option(
    "--db", "path", type=DatabaseFile(), help="The database. [default: FA_AUTOTUNE_DB, or the user's own]"
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_device_option = click.option(
    "--device", "device_name", help="Only this device: its fingerprint, or a part of its name."
)
_problem_option = click.option(
    "--problem", "problem_text", help="Only this problem, such as 4x32x8x4096x4096x128,causal."
)
_variant_option = click.option(
    "--variant", type=click.Choice([variant.value for variant in Variant]), help="Only this variant."
)


def _options(*options: Callable[[CommandT], CommandT]) -> Callable[[CommandT], CommandT]:
    """Several options as one decorator, shown in the order given."""

    def decorate(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group("db")
def db_group() -> None:
    """Inspect, exchange and clean the tuning database."""


@db_group.command("info")
@_options(_db_option, _json_option)
def info_command(*, path: Path | None, as_json: bool) -> None:
    """Say what the database holds.

    Rows, devices, toolchains, and the last session.
    """
    with closing(_open(path)) as database:
        info = database.info()
    if as_json:
        _print_json(info)
        return
    say(f"{info.path} (schema {info.schema_version}, {info.size_bytes / 1024:.0f} KB)")
    say("rows: " + ", ".join(f"{count} {table}" for table, count in info.counts.items()))
    for device in info.devices:
        say(f"device: {device.name} ({device.fingerprint})")
    for chain in info.toolchains:
        say(f"toolchain: triton {chain.triton}, cuda {chain.cuda or '–'}, driver {chain.driver or '–'}")
    if last := info.last_session:
        started = f"started {_minute(last.started_at)} UTC"
        say(f"last session: {last.kind}, {last.state}, {started} on {last.device_fingerprint}")


@db_group.command("path")
@_options(_json_option)
def path_command(*, as_json: bool) -> None:
    """Print where the user's database is, or would be."""
    if as_json:
        _print_json({"path": database_path(), "exists": database_path().exists()})
        return
    echo_path(database_path())


@db_group.command("winners")
@click.option("--packs", is_flag=True, help="Show the shipped packs' winners too.")
@_options(_device_option, _problem_option, _variant_option, _db_option, _json_option)
def winners_command(
    *,
    packs: bool,
    device_name: str | None,
    problem_text: str | None,
    variant: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Show the fastest configs that were confirmed.

    One for each device, problem, variant and release of Triton; the dispatcher takes the faster of the variants that
    serve a call.
    `error` is the largest error against the reference, as a part of what is allowed.
    """
    problem, wanted = _problem(problem_text), _variant(variant)
    found: list[tuple[str, Winner]] = []
    for source in _sources(path, with_packs=packs):
        with closing(_open(source)) as database:
            for device in _devices(database, device_name, required=not packs):
                winners = database.winners(device=device, problem=problem, variant=wanted)
                found += [(source.name, winner) for winner in winners]
    if as_json:
        _print_json({"winners": [{"source": source, **_plain(winner)} for source, winner in found]})
        return
    if not found:
        echo("none")
    for _, rows in groupby(found, key=lambda row: (row[0], row[1].device_fingerprint)):
        print_table(
            ["device", "triton", "from", "problem", "variant", "config", *_TIMES, *_RESOURCES, "error", "confirmed"],
            [_winner_cells(*row) for row in rows],
            optional=["confirmed", "registers", "spill bytes", "smem bytes", "error"],
            common=["device", "triton", "from", "confirmed"],
        )


@db_group.command("trials")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    metavar="STATUS",
    type=click.Choice([status.value for status in TrialStatus]),
    help=f"Only this status: {', '.join(TrialStatus)}; may be repeated.",
)
@click.option("--summary", is_flag=True, help="Count the trials that failed, by status and constraint.")
@click.option("--limit", default=50, show_default=True, type=WholeNumber(1), help="The newest N in the table.")
@_options(_device_option, _problem_option, _variant_option, _db_option, _json_option)
def trials_command(
    *,
    statuses: Sequence[str],
    summary: bool,
    limit: int,
    device_name: str | None,
    problem_text: str | None,
    variant: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Show trials in the order in which they ended.

    With --summary, count how they failed.
    """
    problem, wanted = _problem(problem_text), _variant(variant)
    only = {TrialStatus(status) for status in statuses} or None
    with closing(_open(path)) as database:
        (device,) = _devices(database, device_name, required=True)
        if summary:
            counts = database.rejections(device=device, problem=problem, variant=wanted)
            _print_rejections([row for row in counts if only is None or row.status in only], as_json=as_json)
            return
        trials = database.trials(device=device, problem=problem, variant=wanted, statuses=only)
    if as_json:
        _print_json({"trials": trials})
        return
    print_table(
        ["trial", "ended", "device", "problem", "variant", "config", "status", "ms", "why"],
        [_trial_cells(trial) for trial in trials[-limit:]],
        optional=["ms", "variant", "trial", "device", "ended"],
        common=["device", "problem", "variant"],
    )
    if len(trials) > limit:
        say(f"{len(trials) - limit} earlier trials are not shown; see them with --limit {len(trials)}")


@db_group.command("top")
@click.option("--problem", "problem_text", required=True, help="Such as 4x32x8x4096x4096x128,causal.")
@click.option("--limit", default=10, show_default=True, type=WholeNumber(1), help="How many configs.")
@_options(_device_option, _db_option, _json_option)
def top_command(*, problem_text: str, limit: int, device_name: str | None, path: Path | None, as_json: bool) -> None:
    """Show a problem's fastest configs with what their kernels need.

    The fastest first, each by its newest confirmation, or by its screening if it has none.
    """
    problem = AttentionProblem.parse(problem_text)
    with closing(_open(path)) as database:
        (device,) = _devices(database, device_name, required=True)
        entries = database.leaderboard(problem, device=device, limit=limit)
    if as_json:
        _print_json({"top": entries})
        return
    rows = [
        [
            entry.position,
            entry.device_fingerprint,
            entry.candidate.variant.value,
            config_label(entry.candidate.config),
            *_times(entry),
            *_resources(entry),
            "–" if entry.compile_s is None else f"{entry.compile_s:.1f}",
            _shown(entry.max_error_ratio, ".2f"),
            f"{entry.role}, {entry.regime}{', stopped early' if entry.early_stopped else ''}",
        ]
        for entry in entries
    ]
    print_table(
        ["#", "device", "variant", "config", *_TIMES, *_RESOURCES, "compile s", "error", "measured"],
        rows,
        optional=["measured", "registers", "spill bytes", "smem bytes", "compile s", "error"],
        common=["device", "variant"],
    )


@db_group.command("misses")
@click.option("--clear", is_flag=True, help="Forget them once they are shown.")
@_options(_device_option, _db_option, _json_option)
def misses_command(*, clear: bool, device_name: str | None, path: Path | None, as_json: bool) -> None:
    """Show the problems that ran without a winner of their own.

    `fa-autotune tune --missed` tunes them.
    """
    with closing(_open(path)) as database:
        (device,) = _devices(database, device_name, required=True)
        misses = database.misses(device=device)
    if as_json:
        _print_json({"misses": misses})
    else:
        rows = [[miss.count, miss.problem.label, miss.device_fingerprint, _minute(miss.last_seen)] for miss in misses]
        print_table(["count", "problem", "device", "last seen, UTC"], rows, common=["device"])
    if clear:
        with closing(_open(path, writable=True)) as database:
            database.clear_misses(device=device)


@db_group.command("recheck")
@_options(_db_option, _json_option)
def recheck_command(*, path: Path | None, as_json: bool) -> None:
    """See whether winners of older kernel texts still hold.

    Where today's text compiles to the same machine code with this Triton, a winner keeps its time and is fresh again.
    Needs no GPU.
    """
    if (triton := installed_version("triton")) is None:
        raise FaAutotuneError("Triton is not installed, and kernels are compiled to compare them; install it")
    from fa_autotune.evaluation.recheck import recheck

    _open(path).close()  # one that is not there is not created
    with closing(_open(path, writable=True)) as database:
        found = recheck(database, triton=triton)
        where = database.path
    if as_json:
        _print_json({"path": where, **_plain(found)})
        return
    say(f"{found.fresh} kernels of winners are of today's text")
    say(f"{found.renewed} had another text of the same machine code, and are fresh now")
    say(f"{found.other_release} were compiled by other releases of Triton, and were not looked at")
    words: list[Path | str] = ["fa-autotune", "tune", "--recheck"]
    again = shell_command([*words, "--db", path] if path else words)
    measure = f": `{again}` measures them again" if found.changed else ""
    say(f"{found.changed} have other machine code, or none that is known{measure}")


@db_group.command("export")
@click.argument("target", type=FilePath(), required=False)
@click.option("--all", "everything", is_flag=True, help="Every trial, not only the winners and their finalists.")
@click.option("--text", is_flag=True, help="Write sorted JSON text, for reviews in a diff, instead of a pack.")
@click.option("--triton", "release", help="Only what this release of Triton compiled, such as 3.9.")
@_options(_device_option, _db_option, _json_option)
def export_command(
    *,
    target: Path | None,
    everything: bool,
    text: bool,
    release: str | None,
    device_name: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Write a read-only pack, or JSON text.

    A pack goes to TARGET, text to TARGET or the screen. A TARGET that exists is replaced if it is one of its kind.
    """
    if target is None and not text:
        raise click.UsageError("name the pack to write, such as my_gpu.db, or ask for --text")
    with closing(_open(path)) as database:
        (device,) = _devices(database, device_name, required=True)
        if text:
            if target is None:
                echo(database.export_json(device=device, release=release, winners_only=not everything), nl=False)
                return
            count = database.write_json(target, device=device, release=release, winners_only=not everything)
        else:
            assert target is not None
            count = database.export(target, device=device, release=release, winners_only=not everything)
    if as_json:
        _print_json({"path": target, "trials": count})
        return
    echo(f"wrote {shown(target)}: {count} trials", err=True)  # the target may be what stdout is


@db_group.command("import")
@click.argument("sources", type=FilePath(), nargs=-1, required=True, metavar="PACK...")
@_options(_db_option, _json_option)
def import_command(*, sources: Sequence[Path], path: Path | None, as_json: bool) -> None:
    """Add packs to the database.

    Importing again changes nothing; a pack with a bad row is refused whole.
    """
    _import(path or database_path(), sources, as_json=as_json)


@db_group.command("merge")
@click.argument("target", type=DatabaseFile())
@click.argument("sources", type=FilePath(), nargs=-1, required=True, metavar="SOURCE...")
@_options(_json_option)
def merge_command(*, target: Path, sources: Sequence[Path], as_json: bool) -> None:
    """Add the trials of several databases to one.

    All SOURCEs go to TARGET, which is created if need be.
    """
    _import(target, sources, as_json=as_json)


def _import(path: Path, sources: Sequence[Path], *, as_json: bool) -> None:
    from fa_autotune.database import Pack

    packs = [Pack.read(source) for source in sources]  # before a database is made for them
    with closing(_open(path, writable=True)) as database:
        summaries = list(zip(sources, database.import_packs(packs), strict=True))
    if as_json:
        _print_json({"path": path, "imports": [{"source": source, **_plain(found)} for source, found in summaries]})
        return
    for source, found in summaries:
        echo(f"{shown(source)}: {_summary(found)}")


def _summary(found: "ImportSummary") -> str:
    added = {name: count for name, count in _plain(found).items() if count}
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in added.items()) or "nothing new"


# --- what to read -----------------------------------------------------------------------------------------------------


def _open(path: Path | None, *, writable: bool = False) -> "TuningDatabase":
    from fa_autotune.database import TuningDatabase

    return TuningDatabase(path or database_path(), read_only=not writable)


def _sources(path: Path | None, *, with_packs: bool) -> list[Path]:
    own, packs = path or database_path(), pack_paths()
    if path or own.exists() or not packs:
        return [own, *packs] if with_packs else [own]
    if with_packs:
        return packs
    raise DatabaseError(
        f"there is no tuning database at {own}; create one with `fa-autotune tune`, name another with --db FILE, or "
        "see the shipped winners with --packs"
    )


def _devices(database: "TuningDatabase", name: str | None, *, required: bool) -> "list[DeviceSpec | None]":
    """The database's devices that a name means: [None], for all, without a name; an error for none or several."""
    if name is None:
        return [None]
    devices = database.info().devices
    wanted = _folded(name)
    if not wanted:
        raise DatabaseError(f"--device {name!r} names no device; give a fingerprint, or a part of a device's name")
    found = [spec for spec in devices if spec.fingerprint == name] or [
        spec for spec in devices if wanted in _folded(spec.name)
    ]
    if len(found) > 1 or (required and not found):
        known = "; ".join(f"{spec.name} {spec.fingerprint}" for spec in devices) or "none yet"
        what = "means several devices" if found else "is no device"
        raise DatabaseError(f"--device {name} {what} of {database.path}; it has: {known}")
    return [*found]


def _folded(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _problem(text: str | None) -> AttentionProblem | None:
    return None if text is None else AttentionProblem.parse(text)


def _variant(name: str | None) -> Variant | None:
    return None if name is None else Variant(name)


# --- how to show it ---------------------------------------------------------------------------------------------------


def _winner_cells(source: str, winner: "Winner") -> list[object]:
    return [
        winner.device_name,
        winner.toolchain.triton,
        source,
        winner.problem.label,
        winner.candidate.variant.value,
        config_label(winner.candidate.config),
        *_times(winner),
        *_resources(winner),
        _shown(winner.max_error_ratio, ".2f"),
        f"{winner.confirmed_at:%Y-%m-%d}",
    ]


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _trial_cells(trial: "StoredTrial") -> list[object]:
    record = trial.record
    why = ": ".join(text for text in (record.constraint, record.error) if text)
    return [
        trial.trial_id,
        f"{trial.ended_at:%Y-%m-%d %H:%M:%S}",
        trial.device.name,
        record.problem.label,
        record.candidate.variant.value,
        config_label(record.candidate.config),
        record.status.value,
        "–" if record.measurement is None else f"{record.measurement.median_ms:.4f}",
        " ".join(why.split())[:120],
    ]


def _print_rejections(counts: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        _print_json({"rejections": counts})
        return
    rows: list[list[object]] = [
        [
            row.trials,
            row.device_fingerprint,
            row.problem.label,
            row.variant.value,
            row.status.value,
            row.constraint or "–",
        ]
        for row in counts
    ]
    print_table(
        ["trials", "device", "problem", "variant", "status", "constraint"],
        rows,
        common=["device", "problem", "variant", "status"],
    )


def _times(entry: "Winner | LeaderboardEntry") -> list[object]:
    """The cells of _TIMES. The interpreter's speed means nothing."""
    interpreted = entry.device_fingerprint.split("/")[0] == INTERPRETER_ARCH
    tflops = "–" if interpreted else _shown(entry.problem.tflops(entry.median_ms), ".1f")
    return [f"{entry.median_ms:.4f}", tflops]


def _resources(entry: "Winner | LeaderboardEntry") -> list[object]:
    return [_shown(getattr(entry, name.replace(" ", "_"))) for name in _RESOURCES]


def _shown(value: float | None, style: str = "") -> str:
    return "–" if value is None else format(value, style)


def _plain(value: object) -> dict[str, Any]:
    from fa_autotune.database import to_json

    plain = to_json(value)
    assert isinstance(plain, dict)
    return plain


def _print_json(value: object) -> None:
    from fa_autotune.database import to_json

    echo(json.dumps(to_json(value), indent=2))
