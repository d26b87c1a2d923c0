"""What is said of a decision: its description, its JSON, `fa-autotune explain` and the page about it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fa_autotune.cli import main
from fa_autotune.cli.explain import explain_command
from fa_autotune.dispatch.winners import Source
from fa_autotune.errors import FaAutotuneError, NoKernelError
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.passes import BACKWARD_PASSES, FUSED_BACKWARD, SPLIT_BACKWARD, Pass
from kit.winners import (
    A100,
    H200,
    PROBLEM,
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


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_explain_prints_the_call_that_shows_the_kernel(device: str) -> None:
    problem = "1x8x8x512x512x64"
    (call,) = [
        line.split(maxsplit=1)[1]
        for line in explain("--problem", problem, "--device", device).output.splitlines()
        if line.startswith("  source  ")
    ]
    command, *words = shlex.split(call)
    rendered = CliRunner().invoke(main, words)
    decision = choose(problem, device=KNOWN_DEVICES[device])
    assert (command, rendered.output) == ("fa-autotune", render(decision.candidate).text)


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
    calls = [shlex.split(line.split(maxsplit=1)[1]) for line in output.splitlines() if line.startswith("  source  ")]
    texts = [CliRunner().invoke(main, words).output for _, *words in calls]
    assert ["preprocess" in texts[0], "attention_bwd_fused" in texts[1], "postprocess" in texts[2]] == [True] * 3
