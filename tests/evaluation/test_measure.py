"""The timing protocol with a fake timer: what is launched, how often, in which order, and what is made of it."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune.evaluation.measure import MeasurePolicy, TimedRun, confirm, make_timer, quantile, regime_for, screen
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement, Regime, Role
from kit.strategies import devices, problems

POLICY = MeasurePolicy(
    warmup_ms=4.0, target_ms=20.0, min_launches=5, max_launches=50, early_launches=3, early_stop=1.3, rounds=4
)


@dataclass
class FakeTimer:
    """Times launches by a table of milliseconds, in turn; keeps what was asked of it."""

    times_ms: dict[TimedRun, list[float]]
    calls: list[tuple[TimedRun, int]] = field(default_factory=list)

    def __call__(self, launch: TimedRun, count: int) -> list[float]:
        self.calls.append((launch, count))
        table = self.times_ms[launch]
        return [table[place % len(table)] for place in range(count)]

    def counts(self) -> list[int]:
        return [count for _, count in self.calls]


def make_launch() -> TimedRun:
    def launch() -> None:
        raise AssertionError("the fake timer launches nothing")

    return launch


def screened(
    *times_ms: float, incumbent_ms: float | None = None, policy: MeasurePolicy = POLICY
) -> tuple[Measurement, FakeTimer]:
    launch = make_launch()
    timer = FakeTimer({launch: list(times_ms)})
    measurement = screen(
        launch, timer=timer, regime=Regime.EVENTS, policy=policy, incumbent_ms=incumbent_ms, device_index=None
    )
    return measurement, timer


class TestScreen:
    def test_launches_a_few_then_warms_up_then_measures(self) -> None:
        """A launch of 1 ms: 3 to judge by, 4 ms of warm-up, 20 ms of measuring."""
        _, timer = screened(1.0)
        assert timer.counts() == [3, 4, 20]

    def test_makes_its_figures_of_the_last_launches_only(self) -> None:
        calls = iter([9.0, 5.0, 1.0])

        def faster_by_the_call(launch: TimedRun, count: int) -> list[float]:
            return [next(calls)] * count

        measurement = screen(
            make_launch(),
            timer=faster_by_the_call,
            regime=Regime.EVENTS,
            policy=POLICY,
            incumbent_ms=None,
            device_index=None,
        )
        assert (measurement.p20_ms, measurement.p80_ms) == (1.0, 1.0)

    def test_of_a_long_launch_still_takes_the_fewest(self) -> None:
        measurement, timer = screened(500.0)
        assert (timer.counts(), measurement.launches) == ([3, 0, 5], 5)

    def test_of_a_short_launch_stops_at_the_most(self) -> None:
        measurement, timer = screened(0.001)
        assert (timer.counts(), measurement.launches) == ([3, 50, 50], 50)

    def test_is_not_misled_by_one_long_first_launch(self) -> None:
        """The first launch of a kernel loads it."""
        _, timer = screened(90.0, 1.0, 1.0)
        assert timer.counts() == [3, 4, 20]

    def test_gives_median_and_spread(self) -> None:
        measurement, _ = screened(1.0, 2.0, 3.0, 4.0, policy=MeasurePolicy(target_ms=8.0, min_launches=4))
        assert (measurement.p20_ms, measurement.median_ms, measurement.p80_ms) == pytest.approx((1.6, 2.5, 3.4))

    def test_has_its_role_and_regime_and_no_rank(self) -> None:
        measurement, _ = screened(1.0)
        assert (measurement.role, measurement.regime, measurement.rank) == (Role.SCREEN, Regime.EVENTS, None)

    def test_stops_early_where_the_kernel_is_clearly_slower_than_the_incumbent(self) -> None:
        measurement, timer = screened(1.4, incumbent_ms=1.0)
        assert (measurement.early_stopped, measurement.launches, timer.counts()) == (True, 3, [3])

    def test_tells_the_time_of_a_kernel_that_it_stopped(self) -> None:
        measurement, _ = screened(1.5, 1.4, 1.6, incumbent_ms=1.0)
        assert measurement.median_ms == 1.5

    @pytest.mark.parametrize("times_ms", [(1.29,), (2.0, 1.2, 2.0)], ids=["all_near", "one_near"])
    def test_goes_on_where_one_launch_came_near_the_incumbent(self, times_ms: tuple[float, ...]) -> None:
        measurement, _ = screened(*times_ms, incumbent_ms=1.0)
        assert not measurement.early_stopped

    def test_never_stops_early_without_an_incumbent(self) -> None:
        measurement, _ = screened(1e6)
        assert not measurement.early_stopped

    def test_survives_a_clock_that_saw_no_time_pass(self) -> None:
        measurement, _ = screened(0.0)
        assert (measurement.launches, measurement.median_ms) == (50, 0.0)

    def test_says_nothing_of_a_gpu_where_there_is_none(self) -> None:
        measurement, _ = screened(1.0)
        assert (measurement.sm_clock_mhz, measurement.power_w, measurement.temperature_c) == (None, None, None)


def confirmed(
    *times_ms: list[float], policy: MeasurePolicy = POLICY
) -> tuple[list[Measurement], list[int], list[tuple[int, int]]]:
    """The measurements, the launches in the order in which they were timed, and (finalist, count) of each call."""
    launches = [make_launch() for _ in times_ms]
    timer = FakeTimer(dict(zip(launches, times_ms, strict=True)))
    measured = confirm(launches, timer=timer, regime=Regime.GRAPH, policy=policy, device_index=None)
    calls = [(launches.index(launch), count) for launch, count in timer.calls]
    return measured, [index for index, _ in calls], calls


class TestConfirm:
    def test_interleaves_finalists_in_an_order_that_turns_every_second_round(self) -> None:
        _, order, _ = confirmed([1.0], [1.0], [1.0])
        assert order == [0, 1, 2, *(0, 1, 2), *(2, 1, 0), *(0, 1, 2), *(2, 1, 0)]

    def test_launches_each_before_any_is_measured(self) -> None:
        _, _, calls = confirmed([1.0], [1.0])
        assert calls[:2] == [(0, 3), (1, 3)]

    def test_gives_each_finalist_its_share_of_a_round(self) -> None:
        """8 ms a round: 8 launches of 1 ms, 4 of 2 ms."""
        _, _, calls = confirmed([1.0], [2.0])
        assert set(calls[2:]) == {(0, 8), (1, 4)}

    def test_launches_a_long_kernel_twice_a_round(self) -> None:
        _, _, calls = confirmed([100.0])
        assert calls[1:] == [(0, 2)] * POLICY.rounds

    def test_makes_the_figures_of_all_rounds(self) -> None:
        measured, _, _ = confirmed([1.0], [2.0])
        assert [one.launches for one in measured] == [8 * POLICY.rounds, 4 * POLICY.rounds]

    def test_keeps_the_order_of_the_finalists(self) -> None:
        measured, _, _ = confirmed([2.0], [1.0], [3.0])
        assert [one.median_ms for one in measured] == [2.0, 1.0, 3.0]

    def test_meets_a_drift_of_the_clocks_fairly(self) -> None:
        """Two equal kernels on a GPU that grows slower with every launch come out equally fast."""
        now = 0.0

        def drifting(launch: TimedRun, count: int) -> list[float]:
            nonlocal now
            now += 1
            return [1.0 + now / 100] * count

        one, other = confirm(
            [make_launch(), make_launch()], timer=drifting, regime=Regime.EVENTS, policy=POLICY, device_index=None
        )
        assert one.median_ms == pytest.approx(other.median_ms)

    def test_has_its_role_and_regime_and_leaves_the_rank_to_others(self) -> None:
        (measurement,), _, _ = confirmed([1.0])
        assert (measurement.role, measurement.regime, measurement.rank) == (Role.CONFIRM, Regime.GRAPH, None)

    def test_of_nothing_is_nothing(self) -> None:
        assert confirmed()[0] == []


class TestRegime:
    @given(problem=problems())
    def test_of_the_interpreter_is_the_hosts_clock(self, problem: AttentionProblem) -> None:
        assert regime_for(problem, INTERPRETER) is Regime.WALL

    @given(problem=problems(), device=devices())
    def test_depends_on_problem_and_device_alone(self, problem: AttentionProblem, device: DeviceSpec) -> None:
        again = AttentionProblem.from_key(problem.key)
        assert regime_for(again, device) is regime_for(problem, device) is not Regime.WALL

    def test_of_a_small_problem_is_a_graph(self) -> None:
        assert regime_for(AttentionProblem.parse("1x8x8x128x128x64"), KNOWN_DEVICES["h200"]) is Regime.GRAPH

    def test_of_a_large_problem_is_events(self) -> None:
        assert regime_for(AttentionProblem.parse("4x32x8x4096x4096x128"), KNOWN_DEVICES["h200"]) is Regime.EVENTS

    @pytest.mark.parametrize(
        ("text", "regime"), [("1x8x8x128x128x64", Regime.GRAPH), ("4x32x8x4096x4096x128", Regime.EVENTS)]
    )
    def test_of_a_pass_without_products_follows_its_bytes(self, text: str, regime: Regime) -> None:
        assert regime_for(AttentionProblem.parse(f"{text},bwd_delta"), KNOWN_DEVICES["h200"]) is regime

    def test_depends_on_the_size_of_the_gpu(self) -> None:
        problem = AttentionProblem.parse("4x16x16x1024x1024x64")
        assert [regime_for(problem, KNOWN_DEVICES[name]) for name in ("h200", "t4")] == [Regime.GRAPH, Regime.EVENTS]


class TestQuantile:
    @given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
    def test_at_a_half_is_the_median(self, values: list[float]) -> None:
        assert quantile(values, 0.5) == pytest.approx(statistics.median(values))

    @given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
    def test_never_falls_with_the_fraction(self, values: list[float]) -> None:
        found = [quantile(values, fraction) for fraction in (0.0, 0.2, 0.5, 0.8, 1.0)]
        assert found == sorted(found)
        assert (found[0], found[-1]) == (min(values), max(values))

    def test_lies_between_neighbours(self) -> None:
        assert quantile([3.0, 1.0], 0.25) == 1.5


class TestTimers:
    def test_the_hosts_clock_times_each_launch(self) -> None:
        launches = []
        timer = make_timer(Regime.WALL, INTERPRETER, None)
        times = timer(lambda: launches.append(1), 3)
        assert (len(times), len(launches)) == (3, 3)

    def test_the_hosts_clock_can_be_asked_for_nothing(self) -> None:
        assert make_timer(Regime.WALL, INTERPRETER, None)(make_launch(), 0) == []

    @pytest.mark.gpu
    @pytest.mark.parametrize("regime", [Regime.GRAPH, Regime.EVENTS])
    def test_many_trials_need_no_more_memory_than_a_few(self, regime: Regime) -> None:
        """Each trial has its own output; a timer must not keep it."""
        timer = make_timer(regime, KNOWN_DEVICES["h200"], 0)
        used = []
        for _ in range(12):
            _time_a_fill(timer)
            used.append(torch.cuda.memory_allocated())
        assert used[-1] == used[2]

    @pytest.mark.gpu
    @pytest.mark.parametrize("regime", [Regime.GRAPH, Regime.EVENTS])
    def test_give_as_many_times_as_asked(self, regime: Regime) -> None:
        out = torch.empty(1024, device="cuda")
        times = make_timer(regime, KNOWN_DEVICES["h200"], 0)(lambda: _fill(out), 5)
        assert len(times) == 5
        assert all(time > 0 for time in times)


def _time_a_fill(timer: Callable[[TimedRun, int], list[float]]) -> None:
    out = torch.empty(4 * 2**20, dtype=torch.int8, device="cuda")

    def launch() -> None:
        _fill(out)

    timer(launch, 3)
    timer(launch, 3)


def _fill(out: torch.Tensor) -> None:
    out.fill_(1)
