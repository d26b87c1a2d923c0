"""Many processes on one file: none loses what was committed, none sees a half-made database."""

from pathlib import Path

from fa_autotune.database import TuningDatabase
from kit.database_files import all_at_once, killed_writer
from kit.tuning_samples import H200, PROBLEM, TOOLCHAIN, begin, ok_record


def test_sixteen_processes_create_one_database(tmp_path: Path) -> None:
    code = "TuningDatabase(path).save_trial(begin(TuningDatabase(path)), ok_record())"
    assert all_at_once(code, tmp_path / "new" / "tuning.db", 16) == [""] * 16
    with TuningDatabase(tmp_path / "new" / "tuning.db") as database:
        counts = database.info().counts
    assert (counts["sessions"], counts["devices"], counts["trials"], counts["measurements"]) == (16, 1, 1, 16)


def test_eight_writers_lose_no_update(tmp_path: Path) -> None:
    code = """
database = TuningDatabase(path)
for _ in range(25):
    database.add_misses([Miss(problem=PROBLEM, device_fingerprint=H200.fingerprint)])
"""
    assert all_at_once(code, tmp_path / "tuning.db", 8) == [""] * 8
    with TuningDatabase(tmp_path / "tuning.db") as database:
        assert [miss.count for miss in database.misses()] == [200]


def test_eight_writers_of_the_same_trials_leave_one_of_each(tmp_path: Path) -> None:
    code = """
database = TuningDatabase(path)
session = begin(database)
for block_m in (16, 32, 64, 128) * 4:
    database.save_trial(session, ok_record(1.0, block_m))
"""
    assert all_at_once(code, tmp_path / "tuning.db", 8) == [""] * 8
    with TuningDatabase(tmp_path / "tuning.db") as database:
        counts = database.info().counts
    assert (counts["trials"], counts["measurements"]) == (4, 32)


def test_a_killed_writer_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    saved = killed_writer(tmp_path / "tuning.db", 30)
    with TuningDatabase(tmp_path / "tuning.db") as database:
        found = [trial.record.problem.key for trial in database.trials()]
    assert found[: len(saved)] == saved
    assert len(found) - len(saved) <= 1  # saved, but killed before it could say so


def test_a_reader_sees_trials_while_they_are_written(tmp_path: Path) -> None:
    with (
        TuningDatabase(tmp_path / "tuning.db") as writer,
        TuningDatabase(tmp_path / "tuning.db", read_only=True) as reader,
    ):
        session = begin(writer)
        before = len(reader.trials())
        writer.save_trial(session, ok_record())
        assert (before, len(reader.trials(device=H200, toolchain=TOOLCHAIN, problem=PROBLEM))) == (0, 1)
