"""What is said of a decision: its description, its JSON, `fa-autotune explain` and the page about it."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from fa_autotune.cli import main
from fa_autotune.cli.explain import explain_command
from fa_autotune.dispatch.winners import Snapshot, Source
from fa_autotune.errors import FaAutotuneError, NoKernelError
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.passes import BACKWARD_PASSES, FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Variant
from fa_autotune.space.config import config_from_key
from fa_autotune.space.registry import variant_spec
from kit.winners import (
    A100,
    H200,
    HOPPER,
    PORTABLE,
    PROBLEM,
    TMA,
    choose,
    winner,
)


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(explain_command, list(arguments), standalone_mode=False)


@pytest.fixture
def no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.cli.explain.pack_paths", list)


def test_description_names_kernel_origin_and_reason() -> None:
    text = choose("4x32x8x4000x4000x128,causal", winner(source=Source.PACK, path=Path("nvidia_h200.db"))).describe()
    for expected in ("portable 64x64 w4 s3", "nearest, fresh row of nvidia_h200.db (pack)", "1 ms on 4×32×8×4096×4096"):
        assert expected in text


def test_decision_as_json_is_plain_values() -> None:
    values = choose(PROBLEM, winner()).as_json()
    assert json.loads(json.dumps(values)) == values
    assert (values["origin"], values["config"]["BLOCK_M"], values["row"]["device"]) == ("exact", 64, H200.name)


@pytest.mark.usefixtures("no_packs")
def test_explain_prints_a_decision_for_a_named_gpu() -> None:
    assert "origin  default, untuned" in explain("--problem", "1x8x8x512x512x64", "--device", "h200").output


def told(output: str, word: str) -> list[str]:
    """What `explain` says after a word, once for each kernel."""
    return [line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith(f"  {word}  ")]


def rendered(call: str) -> str:
    """What a printed command prints when it is run."""
    command, *words = shlex.split(call)
    done = CliRunner().invoke(main, words)
    assert (command, done.exit_code, done.stderr) == ("fa-autotune", 0, "")
    return done.stdout


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_explain_prints_the_call_that_shows_the_kernel(device: str) -> None:
    problem = "1x8x8x512x512x64"
    (call,) = told(explain("--problem", problem, "--device", device).output, "source")
    assert rendered(call) == render(choose(problem, device=KNOWN_DEVICES[device]).candidate).text


CALLS = [
    "4x32x8x4096x4096x128,causal",
    "4x32x8x4096x4096x64,causal,left=1023",
    "1x8x8x1x4096x128,causal",  # one row: its causal bound hides nothing, and its kernel has none
    "2x8x8x512x512x192x128,fp16,causal,alibi",
    "16x16x16x1000x1000x64,causal,varlen,dropout",
    "2x8x8x512x512x72,any,softcap",
    "2x8x8x512x512x64,bias,loose_mask",
    "2x8x8x512x512x320",
    "2x8x8x512x512x64,fp32,tf32",
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("device", ["h200", "a100", "interpreter"])
@pytest.mark.parametrize("problem", CALLS)
def test_every_call_that_is_printed_runs_and_shows_the_kernel(problem: str, device: str, backward: bool) -> None:
    """With the shipped winners: of all variants, with knobs away from their defaults."""
    words = ["--problem", problem, "--device", device, "--triton", "3.7.1", *["--backward"] * backward]
    output = explain(*words).output
    kernels = json.loads(explain(*words, "--json").output)
    kernels = kernels["kernels"] if backward else [kernels]
    heads = [rendered(call).splitlines() for call in told(output, "source")]
    for head, kernel in zip(heads, kernels, strict=True):
        family = AttentionProblem.from_key(json.dumps({"schema": 1, **kernel["problem"]})).family
        assert head[2] == f"# Family: {family.key}"
        spec = variant_spec(family.kernel_pass, Variant(kernel["variant"]))
        config = config_from_key(spec.config_type, head[3].removeprefix("# Config: "))
        assert asdict(config) == kernel["config"]


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("config", [PORTABLE, TMA, HOPPER, replace(HOPPER, OWN_OUT=True)], ids=str)
def test_the_call_of_a_winner_has_its_knobs(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = winner(PROBLEM, config)
    monkeypatch.setattr("fa_autotune.cli.explain.load_snapshot", lambda *_: Snapshot(rows=(row,)))
    (call,) = told(explain("--problem", PROBLEM.label, "--device", "h200").output, "source")
    assert rendered(call) == render(row.candidate).text


def test_other_commands_that_are_printed_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    output = explain("--problem", "4x32x8x4096x4096x128,causal", "--device", "h200", "--triton", "3.7.1").output
    output += explain("--problem", "4x32x8x4000x4096x128,causal,alibi", "--device", "a100").output
    quoted = set(re.findall(r"`fa-autotune ([^`]+)`", output))
    assert quoted
    for name, *words in map(shlex.split, quoted):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, words)


def test_explain_names_the_file_of_a_kernel_that_ships(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--problem", "4x32x8x4096x4096x128,causal", "--device", "h200", "--backward")
    monkeypatch.chdir(checkout)
    output = explain(*words).output
    files = told(output, "file")
    assert [Path(file).parent.as_posix() for file in files] == [
        "kernels_generated/bwd_preprocess_portable",
        "kernels_generated/bwd_fused_hopper_ws",
        "kernels_generated/bwd_postprocess_portable",
    ]
    sources = [rendered(call) for call in told(output, "source")]
    assert [Path(file).read_text().splitlines()[4:] for file in files] == [text.splitlines()[4:] for text in sources]
    kernels = json.loads(explain(*words, "--json").output)["kernels"]
    assert [kernel["file"] for kernel in kernels] == [str(checkout / file) for file in files]


def test_explain_names_no_file_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.cli.explain.shipped_kernels_dir", lambda: tmp_path / "none")
    words = ("--problem", "4x32x8x4096x4096x128,causal", "--device", "h200")
    assert told(explain(*words).output, "file") == []
    assert json.loads(explain(*words, "--json").output)["file"] is None


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("kernel_pass", BACKWARD_PASSES)
def test_explain_knows_every_pass(kernel_pass: Pass) -> None:
    output = explain("--problem", f"1x8x8x512x512x64,{kernel_pass}", "--device", "h200").output
    assert output.startswith(f"{kernel_pass} bf16 d64 full")


def test_explain_prints_one_json_document() -> None:
    values = json.loads(explain("--problem", "1x8x8x512x512x64", "--device", "A100", "--json").output)
    assert (values["device"], values["origin"], values["variant"]) == (A100.name, "default", "portable")


@pytest.mark.usefixtures("no_packs")
def test_explain_decides_for_the_triton_it_is_told() -> None:
    failed = explain("--problem", "1x8x8x512x512x64", "--device", "h200", "--triton", "3.5.1")
    assert isinstance(failed.exception, NoKernelError)


def test_explain_names_a_database_that_is_not_there() -> None:
    failed = explain("--problem", "1x8x8x512x512x64", "--device", "h200", "--db", "/nonexistent.db")
    assert "/nonexistent.db" in str(failed.exception)


def test_explain_without_a_gpu_says_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(index: int = 0) -> DeviceSpec:
        raise FaAutotuneError("no GPU")

    monkeypatch.setattr("fa_autotune.kernels.gpu.live_device", absent)
    assert "--device t4 |" in str(explain("--problem", "1x8x8x512x512x64").exception)


def test_importing_dispatch_loads_neither_torch_nor_the_writers_of_databases_and_kernels() -> None:
    heavy = ("torch", "triton", "optuna", "jinja2", "sqlite_utils", "click")
    script = f"import sys, fa_autotune.dispatch; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_example_of_the_page_runs(checkout: Path) -> None:
    page = (checkout / "docs" / "dispatch.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=checkout, check=True)
    assert done.stdout.startswith("fwd bf16 d128 causal 4×32×8×4096×4096")


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize(("device", "passes"), [("h200", FUSED_BACKWARD), ("a100", SPLIT_BACKWARD)])
def test_explain_tells_which_way_a_backward_goes(device: str, passes: tuple[Pass, ...]) -> None:
    words = ("--problem", "1x8x8x512x512x64,causal", "--device", device, "--backward")
    assert explain(*words).output.startswith("backward fused:" if device == "h200" else "backward split:")
    values = json.loads(explain(*words, "--json").output)
    assert [one["problem"]["pass"] for one in values["kernels"]] == [*passes]


@pytest.mark.usefixtures("no_packs")
def test_each_kernel_of_a_backward_is_shown_by_a_call_of_its_own() -> None:
    output = explain("--problem", "1x8x8x512x512x64,causal", "--device", "h200", "--backward").output
    texts = [rendered(call) for call in told(output, "source")]
    assert ["preprocess" in texts[0], "attention_bwd_fused" in texts[1], "postprocess" in texts[2]] == [True] * 3
