"""Outcomes of trials: what goes together."""

from dataclasses import replace

import pytest

from fa_autotune.records import TrialStatus
from kit.tuning_samples import ACCURACY, failed_record, measurement, ok_record


@pytest.mark.parametrize("status", [status for status in TrialStatus if status is not TrialStatus.OK])
def test_only_a_trial_that_ended_well_was_timed(status: TrialStatus) -> None:
    with pytest.raises(ValueError, match=f"a trial with status {status} has a measurement"):
        replace(failed_record(status), measurement=measurement())
    with pytest.raises(ValueError, match="a trial with status ok lacks a measurement"):
        replace(ok_record(), measurement=None)


def test_an_accuracy_passes_where_no_check_failed() -> None:
    assert ACCURACY.passed
    assert not replace(ACCURACY, failures=("out error 3 > 2",)).passed


def test_records_are_equal_however_long_they_took() -> None:
    assert replace(ok_record(), duration_s=9.0) == ok_record()
    assert replace(ok_record(), error="no") != ok_record()
