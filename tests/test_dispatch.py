"""Which kernel runs: the order of origins, what counts, and what a process remembers."""

import json
import logging
import random
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.cli import main
from fa_autotune.cli.explain import explain_command
from fa_autotune.config import HopperWsFwdConfig, KernelConfig, PortableFwdConfig, Schedule, TmaFwdConfig
from fa_autotune.constraints import whole_smem_bytes
from fa_autotune.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.dispatch import MAX_REMEMBERED, Decision, Dispatcher, Origin, decide, shape_distance
from fa_autotune.errors import FaAutotuneError, NoKernelError, TemplateError, UnsupportedError
from fa_autotune.misses import MAX_PROBLEMS, MissLog
from fa_autotune.problem import BACKWARD_PASSES, SPLIT_BACKWARD, Access, AttentionProblem, Pass
from fa_autotune.records import Candidate, Regime, Variant
from fa_autotune.render import render
from fa_autotune.snapshot import Snapshot, Source, WinnerRow
from fa_autotune.variants import MIN_TRITON, VARIANTS, default_config, rejection, supported_variants, variant_spec
from tests.strategies import devices, problems

H100, H200, A100, T4 = (KNOWN_DEVICES[name] for name in ("h100", "h200", "a100", "t4"))
TRITON = "3.7.1"
PROBLEM = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
PORTABLE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
TMA = TmaFwdConfig(BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=2)
HOPPER = HopperWsFwdConfig(SCHEDULE=Schedule.PERSISTENT, CONSUMERS=2, BLOCK_N=128)


def variant_of(config: KernelConfig) -> Variant:
    if isinstance(config, HopperWsFwdConfig):
        return Variant.HOPPER_WS
    return Variant.TMA if type(config).__name__.startswith("Tma") else Variant.PORTABLE


def portable_config(problem: AttentionProblem) -> KernelConfig:
    """A config of the portable variant of a problem's pass."""
    if problem.family.kernel_pass is Pass.FWD:
        return PORTABLE
    return default_config(variant_spec(problem.family.kernel_pass, Variant.PORTABLE), problem.family, H200.arch)


def winner(
    problem: AttentionProblem | str = PROBLEM, config: KernelConfig = PORTABLE, device: DeviceSpec = H200, **others: Any
) -> WinnerRow:
    problem = AttentionProblem.parse(problem) if isinstance(problem, str) else problem
    values: dict[str, Any] = {
        "kernel_digest": "today",
        "triton": TRITON,
        "regime": Regime.EVENTS,
        "median_ms": 1.0,
        "confirmed_at": "2026-08-01T12:00:00+00:00",
        "source": Source.USER,
        "path": Path("user.db"),
    }
    return WinnerRow(
        problem=problem,
        candidate=Candidate(family=problem.family, variant=variant_of(config), config=config),
        device_fingerprint=device.fingerprint,
        device_arch=device.arch,
        device_name=device.name,
        **{**values, **others},
    )


def choose(
    problem: AttentionProblem | str, *rows: WinnerRow, device: DeviceSpec = H200, triton: str = TRITON
) -> Decision:
    problem = AttentionProblem.parse(problem) if isinstance(problem, str) else problem
    return decide(
        problem, device=device, triton_version=triton, snapshot=Snapshot(rows=rows), digest_of=lambda candidate: "today"
    )


# --- a variant of one arch --------------------------------------------------------------------------------------------


def test_a_stored_hopper_winner_serves_its_device() -> None:
    row = winner(config=HOPPER, median_ms=0.5)
    decision = choose(PROBLEM, row, winner(config=TMA, median_ms=1.0))
    assert (decision.origin, decision.candidate) == (Origin.EXACT, row.candidate)


