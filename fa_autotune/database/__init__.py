"""The tuning database: one SQLite file of trials, measurements and winners. The only door to sqlite_utils.

`store` has the verbs; `entries` what goes in and out; `rows` what a row may hold; `reader` how a file is read, by
everybody; `migrations` the schema; `connection` how a file is opened to write; `writing` and `packs` how rows get into
a database; `sqlite_errors` what its errors mean.

Importing this package loads nothing heavy: each name below is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_autotune.database.entries import (
        DatabaseInfo,
        ImportSummary,
        LeaderboardEntry,
        Miss,
        RejectionCount,
        SessionInfo,
        SessionKind,
        SessionState,
        StoredTrial,
        Winner,
    )
    from fa_autotune.database.packs import Pack
    from fa_autotune.database.store import TuningDatabase
    from fa_autotune.database.text import to_json

__all__ = [
    "DatabaseInfo",
    "ImportSummary",
    "LeaderboardEntry",
    "Miss",
    "Pack",
    "RejectionCount",
    "SessionInfo",
    "SessionKind",
    "SessionState",
    "StoredTrial",
    "TuningDatabase",
    "Winner",
    "to_json",
]

_MODULE_BY_NAME = dict.fromkeys(__all__, "entries") | {
    "Pack": "packs",
    "TuningDatabase": "store",
    "to_json": "text",
}


def __getattr__(name: str) -> Any:
    if module := _MODULE_BY_NAME.get(name):
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
