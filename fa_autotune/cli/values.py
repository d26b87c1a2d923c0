"""Types of options that click has not: numbers written in plain digits, paths, and the file of a database."""

import re
from pathlib import Path
from typing import Any

import click

from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import database_file, expanded


class WholeNumber(click.IntRange):
    """A whole number in the digits 0 to 9: Python's `int` also takes those of other scripts, and underscores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, if it is one in the range."""
        if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,18}", value):
            self.fail(f"{value!r} is not a whole number in the digits 0 to 9, at most 18.", param, ctx)
        return super().convert(value, param, ctx)


class FilePath(click.Path):
    """A path with the home folder for its `~`, which has a place to start from."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, if it may lead somewhere."""
        try:
            return super().convert(expanded(value), param, ctx)
        except FaAutotuneError as error:
            self.fail(str(error), param, ctx)


class DatabaseFile(click.Path):
    """The path of a database, which must be a file: one in memory would be gone when the command ends."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, with the home folder for its `~`."""
        try:
            return database_file(value)
        except FaAutotuneError as error:
            self.fail(str(error), param, ctx)
