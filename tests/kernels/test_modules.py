"""Generated modules on disk: written once and whole, and imported once."""

import hashlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa_autotune.errors import CompileError, FaAutotuneError
from fa_autotune.kernels import modules
from fa_autotune.kernels.modules import candidates_dir, load_module, write_module
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
        path = write_module(source, tmp_path)
        assert (path.name, path.read_text()) == (f"{source.name}.py", source.text)

    def test_makes_the_folder(self, tmp_path: Path) -> None:
        assert write_module(make_source(), tmp_path / "a" / "b").parent == tmp_path / "a" / "b"

    def test_leaves_a_file_alone_that_has_the_text(self, tmp_path: Path) -> None:
        path = write_module(make_source(), tmp_path)
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        write_module(make_source(), tmp_path)
        assert path.stat().st_mtime == LONG_AGO_S

    @pytest.mark.parametrize("found", ["", "VALUE = 1", "VALUE = 2\n"])
    def test_replaces_a_file_that_has_another_text(self, found: str, tmp_path: Path) -> None:
        """As after a crash of the machine, or an edit by hand."""
        source = make_source()
        (tmp_path / f"{source.name}.py").write_text(found)
        assert write_module(source, tmp_path).read_text() == source.text

    def test_leaves_nothing_beside_the_module(self, tmp_path: Path) -> None:
        assert names(tmp_path) == set()
        path = write_module(make_source(), tmp_path)
        assert names(tmp_path) == {path.name}

    def test_that_fails_leaves_nothing_behind(self, tmp_path: Path) -> None:
        source = make_source()
        (tmp_path / f"{source.name}.py").mkdir()
        with pytest.raises(FaAutotuneError, match="Is a directory"):
            write_module(source, tmp_path)
        assert names(tmp_path) == {f"{source.name}.py"}

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
            paths = list(pool.map(lambda _: write_module(source, tmp_path), range(32)))
        assert names(tmp_path) == {paths[0].name}
        assert paths[0].read_text() == source.text


class TestLoadModule:
    def test_gives_the_module(self, tmp_path: Path) -> None:
        assert load_module(write_module(make_source(), tmp_path)).VALUE == 1

    def test_imports_once(self, tmp_path: Path) -> None:
        path = write_module(make_source(), tmp_path)
        assert load_module(path) is load_module(path)

    def test_imports_once_in_many_threads(self, tmp_path: Path) -> None:
        path = write_module(make_source("import time\ntime.sleep(0.02)\nVALUE = object()\n"), tmp_path)
        with ThreadPoolExecutor(8) as pool:
            values = set(pool.map(lambda _: load_module(path).VALUE, range(8)))
        assert len(values) == 1

    def test_tells_modules_of_one_name_in_two_folders_apart(self, tmp_path: Path) -> None:
        one, other = (write_module(make_source(), tmp_path / name) for name in ("one", "other"))
        assert [load_module(one).__file__, load_module(other).__file__] == [str(one), str(other)]

    @pytest.mark.parametrize("text", ["def kernel(:\n", "import no_such_module\n", "raise ValueError('planted')\n"])
    def test_that_does_not_import_is_an_error_of_ours_with_its_path(self, text: str, tmp_path: Path) -> None:
        path = write_module(make_source(text), tmp_path)
        with pytest.raises(CompileError, match=path.name):
            load_module(path)

    def test_that_does_not_import_can_be_tried_again(self, tmp_path: Path) -> None:
        path = write_module(make_source("raise ValueError('planted')\n"), tmp_path)
        with pytest.raises(CompileError, match="planted"):
            load_module(path)
        with pytest.raises(CompileError, match="planted"):
            load_module(path)

    @pytest.mark.parametrize("name", ["missing.py", "no_module.txt"])
    def test_that_is_missing_or_no_python_is_an_error_of_ours(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(CompileError, match=name):
            load_module(tmp_path / name)


def test_candidates_lie_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_AUTOTUNE_CACHE", "/a/cache")
    assert candidates_dir() == Path("/a/cache/kernels")


class TestCompileModule:
    """Options that a module leaves open are those of Triton 3.6, and what a newer one needs for the same code."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        monkeypatch.setattr(modules, "compile_kernel", lambda kernel, *, options, **others: found.append(options))
        return found

    @pytest.mark.parametrize(("name", "orders"), [("attention_fwd", {}), ("attention_bwd_fused", {"sched4reg": True})])
    def test_says_what_a_module_leaves_open(
        self, name: str, orders: dict[str, bool], asked: list[dict[str, object]]
    ) -> None:
        kernel = SimpleNamespace(__name__=name)
        module: Any = SimpleNamespace(KERNEL=kernel, SIGNATURE={}, ALIGNMENT={}, OPTIONS={"num_warps": 4})
        modules.compile_module(module, "sm_90")
        assert asked == [{"enable_fp_fusion": True, "num_warps": 4, **orders}]

    def test_a_module_has_the_last_word(self, asked: list[dict[str, object]]) -> None:
        options = {"enable_fp_fusion": False, "sched4reg": False}
        kernel = SimpleNamespace(__name__="attention_bwd_fused")
        modules.compile_module(SimpleNamespace(KERNEL=kernel, SIGNATURE={}, ALIGNMENT={}, OPTIONS=options), "sm_90")  # type: ignore[arg-type]
        assert asked == [options]
