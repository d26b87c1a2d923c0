"""Our dispatched kernels beside other attention libraries: same tensors, same process, interleaved.

Times are kernel times by the protocol of `measure`: device events with a flushed L2 cache, or CUDA graphs for small
problems. A peer that can't run a problem says why and is left out of it.
"""

import datetime
import importlib
import importlib.util
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_autotune.calls import plan_of
from fa_autotune.config import config_label
from fa_autotune.device import DeviceSpec, Toolchain
from fa_autotune.dispatch import Dispatcher
from fa_autotune.errors import FaAutotuneError, UnsupportedError
from fa_autotune.family import Pass
from fa_autotune.features import Features
from fa_autotune.launch import live_device, live_toolchain, load_kernel
from fa_autotune.measure import Launch, MeasurePolicy, confirm, make_timer, regime_for
from fa_autotune.ops import attention
from fa_autotune.paths import interpreting
from fa_autotune.problem import AttentionProblem
from fa_autotune.records import Measurement
from fa_autotune.reference import seeded_inputs
from fa_autotune.tensors import BHSD, GENERATED, TF32, UNORDERED, WINDOW, Extras
from fa_autotune.varlen_bench import backward_in_a_row, document_mask, in_a_row, lengths_of
from fa_autotune.workload import bottom_right_diagonal, seeded_features

OURS, OURS_UNORDERED, OURS_PADDED = "ours", "ours-unordered", "ours-padded"

BACKWARD_FLOPS = 2.5  # of the forward's: the literature counts five matrix products, also where seven are computed

# (problem, q, k, v) → what computes attention and gives it, and a note; tensors are (batch, heads, seqlen, head_dim).
Peer = Callable[[AttentionProblem, Tensor, Tensor, Tensor], tuple[Callable[[], Any], str]]


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
            name: partial(_our_backward, dispatcher, ours[name]) if name in ours else partial(_backward_of, make)
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
    attempt: Callable[[Launch], Any],
) -> tuple[dict[str, Launch], dict[str, str]]:
    """Launches of the contenders that can run a problem, each tried once, and a note on every contender.

    `attempt` times a launch as it will be timed, since a peer may run and yet refuse to be captured in a graph. A peer
    that fails is left out and its note says why; a failure of ours is raised.
    """
    launches: dict[str, Launch] = {}
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
        q, k, v = map(in_a_row, (q, k, v))
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
) -> tuple[Launch, str]:
    """What a training step launches after the forward, and the memory that it allocates; `backend` as in `tensors`."""
    note = _backward_note(dispatcher, problem, backend)
    if problem.family.varlen:
        return backward_in_a_row(problem, q, k, v), note
    features = seeded_features(problem, device=q.device)
    found = (features.alibi_slopes, features.sinks, features.attn_mask, features.dropout_seed)
    extras: Extras = found if any(tensor is not None for tensor in found) else ()
    runs = backend | TF32 if problem.family.tf32 else backend
    plan = plan_of(q, k, v, (None, WINDOW, BHSD, runs, *problem.window, features.softcap, features.dropout_p), extras)
    out, lse = plan.forward(q, k, v, *extras)
    needed = (True, True, True, features.sinks is not None, False)
    launch = partial(plan.backward, (q, k, v, out, lse, *extras), torch.randn_like(out), None, needed)
    return launch, note


def _backward_note(dispatcher: Dispatcher, problem: AttentionProblem, backend: int) -> str:
    """Which kernels a backward runs."""
    problems = dispatcher.backward(problem.as_called(), unordered=backend == UNORDERED)
    candidates = [dispatcher.decide(one).candidate for one in problems]
    return "; ".join(
        f"{one.family.kernel_pass} {one.variant} {config_label(one.config)}"
        for one in candidates
        if one.family.kernel_pass in (Pass.BWD_DKDV, Pass.BWD_DQ, Pass.BWD_FUSED)
    )


def _ours_unordered(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple["partial[Any]", str]:
    features = seeded_features(problem, device=q.device)
    options: dict[str, Any] = {
        "window_size": problem.window,
        "softcap": features.softcap,
        "alibi_slopes": features.alibi_slopes,
        "sinks": None if features.sinks is None else features.sinks[0],
        "attn_mask": features.attn_mask,
        "dropout_p": features.dropout_p,
        "deterministic": False,
        "fp32_precision": "tf32" if problem.family.tf32 else "ieee",
    }
    launch: partial[Any] = partial(attention, q, k, v, layout="bhsd", **options)
    return launch, "ours with deterministic=False"


def _ours_padded(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], str]:
    if not problem.family.varlen:
        raise UnsupportedError("this problem is a batch of one length already; the peer is for varlen ones")
    launch, _ = _ours_unordered(problem, q, k, v)
    return partial(launch, deterministic=True), "our kernels on the same sequences as a batch"


