"""What is published holds of what ships."""

import json
from pathlib import Path

import pytest

from fa_autotune.dispatch.decision import Origin
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import load_snapshot
from fa_autotune.paths import pack_paths
from fa_autotune.problem.device import known_device
from fa_autotune.problem.problem import AttentionProblem

RESULTS = [  # those of kernels, tuned
    path
    for path in sorted((Path(__file__).parents[2] / "docs/results").glob("*.json"))
    if "untuned" not in path.stem and "rows" in json.loads(path.read_text())
]


@pytest.fixture(scope="module")
def shipped() -> Dispatcher:
    """Decisions of a fresh installation on the H200, with the Triton that the packs were measured with."""
    return Dispatcher(
        device=known_device("h200"), triton_version="3.6.0", load=lambda: load_snapshot(Path("none"), pack_paths())
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_published_shape_has_a_fresh_winner_in_the_pack(path: Path, shipped: Dispatcher) -> None:
    published = json.loads(path.read_text())
    calls = {AttentionProblem.from_key(row["problem"]) for row in published["rows"]}
    assert len(calls) >= 8
    for call in calls:
        for problem in shipped.backward(call) if published.get("backward") else (call,):
            decision = shipped.peek(problem)
            assert (decision.origin, decision.stale) == (Origin.EXACT, False), problem.label
