"""An Evaluator that answers from a landscape instead of a GPU, so that the search is tested anywhere and in seconds."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from fa_autotune.jobs import TuneJob, tune_job
from fa_autotune.kernels.render import rendered_digest
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec, Toolchain
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Measurement, Regime, Role, TrialRecord, TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import BwdDeltaConfig, BwdPostprocessConfig, HopperWsBwdConfig, config_key
from fa_autotune.space.registry import compile_form
from fa_autotune.tuner import TuneSummary

Landscape = Callable[[Candidate, AttentionProblem], float | TrialStatus]


def candidate_digest(candidate: Candidate) -> str:
    """Stands in for the rendered kernel's digest, so that no template is needed."""
    text = f"{candidate.family.key}{candidate.variant}{config_key(candidate.config)}"
    return sha256(text.encode()).hexdigest()[:16]


def attention_landscape(device: DeviceSpec, *, failing_share: float = 0.04) -> Landscape:
    """A smooth model of attention: waves × steps × tile time, spills, and a share of kernels that fail.

    The same candidate always fails in the same way; big tiles with deep pipelines do not compile.
    """
    failures = [s for s in TrialStatus if s not in (TrialStatus.OK, TrialStatus.REJECTED)]

    def look_up(candidate: Candidate, problem: AttentionProblem) -> float | TrialStatus:
        config, shape = candidate.config, problem.shape
        draw = random.Random(candidate_digest(candidate))
        if draw.random() < failing_share:
            return draw.choice(failures)
        if isinstance(config, BwdDeltaConfig):
            return 0.004 + 0.001 * (abs(math.log2(config.BLOCK_M / 32)) + abs(math.log2(config.num_warps / 4)))
        if isinstance(config, BwdPostprocessConfig):
            return 0.004 + 0.001 * abs(math.log2(config.num_warps / 4))
        if isinstance(config, HopperWsBwdConfig):
            return 0.5 + 0.02 * abs(math.log2(config.HEADS_PER_GROUP / 8)) + (0 if config.EXACT_LENGTHS else 0.02)
        if config.BLOCK_M * config.BLOCK_N * config.num_stages > 2**17:
            return TrialStatus.COMPILE_FAILED
        threads = config.num_warps * device.warp_size
        maxnreg = getattr(config, "maxnreg", None) or 255
        registers = 40 + config.BLOCK_M * (problem.family.head_dim_v + 1.5 * config.BLOCK_N) / threads
        if registers > maxnreg * 1.1:
            return TrialStatus.OVER_RESOURCES
        smem = config.num_stages * config.BLOCK_N * problem.family.head_dim * 2 * problem.family.dtype.itemsize
        resident = min(
            device.max_threads_per_sm // threads,
            device.smem_per_sm_bytes // max(1, smem),
            int(device.regs_per_sm // (threads * min(registers, maxnreg))),
        )
        if resident < 1:
            return TrialStatus.LAUNCH_FAILED
        programs = math.ceil(shape.seqlen_q / config.BLOCK_M) * shape.batch_size * shape.num_q_heads
        waves = math.ceil(programs / (device.num_sms * resident))
        steps = math.ceil(shape.seqlen_k / config.BLOCK_N) * (0.55 if problem.family.bounded_right else 1.0)
        tile_ms = 4 * config.BLOCK_M * config.BLOCK_N * problem.family.head_dim / 6e9
        loss = (1 + 40 / config.BLOCK_M) * (1 + 24 / config.BLOCK_N) * (1 + 0.8 / (config.num_stages * resident))
        loss *= 1 + 0.15 * abs(math.log2(config.num_warps * 16 / config.BLOCK_M))
        loss *= 1 + 0.02 * abs(math.log2(config.HEADS_PER_GROUP / 8)) + (0 if config.EXACT_LENGTHS else 0.02)
        loss *= (1.03 if getattr(config, "ROW_SUM_LANES", 8) == 1 else 1) * (
            1.06 if candidate.variant is Variant.PORTABLE else 1
        )
        return 0.004 + waves * resident * (0.001 + steps * tile_ms * loss)

    return look_up


class ReplayEvaluator:
    """Answers from a landscape with noise that depends on seed, candidate and problem only; counts what is asked.

    `interrupt_after` screened records an exception (`interrupt_with`) ends the run, as a kill would.
    """

    def __init__(
        self,
        landscape: Landscape,
        *,
        noise: float = 0.02,
        seed: int = 0,
        interrupt_after: int | None = None,
        interrupt_with: type[BaseException] = KeyboardInterrupt,
        confirm_failures: Callable[[Candidate], bool] = lambda candidate: False,
        digest: Callable[[Candidate], str] = candidate_digest,
    ) -> None:
        self.landscape = landscape
        self.noise = noise
        self.seed = seed
        self.interrupt_after = interrupt_after
        self.interrupt_with = interrupt_with
        self.confirm_failures = confirm_failures
        self.digest = digest
        self.calls: list[str] = []
        self.prefetched: list[Candidate] = []
        self.screened: list[tuple[AttentionProblem, Candidate]] = []
        self.confirmed: list[tuple[AttentionProblem, Candidate]] = []

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Remember what would be compiled ahead."""
        self.calls.append("prefetch")
        self.prefetched.extend(candidates)

    def screen(
        self,
        candidates: Sequence[Candidate],
        problems: Sequence[AttentionProblem],
        *,
        incumbents_ms: Sequence[float | None] = (),
    ) -> Iterator[TrialRecord]:
        """One record for each candidate on each problem, in order."""
        self.calls.append("screen")
        for candidate in candidates:
            for problem in problems:
                if self.interrupt_after is not None and len(self.screened) >= self.interrupt_after:
                    raise self.interrupt_with
                self.screened.append((problem, candidate))
                yield self.record(candidate, problem, Role.SCREEN)

    def confirm(self, candidates: Sequence[Candidate], problem: AttentionProblem) -> list[TrialRecord]:
        """Finalists with a tenth of the noise, ranked within each variant; failures last."""
        self.calls.append("confirm")
        self.confirmed.extend((problem, candidate) for candidate in candidates)
        times: list[tuple[float, Candidate]] = []
        failed: list[TrialRecord] = []
        for candidate in candidates:
            truth = self.landscape(candidate, problem)
            if isinstance(truth, TrialStatus) or self.confirm_failures(candidate):
                failed.append(failure(candidate, problem, TrialStatus.WRONG_RESULT))
            else:
                times.append((self._noisy(truth, candidate, problem, Role.CONFIRM), candidate))
        ranks: dict[Variant, int] = {}
        records = []
        for time_ms, candidate in sorted(times, key=lambda pair: pair[0]):
            ranks[candidate.variant] = ranks.get(candidate.variant, 0) + 1
            records.append(success(candidate, problem, time_ms, Role.CONFIRM, rank=ranks[candidate.variant]))
        return [self._digested(record) for record in records + failed]

    def record(self, candidate: Candidate, problem: AttentionProblem, role: Role) -> TrialRecord:
        """What this landscape says of a candidate."""
        truth = self.landscape(candidate, problem)
        if isinstance(truth, TrialStatus):
            return self._digested(failure(candidate, problem, truth))
        return self._digested(success(candidate, problem, self._noisy(truth, candidate, problem, role), role))

    def _digested(self, record: TrialRecord) -> TrialRecord:
        return replace(record, kernel_digest=self.digest(record.candidate))

    def _noisy(self, time_ms: float, candidate: Candidate, problem: AttentionProblem, role: Role) -> float:
        spread = self.noise if role is Role.SCREEN else self.noise / 10
        draw = random.Random(f"{self.seed} {candidate_digest(candidate)} {problem.key} {role}")
        return time_ms * math.exp(draw.gauss(0.0, spread))


def success(
    candidate: Candidate, problem: AttentionProblem, time_ms: float, role: Role = Role.SCREEN, rank: int | None = None
) -> TrialRecord:
    """An OK record."""
    measurement = Measurement(
        role=role,
        regime=Regime.EVENTS,
        launches=10,
        p20_ms=time_ms * 0.99,
        median_ms=time_ms,
        p80_ms=time_ms * 1.01,
        rank=rank,
    )
    return TrialRecord(
        candidate=candidate,
        problem=problem,
        status=TrialStatus.OK,
        form=compile_form(candidate.family),
        kernel_digest=candidate_digest(candidate),
        measurement=measurement,
    )


def failure(candidate: Candidate, problem: AttentionProblem, status: TrialStatus) -> TrialRecord:
    """A record of a candidate that failed."""
    return TrialRecord(
        candidate=candidate,
        problem=problem,
        status=status,
        form=compile_form(candidate.family),
        kernel_digest=candidate_digest(candidate),
        error=f"made to end as {status.value}",
        constraint="spills" if status is TrialStatus.OVER_RESOURCES else None,
    )


class OpenReplay(ReplayEvaluator):
    """A replay that knows a toolchain, as `tune_job` wants it."""

    toolchain = Toolchain(triton="3.7.1")


def replayed_job(
    device: DeviceSpec = KNOWN_DEVICES["h200"], index: int | None = 0, **options: Any
) -> tuple[Callable[[TuneJob], TuneSummary], ReplayEvaluator]:
    """`tune_job` on a device that need not be there, and the evaluator that it opens."""
    landscape = options.pop("landscape", attention_landscape(KNOWN_DEVICES["h200"]))
    evaluator_type = options.pop("evaluator_type", OpenReplay)
    evaluator = evaluator_type(landscape, digest=rendered_digest, **options)  # as rendered: what a resumed job compares
    run = partial(
        tune_job, find=lambda gpu: (device, index), open_evaluator=lambda device, index: nullcontext(evaluator)
    )
    return run, evaluator
