"""The search: proposes candidates, hands them to an Evaluator, keeps every record and confirms the best.

Nothing here knows torch, Triton or a GPU. `docs/tuning.md` describes the strategy for users.
"""

from fa_autotune.tuner.events import (
    ConfirmedWinner,
    ConfirmStarted,
    FaultMet,
    JobFinished,
    JobStarted,
    ProblemFinished,
    ProblemResult,
    ProblemStarted,
    TrialEnded,
    TuneBudget,
    TuneEvent,
    TuneSummary,
)
from fa_autotune.tuner.job import tune

__all__ = [
    "ConfirmStarted",
    "ConfirmedWinner",
    "FaultMet",
    "JobFinished",
    "JobStarted",
    "ProblemFinished",
    "ProblemResult",
    "ProblemStarted",
    "TrialEnded",
    "TuneBudget",
    "TuneEvent",
    "TuneSummary",
    "tune",
]
