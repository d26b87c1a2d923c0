"""Which kernel runs: the order of origins, and what counts."""

import re
from dataclasses import replace
from typing import Any

import pytest

from fa_autotune.dispatch.decision import Decision, Origin, decide
from fa_autotune.dispatch.winners import Snapshot, Source, StoppedKernel, WinnerRow
from fa_autotune.errors import NoKernelError, TemplateError, UnsupportedError
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import Access
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import PortableFwdConfig, Schedule
from fa_autotune.space.estimates import whole_smem_bytes
from fa_autotune.space.registry import rejection
from kit.winners import (
    A100,
    H100,
    H200,
    HOPPER,
    LADDER,
    PORTABLE,
    PROBLEM,
    T4,
    TMA,
    TRITON,
    choose,
    plain_config,
    winner,
)

# --- a variant of one arch --------------------------------------------------------------------------------------------


def test_a_stored_hopper_winner_serves_its_device() -> None:
    row = winner(config=HOPPER, median_ms=0.5)
    decision = choose(PROBLEM, row, winner(config=TMA, median_ms=1.0))
    assert (decision.origin, decision.candidate) == (Origin.EXACT, row.candidate)


def test_elsewhere_the_descriptors_winner_serves_and_the_trace_says_why() -> None:
    device = KNOWN_DEVICES["b200"]
    rows = [winner(config=HOPPER, device=device, median_ms=0.5), winner(config=TMA, device=device, median_ms=1.0)]
    decision = choose(PROBLEM, *rows, device=device)
    assert decision.candidate == rows[1].candidate
    assert re.search(r"hopper_ws can't serve this call: .*sm_90's alone, sm_100 has none", decision.describe())


@pytest.mark.parametrize(("triton", "is_told"), [("3.6.0", False), ("3.9.1", False), ("3.10.0", True)])
def test_a_triton_newer_than_all_tested_is_tried_and_told_of(triton: str, is_told: bool) -> None:
    decision = choose(PROBLEM, winner(config=HOPPER), triton=triton)
    assert decision.candidate.variant is Variant.HOPPER_WS
    assert ("newer than those that kernels were tested with, 3.6 to 3.9" in decision.describe()) is is_told


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


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"triton": "3.6.0"}, "2.5 ms (user user.db), fastest of the 1 that go first of 2 winners there"),
        ({"kernel_digest": "older"}, "2.5 ms (user user.db), fastest of the 1 that go first of 2 winners there"),
        ({"median_ms": 3.0}, "2.5 ms (user user.db), fastest of 2 winners there"),
    ],
)
def test_a_winner_is_the_fastest_only_of_those_that_it_was_compared_with(others: dict[str, Any], told: str) -> None:
    other = winner(config=TMA, **{"median_ms": 0.1, **others})
    assert told in choose(PROBLEM, winner(median_ms=2.5), other).describe()


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


def test_a_patch_of_the_same_release_makes_no_row_stale() -> None:
    assert not choose(PROBLEM, winner(triton="3.7.9")).stale


@pytest.mark.parametrize("nearest", ["3.6.0", "3.8.0"])
def test_of_stale_rows_those_of_the_nearest_release_come_first(nearest: str) -> None:
    far, near = winner(triton="3.9.0", median_ms=1.0), winner(triton=nearest, median_ms=4.0)
    assert choose(PROBLEM, far, near).row == near


def test_a_row_of_another_text_of_the_same_code_is_fresh_and_says_so() -> None:
    decision = choose(PROBLEM, winner(measured_as="yesterday"))
    assert not decision.stale
    assert "timed as kernel yesterday, which is the same machine code" in decision.trace


def stopped(digest: str = "today", release: str = "3.7", arch: str = H200.arch) -> StoppedKernel:
    return StoppedKernel(candidate=winner().candidate, digest=digest, arch=arch, release=release, gate="spills")


def decide_with(*rows: WinnerRow, kernel: StoppedKernel, triton: str = TRITON) -> Decision:
    snapshot = Snapshot(rows=rows, stopped=frozenset([kernel]))
    return decide(PROBLEM, device=H200, triton_version=triton, snapshot=snapshot, digest_of=lambda candidate: "today")


def test_a_kernel_that_a_gate_stops_with_this_release_is_not_served_from_another() -> None:
    decision = decide_with(winner(triton="3.6.0"), kernel=stopped())
    assert decision.origin is Origin.DEFAULT
    assert "is passed over: the gate spills stopped it with Triton 3.7" in decision.describe()


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        (winner(triton="3.6.0"), stopped(release="3.9")),
        (winner(triton="3.6.0"), stopped(arch="sm_100")),
        (winner(triton="3.6.0"), stopped(digest="yesterday")),
        (winner(triton="3.6.0", config=replace(PORTABLE, BLOCK_M=128)), stopped()),
        (winner(), stopped()),  # it was timed with this release afterwards
    ],
    ids=["other release", "other arch", "other text", "other config", "fresh"],
)
def test_what_a_gate_stopped_elsewhere_is_served(row: WinnerRow, kernel: StoppedKernel) -> None:
    assert decide_with(row, kernel=kernel).row == row


def test_stopped_kernels_count_in_the_hash_that_ranks_compare() -> None:
    rows = (winner(),)
    hashes = {Snapshot(rows=rows, stopped=frozenset(kernels)).content_hash for kernels in ([], [stopped()])}
    assert len(hashes) == 2


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
    own = winner(call, plain_config(call), median_ms=9.0)
    assert choose(call, winner()).origin is Origin.DEFAULT
    assert choose(call, winner(), own).row == own
    assert choose(PROBLEM, winner(), own).row == winner()
