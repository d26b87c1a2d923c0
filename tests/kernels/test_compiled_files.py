"""The files of compiled kernels: what is not as it was written is not there, and kernels are compiled anew."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fa_autotune.errors import MachineError
from fa_autotune.kernels.compiled_files import CHECKSUMS, MAX_FILE_BYTES, CompiledFiles

BINARY = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(cache: Path) -> Path:
    """The folder of a kernel with all its files."""
    files = CompiledFiles("KEY")
    group = {"k.cubin": files.put(BINARY, "k.cubin"), "k.ptx": files.put("text", "k.ptx", binary=False)}
    group["k.json"] = files.put("{}", "k.json", binary=False)
    files.put_group("k.json", group)
    return cache / "triton" / "KEY"


def group() -> dict[str, str] | None:
    return CompiledFiles("KEY").get_group("k.json")


def test_a_group_is_found_as_it_was_put(folder: Path) -> None:
    found = group()
    assert found == {name: str(folder / name) for name in ("k.cubin", "k.ptx", "k.json")}
    assert Path(found["k.cubin"]).read_bytes() == BINARY


def test_what_was_never_put_is_not_there(folder: Path) -> None:
    files = CompiledFiles("KEY")
    assert (files.get_file("other"), files.get_group("other.json"), files.has_file("k.ptx")) == (None, None, True)


def test_folder_and_files_are_this_users_alone(folder: Path) -> None:
    assert {oct(path.stat().st_mode & 0o777) for path in (folder, folder.parent, folder.parent.parent)} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    kept = path.rename(path.with_name("elsewhere"))
    path.symlink_to(kept)


def enlarged(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(30 * 2**30)


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flipped,
    "random": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "other JSON": lambda path: path.write_text("[[[1]]]"),
    "a link": linked,
    "30 GB": enlarged,
    "a folder": made_a_folder,
    "a fifo": made_a_fifo,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["k.cubin", "k.ptx", "k.json", "__grp__k.json", CHECKSUMS])
def test_a_group_with_a_damaged_file_is_a_miss_and_can_be_put_anew(
    name: str, damage: Callable[[Path], object], folder: Path
) -> None:
    damage(folder / name)
    assert group() is None
    files = CompiledFiles("KEY")
    paths = {
        one: files.put(content, one) for one, content in {"k.cubin": BINARY, "k.ptx": "text", "k.json": "{}"}.items()
    }
    files.put_group("k.json", paths)
    assert group() == paths


def test_a_group_never_leads_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.cubin").write_bytes(BINARY)
    for name in ("../../../evil.cubin", str(tmp_path / "evil.cubin"), "", ".."):
        CompiledFiles("KEY").put(json.dumps(["k.json", name]), "__grp__k.json")
        assert group() is None


def test_files_of_unknown_origin_are_not_there(cache: Path) -> None:
    """As an older release left them, or somebody who could write here."""
    kernel = cache / "triton" / "OLD"
    CompiledFiles("OLD")
    (kernel / "k.json").write_text("{}")
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.json": str(kernel / "k.json")}}))
    assert CompiledFiles("OLD").get_group("k.json") is None


def test_a_file_in_place_of_the_folder_makes_way(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("no folder")
    assert group() is None


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(MachineError, match="FA_AUTOTUNE_CACHE"):
        group()


def test_kernels_are_far_smaller_than_what_is_read() -> None:
    assert MAX_FILE_BYTES >= 2**24
