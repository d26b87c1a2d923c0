"""The tuning database: one SQLite file of trials, measurements and winners. The only door to sqlite_utils.

`store` has the verbs; `entries` what goes in and out; `rows` what a row may hold; `migrations` the schema;
`connection` how a file is opened; `writing` and `packs` how rows get into a database.
"""

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
from fa_autotune.database.store import TuningDatabase
from fa_autotune.database.text import to_json

__all__ = [
    "DatabaseInfo",
    "ImportSummary",
    "LeaderboardEntry",
    "Miss",
    "RejectionCount",
    "SessionInfo",
    "SessionKind",
    "SessionState",
    "StoredTrial",
    "TuningDatabase",
    "Winner",
    "to_json",
]
