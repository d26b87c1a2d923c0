"""`fa-autotune render`: one generated kernel, for reading or for a file."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from fa_autotune import paths
from fa_autotune.cli.terminal import echo, echo_path, shown
from fa_autotune.cli.values import FilePath
from fa_autotune.errors import FaAutotuneError, InvalidConfigError
from fa_autotune.files import OutputKind, write_output
from fa_autotune.kernels.render import GENERATED_BY
from fa_autotune.problem.device import DeviceSpec, known_device
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig, with_knobs
from fa_autotune.space.registry import VARIANTS, VariantSpec, variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.space.support import MIN_TRITON

DEFAULT_DEVICE = "h200"
KERNEL = OutputKind(name="a kernel that fa-autotune wrote", is_one=lambda head: head.startswith(GENERATED_BY.encode()))
JSON_KERNEL = OutputKind(
    name="JSON of `fa-autotune render`", is_one=lambda head: head.startswith(b'{\n  "text": "' + GENERATED_BY.encode())
)


@click.command("render")
@click.option("--problem", metavar="TEXT", help="Such as 4x32x8x4096x4096x128,causal.")
@click.option(
    "--variant",
    type=click.Choice([variant.value for variant in Variant]),
    help="The template to render.  [default: portable, or the one that serves where a pass has none]",
)
@click.option(
    "--device",
    metavar="NAME",
    default=DEFAULT_DEVICE,
    show_default=True,
    help="A known GPU, such as a100; its untuned default gives the knobs that --config leaves open.",
)
@click.option("--config", metavar="JSON", default="{}", help="Knobs that differ from the untuned default.")
@click.option(
    "--output",
    type=FilePath(dir_okay=False),
    help="Write to this file instead.",
)
@click.option(
    "--winners", is_flag=True, help="Write the kernels of all packs' winners, and an index, to kernels_generated/."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the kernel and its config, or the files written.")
def render_command(
    *,
    problem: str | None,
    variant: str | None,
    device: str,
    config: str,
    output: Path | None,
    winners: bool,
    as_json: bool,
) -> None:
    """Print one generated kernel, or write the shipped winners'.

    Without --config it is the variant's untuned kernel. What `fa-autotune explain` calls source is the command that
    prints the kernel that a call would run. Nothing is compiled or run. --output replaces what an earlier call wrote,
    and no other file.
    """
    if (problem is None) != winners:
        raise click.UsageError("give --problem, for example --problem 4x32x8x4096x4096x128,causal, or else --winners")
    if problem is None:
        written = write_winners()
        if as_json:
            echo(json.dumps(list(map(str, written)), indent=2))
        else:
            for path in written:
                echo_path(path)
        return
    chosen = None if variant is None else Variant(variant)
    text = render_one(problem, chosen, known_device(device), config, as_json=as_json)
    if output is None:
        echo(text, nl=False)
    else:
        write_output(output, text, JSON_KERNEL if as_json else KERNEL, databases=paths.users_databases())
        echo(f"wrote {shown(output)}", err=True)


def render_one(problem: str, variant: Variant | None, device: DeviceSpec, config: str, *, as_json: bool) -> str:
    """The text of one kernel, or JSON that holds it; `variant` None takes the default of the problem's pass."""
    from fa_autotune.kernels.render import render

    family = AttentionProblem.parse(problem).family
    variant = variant or default_variant(family)
    spec = variant_spec(family.kernel_pass, variant)
    chosen = read_config(config, spec=spec, family=family, arch=device.arch)
    source = render(Candidate(family=family, variant=variant, config=chosen))
    return json.dumps({**asdict(source), "config": asdict(chosen)}, indent=2) + "\n" if as_json else source.text


def default_variant(family: AttentionFamily) -> Variant:
    """The portable one, or the one that serves a family of the passes that have none."""
    found = [spec for spec in VARIANTS if spec.kernel_pass is family.kernel_pass]
    if any(spec.variant is Variant.PORTABLE for spec in found):
        return Variant.PORTABLE
    served = [spec.variant for spec in found if spec.supports(family, "sm_90", MIN_TRITON) is None]
    return served[0] if served else found[0].variant


def render_call(problem: str, candidate: Candidate) -> str:
    """The command that prints a candidate's kernel."""
    words = ["fa-autotune", "render", "--problem", problem, "--variant", candidate.variant.value]
    spec = variant_spec(candidate.family.kernel_pass, candidate.variant)
    default = asdict(default_config(spec, candidate.family, known_device(DEFAULT_DEVICE).arch))
    chosen = asdict(candidate.config)
    if knobs := {name: value for name, value in chosen.items() if value != default[name]}:
        words += ["--config", json.dumps(knobs, separators=(",", ":"))]
    return paths.shell_command(words)


def write_winners() -> list[Path]:
    """Make the checkout's kernels_generated/ hold the kernels of the packs' winners and no other, and their index."""
    from fa_autotune.dispatch.shipped_kernels import write_shipped
    from fa_autotune.dispatch.winners import load_snapshot

    folder = paths.shipped_kernels_dir()
    if not folder.is_dir():
        raise FaAutotuneError(f"{folder} is not there: --winners is for a checkout; give --problem to print a kernel")
    snapshot = load_snapshot(None, paths.pack_paths())
    if snapshot.notes:  # the kernels of what can't be read would be taken away
        raise FaAutotuneError(f"nothing was written, since not all winners can be read: {'; '.join(snapshot.notes)}")
    return write_shipped(snapshot.rows, folder)


def read_config(text: str, *, spec: VariantSpec, family: AttentionFamily, arch: str) -> KernelConfig:
    """The untuned default of a family with the knobs of a JSON object put in; InvalidConfigError."""
    try:
        knobs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(f'--config {text!r} is not JSON: {error}; write it like {{"BLOCK_M": 64}}') from None
    known = [knob.name for knob in spec.knobs]
    if not isinstance(knobs, dict) or not knobs.keys() <= set(known):
        raise InvalidConfigError(f"--config {text!r} is not an object of knobs of {spec.variant}: {', '.join(known)}")
    return with_knobs(default_config(spec, family, arch), knobs)
