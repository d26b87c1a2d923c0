"""Generated modules: written once and whole, and run once, from the text that was rendered and nothing else."""

import hashlib
import importlib.util
import inspect
import linecache
import os
import py_compile
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa_autotune.errors import CompileError, FaAutotuneError, MachineError
from fa_autotune.kernels import modules
from fa_autotune.kernels.modules import ModuleFile, candidates_dir, keep_source, load_module, write_module
from fa_autotune.kernels.render import KernelSource

LONG_AGO_S = 1_000_000_000


def make_source(text: str = "VALUE = 1\n") -> KernelSource:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return KernelSource(text=text, digest=digest, name=f"fwd_{digest}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    """Leave no generated module of these tests imported."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith("fa_autotune_generated."):
            del sys.modules[name]


class TestWriteModule:
    def test_writes_the_text_under_the_sources_name(self, tmp_path: Path) -> None:
        source = make_source()
        path = write_module(source, tmp_path).path
        assert (path.name, path.read_text()) == (f"{source.name}.py", source.text)

    def test_makes_the_folder(self, tmp_path: Path) -> None:
        assert write_module(make_source(), tmp_path / "a" / "b").path.parent == tmp_path / "a" / "b"

    def test_leaves_a_file_alone_that_has_the_text(self, tmp_path: Path) -> None:
        path = write_module(make_source(), tmp_path).path
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        write_module(make_source(), tmp_path)
        assert path.stat().st_mtime == LONG_AGO_S

    @pytest.mark.parametrize("found", [b"", b"VALUE = 1", b"VALUE = 2\n", b"\xff\x00\x80", b"VALUE = 1\n\n"])
    def test_replaces_a_file_that_has_other_bytes(self, found: bytes, tmp_path: Path) -> None:
        """As after a crash of the machine, or an edit by hand."""
        source = make_source()
        (tmp_path / f"{source.name}.py").write_bytes(found)
        assert write_module(source, tmp_path).path.read_text() == source.text

    @pytest.mark.parametrize("found", ["sparse", "fifo", "folder", "full folder", "link", "link to nowhere"])
    def test_replaces_what_is_no_file_of_ours(self, found: str, tmp_path: Path) -> None:
        """Sizes are looked at before contents, and nothing is waited for or written through."""
        source, elsewhere = make_source(), tmp_path / "elsewhere"
        path = tmp_path / f"{source.name}.py"
        elsewhere.write_text("another's")
        match found:
            case "sparse":
                with path.open("wb") as file:
                    file.truncate(30 * 2**30)
            case "fifo":
                os.mkfifo(path)
            case "folder" | "full folder":
                path.mkdir()
                if found == "full folder":
                    (path / "file").touch()
            case _:
                path.symlink_to(elsewhere if found == "link" else tmp_path / "nowhere")
        assert write_module(source, tmp_path).path.read_bytes() == source.text.encode()
        assert (path.is_symlink(), path.is_file(), elsewhere.read_text()) == (False, True, "another's")

    def test_refuses_a_folder_that_others_may_write(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        with pytest.raises(MachineError, match=r"mode 0777.*set FA_AUTOTUNE_CACHE to a folder of your own"):
            write_module(make_source(), tmp_path)

    def test_refuses_a_folder_in_a_cache_that_others_may_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FA_AUTOTUNE_CACHE", str(tmp_path))
        write_module(make_source(), candidates_dir())
        tmp_path.chmod(0o770)
        with pytest.raises(MachineError, match=r"mode 0770.*FA_AUTOTUNE_CACHE"):
            write_module(make_source(), candidates_dir())

    def test_leaves_nothing_beside_the_module(self, tmp_path: Path) -> None:
        assert names(tmp_path) == set()
        path = write_module(make_source(), tmp_path).path
        assert names(tmp_path) == {path.name}

    def test_on_a_full_disk_leaves_nothing_behind_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(FaAutotuneError, match=r"No space left on device.*FA_AUTOTUNE_CACHE"):
            write_module(make_source(), tmp_path)
        assert names(tmp_path) == set()

    def test_into_a_folder_that_can_not_be_says_what_to_set(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(FaAutotuneError, match=r"file/kernels.*Not a directory.*set FA_AUTOTUNE_CACHE"):
            write_module(make_source(), tmp_path / "file" / "kernels")

    def test_never_shows_a_reader_half_a_file(self, tmp_path: Path) -> None:
        """A file that a reader has open stays as it was: the new text comes as another file of that name."""
        source = make_source()
        path = tmp_path / f"{source.name}.py"
        path.write_text("VALUE = 0\n")
        with path.open() as reader:
            write_module(source, tmp_path)
            assert reader.read() == "VALUE = 0\n"

    def test_by_many_at_once_gives_one_whole_file(self, tmp_path: Path) -> None:
        source = make_source("VALUE = 1\n" * 20_000)
        with ThreadPoolExecutor(8) as pool:
            paths = [file.path for file in pool.map(lambda _: write_module(source, tmp_path), range(32))]
        assert names(tmp_path) == {paths[0].name}
        assert paths[0].read_text() == source.text


class TestLoadModule:
    def test_gives_the_module(self, tmp_path: Path) -> None:
        assert load_module(write_module(make_source(), tmp_path)).VALUE == 1

    def test_runs_once(self, tmp_path: Path) -> None:
        file = write_module(make_source(), tmp_path)
        assert load_module(file) is load_module(file)

    def test_runs_once_in_many_threads(self, tmp_path: Path) -> None:
        file = write_module(make_source("import time\ntime.sleep(0.02)\nVALUE = object()\n"), tmp_path)
        with ThreadPoolExecutor(8) as pool:
            values = set(pool.map(lambda _: load_module(file).VALUE, range(8)))
        assert len(values) == 1

    def test_tells_modules_of_one_name_in_two_folders_apart(self, tmp_path: Path) -> None:
        one, other = (write_module(make_source(), tmp_path / name) for name in ("one", "other"))
        assert [load_module(one).__file__, load_module(other).__file__] == [str(one.path), str(other.path)]

    def test_tells_texts_of_one_file_apart(self, tmp_path: Path) -> None:
        files = [ModuleFile(tmp_path / "module.py", f"VALUE = {value}\n") for value in (1, 2)]
        assert [load_module(file).VALUE for file in files] == [1, 2]

    @pytest.mark.parametrize("text", ["def kernel(:\n", "import no_such_module\n", "raise ValueError('planted')\n"])
    def test_that_does_not_run_is_an_error_of_ours_with_its_path(self, text: str, tmp_path: Path) -> None:
        file = write_module(make_source(text), tmp_path)
        with pytest.raises(CompileError, match=file.path.name):
            load_module(file)

    def test_that_does_not_run_can_be_tried_again(self, tmp_path: Path) -> None:
        file = write_module(make_source("raise ValueError('planted')\n"), tmp_path)
        for _ in range(2):
            with pytest.raises(CompileError, match="planted"):
                load_module(file)


class TestWhatIsRun:
    """… is the text that was rendered, byte for byte, whatever lies in the cache folder."""

    @pytest.mark.parametrize("mode", py_compile.PycInvalidationMode)
    def test_is_no_bytecode_that_lies_beside_the_file(
        self, mode: py_compile.PycInvalidationMode, tmp_path: Path
    ) -> None:
        file = write_module(make_source("VALUE = 1\n"), tmp_path)
        crafted = tmp_path / "crafted.py"
        crafted.write_text("VALUE = 2\n")
        os.utime(crafted, ns=(file.path.stat().st_atime_ns, file.path.stat().st_mtime_ns))
        cached = Path(importlib.util.cache_from_source(str(file.path)))
        py_compile.compile(str(crafted), str(cached), dfile=str(file.path), invalidation_mode=mode, doraise=True)
        assert load_module(file).VALUE == 1

    def test_leaves_no_bytecode(self, tmp_path: Path) -> None:
        file = write_module(make_source(), tmp_path)
        load_module(file)
        assert names(tmp_path) == {file.path.name}

    def test_is_no_file_that_was_swapped_between(self, tmp_path: Path) -> None:
        file = write_module(make_source("VALUE = 1\n"), tmp_path)
        file.path.write_text("VALUE = 2\n")
        assert load_module(file).VALUE == 1

    @pytest.mark.parametrize("swapped", ["def kernel():\n    return 2\n", None])
    def test_is_what_is_found_as_its_source(self, swapped: str | None, tmp_path: Path) -> None:
        """Triton asks for a kernel's source again, by the name of its file."""
        file = write_module(make_source("def kernel():\n    return 1\n"), tmp_path)
        module = load_module(file)
        file.path.unlink() if swapped is None else file.path.write_text(swapped)
        linecache.checkcache()
        assert inspect.getsource(module.kernel) == file.text

    def test_is_found_again_where_python_forgot_it(self, tmp_path: Path) -> None:
        file = write_module(make_source("def kernel():\n    return 1\n"), tmp_path)
        module = load_module(file)
        file.path.write_text("def kernel():\n    return 2\n")
        linecache.clearcache()
        keep_source(module)
        assert inspect.getsource(module.kernel) == file.text


def test_candidates_lie_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", "/a/cache")
    assert candidates_dir() == Path("/a/cache/kernels")


def test_a_module_says_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added to them: who runs the file by itself gets the same kernel."""
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(modules, "compile_kernel", lambda kernel, *, options, **others: asked.append(options))
    module: Any = SimpleNamespace(KERNEL=None, SIGNATURE={}, ALIGNMENT={}, OPTIONS={"num_warps": 4})
    modules.compile_module(module, "sm_90")
    assert asked == [{"num_warps": 4}]
