"""Rules on the source that the import contracts can't express, and that the contracts name every module."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fa_autotune"
MODULES = sorted(PACKAGE.rglob("*.py"))
LATE = {"optuna": "tuner", "jinja2": "kernels.render", "sqlite_utils": "database"}
MOST_LINES = 600
BY_FEATURE = "ops/"  # what calls do is tested feature by feature
TESTED_ELSEWHERE = {  # module: why it has no test module of its own
    "benchmark/peers": "tests/benchmark/test_bench.py puts peers beside ours",
    "cli/bench": "tests/benchmark/test_bench.py runs the command",
    "database/entries": "plain data, told apart by tests/database/test_text.py and test_store.py",
    "database/schema": "two numbers, which tests/database/test_migrations.py finds in a file",
    "device": "the former place of names, in tests/test_public.py",
    "dropout": "the former place of names, in tests/test_public.py",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def attributes_of_os(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield node.attr


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_only_paths_reads_the_environment() -> None:
    hands_it_down = {"paths", "worker"}  # worker gives its own environment to the subprocess
    reading = {name_of(path) for path in MODULES if {"environ", "getenv"} & set(attributes_of_os(path))}
    assert reading - hands_it_down == set()


def test_a_module_stays_readable_in_one_sitting() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_test_module_is_imported() -> None:
    imported = {
        path.relative_to(TESTS).as_posix(): [
            name for name in imported_names(path) if name.rpartition(".")[2].startswith("test_")
        ]
        for path in TESTS.rglob("*.py")
        if "golden" not in path.parts
    }
    assert {path: names for path, names in imported.items() if names} == {}


def test_every_module_has_a_test_module_of_its_name_in_its_room() -> None:
    modules = {name_of(path) for path in MODULES if path.name != "__init__.py"}
    tested = {
        path.relative_to(TESTS).with_name(path.name.removeprefix("test_")).with_suffix("").as_posix()
        for path in TESTS.rglob("test_*.py")
    }
    lacking = {name for name in modules - tested if not name.startswith(BY_FEATURE)}
    assert lacking == TESTED_ELSEWHERE.keys(), "name them here only with the reason"


def test_the_import_contracts_hold(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_door_to_a_dependency_is_guarded(checkout: Path) -> None:
    settings = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["importlinter"]
    doors = {
        (dependency, door)
        for contract in settings["contracts"]
        if contract["type"] == "protected"
        for dependency in contract["protected_modules"]
        for door in contract["allowed_importers"]
    }
    assert doors >= {(dependency, f"fa_autotune.{module}") for dependency, module in LATE.items()}
