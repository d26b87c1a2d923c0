"""Where our folders lie, what is said where a user has no home, and paths in commands that are copied."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import cache_dir, database_path, expanded, forget_sizes_of_no_terminal, shell_command

NOBODYS = "~nobody-of-this-name/tuning.db"


def test_environment_variables_choose_the_database_and_the_cache(tmp_path: Path) -> None:
    assert database_path({"FA_AUTOTUNE_DB": str(tmp_path / "mine.db")}) == tmp_path / "mine.db"
    assert cache_dir({"FA_AUTOTUNE_CACHE": str(tmp_path)}) == tmp_path


def test_a_tilde_is_the_home_folder() -> None:
    assert database_path({"FA_AUTOTUNE_DB": "~/tuning.db"}) == expanded("~/tuning.db") == Path.home() / "tuning.db"


def test_a_file_whose_name_begins_with_a_tilde_is_named_from_its_folder() -> None:
    assert expanded(expanded("./~x.db")) == Path.cwd() / "~x.db"


def test_a_relative_path_leads_nowhere_from_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert expanded(tmp_path / "tuning.db") == tmp_path / "tuning.db"
    for find in (lambda: expanded("tuning.db"), lambda: database_path({"FA_AUTOTUNE_DB": "tuning.db"})):
        with pytest.raises(
            FaAutotuneError, match=r"the working folder was removed, so tuning\.db leads nowhere; go to"
        ):
            find()


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


def test_a_command_means_in_a_shell_what_it_says_whatever_bytes_a_path_has() -> None:
    names = [
        b"plain",
        b"a  b",
        b"a'b",
        b'a"b',
        b"a\nb",
        b"a\\b",
        b"a\\\xffb'",
        b"\xff\xfe9",
        b"a`b",
        b"$(b)",
        b"a!b",
        b"#",
        b"-x",
    ]
    names += [b"~", b"\x01'9", b"\x1b[31m", b"", "é\N{RIGHT-TO-LEFT OVERRIDE}".encode(), "\N{NO-BREAK SPACE}".encode()]
    command = shell_command(["printf", r"%s\0", *map(os.fsdecode, names)])
    assert command.isprintable()
    assert "`" not in command
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == names


@pytest.mark.parametrize("size", ["²", "١٢", "0", "-1", "9" * 30, "", "80x", "8 0"])
def test_a_size_that_no_terminal_has_is_forgotten(size: str) -> None:
    environ = {"COLUMNS": size, "LINES": size, "TERM": "xterm"}
    forget_sizes_of_no_terminal(environ)
    assert environ == {"TERM": "xterm"}
    environ = {"COLUMNS": "240", "LINES": "50"}
    forget_sizes_of_no_terminal(environ)
    assert environ == {"COLUMNS": "240", "LINES": "50"}
