"""Whether a database that is open is still what lies under its name.

SQLite goes on writing to a file that was deleted, moved or replaced, and reports success.
"""

import os
from pathlib import Path

from fa_autotune.errors import DatabaseError

Identity = tuple[int, int]  # device and inode

_SIDE_FILES = ("", "-wal")  # the second has what was saved last, until it is put into the first


class FilesInPlace:
    """The files of a database that was just opened; None: one in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else path.absolute()
        self._known: dict[str, Identity] = {}
        self._look()

    def require(self) -> None:
        """DatabaseError unless each file that was seen is still under its name."""
        for side, now in self._look().items():
            if now != self._known[side]:
                self._refuse(side, now)

    def _look(self) -> dict[str, Identity | None]:
        """The files as they are now; one that is seen for the first time is remembered."""
        found: dict[str, Identity | None] = {}
        for side in _SIDE_FILES if self._path is not None else ():
            now = _identity(f"{self._path}{side}")
            if now is not None:
                self._known.setdefault(side, now)
            if side in self._known:
                found[side] = now
        return found

    def _refuse(self, side: str, now: Identity | None) -> None:
        happened = "was deleted or moved away" if now is None else "was replaced by another file"
        raise DatabaseError(
            f"{self._path}{side} {happened} while this was writing to it, so what was saved is not there; leave it in "
            "its place until the command ends (if it was moved, move it back), and run the command again, with "
            "--resume if it tunes"
        )


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
