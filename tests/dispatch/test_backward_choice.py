"""Which way a backward takes, and what that choice counts and tells."""

import logging
from dataclasses import replace

import pytest

from fa_autotune.dispatch import loaded_kernels as live_kernels
from fa_autotune.dispatch.dispatcher import BackwardWay
from fa_autotune.ops import api as ops
from fa_autotune.problem.device import INTERPRETER, DeviceSpec
from fa_autotune.problem.family import BACKWARD_PASSES, FUSED_BACKWARD, KEYLESS_PASSES, SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from kit.winners import A100, H200, all_winners, dispatcher, plain_config, winner, winners_of

SPLIT, FUSED, UNORDERED = BackwardWay.SPLIT, BackwardWay.FUSED, BackwardWay.FUSED_UNORDERED
SERVED = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
WIDE = AttentionProblem.parse("4x32x8x4096x4096x256,causal")


def problems_of(way: BackwardWay, call: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """Those of a way's kernels."""
    passes = SPLIT_BACKWARD if way is SPLIT else FUSED_BACKWARD
    return tuple(call.for_pass(one, unordered=way is UNORDERED and one is Pass.BWD_FUSED) for one in passes)


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("head_dims", ["40", "64", "128", "136", "256", "64x192", "192x128"])
@pytest.mark.parametrize("flags", ["bf16", "fp16", "bf16,causal", "fp16,causal"])
def test_an_untuned_hopper_gpu_goes_the_fused_way_in_order(head_dims: str, flags: str, unordered: bool) -> None:
    call = AttentionProblem.parse(f"4x32x8x4096x4096x{head_dims},{flags}")
    assert dispatcher().backward(call, unordered=unordered) == problems_of(FUSED, call)


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("4x32x8x4096x4096x64,fp32", H200),
        ("4x32x8x4096x4096x256,fp32", H200),
        ("4x32x8x4096x4096x64,aligned", H200),
        ("4x32x8x4096x4096x64,any", H200),
        ("4x32x8x4096x4096x64", A100),
        ("4x32x8x4096x4096x256", A100),
        ("4x32x8x4096x4096x64", INTERPRETER),
    ],
    ids=["fp32", "fp32-wide", "aligned", "any", "A100", "A100-wide", "interpreter"],
)
def test_what_no_fused_kernel_serves_goes_the_split_way(text: str, device: DeviceSpec, unordered: bool) -> None:
    call = AttentionProblem.parse(text)
    assert dispatcher(device=device).backward(call, unordered=unordered) == problems_of(SPLIT, call)


