"""Folders that are ours alone, careful reading, one writer and one lock."""

import fcntl
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fa_autotune.errors import DatabaseError, FaAutotuneError, MachineError
from fa_autotune.files import (
    SQLITE_MAGIC,
    OutputKind,
    holds,
    locked,
    make_folder,
    output_path,
    own_folder,
    read_plain,
    write_output,
    write_whole,
)
from kit.rights import NOBODY, outcome

LETTER = OutputKind(name="a letter of ours", is_one=lambda head: head.startswith(b"Dear"))


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches and owns things in, as /tmp is."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def own(folder: Path, within: Path | None = None) -> Path:
    return own_folder(folder, within=within or folder, variable="FA_AUTOTUNE_CACHE")


class TestMakeFolder:
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
    def test_is_for_this_user_alone_whatever_the_umask(self, umask: int, open_folder: Path) -> None:
        def make() -> list[str]:
            make_folder(open_folder / "a" / "b")
            return [oct(mode_of(folder)) for folder in (open_folder / "a", open_folder / "a" / "b")]

        assert outcome(make, umask=umask) == "['0o700', '0o700']"

    def test_leaves_folders_alone_that_are_there(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        make_folder(tmp_path)
        assert mode_of(tmp_path) == 0o755

    def test_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            make_folder(tmp_path / "file")


class TestOwnFolder:
    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
    def test_takes_what_only_this_user_writes(self, mode: int, tmp_path: Path) -> None:
        tmp_path.chmod(mode)
        assert own(tmp_path) == tmp_path

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
    def test_refuses_what_others_may_write(self, mode: int, tmp_path: Path) -> None:
        tmp_path.chmod(mode)
        with pytest.raises(MachineError, match=rf"mode {mode:04o}.*set FA_AUTOTUNE_CACHE to a folder of your own"):
            own(tmp_path)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others")
    def test_refuses_another_users_folder_even_to_root(self, tmp_path: Path) -> None:
        os.chown(tmp_path, NOBODY, NOBODY)
        with pytest.raises(MachineError, match=f"belongs to user {NOBODY}, and this is user 0.*FA_AUTOTUNE_CACHE"):
            own(tmp_path)

    @pytest.mark.skipif(os.geteuid() != 0, reason="without root's rights there is one user only")
    def test_refuses_a_folder_of_a_second_user_in_a_common_one(self, open_folder: Path) -> None:
        theirs = open_folder / "fa_autotune"
        theirs.mkdir(0o700)
        os.chown(theirs, NOBODY + 1, NOBODY + 1)
        assert "FA_AUTOTUNE_CACHE" in outcome(lambda: own(theirs))

    def test_may_be_made_in_a_common_folder(self, open_folder: Path) -> None:
        assert outcome(lambda: oct(mode_of(own(open_folder / "mine" / "kernels", open_folder / "mine")))) == "0o700"

    def test_below_a_home_of_its_group_is_taken(self, tmp_path: Path) -> None:
        """As containers have it that run as any user."""
        tmp_path.chmod(0o775)
        assert own(tmp_path / "cache").is_dir()

    def test_below_a_folder_where_everybody_may_replace_it_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        with pytest.raises(MachineError, match=r"above .*cache, can be written by everybody.*chmod \+t"):
            own(tmp_path / "cache")

    def test_each_folder_down_to_it_counts(self, tmp_path: Path) -> None:
        own(tmp_path / "cache" / "triton" / "KEY", tmp_path / "cache")
        (tmp_path / "cache" / "triton").chmod(0o770)
        with pytest.raises(MachineError, match="triton can be written by others"):
            own(tmp_path / "cache" / "triton" / "KEY", tmp_path / "cache")

    def test_a_link_counts_as_what_it_leads_to(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir(0o700)
        (tmp_path / "cache").symlink_to(tmp_path / "disk")
        assert own(tmp_path / "cache") == tmp_path / "cache"
        (tmp_path / "disk").chmod(0o777)
        with pytest.raises(MachineError):
            own(tmp_path / "cache")

    def test_what_is_no_folder_there_makes_way(self, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        (cache / "kernels").write_text("no folder")
        (cache / "triton").symlink_to(tmp_path / "nowhere")
        assert own(cache / "kernels", cache).is_dir()
        assert own(cache / "triton" / "KEY", cache).is_dir()

    def test_but_never_what_the_user_named(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("precious")
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            own(tmp_path / "cache" / "kernels", tmp_path / "cache")
        assert (tmp_path / "cache").read_text() == "precious"

    def test_gets_its_own_rights_back(self, open_folder: Path) -> None:
        def restored() -> str:
            inner = own(open_folder / "cache" / "kernels", open_folder / "cache")
            for folder in (inner, inner.parent):
                folder.chmod(0o000)
            own(inner, inner.parent)
            return f"{mode_of(inner.parent):o} {mode_of(inner):o}"

        assert outcome(restored) == "700 700"


class TestReadPlain:
    def test_gives_what_a_file_holds(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"abc")
        assert read_plain(tmp_path / "file", at_most=3) == b"abc"

    def test_looks_at_the_size_first(self, tmp_path: Path) -> None:
        with (tmp_path / "file").open("wb") as file:
            file.truncate(30 * 2**30)
        start = time.monotonic()
        assert read_plain(tmp_path / "file", at_most=2**20) is None
        assert time.monotonic() - start < 1

    @pytest.mark.parametrize("kind", ["missing", "folder", "link", "fifo", "device"])
    def test_of_anything_else_is_nothing(self, kind: str, tmp_path: Path) -> None:
        path = tmp_path / "found"
        match kind:
            case "folder":
                path.mkdir()
            case "link":
                (tmp_path / "file").write_bytes(b"abc")
                path.symlink_to(tmp_path / "file")
            case "fifo":
                os.mkfifo(path)
            case "device":
                path = Path("/dev/zero")
        assert read_plain(path, at_most=100) is None

    def test_without_the_right_to_read_is_nothing(self, open_folder: Path) -> None:
        (open_folder / "file").write_bytes(b"abc")
        (open_folder / "file").chmod(0o000)
        assert outcome(lambda: read_plain(open_folder / "file", at_most=100)) == "None"

    def test_tells_exactly_the_same_content(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"abc")
        assert [holds(tmp_path / "file", content) for content in (b"abc", b"abcd", b"ab", b"")] == [True, *[False] * 3]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestWriteWhole:
    def test_follows_the_umask(self, open_folder: Path) -> None:
        def modes() -> list[str]:
            write_whole(open_folder / "a", "1")
            write_whole(open_folder / "b", "1", mode=0o600)
            return [oct(mode_of(open_folder / name)) for name in "ab"]

        assert outcome(modes, umask=0o027) == "['0o640', '0o600']"

    def test_replaces_a_link_and_never_writes_through_it(self, tmp_path: Path) -> None:
        (tmp_path / "victim").write_text("precious")
        (tmp_path / "file").symlink_to(tmp_path / "victim")
        write_whole(tmp_path / "file", "new")
        assert ((tmp_path / "victim").read_text(), (tmp_path / "file").read_text()) == ("precious", "new")

    @pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
    def test_that_fails_leaves_the_old_content_and_nothing_else(
        self, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("old")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        if failing != "write":
            monkeypatch.setattr(os, failing, full)
        with pytest.raises((OSError, TypeError)):
            write_whole(tmp_path / "file", object() if failing == "write" else "new")  # type: ignore[arg-type]
        assert (names(tmp_path), (tmp_path / "file").read_text()) == ({"file"}, "old")

    def test_on_a_disk_that_is_full_leaves_the_old_content(self, tmp_path: Path) -> None:
        """A limit on the size of files stops a write in its middle, as a full disk does."""
        (tmp_path / "file").write_text("old")
        program = (
            "import resource, sys; from pathlib import Path; from fa_autotune.files import write_whole\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
            "write_whole(Path(sys.argv[1]), b'x' * 1000000)\n"
        )
        done = subprocess.run([sys.executable, "-c", program, tmp_path / "file"], capture_output=True, text=True)
        assert "File too large" in done.stderr
        assert (names(tmp_path), (tmp_path / "file").read_text()) == ({"file"}, "old")

    def test_interrupted_in_the_middle_leaves_the_old_content(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("old")
        monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
        try:
            with pytest.raises(KeyboardInterrupt):
                write_whole(tmp_path / "file", "new")
        finally:
            signal.signal(signal.SIGINT, before)
        assert (names(tmp_path), (tmp_path / "file").read_text()) == ({"file"}, "old")


class TestWriteOutput:
    def test_writes_a_new_file_and_over_one_of_its_kind(self, tmp_path: Path) -> None:
        for text in ("Dear one", "Dear other"):
            write_output(tmp_path / "letter", text, LETTER)
            assert (tmp_path / "letter").read_text() == text

    def test_fills_an_empty_file(self, tmp_path: Path) -> None:
        """As mktemp makes it."""
        (tmp_path / "letter").touch()
        write_output(tmp_path / "letter", "Dear", LETTER)
        assert (tmp_path / "letter").read_text() == "Dear"

    def test_keeps_the_mode_of_the_file_that_it_replaces(self, tmp_path: Path) -> None:
        (tmp_path / "letter").write_text("Dear")
        (tmp_path / "letter").chmod(0o604)
        write_output(tmp_path / "letter", "Dear", LETTER)
        assert mode_of(tmp_path / "letter") == 0o604

    def test_writes_where_a_link_leads(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "letter")
        write_output(tmp_path / "link", "Dear", LETTER)
        assert ((tmp_path / "link").is_symlink(), (tmp_path / "letter").read_text()) == (True, "Dear")

    @pytest.mark.parametrize("found", [b"my notes", b"\xff\xfe", b"dear"])
    def test_refuses_a_file_of_others(self, found: bytes, tmp_path: Path) -> None:
        (tmp_path / "notes").write_bytes(found)
        with pytest.raises(FaAutotuneError, match="notes exists and is not a letter of ours; name a new file"):
            write_output(tmp_path / "notes", "Dear", LETTER)
        assert (tmp_path / "notes").read_bytes() == found

    @pytest.mark.parametrize("how", ["by name", "by a link", "by a hard link"])
    def test_refuses_any_sqlite_file(self, how: str, tmp_path: Path) -> None:
        with closing(sqlite3.connect(tmp_path / "any.db")) as connection:
            connection.execute("CREATE TABLE notes (text TEXT)")
        before, named = (tmp_path / "any.db").read_bytes(), tmp_path / "any.db"
        if how != "by name":
            named = tmp_path / "letter"
            (named.symlink_to if how == "by a link" else named.hardlink_to)(tmp_path / "any.db")
        with pytest.raises(FaAutotuneError, match="an SQLite database"):
            write_output(named, "Dear", LETTER)
        assert (tmp_path / "any.db").read_bytes() == before

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("how", ["by name", "by a link", "by a way round", "by a hard link"])
    def test_refuses_the_tuning_database_even_before_it_is_there(self, how: str, exists: bool, tmp_path: Path) -> None:
        database, named = tmp_path / "tuning.db", tmp_path / "letter"
        if exists:
            database.write_text("Dear")  # not even if it looks like one of the kind
        match how:
            case "by name":
                named = database
            case "by a link":
                named.symlink_to(database)
            case "by a way round":
                (tmp_path / "folder").mkdir()
                named = tmp_path / "folder" / ".." / "tuning.db"
            case "by a hard link":
                if not exists:
                    return
                named.hardlink_to(database)
        with pytest.raises(FaAutotuneError, match="is the tuning database in use, which is never written over"):
            write_output(named, "Dear", LETTER, databases=[database])
        assert database.exists() is exists

    @pytest.mark.parametrize("side", ["-wal", "-shm", "-journal", ".lock"])
    def test_refuses_what_lies_beside_a_database(self, side: str, tmp_path: Path) -> None:
        with closing(sqlite3.connect(tmp_path / "any.db")) as connection:
            connection.execute("CREATE TABLE notes (text TEXT)")
        with pytest.raises(FaAutotuneError, match=re.escape(f"belongs to {tmp_path / 'any.db'}")):
            write_output(tmp_path / f"any.db{side}", "Dear", LETTER)
        with pytest.raises(FaAutotuneError, match="belongs to"):
            write_output(tmp_path / f"new.db{side}", "Dear", LETTER, databases=[tmp_path / "new.db"])

    def test_refuses_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FaAutotuneError, match="is a folder; name the file to write"):
            write_output(tmp_path, "Dear", LETTER)

    def test_goes_through_a_pipe_and_leaves_it_there(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        write_output(tmp_path / "pipe", "Dear", LETTER)
        assert (os.read(reader, 100), (tmp_path / "pipe").is_fifo()) == (b"Dear", True)
        os.close(reader)

    @pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}", "link"])
    @pytest.mark.parametrize("found", [b"", b"their own "])  # as > and >> have it
    def test_goes_through_what_is_open_already(self, name: str, found: bytes, tmp_path: Path) -> None:
        """As /dev/stdout is: a file in the place of its file would not be the one that is open."""
        (tmp_path / "file").write_bytes(found)
        with (tmp_path / "file").open("ab", buffering=0) as held:
            (tmp_path / "link").symlink_to(f"/dev/fd/{held.fileno()}")
            write_output(tmp_path / name.format(held.fileno()), "Dear", LETTER)
            held.write(b" after")
        assert (tmp_path / "file").read_bytes() == found + b"Dear after"
        assert names(tmp_path) == {"file", "link"}

    def test_goes_through_no_descriptor_of_a_database(self, tmp_path: Path) -> None:
        (tmp_path / "tuning.db").write_bytes(b"rows")
        with (tmp_path / "tuning.db").open("ab") as held:
            with pytest.raises(FaAutotuneError, match="is the tuning database in use"):
                write_output(Path(f"/dev/fd/{held.fileno()}"), "Dear", LETTER, databases=[tmp_path / "tuning.db"])
            with pytest.raises(FaAutotuneError, match="is a stream that is open already, not a file's name"):
                output_path(Path(f"/dev/fd/{held.fileno()}"), LETTER)
        assert (tmp_path / "tuning.db").read_bytes() == b"rows"

    def test_goes_through_no_descriptor_of_any_sqlite_file(self, tmp_path: Path) -> None:
        """As `>>` and `<>` have it; `>` has emptied it already."""
        (tmp_path / "any.db").write_bytes(SQLITE_MAGIC)
        with (
            (tmp_path / "any.db").open("ab") as held,
            pytest.raises(FaAutotuneError, match="is an SQLite database that is open, which is never written to"),
        ):
            write_output(Path(f"/dev/fd/{held.fileno()}"), "Dear", LETTER)
        assert (tmp_path / "any.db").read_bytes() == SQLITE_MAGIC

    def test_of_a_descriptor_that_is_closed_or_another_process_has_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="Bad file descriptor: '/dev/fd/987654'"):
            write_output(Path("/dev/fd/987654"), "Dear", LETTER)
        with (tmp_path / "letter").open("w") as held, subprocess.Popen(["sleep", "60"], stdout=held) as other:
            with pytest.raises(FaAutotuneError, match="is a file that another process has open; name the file itself"):
                write_output(Path(f"/proc/{other.pid}/fd/1"), "Dear", LETTER)
            other.kill()

    @pytest.mark.parametrize("kind", ["fifo", "device"])
    def test_gives_no_path_of_what_can_not_be_replaced(self, kind: str, tmp_path: Path) -> None:
        """For what is not written in one go, such as a pack."""
        path = Path("/dev/null") if kind == "device" else tmp_path / "found"
        if kind == "fifo":
            os.mkfifo(path)
        with pytest.raises(FaAutotuneError, match="is no plain file"):
            output_path(path, LETTER)

    def test_that_fails_names_the_file_and_not_its_draft(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=re.escape(f"'{tmp_path / 'none' / 'letter'}'") + "$"):
            write_output(tmp_path / "none" / "letter", "Dear", LETTER)

    def test_refuses_with_the_error_of_the_kind(self, tmp_path: Path) -> None:
        kind = OutputKind(name="a pack", is_one=lambda head: False, error=DatabaseError)
        with pytest.raises(DatabaseError):
            output_path(tmp_path, kind)


class TestLocked:
    def test_is_held_by_one_at_a_time(self, tmp_path: Path) -> None:
        with locked(tmp_path / "a.lock", wait_s=0), pytest.raises(BlockingIOError):
            locked(tmp_path / "a.lock", wait_s=0).__enter__()
        with locked(tmp_path / "a.lock", wait_s=0):
            pass

    def test_waits_until_it_is_free(self, tmp_path: Path) -> None:
        first = locked(tmp_path / "a.lock", wait_s=0)
        first.__enter__()
        release = threading.Timer(0.05, lambda: first.__exit__(None, None, None))
        release.start()
        with locked(tmp_path / "a.lock", wait_s=60):
            release.join()

    def test_waits_no_longer_than_it_was_told(self, tmp_path: Path) -> None:
        with (tmp_path / "a.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            start = time.monotonic()
            with pytest.raises(BlockingIOError):
                locked(tmp_path / "a.lock", wait_s=0.1).__enter__()
            assert 0.1 <= time.monotonic() - start < 5

    def test_never_changes_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "victim").write_text("precious")
        (tmp_path / "a.lock").hardlink_to(tmp_path / "victim")
        with locked(tmp_path / "a.lock", wait_s=0):
            assert (tmp_path / "victim").read_text() == "precious"

    @pytest.mark.parametrize("kind", ["link", "link to nowhere", "fifo", "folder"])
    def test_refuses_what_is_no_file(self, kind: str, tmp_path: Path) -> None:
        path = tmp_path / "a.lock"
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case _:
                path.symlink_to(tmp_path / "victim")
                if kind == "link":
                    (tmp_path / "victim").write_text("precious")
        with pytest.raises(OSError, match=r"symbolic link|no plain file|Is a directory"):
            locked(path, wait_s=0).__enter__()
        assert (tmp_path / "victim").exists() is (kind == "link")
        assert kind != "link" or (tmp_path / "victim").read_text() == "precious"