@pytest.mark.parametrize(
    ("problem", "device", "triton", "reason"),
    [
        (PROBLEM, KNOWN_DEVICES["b200"], TRITON, r"sm_90's alone, sm_100 has none"),
        (PROBLEM, H200, "3.8.0", r"written for Triton 3\.6 and 3\.7, not 3\.8"),
    ],
)
def test_elsewhere_the_descriptors_winner_serves_and_the_trace_says_why(
    problem: AttentionProblem, device: DeviceSpec, triton: str, reason: str
) -> None:
    rows = [winner(problem, HOPPER, device, median_ms=0.5), winner(problem, TMA, device, median_ms=1.0)]
    decision = choose(problem, *rows, device=device, triton=triton)
    assert decision.candidate == rows[1].candidate
    assert re.search(rf"hopper_ws can't serve this call: .*{reason}", decision.describe())


def test_where_descriptors_cant_read_the_portable_winner_serves() -> None:
    problem = replace(PROBLEM, family=replace(PROBLEM.family, access=Access.ALIGNED))
    rows = [winner(config=HOPPER, median_ms=0.5), winner(config=TMA, median_ms=0.7), winner(median_ms=1.0)]
    decision = choose(problem, *rows)
    assert decision.candidate.variant is Variant.PORTABLE
    assert "hopper_ws can't serve this call: tensor descriptors can't read" in decision.describe()


def test_a_hopper_winner_that_no_longer_passes_is_passed_over() -> None:
    row = winner(config=replace(HOPPER, SCHEDULE=Schedule.SINGLE), median_ms=0.5)
    decision = choose(PROBLEM, row, winner(config=TMA))
    assert decision.candidate.variant is Variant.TMA
    assert "warpgroups: SCHEDULE=single does not go with CONSUMERS=2" in decision.describe()


# --- origins ----------------------------------------------------------------------------------------------------------


def test_winner_of_the_problem_itself_is_exact() -> None:
    row = winner(median_ms=2.5)
    decision = choose(PROBLEM, winner("4x32x8x8192x8192x128,causal", TMA), row)
    assert (decision.origin, decision.row, decision.candidate) == (Origin.EXACT, row, row.candidate)
    assert (decision.median_ms, decision.source, decision.stale) == (2.5, Source.USER, False)


def test_fastest_variant_wins() -> None:
    assert choose(PROBLEM, winner(median_ms=2.0), winner(config=TMA, median_ms=1.0)).candidate.variant is Variant.TMA
    assert (
        choose(PROBLEM, winner(median_ms=1.0), winner(config=TMA, median_ms=2.0)).candidate.variant is Variant.PORTABLE
    )


def test_figures_of_an_older_regime_do_not_compete() -> None:
    older = winner(config=TMA, median_ms=0.1, regime=Regime.GRAPH, confirmed_at="2026-07-01T00:00:00+00:00")
    assert choose(PROBLEM, older, winner()).candidate.variant is Variant.PORTABLE


def test_without_an_exact_winner_the_nearest_shape_serves() -> None:
    near, far = winner("4x32x8x3000x3000x128,causal"), winner("4x32x8x1024x1024x128,causal", TMA)
    decision = choose(PROBLEM, far, near)
    assert (decision.origin, decision.row) == (Origin.NEAREST, near)


def test_fastest_variant_of_the_nearest_shape_serves() -> None:
    shape = "4x32x8x3000x3000x128,causal"
    decision = choose(PROBLEM, winner(shape, median_ms=2.0), winner(shape, TMA, median_ms=1.0))
    assert decision.candidate.variant is Variant.TMA


def test_prefill_is_not_served_by_a_winner_of_decoding() -> None:
    decode = winner("64x32x8x1x8192x128,causal", replace(PORTABLE, BLOCK_M=16, num_warps=1))
    decision = choose("4x32x8x8192x8192x128,causal", decode)
    assert decision.origin is Origin.DEFAULT
    assert "doublings away" in decision.describe()


def test_other_family_never_serves() -> None:
    assert choose(PROBLEM, winner("4x32x8x4096x4096x128,full")).origin is Origin.DEFAULT


