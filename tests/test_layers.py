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
LATE = {"optuna": "tuner", "jinja2": "kernels.render", "sqlite_utils": "database", "triton": "kernels.triton_private"}
# What Triton keeps private, as far as we touch it: names of its modules, and attributes of what it gives us.
PRIVATE_TO_TRITON = {
    "ASTSource", "GPUTarget", "GluonASTSource", "InterpreterBuilder", "TensorHandle", "_cuda_getCurrentRawStream",
    "_init_handles", "_runtime", "arg_names", "asm", "cuobjdump", "dump_ptxas_log", "get_cache_manager",
    "global_scratch_size", "launch_enter_hook", "launch_exit_hook", "make_tensordesc_arg", "manager_class",
    "packed_metadata", "profile_scratch_size", "tensordesc_meta", "wrap_handle_tensordesc",
}  # fmt: skip
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


def names_touched(path: Path) -> Iterator[str]:
    """Attributes that a module reads or sets, by a dot or by `getattr` and its kin; but no keys of subscripts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_only_one_module_touches_what_triton_keeps_private() -> None:
    touched = {name_of(path): {*imported_names(path), *names_touched(path)} & PRIVATE_TO_TRITON for path in MODULES}
    assert [name for name, names in touched.items() if names] == ["kernels/triton_private"]


def private_to_torch(path: Path) -> Iterator[str]:
    """Names with an underscore that a module reaches from torch, by dots or by an import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom):
            told = ast.unparse(node).replace(" import ", ".").removeprefix("from ").removeprefix("import.")
            first, *names = told.removeprefix("import ").split(" as ")[0].split(".")
            if first == "torch":
                yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_only_one_module_touches_what_torch_keeps_private(tmp_path: Path) -> None:
    """And that one by `found`, which has a fallback."""
    assert [name_of(path) for path in MODULES if list(private_to_torch(path))] == []
    assert [name_of(path) for path in MODULES if "found" in imported_names(path)] == []
    module = tmp_path / "module.py"
    for line in ("torch._C._cuda_getDevice()", "from torch._dynamo import config", "import torch._dynamo.config as c"):
        module.write_text(line)
        assert list(private_to_torch(module))
    module.write_text("from torch.nn import functional\ntorch.__version__, tensor._version, torch.cuda.is_available()")
    assert not list(private_to_torch(module))


def test_of_triton_itself_only_its_version_is_asked_elsewhere() -> None:
    tree = ast.parse((PACKAGE / "kernels" / "gpu.py").read_text())
    attributes = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton"
    ]
    assert attributes == ["__version__"]


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
