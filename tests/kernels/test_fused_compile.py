"""The fused backward compiles for sm_90 without a spill in its loops, and its products stay asynchronous."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fa_autotune.kernels.compiler import CompileResult, compile_environ, resource_report
from fa_autotune.kernels.gates import GATES
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.estimates import BARRIER_BYTES, WIDE_BARRIER_BYTES, fused_smem_bytes
from fa_autotune.space.registry import KnobValue, VariantSpec, variant_spec
from fa_autotune.space.seeds import default_config
from fa_autotune.space.support import MIN_TRITON
from fa_autotune.space.workspace import is_wide
from fa_autotune.worker import WorkerPool
from kit.combinations import rest, sampled
from kit.compile_candidates import CompileAll, request_of
from kit.compile_jobs import compiled_text
from kit.releases import SPILLS_OF_WHOLE_BLOCKS, THIS_TRITON

pytestmark = pytest.mark.kernel

H200 = KNOWN_DEVICES["h200"]
Compile = Callable[[Sequence[Candidate]], list[CompileResult]]


def make_candidate(
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    dtype: DType = DType.BFLOAT16,
    unordered: bool = False,
    left: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    dropout: bool = False,
    **knobs: KnobValue,
) -> Candidate:
    family = AttentionFamily(
        kernel_pass=Pass.BWD_FUSED,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        bounded_right=causal,
        unordered=unordered,
        bounded_left=left,
        softcap=softcap,
        alibi=alibi,
        dropout=dropout,
    )
    spec = spec_of(family)
    default = default_config(spec, family, "sm_90")
    return Candidate(family=family, variant=spec.variant, config=replace(default, **knobs))  # type: ignore[arg-type]


def spec_of(family: AttentionFamily) -> VariantSpec:
    return variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WIDE if is_wide(family) else Variant.HOPPER_WS)


@pytest.fixture(scope="module")
def compiled(compile_all: CompileAll) -> Compile:
    return lambda candidates: compile_all(candidates, "sm_90", H200.smem_optin_bytes)


def failed(candidates: Sequence[Candidate], results: Sequence[CompileResult]) -> dict[str, object]:
    """Those that a gate stopped, or that take more shared memory than the constraints count."""
    return {
        f"{candidate.family.label} {candidate.config}": (result.status.value, result.gate, result.error)
        for candidate, result in zip(candidates, results, strict=True)
        if result.status is not TrialStatus.OK or not is_counted_right(candidate, result)
    }


def is_counted_right(candidate: Candidate, result: CompileResult) -> bool:
    counted = fused_smem_bytes(candidate.family, candidate.config)  # type: ignore[arg-type]
    barriers = WIDE_BARRIER_BYTES if is_wide(candidate.family) else BARRIER_BYTES
    return result.resources is not None and counted - barriers <= result.resources.smem_bytes <= counted


QUICK = [
    make_candidate(causal=True),
    make_candidate(64, causal=True),
    make_candidate(unordered=True),
    make_candidate(64),
    make_candidate(96, 40, causal=True, dtype=DType.FLOAT16, DIAGONAL_FIRST=True, SCORES_EARLY=True),
    make_candidate(40, 64, causal=True, dtype=DType.FLOAT16, unordered=True, DIAGONAL_FIRST=True, EXACT_LENGTHS=True),
    make_candidate(256, causal=True, DIAGONAL_FIRST=True, HEADS_PER_GROUP=2),
    make_candidate(256, unordered=True, EXACT_LENGTHS=True),
    make_candidate(192),
    make_candidate(192, 128, causal=True, dtype=DType.FLOAT16),
    make_candidate(64, 256, causal=True, dtype=DType.FLOAT16, EXACT_LENGTHS=True, DQ_STAGES=1),
    make_candidate(causal=True, left=True, softcap=True),
    make_candidate(64, causal=True, left=True, softcap=True, dtype=DType.FLOAT16),
    make_candidate(256, causal=True, left=True, softcap=True),
    make_candidate(causal=True, left=True, alibi=True),
    make_candidate(causal=True, dropout=True),
    make_candidate(dropout=True),
    make_candidate(64, causal=True, softcap=True, dropout=True, dtype=DType.FLOAT16),
    make_candidate(192, causal=True, alibi=True, dropout=True),
]


QUICK_PLACES = (0, 12, 18)
SAMPLED_PLACES = (2, 7, 13, 14, 15)  # which have what the quick ones lack


@pytest.mark.parametrize(
    "some",
    [
        [QUICK[place] for place in QUICK_PLACES],
        *sampled([[QUICK[place] for place in SAMPLED_PLACES]]),
        *rest([[one for place, one in enumerate(QUICK) if place not in QUICK_PLACES + SAMPLED_PLACES]]),
    ],
    ids=["", "sampled", "more"],
)
def test_it_compiles_and_passes_the_gates(some: list[Candidate], compiled: Compile) -> None:
    assert failed(some, compiled(some)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 192, 256])
def test_all_of_the_space_passes_the_gates(head_dim: int, causal: bool, dtype: DType, compiled: Compile) -> None:
    candidates = [
        Candidate(family=family, variant=spec_of(family).variant, config=config)
        for unordered in (False, True)
        for family in [make_candidate(head_dim, causal=causal, dtype=dtype, unordered=unordered).family]
        for config in spec_of(family).configs()
        if config.HEADS_PER_GROUP == 8  # type: ignore[union-attr]  # it changes one number
        and spec_of(family).rejection(config, family=family, shape=None, device=H200) is None
    ]
    assert failed(candidates, compiled(candidates)) == {}


FEATURES: dict[str, dict[str, bool]] = {
    "left": {"left": True},
    "window": {"left": True, "causal": True},
    "softcap": {"softcap": True},
    "causal softcap": {"causal": True, "softcap": True},
    "left softcap": {"left": True, "softcap": True},
    "window softcap": {"left": True, "causal": True, "softcap": True},
    "alibi": {"alibi": True},
    "causal alibi": {"causal": True, "alibi": True},
    "left alibi": {"left": True, "alibi": True},
    "window alibi": {"left": True, "causal": True, "alibi": True},
    "causal softcap alibi": {"causal": True, "softcap": True, "alibi": True},
    "window softcap alibi": {"left": True, "causal": True, "softcap": True, "alibi": True},
    "dropout": {"dropout": True},
    "causal dropout": {"causal": True, "dropout": True},
    "window dropout": {"left": True, "causal": True, "dropout": True},
    "causal softcap dropout": {"causal": True, "softcap": True, "dropout": True},
    "causal alibi dropout": {"causal": True, "alibi": True, "dropout": True},
    "window alibi dropout": {"left": True, "causal": True, "alibi": True, "dropout": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
def test_the_space_of_features_passes_the_gates(head_dim: int, features: str, dtype: DType, compiled: Compile) -> None:
    """But for the number of heads side by side and the order of key blocks, which change little."""
    candidates = [
        Candidate(family=family, variant=spec_of(family).variant, config=config)
        for unordered in (False, True)
        for family in [make_candidate(head_dim, dtype=dtype, unordered=unordered, **FEATURES[features]).family]
        if spec_of(family).supports(family, "sm_90", MIN_TRITON) is None
        for config in spec_of(family).configs()
        if config.HEADS_PER_GROUP == 8
        and not config.DIAGONAL_FIRST  # type: ignore[union-attr]
        and spec_of(family).rejection(config, family=family, shape=None, device=H200) is None
    ]
    assert failed(candidates, compiled(candidates)) == {}


@pytest.mark.rest
def test_a_kernel_that_adds_dq_up_in_another_way_is_stopped(tmp_path: Path) -> None:
    request = request_of(make_candidate(64, EXACT_LENGTHS=True), tmp_path, "sm_90", H200.smem_optin_bytes)
    with WorkerPool(1, name="compile", environ=compile_environ()) as workers:
        text = workers.submit(compiled_text, request.module, deadline_s=240.0).result()
    resources = resource_report(text, 0.0)
    spoiled = {"spills"} if THIS_TRITON in SPILLS_OF_WHOLE_BLOCKS else set()
    assert {name for name, gate in GATES if gate(request, text, resources)} == spoiled
    changed = replace(text, assembly=text.assembly.replace("cp.reduce.async.bulk.tensor", "red.global.add.f32"))
    assert {name for name, gate in GATES if gate(request, changed, resources)} == {*spoiled, "added_dq"}
