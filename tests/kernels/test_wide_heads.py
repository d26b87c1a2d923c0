"""Head dims above 256: several tiles to a head dim, and programs that share out the columns of V."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_autotune import attention, flash_attn_kvpacked_func
from fa_autotune.dispatch.decision import Origin
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.kernels.loaded import load_kernel
from fa_autotune.kernels.pieces import part_pieces
from fa_autotune.kernels.render import render
from fa_autotune.ops import kernel_plan
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.estimates import part_columns, value_parts
from fa_autotune.space.registry import supported_variants, variant_spec
from fa_autotune.space.seeds import default_config, seed_configs
from kit.attention_calls import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    assert_gradients_right,
    assert_right,
    causal_or_not,
    interpreted,
    make_small,
    requiring,
    runs_kernels,
)
from kit.combinations import rest, sampled, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.releases import THIS_TRITON

H200 = KNOWN_DEVICES["h200"]
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1}
Compile = Callable[[Sequence[Candidate], DeviceSpec], list[CompileResult]]


def make_family(
    kernel_pass: Pass,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: DType = DType.BFLOAT16,
    access: Access | None = None,
    causal: bool = True,
    **features: bool,
) -> AttentionFamily:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
        **features,
    )


def failures(family: AttentionFamily, variant: Variant, **knobs: Any) -> tuple[str, ...]:
    """What is wrong with a kernel on small calls around its blocks."""
    config: Any = variant_spec(family.kernel_pass, variant).config(**{**SMALL, **knobs})
    kernel = load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)
    chosen = probes(family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=config.EXACT_LENGTHS)
    return verify(kernel, family, chosen, torch.device("cpu"), repeated=False).failures


# --- what a program computes -----------------------------------------------------------------------------------------


@given(st.integers(8, 512), st.sampled_from([32, 64, 128, 256]))
def test_parts_cover_every_column_of_v_once(head_dim_v: int, widest: int) -> None:
    family = make_family(Pass.FWD, 64, head_dim_v)
    parts, columns, pieces = value_parts(family), part_columns(family), part_pieces(family, widest)
    assert (parts > 1) == (head_dim_v > 256)
    if parts > 1:
        assert [piece.start for piece in pieces] == [sum(p.width for p in pieces[:n]) for n in range(len(pieces))]
        assert sum(piece.width for piece in pieces) == columns <= 256
        assert (parts - 1) * columns < head_dim_v <= parts * columns
        assert any(piece.padded for piece in pieces) == (head_dim_v < parts * columns)


def test_only_a_wide_v_is_shared_out() -> None:
    for family in (make_family(Pass.FWD, 512, 256), make_family(Pass.BWD_DQ, 512)):
        config = variant_spec(family.kernel_pass, Variant.PORTABLE).config(**SMALL)
        assert "part" not in render(Candidate(family=family, variant=Variant.PORTABLE, config=config)).text


@pytest.mark.parametrize("variant", [Variant.PORTABLE, Variant.TMA])
def test_the_parts_of_one_block_of_rows_lie_side_by_side_in_the_grid(variant: Variant) -> None:
    family = make_family(Pass.FWD, 64, 320)
    config = variant_spec(Pass.FWD, variant).config(**SMALL)
    kernel = load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)
    assert kernel.module.grid(3, 5, 70) == (3 * 5 * 5 * 2, 1, 1)
    assert "part = tl.program_id(0) % V_PARTS" in render(kernel.candidate).text


# --- in the interpreter ----------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("variant", "dims", "knobs"),
    [
        (Variant.PORTABLE, (16, 511), {"HEAD_DIM_PIECE": 128, "EXACT_LENGTHS": True}),
        (Variant.TMA, (16, 328), {"STORE_BY_TMA": False}),
        *rest(
            [
                (Variant.PORTABLE, (264, 300), {}),
                (Variant.TMA, (16, 512), {"EXACT_LENGTHS": True, "ROW_SUM_LANES": 8, "BLOCK_N": 32}),
            ]
        ),
    ],
)
def test_a_forward_passes_every_probe(variant: Variant, dims: tuple[int, int], knobs: dict[str, Any]) -> None:
    assert failures(make_family(Pass.FWD, *dims), variant, **knobs) == ()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant.PORTABLE, Variant.TMA])
def test_a_forward_with_every_feature_passes_every_probe(variant: Variant) -> None:
    family = make_family(Pass.FWD, 24, 288, bounded_left=True, softcap=True, alibi=True, sinks=True)
    assert failures(family, variant, HEAD_DIM_PIECE=128) == ()


@runs_kernels
def test_the_parts_of_a_head_know_every_feature() -> None:
    tensors = make_small(45, 61, head_dim=24, head_dim_v=264)
    with torch.no_grad():
        assert_right(
            *tensors,
            window_size=(20, 3),
            softcap=5.0,
            alibi_slopes=torch.tensor([0.3, 0.1]),
            sinks=torch.tensor([0.5, 2.0]),
        )


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("kernel_pass", [*rest([Pass.BWD_DKDV]), Pass.BWD_DQ])
def test_a_backward_passes_every_probe(kernel_pass: Pass) -> None:
    assert failures(make_family(kernel_pass, 264, 300), Variant.PORTABLE) == ()


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [(FLOAT16, 300, 300), *rest([(BFLOAT16, 512, 512), (BFLOAT16, 512, 256), (BFLOAT16, 511, 64), (FLOAT32, 64, 300)])],
)
def test_attention_follows_the_numerics_rule(dtype: torch.dtype, head_dim: int, head_dim_v: int, causal: bool) -> None:
    tensors = make_small(37, 41, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    assert_gradients_right(*tensors, causal=causal)
    with torch.no_grad():
        assert_right(*tensors, causal=causal)


def test_a_head_dim_above_512_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="q has head_dim 513, kernels serve 8 to 512"):
        attention(*make_small(head_dim=513))


# --- which GPUs serve them --------------------------------------------------------------------------------------------


def dispatcher_of(device: DeviceSpec) -> Dispatcher:
    return Dispatcher(
        device=device, triton_version="3.7.1", load=lambda: Snapshot(rows=()), store_misses=lambda misses: None
    )


@pytest.fixture
def turing(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that asks a Tesla T4's dispatcher about gradients."""
    monkeypatch.setattr(kernel_plan, "dispatcher_of", lambda index: dispatcher_of(KNOWN_DEVICES["t4"]))