def test_same_arch_serves_as_sibling() -> None:
    decision = choose(PROBLEM, winner(device=H100))
    assert decision.origin is Origin.SIBLING
    assert H100.name in decision.describe()


def test_nearest_shape_of_this_device_comes_before_a_sibling() -> None:
    decision = choose(PROBLEM, winner(device=H100), winner("4x32x8x2048x2048x128,causal", TMA))
    assert decision.origin is Origin.NEAREST


def test_sibling_with_the_nearer_shape_serves() -> None:
    near = winner("4x32x8x3000x3000x128,causal", device=H100)
    assert choose(PROBLEM, winner("4x32x8x512x512x128,causal", TMA, H100), near).row == near


def test_sibling_with_the_nearer_sm_count_serves_at_equal_shape() -> None:
    small = replace(H100, name="H100 slice", num_sms=16)
    row = winner(device=H100, median_ms=9.0)
    assert choose(PROBLEM, winner(config=TMA, device=small), row).row == row


@pytest.mark.parametrize("fingerprint", ["sm_90/" + "9" * 400 + "sm/1KB", "sm_90/0sm/1KB", "sm_90/"])
def test_odd_fingerprints_of_siblings_do_no_harm(fingerprint: str) -> None:
    row = replace(winner(), device_fingerprint=fingerprint)
    assert choose(PROBLEM, row).origin is Origin.SIBLING


def test_other_arch_never_serves() -> None:
    assert choose(PROBLEM, winner(device=A100)).origin is Origin.DEFAULT


def test_row_with_this_fingerprint_but_another_arch_never_serves() -> None:
    assert choose(PROBLEM, replace(winner(), device_arch="sm_80")).origin is Origin.DEFAULT


def test_interpreter_and_gpu_never_use_each_others_rows() -> None:
    assert choose(PROBLEM, winner(device=INTERPRETER)).origin is Origin.DEFAULT
    assert choose(PROBLEM, winner(device=H200), device=INTERPRETER).origin is Origin.DEFAULT


@pytest.mark.parametrize("device", [H200, A100])
def test_nothing_known_gives_a_default_that_fits_the_device(device: DeviceSpec) -> None:
    decision = choose(PROBLEM, device=device)
    assert (decision.origin, decision.row, decision.source, decision.median_ms) == (Origin.DEFAULT, None, None, None)
    assert whole_smem_bytes(PROBLEM.family, decision.candidate.config) <= (65536 if device is A100 else 232448)


@pytest.mark.parametrize(("seqlens", "variant"), [("4096x4096", Variant.HOPPER_WS), ("64x4096", Variant.TMA)])
def test_the_default_on_hopper_is_warp_specialised_where_a_tile_fills_up(seqlens: str, variant: Variant) -> None:
    assert choose(f"1x8x8x{seqlens}x128").candidate.variant is variant


@pytest.mark.parametrize("seqlens", ["1x1", "1x4096", "17x33", "4096x1", "33x16"])
def test_tiny_lengths_get_a_smaller_default(seqlens: str) -> None:
    decision = choose(f"1x8x8x{seqlens}x128")
    assert rejection(decision.candidate, decision.problem.shape, H200) is None


def test_what_no_variant_serves_is_an_error_that_says_why() -> None:
    with pytest.raises(NoKernelError, match="bfloat16 matrix products need sm_80"):
        choose(PROBLEM, device=T4)


def test_too_old_a_triton_is_an_error_that_says_so() -> None:
    with pytest.raises(NoKernelError, match=r"needs Triton 3\.6"):
        choose(PROBLEM, triton="3.5.0")


