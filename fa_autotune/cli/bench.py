"""`fa-autotune bench`: our kernels beside other libraries on the same problems, as a table and as files."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fa_autotune.cli.problem_options import named_problems, problem_options
from fa_autotune.cli.terminal import echo, print_table, say, shown
from fa_autotune.cli.values import FilePath, WholeNumber
from fa_autotune.errors import FaAutotuneError
from fa_autotune.files import is_writable, write_whole
from fa_autotune.paths import require_working_folder, shell_command
from fa_autotune.problem.models import default_problems
from fa_autotune.problem.problem import AttentionProblem

if TYPE_CHECKING:
    from fa_autotune.benchmark.bench import BenchReport, BenchRow

DEFAULT_PEERS = "sdpa-cudnn,sdpa-flash,flex"
_ONLY_HERE = ("output", "as_json")  # say where the figures go, not what they are


@click.command("bench")
@problem_options
@click.option(
    "--against",
    default=DEFAULT_PEERS,
    show_default=True,
    help="Peers, separated by commas: sdpa-flash, sdpa-cudnn, sdpa-efficient, flex, fa3, ours-unordered (the backward "
    "with deterministic=False), ours-padded (a varlen problem as a batch); empty for ours alone.",
)
@click.option("--gpu", "gpu_index", type=WholeNumber(min=0), default=0, show_default=True, help="Index of the GPU.")
@click.option(
    "--output",
    type=FilePath(file_okay=False),
    help="A folder for <date>-<gpu>-forward.json (or -backward) and .md; nothing there is overwritten.",
)
@click.option("--backward", is_flag=True, help="Measure the whole backward of each problem instead of the forward.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to stderr.")
@click.pass_context
def bench_command(
    ctx: click.Context,
    /,
    *,
    against: str,
    gpu_index: int,
    output: Path | None,
    backward: bool,
    as_json: bool,
    **named: Any,
) -> None:
    """Measure our kernels beside others on the same problems.

    All contenders of a problem take turns in one session, on the same tensors. Without a problem it measures the list
    that tune tunes by default.
    """
    require_working_folder()
    problems = named_problems(**named) or default_problems()
    peers = [word.strip() for word in against.split(",") if word.strip()]
    if output is not None:
        _require_folder(output)
    from fa_autotune.benchmark.bench import bench

    run: Callable[..., BenchReport] = ctx.obj or bench
    report = run(
        problems, against=peers, device_index=gpu_index, backward=backward, on_problem=_Progress(len(problems))
    )
    command = _command_line(ctx)
    document = json.dumps({"command": command, **report.as_json()}, indent=2)
    if as_json:
        echo(document)
    else:
        _print_table(report)
    if output is not None:
        for path in _write(output, report, document, markdown(report, command)):
            echo(f"wrote {shown(path)}", err=True)


def markdown(report: "BenchReport", command: str) -> str:
    """A report as a document: what was run on what, the table, and what the figures mean."""
    from fa_autotune.benchmark.bench import table_rows

    head, *rows = table_rows(report)
    lines = [f"# {_pass_name(report).capitalize()} attention on {report.device.name}, {report.started_at[:10]}", ""]
    lines += ["```sh", command, "```", ""]
    lines += [f"- {fact}" for fact in _facts(report)]
    lines += ["", _markdown_row(head), _markdown_row("---" for _ in head), *map(_markdown_row, rows), ""]
    lines += [
        "Median times; TFLOP/s count matrix products only, and half of them where causal. `ours / peer` is our speed",
        "over the peer's: above 1 we are faster. The `.json` of the same name holds every figure.",
    ]
    return "\n".join(lines) + "\n"


def _pass_name(report: "BenchReport") -> str:
    return "backward" if report.backward else "forward"


def _facts(report: "BenchReport") -> list[str]:
    device, chain, policy = report.device, report.toolchain, report.policy
    limit = "unknown" if device.power_limit_w is None else f"{device.power_limit_w:.0f} W"
    facts = [
        f"GPU: {device.name} ({device.fingerprint}), power limit {limit}, driver {chain.driver or 'unknown'}",
        f"versions: torch {chain.torch}, CUDA {chain.cuda}, cuDNN {report.cudnn or 'none'}, Triton {chain.triton}, "
        f"Python {report.python}",
        f"measured from {report.started_at}, contenders in turn: {policy.rounds} rounds of about "
        f"{policy.round_ms:g} ms each, {_regimes(report)}",
    ]
    spreads = {name: _largest_spread(report, name) for name in report.contenders()}
    told = ", ".join(f"{name} {spread:.1%}" for name, spread in spreads.items() if spread is not None)
    return [*facts, f"largest spread, p80 − p20 over the median: {told}", *_notes(report)]


def _regimes(report: "BenchReport") -> str:
    words = {
        "events": "device events round each launch, L2 cache flushed",
        "graph": "replays of a CUDA graph, L2 cache warm",
        "wall": "the host's clock",
    }
    used = {row.measurement.regime.value for row in report.rows if row.measurement}
    return "; ".join(text for regime, text in words.items() if regime in used) or "nothing ran"


def _largest_spread(report: "BenchReport", contender: str) -> float | None:
    measured = [row.measurement for row in report.rows if row.contender == contender and row.measurement]
    return max(((one.p80_ms - one.p20_ms) / one.median_ms for one in measured), default=None)


def _notes(report: "BenchReport") -> list[str]:
    """What each peer is, or why it did not run, and on how many problems. Our notes are in the table."""
    from fa_autotune.benchmark.bench import OURS

    peers = [name for name in report.contenders() if name != OURS]
    counts = {name: Counter(row.note for row in report.rows if row.contender == name) for name in peers}
    return [
        f"{name}: " + "; ".join(f"{note} ({count} of {notes.total()} problems)" for note, count in notes.items())
        for name, notes in counts.items()
    ]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _command_line(ctx: click.Context) -> str:
    """The command that repeats this run, without what only concerns this machine's files."""
    words = ["fa-autotune", "bench"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in _ONLY_HERE:
            continue
        value = ctx.params[name]
        if value is True:
            words.append(parameter.opts[0])
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], one.name if isinstance(one, Path) else str(one)]
    return shell_command(words)


