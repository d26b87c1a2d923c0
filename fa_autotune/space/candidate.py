"""What may be tried on a problem: a family, a variant and its config."""

from dataclasses import dataclass
from enum import StrEnum

from fa_autotune.problem.family import AttentionFamily, KeepsHash
from fa_autotune.space.config import KernelConfig


class Variant(StrEnum):
    """Which template realises a pass."""

    PORTABLE = "portable"
    TMA = "tma"
    HOPPER_WS = "hopper_ws"
    HOPPER_WIDE = "hopper_wide"

    @property
    def is_gluon(self) -> bool:
        """Whether warps, barriers and asynchronous products were placed by hand."""
        return self in (Variant.HOPPER_WS, Variant.HOPPER_WIDE)


class CompileForm(StrEnum):
    """What the compiler may assume: `aligned` = pointers and strides keep the 16-byte rules, the last stride is 1."""

    ALIGNED = "aligned"
    GENERAL = "general"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(KeepsHash):
    """One config of one variant of a family: what is rendered and compiled."""

    family: AttentionFamily
    variant: Variant
    config: KernelConfig

    __hash__ = KeepsHash.__hash__
