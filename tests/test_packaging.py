"""What is built works where there is no checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from fa_autotune import paths
from fa_autotune.database import TuningDatabase
from fa_autotune.dispatch.shipped_kernels import shipped_files
from fa_autotune.dispatch.winners import load_snapshot


def build(kind: str, folder: Path, checkout: Path) -> Path:
    """Build a wheel or an sdist without the network."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, checkout]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def fresh_environment(folder: Path) -> Path:
    """A new environment that sees this one's packages, as far as they are installed and not editable."""
    venv.create(folder, with_pip=False)
    site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def install(environment: Path, *what: str | Path) -> None:
    """Install into an environment, from what is here alone."""
    base = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "-q"]
    subprocess.run([*base, "--no-deps", "--no-index", "--no-build-isolation", *what], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"), checkout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    environment = fresh_environment(tmp_path_factory.mktemp("installed"))
    install(environment, wheel)
    return environment


def call(environment: Path, *arguments: str | Path) -> str:
    """Run a program of an environment outside the checkout; gives its output."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / arguments[0], *arguments[1:]]
    done = subprocess.run(command, cwd=environment, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def test_the_wheel_holds_every_template_and_pack(wheel: Path, checkout: Path) -> None:
    held = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    templates = {path.name for path in held if path.parent == Path("fa_autotune/templates")}
    packs = {path.name for path in held if path.parent == Path("fa_autotune/tuning_db")}
    assert templates == names(checkout / "templates", "*.jinja") != set()
    assert packs >= names(checkout / "tuning_db", "*.db")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fa_autotune"}


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    assert "fa_autotune/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_an_installed_package_is_not_the_checkouts(installed: Path) -> None:
    assert call(installed, "python", "-c", "import fa_autotune; print(fa_autotune.__file__)").startswith(str(installed))


def test_an_installed_command_renders_from_its_own_templates(installed: Path) -> None:
    text = call(installed, "fa-autotune", "render", "--problem", "1x2x2x64x64x64,causal")
    assert "@triton.jit" in text


def test_an_installed_command_helps(installed: Path) -> None:
    assert "tune" in call(installed, "fa-autotune", "--help")


def test_an_installed_command_diagnoses(installed: Path) -> None:
    assert '"verdict"' in call(installed, "fa-autotune", "doctor", "--json")


def test_the_sdist_builds_the_same_wheel(tmp_path: Path, wheel: Path, checkout: Path) -> None:
    import tarfile

    sdist = build("sdist", tmp_path / "sdist", checkout)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / "again", tmp_path / sdist.name.removesuffix(".tar.gz"))
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def test_an_editable_install_uses_the_checkouts_templates(tmp_path: Path, checkout: Path) -> None:
    environment = fresh_environment(tmp_path)
    install(environment, "-e", checkout)
    found = call(environment, "python", "-c", "from fa_autotune.paths import *; print(templates_dir(), packs_dir())")
    assert found.split() == [str(checkout / "templates"), str(checkout / "tuning_db")]


def test_an_editable_install_leaves_no_copies_behind(tmp_path: Path, checkout: Path) -> None:
    environment = fresh_environment(tmp_path)
    install(environment, "-e", checkout)
    assert list(environment.glob("lib/*/site-packages/fa_autotune")) == []


def test_a_checkout_knows_its_own_folders(checkout: Path) -> None:
    found = (paths.templates_dir(), paths.packs_dir(), paths.shipped_kernels_dir())
    assert found == (checkout / "templates", checkout / "tuning_db", checkout / "kernels_generated")


def test_the_shipped_kernels_are_those_of_the_packs_winners(checkout: Path) -> None:
    packs = sorted(paths.packs_dir().glob("*.db"))
    winners = [row for row in load_snapshot(None, packs).rows]
    folder = checkout / "kernels_generated"
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    found.pop("README.md")
    assert found == shipped_files(winners)  # `fa-autotune render --winners` makes them so


def test_each_pack_has_a_text_export_for_reviews(checkout: Path) -> None:
    packs = sorted((checkout / "tuning_db").glob("*.db"))
    assert packs
    for pack in packs:
        with TuningDatabase(pack, read_only=True) as database:
            text = database.export_json()
        # `fa-autotune db export --db PACK --text PACK.json` makes it so.
        assert json.loads(pack.with_suffix(".json").read_text()) == json.loads(text)
