"""Sequences of any lengths, one after another in the rows of one tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from fa_autotune.problem.problem import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """How many queries and keys each sequence has; `unused_q` and `unused_k`: rows after the last one's, of none."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    unused_q: int = 0
    unused_k: int = 0

    @classmethod
    def equal(cls, shape: AttentionShape) -> Self:
        """As many sequences as a shape's batch, all of its lengths."""
        return cls(
            lengths_q=(shape.seqlen_q,) * shape.batch_size,
            lengths_k=(shape.seqlen_k,) * shape.batch_size,
        )

    @property
    def total_q(self) -> int:
        """Rows of q, the unused ones too."""
        return sum(self.lengths_q) + self.unused_q

    @property
    def total_k(self) -> int:
        """Rows of k and v, the unused ones too."""
        return sum(self.lengths_k) + self.unused_k

    @property
    def starts_q(self) -> list[int]:
        """The first row of each sequence in q, and the end of the last one: cu_seqlens_q."""
        return _starts(self.lengths_q)

    @property
    def starts_k(self) -> list[int]:
        """The same in k and v: cu_seqlens_k."""
        return _starts(self.lengths_k)

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """Each sequence's rows of q, and of k and v."""
        for one, other in zip(pairwise(self.starts_q), pairwise(self.starts_k), strict=True):
            yield slice(*one), slice(*other)


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))
