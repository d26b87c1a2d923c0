"""Lists of names in generated code: what they are made of, and on which lines they stand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.kernels.layout import Names, call, each, lines, names

listed = st.lists(st.text("abc_", min_size=1, max_size=12), min_size=1, max_size=30)


def test_names_take_lists_apart_and_leave_out_what_is_empty() -> None:
    assert names("q", ("k", ["v"]), (), "lse") == ("q", "k", "v", "lse")


def test_names_stand_in_text_with_commas() -> None:
    assert f"{names('q', 'k')}" == "q, k"
    assert str(names()) == ""


def test_each_numbers_the_pieces() -> None:
    assert each("acc", [object(), object()]) == Names(("acc_0", "acc_1"))


@given(given=listed, room=st.integers(20, 60))
def test_lines_hold_every_name_in_order_and_keep_their_room(given: list[str], room: int) -> None:
    text = lines(given, room)
    assert text.replace(",\n", ", ").split(", ") == given
    assert all(len(line.removesuffix(",")) <= room for line in text.split("\n"))


@given(given=listed, room=st.integers(20, 60))
def test_lines_are_as_few_as_they_can_be(given: list[str], room: int) -> None:
    rows = lines(given, room).split("\n")
    for row, after in pairwise(rows):
        assert len(f"{row} {after.split(',')[0]}") > room


@pytest.mark.parametrize(("room", "text"), [(12, "go(one, two)"), (11, "go(\n    one,\n    two,\n)")])
def test_a_call_stands_on_one_line_where_that_holds_it(room: int, text: str) -> None:
    assert call("go", ["one", "two"], room) == text
