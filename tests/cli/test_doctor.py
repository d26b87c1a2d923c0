"""The command that says what would go wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa_autotune import __version__
from fa_autotune.cli import doctor
from fa_autotune.cli.doctor import Machine, Verdict, examine, show
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import CompileError
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.space.candidate import Candidate, Variant
from kit.command import run
from kit.rights import outcome_in
from kit.winners import winner

SHORT = "4x32x8x4096x4096x128,causal"


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


def test_a_gpu_with_winners_is_tuned(machine: Machine) -> None:
    tuned = replace(machine, snapshot=Snapshot(rows=(winner(path=machine.database),)))
    report = examine(tuned)
    assert (report.verdict, report.findings) == (Verdict.TUNED, ())
    assert (report.gpus[0].winners, report.databases[0].winners) == (1, 1)


def test_winners_of_a_sibling_leave_a_gpu_untuned(machine: Machine) -> None:
    report = examine(
        replace(machine, snapshot=Snapshot(rows=(winner(device=KNOWN_DEVICES["h100"], path=machine.database),)))
    )
    assert (report.verdict, report.gpus[0].sibling_winners) == (Verdict.UNTUNED, 1)


def test_a_cache_folder_that_others_may_write_is_told(machine: Machine) -> None:
    machine.cache_dir.mkdir()
    machine.cache_dir.chmod(0o777)
    report = examine(machine)
    assert report.verdict is Verdict.BROKEN
    assert any("mode 0777" in one.text and "FA_AUTOTUNE_CACHE" in one.next_step for one in report.findings)


def test_the_first_lines_say_which_fast_variants_there_are(machine: Machine) -> None:
    _, second, *_ = show(examine(machine))
    assert second == (
        "NVIDIA H200: fast variants: fwd/tma, fwd/hopper_ws, bwd_dkdv/tma, bwd_dq/tma, bwd_fused/hopper_ws, "
        "bwd_fused/hopper_wide"
    )


def test_a_variant_that_an_untested_triton_loses_is_told_first_and_with_a_way_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(candidate: Candidate, arch: str) -> None:
        if candidate.variant is Variant.HOPPER_WS:
            raise CompileError("tma has no async_load")

    newer = "3.10.0"
    monkeypatch.setattr("fa_autotune.kernels.loaded.load_kernel", load)
    monkeypatch.setattr("fa_autotune.kernels.gpu.live_toolchain", lambda: SimpleNamespace(triton=newer))
    lost = doctor._lost(machine.devices)
    report = examine(replace(machine, versions={**machine.versions, "triton": newer}, lost=lost))
    _, second, *_ = show(report)
    assert second.endswith("lost: fwd/hopper_ws, bwd_fused/hopper_ws, as told below")
    told = [finding for finding in report.findings if "fwd/hopper_ws is lost" in finding.text]
    assert len(told) == 1
    assert ("tma has no async_load" in told[0].text, told[0].next_step) == (
        True,
        "pip install 'triton==3.9.*' if your torch allows it",
    )
    assert not told[0].fatal


def test_nothing_is_compiled_to_diagnose_a_triton_that_was_tested(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa_autotune.kernels.loaded.load_kernel", None)  # not to be called
    assert doctor._lost(machine.devices) == {}


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


def broken(*arguments: object) -> Any:
    raise PermissionError(13, "Permission denied")


PROBES = [
    "fa_autotune.paths.database_path",
    "fa_autotune.paths.cache_dir",
    "fa_autotune.paths.pack_paths",
    "fa_autotune.paths.c_compiler",
    "fa_autotune.cli.doctor.load_snapshot",
    "fa_autotune.cli.versions.version",
    "fa_autotune.cli.doctor._ask_torch",
]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_that_fails_is_told_and_hides_no_other(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, broken)
    found = run("doctor", "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    report = json.loads(found.stdout)
    failures = [finding["text"] for finding in report["findings"] if "can't be told: " in finding["text"]]
    assert [text.endswith("Permission denied") for text in failures] == [True]
    assert all(report[name] is not None for name in ("verdict", "versions", "databases", "gpus"))


def test_a_database_in_a_folder_that_may_not_be_entered_is_a_finding(public_folder: Path) -> None:
    (public_folder / "closed").mkdir(mode=0o700)

    def doctor(folder: Path) -> str:
        os.environ["FA_AUTOTUNE_DB"] = str(folder / "closed" / "tuning.db")
        found = run("doctor", "--json")
        return json.dumps([found.exit_code, json.loads(found.stdout)["findings"]])

    code, findings = json.loads(outcome_in(public_folder, doctor))
    assert code in (0, 1)  # 1 where this user may not read torch
    assert any("tuning.db" in finding["text"] and "Permission denied" in finding["text"] for finding in findings)
