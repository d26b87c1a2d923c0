"""The `fa-autotune` command: thin click commands, each imported when it is called."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

import click

from fa_autotune import __version__
from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import forget_sizes_of_no_terminal, working_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subcommand:
    module: str
    attribute: str
    summary: str


def _in_cli(name: str, attribute: str, summary: str) -> _Subcommand:
    return _Subcommand(module=f"fa_autotune.cli.{name}", attribute=attribute, summary=summary)


_SUBCOMMANDS = {
    "bench": _in_cli("bench", "bench_command", "Measure our kernels beside others on the same problems."),
    "db": _in_cli("db", "db_group", "Inspect, exchange and clean the tuning database."),
    "doctor": _in_cli("doctor", "doctor_command", "Say what is here, what works, and what would go wrong."),
    "explain": _in_cli("explain", "explain_command", "Say which kernel would run on a problem, and why."),
    "render": _in_cli("render", "render_command", "Print one generated kernel, or write the shipped winners'."),
    "tune": _in_cli("tune", "tune_command", "Search the fastest kernels for this machine's GPU."),
}


class _OurError(click.ClickException):
    """An error as click shows it: `Error: …` on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it, on a terminal without breaking words."""
        from fa_autotune.cli.terminal import say

        say(f"Error: {self.format_message()}", err=True)


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries, and imports a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, sorted."""
        return sorted(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if (found := _SUBCOMMANDS.get(cmd_name)) is None:
            return None
        command = getattr(import_module(found.module), found.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries, without importing the commands for them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUBCOMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors of ours become one line on stderr instead of a traceback."""
        with _shown_errors():
            return super().invoke(ctx)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """`click.Group.make_context`, with errors that can be looked at."""
        with _shown_errors():
            return super().make_context(*args, **kwargs)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """`click.Group.main`, where a stream may be closed or full: the former is no error, the latter one of ours."""
        _fill_closed_streams()
        forget_sizes_of_no_terminal()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # click itself ends quietly where nobody reads on
            _drop_what_can_not_be_written()
            named = "" if error.filename is None else f"{error.filename}: "
            wanted = "see that it is there, may be used, and has space left on its disk"
            if working_folder() is None:
                wanted = "the working folder was removed: go to one that is there"
            with suppress(OSError):
                _OurError(f"{named}{error.strerror or error}; {wanted}").show()
            _drop_what_can_not_be_written()
            sys.exit(_OurError.exit_code)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Errors of ours, as click has them, and click's own, which quote what was typed."""
    try:
        yield
    except FaAutotuneError as error:
        raise _OurError(str(error)) from error
    except click.ClickException as error:
        from fa_autotune.cli.terminal import shown_lines

        vars(error)["message"] = shown_lines(error.message)
        raise


def _fill_closed_streams() -> None:
    """Put the null device in place of closed streams: the next file that is opened would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), "r" if number == 0 else "w", encoding="utf-8"))


def _drop_what_can_not_be_written() -> None:
    """Python tries the rest again when it ends, and would report that a second time, with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa-autotune")
def main() -> None:
    """Generate FlashAttention-2 kernels, tune them on this machine's GPU, and look at what was found.

    Every command takes --help, and --json for output that programs read.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # tables hold × and –, which not every encoding has
