"""Entries as plain JSON values, for people and for diffs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from fa_autotune.database.entries import JSON
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionProblem


def to_json(value: object) -> JSON:
    """Plain values of an entry. A problem is the object that its key holds; a figure that is not finite is null."""
    if isinstance(value, AttentionProblem | AttentionFamily):
        return dict(json.loads(value.key))
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    if is_dataclass(value):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
