"""The search: proposes candidates, hands them to an Evaluator, keeps every record and confirms the best.

Nothing here knows torch, Triton or a GPU. `docs/tuning.md` describes the strategy for users.
"""

from fa_autotune.tuner.events import (
    ConfirmedWinner,
    ConfirmStarted,
    JobFinished,
    ProblemFinished,
    ProblemResult,
    ProblemStarted,
    TrialEnded,
    TuneBudget,
    TuneEvent,
    TuneSummary,
)
from fa_autotune.tuner.job import kernel_digest, tune

__all__ = [
    "ConfirmStarted",
    "ConfirmedWinner",
    "JobFinished",
    "ProblemFinished",
    "ProblemResult",
    "ProblemStarted",
    "TrialEnded",
    "TuneBudget",
    "TuneEvent",
    "TuneSummary",
    "kernel_digest",
    "tune",
]
