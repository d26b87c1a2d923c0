"""The command's root, and its commands doctor and render."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fa_autotune import __version__
from fa_autotune.cli import main
from fa_autotune.cli.doctor import Machine, Verdict, examine, show
from fa_autotune.dispatch.winners import Snapshot, Source, WinnerRow
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config

SHORT = "4x32x8x4096x4096x128,causal"


def run(*arguments: str) -> "click.testing.Result":
    return CliRunner().invoke(main, arguments)


def start(*arguments: str, stdout: Any, **environ: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    words = [sys.executable, "-c", "from fa_autotune.cli import main; main(prog_name='fa-autotune')", *arguments]
    environ = {**os.environ, **environ}
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environ)


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*words, name))


# --- the root ---------------------------------------------------------------------------------------------------------


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\nfrom fa_autotune.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'triton', 'optuna', 'jinja2', 'sqlite_utils', 'rich', 'numpy', 'sqlite3'}\n"
        "found = [m for m in sys.modules if m in heavy or m.startswith('fa_autotune.cli.')]\n"
        "print('LOADED', found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_shows_the_summary_that_each_command_gives_itself() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(200) in run("--help").stdout


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"fa-autotune, version {__version__}\n"


def test_every_command_has_help() -> None:
    assert [words for words, command in leaves(main) if not command.help] == []


def test_every_option_has_help() -> None:
    silent = [
        (*words, parameter.name)
        for words, command in leaves(main)
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert silent == []


def test_every_command_speaks_json() -> None:
    def options(command: click.Command) -> set[str]:
        return {option for parameter in command.params for option in parameter.opts}

    assert [words for words, command in leaves(main) if "--json" not in options(command)] == []


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_2() -> None:
    done = run("render", "--problem", "1x8x3x64x64x64")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: num_q_heads=8 is no multiple of num_kv_heads=3")


@pytest.mark.parametrize(
    ("target", "says"),
    [("/dev/null/kernel.py", "/dev/null/kernel.py: Not a directory"), ("/dev/full", "No space left on device")],
)
def test_an_error_of_the_file_system_is_one_line_with_a_next_step(target: str, says: str) -> None:
    done = run("render", "--problem", SHORT, "--output", target)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {says}; see that it is there")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the rest in a buffer is written when Python ends
def test_a_disk_that_is_full_is_one_line_for_a_table_too(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = start("db", "winners", "--packs", stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr


def test_a_table_is_shown_in_any_encoding() -> None:
    done = start("db", "winners", "--packs", stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4?8?8?4096?4096" in done.stdout


def test_an_unknown_command_is_named() -> None:
    done = run("tuen")
    assert (done.exit_code, "'tuen'" in done.stderr) == (2, True)


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A healthy machine with an H200 and no winner."""
    header = tmp_path / "Python.h"
    header.touch()
    return Machine(
        versions={"fa_autotune": __version__, "torch": "2.13.0", "triton": "3.7.1", "driver": "580", "cuda": "13.0"},
        torch_error=None,
        triton_error=None,
        interpreting=False,
        devices=(KNOWN_DEVICES["h200"],),
        c_compiler="/usr/bin/gcc",
        python_header=header,
        cache_dir=tmp_path / "cache",
        database=tmp_path / "tuning.db",
        packs=(),
        snapshot=Snapshot(rows=()),
    )


def winner_on(short_name: str, path: Path) -> WinnerRow:
    problem, device = AttentionProblem.parse(SHORT), KNOWN_DEVICES[short_name]
    config = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    return WinnerRow(
        problem=problem,
        candidate=Candidate(family=problem.family, variant=Variant.PORTABLE, config=config),
        device_fingerprint=device.fingerprint,
        device_arch=device.arch,
        device_name=device.name,
        kernel_digest="0" * 16,
        triton="3.7.1",
        regime=Regime.EVENTS,
        median_ms=1.0,
        confirmed_at="2026-01-01T00:00:00Z",
        source=Source.USER,
        path=path,
    )


def test_a_gpu_with_winners_is_tuned(machine: Machine) -> None:
    tuned = replace(machine, snapshot=Snapshot(rows=(winner_on("h200", machine.database),)))
    report = examine(tuned)
    assert (report.verdict, report.findings) == (Verdict.TUNED, ())
    assert (report.gpus[0].winners, report.databases[0].winners) == (1, 1)


def test_winners_of_a_sibling_leave_a_gpu_untuned(machine: Machine) -> None:
    report = examine(replace(machine, snapshot=Snapshot(rows=(winner_on("h100", machine.database),))))
    assert (report.verdict, report.gpus[0].sibling_winners) == (Verdict.UNTUNED, 1)


def test_an_untuned_gpu_is_told_to_tune(machine: Machine) -> None:
    assert [finding.next_step for finding in examine(machine).findings] == ["fa-autotune tune"]


def test_no_gpu_means_the_reference(machine: Machine) -> None:
    assert examine(replace(machine, devices=(), c_compiler=None)).verdict is Verdict.REFERENCE


def test_interpreting_is_said(machine: Machine) -> None:
    report = examine(replace(machine, devices=(), interpreting=True))
    assert report.verdict is Verdict.UNTUNED
    assert "TRITON_INTERPRET" in report.findings[0].text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch_error": "No module named 'torch'"}, "No module named 'torch'"),
        ({"triton_error": "No module named 'triton'", "versions": {}}, "No module named 'triton'"),
        ({"versions": {"triton": "3.5.1"}}, "Triton 3.5.1 is older than 3.6"),
        ({"c_compiler": None}, "no C compiler"),
        ({"python_header": Path("/nowhere/Python.h")}, "/nowhere/Python.h is missing"),
        ({"cache_dir": Path("/dev/null/cache")}, "/dev/null/cache can't be written"),
        ({"devices": (replace(KNOWN_DEVICES["h200"], arch="sm_70"),)}, "no variant serves these GPUs"),
    ],
)
def test_what_keeps_kernels_from_running_is_a_problem(machine: Machine, change: dict[str, object], says: str) -> None:
    report = examine(replace(machine, **change))
    assert report.verdict is Verdict.BROKEN
    assert says in next(finding.text for finding in report.findings if finding.fatal)


