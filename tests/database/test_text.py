"""Entries as plain JSON values."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fa_autotune.database.entries import ImportSummary, Miss, SessionState
from fa_autotune.database.text import to_json
from kit.tuning_samples import PROBLEM, ok_record

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        ("text", "text"),
        (0.5, 0.5),
        (NAN, None),
        (INF, None),
        (SessionState.RUNNING, "running"),
        (Path("/a/b"), "/a/b"),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00+00:00"),
        ({1: (NAN, 2)}, {"1": [None, 2]}),
        (PROBLEM, json.loads(PROBLEM.key)),
        (PROBLEM.family, json.loads(PROBLEM.family.key)),
        (ImportSummary(trials=2), {**dict.fromkeys(("devices", "problems", "sessions", "kernels"), 0), "trials": 2,
                                   "updated_kernels": 0, "updated_trials": 0, "measurements": 0}),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_becomes_plain(value: object, plain: Any) -> None:
    assert to_json(value) == plain


def test_a_record_is_a_json_document_that_names_its_problem_by_its_fields() -> None:
    document = json.loads(json.dumps(to_json(ok_record()), allow_nan=False))
    assert document["problem"] == json.loads(PROBLEM.key)
    assert document["candidate"]["config"]["BLOCK_M"] == 64
    assert (document["status"], document["measurement"]["regime"]) == ("ok", "events")


def test_what_has_no_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        to_json(Miss(problem=object(), device_fingerprint="d"))  # type: ignore[arg-type]


def test_an_import_that_brought_nothing_changed_nothing() -> None:
    assert not ImportSummary().changed
    assert ImportSummary(updated_trials=1).changed
