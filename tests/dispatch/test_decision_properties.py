"""What holds of every decision, whatever databases hold."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.dispatch.decision import MAX_DISTANCE, Choice, FamilyChoices, Origin, decide
from fa_autotune.dispatch.winners import Snapshot, WinnerRow
from fa_autotune.errors import NoKernelError
from fa_autotune.problem.device import INTERPRETER, DeviceSpec
from fa_autotune.problem.distance import shape_distance
from fa_autotune.problem.family import Access
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.config import KernelConfig
from fa_autotune.space.registry import VARIANTS, compile_form, rejection, supported_variants, variant_spec
from fa_autotune.space.support import MIN_TRITON
from kit.strategies import devices, fitting, problems, served_everywhere
from kit.winners import A100, H100, H200, LADDER, TRITON, choose, dispatcher, plain_config, winner


@st.composite
def configs(draw: st.DrawFn, problem: AttentionProblem) -> KernelConfig:
    """Any config of the space, or one that may well run."""
    if draw(st.booleans()):
        plain = plain_config(problem)
        is_exact = hasattr(plain, "EXACT_LENGTHS") and draw(st.booleans())
        return replace(plain, EXACT_LENGTHS=True) if is_exact else plain  # type: ignore[arg-type]
    spec = draw(st.sampled_from([spec for spec in VARIANTS if spec.kernel_pass is problem.family.kernel_pass]))
    return spec.config(**{knob.name: draw(st.sampled_from(knob.values)) for knob in spec.knobs})


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
        rows.append(
            winner(
                fitting(family, shape),
                draw(configs(fitting(family, shape))),
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


def answer(choose: Callable[[AttentionShape], Choice], shape: AttentionShape) -> tuple[object, ...]:
    try:
        found = choose(shape)
    except NoKernelError as error:
        return (str(error),)
    return found.candidate, found.origin, found.source, found.stale, found.median_ms, found.row


@given(st.data(), problems(max_seqlen=8192), st.sampled_from([H100, H200, A100, INTERPRETER]))
def test_a_choice_is_the_decision_whatever_was_asked_before(
    data: st.DataObject, problem: AttentionProblem, device: DeviceSpec
) -> None:
    rows = data.draw(databases(problem))
    how: dict[str, Any] = {
        "device": device,
        "digest_of": lambda candidate: "today",
        "snapshot": Snapshot(rows=tuple(rows)),
    }
    how["triton_version"] = data.draw(st.sampled_from([TRITON, "3.6.0"]))
    choices = FamilyChoices(problem.family, **how)
    lengths = st.sampled_from([1, 16, 31, 32, 64, 100, 128, 4096])
    for _ in range(3):
        shape = data.draw(st.sampled_from([problem.shape, *(row.problem.shape for row in rows)]))
        if data.draw(st.booleans()):
            shape = replace(shape, seqlen_q=data.draw(lengths), seqlen_k=data.draw(lengths))
        shape = fitting(problem.family, shape).shape
        alone = answer(lambda shape: decide(AttentionProblem(family=problem.family, shape=shape), **how), shape)
        assert answer(choices.choose, shape) == answer(choices.decide, shape) == alone
        assert choices.serves(shape) is (len(alone) > 1)
        exact = choices.find_exact(shape)
        assert (exact is not None) is (Origin.EXACT in alone)
        assert exact is None or exact is choices.choose(shape)


def may_run(row: WinnerRow, problem: AttentionProblem, *, is_exact: bool) -> bool:
    candidate = replace(row.candidate, family=problem.family)
    rejected = rejection(candidate, problem.shape, H200)
    if rejected and rejected.constraint == "exact_lengths" and not is_exact:
        config = replace(candidate.config, EXACT_LENGTHS=False)  # type: ignore[arg-type]
        rejected = rejection(replace(candidate, config=config), problem.shape, H200)
    return rejected is None


@given(st.data(), served_everywhere(max_seqlen=8192))
def test_no_winner_that_may_run_is_nearer_than_the_chosen_one(data: st.DataObject, problem: AttentionProblem) -> None:
    snapshot = Snapshot(rows=tuple(data.draw(databases(problem))))
    served = {spec.variant for spec in supported_variants(problem.family, H200.arch, (3, 7))}
    places: dict[int, tuple[int, float]] = {}
    for row in snapshot.related(problem.family):
        same_form = compile_form(row.problem.family) is compile_form(problem.family)
        far = shape_distance(problem, row.problem, H200.num_sms) + (not same_form)
        is_here = row.device_fingerprint == H200.fingerprint
        is_exact = is_here and same_form and row.problem.shape == problem.shape
        if row.candidate.variant not in served or row.device_arch != H200.arch or far > MAX_DISTANCE:
            continue
        if may_run(row, problem, is_exact=is_exact):
            origin = Origin.EXACT if is_exact else Origin.NEAREST if is_here else Origin.SIBLING
            places[id(row)] = list(Origin).index(origin), far
    chosen = choose(problem, *snapshot.rows).row
    assert (chosen is None) is (not places)
    assert chosen is None or places[id(chosen)] == min(places.values())


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