def _backward_of(make: Peer, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Launch, str]:
    """A peer's whole backward, through autograd: its graph is kept, so that it can run again."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        attend, note = make(problem, *leaves)
        out = attend()
    do = torch.randn_like(out)

    def launch() -> None:
        torch.autograd.grad(out, leaves, do, retain_graph=True)

    return launch, note


def _sdpa(
    backend: SDPBackend, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Tensor], str]:
    _require_square(problem)
    grouped, causal = problem.shape.gqa_group_size > 1, problem.family.bounded_right
    mask = seeded_features(problem, device=q.device).attn_mask

    def launch() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

    return launch, f"torch {torch.__version__} SDPA, {backend.name}"


def _flex(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], str]:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 - imports the compiler

    if problem.family.sinks:
        raise UnsupportedError("sinks are no score of a key, so FlexAttention can't express them in one call")
    if problem.family.has_mask or problem.family.dropout:
        raise UnsupportedError("FlexAttention is not compared where a mask lies in memory, or with dropout")
    shape = problem.shape
    mask = None
    left, right = problem.window
    if problem.family.bounded_left or problem.family.bounded_right:
        offset = shape.seqlen_k - shape.seqlen_q
        first = offset - (left if left >= 0 else shape.seqlen_k)
        last = offset + (right if right >= 0 else shape.seqlen_q)

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key >= row + first) & (key <= row + last)

        def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return key <= row + last

        shown = visible if problem.family.bounded_left else causal
        mask = create_block_mask(shown, None, None, shape.seqlen_q, shape.seqlen_k, device=q.device)
    if problem.family.varlen:
        q, k, v = map(in_a_row, (q, k, v))
        mask = create_block_mask(document_mask(problem), None, None, q.shape[2], k.shape[2], device=q.device)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": shape.gqa_group_size > 1}
    features = seeded_features(problem, device=q.device)
    if score_mod := _score_mod(features, shape.seqlen_k - shape.seqlen_q):
        options["score_mod"] = score_mod
    launch = partial(_compiled_flex(), q, k, v, **options)
    return launch, f"torch {torch.__version__} FlexAttention, compiled with dynamic=False"


def _score_mod(features: Features, offset: int) -> Callable[..., Tensor] | None:
    """What FlexAttention makes of a score; row i's own key is i + offset."""
    softcap, slopes = features.softcap, features.alibi_slopes

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        assert slopes is not None
        score = capped(score, batch, head, row, key) if softcap else score
        return score - slopes[batch, head] * (row + offset - key).abs()

    if slopes is not None:
        return biased
    return capped if softcap else None


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - imports the compiler

    torch._dynamo.config.cache_size_limit = 1000  # one compilation for each shape
    return torch.compile(flex_attention, dynamic=False)


def _fa3(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], str]:
    _require_no_tensors(problem)
    library = _first_module("flash_attn_interface", "fa3_fwd_interface")
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    is_causal = problem.window == (-1, 0)
    options: dict[str, Any] = {} if is_causal else {"window_size": problem.window}
    if problem.family.softcap:
        options["softcap"] = seeded_features(problem, device=q.device).softcap
    launch = partial(library.flash_attn_func, q, k, v, causal=is_causal, **options)
    return launch, f"{library.__name__} (FlashAttention-3), (batch, seqlen, heads, head_dim)"


def _first_module(*names: str) -> Any:
    """The first of these modules that is installed; the last one's ImportError if none is."""
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return importlib.import_module(found[0] if found else names[-1])


def _require_no_tensors(problem: AttentionProblem, known: tuple[str, ...] = ()) -> None:
    others = [name for name in problem.family.feature_tensors if name not in known]
    if others:
        raise UnsupportedError(f"this peer is not compared with {' and '.join(others)}")


def _require_square(problem: AttentionProblem) -> None:
    if problem.family.softcap:
        raise UnsupportedError("SDPA has no cap on its scores")
    _require_no_tensors(problem, known=("attn_mask",))
    if problem.family.has_mask and problem.family.bounded_right:
        raise UnsupportedError("SDPA takes a mask or is_causal")
    if problem.window not in ((-1, -1), (-1, 0)):
        raise UnsupportedError("SDPA has no window; a mask for it would be another kernel")
    if problem.family.bounded_right and problem.shape.seqlen_q != problem.shape.seqlen_k:
        raise UnsupportedError("SDPA's is_causal is top-left aligned: not the same problem for unequal lengths")


PEERS: dict[str, Peer] = {
    "sdpa-flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "fa3": _fa3,
    OURS_UNORDERED: _ours_unordered,
    OURS_PADDED: _ours_padded,
}


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
