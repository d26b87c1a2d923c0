"""Files and folders on a disk that others use too: folders that are ours alone, one writer, one lock, careful reading.

Nothing here trusts what it finds under a name: links are not followed where a name can be guessed, sizes are looked at
before contents, and a file is replaced as a whole or not at all.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fa_autotune.errors import FaAutotuneError, MachineError

SQLITE_MAGIC = b"SQLite format 3\0"
HEAD_BYTES = 512  # of a file, by which its kind is told
SQLITE_SIDES = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a database while it is used
_SIDE_FILES = (*SQLITE_SIDES, ".lock")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_S = 0.02
_DESCRIPTORS = re.compile(r"/proc/([0-9]+)(?:/task/[0-9]+)?/fd")  # where /dev/stdout, /dev/fd/N and their kin lead
_MAX_LINKS = 40  # as the kernel has it


# --- folders that are ours alone --------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone, whatever the umask. OSError."""
    missing = [above for above in (folder, *folder.parents) if not os.path.lexists(above)]
    for one in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            one.mkdir(0o700)
            one.chmod(0o700)  # a umask may have taken more away
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def own_folder(folder: Path, *, within: Path, variable: str) -> Path:
    """Make a folder of things that are run, and refuse it where another user could have put something there.

    So are the folders from `within` down to it, and what is no folder there makes way. MachineError names the
    environment variable that chooses another place; OSError where it can't be made.
    """
    below = [one for one in (folder, *folder.parents) if within in one.parents]
    for one in (within, *reversed(below)) if below else (folder,):
        if one in below and os.path.lexists(one) and not one.is_dir():
            set_aside(one)
        make_folder(one)
        if reason := written_by_others(one):
            raise MachineError(f"{reason}, and what is in {folder} is run; set {variable} to a folder of your own")
        _let_me_in(one)
    return folder


def set_aside(path: Path) -> None:
    """Move what has a name away from it, to another one in the same folder; a file can't replace a folder."""
    os.rename(path, path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.aside"))


def _let_me_in(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(stat.S_IMODE(found.st_mode) | stat.S_IRWXU)


def written_by_others(folder: Path) -> str | None:
    """Who but root and this user could put files into a folder, as the start of a sentence; None if nobody.

    Of the folders above, only those that everybody may write count, unless they are sticky, as /tmp is: what another
    user puts in our folder's place is that user's, and so refused when it is looked at.
    """
    real = Path(os.path.realpath(folder))
    found = real.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    if found.st_mode & _OTHERS_WRITE:
        return f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}; chmod go-w)"
    for above in real.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{above}, above {folder}, can be written by everybody (mode {stat.S_IMODE(mode):04o}; chmod +t)"
    return None


def is_writable(path: Path) -> bool:
    """True if a file or folder can be written, or made where the first folder above it exists."""
    if os.path.exists(path):  # as Path.exists, but false where a folder above may not be entered
        return os.access(path, os.W_OK)
    above = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


# --- reading ----------------------------------------------------------------------------------------------------------


def real_path(path: Path) -> Path:
    """Where a file really lies: absolute, all links followed."""
    return Path(os.path.realpath(path))


