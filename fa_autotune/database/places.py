"""Where a database really lies, what lies beside it, and whether it is still what lies under its name.

SQLite keeps what was saved last beside the file itself, not beside a link that leads to it; takes in whatever it finds
there, of whatever file it is; and goes on writing to a file that was deleted, moved or replaced, and reports success.
"""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from fa_autotune.errors import DatabaseError
from fa_autotune.files import SQLITE_SIDES, real_path

Identity = tuple[int, int]  # device and inode

LOG, SHARED_MEMORY, JOURNAL = SQLITE_SIDES
_ENDS_WITH_A_NAME = bytes.fromhex("d9d505f920a163d7")  # how a journal ends that names a file which SQLite then removes
_PAGES_BEFORE = slice(16, 20)  # of a journal: how long its file was, in pages
_writers: "WeakKeyDictionary[object, Identity]" = WeakKeyDictionary()
_writers_lock = threading.Lock()


# --- what lies beside it ----------------------------------------------------------------------------------------------


def beside(real: Path, side: str) -> Path:
    """What SQLite calls a side file of a database, whose path has no links."""
    return Path(f"{real}{side}")


def waiting(real: Path, *sides: str) -> list[Path]:
    """The side files, by default the log and the journal, that hold something that the database does not."""
    return [path for side in sides or (LOG, JOURNAL) if _size(path := beside(real, side))]


def require_plain_sides(real: Path) -> None:
    """DatabaseError where a side file is a pipe, a link or anything else that is no file: SQLite would wait for it."""
    for path in (beside(real, side) for side in SQLITE_SIDES):
        with suppress(OSError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise DatabaseError(f"{path} is no plain file, and SQLite would use it as one of its own; remove it")


def require_own_log(real: Path) -> None:
    """DatabaseError where a log lies beside a file that has none: SQLite would read its pages for the file's."""
    for _ in range(2):  # a file that is just being changed has one of the two at a time
        if not waiting(real, LOG):
            return
        if is_live(real):
            return
    raise DatabaseError(
        f"{beside(real, LOG)} holds changes of another database than {real}, such as an earlier one of that name; "
        "move it away, or put it beside its own again"
    )


def require_own_journal(real: Path) -> None:
    """DatabaseError where a journal is of a file that is gone, or has SQLite remove another file than its own."""
    if not waiting(real, JOURNAL):
        return
    journal = beside(real, JOURNAL)
    with journal.open("rb") as file:
        head = file.read(_PAGES_BEFORE.stop)
        with suppress(OSError):  # shorter than that
            file.seek(-len(_ENDS_WITH_A_NAME), os.SEEK_END)
        tail = file.read()
    if tail == _ENDS_WITH_A_NAME:
        raise DatabaseError(
            f"{journal} names a file that SQLite would remove, and no journal of ours does; move it away, and get the "
            "database from a source you trust"
        )
    if not _size(real) and any(head[_PAGES_BEFORE]):
        raise DatabaseError(
            f"{journal} holds a part of another database than {real}, such as an earlier one of that name; move it "
            "away, or put it beside its own again"
        )


def is_live(real: Path) -> bool:
    """True if a file is in WAL mode, as databases in use are and packs are not."""
    if not real.exists():
        return False
    if is_written_here(real):
        return True
    with real.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def is_written_here(real: Path) -> bool:
    """True if this process has a file open to write.

    Then nothing but SQLite may open it: with the first of its descriptors to be closed, a process loses all its locks
    on a file.
    """
    identity = _identity(real)
    with _writers_lock:
        return identity is not None and identity in _writers.values()


def note_writer(connection: object, real: Path) -> None:
    """Remember a connection that writes to a file, as long as there is one."""
    if (identity := _identity(real)) is not None:
        with _writers_lock:
            _writers[connection] = identity


def forget_writer(connection: object) -> None:
    """Forget a connection that was closed."""
    with _writers_lock:
        _writers.pop(connection, None)


# --- whether it is still there ----------------------------------------------------------------------------------------


class FilesInPlace:
    """The files of a database that was just opened; None: one in memory."""

    def __init__(self, path: Path | None) -> None:
        # The log has what was saved last, until it is put into the file. The file's own name may be a link.
        self._paths = () if path is None else (path.absolute(), beside(real_path(path), LOG))
        self._known: dict[Path, Identity] = {}
        self._look()

    def require(self) -> None:
        """DatabaseError unless each file that was seen is still under its name."""
        for path, now in self._look().items():
            if now != self._known[path]:
                self._refuse(path, now)

    def _look(self) -> dict[Path, Identity | None]:
        """The files as they are now; one that is seen for the first time is remembered."""
        found: dict[Path, Identity | None] = {}
        for path in self._paths:
            now = _identity(path)
            if now is not None:
                self._known.setdefault(path, now)
            if path in self._known:
                found[path] = now
        return found

    def _refuse(self, path: Path, now: Identity | None) -> None:
        happened = "was deleted or moved away" if now is None else "was replaced by another file"
        raise DatabaseError(
            f"{path} {happened} while this was writing to it, so what was saved is not there; leave it in "
            "its place until the command ends (if it was moved, move it back), and run the command again, with "
            "--resume if it tunes"
        )


def _identity(path: Path) -> Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