def _require_folder(folder: Path) -> None:
    """Fail before measuring rather than after; the folder is made when there is something to put in it."""
    if not is_writable(folder) or (folder.exists() and not folder.is_dir()):
        raise FaAutotuneError(f"--output {folder} can't take results: it can't be written; name another folder")


def _write(folder: Path, report: "BenchReport", document: str, text: str) -> list[Path]:
    gpu = re.sub(r"[^a-z0-9]+", "_", report.device.name.lower()).strip("_")
    name = stem = f"{report.started_at[:10]}-{gpu}-{_pass_name(report)}"
    count = 1
    while any((folder / f"{name}{suffix}").exists() for suffix in (".json", ".md")):
        count += 1
        name = f"{stem}-{count}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    for path, content in zip(paths, (document + "\n", text), strict=True):
        write_whole(path, content)
    return paths


class _Progress:
    """Says on stderr how far a run is, a line for each problem."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def __call__(self, problem: AttentionProblem, rows: "list[BenchRow]") -> None:
        self._done += 1
        figures = ", ".join(f"{row.contender} {row.tflops:.0f}" if row.tflops else f"{row.contender} –" for row in rows)
        echo(f"[{self._done}/{self._total}] {problem.label}: {figures} TFLOP/s", err=True)


def _print_table(report: "BenchReport") -> None:
    from fa_autotune.benchmark.bench import table_rows

    head, *rows = table_rows(report)
    speeds = [name for name in head if name.endswith(" TFLOP/s") and not name.startswith("ours ")]
    print_table(head, rows, optional=[*speeds, "ms", "kernel"], last_apart=True)
    for note in _notes(report):
        say(note)
