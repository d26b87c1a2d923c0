"""Decisions on the shipped winners, as text: what `tests/dispatch/decisions.txt` holds."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fa_autotune.dispatch.decision import Origin
from fa_autotune.dispatch.dispatcher import BackwardWay, Dispatcher
from fa_autotune.dispatch.winners import Snapshot, load_snapshot
from fa_autotune.errors import NoKernelError
from fa_autotune.paths import pack_paths
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.passes import BACKWARD_PASSES, FUSED_BACKWARD, KEYLESS_PASSES, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.space.candidate import Candidate
from fa_autotune.space.config import config_label

COMMAND = "PYTHONPATH=.:tests python -m kit.recorded_decisions > tests/dispatch/decisions.txt"
HEADER = (
    f"# {COMMAND}",
    "# Made of the packs that ship. Other winners and other defaults change lines.",
    "# GPU, Triton, problem → origin, kernel. Of the backward of a call: the way in order, the way in any order.",
)
HOPPER = ("h200", "h200", "h100")  # drawn from, for what serves hardly elsewhere
DEVICES = (*HOPPER, "h200", "h200", "a100", "l40s", "rtx4090", "mi300x", "t4")
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
SHAPES_PER_FAMILY = 4
# Families without winners, those of other kinds of tensors and other widths among them.
UNTUNED = (
    *("128,fp16", "80,causal", "96,fp16,causal", "40", "16,fp16,causal", "64,fp32", "128,fp32,causal", "128,fp32,tf32"),
    *("256,fp16,softcap", "512,causal", "512,fp16", "192x128,causal", "64x192", "128,any", "128,aligned,causal"),
    *("72,any,fp16,causal", "64,bias,any", "128,wide_bias,causal", "64,bool_mask,loose_mask", "128,dropout,left=0"),
    *(
        "128,left=0",
        "128,causal,left=0,softcap",
        "64,right=0,left=0,fp16,alibi",
        "128,varlen,fp16,causal",
        "256,varlen",
    ),
    *("128,softcap,alibi,dropout", "64,fp16,sinks,causal,left=0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem on a GPU, with a Triton; `backward`: the way of a call's backward is asked for."""

    device: str
    triton: str
    problem: AttentionProblem
    backward: bool = False

    @property
    def text(self) -> str:
        """The left side of a line."""
        return f"{self.device} {self.triton} {'backward ' if self.backward else ''}{self.problem.label}"


class Recorder:
    """Decides on the shipped packs alone, for every device; nobody's own winners count."""

    def __init__(self) -> None:
        self.snapshot: Snapshot = load_snapshot(Path("/nonexistent/tuning.db"), pack_paths())
        self._dispatchers: dict[tuple[str, str], Dispatcher] = {}

    def dispatcher(self, device: str, triton: str) -> Dispatcher:
        """The dispatcher of a device; only another Triton makes a row stale, so that templates may change."""
        key = device, triton
        if key not in self._dispatchers:
            self._dispatchers[key] = Dispatcher(
                device=KNOWN_DEVICES[device],
                triton_version=triton,
                load=lambda: self.snapshot,
                digest_of=None,
                store_misses=lambda misses: None,
            )
        return self._dispatchers[key]

    def asked(self) -> Iterator[Asked]:
        """Random lengths and windows of every family of the packs, and of some that have no winners."""
        draw = random.Random(14)
        families = {row.problem.family: None for row in self.snapshot.rows}
        tuned: dict[AttentionFamily, list[AttentionShape]] = {family: [] for family in families}
        for row in self.snapshot.rows:
            tuned[row.problem.family].append(row.problem.shape)
        calls = [AttentionProblem.parse(f"1x1x1x1x1x{text}").family for text in UNTUNED]
        for family in [*sorted(families, key=lambda one: one.key), *calls]:
            problems = [random_problem(draw, family) for _ in range(SHAPES_PER_FAMILY - 1)]
            shapes = tuned.get(family) or [random_problem(draw, family).shape]
            problems.append(AttentionProblem(family=family, shape=draw.choice(shapes)))
            for problem in problems:
                is_fused = family.kernel_pass in FUSED_BACKWARD
                device, triton = draw.choice(HOPPER if is_fused else DEVICES), draw.choice(TRITONS)
                yield Asked(device=device, triton=triton, problem=problem)
                if family in calls:
                    other = draw.choice([one for one in BACKWARD_PASSES if one is not Pass.BWD_DELTA])
                    yield Asked(device=device, triton=triton, problem=problem.for_pass(other))
                if family.kernel_pass is Pass.FWD:
                    yield Asked(device=draw.choice(HOPPER), triton=triton, problem=problem, backward=True)

    def answer(self, asked: Asked) -> str:
        """The right side of a line, by what is explained."""
        dispatcher = self.dispatcher(asked.device, asked.triton)
        if asked.backward:
            choices = [dispatcher.backward_choice(asked.problem, unordered=unordered) for unordered in (False, True)]
            return told_ways(choice.way for choice in choices)
        try:
            decision = dispatcher.peek(asked.problem)
        except NoKernelError:
            return UNSERVED
        return told_choice(decision.origin, decision.stale, decision.candidate)


UNSERVED = "none"


def told_choice(origin: Origin, stale: bool, candidate: Candidate) -> str:
    """A kernel and where it comes from."""
    return f"{origin}{' stale' if stale else ''} {candidate.variant} {config_label(candidate.config)}"


def told_ways(ways: Iterable[BackwardWay]) -> str:
    """The ways of a backward."""
    return "; ".join(way.value for way in ways)


def recorded(path: Path) -> Iterator[tuple[Asked, str]]:
    """What a file asks, and what it says."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        question, answer = line.split(" → ")
        device, triton, text = question.split(" ", maxsplit=2)
        call = text.removeprefix("backward ")
        problem = AttentionProblem.parse(call)
        yield Asked(device=device, triton=triton, problem=problem, backward=call != text), answer


def random_problem(draw: random.Random, family: AttentionFamily) -> AttentionProblem:
    """A problem of a family: lengths up to 20,000, few of them short, a third powers of two, and windows as long."""

    def length() -> int:
        found = int(2 ** draw.uniform(draw.choice((0, 6, 8)), 14.3))
        return 1 << found.bit_length() if draw.random() < 1 / 3 else found

    kv_heads, group = draw.choice((1, 2, 8, 12)), draw.choice((1, 1, 4, 7))
    seqlen_q, seqlen_k = length(), length()
    if family.kernel_pass in KEYLESS_PASSES:
        kv_heads, group, seqlen_k = kv_heads * group, 1, seqlen_q
    elif draw.random() < 1 / 2:
        seqlen_q = seqlen_k
    return AttentionProblem(
        family=family,
        shape=AttentionShape(
            batch_size=draw.choice((1, 1, 2, 8, 33)),
            num_q_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window_left=length() if family.bounded_left else 0,
            window_right=length() if family.bounded_right and draw.random() < 1 / 3 else 0,
        ),
    )


if __name__ == "__main__":
    recorder = Recorder()
    for line in HEADER:
        print(line)
    for one in recorder.asked():
        print(f"{one.text} → {recorder.answer(one)}")
