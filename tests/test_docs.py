"""Documents say what is true: their examples run, their commands exist, their links lead somewhere."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from fa_autotune.cli import main
from fa_autotune.database import TuningDatabase
from kit.combinations import rest
from kit.command import run
from kit.tuning_samples import fill

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "tuning_db/README.md",
    *ROOT.glob("kernels_generated/*.md"),
]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def our_commands(path: Path) -> list[str]:
    """The calls of fa-autotune in a document's shell blocks."""
    text = "\n".join(blocks(path, "sh")).replace("\\\n", " ")
    return re.findall(r"(?:^|&& |/|\()fa-autotune( [^&|)#\n]*)", text, flags=re.MULTILINE)


def parse(command: click.Command, words: list[str], name: str = "fa-autotune") -> None:
    """Let click check the words of a call, without running it."""
    if isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"{name} has no command {words[0]}"
        parse(found, words[1:], f"{name} {words[0]}")
    else:
        command.make_context(name, words)


EXAMPLES = [(path, example) for path in DOCUMENTS for example in our_commands(path)]


@pytest.mark.parametrize(
    ("path", "example"), EXAMPLES, ids=lambda value: value.strip() if isinstance(value, str) else ""
)
def test_a_documented_command_exists_with_its_options(path: Path, example: str) -> None:
    words = shlex.split(example)
    if words and words[0] not in ("--help", "--version"):
        parse(main, words)


# --- commands that are named anywhere: they run, where that takes neither a GPU nor long ------------------------------

CHEAP = ("db", "explain", "render", "doctor")
SAMPLES = {"FILE": "filled.db", "PACK": "pack.db", "SOURCE": "filled.db", "…": "4x32x8x4096x4096x128,causal"}


def named_in_our_code() -> list[str]:
    """The commands in backticks in our texts, with samples in place of what is filled in."""
    found: set[str] = set()
    for path in ROOT.glob("fa_autotune/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = ""
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    text += part.value
                elif text.endswith(" "):  # else it is an option that may be left out
                    text += "FILE"
            found |= set(re.findall(r"`fa-autotune (\w[^`]*)`", text))
    return sorted(found)


def run_with_samples(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "filled.db").exists():
        with TuningDatabase("filled.db") as database:
            fill(database)
            database.export(Path("pack.db"))
    monkeypatch.setenv("FA_AUTOTUNE_DB", "filled.db")
    if words[0] == "explain" and "--device" not in words:
        words = [*words, "--device", "h200"]
    done = run(*words)
    assert done.exit_code in ((0, 1) if words[0] == "doctor" else (0,)), done.output


@pytest.mark.parametrize("command", named_in_our_code())
def test_a_command_that_we_name_runs(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [SAMPLES.get(word, word) for word in shlex.split(command)]
    if words[-1] == "--problem":  # named for its option
        words.append(SAMPLES["…"])
    if words in (["db"], ["explain"], ["render"]):  # named for themselves
        return
    parse(main, words)
    if words[0] in CHEAP:
        run_with_samples(words, monkeypatch, tmp_path)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if our_commands(path)], ids=lambda path: path.name)
@pytest.mark.rest
def test_documented_commands_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a.db", "b.db"):
        with TuningDatabase(tmp_path / name) as database:
            fill(database)
    for example in our_commands(path):
        words = shlex.split(example)
        if words and words[0] in CHEAP and "--winners" not in words:
            run_with_samples(words, monkeypatch, tmp_path)


def test_the_readme_shows_every_kind_of_use() -> None:
    shown = {shlex.split(example)[0] for path, example in EXAMPLES if path.name == "README.md"}
    assert shown >= {"tune", "db"}


WITH_EXAMPLES = [path for path in DOCUMENTS if blocks(path, "python")]


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *rest(path for path in WITH_EXAMPLES if path.name != "README.md")],
    ids=lambda path: path.name,
)
def test_python_examples_run(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(path, "python")))
    as_users_have_it = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path, env=as_users_have_it
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_are_there(path: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_tests_that_keep_known_bugs_out_exist() -> None:
    page = (ROOT / "docs/known_bugs_survived.md").read_text()
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`", page)
    assert len(named) == page.count("::") > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_every_command_is_named_in_a_document() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    missing = [name for name in main.list_commands(click.Context(main)) if f"fa-autotune {name}" not in text]
    assert missing == []


def test_ci_runs_the_test_command_that_the_readme_shows() -> None:
    section = (ROOT / "README.md").read_text().split("## Run the tests")[1]
    command = re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)[0].strip()
    assert command in (ROOT / ".ci/run").read_text().splitlines()


def test_the_drawn_layers_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    enforced = [re.sub(r"[()]", "", layer) for layer in contracts[0]["layers"]]
    drawn = re.findall(r"^\w+(?: \| \w+)*", blocks(ROOT / "CONTRIBUTING.md", "text")[0], flags=re.MULTILINE)
    assert drawn == enforced
