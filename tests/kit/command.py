"""The command line, run in this process."""

from click.testing import CliRunner, Result

from fa_autotune.cli import main


def run(*arguments: object) -> Result:
    """What `fa-autotune` with these words prints, and its exit code."""
    return CliRunner().invoke(main, list(map(str, arguments)))
