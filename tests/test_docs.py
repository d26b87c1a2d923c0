"""Documents say what is true: their examples run, their commands exist, their links lead somewhere."""

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
from kit.combinations import rest

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