def read_plain(path: Path, *, at_most: int) -> bytes | None:
    """What a plain file holds; None where there is none, where it is a link or no file, or longer than `at_most`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > at_most:
            return None
        parts: list[bytes] = []
        while part := os.read(descriptor, found.st_size + 1):
            parts.append(part)
            if sum(map(len, parts)) > at_most:
                return None
        return b"".join(parts)
    except OSError:  # a disk that fails
        return None
    finally:
        os.close(descriptor)


def holds(path: Path, content: bytes) -> bool:
    """Whether a plain file holds exactly this."""
    return read_plain(path, at_most=len(content)) == content


# --- writing ----------------------------------------------------------------------------------------------------------


def write_whole(path: Path, content: bytes | str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Write a file in a folder that is there: readers see the old content or the new, also after a crash if `durable`.

    The umask applies to `mode`. What lies under the name is replaced, never written through: a link too, while a folder
    is moved aside. OSError that names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(draft, flags, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            put_in_place(draft, path, durable=durable)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:  # nobody knows the draft
        raise OSError(error.errno, error.strerror, str(path)) from error


def put_in_place(draft: Path, path: Path, *, durable: bool = True) -> None:
    """Give a finished file its name, on the same disk."""
    try:
        os.replace(draft, path)
    except IsADirectoryError:
        set_aside(path)
        os.replace(draft, path)
    if durable:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # some file systems have no such thing for folders
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputKind:
    """A kind of file that a command writes. One of it, told by its first bytes, may be replaced by another."""

    name: str  # as in "is not …"
    is_one: Callable[[bytes], bool]
    error: type[FaAutotuneError] = FaAutotuneError


def write_output(path: Path, content: bytes | str, kind: OutputKind, *, databases: Iterable[Path] = ()) -> None:
    """Write what a user asked for to the file that a user named, whole or not at all; see `output_path`.

    What keeps nothing is written to as it is: a pipe, a terminal, /dev/null. So is what is open already, such as
    /dev/stdout: it would not be what is put in the place of its file.
    """
    data = content.encode() if isinstance(content, str) else content
    if (found := open_stream(path)) is not None:
        _refuse_databases(path, kind, databases)
        _write_through(found, data, path, kind)
    elif _keeps_nothing(path):
        with path.open("wb") as stream:
            stream.write(data)
    else:
        target = output_path(path, kind, databases=databases)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
        write_whole(target, data, mode=mode)


def open_stream(path: Path) -> tuple[int, int] | None:
    """The process and its descriptor that a path names, as /dev/stdout does, its links followed; else None."""
    step = os.fspath(path)
    for _ in range(_MAX_LINKS):
        folder, name = os.path.realpath(os.path.dirname(step) or os.curdir), os.path.basename(step)
        if (found := _DESCRIPTORS.fullmatch(folder)) and re.fullmatch(r"[0-9]{1,9}", name):
            return int(found[1]), int(name)
        step = os.path.join(folder, name)
        if not os.path.islink(step):
            return None
        step = os.path.join(folder, os.readlink(step))
    return None


def _write_through(found: tuple[int, int], data: bytes, path: Path, kind: OutputKind) -> None:
    process, descriptor = found
    is_ours = os.path.realpath("/proc/self") == f"/proc/{process}"  # by the numbers of that /proc
    if not is_ours and not _keeps_nothing(path):
        raise kind.error(f"{path} is a file that another process has open; name the file itself")
    if path.is_file() and _head(path).startswith(SQLITE_MAGIC):
        raise kind.error(f"{path} is an SQLite database that is open, which is never written to; name a new file")
    try:
        with os.fdopen(os.dup(descriptor), "wb") if is_ours else path.open("wb") as stream:
            stream.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def output_path(path: Path, kind: OutputKind, *, databases: Iterable[Path] = ()) -> Path:
    """The file that a path names, its links followed, if a command may write it: it is new, empty, or of the kind.

    Never one of `databases`, whether they are there or not, nor what lies beside a database, nor a file by a descriptor
    through which it is open. Else the kind's error.
    """
    if open_stream(path) is not None:
        raise kind.error(f"{path} is a stream that is open already, not a file's name; name the file to write")
    target = _refuse_databases(path, kind, databases)
    if not os.path.lexists(target):
        return target
    if not target.is_file():
        raise kind.error(f"{path} is {'a folder' if target.is_dir() else 'no plain file'}; name the file to write")
    head = _head(target)
    if head and not kind.is_one(head):
        found = "an SQLite database, not" if head.startswith(SQLITE_MAGIC) else "not"
        raise kind.error(f"{path} exists and is {found} {kind.name}; name a new file, or remove it first")
    return target


def _refuse_databases(path: Path, kind: OutputKind, databases: Iterable[Path]) -> Path:
    """The file that a path names, unless it is one of these databases or lies beside one."""
    target, kept = real_path(path), [real_path(database) for database in databases]
    if any(target == database or _are_same_file(path, database) for database in kept):
        raise kind.error(f"{path} is the tuning database in use, which is never written over; name another file")
    for side in (side for side in _SIDE_FILES if target.name.endswith(side) and target.name != side):
        beside = target.with_name(target.name.removesuffix(side))
        if beside in kept or (beside.is_file() and _head(beside).startswith(SQLITE_MAGIC)):
            raise kind.error(f"{path} is where SQLite keeps what belongs to {beside}; name another file")
    return target


def _keeps_nothing(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _are_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


# --- locks ------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold a lock file, which is made if need be and never changed.

    BlockingIOError where another process keeps it for `wait_s` seconds; OSError where it can't be opened, or is a link
    or anything else than a file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no plain file", str(path))
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
