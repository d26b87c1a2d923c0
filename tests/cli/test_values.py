"""What options take that click has no type for."""

from pathlib import Path

import pytest

from kit.command import run

SHORT = "4x32x8x4096x4096x128,causal"


@pytest.mark.parametrize("digits", ["٣", "\N{FULLWIDTH DIGIT THREE}", "1_0", "+3", "3" * 30, "²", "১"])
@pytest.mark.parametrize(
    "words",
    [
        ("tune", "--trials"),
        ("tune", "--gpu"),
        ("tune", "--seed"),
        ("tune", "--time-budget"),
        ("tune", "--model", "llama-3-8b", "--seqlens"),
        ("tune", "--model", "llama-3-8b", "--batch-size"),
        ("bench", "--gpu"),
        ("db", "trials", "--limit"),
        ("db", "top", "--problem", SHORT, "--limit"),
        ("explain", "--problem", SHORT, "--device", "h200", "--triton"),
        ("explain", "--device", "h200", "--problem"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_numbers_are_written_in_plain_digits(words: tuple[str, ...], digits: str) -> None:
    """Python's `int` and its \\d also take the digits of other scripts, and more."""
    value = {"--time-budget": f"{digits}m", "--triton": f"{digits}.7", "--problem": f"{digits}{SHORT[1:]}"}
    done = run(*words, value.get(words[-1], digits))
    assert done.exit_code == 2
    assert done.stderr.startswith(("Error: ", "Usage: "))
    assert done.stdout == ""


@pytest.mark.parametrize("name", [":memory:", "", " ", "file:tuning.db?mode=memory"])
@pytest.mark.parametrize("words", [("db", "info"), ("db", "path"), ("db", "winners"), ("tune",), ("doctor", "--json")])
def test_a_database_is_a_file(words: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name:  # an empty variable is one that is not set
        monkeypatch.setenv("FA_AUTOTUNE_DB", name)
        done = run(*words)
        assert done.exit_code == (0 if words[0] == "doctor" else 2)
        assert "is not the path of a file; name a database such as ./tuning.db" in done.output
    if words[-1] in ("info", "winners", "tune"):
        assert run(*words, "--db", name).exit_code == 2


def test_a_merge_has_a_file_to_go_to(tmp_path: Path) -> None:
    assert "is not the path of a file" in run("db", "merge", ":memory:", tmp_path / "a.db").stderr


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "link"])
def test_a_database_is_no_stream_that_is_open_already(name: str, tmp_path: Path) -> None:
    """What is printed there would go into its file too."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    for words in (["db", "merge", tmp_path / name, "a.db"], ["tune", "--db", tmp_path / name]):
        done = run(*words)
        assert (done.exit_code, "is a stream that is open already" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["", " ", "--", "×"])
def test_a_device_without_a_name_is_refused(name: str, tmp_path: Path) -> None:
    from fa_autotune.database import TuningDatabase
    from kit.tuning_samples import fill

    with TuningDatabase(tmp_path / "t.db") as database:
        fill(database)
    done = run("db", "winners", "--db", tmp_path / "t.db", f"--device={name}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "names no device" in done.stderr
