"""`fa-autotune db`: what its commands print, and what they import."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa_autotune.cli import main
from fa_autotune.database import Miss, TuningDatabase
from fa_autotune.dispatch.winners import load_snapshot
from fa_autotune.evaluation.recheck import Recheck
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES
from fa_autotune.records import TrialStatus
from kit.command import start
from kit.database_files import edit
from kit.tuning_samples import H200, OTHER_PROBLEM, PROBLEM, begin, failed_record, fill, write_pack

SHORT = "4x32x8x4096x4096x128,causal"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database after a tuning job on an H200."""
    with TuningDatabase(tmp_path / "tuning.db") as database:
        fill(database)
        database.add_misses([Miss(problem=OTHER_PROBLEM, device_fingerprint=H200.fingerprint, count=3)])
    return tmp_path / "tuning.db"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["db", *map(str, arguments)])


def printed(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def document(*arguments: object) -> Any:
    return json.loads(printed(*arguments, "--json"))


def test_info_prints_rows_devices_and_the_last_session(path: Path) -> None:
    text = printed("info", "--db", path)
    for words in ("5 trials", "NVIDIA H200", "triton 3.7.1", "last session: confirm, finished"):
        assert words in text


def test_info_as_json_counts_rows(path: Path) -> None:
    assert document("info", "--db", path)["counts"]["trials"] == 5


def test_path_prints_the_users_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fa_autotune.cli.db.database_path", lambda: tmp_path / "mine.db")
    assert printed("path") == f"{tmp_path / 'mine.db'}\n"
    assert document("path") == {"path": str(tmp_path / "mine.db"), "exists": False}


def test_winners_show_config_time_and_speed(path: Path) -> None:
    text = printed("winners", "--db", path)
    for words in ("64x64 w4 s2", "0.9000", f"{PROBLEM.flops / 0.9 * 1e-9:.1f}", "168", "98304"):
        assert words in text


def test_winners_of_several_devices_are_several_tables(path: Path) -> None:
    with TuningDatabase(path) as database:
        fill(database, device=KNOWN_DEVICES["a100"])
    heads = [line for line in printed("winners", "--db", path).splitlines() if line.startswith("device ")]
    assert [KNOWN_DEVICES["a100"].name in heads[0], H200.name in heads[1]] == [True, True]


def test_no_speed_is_claimed_for_the_interpreter(tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "tuning.db") as database:
        fill(database, device=INTERPRETER)
    for words in (["winners"], ["top", "--problem", SHORT]):
        assert f"{PROBLEM.flops / 0.9 * 1e-9:.1f}" not in printed(*words, "--db", tmp_path / "tuning.db")


def test_without_a_database_of_ones_own_the_shipped_winners_are_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(tmp_path, "nvidia_h200.db")
    monkeypatch.setattr("fa_autotune.paths.packs_dir", lambda: tmp_path)
    monkeypatch.setattr("fa_autotune.cli.db.database_path", lambda: tmp_path / "none.db")
    assert "see the shipped winners with --packs" in run("winners").output


def test_winners_as_json_hold_problem_and_config(path: Path) -> None:
    (winner,) = document("winners", "--db", path)["winners"]
    assert winner["problem"] == json.loads(PROBLEM.key)
    assert winner["candidate"]["config"]["BLOCK_M"] == 64


def test_winners_of_another_variant_are_none(path: Path) -> None:
    assert printed("winners", "--db", path, "--variant", "tma") == "none\n"


def test_winners_include_shipped_packs_when_asked(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packs").mkdir()
    write_pack(tmp_path / "packs", "nvidia_h200.db")
    monkeypatch.setattr("fa_autotune.paths.packs_dir", lambda: tmp_path / "packs")
    found = document("winners", "--db", path, "--packs")["winners"]
    assert [winner["source"] for winner in found] == ["tuning.db", "nvidia_h200.db"]


def test_packs_are_shown_without_a_database_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pack(tmp_path, "nvidia_h200.db")
    monkeypatch.setattr("fa_autotune.paths.packs_dir", lambda: tmp_path)
    monkeypatch.setattr("fa_autotune.cli.db.database_path", lambda: tmp_path / "none.db")
    assert len(document("winners", "--packs")["winners"]) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 5),
        (("--status", "ok"), 3),
        (("--status", "rejected", "--status", "wrong_result"), 2),
        (("--problem", SHORT), 5),
        (("--problem", "1x8x8x64x64x64"), 0),
        (("--variant", "tma"), 0),
        (("--device", "h200"), 5),
    ],
)
def test_trials_pass_the_filters(path: Path, options: tuple[str, ...], expected: int) -> None:
    assert len(document("trials", "--db", path, *options)["trials"]) == expected


