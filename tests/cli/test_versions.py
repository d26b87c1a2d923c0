"""Versions of what is installed, whoever distributes it."""

from importlib.metadata import PackageNotFoundError

import pytest

from fa_autotune.cli import versions
from fa_autotune.cli.versions import installed_version


def install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Have these distributions installed, `_` standing for `-`, and no other."""

    def version(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("distribution", ["triton", "pytorch_triton", "pytorch_triton_rocm"])
def test_triton_is_found_whoever_distributes_it(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{distribution: "3.8.0+git1"})
    assert installed_version("triton") == "3.8.0+git1"


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert installed_version("triton") is None
