"""The root of the command: help, errors and exit codes that all commands share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fa_autotune import __version__
from fa_autotune.cli import main
from fa_autotune.database import TuningDatabase
from kit.command import run, start
from kit.tuning_samples import fill

SHORT = "4x32x8x4096x4096x128,causal"


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*words, name))


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\nfrom fa_autotune.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'triton', 'optuna', 'jinja2', 'sqlite_utils', 'rich', 'numpy', 'sqlite3'}\n"
        "found = [m for m in sys.modules if m in heavy or m.startswith('fa_autotune.cli.')]\n"
        "print('LOADED', found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_shows_the_summary_that_each_command_gives_itself() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(200) in run("--help").stdout


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"fa-autotune, version {__version__}\n"


def test_every_command_has_help() -> None:
    assert [words for words, command in leaves(main) if not command.help] == []


def test_every_option_has_help() -> None:
    silent = [
        (*words, parameter.name)
        for words, command in leaves(main)
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert silent == []


def test_every_command_speaks_json() -> None:
    def options(command: click.Command) -> set[str]:
        return {option for parameter in command.params for option in parameter.opts}

    assert [words for words, command in leaves(main) if "--json" not in options(command)] == []


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_2() -> None:
    done = run("render", "--problem", "1x8x3x64x64x64")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: num_q_heads=8 is no multiple of num_kv_heads=3")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("/dev/null/kernel.py", "/dev/null/kernel.py: Not a directory; see that it is there"),
        ("/dev/full", "No space left on device; see that it is there"),
    ],
)
def test_an_error_of_the_file_system_is_one_line_with_a_next_step(target: str, says: str) -> None:
    done = run("render", "--problem", SHORT, "--output", target)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {says}")


@pytest.mark.parametrize("words", ["db info", "--help", "nothere"])
@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>/dev/full"])
def test_a_stream_that_is_closed_or_full_is_no_traceback(words: str, streams: str, tmp_path: Path) -> None:
    """A closed one is no error; what could not be written is one, with exit code 2, also where nobody can read it."""
    with TuningDatabase(tmp_path / "t.db") as database:
        fill(database)
    ours = f"{sys.executable} -c \"from fa_autotune.cli import main; main(prog_name='fa-autotune')\" {words}"
    done = subprocess.run(
        ["sh", "-c", f"{ours} {streams}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FA_AUTOTUNE_DB": str(tmp_path / "t.db")},
    )
    assert done.returncode == (2 if words == "nothere" or streams.startswith(">/dev/full") else 0)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the rest in a buffer is written when Python ends
def test_a_disk_that_is_full_is_one_line_for_a_table_too(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = start("db", "winners", "--packs", stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr


def test_a_table_is_shown_in_any_encoding() -> None:
    done = start("db", "winners", "--packs", stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4?8?8?4096?4096" in done.stdout


def test_an_unknown_command_is_named() -> None:
    done = run("tuen")
    assert (done.exit_code, "'tuen'" in done.stderr) == (2, True)


def test_a_size_that_no_terminal_has_breaks_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TuningDatabase(tmp_path / "t.db") as database:
        fill(database)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "²")
    done = run("db", "winners", "--db", tmp_path / "t.db")
    assert (done.exit_code, "4×32×8×4096×4096" in done.stdout) == (0, True)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a filled database; the working folder was removed."""
    with TuningDatabase(tmp_path / "t.db") as database:
        fill(database)
    monkeypatch.setenv("FA_AUTOTUNE_DB", str(tmp_path / "t.db"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    return tmp_path


WITHOUT_A_FOLDER = [
    ("db", "info"),
    ("db", "path"),
    ("db", "export", "{}/pack.db"),
    ("db", "export", "--text", "{}/winners.json"),
    ("db", "merge", "{}/new.db", "{}/t.db"),
    ("explain", "--problem", SHORT, "--device", "h200", "--triton", "3.7.1"),
    ("render", "--problem", SHORT, "--output", "{}/kernel.py"),
]
INTO_NOTHING = [
    ("db", "info", "--db", "t.db"),
    ("db", "export", "pack.db"),
    ("db", "export", "--text", "winners.json"),
    ("db", "import", "t.db"),
    ("db", "merge", "new.db", "t.db"),
    ("explain", "--problem", SHORT),
    ("render", "--problem", SHORT, "--output", "kernel.py"),
    ("tune", "--hf-config", "config.json"),
    ("tune",),
    ("bench", "--output", "results"),
    ("bench",),
    ("doctor",),
]


@pytest.mark.parametrize("words", WITHOUT_A_FOLDER, ids=" ".join)
def test_a_command_with_whole_paths_needs_no_working_folder(words: tuple[str, ...], nowhere: Path) -> None:
    done = run(*(word.format(nowhere) for word in words))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("words", INTO_NOTHING, ids=" ".join)
def test_a_working_folder_that_was_removed_is_named(words: tuple[str, ...], nowhere: Path) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the working folder was removed" in done.stderr
    assert "go to one that is there" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("db", "export", "{}", "--db", "t.db"),
        ("db", "export", "--text", "{}", "--db", "t.db"),
        ("db", "info", "--db", "{}"),
        ("db", "import", "{}"),
        ("db", "merge", "new.db", "{}"),
        ("db", "winners", "--device", "{}", "--db", "t.db"),
        ("db", "top", "--problem", "{}"),
        ("db", "{}"),
        ("db", "info", "{}"),
        ("db", "info", "--{}"),
        ("render", "--problem", SHORT, "--output", "{}"),
        ("render", "--problem", SHORT, "--output", "{}/none"),
        ("tune", "--hf-config", "{}"),
        ("tune", "--model", "{}"),
        ("tune", "--time-budget", "{}"),
        ("explain", "--problem", SHORT, "--device", "{}"),
        ("{}",),
        ("--{}",),
    ],
    ids=" ".join,
)
def test_what_was_typed_steers_no_terminal(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "t.db" in words:
        with TuningDatabase("t.db") as database:
            fill(database)
    done = run(*(word.format("a\x1b[31m\u202e\x07b") for word in words))
    assert [char for char in done.output if not char.isprintable() and char != "\n"] == []
    assert "Traceback" not in done.output
    assert "a\\x1b[31m\\u202e\\x07b" in done.output
