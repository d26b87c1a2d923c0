"""Where our folders lie, and what is said where a user has no home."""

from pathlib import Path
from typing import Any

import pytest

from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import cache_dir, database_path, expanded

NOBODYS = "~nobody-of-this-name/tuning.db"


def test_environment_variables_choose_the_database_and_the_cache(tmp_path: Path) -> None:
    assert database_path({"FA_AUTOTUNE_DB": str(tmp_path / "mine.db")}) == tmp_path / "mine.db"
    assert cache_dir({"FA_AUTOTUNE_CACHE": str(tmp_path)}) == tmp_path


def test_a_tilde_is_the_home_folder() -> None:
    assert database_path({"FA_AUTOTUNE_DB": "~/tuning.db"}) == expanded("~/tuning.db") == Path.home() / "tuning.db"


def test_a_home_folder_that_is_not_known_is_named() -> None:
    with pytest.raises(FaAutotuneError, match=f"the home folder in {NOBODYS} is not known; write the whole path"):
        database_path({"FA_AUTOTUNE_DB": NOBODYS})


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(name: str) -> str:
        raise RuntimeError("could not determine the home directory")

    for name in ("user_data_dir", "user_cache_dir"):
        monkeypatch.setattr(f"platformdirs.{name}", homeless)
    for find, variable in ((database_path, "FA_AUTOTUNE_DB"), (cache_dir, "FA_AUTOTUNE_CACHE")):
        with pytest.raises(FaAutotuneError, match=f"no home folder .*; set {variable}, or HOME"):
            find({})


@pytest.mark.parametrize("path", ["/a\0b", None, 5, b"/a"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(FaAutotuneError, match="is no path of a file; write it as text"):
        expanded(path)
