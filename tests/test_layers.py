"""Rules on the source that the import contracts can't express, and that the contracts name every module."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "fa_autotune"
MODULES = sorted(PACKAGE.rglob("*.py"))
LATE = {"optuna": "tuner", "jinja2": "kernels.render", "sqlite_utils": "database", "triton": "kernels.triton_private"}
# What Triton keeps private, as far as we touch it: names of its modules, and attributes of what it gives us.
PRIVATE_TO_TRITON = {
    "ASTSource", "GPUTarget", "GluonASTSource", "InterpreterBuilder", "TensorHandle", "_cuda_getCurrentRawStream",
    "_init_handles", "_runtime", "arg_names", "asm", "cuobjdump", "dump_ptxas_log", "get_cache_manager",
    "global_scratch_size", "launch_enter_hook", "launch_exit_hook", "make_tensordesc_arg",
    "packed_metadata", "profile_scratch_size", "tensordesc_meta", "wrap_handle_tensordesc",
}  # fmt: skip


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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_paths_reads_the_environment(path: Path) -> None:
    hands_it_down = {"paths", "worker"}  # worker gives its own environment to the subprocess
    assert name_of(path) in hands_it_down or not {"environ", "getenv"} & set(attributes_of_os(path))


def names_touched(path: Path) -> Iterator[str]:
    """Attributes that a module reads or sets, by a dot or by `getattr` and its kin; but no keys of subscripts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_one_module_touches_what_triton_keeps_private(path: Path) -> None:
    touched = {*imported_names(path), *names_touched(path)} & PRIVATE_TO_TRITON
    assert touched == set() or name_of(path) == "kernels/triton_private"


def test_of_triton_itself_only_its_version_is_asked_elsewhere() -> None:
    tree = ast.parse((PACKAGE / "kernels" / "gpu.py").read_text())
    attributes = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton"
    ]
    assert attributes == ["__version__"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_stays_readable_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "path",
    sorted(path for path in TESTS.rglob("*.py") if "golden" not in path.parts),
    ids=lambda path: path.relative_to(TESTS).as_posix(),
)
def test_no_test_module_is_imported(path: Path) -> None:
    found = [name for name in imported_names(path) if name.rpartition(".")[2].startswith("test_")]
    assert found == []


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
