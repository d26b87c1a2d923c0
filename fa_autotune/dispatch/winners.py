"""The winners of all databases, read once into memory for dispatch, by the rules of every reader.

A file or row that can't be used is a note, never an exception.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from fa_autotune.database.content import WINNERS, Content, read_content, required, winner_of, winning
from fa_autotune.database.reader import open_reader
from fa_autotune.errors import DatabaseError, InvalidPackError
from fa_autotune.problem.family import AttentionFamily, canonical_json
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime, TrialStatus
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import config_key

READ_LIMIT_S = 2.0  # that SQLite may take for one file
BUSY_TIMEOUT_S = 2.0
MAX_ROWS = 10_000  # of a table
MAX_REFUSED = 1_000
_MAX_ROW_NOTES = 3


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
    measured_as: str | None = None  # the digest of the text that was timed, where that is another of one machine code
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
class StoppedKernel:
    """A kernel that a gate stopped with one release of Triton, such as for its spills: there its winners don't run."""

    candidate: Candidate
    digest: str
    arch: str
    release: str
    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Every usable winner, in canonical order, what of them a release of Triton spoils, and notes on what could not be
    used.

    `content_hash` depends on the rows and the stopped kernels: ranks that show the same hash dispatch the same kernels.
    """

    rows: tuple[WinnerRow, ...]
    stopped: frozenset[StoppedKernel] = frozenset()
    notes: tuple[str, ...] = ()
    content_hash: str = field(init=False)
    _by_kin: dict[tuple[object, ...], tuple[WinnerRow, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = sorted((row.canonical, index) for index, row in enumerate(self.rows))
        rows = tuple(self.rows[index] for _, index in ordered)
        by_kin: dict[tuple[object, ...], list[WinnerRow]] = {}
        for row in rows:
            by_kin.setdefault(_kin(row.problem.family), []).append(row)
        said = [*(text for text, _ in ordered), *sorted(map(str, self.stopped))]
        digest = hashlib.sha256("\n".join(said).encode()).hexdigest()
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "content_hash", digest)
        object.__setattr__(self, "_by_kin", {kin: tuple(members) for kin, members in by_kin.items()})

    def related(self, family: AttentionFamily) -> tuple[WinnerRow, ...]:
        """The rows whose family equals this one in everything but access."""
        return self._by_kin.get(_kin(family), ())


def load_snapshot(user_path: Path | None, pack_paths: Sequence[Path]) -> Snapshot:
    """Read the winners of the user's database (which may be absent; None: no user's) and of the packs."""
    rows: list[WinnerRow] = []
    stopped: set[StoppedKernel] = set()
    notes: list[str] = []
    users = [] if user_path is None else [(user_path, Source.USER)]
    for path, source in [*users, *((pack, Source.PACK) for pack in pack_paths)]:
        if source is Source.USER and _is_absent(path):
            continue
        try:
            found, spoiled, row_notes = _read_file(path, source)
        except DatabaseError as error:
            why = str(error).removeprefix(f"{path}: ")
            notes.append(
                f"{path} is not used: {why.replace(f'{path} ', 'it ', 1) if why.startswith(f'{path} ') else why}"
            )
            continue
        rows += found
        stopped |= spoiled
        notes += row_notes
    return Snapshot(rows=tuple(rows), stopped=frozenset(stopped), notes=tuple(notes))


def _kin(family: AttentionFamily) -> tuple[object, ...]:
    return tuple(getattr(family, entry.name) for entry in fields(family) if entry.name != "access")


def _is_absent(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # it may be there
        return False
    return False


def _read_file(path: Path, source: Source) -> tuple[list[WinnerRow], set[StoppedKernel], list[str]]:
    refused: list[str] = []

    def refuse(error: InvalidPackError) -> None:
        refused.append(f"{path}: {error}; the winner that needs it is not used")
        if len(refused) > MAX_REFUSED:
            raise DatabaseError(f"more than {MAX_REFUSED} of its rows are refused, such as: {error}")

    is_pack = source is Source.PACK
    with open_reader(path, is_pack=is_pack, limit_s=READ_LIMIT_S, busy_s=BUSY_TIMEOUT_S) as reader:
        content = read_content(reader, WINNERS, refuse=refuse, max_rows=MAX_ROWS)
    rows: list[WinnerRow] = []
    for key in winning(content):
        winner = winner_of(content, key)
        assert winner.kernel_digest is not None  # that of an ok trial
        rows.append(
            WinnerRow(
                problem=winner.problem,
                candidate=winner.candidate,
                device_fingerprint=winner.device_fingerprint,
                device_arch=winner.device_arch,
                device_name=winner.device_name,
                kernel_digest=winner.kernel_digest,
                measured_as=winner.measured_as,
                triton=winner.toolchain.triton,
                regime=winner.regime,
                median_ms=winner.median_ms,
                confirmed_at=content.measurements[key][0].measured_at,
                source=source,
                path=path,
            )
        )
    if len(refused) > _MAX_ROW_NOTES:
        more = len(refused) - _MAX_ROW_NOTES
        refused[_MAX_ROW_NOTES:] = [f"{path}: {more} more rows are refused"]
    return rows, _stopped_kernels(content), refused


def _stopped_kernels(content: Content) -> set[StoppedKernel]:
    found = set()
    for trial, refers in content.trials.values():
        kernel, kernel_refers = content.kernels[required(refers, "kernel_id")]
        if trial.status is TrialStatus.OVER_RESOURCES and kernel.digest:
            release = content.toolchains[required(kernel_refers, "toolchain_id")][0].triton_release
            gate = trial.constraint or trial.status.value
            found.add(
                StoppedKernel(
                    candidate=kernel.candidate, digest=kernel.digest, arch=kernel.arch, release=release, gate=gate
                )
            )
    return found
