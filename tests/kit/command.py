"""The command line, run in this process or in one of its own."""

import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from fa_autotune.cli import main


def run(*arguments: object) -> Result:
    """What `fa-autotune` with these words prints, and its exit code."""
    return CliRunner().invoke(main, list(map(str, arguments)))


def start(*arguments: str, stdout: Any, **environ: str) -> "subprocess.CompletedProcess[str]":
    """`fa-autotune` in a process of its own."""
    words = [sys.executable, "-c", "from fa_autotune.cli import main; main(prog_name='fa-autotune')", *arguments]
    environ = {**os.environ, **environ}
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environ)
