"""Every schedule of the warp-specialised forward compiles for sm_90 and keeps what it is written for.

That is what can be checked of Gluon without a GPU: it has no interpreter. test_gpu_hopper_ws.py checks the values.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fa_autotune.kernels.compiler import CompilePool, CompileResult, compile_environ, resource_report
from fa_autotune.kernels.gates import GATES, CompiledText, CompileRequest
from fa_autotune.kernels.modules import write_module
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import KNOWN_DEVICES
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.records import TrialStatus
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule
from fa_autotune.space.estimates import BARRIER_BYTES, hopper_smem_bytes
from fa_autotune.space.registry import KnobValue, variant_spec
from fa_autotune.worker import WorkerPool
from kit.combinations import rest, slow
from kit.compile_candidates import CompileAll, request_of
from kit.compile_jobs import compiled_text
from kit.releases import OWN_ADDRESSES, THIS_TRITON

pytestmark = pytest.mark.kernel

H200 = KNOWN_DEVICES["h200"]
SPEC = variant_spec(Pass.FWD, Variant.HOPPER_WS)
HEAD_DIMS = [(128, 128), (64, 64), (96, 96), (192, 192), (256, 256), (192, 128)]
Compile = Callable[[Sequence[Candidate]], list[CompileResult]]


def make_candidate(
    schedule: Schedule,
    head_dims: tuple[int, int] = (128, 128),
    *,
    causal: bool = True,
    dtype: DType = DType.BFLOAT16,
    **knobs: KnobValue,
) -> Candidate:
    family = AttentionFamily(
        dtype=dtype, head_dim=head_dims[0], head_dim_v=head_dims[1], bounded_right=causal, access=Access.TMA
    )
    shared = {"SCHEDULE": schedule, "CONSUMERS": 1 if schedule is Schedule.SINGLE else 2, "BLOCK_N": 64, **knobs}
    return Candidate(family=family, variant=Variant.HOPPER_WS, config=SPEC.config(**shared))


def passes(candidate: Candidate) -> bool:
    return SPEC.rejection(candidate.config, family=candidate.family, shape=None, device=H200) is None


def widest(schedule: Schedule, head_dims: tuple[int, int], **others: object) -> Candidate | None:
    """The candidate with the widest block of keys that the constraints let pass."""
    found = [make_candidate(schedule, head_dims, BLOCK_N=block_n, **others) for block_n in (128, 64)]  # type: ignore[arg-type]
    return next(filter(passes, found), None)


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
    assert isinstance(candidate.config, HopperWsFwdConfig)
    counted = hopper_smem_bytes(candidate.family, candidate.config)
    return result.resources is not None and counted - BARRIER_BYTES <= result.resources.smem_bytes <= counted


@pytest.mark.parametrize(
    ("causal", "head_dims"),
    [
        pytest.param(True, HEAD_DIMS[:1], id="causal"),
        pytest.param(True, HEAD_DIMS[1:], id="causal, more", marks=pytest.mark.rest),
        pytest.param(False, HEAD_DIMS, id="full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("schedule", Schedule)
def test_a_schedule_compiles_for_every_head_dim_and_passes_the_gates(
    schedule: Schedule, causal: bool, head_dims: list[tuple[int, int]], compiled: Compile
) -> None:
    candidates = [one for dims in head_dims if (one := widest(schedule, dims, causal=causal))]
    assert len(candidates) >= len(head_dims) / 2
    assert failed(candidates, compiled(candidates)) == {}


def test_constraints_leave_each_head_dim_a_schedule_with_a_producer() -> None:
    for schedule, dims in product((Schedule.TILE, Schedule.PERSISTENT), HEAD_DIMS):
        assert widest(schedule, dims)


OTHERS = [
    make_candidate(Schedule.SINGLE, (64, 64), dtype=DType.FLOAT16, BLOCK_N=128),
    make_candidate(Schedule.PIPELINED, (128, 128), dtype=DType.FLOAT16, BLOCK_N=128, PING_PONG=True),
    make_candidate(Schedule.TILE, (256, 256), dtype=DType.FLOAT16, causal=False, PING_PONG=True),
    make_candidate(Schedule.TILE, (64, 64), CONSUMERS=3, BLOCK_N=128, PING_PONG=True),
    make_candidate(Schedule.PIPELINED, (64, 64), causal=False, CONSUMERS=3, BLOCK_N=128, PING_PONG=True),
    make_candidate(Schedule.PERSISTENT, (64, 64), causal=False, PACK_P=False, EXACT_LENGTHS=True),
    make_candidate(Schedule.PERSISTENT, (128, 256)),  # O is wider than the query rows
    make_candidate(Schedule.PERSISTENT, (128, 128), BLOCK_N=128, OWN_OUT=True),
    make_candidate(Schedule.SINGLE, (40, 40), num_stages=4),
    make_candidate(Schedule.PIPELINED, (64, 64), CONSUMERS=3, num_stages=4),  # with the most barriers
    make_candidate(Schedule.PIPELINED, (80, 72), num_stages=3, EXACT_LENGTHS=True),
    make_candidate(Schedule.TILE, (8, 8), causal=False),
]


@pytest.mark.parametrize("some", [*rest([OTHERS[::2]]), *slow([OTHERS[1::2]])], ids=["", "more"])
def test_other_knobs_dtypes_and_head_dims_pass_the_gates_too(some: list[Candidate], compiled: Compile) -> None:
    assert [one.config for one in some if not passes(one)] == []
    assert failed(some, compiled(some)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_nearly_all_of_the_space_passes_the_gates(head_dims: tuple[int, int], causal: bool, compiled: Compile) -> None:
    """What the constraints let through and a gate stops costs a search a compile."""
    family = make_candidate(Schedule.TILE, head_dims, causal=causal).family
    seen = {"HEADS_PER_GROUP": 8, "EXACT_LENGTHS": False}  # which change no registers to speak of
    candidates = [
        Candidate(family=family, variant=Variant.HOPPER_WS, config=config)
        for config in SPEC.configs()
        if all(getattr(config, name) == value for name, value in seen.items())
    ]
    candidates = list(filter(passes, candidates))
    stopped = failed(candidates, compiled(candidates))
    assert len(stopped) <= len(candidates) / 8, stopped


@pytest.fixture(scope="module")
def persistent(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompileRequest, CompiledText]:
    """A kernel's text, to be looked at and changed."""
    candidate = make_candidate(Schedule.PERSISTENT, (64, 64), causal=False)
    request = request_of(candidate, tmp_path_factory.mktemp("kernels"), "sm_90", H200.smem_optin_bytes)
    with WorkerPool(1, name="compile", environ=compile_environ()) as workers:
        return request, workers.submit(compiled_text, request.module, deadline_s=240.0).result()