def test_trials_say_why_one_failed(path: Path) -> None:
    assert "shared_memory: needs 300000 bytes" in printed("trials", "--db", path)


def test_trials_past_the_limit_are_mentioned(path: Path) -> None:
    assert "4 earlier trials are not shown; see them with --limit 5" in printed("trials", "--db", path, "--limit", 1)


def test_the_summary_counts_failures_by_constraint(path: Path) -> None:
    found = document("trials", "--db", path, "--summary", "--status", "rejected")["rejections"]
    assert [(row["constraint"], row["trials"]) for row in found] == [("shared_memory", 1)]


def test_the_summary_is_a_table(path: Path) -> None:
    assert "wrong_result" in printed("trials", "--db", path, "--summary")


def test_markup_in_an_error_is_shown_as_it_is(path: Path) -> None:
    with TuningDatabase(path) as database:
        database.save_trial(begin(database), failed_record(TrialStatus.CRASHED, 16, error="[bold]a[/wrong]"))
    assert "[bold]a[/wrong]" in printed("trials", "--db", path)


def test_top_lists_the_fastest_configs_with_their_resources(path: Path) -> None:
    found = document("top", "--db", path, "--problem", SHORT, "--limit", 2)["top"]
    assert [(row["position"], row["candidate"]["config"]["BLOCK_M"], row["registers"]) for row in found] == [
        (1, 64, 168),
        (2, 32, 168),
    ]


def test_top_says_how_each_was_measured(path: Path) -> None:
    text = printed("top", "--db", path, "--problem", SHORT)
    assert "confirm, events" in text
    assert "screen, events" in text


def test_misses_show_how_often(path: Path) -> None:
    (miss,) = document("misses", "--db", path)["misses"]
    assert (miss["count"], miss["problem"]) == (3, json.loads(OTHER_PROBLEM.key))


def test_misses_are_cleared_when_asked(path: Path) -> None:
    assert OTHER_PROBLEM.label in printed("misses", "--db", path, "--clear")
    assert printed("misses", "--db", path) == "none\n"


def test_misses_are_cleared_only_once_they_are_shown(path: Path, tmp_path: Path) -> None:
    assert run("misses", "--clear", "--db", tmp_path / "none.db").exit_code == 2
    assert not (tmp_path / "none.db").exists()
    with Path("/dev/full").open("w") as full:
        assert start("db", "misses", "--clear", "--db", str(path), stdout=full).returncode == 2
    assert [miss["count"] for miss in document("misses", "--db", path)["misses"]] == [3]


