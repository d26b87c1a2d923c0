"""The only reader of environment variables and the only place that knows where our folders lie."""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from fa_autotune.errors import FaAutotuneError
from fa_autotune.files import open_stream, own_folder

_PACKAGE = Path(__file__).resolve().parent


def _data_dir(name: str) -> Path:
    """A folder beside the package in a checkout, inside it in an installed wheel."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    """Folder of the Jinja templates."""
    return _data_dir("templates")


def packs_dir() -> Path:
    """Folder of the shipped, read-only packs (one database per GPU model)."""
    return _data_dir("tuning_db")


def pack_paths() -> list[Path]:
    """The shipped packs, by name."""
    return sorted(packs_dir().glob("*.db"))


def shipped_kernels_dir() -> Path:
    """Folder of the shipped winners' kernels."""
    return _data_dir("kernels_generated")


def database_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's tuning database: FA_AUTOTUNE_DB, or `tuning.db` in the user data folder."""
    if chosen := environ.get("FA_AUTOTUNE_DB"):
        with _naming("FA_AUTOTUNE_DB"):
            return database_file(chosen)
    return _user_dir(platformdirs.user_data_dir, instead="FA_AUTOTUNE_DB") / "tuning.db"


def users_databases(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The user's tuning database, or nothing where this user has no place for one."""
    try:
        return [database_path(environ)]
    except FaAutotuneError:
        return []


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of generated candidates and compiled kernels: FA_AUTOTUNE_CACHE, or the user cache folder."""
    if chosen := environ.get("FA_AUTOTUNE_CACHE"):
        with _naming("FA_AUTOTUNE_CACHE"):
            return expanded(chosen)
    return _user_dir(platformdirs.user_cache_dir, instead="FA_AUTOTUNE_CACHE")


def own_cache_folder(folder: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Make a folder of things that are run, in the cache as a rule, for this user alone.

    FaAutotuneError where another user could have put something there; OSError where it can't be made.
    """
    return own_folder(folder, within=cache_dir(environ), variable="FA_AUTOTUNE_CACHE")


def expanded(path: Path | str) -> Path:
    """A path with the home folder for its `~`; FaAutotuneError if it is no path, or the folder that it starts from is
    not known, or was removed.
    """
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise FaAutotuneError(f"{path!r} is no path of a file; write it as text, or as a pathlib.Path")
    text = os.path.expanduser(path)
    if str(text).startswith("~"):
        raise FaAutotuneError(f"the home folder in {path} is not known; write the whole path")
    found = Path(text)
    if not found.is_absolute() and working_folder() is None:
        raise FaAutotuneError(
            f"the working folder was removed, so {path} leads nowhere; go to one that is there, or write the whole path"
        )
    return found.absolute() if str(found).startswith("~") else found


def working_folder() -> Path | None:
    """Where relative paths start; None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def require_working_folder() -> None:
    """FaAutotuneError where the working folder was removed: torch's libraries end a process that loads them there."""
    if working_folder() is None:
        raise FaAutotuneError(
            "the working folder was removed, and torch does not load in none; go to one that is there"
        )


def shell_command(words: Iterable[Path | str]) -> str:
    """Words as a line for bash and its kin, in characters that can be seen and copied, whatever bytes a path has."""
    return " ".join(map(_quoted, words))


def _quoted(word: Path | str) -> str:
    text = str(word)
    if text.isprintable() and "`" not in text:  # backticks round a command are ours
        return shlex.quote(text)
    plain = {ord("\\"): "\\\\", ord("'"): "\\'"}
    escaped = (
        plain.get(byte, chr(byte)) if 0x20 <= byte < 0x7F and byte != ord("`") else f"\\x{byte:02x}"
        for byte in os.fsencode(text)
    )
    return f"$'{''.join(escaped)}'"


def database_file(path: Path | str) -> Path:
    """`expanded`, for a database that is to outlive the process; FaAutotuneError for SQLite's other names."""
    text = str(path)
    if not text.strip() or text == ":memory:" or text.startswith("file:"):
        raise FaAutotuneError(f"{text!r} is not the path of a file; name a database such as ./tuning.db")
    found = expanded(path)
    if open_stream(found) is not None:  # what is printed there would go into the database
        raise FaAutotuneError(f"{text} is a stream that is open already, not a file's name; name the file itself")
    return found


def forget_sizes_of_no_terminal(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove COLUMNS and LINES that are no size: libraries take all that `str.isdigit` calls one, and fail later."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"[1-9][0-9]{0,4}", environ.get(name, "1")):
            del environ[name]


def triton_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder where the compile pool and the measuring worker share compiled kernels."""
    return cache_dir(environ) / "triton"


def interpreting(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process was started to run kernels in Triton's interpreter (TRITON_INTERPRET=1)."""
    return environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def c_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C compiler with which Triton builds its launchers, found in its own order: CC, gcc, clang."""
    return next(filter(None, map(shutil.which, [environ["CC"]] if "CC" in environ else ["gcc", "clang"])), None)


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except FaAutotuneError as error:
        raise FaAutotuneError(f"{variable}: {error}") from None


def _user_dir(find: Callable[[str], str], *, instead: str) -> Path:
    try:
        return Path(find("fa_autotune")).expanduser()
    except RuntimeError as error:
        raise FaAutotuneError(f"this user has no home folder ({error}); set {instead}, or HOME") from error
