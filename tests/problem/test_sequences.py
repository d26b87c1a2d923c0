"""Sequences one after another: where their rows lie."""

from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.problem.sequences import Sequences


def test_sequences_say_where_they_lie() -> None:
    found = Sequences(lengths_q=(2, 0, 3), lengths_k=(1, 4, 0), unused_q=2)
    assert (found.total_q, found.total_k) == (7, 5)
    assert (found.starts_q, found.starts_k) == ([0, 2, 2, 5], [0, 1, 5, 5])
    assert list(found.rows()) == [
        (slice(0, 2), slice(0, 1)),
        (slice(2, 2), slice(1, 5)),
        (slice(2, 5), slice(5, 5)),
    ]


def test_equal_sequences_have_the_lengths_of_a_shape_and_leave_no_row_over() -> None:
    found = Sequences.equal(AttentionProblem.parse("3x4x2x5x7x64,varlen").shape)
    assert (found.lengths_q, found.lengths_k) == ((5, 5, 5), (7, 7, 7))
    assert (found.total_q, found.total_k) == (15, 21)
    assert list(found.rows())[-1] == (slice(10, 15), slice(14, 21))
