"""`fa-autotune explain`: which kernel would run on a problem, and why. Needs no GPU where one is named."""

import json
from pathlib import Path

import click

from fa_autotune.cli.render import render_call
from fa_autotune.cli.terminal import echo, say, shown
from fa_autotune.cli.values import DatabaseFile
from fa_autotune.cli.versions import installed_version
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.shipped_kernels import find_shipped
from fa_autotune.dispatch.winners import load_snapshot
from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import database_path, pack_paths, require_working_folder, shipped_kernels_dir, working_folder
from fa_autotune.problem.device import INTERPRETER, INTERPRETER_ARCH, KNOWN_DEVICES, DeviceSpec, known_device
from fa_autotune.problem.problem import AttentionProblem

LIVE = "live"


@click.command("explain")
@click.option("--problem", "problem_text", required=True, help="Such as 4x32x8x4096x4096x128,causal.")
@click.option(
    "--device",
    "device_name",
    default=LIVE,
    show_default=True,
    help=f"{LIVE} for this machine's first GPU, or one of: {', '.join(KNOWN_DEVICES)}, {INTERPRETER_ARCH}.",
)
@click.option("--triton", "triton_version", help="Decide as if this Triton were installed, such as 3.7.1.")
@click.option(
    "--db",
    "db_path",
    type=DatabaseFile(),
    help="The database. [default: FA_AUTOTUNE_DB, or the user's own]",
)
@click.option("--backward", is_flag=True, help="The whole backward: split or fused, why, and its kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain_command(
    *,
    problem_text: str,
    device_name: str,
    triton_version: str | None,
    db_path: Path | None,
    backward: bool,
    as_json: bool,
) -> None:
    """Say which kernel would run on a problem, and why."""
    problem = AttentionProblem.parse(problem_text).as_called()
    device = _device(device_name)
    if db_path is not None and not db_path.exists():
        raise FaAutotuneError(
            f"there is no database {db_path}; name one written by fa-autotune tune, or leave --db out"
        )
    snapshot = load_snapshot(db_path or database_path(), pack_paths())
    dispatcher = Dispatcher(device=device, triton_version=triton_version or _installed_triton(), load=lambda: snapshot)
    choice = dispatcher.backward_choice(problem, unordered=problem.family.unordered) if backward else None
    decisions = [dispatcher.peek(one) for one in (choice.problems if choice else (problem,))]
    files = [find_shipped(decision.candidate, shipped_kernels_dir()) for decision in decisions]
    if as_json:
        found = [
            {**decision.as_json(), "file": None if file is None else str(file)}
            for decision, file in zip(decisions, files, strict=True)
        ]
        values = {"backward": choice.way, "reason": choice.reason, "kernels": found} if choice else found[0]
        notes = {"notes": list(snapshot.notes), "snapshot": snapshot.content_hash, "device": device.name}
        echo(json.dumps({**values, **notes}, indent=2))
        return
    if choice:
        say(choice.describe())
    for decision, file in zip(decisions, files, strict=True):
        say(decision.describe())
        # Not broken into lines, to be copied.
        echo(f"  source  {render_call(_as_asked(decision.problem, problem_text), decision.candidate)}")
        if file is not None:
            echo(f"  file    {shown(_seen_from_here(file))}")
    for note in snapshot.notes:
        say(f"  note    {note}")


def _as_asked(problem: AttentionProblem, text: str) -> str:
    """The user's own text where it says this problem, else its label: of a pass, or with other bounds than he gave."""
    return text if AttentionProblem.parse(text) == problem else problem.label


def _seen_from_here(path: Path) -> Path:
    here = working_folder()
    return path.relative_to(here) if here and path.is_relative_to(here) else path


def _device(name: str) -> DeviceSpec:
    if name == INTERPRETER_ARCH:
        return INTERPRETER
    if name != LIVE:
        return known_device(name)
    require_working_folder()
    hint = f"name a GPU instead: --device {' | '.join(KNOWN_DEVICES)}"
    try:
        from fa_autotune.kernels.gpu import live_device
    except ImportError as error:
        raise FaAutotuneError(f"without {error.name or 'torch'} the live GPU can't be asked; {hint}") from error
    try:
        return live_device()
    except FaAutotuneError as error:
        raise FaAutotuneError(f"{error}; or {hint}") from error


def _installed_triton() -> str:
    if found := installed_version("triton"):
        return found
    raise FaAutotuneError("Triton is not installed; say which one to decide for, such as --triton 3.7.1")
