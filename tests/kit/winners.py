"""Winners as a snapshot holds them, and decisions made from them alone: no database, no GPU."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fa_autotune.dispatch.decision import Decision, decide
from fa_autotune.dispatch.dispatcher import ZEROS_PER_POSTPROCESSING, Dispatcher
from fa_autotune.dispatch.winners import Snapshot, Source, WinnerRow
from fa_autotune.problem.device import KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.records import Regime
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import (
    HopperWideBwdConfig,
    HopperWsBwdConfig,
    HopperWsFwdConfig,
    KernelConfig,
    PortableFwdConfig,
    Schedule,
    TmaFwdConfig,
)
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.space.workspace import is_wide

H100, H200, A100, T4 = (KNOWN_DEVICES[name] for name in ("h100", "h200", "a100", "t4"))
TRITON = "3.7.1"
PROBLEM = AttentionProblem.parse("4x32x8x4096x4096x128,causal")
PORTABLE = PortableFwdConfig(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3)
TMA = TmaFwdConfig(BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=2)
HOPPER = HopperWsFwdConfig(SCHEDULE=Schedule.PERSISTENT, CONSUMERS=2, BLOCK_N=128)

# From the rung that counts most down: user fresh, pack fresh, user stale, pack stale.
LADDER: list[dict[str, Any]] = [
    {"source": Source.USER},
    {"source": Source.PACK},
    {"source": Source.USER, "kernel_digest": "yesterday"},
    {"source": Source.PACK, "kernel_digest": "yesterday"},
]


def plain_config(problem: AttentionProblem) -> KernelConfig:
    """A config of the variant of a problem's pass that asks for least: portable, where there is one."""
    kernel_pass = problem.family.kernel_pass
    if kernel_pass is Pass.FWD:
        return PORTABLE
    fused = Variant.HOPPER_WIDE if is_wide(problem.family) else Variant.HOPPER_WS
    variant = fused if kernel_pass is Pass.BWD_FUSED else Variant.PORTABLE
    return default_config(variant_spec(kernel_pass, variant), problem.family, H200.arch)


def winner(
    problem: AttentionProblem | str = PROBLEM, config: KernelConfig = PORTABLE, device: DeviceSpec = H200, **others: Any
) -> WinnerRow:
    """A winner of a problem on a device, fresh and of the user's database unless `others` say otherwise."""
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


def variant_of(config: KernelConfig) -> Variant:
    """The variant whose config it is."""
    if isinstance(config, HopperWsFwdConfig | HopperWsBwdConfig):
        return Variant.HOPPER_WS
    if isinstance(config, HopperWideBwdConfig):
        return Variant.HOPPER_WIDE
    return Variant.TMA if type(config).__name__.startswith("Tma") else Variant.PORTABLE


def choose(
    problem: AttentionProblem | str, *rows: WinnerRow, device: DeviceSpec = H200, triton: str = TRITON
) -> Decision:
    """The decision on a device that has these winners; their kernels render as they did, unless the rows say not."""
    problem = AttentionProblem.parse(problem) if isinstance(problem, str) else problem
    return decide(
        problem, device=device, triton_version=triton, snapshot=Snapshot(rows=rows), digest_of=lambda candidate: "today"
    )


def dispatcher(
    *rows: WinnerRow,
    device: DeviceSpec = H200,
    triton: str = TRITON,
    store: Callable[[Mapping[AttentionProblem, int]], None] | None = None,
) -> Dispatcher:
    """A device's dispatcher that has these winners; misses are stored nowhere unless `store` takes them."""
    return Dispatcher(
        device=device,
        triton_version=triton,
        load=lambda: Snapshot(rows=rows),
        digest_of=lambda candidate: "today",
        store_misses=store or (lambda misses: None),
    )


def winners_of(call: AttentionProblem, **median_ms: float) -> list[WinnerRow]:
    """A winner for each named pass of a call, with its time."""
    rows = []
    for name, ms in median_ms.items():
        problem = call.for_pass(Pass(name))
        rows.append(winner(problem, plain_config(problem), median_ms=ms))
    return rows


def all_winners(
    call: AttentionProblem, *, fused_ms: float, split_ms: float, unordered_ms: float | None = None
) -> list[WinnerRow]:
    """Winners of all kernels; the times are those of each way's three together, and of zeros for the unordered one."""
    short_ms = 0.1
    fused = {Pass.BWD_PREPROCESS: short_ms, Pass.BWD_FUSED: fused_ms - 2 * short_ms, Pass.BWD_POSTPROCESS: short_ms}
    rows = winners_of(call, **fused, **dict.fromkeys(SPLIT_BACKWARD, split_ms / 3))
    if unordered_ms is not None:
        unordered = call.for_pass(Pass.BWD_FUSED, unordered=True)
        alone_ms = unordered_ms - (2 + ZEROS_PER_POSTPROCESSING) * short_ms
        rows.append(winner(unordered, plain_config(unordered), median_ms=alone_ms))
    return rows
