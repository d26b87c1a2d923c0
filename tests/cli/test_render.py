"""The command that prints generated kernels."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fa_autotune.database import TuningDatabase
from fa_autotune.dispatch.winners import Snapshot, Source
from fa_autotune.kernels.render import render
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.command import run, start
from kit.winners import winner

SHORT = "4x32x8x4096x4096x128,causal"


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


def test_render_writes_over_its_own_files_only(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    for words in (["--json"], ["--variant", "tma"], ["--json"]):
        path.unlink(missing_ok=True)
        for _ in range(2):
            assert run("render", "--problem", SHORT, *words, "--output", path).exit_code == 0
    before = path.read_bytes()
    done = run("render", "--problem", SHORT, "--output", path)  # JSON is no kernel
    assert (done.exit_code, "not a kernel that fa-autotune wrote" in done.stderr) == (2, True)
    assert path.read_bytes() == before


def test_render_writes_through_a_stream_that_is_open_already(tmp_path: Path) -> None:
    with (tmp_path / "kernel.py").open("w") as file:
        start("render", "--problem", SHORT, "--output", "/dev/stdout", stdout=file)
        file.write("after")
    assert (tmp_path / "kernel.py").read_text() == run("render", "--problem", SHORT).stdout + "after"


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ["t.db", "link.py", "t.db-wal"])
def test_render_never_writes_over_a_database(
    name: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "t.db"
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(database))
    if exists:
        TuningDatabase(database).close()
    (tmp_path / "link.py").symlink_to(database)
    before = database.read_bytes() if exists else None
    done = run("render", "--problem", SHORT, "--output", tmp_path / name)
    assert (done.exit_code, "name another file" in done.stderr) == (2, True)
    assert (database.read_bytes() if database.exists() else None) == before


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
    row = replace(winner(path=tmp_path / "pack.db"), source=Source.PACK)
    read: dict[Path | None, Snapshot] = {None: Snapshot(rows=(row,))}  # none of the user's
    monkeypatch.setenv("FA_AUTOTUNE_DB", ":memory:")  # a database that is not used need not be usable
    monkeypatch.setattr("fa_autotune.paths.shipped_kernels_dir", lambda: tmp_path)
    monkeypatch.setattr("fa_autotune.dispatch.winners.load_snapshot", lambda user_path, _: read[user_path])
    kernel, index = map(Path, json.loads(run("render", "--winners", "--json").stdout))
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == [index, kernel]
    assert kernel.read_text() == render(row.candidate).text
    assert kernel.relative_to(tmp_path).as_posix() in index.read_text()


def test_render_takes_no_kernel_away_since_a_pack_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa_autotune.paths.shipped_kernels_dir", lambda: tmp_path)
    monkeypatch.setattr("fa_autotune.paths.pack_paths", lambda: [tmp_path / "gone.db"])
    done = run("render", "--winners")
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "nothing was written, since not all winners can be read" in done.stderr
    assert "gone.db is not used: " in done.stderr


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