@pytest.mark.parametrize("call", [SERVED, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize(
    ("fused_ms", "split_ms", "unordered_ms", "ordered", "any_order"),
    [
        (3, 4, None, FUSED, FUSED),
        (4, 3, None, SPLIT, SPLIT),
        (3, 5, 4, FUSED, FUSED),
        (4, 5, 3, FUSED, UNORDERED),
        (5, 4, 3.5, SPLIT, UNORDERED),
        (5, 3, 4, SPLIT, SPLIT),
    ],
)
def test_where_all_kernels_were_measured_the_fastest_way_wins(
    fused_ms: float,
    split_ms: float,
    unordered_ms: float | None,
    ordered: BackwardWay,
    any_order: BackwardWay,
    call: AttentionProblem,
) -> None:
    measured = dispatcher(*all_winners(call, fused_ms=fused_ms, split_ms=split_ms, unordered_ms=unordered_ms))
    assert measured.backward(call) == problems_of(ordered, call)
    assert measured.backward(call, unordered=True) == problems_of(any_order, call)
    assert (measured.backward_way(call), measured.backward_way(call, unordered=True)) == (ordered, any_order)


def test_the_sum_decides_and_not_the_largest_kernel() -> None:
    split = {"bwd_delta": 0.1, "bwd_dkdv": 1.4, "bwd_dq": 1.4}
    fused = {"bwd_preprocess": 0.1, "bwd_fused": 2.0, "bwd_postprocess": 0.1}
    assert dispatcher(*winners_of(SERVED, **split, **fused)).backward(SERVED) == problems_of(FUSED, SERVED)


@pytest.mark.parametrize("missing", [one for one in BACKWARD_PASSES if one not in KEYLESS_PASSES])
def test_where_one_kernel_was_not_measured_the_fused_way_wins(missing: Pass) -> None:
    rows = [row for row in all_winners(SERVED, fused_ms=4, split_ms=3) if row.problem.family.kernel_pass is not missing]
    assert len(rows) == 5
    assert dispatcher(*rows).backward(SERVED) == problems_of(FUSED, SERVED)


@pytest.mark.parametrize("missing", KEYLESS_PASSES)
def test_a_short_kernel_that_was_not_measured_leaves_its_way_in_the_comparison(missing: Pass) -> None:
    rows = [row for row in all_winners(SERVED, fused_ms=4, split_ms=2) if row.problem.family.kernel_pass is not missing]
    assert dispatcher(*rows).backward(SERVED) == problems_of(SPLIT, SERVED)


def test_times_of_another_shape_decide_nothing() -> None:
    near = replace(SERVED, shape=replace(SERVED.shape, batch_size=5))
    measured = dispatcher(*all_winners(near, fused_ms=4, split_ms=3, unordered_ms=3.5))
    assert measured.backward(SERVED, unordered=True) == problems_of(FUSED, SERVED)


@pytest.mark.parametrize("device", [H200, A100])
def test_choosing_a_way_counts_no_miss_and_tells_nothing(device: DeviceSpec, caplog: pytest.LogCaptureFixture) -> None:
    untuned = dispatcher(device=device)
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        untuned.backward(SERVED, unordered=True)
    assert untuned.misses == {}
    assert caplog.records == []


def test_only_what_runs_is_missed_and_told(caplog: pytest.LogCaptureFixture) -> None:
    untuned = dispatcher(*winners_of(SERVED, bwd_preprocess=1.0, bwd_postprocess=1.0))
    with caplog.at_level(logging.WARNING, "fa_autotune"):
        for problem in untuned.backward(SERVED):
            untuned.decide(problem)
    assert untuned.misses == {SERVED.for_pass(Pass.BWD_FUSED): 1}
    (record,) = caplog.records
    assert record.getMessage().startswith("bwd_fused bf16 d128 causal")


@pytest.mark.parametrize(
    "text",
    [
        "65536x16x16x16x16x16",
        "4096x12x12x49x49x32",
        "8x16x16x4096x4096x32",
        "1x8x8x60x60x64",
        "4x16x16x4096x4096x32x256",
        "64x8x8x20x20x256",
    ],
)
def test_a_fused_kernel_that_would_work_on_padding_mostly_is_not_taken_unmeasured(text: str) -> None:
    call = AttentionProblem.parse(text)
    choice = dispatcher().backward_choice(call)
    assert choice.problems == problems_of(SPLIT, call)
    assert choice.reason.startswith("the fused kernel would pad dq to ")


def test_a_fused_kernel_that_was_measured_may_work_on_padding() -> None:
    call = AttentionProblem.parse("8x16x16x4096x4096x32")
    assert dispatcher(*all_winners(call, fused_ms=3, split_ms=4)).backward(call) == problems_of(FUSED, call)


def test_an_unordered_winner_is_taken_only_where_it_can_be_compared_with_the_ordered_one() -> None:
    rows = winners_of(SERVED, bwd_preprocess=0.1, bwd_postprocess=0.1)
    any_order = SERVED.for_pass(Pass.BWD_FUSED, unordered=True)
    measured = dispatcher(*rows, winner(any_order, plain_config(any_order), median_ms=2.0))
    assert measured.backward(SERVED, unordered=True) == problems_of(FUSED, SERVED)


def test_zeros_to_add_to_count_as_time_of_the_unordered_way() -> None:
    any_order = SERVED.for_pass(Pass.BWD_FUSED, unordered=True)
    rows = winners_of(SERVED, bwd_preprocess=0.1, bwd_fused=1.0, bwd_postprocess=0.3)
    for ms, way in ((0.85, FUSED), (0.75, UNORDERED)):  # zeros take 0.2 ms
        measured = dispatcher(*rows, winner(any_order, plain_config(any_order), median_ms=ms))
        assert measured.backward(SERVED, unordered=True) == problems_of(way, SERVED)


def test_a_choice_says_why() -> None:
    measured = dispatcher(*all_winners(SERVED, fused_ms=3, split_ms=4))
    assert measured.backward_choice(SERVED).describe() == (
        "backward fused: the fastest of those that were measured on this shape (fused 3 ms, split 4 ms)"
    )
    alone = dispatcher(*winners_of(SERVED, **{one.value: 1.0 for one in FUSED_BACKWARD}))
    assert alone.backward_choice(SERVED).reason == (
        "the only one that was measured on this shape (fused 3 ms); split was not"
    )
    assert "no kernel serves bwd_fused" in dispatcher(device=A100).backward_choice(SERVED).reason
    assert "a kernel serves it" in dispatcher().backward_choice(SERVED).reason


def test_warming_a_backward_up_counts_only_what_a_call_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    untuned, loaded = dispatcher(), []
    monkeypatch.setattr(ops, "device_index", lambda device: 0)
    monkeypatch.setattr(live_kernels, "_kernels", {})
    monkeypatch.setattr(live_kernels, "load_kernel", lambda candidate, *rest: loaded.append(candidate))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    for module in (ops, live_kernels):
        monkeypatch.setattr(module, "dispatcher_of", lambda index: untuned)
    ops.warmup([SERVED.key], backward=True)
    assert set(untuned.misses) == {SERVED, *problems_of(FUSED, SERVED)}
    assert {candidate.family.kernel_pass for candidate in loaded} == {Pass.FWD, *BACKWARD_PASSES}
