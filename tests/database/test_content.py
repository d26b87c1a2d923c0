"""The rows of a file: what is selected, and what is left out with what it needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fa_autotune.database import TuningDatabase
from fa_autotune.database.content import EVERYTHING, WINNERS, read_content, selection, winner_of, winning
from fa_autotune.database.reader import Reader, open_reader
from fa_autotune.errors import InvalidPackError
from fa_autotune.problem.device import KNOWN_DEVICES
from kit.database_files import edit
from kit.tuning_samples import H200, PROBLEM, fill


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A pack of two devices' trials."""
    with TuningDatabase(":memory:") as database:
        for device in (H200, KNOWN_DEVICES["a100"]):
            fill(database, device=device)
        database.export(tmp_path / "t.db", winners_only=False)
    return tmp_path / "t.db"


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    with open_reader(path) as opened:
        yield opened


def test_everything_is_all_trials_with_all_that_they_refer_to(reader: Reader) -> None:
    content = read_content(reader, EVERYTHING)
    assert {name: len(getattr(content, name)) for name in ("devices", "trials", "sessions", "measurements")} == {
        **{"devices": 2, "trials": 10, "sessions": 4, "measurements": 10}
    }


def test_winners_are_read_without_the_other_trials(reader: Reader) -> None:
    content = read_content(reader, WINNERS)
    assert (len(content.trials), len(content.kernels), len(content.measurements)) == (2, 2, 2)
    assert [winner_of(content, key).device_name for key in winning(content)] == [KNOWN_DEVICES["a100"].name, H200.name]


@pytest.mark.parametrize(
    ("filters", "trials"),
    [
        ({}, 10),
        ({"devices__fingerprint": H200.fingerprint}, 5),
        ({"devices__fingerprint": H200.fingerprint, "status": ["ok", "rejected"]}, 4),
        ({"problems__key": PROBLEM.key, "kernels__variant": "tma"}, 0),
        ({"status": []}, 0),
        ({"toolchains__key": "none"}, 0),
    ],
)
def test_a_selection_is_the_trials_that_pass_every_filter(
    reader: Reader, filters: dict[str, object], trials: int
) -> None:
    assert len(read_content(reader, selection(**filters)).trials) == trials


@pytest.mark.parametrize(
    ("change", "says", "left"),
    [
        ("UPDATE devices SET name = '' WHERE id = 1", ["devices row 1"], 5),
        ("UPDATE sessions SET uid = '/' WHERE id = 1", ["sessions row 1"], 5),
        ("UPDATE measurements SET rank = 0 WHERE id = 1", ["measurements row 1"], 9),
    ],
)
def test_a_bad_row_is_told_once_and_takes_with_it_what_needs_it(
    path: Path, change: str, says: list[str], left: int
) -> None:
    edit(path, change)
    refused: list[InvalidPackError] = []
    with open_reader(path) as reader:
        content = read_content(reader, refuse=refused.append)
    assert [str(error).split(":")[0] for error in refused] == says
    assert len(content.trials) <= 9
    assert len(content.trials) >= left - 5