def test_an_unwritable_database_is_only_a_note(machine: Machine) -> None:
    report = examine(replace(machine, database=Path("/dev/null/tuning.db")))
    assert report.verdict is Verdict.UNTUNED
    assert any("/dev/null/tuning.db can't be written" in finding.text for finding in report.findings)


def test_what_a_snapshot_could_not_use_is_told(machine: Machine) -> None:
    report = examine(replace(machine, snapshot=Snapshot(rows=(), notes=("pack.db is not used: it is torn",))))
    assert any("it is torn" in finding.text for finding in report.findings)


def test_every_finding_is_shown_with_its_next_step(machine: Machine) -> None:
    report = examine(replace(machine, c_compiler=None, database=Path("/dev/null/tuning.db")))
    text = "\n".join(show(report))
    assert len(report.findings) == 3
    assert all(finding.text in text and f"next: {finding.next_step}" in text for finding in report.findings)


def test_doctor_looks_at_this_machine() -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["verdict"] in set(Verdict)
    assert report["versions"]["fa_autotune"] == __version__
    assert done.exit_code == (report["verdict"] == Verdict.BROKEN)


def test_doctor_works_without_torch_and_fails() -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom fa_autotune.cli import main\nmain(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (1, "broken")
    assert report["findings"][0]["next_step"] == "pip install torch"


# --- render -----------------------------------------------------------------------------------------------------------


def test_render_prints_the_kernel_of_the_config_it_is_given() -> None:
    done = run("render", "--problem", SHORT, "--config", '{"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 3}')
    config = PortableFwdConfig(BLOCK_M=128, BLOCK_N=32, num_warps=4, num_stages=3)
    candidate = Candidate(family=AttentionProblem.parse(SHORT).family, variant=Variant.PORTABLE, config=config)
    assert done.stdout == render(candidate).text


@pytest.mark.parametrize(("head_dim", "template"), [(128, "bwd_fused_hopper_ws"), (256, "bwd_fused_hopper_wide")])
def test_render_takes_the_variant_that_serves_where_none_is_portable(head_dim: int, template: str) -> None:
    done = run("render", "--problem", f"4x8x8x4096x4096x{head_dim},causal,bwd_fused")
    assert done.exit_code == 0
    assert f"templates/{template}.py.jinja" in done.stdout.splitlines()[0]


def test_render_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    done = run("render", "--problem", SHORT, "--variant", "tma", "--output", str(path))
    assert (done.exit_code, done.stdout) == (0, "")
    assert path.read_text() == run("render", "--problem", SHORT, "--variant", "tma").stdout


def test_render_speaks_json() -> None:
    found = json.loads(run("render", "--problem", SHORT, "--config", '{"maxnreg": 128}', "--json").stdout)
    assert found["config"]["maxnreg"] == 128
    assert found["digest"] in found["name"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object of knobs"),
        ('{"BLOCK_K": 64}', "BLOCK_M, BLOCK_N"),
        ('{"BLOCK_M": 48}', "BLOCK_M=48 is not a power of two from 16 to 256"),
        ('{"BLOCK_M": "64; import os"}', "is not a power of two from 16 to 256"),
    ],
)
def test_render_refuses_a_config_with_the_rule(config: str, says: str) -> None:
    done = run("render", "--problem", SHORT, "--config", config)
    assert (done.exit_code, says in done.stderr) == (2, True)


def test_render_writes_exactly_the_winners_of_the_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(winner_on("h200", tmp_path / "pack.db"), source=Source.PACK)
    mine = replace(row, source=Source.USER, problem=AttentionProblem.parse("1x1x1x64x64x64"))
    monkeypatch.setattr("fa_autotune.paths.shipped_kernels_dir", lambda: tmp_path)
    monkeypatch.setattr("fa_autotune.dispatch.winners.load_snapshot", lambda *_: Snapshot(rows=(row, mine)))
    kernel, index = map(Path, json.loads(run("render", "--winners", "--json").stdout))
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == [index, kernel]
    assert kernel.read_text() == render(row.candidate).text
    assert kernel.relative_to(tmp_path).as_posix() in index.read_text()


def test_render_writes_winners_in_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.paths.shipped_kernels_dir", lambda: tmp_path / "none")
    done = run("render", "--winners")
    assert (done.exit_code, "is for a checkout" in done.stderr) == (2, True)


def test_render_takes_the_default_of_the_gpu_that_is_named() -> None:
    problem = "1x8x8x64x64x64,fp16"
    config = json.loads(run("render", "--problem", problem, "--device", "t4", "--json").stdout)["config"]
    spec = variant_spec(Pass.FWD, Variant.PORTABLE)
    assert config == asdict(default_config(spec, AttentionProblem.parse(problem).family, "sm_75"))


@pytest.mark.parametrize("arguments", [[], ["--winners", "--problem", SHORT]])
def test_render_without_a_problem_says_how(arguments: list[str]) -> None:
    done = run("render", *arguments)
    assert (done.exit_code, "--problem 4x32x8" in done.stderr) == (2, True)