def test_the_gates_read_what_gluon_compiles_to(persistent: tuple[CompileRequest, CompiledText]) -> None:
    """Each of them lets a good kernel pass, and stops the same kernel with one line changed."""
    request, text = persistent
    resources = resource_report(text, 0.0)
    assert [name for name, gate in GATES if gate(request, text, resources)] == []
    assert 32 <= (resources.registers or 0) <= 255

    changed = {
        "score_layout": replace(text, ttgir=text.ttgir.replace("warpsPerCTA = [4, 1]", "warpsPerCTA = [2, 2]")),
        "wgmma_serialized": replace(text, log=f"{text.log}\nptxas info: (C7510) Potential Performance Loss"),
        "vector_access": replace(text, assembly=text.assembly.replace("cp.async.bulk.tensor", "ld.global.b16")),
    }
    for name, other in changed.items():
        assert [gate for gate, check in GATES if check(request, other, resources)] == [name]


def test_a_reduction_of_one_value_is_no_row_of_scores(persistent: tuple[CompileRequest, CompiledText]) -> None:
    """Consumers take the next tile's number by one, with warps along its only axis."""
    _, text = persistent
    assert re.search(r'"tt.reduce"[^"]*?tensor<1xi32', text.ttgir)


def test_an_address_that_two_loops_share_is_stopped(compile_pool: CompilePool, tmp_path: Path) -> None:
    """The template makes the addresses differ, by a zero that the assembler can't know; this is the kernel without.

    Where the compiler computes addresses anew for each product, the kernel is right without it, and passes.
    """
    candidate = make_candidate(Schedule.PIPELINED, (64, 64), BLOCK_N=128)
    source = render(candidate)
    text = source.text.replace("    place_of_q += gl.minimum(item, 0)\n", "")
    assert text != source.text
    file = write_module(replace(source, text=text, name="fwd_shared", digest="shared"), tmp_path)
    request = request_of(candidate, tmp_path, "sm_90", H200.smem_optin_bytes)
    result = compile_pool.submit(replace(request, module=file)).result()
    passed, stopped = (TrialStatus.OK, None), (TrialStatus.OVER_RESOURCES, "set_addresses")
    assert (result.status, result.gate) == (passed if THIS_TRITON in OWN_ADDRESSES else stopped)


@pytest.mark.rest
class TestSpills:
    """Three consumers have 160 registers a thread: at head_dim 96, which the constraints keep from them, a kernel with
    blocks of 128 keys spills in its loops. At head_dim 256 two consumers spill as well, but once for each tile.
    """

    IN_LOOPS = make_candidate(Schedule.PIPELINED, (96, 96), CONSUMERS=3, BLOCK_N=128)
    PER_TILE = make_candidate(Schedule.PERSISTENT, (256, 256), PING_PONG=True)

    def test_in_a_loop_of_products_are_stopped(self, compiled: Compile) -> None:
        (result,) = compiled([self.IN_LOOPS])
        assert (result.status, result.gate) == (TrialStatus.OVER_RESOURCES, "spills")
        assert re.match(r"\d+ instructions spill in loops of matrix products", result.error or "")

    def test_once_for_each_tile_are_let_through(self, compiled: Compile) -> None:
        (result,) = compiled([self.PER_TILE])
        assert result.resources is not None
        assert result.resources.spill_bytes > 0
        assert (result.status, result.error) == (TrialStatus.OK, None)
