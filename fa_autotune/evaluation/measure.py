"""The timing protocol: warm up, flush the L2 cache, time many launches, keep median and spread.

Large problems are timed by device events round each launch (regime `events`), small ones as replays of a CUDA graph
(`graph`), so that launch overhead does not rank kernels; Triton's interpreter by the host's clock (`wall`). Figures of
different regimes are never compared: the regime depends on the problem and the device alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from fa_autotune.kernels.gpu import gpu_state
from fa_autotune.problem.device import INTERPRETER_ARCH, DeviceSpec
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement, Regime, Role

TimedRun = Callable[[], object]  # what it gives is of no concern

GRAPH_BELOW_US = 50.0  # a problem shorter than this at ROUGH_TFLOPS_PER_SM is timed under a graph
ROUGH_TFLOPS_PER_SM = 3.0
ROUGH_GB_PER_S_PER_SM = 25.0
LAUNCHES_PER_GRAPH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePolicy:
    """How long to measure. A screen ends after `early_launches` if all of them pass `early_stop` × the incumbent."""

    warmup_ms: float = 5.0
    target_ms: float = 25.0
    min_launches: int = 7
    max_launches: int = 60
    early_launches: int = 3
    early_stop: float = 1.3
    rounds: int = 7  # of a confirm session
    round_ms: float = 8.0


class Timer(Protocol):
    """Times `count` launches one by one, in milliseconds."""

    def __call__(self, launch: TimedRun, count: int) -> list[float]: ...


def regime_for(problem: AttentionProblem, device: DeviceSpec) -> Regime:
    """The regime in which all kernels of a problem are timed on a device."""
    if device.arch == INTERPRETER_ARCH:
        return Regime.WALL
    rough_us = problem.flops / (ROUGH_TFLOPS_PER_SM * 1e6 * device.num_sms)
    if not problem.flops:  # delta only moves data
        rough_us = problem.io_bytes / (ROUGH_GB_PER_S_PER_SM * 1e3 * device.num_sms)
    return Regime.GRAPH if rough_us < GRAPH_BELOW_US else Regime.EVENTS


def make_timer(regime: Regime, device: DeviceSpec, device_index: int | None) -> Timer:
    """The timer of a regime; the one by events owns a buffer of twice the L2 cache, by which it flushes it."""
    if regime is Regime.WALL:
        return _time_by_wall
    if regime is Regime.GRAPH:
        return _GraphTimer()
    return _EventTimer(torch.empty(max(1, 2 * device.l2_bytes), dtype=torch.int8, device=f"cuda:{device_index}"))


def screen(
    launch: TimedRun,
    *,
    timer: Timer,
    regime: Regime,
    policy: MeasurePolicy,
    incumbent_ms: float | None,
    device_index: int | None,
) -> Measurement:
    """Time one kernel; clearly slower than the incumbent, it stops early."""
    times = timer(launch, policy.early_launches)
    if incumbent_ms is not None and min(times) > policy.early_stop * incumbent_ms:
        return _measurement(times, Role.SCREEN, regime, device_index, early_stopped=True)
    typical = max(sorted(times)[len(times) // 2], 1e-6)
    timer(launch, _launch_count(policy.warmup_ms, typical, 0, policy.max_launches))
    times = timer(launch, _launch_count(policy.target_ms, typical, policy.min_launches, policy.max_launches))
    return _measurement(times, Role.SCREEN, regime, device_index)


def confirm(
    launches: Sequence[TimedRun], *, timer: Timer, regime: Regime, policy: MeasurePolicy, device_index: int | None
) -> list[Measurement]:
    """Time finalists in turn, the order reversed every second round, so that a drift of the clocks meets all alike."""
    times: list[list[float]] = [[] for _ in launches]
    counts = []
    for launch in launches:
        first = timer(launch, policy.early_launches)
        counts.append(_launch_count(policy.round_ms, max(min(first), 1e-6), 2, policy.max_launches))
    for round_number in range(policy.rounds):
        order = range(len(launches)) if round_number % 2 == 0 else reversed(range(len(launches)))
        for index in order:
            times[index] += timer(launches[index], counts[index])
    return [_measurement(one, Role.CONFIRM, regime, device_index) for one in times]


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value at a fraction of the sorted values, interpolated."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _launch_count(target_ms: float, typical_ms: float, low: int, high: int) -> int:
    return max(low, min(high, round(target_ms / typical_ms)))


def _measurement(
    times: Sequence[float], role: Role, regime: Regime, device_index: int | None, *, early_stopped: bool = False
) -> Measurement:
    state = gpu_state(device_index) if device_index is not None else None
    return Measurement(
        role=role,
        regime=regime,
        launches=len(times),
        p20_ms=quantile(times, 0.2),
        median_ms=quantile(times, 0.5),
        p80_ms=quantile(times, 0.8),
        early_stopped=early_stopped,
        sm_clock_mhz=state.sm_clock_mhz if state else None,
        power_w=state.power_w if state else None,
        temperature_c=state.temperature_c if state else None,
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_by_wall(launch: TimedRun, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        launch()
        times.append((time.perf_counter() - start) * 1e3)
    return times


class _EventTimer:
    def __init__(self, flush: torch.Tensor) -> None:
        self._flush = flush

    def __call__(self, launch: TimedRun, count: int) -> list[float]:
        starts, ends = [_event() for _ in range(count)], [_event() for _ in range(count)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()  # also hides the host's launch time behind device work
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


class _GraphTimer:
    """Replays of a graph of many launches; the L2 cache is warm, as it is for a small problem in a model."""

    def __init__(self) -> None:
        # Weak: with a launch go its graph and the tensors that both hold, so that many trials need no more memory.
        self._graphs: WeakKeyDictionary[TimedRun, torch.cuda.CUDAGraph] = WeakKeyDictionary()

    def __call__(self, launch: TimedRun, count: int) -> list[float]:
        graph = self._graph(launch)
        times = []
        for _ in range(max(1, count)):
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / LAUNCHES_PER_GRAPH)
        return times

    def _graph(self, launch: TimedRun) -> torch.cuda.CUDAGraph:
        if (held := self._graphs.get(launch)) is not None:
            return held
        launch()  # loads the kernel: nothing may be loaded inside a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES_PER_GRAPH):
                launch()
        self._graphs[launch] = graph
        return graph