@pytest.mark.parametrize("version", ["nightly", "9" * 5000 + ".0"], ids=["word", "huge"])
def test_unreadable_triton_version_is_an_error(version: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{version}'"):
        choose(PROBLEM, triton=version)


# --- the ladder within an origin --------------------------------------------------------------------------------------

LADDER: list[dict[str, Any]] = [
    {"source": Source.USER},
    {"source": Source.PACK},
    {"source": Source.USER, "kernel_digest": "yesterday"},
    {"source": Source.PACK, "kernel_digest": "yesterday"},
]


@pytest.mark.parametrize("first", range(len(LADDER)))
@pytest.mark.parametrize(
    "problem", [PROBLEM, AttentionProblem.parse("4x32x8x4000x4000x128,causal")], ids=["exact", "near"]
)
def test_ladder_is_user_fresh_pack_fresh_user_stale_pack_stale(problem: AttentionProblem, first: int) -> None:
    # The lower a rung, the faster its row: speed must not decide between rungs.
    rows = [winner(median_ms=4.0 - number, **rung) for number, rung in enumerate(LADDER)][first:]
    decision = choose(problem, *rows)
    assert (decision.row, decision.stale) == (rows[0], first >= 2)


def test_nearer_shape_comes_before_a_better_rung() -> None:
    pack = winner("4x32x8x3000x3000x128,causal", source=Source.PACK)
    assert choose(PROBLEM, winner("4x32x8x512x512x128,causal"), pack).row == pack


def test_exact_stale_winner_comes_before_the_nearest_fresh_one() -> None:
    stale = winner(triton="3.6.0")
    assert choose(PROBLEM, winner("4x32x8x4000x4000x128,causal"), stale).row == stale


def test_other_triton_makes_a_row_stale_and_is_told() -> None:
    decision = choose(PROBLEM, winner(triton="3.6.0"))
    assert decision.stale
    assert "measured with Triton 3.6.0, this is 3.7.1" in decision.describe()


def test_local_part_of_the_triton_version_makes_no_row_stale() -> None:
    assert not choose(PROBLEM, winner(triton="3.7.1+gitabc")).stale


def test_changed_template_makes_a_row_stale_and_is_told() -> None:
    decision = choose(PROBLEM, winner(kernel_digest="yesterday"))
    assert decision.stale
    assert "its template changed" in decision.trace[-1]


def test_kernel_that_no_longer_renders_is_stale_and_does_not_raise() -> None:
    def broken(candidate: Candidate) -> str:
        raise TemplateError("gone")

    snapshot = Snapshot(rows=(winner(),))
    decision = decide(PROBLEM, device=H200, triton_version=TRITON, snapshot=snapshot, digest_of=broken)
    assert decision.stale


# --- access -----------------------------------------------------------------------------------------------------------


def test_aligned_call_uses_a_portable_winner_of_tma_access_as_exact() -> None:
    decision = choose("4x32x8x4096x4096x128,causal,aligned", winner(), winner(config=TMA, median_ms=0.5))
    assert (decision.origin, decision.candidate.variant) == (Origin.EXACT, Variant.PORTABLE)
    assert decision.candidate.family.access is Access.ALIGNED


def test_tma_call_uses_a_portable_winner_of_aligned_access_as_exact() -> None:
    decision = choose(PROBLEM, winner("4x32x8x4096x4096x128,causal,aligned"))
    assert (decision.origin, decision.candidate.family) == (Origin.EXACT, PROBLEM.family)


def test_call_with_any_access_uses_a_portable_winner_as_nearest() -> None:
    decision = choose("4x32x8x4096x4096x128,causal,any", winner(config=TMA, median_ms=0.5), winner())
    assert (decision.origin, decision.candidate.variant) == (Origin.NEAREST, Variant.PORTABLE)
    assert decision.candidate.family.access is Access.ANY


def test_trace_says_why_a_variant_cannot_serve() -> None:
    assert "tensor descriptors can't read" in choose("1x8x8x512x512x128,any").describe()


# --- what counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        replace(PORTABLE, BLOCK_M=256, BLOCK_N=256),  # registers
        replace(PORTABLE, num_warps=16, BLOCK_M=256),  # not in the search space
        replace(PORTABLE, HEADS_PER_GROUP=64),  # not in the search space
        replace(PORTABLE, maxnreg=24),
        replace(PORTABLE, BLOCK_M=16),  # under 16 rows per warp
    ],
)
@pytest.mark.parametrize("source", Source)
def test_config_outside_todays_constraints_is_never_used(config: PortableFwdConfig, source: Source) -> None:
    decision = choose(PROBLEM, winner(config=config, median_ms=1e-9, source=source))
    assert decision.origin is Origin.DEFAULT
    assert "can't run here" in decision.describe()


