"""Our dispatched kernels beside other attention libraries: same tensors, same process, interleaved.

Times are kernel times by the protocol of `measure`: device events with a flushed L2 cache, or CUDA graphs for small
problems. A peer that can't run a problem says why and is left out of it.
"""

import datetime
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_autotune.benchmark.packed import lengths_of, packed
from fa_autotune.benchmark.peers import OURS_UNORDERED, PEERS, Peer, backward_of
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.errors import FaAutotuneError, UnsupportedError
from fa_autotune.evaluation.measure import MeasurePolicy, TimedRun, confirm, make_timer, regime_for
from fa_autotune.evaluation.seeded import seeded_features
from fa_autotune.evaluation.workload import bottom_right_diagonal
from fa_autotune.kernels.gpu import live_device, live_toolchain
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.ops.call import (
    BHSD,
    GENERATED,
    NO_EXTRAS,
    PACKED,
    UNORDERED,
    WINDOW,
    Call,
    Extras,
    Needed,
    Saved,
)
from fa_autotune.ops.plans import plan_of
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement
from fa_autotune.reference.attention import seeded_inputs
from fa_autotune.space.config import config_label

OURS = "ours"

BACKWARD_FLOPS = 2.5  # of the forward's: the literature counts five matrix products, also where seven are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One library on one forward problem, or with `backward` on its whole backward.

    `note`: our kernels and where they come from, or why a peer did not run.
    """

    problem: AttentionProblem
    contender: str
    measurement: Measurement | None
    note: str
    backward: bool = False

    @property
    def tflops(self) -> float | None:
        """Matrix-product TFLOP/s by the literature's count."""
        if self.measurement is None:
            return None
        return self.problem.flops * (BACKWARD_FLOPS if self.backward else 1.0) / self.measurement.median_ms / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All rows of one run, with what is needed to read them later."""

    rows: tuple[BenchRow, ...]
    device: DeviceSpec
    toolchain: Toolchain
    cudnn: int | None
    python: str
    started_at: str
    policy: MeasurePolicy
    backward: bool = False

    def contenders(self) -> list[str]:
        """Names in the order of the rows."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    def problems(self) -> list[AttentionProblem]:
        """Problems in the order of the rows."""
        return list(dict.fromkeys(row.problem for row in self.rows))

    def row(self, problem: AttentionProblem, contender: str) -> BenchRow | None:
        """The row of a contender on a problem."""
        return next((row for row in self.rows if (row.problem, row.contender) == (problem, contender)), None)

    def ratios(self, contender: str) -> list[float]:
        """How much faster we are than a contender, for each problem that both ran: its time / our time."""
        pairs = ((self.row(problem, OURS), self.row(problem, contender)) for problem in self.problems())
        return [
            theirs.measurement.median_ms / ours.measurement.median_ms
            for ours, theirs in pairs
            if ours and theirs and ours.measurement and theirs.measurement
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values, every figure included."""
        rows = [
            {
                "problem": row.problem.key,
                "label": row.problem.label,
                "contender": row.contender,
                "tflops": row.tflops,
                "note": row.note,
                "measurement": asdict(row.measurement) if row.measurement else None,
            }
            for row in self.rows
        ]
        return {
            "device": asdict(self.device),
            "toolchain": asdict(self.toolchain),
            "cudnn": self.cudnn,
            "python": self.python,
            "started_at": self.started_at,
            "policy": asdict(self.policy),
            "backward": self.backward,
            "geomean_speedup": {
                name: geomean(ratios) for name in self.contenders() if name != OURS and (ratios := self.ratios(name))
            },
            "rows": rows,
        }


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; the values are positive."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def bench(
    problems: Sequence[AttentionProblem],
    *,
    against: Sequence[str],
    device_index: int = 0,
    policy: MeasurePolicy | None = None,
    backward: bool = False,
    on_problem: Callable[[AttentionProblem, list[BenchRow]], None] = lambda problem, rows: None,
) -> BenchReport:
    """Time our kernels and the named peers on forward problems, or with `backward` on their whole backward.

    UnsupportedError for a peer that is not known.
    """
    if unknown := [name for name in against if name not in PEERS]:
        raise UnsupportedError(f"unknown peers {', '.join(unknown)}; known are {', '.join(PEERS)}")
    if interpreting():
        raise FaAutotuneError(
            "bench compares GPU kernels and this process interprets them; run it again without TRITON_INTERPRET"
        )
    if not torch.cuda.is_available():
        raise FaAutotuneError(
            "bench compares GPU kernels and torch sees no GPU; `fa-autotune doctor` says what is missing"
        )
    device = live_device(device_index)
    dispatcher = Dispatcher(device=device, triton_version=live_toolchain().triton)
    policy = policy or MeasurePolicy()
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows: list[BenchRow] = []
    with torch.cuda.device(device_index), torch.no_grad():
        for problem in problems:
            found = _bench_problem(problem, against, dispatcher, device_index, policy, backward=backward)
            rows += found
            on_problem(problem, found)
    return BenchReport(
        rows=tuple(rows),
        device=device,
        toolchain=live_toolchain(),
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        python=platform.python_version(),
        started_at=started_at,
        policy=policy,
        backward=backward,
    )


def _bench_problem(
    problem: AttentionProblem,
    against: Sequence[str],
    dispatcher: Dispatcher,
    device_index: int,
    policy: MeasurePolicy,
    *,
    backward: bool,
) -> list[BenchRow]:
    inputs = seeded_inputs(problem.family, problem.shape, device=torch.device("cuda", device_index), seed=0)
    makers: dict[str, Peer] = {OURS: partial(_ours, dispatcher), **{name: PEERS[name] for name in against}}
    if backward:
        ours = {OURS: GENERATED, OURS_UNORDERED: UNORDERED}
        makers = {
            name: partial(_our_backward, dispatcher, ours[name]) if name in ours else partial(backward_of, make)
            for name, make in makers.items()
        }
    regime = regime_for(problem, dispatcher.device)
    timer = make_timer(regime, dispatcher.device, device_index)
    launches, notes = prepare(makers, problem, inputs, attempt=lambda launch: timer(launch, 1))
    measured = confirm(list(launches.values()), timer=timer, regime=regime, policy=policy, device_index=device_index)
    figures = dict(zip(launches, measured, strict=True))
    return [
        BenchRow(problem=problem, contender=name, measurement=figures.get(name), note=note, backward=backward)
        for name, note in notes.items()
    ]


def prepare(
    makers: Mapping[str, Peer],
    problem: AttentionProblem,
    inputs: tuple[Tensor, Tensor, Tensor],
    *,
    attempt: Callable[[TimedRun], Any],
) -> tuple[dict[str, TimedRun], dict[str, str]]:
    """Launches of the contenders that can run a problem, each tried once, and a note on every contender.

    `attempt` times a launch as it will be timed, since a peer may run and yet refuse to be captured in a graph. A peer
    that fails is left out and its note says why; a failure of ours is raised.
    """
    launches: dict[str, TimedRun] = {}
    notes: dict[str, str] = {}
    for name, make in makers.items():
        try:
            launch, notes[name] = make(problem, *inputs)
            launch()
            attempt(launch)
        except Exception as error:
            if name == OURS:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            notes[name] = f"did not run: {reason[:200]}"
        else:
            launches[name] = launch
    return launches, notes


def _ours(
    dispatcher: Dispatcher, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor
) -> tuple["partial[None]", str]:
    asked, problem = problem, problem.as_called()
    decision = dispatcher.decide(problem)
    kernel = load_kernel(decision.candidate, dispatcher.device.arch)
    if problem.family.varlen:
        q, k, v = map(packed, (q, k, v))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    scale = q.shape[3] ** -0.5
    diagonal = bottom_right_diagonal(problem)
    note = f"{decision.candidate.variant} {config_label(decision.candidate.config)} ({decision.origin})"
    features, family = seeded_features(asked, device=q.device), problem.family
    if family.varlen:
        cu_seqlens_q, cu_seqlens_k = lengths_of(asked, q.device)
        features = replace(features, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    tensors = (q, k, v, out, lse, *features.tensors(family))
    return partial(kernel, *tensors, scale, diagonal, *features.numbers(family)), note


def _our_backward(
    dispatcher: Dispatcher, backend: int, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[TimedRun, str]:
    """What a training step launches after the forward, and the memory that it allocates; `backend` as in `ops.call`."""
    note = _backward_note(dispatcher, problem, backend)
    features = seeded_features(problem, device=q.device)
    extras = Extras(features.alibi_slopes, features.sinks, features.attn_mask, features.dropout_seed)
    layout = BHSD
    if problem.family.varlen:
        layout = PACKED
        q, k, v = (packed(tensor)[0].transpose(0, 1) for tensor in (q, k, v))
        starts_q, starts_k = lengths_of(problem, q.device)
        sinks = None if features.sinks is None else features.sinks[0]
        extras = extras._replace(sinks=sinks, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    left, right = problem.window
    call = Call(None, WINDOW, layout, backend, left, right, features.softcap, features.dropout_p, problem.family.tf32)
    extras = extras if extras.given() else NO_EXTRAS
    plan = plan_of(q, k, v, extras, call)
    out, lse = plan.forward(q, k, v, extras)
    needed = Needed(True, True, True, sinks=features.sinks is not None)
    return partial(plan.backward, Saved(q, k, v, out, lse, extras), torch.randn_like(out), None, needed), note


def _backward_note(dispatcher: Dispatcher, problem: AttentionProblem, backend: int) -> str:
    """Which kernels a backward runs."""
    problems = dispatcher.backward(problem.as_called(), unordered=backend == UNORDERED)
    candidates = [dispatcher.decide(one).candidate for one in problems]
    return "; ".join(
        f"{one.family.kernel_pass} {one.variant} {config_label(one.config)}"
        for one in candidates
        if one.family.kernel_pass.spec.knows_scores
    )


def table_rows(report: BenchReport) -> Iterator[list[str]]:
    """The report as text cells: a head, a row for each problem (TFLOP/s, our ratio to each peer), the geomeans."""
    peers = [name for name in report.contenders() if name != OURS]
    yield [
        "problem",
        "ms",
        "ours TFLOP/s",
        *(f"{name} TFLOP/s" for name in peers),
        *(f"ours / {n}" for n in peers),
        "kernel",
    ]
    for problem in report.problems():
        ours = report.row(problem, OURS)
        if ours is None or ours.measurement is None or ours.tflops is None:
            continue
        others = [report.row(problem, name) for name in peers]
        speeds = [f"{row.tflops:.0f}" if row and row.tflops else "–" for row in others]
        speedups = [f"{ours.tflops / row.tflops:.2f}" if row and row.tflops else "–" for row in others]
        yield [problem.label, f"{ours.measurement.median_ms:.3f}", f"{ours.tflops:.0f}", *speeds, *speedups, ours.note]
    means = [f"{geomean(ratios):.2f}" if (ratios := report.ratios(name)) else "–" for name in peers]
    yield ["geometric mean", "", "", *("" for _ in peers), *means, ""]
