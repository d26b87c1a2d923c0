"""The winners of all databases, read once into memory for dispatch: stdlib sqlite3, read-only.

A file may be foreign, or written to hurt: nothing of it is executed but one SELECT under limits, and only rows that
parse into our dataclasses come out. A file or row that can't be used is a note, never an exception.
"""

import hashlib
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fa_autotune.database.schema import APPLICATION_ID, SCHEMA_VERSION
from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.family import AttentionFamily, canonical_json
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import config_from_key, config_key
from fa_autotune.space.registry import compile_form, variant_spec

MAX_ROWS = 50_000
MAX_TEXT = 4096  # characters in one value of ours
_MAX_CELL_BYTES = 2**20  # SQLite itself gives up on a longer one
_MAX_FILE_CHARACTERS = 64 * 2**20
_MAX_VM_STEPS = 50_000_000
_VM_STEPS_PER_CHECK = 100_000
_MAX_ROW_NOTES = 3
_BUSY_TIMEOUT_S = 5.0
_COLUMNS = (
    "device_fingerprint",
    "device_arch",
    "device_name",
    "problem_key",
    "variant",
    "config",
    "kernel_digest",
    "form",
    "triton",
    "regime",
    "median_ms",
    "confirmed_at",
)


class Source(StrEnum):
    """Where a winner comes from: the user's own database, or a shipped or imported read-only pack."""

    USER = "user"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerRow:
    """The best confirmed config of one variant for a problem on a device, as some database has it."""

    problem: AttentionProblem
    candidate: Candidate
    device_fingerprint: str
    device_arch: str
    device_name: str
    kernel_digest: str
    triton: str
    regime: Regime
    median_ms: float
    confirmed_at: str
    source: Source
    path: Path

    @property
    def canonical(self) -> str:
        """Text that is equal for equal rows, whatever file they were read from."""
        values: dict[str, Any] = {
            "problem": self.problem.key,
            "variant": self.candidate.variant.value,
            "config": config_key(self.candidate.config),
            "regime": self.regime.value,
            "source": self.source.value,
        }
        for name in ("device_fingerprint", "device_arch", "device_name", "kernel_digest", "triton", "confirmed_at"):
            values[name] = getattr(self, name)
        return canonical_json({**values, "median_ms": self.median_ms})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Every usable winner, in canonical order, and notes on what could not be used.

    `content_hash` depends on the rows alone: ranks that show the same hash dispatch the same kernels.
    """

    rows: tuple[WinnerRow, ...]
    notes: tuple[str, ...] = ()
    content_hash: str = field(init=False)
    _by_kin: dict[tuple[object, ...], tuple[WinnerRow, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = sorted((row.canonical, index) for index, row in enumerate(self.rows))
        rows = tuple(self.rows[index] for _, index in ordered)
        by_kin: dict[tuple[object, ...], list[WinnerRow]] = {}
        for row in rows:
            by_kin.setdefault(_kin(row.problem.family), []).append(row)
        digest = hashlib.sha256("\n".join(text for text, _ in ordered).encode()).hexdigest()
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "content_hash", digest)
        object.__setattr__(self, "_by_kin", {kin: tuple(members) for kin, members in by_kin.items()})

    def related(self, family: AttentionFamily) -> tuple[WinnerRow, ...]:
        """The rows whose family equals this one in everything but access."""
        return self._by_kin.get(_kin(family), ())


def load_snapshot(user_path: Path, pack_paths: Sequence[Path]) -> Snapshot:
    """Read the winners of the user's database (which may be absent) and of the packs."""
    rows: list[WinnerRow] = []
    notes: list[str] = []
    for path, source in [(user_path, Source.USER), *((pack, Source.PACK) for pack in pack_paths)]:
        try:
            if source is Source.USER and not path.exists():
                continue
            found, row_notes = _read_file(path, source)
        except (_NotUsableError, sqlite3.Error, OSError, ValueError) as error:
            notes.append(f"{path} is not used: {_explain(error)}")
            continue
        rows += found
        notes += row_notes
    return Snapshot(rows=tuple(rows), notes=tuple(notes))


class _NotUsableError(Exception):
    """A file or row breaks one of our rules; the text says which."""


def _kin(family: AttentionFamily) -> tuple[object, ...]:
    return tuple(getattr(family, entry.name) for entry in fields(family) if entry.name != "access")


def _explain(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, sqlite3.Error):
        if "locked" in text:
            return f"{text} by another process; start again once that has ended"
        if "interrupted" in text:
            return f"reading its winners takes more than {_MAX_VM_STEPS} steps; get the file from a source you trust"
        return f"{text}; `fa-autotune db info --db FILE` says more"
    return text


# --- one file ---------------------------------------------------------------------------------------------------------


def _read_file(path: Path, source: Source) -> tuple[list[WinnerRow], list[str]]:
    if not path.is_file():
        raise _NotUsableError("it is not a file; name a database written by fa-autotune")
    if source is Source.PACK and _is_wal(path) and not _has_pending_wal(path):
        # Opened in the normal way, a WAL database gets -wal and -shm files beside it: litter in a folder of packs.
        return _read_rows(path, source, immutable=True)
    try:
        return _read_rows(path, source, immutable=False)
    except sqlite3.OperationalError as error:
        # A WAL database in a folder without write permission opens only as immutable: right while it has no writer.
        if "unable to open" not in str(error) or _has_pending_wal(path):
            raise
        return _read_rows(path, source, immutable=True)