@runs_kernels
def test_gradients_that_no_kernel_gives_are_refused_at_the_forward_call(
    turing: None, loads: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, launched = make_small(dtype=FLOAT16, head_dim=512), []
    monkeypatch.setattr(kernel_plan.KernelPlan, "forward", lambda *_: launched.append(True))
    with pytest.raises(
        UnsupportedError, match=r"takes? .* bytes of shared memory, sm_75 offers 65536.*up to head_dim 256"
    ):
        attention(*requiring(*tensors))
    q, k, v = tensors
    with pytest.raises(UnsupportedError, match="gradients are served up to head_dim 256 on every GPU"):
        flash_attn_kvpacked_func(q, torch.stack([k, v], 2).requires_grad_())
    assert launched == []


@runs_kernels
def test_results_without_gradients_are_served_all_the_same(turing: None) -> None:
    with torch.no_grad():
        assert_right(*make_small(dtype=FLOAT16, head_dim=512))
    assert_gradients_right(*make_small(dtype=FLOAT16, head_dim=256))


@pytest.mark.parametrize("name", sorted(set(KNOWN_DEVICES) - {"t4"}))
def test_every_gpu_since_ampere_serves_gradients_of_16_bit_heads_of_512(name: str) -> None:
    for kernel_pass in (Pass.FWD, Pass.BWD_DELTA, Pass.BWD_DKDV, Pass.BWD_DQ):
        problem = AttentionProblem.parse("4x8x8x1024x1024x512,causal").for_pass(kernel_pass)
        assert dispatcher_of(KNOWN_DEVICES[name]).peek(problem).origin is Origin.DEFAULT


def test_hoppers_own_variants_say_why_they_do_not_serve() -> None:
    for spec in (variant_spec(Pass.FWD, Variant.HOPPER_WS), variant_spec(Pass.BWD_FUSED, Variant.HOPPER_WIDE)):
        reason = spec.supports(make_family(spec.kernel_pass, 512), "sm_90", (3, 7))
        assert reason is not None
        assert "head dims up to 256, not 512" in reason


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(compile_all: CompileAll) -> Compile:
    """Compile candidates for a GPU, with the shared memory that it has."""
    return lambda candidates, device: compile_all(candidates, device.arch, device.smem_optin_bytes)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *rest([("a100", 512)]),
        *sampled([("h200", 512)]),
        *slow([("a100", 320), ("h200", 320), ("a10", 512), ("rtx5090", 512), ("b200", 512)]),
    ],
)
def test_defaults_compile_and_pass_all_gates(name: str, head_dim: int, compiled: Compile) -> None:
    device = KNOWN_DEVICES[name]
    candidates = [
        Candidate(family=family, variant=spec.variant, config=default_config(spec, family, device.arch))
        for kernel_pass in (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
        for family in (make_family(kernel_pass, head_dim),)
        for spec in supported_variants(family, device.arch, THIS_TRITON)
    ]
    assert unexpected(device.arch, candidates, compiled(candidates, device)) == {}
    assert {candidate.variant for candidate in candidates} >= {Variant.PORTABLE}
    assert (Variant.TMA in {one.variant for one in candidates}) == (device.arch in ("sm_90", "sm_100"))


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.parametrize("kernel_pass", [Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ])
def test_seeds_for_hopper_give_the_search_a_start(kernel_pass: Pass, compiled: Compile) -> None:
    """Three at least pass all gates, of the variant that is taken first."""
    family = make_family(kernel_pass, 512)
    spec = supported_variants(family, H200.arch, THIS_TRITON)[0]
    seeds = [
        Candidate(family=family, variant=spec.variant, config=config)
        for config in seed_configs(spec, family, H200.arch)
        if spec.rejection(config, family=family, shape=None, device=H200) is None
    ]
    gates = [result.gate for result in compiled(seeds, H200)]
    assert gates.count(None) >= 3, gates
