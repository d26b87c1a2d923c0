"""How commands show things: text that breaks between words, tables whose cells stay readable in a narrow terminal.

All that a command prints goes through here: names, paths and texts of a database may hold what steers a terminal.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

PIPED_WIDTH = 240  # columns of a table that no terminal shows, unless COLUMNS says otherwise
_GAP = 2  # columns between two cells
_LONGEST_WORD = 28  # a longer one may be broken
_COMFORT = 24  # rather leave out a column than break another's cells into shorter lines
_COMMAND = re.compile(r"`[^`]*`")
_NO_BREAK = "\0"  # stands for a space at which a line is not broken
_LABEL = re.compile(r"\s*\S+(?: \S+)*?:?\s{2,}(?=\S)|\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which columns of a table are shown how wide, and which found no room."""

    widths: dict[str, int]
    left_out: tuple[str, ...]


class ProgressStream:
    """stderr for what is worth no failure: what a closed pipe or a full disk does not take is dropped."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Write what is in the stream's buffer, or drop it."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Empty the stream's buffer into the null device: Python would try again with each line, and when it ends."""
        with suppress(OSError, ValueError):  # the latter from a stream that is no file
            number = self._stream.fileno()
            kept, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, number)
                self._stream.flush()
            finally:
                os.dup2(kept, number)
                os.close(kept)
                os.close(nowhere)


def shown(text: object, *, but: str = "") -> str:
    """A name or path as it can be looked at: with escapes for what steers a terminal, is no character, or ends a line.

    `but`: such characters that stay.
    """
    return "".join(char if char.isprintable() or char in but else _escape(char) for char in str(text))


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else char.encode("unicode_escape").decode()


def shown_lines(text: str) -> str:
    """`shown`, of a text that may have several lines."""
    return shown(text, but="\n\t")


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print lines as they are, to be copied, or read by programs."""
    click.echo(shown_lines(text), err=err, nl=nl)


def echo_path(path: Path) -> None:
    """Print a path alone: to a program byte for byte."""
    click.echo(os.fsencode(path) if terminal_width() is None else shown(path))


def say(text: str, *, err: bool = False) -> None:
    """Print lines; in a terminal they break between words, and what follows a label is indented as its text is."""
    text = shown_lines(text)
    if width := terminal_width(err=err):
        text = "\n".join(wrapped(line, width) for line in text.split("\n"))
    click.echo(text, err=err)


def terminal_width(*, err: bool = False) -> int | None:
    """Columns of the terminal that shows stdout or stderr; None if that is a pipe or a file."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def _table_width() -> int:
    """Columns for a table: the terminal's, or in a pipe what COLUMNS says, or as many as most rows need."""
    return terminal_width() or shutil.get_terminal_size((PIPED_WIDTH, 0)).columns


def wrapped(line: str, width: int) -> str:
    """A line in as many as it needs. No word is broken, nor a command in backticks, so that they can be copied."""
    label = _LABEL.match(line)
    indent = len(label[0]) if label and label[0].strip() else len(line) - len(line.lstrip()) + 2
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", _NO_BREAK), line)
    lines = textwrap.fill(
        whole,
        width,
        subsequent_indent=" " * min(indent, width // 3),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_NO_BREAK, " ")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    optional: Sequence[str] = (),
    common: Sequence[str] = (),
    last_apart: bool = False,
) -> None:
    """Print a table, or `none`.

    A column of `common` that says the same in every row is said once above. In a terminal that is too narrow, columns
    of `optional` are left out, the last first, and a line below names them. `last_apart` sets off the last row.
    """
    cells = [[shown(cell) for cell in row] for row in rows]
    if not cells:
        echo("none")
        return
    alike = [name for name in common if len({row[columns.index(name)] for row in cells}) == 1]
    if alike:
        say(" · ".join(f"{name} {cells[0][columns.index(name)]}" for name in alike))
    table = {name: [row[place] for row in cells] for place, name in enumerate(columns) if name not in alike}
    layout = fit(table, _table_width(), optional)
    _print_rich({name: table[name] for name in layout.widths}, layout.widths, last_apart=last_apart)
    if layout.left_out:
        left_out = ", ".join(layout.left_out)
        say(f"left out for want of room: {left_out}; a wider terminal, COLUMNS={PIPED_WIDTH} or --json shows them")


def fit(table: dict[str, list[str]], width: int, optional: Sequence[str] = ()) -> Layout:
    """The columns that fit and their widths; as the last resort no narrower than their words, whatever the width."""
    widths = {name: max(map(len, [name, *cells])) for name, cells in table.items()}
    words = {name: _longest_word([name, *cells]) for name, cells in table.items()}
    lines = {name: max(words[name], min(max(map(len, cells)), _COMFORT)) for name, cells in table.items()}
    droppable = [name for name in optional if name in table]
    while droppable and _total(lines[name] for name in widths) > width:
        del widths[droppable.pop()]
    for least in (lines, words):
        while _total(widths.values()) > width and (spare := [name for name in widths if widths[name] > least[name]]):
            widths[max(spare, key=widths.__getitem__)] -= 1
    return Layout(widths=widths, left_out=tuple(name for name in table if name not in widths))


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _longest_word(cells: Iterable[str]) -> int:
    return min(_LONGEST_WORD, max((len(word) for cell in cells for word in cell.split()), default=1))


def _print_rich(table: dict[str, list[str]], widths: dict[str, int], *, last_apart: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=_total(widths.values()), highlight=False)
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    for name, column_width in widths.items():
        drawn.add_column(Text(name), width=column_width, overflow="fold")
    rows = list(zip(*table.values(), strict=True))
    for row in rows:  # as Text: what a database holds is never read as markup
        if last_apart and row is rows[-1]:
            drawn.add_section()
        drawn.add_row(*map(Text, row))
    console.print()
    console.print(drawn)
    console.print()
