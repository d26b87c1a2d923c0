"""The public surface: what is exported, and what importing it costs."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fa_autotune

HEAVY = ("torch", "triton", "optuna", "jinja2", "sqlite_utils", "click", "rich", "numpy", "pynvml")
PLANNED = (
    "flash_attn_with_kvcache",
    "record_problems",
)


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_every_exported_name_exists() -> None:
    assert [name for name in fa_autotune.__all__ if not hasattr(fa_autotune, name)] == []


def test_exports_are_sorted_and_listed_by_dir() -> None:
    assert fa_autotune.__all__ == sorted(fa_autotune.__all__)
    assert set(fa_autotune.__all__) <= set(dir(fa_autotune))


def test_no_export_shares_a_modules_name() -> None:
    package = Path(fa_autotune.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} | {path.name for path in package.iterdir() if path.is_dir()}
    assert {*fa_autotune.__all__, *PLANNED} & modules == set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import fa_autotune") & set(HEAVY) == set()


@pytest.mark.parametrize(
    "module",
    [
        "problem.problem",
        "problem.models",
        "space.registry",
        "space.seeds",
        "records",
        "paths",
        "worker",
        "dispatch.winners",
    ],
)
def test_importing_the_data_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import fa_autotune.{module}") & set(HEAVY) == set()


@pytest.mark.parametrize("module", ["kernels.render", "database.store", "tuner", "dispatch.dispatcher", "database"])
def test_importing_search_and_database_loads_no_torch(module: str) -> None:
    assert loaded_after(f"import fa_autotune.{module}") & {"torch", "triton"} == set()


def test_attention_loads_neither_optuna_nor_the_command_line() -> None:
    assert loaded_after("from fa_autotune import attention") & {"optuna", "jinja2", "sqlite_utils", "click"} == set()


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_name_says_what_to_use_until_it_is_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} is not there yet in .*; until then "):
        getattr(fa_autotune, name)


@pytest.mark.parametrize("name", PLANNED)
def test_a_probe_for_a_name_that_is_not_there_finds_none(name: str) -> None:
    assert not hasattr(fa_autotune, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from fa_autotune import {name}")


@pytest.mark.parametrize(
    ("place", "name"), [("dropout", "dropout_mask"), ("device", "known_device"), ("dispatch", "Dispatcher")]
)
def test_a_name_that_moved_is_still_found_and_says_where_it_went(place: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{place}\.{name} has moved; import it from fa_autotune\."):
        found = getattr(import_module(f"fa_autotune.{place}"), name)
    assert found.__name__ == name


@pytest.mark.parametrize("place", ["dropout", "device", "dispatch"])
def test_the_former_place_of_a_name_has_no_others(place: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = import_module(f"fa_autotune.{place}").nothing


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        _ = fa_autotune.attentoin