def test_recheck_says_what_became_of_the_winners(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recheck(fresh=1, renewed=2, changed=3, other_release=4)
    asked: list[str] = []
    monkeypatch.setattr(
        "fa_autotune.evaluation.recheck.recheck", lambda database, *, triton: asked.append(triton) or found
    )
    text = " ".join(printed("recheck", "--db", path).split())
    for words in ("1 kernels of winners", "2 had another text of the same machine code", "4 were compiled by other"):
        assert words in text
    assert f"3 have other machine code, or none that is known: `fa-autotune tune --recheck --db {path}`" in text
    assert document("recheck", "--db", path) == {"path": str(path), **asdict(found)}
    assert asked == [version("triton")] * 2


def test_recheck_creates_no_database(tmp_path: Path) -> None:
    done = run("recheck", "--db", tmp_path / "none.db")
    assert done.exit_code
    assert "there is no tuning database" in done.output
    assert list(tmp_path.iterdir()) == []


def test_export_of_a_release_that_is_not_there_names_those_that_are(path: Path, tmp_path: Path) -> None:
    assert document("export", tmp_path / "pack.db", "--triton", "3.7.0", "--db", path)["trials"] == 2
    assert "its releases are 3.7" in run("export", "--text", "--triton", "3.9", "--db", path).output


def test_export_import_and_import_again(path: Path, tmp_path: Path) -> None:
    assert printed("export", tmp_path / "pack.db", "--db", path) == f"wrote {tmp_path / 'pack.db'}: 2 trials\n"
    assert "2 trials" in printed("import", tmp_path / "pack.db", "--db", tmp_path / "new.db")
    assert printed("import", tmp_path / "pack.db", "--db", tmp_path / "new.db").endswith("nothing new\n")


def test_export_all_holds_every_trial(path: Path, tmp_path: Path) -> None:
    assert document("export", tmp_path / "pack.db", "--all", "--db", path)["trials"] == 5


def test_export_as_text_prints_the_winners(path: Path) -> None:
    assert len(json.loads(printed("export", "--text", "--db", path))["winners"]) == 1


def test_export_as_text_to_a_file_counts_them(path: Path, tmp_path: Path) -> None:
    assert document("export", tmp_path / "pack.json", "--text", "--all", "--db", path)["trials"] == 5
    assert len(json.loads((tmp_path / "pack.json").read_text())["trials"]) == 5


def test_text_replaces_older_text(path: Path, tmp_path: Path) -> None:
    for words in (["--all"], [], ["--all"]):
        printed("export", tmp_path / "text.json", "--text", *words, "--db", path)
    assert len(json.loads((tmp_path / "text.json").read_text())["trials"]) == 5


@pytest.mark.parametrize(
    "target", ["tuning.db", "link.db", "folder/../tuning.db", "pack.db", "notes.json", "tuning.db-wal"]
)
def test_text_never_replaces_anything_else(
    target: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(tmp_path, "pack.db")
    (tmp_path / "link.db").symlink_to(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(path))
    before = {one: one.read_bytes() for one in tmp_path.iterdir() if one.is_file()}
    for words in ([], ["--db", path], ["--all"]):
        done = run("export", "--text", tmp_path / target, *words)
        assert (done.exit_code, "name a" in done.output) == (2, True), done.output
    assert {one: one.read_bytes() for one in before} == before


def test_export_without_a_target_asks_for_one(path: Path) -> None:
    assert "name the pack to write" in run("export", "--db", path).output


def test_merge_gathers_several_databases(path: Path, tmp_path: Path) -> None:
    with TuningDatabase(tmp_path / "a100.db") as database:
        fill(database, device=KNOWN_DEVICES["a100"])
    found = document("merge", tmp_path / "all.db", path, tmp_path / "a100.db")
    assert [imported["trials"] for imported in found["imports"]] == [5, 5]


@pytest.mark.parametrize("bad", ["missing.db", "notes.txt", "row.db", "tuning.db"])
def test_one_source_that_can_not_be_imported_leaves_everything_as_it_was(bad: str, path: Path, tmp_path: Path) -> None:
    good = write_pack(tmp_path, "good.db")
    (tmp_path / "notes.txt").write_text("mine")
    shutil.copy(good, tmp_path / "row.db")
    edit(tmp_path / "row.db", "UPDATE trials SET duration_s = 1e12")
    before = document("info", "--db", path)["counts"]
    for target in [path] if bad == path.name else [path, tmp_path / "new.db"]:
        done = run("import", good, tmp_path / bad, "--db", target, "--json")
        assert (done.exit_code, done.stdout, str(tmp_path / bad) in done.stderr) == (2, "", True), done.output
    done = run("merge", target, good, tmp_path / bad)
    assert (done.exit_code, done.stdout) == (2, "")
    assert document("info", "--db", path)["counts"] == before
    assert not (tmp_path / "new.db").exists()


def test_a_row_that_is_refused_is_named_with_its_file_by_every_reader(path: Path, tmp_path: Path) -> None:
    edit(path, "UPDATE trials SET duration_s = 1e12 WHERE id = 3")
    says = f"{path}: trials row 3: duration_s=1000000000000.0 is not a time from 0 to 1e+09 s"
    for words in (["winners", "--db", path], ["trials", "--db", path], ["import", path, "--db", tmp_path / "new.db"]):
        done = run(*words)
        assert (done.exit_code, done.stderr.startswith(f"Error: {says}; ")) == (2, True), done.output
    snapshot = load_snapshot(path, [])
    assert (snapshot.rows, snapshot.notes[0].startswith(says)) == ((), True)


def test_a_database_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    done = run("winners", "--db", tmp_path / "none.db")
    assert (done.exit_code, "Error: there is no tuning database at" in done.output) == (2, True)


def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are(path: Path) -> None:
    done = run("trials", "--db", path, "--device", "t4")
    assert (done.exit_code, H200.fingerprint in done.output) == (2, True)


def test_a_device_name_of_several_is_an_error(path: Path) -> None:
    with TuningDatabase(path) as database:
        fill(database, device=KNOWN_DEVICES["h100"])
    assert "means several devices" in run("trials", "--db", path, "--device", "nvidia").output


def test_the_database_commands_need_no_gpu_library(path: Path) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom fa_autotune.cli import main\n"
        f"commands = [['info'], ['winners', '--packs'], ['trials'], ['top', '--problem', {SHORT!r}], ['misses'],\n"
        "            ['export', '--text']]\n"
        f"codes = [CliRunner().invoke(main, ['db', *words, '--db', {str(path)!r}]).exit_code for words in commands]\n"
        "print(codes, sorted({'torch', 'triton', 'optuna', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 0, 0, 0, 0, 0] []\n"
