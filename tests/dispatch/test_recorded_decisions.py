"""What runs is what ran: decisions on the shipped winners, beside those that were recorded."""

from collections import Counter
from pathlib import Path

import pytest

from fa_autotune.errors import NoKernelError
from kit.recorded_decisions import COMMAND, HEADER, UNSERVED, Asked, Recorder, recorded, told_choice, told_ways

FILE = Path(__file__).with_name("decisions.txt")
HINT = f"where winners or defaults changed, record them anew and read the difference: {COMMAND}"


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def lines() -> list[tuple[Asked, str]]:
    return list(recorded(FILE))


def test_every_origin_and_way_is_recorded(lines: list[tuple[Asked, str]]) -> None:
    counts = Counter((asked.backward, answer.split(" ")[0].rstrip(";")) for asked, answer in lines)
    assert sum(count for (backward, _), count in counts.items() if not backward) >= 500
    assert {answer for backward, answer in counts if not backward} == {"exact", "nearest", "sibling", "default", "none"}
    assert {answer for backward, answer in counts if backward} == {"split", "fused"}
    assert FILE.read_text(encoding="utf-8").splitlines()[: len(HEADER)] == list(HEADER)


def test_decisions_are_as_recorded(recorder: Recorder, lines: list[tuple[Asked, str]]) -> None:
    assert [recorder.answer(asked) for asked, _ in lines] == [answer for _, answer in lines], HINT


def test_choices_are_as_recorded(recorder: Recorder, lines: list[tuple[Asked, str]]) -> None:
    def answer(asked: Asked) -> str:
        dispatcher, problem = recorder.dispatcher(asked.device, asked.triton), asked.problem
        if asked.backward:
            return told_ways(dispatcher.backward_way(problem, unordered=unordered) for unordered in (False, True))
        try:
            choice = dispatcher.choose(problem, ahead=True)
        except NoKernelError:
            return UNSERVED
        return told_choice(choice.origin, choice.stale, choice.candidate)

    assert [answer(asked) for asked, _ in lines] == [answer for _, answer in lines], HINT