def test_hundreds_of_unusable_rows_make_a_short_trace() -> None:
    bad = replace(PORTABLE, BLOCK_M=16)
    rows = [winner(replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=4096 + n)), bad) for n in range(300)]
    assert len(choose(PROBLEM, *rows).trace) < 10


def test_exact_lengths_are_kept_where_they_divide() -> None:
    row = winner(config=replace(PORTABLE, EXACT_LENGTHS=True))
    assert choose("4x32x8x2048x2048x128,causal", row).candidate.config.EXACT_LENGTHS


def test_exact_lengths_are_turned_off_on_a_ragged_shape_and_this_is_told() -> None:
    decision = choose("4x32x8x4001x4001x128,causal", winner(config=replace(PORTABLE, EXACT_LENGTHS=True)))
    assert (decision.origin, decision.candidate.config) == (Origin.NEAREST, PORTABLE)
    assert "EXACT_LENGTHS is turned off" in decision.describe()


def test_exact_lengths_that_do_not_divide_their_own_shape_are_never_used() -> None:
    row = winner("4x32x8x4001x4001x128,causal", replace(PORTABLE, EXACT_LENGTHS=True))
    assert choose("4x32x8x4001x4001x128,causal", row).origin is Origin.DEFAULT


@pytest.mark.parametrize("kernel_pass", SPLIT_BACKWARD)
def test_a_backward_is_served_by_winners_of_its_own_pass(kernel_pass: Pass) -> None:
    call = PROBLEM.for_pass(kernel_pass)
    own = winner(call, portable_config(call), median_ms=9.0)
    assert choose(call, winner()).origin is Origin.DEFAULT
    assert choose(call, winner(), own).row == own
    assert choose(PROBLEM, winner(), own).row == winner()


def test_dk_and_dv_are_near_where_their_keys_have_as_many_queries() -> None:
    """Their programs own keys and loop over queries: as the forward does with the two exchanged."""
    few, many = "4x8x8x512x4096x64", "4x8x8x8192x4096x64"
    exchanged_few, exchanged_many = "4x8x8x4096x512x64", "4x8x8x4096x8192x64"
    dkdv = [AttentionProblem.parse(f"{text},bwd_dkdv") for text in (few, many)]
    forward = [AttentionProblem.parse(text) for text in (exchanged_few, exchanged_many)]
    assert shape_distance(*dkdv, 132) == shape_distance(*forward, 132) > 0


# --- properties -------------------------------------------------------------------------------------------------------


def served(**limits: int) -> st.SearchStrategy[AttentionProblem]:
    """Problems that some kernel serves on every device: a fused backward has one on Hopper, and for some families."""
    fused_only = (Pass.BWD_FUSED, Pass.BWD_POSTPROCESS)
    return problems(**limits).filter(lambda problem: problem.family.kernel_pass not in fused_only)


