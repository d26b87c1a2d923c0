"""What holds of every decision, whatever databases hold."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.dispatch.winners import WinnerRow
from fa_autotune.errors import NoKernelError
from fa_autotune.problem.device import INTERPRETER, DeviceSpec
from fa_autotune.problem.family import Access
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.registry import VARIANTS, rejection, supported_variants, variant_spec
from fa_autotune.space.support import MIN_TRITON
from kit.strategies import devices, fitting, served_everywhere
from kit.winners import A100, H100, H200, LADDER, choose, dispatcher, plain_config, winner


@st.composite
def databases(draw: st.DrawFn, problem: AttentionProblem) -> list[WinnerRow]:
    """Winners of this problem's and of other families on any device, with any config of the space."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        other = draw(served_everywhere())
        access = st.just(problem.family.access)
        if other.family.access is not Access.ANY:
            access = st.sampled_from([problem.family.access, Access.ANY])
        family = draw(st.sampled_from([problem.family, other.family, replace(problem.family, access=draw(access))]))
        shape = draw(st.sampled_from([problem.shape, other.shape]))
        spec = draw(st.sampled_from([spec for spec in VARIANTS if spec.kernel_pass is family.kernel_pass]))
        rows.append(
            winner(
                fitting(family, shape),
                spec.config(**{knob.name: draw(st.sampled_from(knob.values)) for knob in spec.knobs}),
                draw(st.sampled_from([H100, H200, A100, INTERPRETER])),
                median_ms=draw(st.sampled_from([0.5, 1.0, 2.0])),
                **draw(st.sampled_from(LADDER)),
            )
        )
    return rows


@given(st.data(), served_everywhere(), st.one_of(devices(), st.just(INTERPRETER)))
def test_a_decision_always_passes_its_own_constraints(
    data: st.DataObject, problem: AttentionProblem, device: DeviceSpec
) -> None:
    rows = data.draw(databases(problem))
    served = supported_variants(problem.family, device.arch, MIN_TRITON)
    try:
        decision = choose(problem, *rows, device=device, triton="3.6.0")
    except NoKernelError:
        assert not served
        return
    candidate = decision.candidate
    assert candidate.family == problem.family
    assert variant_spec(problem.family.kernel_pass, candidate.variant) in served
    assert rejection(candidate, problem.shape, device) is None


@given(st.data(), served_everywhere(), st.randoms(use_true_random=False))
def test_order_of_rows_never_matters(data: st.DataObject, problem: AttentionProblem, shuffler: random.Random) -> None:
    rows = data.draw(databases(problem))
    first = choose(problem, *rows)
    shuffler.shuffle(rows)
    assert choose(problem, *rows) == first


@given(served_everywhere(max_seqlen=512), st.lists(served_everywhere(max_seqlen=512), max_size=5))
def test_nearest_of_a_tuned_problem_is_itself(problem: AttentionProblem, others: list[AttentionProblem]) -> None:
    rows = [winner(fitting(problem.family, other.shape), plain_config(problem)) for other in [*others, problem]]
    decision = choose(problem, *rows)
    if rejection(rows[-1].candidate, problem.shape, H200) is None:
        assert decision.row is not None
        assert decision.row.problem == problem


@given(served_everywhere(), served_everywhere())
def test_two_problems_never_share_what_is_remembered(first: AttentionProblem, second: AttentionProblem) -> None:
    remembering = dispatcher(device=INTERPRETER)
    for problem in (first, second, first):
        assert remembering.decide(problem).problem == problem
