"""The winners' kernels as files to read: where each of them lies, and an index of them by problem.

A folder for each pass and variant, a file for each kernel, named for what it serves and by the start of its digest:
`fwd_hopper_ws/bf16_d128_causal-1a2b3c4d.py`. A kernel that serves several problems is one file; of several families of
one text, one gives the name and the head.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from fa_autotune.dispatch.winners import WinnerRow
from fa_autotune.errors import FaAutotuneError
from fa_autotune.files import holds, write_whole
from fa_autotune.kernels.render import GENERATED_BY, KernelSource, render
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.registry import VARIANTS

INDEX = "INDEX.md"
_DIGITS = 8  # of a digest, in a name; the file itself has all of it
_INDEX_MARK = "<!-- Written by fa-autotune render --winners. -->"
_INDEX_HEAD = f"""\
{_INDEX_MARK}
# Kernels by problem

A winner of each variant, the fastest first; `fa-autotune explain --problem` takes a problem as it stands here. ms is
the median when it was confirmed; the share of the best is the time of the problem's fastest winner over this kernel's.
"""
_TABLE_HEAD = "| problem | kernel | ms | share of the best |\n| --- | --- | ---: | ---: |\n"


def shipped_files(rows: Iterable[WinnerRow]) -> dict[str, str]:
    """The texts of the winners' kernels and of their index, by path in the folder; FaAutotuneError if two kernels
    would have one path."""
    sources: dict[str, KernelSource] = {}
    path_of: dict[str, str] = {}  # by digest
    indexed = []
    for row in rows:
        source = render(row.candidate)
        sources[source.digest] = source
        path_of[source.digest] = _path(row.candidate, source.digest)
        indexed.append((row, source.digest))
    files: dict[str, str] = {}
    for digest, path in sorted(path_of.items()):
        if path in files:
            raise FaAutotuneError(f"two kernels would be {path}: {_DIGITS} digits of a digest don't tell them apart")
        files[path] = sources[digest].text
    return {**dict(sorted(files.items())), INDEX: _index([(row, path_of[digest]) for row, digest in indexed])}


def write_shipped(rows: Iterable[WinnerRow], folder: Path) -> list[Path]:
    """Make a folder hold the winners' kernels and their index; gives their paths.

    What was written there before and is no winner's is removed. A file of anybody else stays as it is: FaAutotuneError,
    before anything is written, where one has the name of ours.
    """
    files = {folder / path: text for path, text in shipped_files(rows).items()}
    for path in files:
        if path.exists() and not _is_ours(path):
            raise FaAutotuneError(f"{path} is no file of ours and would be written over; move it away")
    for path, text in files.items():
        if not holds(path, text.encode()):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    for path in sorted(folder.rglob("*.py")):
        if path not in files and _is_ours(path):
            path.unlink()
            if path.parent != folder and not any(path.parent.iterdir()):
                path.parent.rmdir()
    return list(files)


def find_shipped(candidate: Candidate, folder: Path) -> Path | None:
    """The file of a candidate's kernel as today's templates render it, if the folder has it."""
    if not folder.is_dir():
        return None
    digest = render(candidate).digest
    for path in (folder / _path(candidate, digest)).parent.glob(f"*-{digest[:_DIGITS]}.py"):
        if _is_ours(path) and f"# Kernel {digest}:".encode() in path.read_bytes():
            return path
    return None


def _path(candidate: Candidate, digest: str) -> str:
    """Where in the folder a kernel lies: the words of its family's label, but for the pass."""
    kernel_pass, *words = candidate.family.label.replace("/", "x").split()
    return f"{kernel_pass}_{candidate.variant.value}/{'_'.join(words)}-{digest[:_DIGITS]}.py"


def _is_ours(path: Path) -> bool:
    """Whether we wrote a file."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open(errors="replace") as file:
        return file.readline().startswith((GENERATED_BY, _INDEX_MARK))


def _index(rows: Sequence[tuple[WinnerRow, str]]) -> str:
    """The text of the index: a table for each device, Triton and pass."""
    passes = list(dict.fromkeys(spec.kernel_pass for spec in VARIANTS))

    def table_of(entry: tuple[WinnerRow, str]) -> tuple[str, str, int]:
        return entry[0].device_name, entry[0].triton, passes.index(entry[0].problem.family.kernel_pass)

    def place_in_table(entry: tuple[WinnerRow, str]) -> tuple[object, ...]:
        row, path = entry
        family, shape = row.problem.family, row.problem.shape
        numbers = (shape.seqlen_k, shape.seqlen_q, shape.batch_size, shape.num_q_heads, shape.num_kv_heads)
        return *table_of(entry), family.head_dim, family.label, numbers, shape.label, row.median_ms, path

    parts = [_INDEX_HEAD]
    for (device, triton, number), table in groupby(sorted(rows, key=place_in_table), key=table_of):
        parts.append(f"\n## {passes[number]}: {device}, Triton {triton}\n\n{_TABLE_HEAD}")
        for _, entries in groupby(table, key=lambda entry: entry[0].problem.key):
            winners = list(entries)
            best_ms = winners[0][0].median_ms
            for row, path in winners:
                share = f"{best_ms / row.median_ms:.0%}"
                parts.append(f"| {row.problem.label} | [{path}]({path}) | {row.median_ms:.4g} | {share} |\n")
    return "".join(parts)