@st.composite
def databases(draw: st.DrawFn, problem: AttentionProblem) -> list[WinnerRow]:
    """Winners of this problem's and of other families on any device, with any config of the space."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        other = draw(served())
        access = st.just(problem.family.access)
        if other.family.access is not Access.ANY:
            access = st.sampled_from([problem.family.access, Access.ANY])
        family = draw(st.sampled_from([problem.family, other.family, replace(problem.family, access=draw(access))]))
        shape = draw(st.sampled_from([problem.shape, other.shape]))
        spec = draw(st.sampled_from([spec for spec in VARIANTS if spec.kernel_pass is family.kernel_pass]))
        rows.append(
            winner(
                AttentionProblem(family=family, shape=shape),
                spec.config(**{knob.name: draw(st.sampled_from(knob.values)) for knob in spec.knobs}),
                draw(st.sampled_from([H100, H200, A100, INTERPRETER])),
                median_ms=draw(st.sampled_from([0.5, 1.0, 2.0])),
                **draw(st.sampled_from(LADDER)),
            )
        )
    return rows


@given(st.data(), served(), st.one_of(devices(), st.just(INTERPRETER)))
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


@given(st.data(), served(), st.randoms(use_true_random=False))
def test_order_of_rows_never_matters(data: st.DataObject, problem: AttentionProblem, shuffler: random.Random) -> None:
    rows = data.draw(databases(problem))
    first = choose(problem, *rows)
    shuffler.shuffle(rows)
    assert choose(problem, *rows) == first


@given(served(max_seqlen=512), st.lists(served(max_seqlen=512), max_size=5))
def test_nearest_of_a_tuned_problem_is_itself(problem: AttentionProblem, others: list[AttentionProblem]) -> None:
    rows = [winner(replace(other, family=problem.family), portable_config(problem)) for other in [*others, problem]]
    decision = choose(problem, *rows)
    if rejection(rows[-1].candidate, problem.shape, H200) is None:
        assert decision.row is not None
        assert decision.row.problem == problem


@given(served(), served())
def test_distance_is_symmetric_and_zero_to_itself(first: AttentionProblem, second: AttentionProblem) -> None:
    assert shape_distance(first, first, 132) == 0.0
    assert shape_distance(first, second, 132) == shape_distance(second, first, 132) >= 0.0


# --- a process --------------------------------------------------------------------------------------------------------


def dispatcher(
    *rows: WinnerRow, device: DeviceSpec = H200, store: Callable[[Mapping[AttentionProblem, int]], None] | None = None
) -> Dispatcher:
    return Dispatcher(
        device=device,
        triton_version=TRITON,
        load=lambda: Snapshot(rows=rows),
        digest_of=lambda candidate: "today",
        store_misses=store or (lambda misses: None),
    )


@given(served(), served())
def test_two_problems_never_share_what_is_remembered(first: AttentionProblem, second: AttentionProblem) -> None:
    remembering = dispatcher(device=INTERPRETER)
    for problem in (first, second, first):
        assert remembering.decide(problem).problem == problem


def test_a_problem_is_decided_once() -> None:
    remembering = dispatcher(winner())
    assert remembering.decide(PROBLEM) is remembering.decide(AttentionProblem.from_key(PROBLEM.key))


def test_databases_are_read_once_and_only_on_the_first_decision() -> None:
    loads: list[int] = []

    def load() -> Snapshot:
        loads.append(1)
        return Snapshot(rows=(winner(),))

    lazy = Dispatcher(device=H200, triton_version=TRITON, load=load, digest_of=None, store_misses=lambda misses: None)
    assert not loads
    lazy.decide(PROBLEM)
    lazy.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    assert len(loads) == 1


def test_no_database_is_opened_after_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = Dispatcher(
        device=H200, triton_version=TRITON, digest_of=lambda candidate: "today", store_misses=lambda misses: None
    )
    assert remembering.snapshot.rows is not None

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a database was opened")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert remembering.decide(PROBLEM).candidate.family == PROBLEM.family


def test_eight_threads_start_one_dispatcher_cold() -> None:
    loads: list[int] = []
    start = threading.Barrier(8)

    def load() -> Snapshot:
        loads.append(1)
        return Snapshot(rows=(winner(),))

    shared = Dispatcher(device=H200, triton_version=TRITON, load=load, digest_of=None, store_misses=lambda misses: None)

    def work(_: int) -> Decision:
        start.wait(timeout=60)
        return shared.decide(PROBLEM)

    with ThreadPoolExecutor(8) as threads:
        decisions = list(threads.map(work, range(8)))
    assert len(loads) == 1
    assert len({id(decision) for decision in decisions}) == 1


def test_memory_of_decisions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.dispatch.MAX_REMEMBERED", 4)
    remembering = dispatcher()
    for length in range(1, 20):
        remembering.decide(replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=length)))
    assert len(remembering._remembered) == 4
    assert MAX_REMEMBERED > 1000


def test_a_problem_that_no_variant_serves_fails_the_same_way_again() -> None:
    turing = dispatcher(device=T4)
    messages = set()
    for _ in range(2):
        with pytest.raises(NoKernelError) as caught:
            turing.decide(PROBLEM)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_default_is_told_once_with_the_command_that_tunes(caplog: pytest.LogCaptureFixture) -> None:
    untuned = dispatcher()
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        untuned.decide(PROBLEM)
        untuned.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    (record,) = caplog.records
    assert "fa-autotune tune --missed" in record.getMessage()


def test_stale_winner_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stale = dispatcher(winner(triton="3.6.0"), winner("4x32x8x64x64x128,causal", triton="3.6.0"))
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        stale.decide(PROBLEM)
        stale.decide(AttentionProblem.parse("4x32x8x64x64x128,causal"))
    (record,) = caplog.records
    assert "measured with Triton 3.6.0" in record.getMessage()


def test_unreadable_databases_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    noted = Dispatcher(
        device=INTERPRETER,
        triton_version=TRITON,
        load=lambda: Snapshot(rows=(), notes=("x.db is not used",)),
        digest_of=None,
    )
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        noted.decide(PROBLEM)
        noted.decide(AttentionProblem.parse("1x8x8x512x512x64"))
    assert [record.getMessage() for record in caplog.records] == ["tuning databases: x.db is not used"]


def test_tuned_problem_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        dispatcher(winner()).decide(PROBLEM)
    assert not caplog.records


# --- misses -----------------------------------------------------------------------------------------------------------


def test_what_is_not_exact_counts_as_a_miss() -> None:
    counting = dispatcher(winner())
    near = AttentionProblem.parse("4x32x8x4000x4000x128,causal")
    for problem in (PROBLEM, near, near):
        counting.decide(problem)
    assert counting.misses == {near: 2}


def test_flushed_misses_are_stored_and_forgotten() -> None:
    stored: list[dict[AttentionProblem, int]] = []
    counting = dispatcher(store=lambda misses: stored.append(dict(misses)))
    counting.decide(PROBLEM)
    assert (counting.flush_misses(), counting.flush_misses()) == (1, 0)
    assert stored == [{PROBLEM: 1}]


def test_misses_survive_a_store_that_fails() -> None:
    def failing(misses: Mapping[AttentionProblem, int]) -> None:
        raise OSError("read-only")

    log = MissLog(failing, at_exit=lambda flush: None)
    log.add(PROBLEM)
    with pytest.raises(OSError, match="read-only"):
        log.flush()
    assert log.counts == {PROBLEM: 1}


def test_interpreter_counts_no_misses() -> None:
    interpreting = dispatcher(device=INTERPRETER)
    interpreting.decide(PROBLEM)
    assert interpreting.misses == {}


def test_failure_at_exit_is_told_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def failing(misses: Mapping[AttentionProblem, int]) -> None:
        raise OSError("read-only")

    at_exit: list[Callable[[], None]] = []
    log = MissLog(failing, at_exit=at_exit.append)
    log.add(PROBLEM)
    log.add(PROBLEM)
    (flush,) = at_exit
    with caplog.at_level(logging.INFO, "fa_autotune"):
        flush()
    assert "not recorded: read-only" in caplog.text


def test_a_fork_stores_nothing_at_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[object] = []
    at_exit: list[Callable[[], None]] = []
    log = MissLog(stored.append, at_exit=at_exit.append)
    log.add(PROBLEM)
    monkeypatch.setattr("os.getpid", lambda: -1)
    at_exit[0]()
    assert not stored


def test_misses_in_memory_are_bounded() -> None:
    log = MissLog(lambda misses: None, at_exit=lambda flush: None)
    for length in range(1, MAX_PROBLEMS + 10):
        log.add(replace(PROBLEM, shape=replace(PROBLEM.shape, seqlen_k=length)))
    assert len(log.counts) == MAX_PROBLEMS


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(explain_command, list(arguments), standalone_mode=False)


@pytest.fixture
def no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_autotune.cli.explain.pack_paths", list)


def test_description_names_kernel_origin_and_reason() -> None:
    text = choose("4x32x8x4000x4000x128,causal", winner(source=Source.PACK, path=Path("nvidia_h200.db"))).describe()
    for expected in ("portable 64x64 w4 s3", "nearest, fresh row of nvidia_h200.db (pack)", "1 ms on 4×32×8×4096×4096"):
        assert expected in text


def test_decision_as_json_is_plain_values() -> None:
    values = choose(PROBLEM, winner()).as_json()
    assert json.loads(json.dumps(values)) == values
    assert (values["origin"], values["config"]["BLOCK_M"], values["row"]["device"]) == ("exact", 64, H200.name)


@pytest.mark.usefixtures("no_packs")
def test_explain_prints_a_decision_for_a_named_gpu() -> None:
    assert "origin  default, untuned" in explain("--problem", "1x8x8x512x512x64", "--device", "h200").output


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_explain_prints_the_call_that_shows_the_kernel(device: str) -> None:
    problem = "1x8x8x512x512x64"
    (call,) = [
        line.split(maxsplit=1)[1]
        for line in explain("--problem", problem, "--device", device).output.splitlines()
        if line.startswith("  source  ")
    ]
    command, *words = shlex.split(call)
    rendered = CliRunner().invoke(main, words)
    decision = choose(problem, device=KNOWN_DEVICES[device])
    assert (command, rendered.output) == ("fa-autotune", render(decision.candidate).text)


@pytest.mark.usefixtures("no_packs")
@pytest.mark.parametrize("kernel_pass", BACKWARD_PASSES)
def test_explain_knows_every_pass(kernel_pass: Pass) -> None:
    output = explain("--problem", f"1x8x8x512x512x64,{kernel_pass}", "--device", "h200").output
    assert output.startswith(f"{kernel_pass} bf16 d64 full")


def test_explain_prints_one_json_document() -> None:
    values = json.loads(explain("--problem", "1x8x8x512x512x64", "--device", "A100", "--json").output)
    assert (values["device"], values["origin"], values["variant"]) == (A100.name, "default", "portable")


@pytest.mark.usefixtures("no_packs")
def test_explain_decides_for_the_triton_it_is_told() -> None:
    failed = explain("--problem", "1x8x8x512x512x64", "--device", "h200", "--triton", "3.5.1")
    assert isinstance(failed.exception, NoKernelError)


def test_explain_names_a_database_that_is_not_there() -> None:
    failed = explain("--problem", "1x8x8x512x512x64", "--device", "h200", "--db", "/nonexistent.db")
    assert "/nonexistent.db" in str(failed.exception)


def test_explain_without_a_gpu_says_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(index: int = 0) -> DeviceSpec:
        raise FaAutotuneError("no GPU")

    monkeypatch.setattr("fa_autotune.launch.live_device", absent)
    assert "--device t4 |" in str(explain("--problem", "1x8x8x512x512x64").exception)


def test_importing_dispatch_loads_neither_torch_nor_the_writers_of_databases_and_kernels() -> None:
    heavy = ("torch", "triton", "optuna", "jinja2", "sqlite_utils", "click")
    script = f"import sys, fa_autotune.dispatch; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_example_of_the_page_runs(checkout: Path) -> None:
    page = (checkout / "docs" / "dispatch.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=checkout, check=True)
    assert done.stdout.startswith("fwd bf16 d128 causal 4×32×8×4096×4096")