def _is_wal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _has_pending_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return wal.exists() and wal.stat().st_size > 0


def _read_rows(path: Path, source: Source, *, immutable: bool) -> tuple[list[WinnerRow], list[str]]:
    uri = path.absolute().as_uri() + "?mode=ro" + ("&immutable=1" if immutable else "")
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as connection:
        _guard(connection)
        _check_identity(connection)
        return _parse_rows(_select_winners(connection), path, source)


def _guard(connection: sqlite3.Connection) -> None:
    checks = 0

    def over_budget() -> int:
        nonlocal checks
        checks += 1
        return int(checks * _VM_STEPS_PER_CHECK > _MAX_VM_STEPS)

    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_CELL_BYTES)
    connection.set_progress_handler(over_budget, _VM_STEPS_PER_CHECK)
    connection.text_factory = _decode
    for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
        connection.execute(f"PRAGMA {pragma}").close()


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _check_identity(connection: sqlite3.Connection) -> None:
    application_id = _scalar(connection, "PRAGMA application_id")
    version = _scalar(connection, "PRAGMA user_version")
    if application_id != APPLICATION_ID:
        raise _NotUsableError(f"it is not a tuning database (application_id {application_id}, not {APPLICATION_ID})")
    if version > SCHEMA_VERSION:
        raise _NotUsableError(f"it has schema {version}, this release reads {SCHEMA_VERSION}; upgrade fa-autotune")
    if version < SCHEMA_VERSION:
        raise _NotUsableError(
            f"it has schema {version}, this release reads {SCHEMA_VERSION}; import it into a new database"
        )
    kind = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = 'winners'").fetchone()
    if kind is None or kind[0] not in ("view", "table") or "VIRTUAL" in str(kind[1]).upper().split():
        raise _NotUsableError("it has no view `winners`; get the file from a source you trust")


def _scalar(connection: sqlite3.Connection, statement: str) -> int:
    return int(connection.execute(statement).fetchone()[0])


def _select_winners(connection: sqlite3.Connection) -> Iterator[tuple[Any, ...]]:
    characters = 0
    cursor = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM winners")
    for count, values in enumerate(cursor, start=1):
        characters += sum(len(value) for value in values if isinstance(value, str | bytes))
        if count > MAX_ROWS or characters > _MAX_FILE_CHARACTERS:
            raise _NotUsableError(
                f"its winners pass {MAX_ROWS} rows or {_MAX_FILE_CHARACTERS} characters; export a smaller pack"
            )
        yield values


def _parse_rows(found: Iterator[tuple[Any, ...]], path: Path, source: Source) -> tuple[list[WinnerRow], list[str]]:
    rows: list[WinnerRow] = []
    notes: list[str] = []
    skipped = 0
    for number, values in enumerate(found, start=1):
        try:
            rows.append(_parse_row(dict(zip(_COLUMNS, values, strict=True)), path, source))
        except (_NotUsableError, FaAutotuneError, ValueError) as error:
            skipped += 1
            if skipped <= _MAX_ROW_NOTES:
                notes.append(f"{path}: winner {number} is skipped: {_printable(str(error))}")
    if skipped > _MAX_ROW_NOTES:
        notes.append(f"{path}: {skipped - _MAX_ROW_NOTES} more winners are skipped")
    return rows, notes


# --- one row ----------------------------------------------------------------------------------------------------------


def _parse_row(values: dict[str, Any], path: Path, source: Source) -> WinnerRow:
    text = {name: _text(name, value) for name, value in values.items() if name != "median_ms"}
    median_ms = values["median_ms"]
    if type(median_ms) is not float or not math.isfinite(median_ms) or median_ms <= 0:
        raise _NotUsableError(f"median_ms={median_ms!r} is not a positive time")
    if not text["device_fingerprint"].startswith(text["device_arch"] + "/"):
        raise _NotUsableError(f"fingerprint {text['device_fingerprint']} is not of arch {text['device_arch']}")
    datetime.fromisoformat(text["confirmed_at"])
    problem = AttentionProblem.from_key(text["problem_key"])
    if CompileForm(text["form"]) is not compile_form(problem.family):
        raise _NotUsableError(f"form={text['form']} does not serve access={problem.family.access.value}")
    return WinnerRow(
        problem=problem,
        candidate=_candidate(problem, Variant(text["variant"]), text["config"]),
        device_fingerprint=text["device_fingerprint"],
        device_arch=text["device_arch"],
        device_name=text["device_name"],
        kernel_digest=text["kernel_digest"],
        triton=text["triton"],
        regime=Regime(text["regime"]),
        median_ms=median_ms,
        confirmed_at=text["confirmed_at"],
        source=source,
        path=path,
    )


def _candidate(problem: AttentionProblem, variant: Variant, config: str) -> Candidate:
    parse: Callable[..., Any] = config_from_key
    kind = variant_spec(problem.family.kernel_pass, variant).config_type
    return Candidate(family=problem.family, variant=variant, config=parse(kind, config))


def _text(name: str, value: object) -> str:
    # What is shown to people must not steer their terminal, hence no control characters.
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT or not value.isprintable():
        raise _NotUsableError(f"{name} is not 1 to {MAX_TEXT} printable characters")
    return value


def _printable(text: str) -> str:
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return shown if len(shown) <= 300 else shown[:300] + "…"
