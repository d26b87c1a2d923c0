"""What commands print stays readable in a narrow terminal, and steers none."""

import ast
import os
from pathlib import Path

import pytest

from fa_autotune.cli import terminal
from fa_autotune.cli.terminal import (
    ProgressStream,
    echo,
    echo_path,
    fit,
    print_table,
    say,
    shown,
    wrapped,
)

PROBLEM = "fwd bf16 d128 causal 1×16×16×16384×16384"
CONFIG = "64x64 w4 s1 maxnreg=128 heads_per_group=16 row_sum_lanes=8 exact_lengths=True"
WINNERS = {"problem": [PROBLEM], "config": [CONFIG], "ms": ["2.1722"], "registers": ["255"], "error": ["0.25"]}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 60 columns on stdout."""
    monkeypatch.setattr("fa_autotune.cli.terminal.terminal_width", lambda err=False: 60)


def total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def test_a_table_with_room_has_a_line_per_row() -> None:
    layout = fit(WINNERS, 200)
    assert layout.widths == {name: max(len(name), len(cells[0])) for name, cells in WINNERS.items()}


@pytest.mark.parametrize("width", range(60, 160, 7))
def test_a_table_fits_the_terminal_and_breaks_no_word(width: int) -> None:
    layout = fit(WINNERS, width, optional=["registers", "error"])
    assert total(layout.widths) <= width
    for name, column_width in layout.widths.items():
        assert max(map(len, WINNERS[name][0].split())) <= column_width


def test_optional_columns_are_left_out_from_the_last() -> None:
    assert [fit(WINNERS, width, optional=["registers", "error"]).left_out for width in (82, 74, 60)] == [
        (),
        ("error",),
        ("registers", "error"),
    ]


def test_a_heading_breaks_before_a_column_is_left_out() -> None:
    table = {"problem": [PROBLEM], "ours / sdpa-flash": ["1.50"], "sdpa-flash TFLOP/s": ["283"]}
    assert fit(table, 50, optional=list(table)).left_out == ()


def test_what_is_not_optional_is_never_left_out() -> None:
    assert fit(WINNERS, 10).left_out == ()


def test_a_piped_table_is_as_wide_as_columns_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table(list(WINNERS), [[cells[0] for cells in WINNERS.values()]], optional=["registers", "error"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-1])) <= 60
    assert "left out for want of room: registers, error; a wider terminal, COLUMNS=240 or --json" in out
    monkeypatch.delenv("COLUMNS")
    print_table(list(WINNERS), [[cells[0] for cells in WINNERS.values()]], optional=["registers", "error"])
    assert f"{PROBLEM}  {CONFIG}" in capsys.readouterr().out


def test_no_text_is_lost_in_a_narrow_terminal(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(list(WINNERS), [[cells[0] for cells in WINNERS.values()]], optional=["registers", "error"])
    out = capsys.readouterr().out
    assert [word for word in f"{PROBLEM} {CONFIG} 2.1722".split() if word not in out] == []
    assert max(map(len, out.splitlines())) <= 60
    assert "left out for want of room: registers, error" in out


def test_a_pipe_gets_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(list(WINNERS), [[cells[0] for cells in WINNERS.values()]], optional=["registers", "error"])
    assert "255        0.25" in capsys.readouterr().out


def test_what_all_rows_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["device", "triton", "ms"], [["H200", "3.6.0", 1], ["H200", "3.7.1", 2]], common=["device", "triton"])
    out = capsys.readouterr().out
    assert out.startswith("device H200\n")
    assert out.count("H200") == 1
    assert "3.6.0" in out


def test_a_table_without_rows_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["ms"], [], common=["ms"])
    assert capsys.readouterr().out == "none\n"


def test_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["why"], [["[bold]a[/wrong]"]])
    assert "[bold]a[/wrong]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "width", "expected"),
    [
        ("cache folder   /tmp/a b c d e", 27, "cache folder   /tmp/a b c d\n         e"),
        ("triton   3.7.1, optuna 5.0.0", 23, "triton   3.7.1, optuna\n       5.0.0"),
        ("GPU   one two three four", 20, "GPU   one two three\n      four"),
        ("    exact: tma 64x64 w4", 22, "    exact: tma 64x64\n      w4"),
        ("no_word_of_a_path_is_ever_broken so it is", 22, "no_word_of_a_path_is_ever_broken\n  so it is"),
        ("", 22, ""),
    ],
)
def test_a_line_breaks_between_words_and_keeps_its_indent(line: str, width: int, expected: str) -> None:
    assert wrapped(line, width) == expected


def test_a_pipe_gets_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say("word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_progress_is_dropped_while_it_can_not_be_written_and_shown_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits in a buffer to fail once more, and a disk that has space again gets what comes then."""
    written = tmp_path / "shown"
    with written.open("w", buffering=1) as stream, Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", stream)
        progress = ProgressStream()
        kept = os.dup(stream.fileno())
        progress.write("first\n")
        os.dup2(full.fileno(), stream.fileno())
        progress.write("lost\n")
        progress.flush()
        os.dup2(kept, stream.fileno())
        os.close(kept)
        progress.write("last\n")
    assert written.read_text() == "first\nlast\n"


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_command_in_backticks_stays_on_one_line(width: int) -> None:
    command = "`fa-autotune db winners --db '/home/me/a  b/my tuning.db'`"
    lines = wrapped(f"12 of 14 problems have winners; {command} shows them.", width).splitlines()
    assert sum(command in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]0;title\x07\x1b[31mred", r"\x1b]0;title\x07\x1b[31mred"),
        ("a\nError: b\r", r"a\nError: b\r"),
        ("\udcff\ud800", r"\xff\ud800"),
        ("\x9b31m\u202eb", r"\x9b31m\u202eb"),
        ("4×32 – é", "4×32 – é"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_escapes(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(text) == expected
    print_table(["why"], [[text]])
    assert expected in capsys.readouterr().out
    for show in (say, echo):
        show(f"{text}\tb\nc")
        assert capsys.readouterr().out.replace("\n", r"\n") == expected + r"	b\nc\n".replace(r"\t", "\t")


def test_a_path_alone_comes_to_a_program_byte_for_byte(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/a\udcff\x1b")
    echo_path(path)
    assert capfdbinary.readouterr().out == b"/a\xff\x1b\n"
    monkeypatch.setattr("fa_autotune.cli.terminal.terminal_width", lambda err=False: 60)
    echo_path(path)
    assert capfdbinary.readouterr().out == rb"/a\xff\x1b" + b"\n"


def test_no_command_prints_past_it() -> None:
    """Nor takes a path past the type that says where it leads."""
    calls = [
        (file.name, ast.unparse(node.func))
        for file in Path(terminal.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    past = {"click.echo", "click.secho", "click.Path", "print", "sys.stdout.write", "sys.stderr.write"}
    assert [call for call in calls if call[0] != "terminal.py" and call[1] in past] == []
