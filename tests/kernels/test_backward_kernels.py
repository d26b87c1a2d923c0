"""Generated backward kernels against the reference, in Triton's interpreter: passes, variants, dtypes, masks, dims."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.seeded import seeded_workload
from fa_autotune.evaluation.verify import verify
from fa_autotune.evaluation.workload import Workload
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem, AttentionShape
from fa_autotune.reference.attention import attention_gradients, attention_reference
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import VariantSpec, variant_spec
from fa_autotune.space.seeds import default_config
from kit.combinations import one_in, rest, slow
from kit.scalar_functions import on_python_numbers
from kit.strategies import PLAIN_VARIANTS

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu_backward.py runs the same checks"
    ),
]

CPU = torch.device("cpu")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}
TILED = (Pass.BWD_DKDV, Pass.BWD_DQ)


every_kernel = pytest.mark.parametrize(
    ("kernel_pass", "variant"), [(kernel_pass, variant) for kernel_pass in TILED for variant in PLAIN_VARIANTS]
)
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def make_family(
    kernel_pass: Pass,
    dtype: DType = DType.BFLOAT16,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    access: Access | None = None,
) -> AttentionFamily:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
    )


def make_kernel(family: AttentionFamily, variant: Variant = Variant.PORTABLE, **knobs: Any) -> LoadedKernel:
    spec = variant_spec(family.kernel_pass, variant)
    usual = {"BLOCK_M": 32, "num_warps": 2} if family.kernel_pass is Pass.BWD_DELTA else SMALL
    candidate = Candidate(family=family, variant=variant, config=spec.config(**{**usual, **knobs}))
    return load_kernel(candidate, INTERPRETER.arch)


def failures(
    family: AttentionFamily, variant: Variant = Variant.PORTABLE, probe_list: list[Probe] | None = None, **knobs: Any
) -> tuple[str, ...]:
    kernel = make_kernel(family, variant, **knobs)
    config: Any = kernel.candidate.config
    chosen = probe_list or probes(
        family,
        block_m=config.BLOCK_M,
        block_n=getattr(config, "BLOCK_N", config.BLOCK_M),
        exact_lengths=getattr(config, "EXACT_LENGTHS", False),
    )
    return verify(kernel, family, chosen, CPU, repeated=False).failures


def one_probe(seqlen_q: int = 37, seqlen_k: int = 41, *, group: int = 2, **probe: Any) -> list[Probe]:
    shape = AttentionShape(batch_size=2, num_q_heads=2 * group, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return [Probe(shape=shape, **probe)]


# --- every probe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "causal", "kernel_pass", "variant"),
    one_in(1, [DType.BFLOAT16, DType.FLOAT16], [False, True], TILED, PLAIN_VARIANTS, default=2),
)
def test_passes_every_probe(dtype: DType, kernel_pass: Pass, variant: Variant, causal: bool) -> None:
    assert failures(make_family(kernel_pass, dtype, causal=causal), variant) == ()


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("access", [Access.TMA, Access.ANY])
def test_delta_passes_every_probe(access: Access, dtype: DType) -> None:
    assert failures(make_family(Pass.BWD_DELTA, dtype, access=access)) == ()


@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize(("head_dim", "causal"), [(59, True), *rest([(32, False), (32, True)])])
def test_fp32_is_computed_in_ieee_precision(head_dim: int, kernel_pass: Pass, causal: bool) -> None:
    family = make_family(kernel_pass, DType.FLOAT32, head_dim, causal=causal)
    assert failures(family, HEAD_DIM_PIECE=32) == ()


@both_masks
@pytest.mark.parametrize("kernel_pass", TILED)
def test_tensors_with_any_strides(kernel_pass: Pass, causal: bool) -> None:
    assert failures(make_family(kernel_pass, causal=causal, access=Access.ANY)) == ()


@both_masks
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "exact"), [(32, 32, False), *rest([(24, 40, False), (32, 32, True)])]
)
def test_dk_and_dv_of_different_programs_are_the_same(
    head_dim: int, head_dim_v: int, exact: bool, causal: bool
) -> None:
    family = make_family(Pass.BWD_DKDV, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
    assert failures(family, Variant.TMA, SPLIT_OUTPUTS=True, EXACT_LENGTHS=exact, HEAD_DIM_PIECE=16) == ()


KNOBS: list[dict[str, object]] = [
    {"EXACT_LENGTHS": True},
    {"BLOCK_M": 16, "BLOCK_N": 64, "HEADS_PER_GROUP": 1},
    {"HEAD_DIM_PIECE": 16},
    {"EXACT_LENGTHS": True, "BLOCK_M": 16, "BLOCK_N": 32, "HEAD_DIM_PIECE": 16},
]


@pytest.mark.parametrize(
    ("causal", "kernel_pass", "variant", "knobs"),
    one_in(1, [False, True], TILED, PLAIN_VARIANTS, KNOBS, default=4),
    ids=lambda value: "-".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else None,
)
def test_every_structural_knob_keeps_the_result(
    knobs: dict[str, object], kernel_pass: Pass, variant: Variant, causal: bool
) -> None:
    assert failures(make_family(kernel_pass, causal=causal), variant, **knobs) == ()


# --- head dims --------------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("head_dim", [40, *rest([16, 128]), *slow([8, 64, 80, 96, 192, 256])])
def test_every_head_dim_of_whole_vectors(head_dim: int, kernel_pass: Pass, variant: Variant) -> None:
    assert failures(make_family(kernel_pass, head_dim=head_dim, causal=True), variant, one_probe()) == ()


@pytest.mark.parametrize("kernel_pass", TILED)
@pytest.mark.parametrize("head_dim", [59, *slow([9, 17, 33, 111, 129, 255])])
def test_every_odd_head_dim(head_dim: int, kernel_pass: Pass) -> None:
    assert failures(make_family(kernel_pass, head_dim=head_dim, causal=True), probe_list=one_probe()) == ()


@pytest.mark.parametrize("head_dim", [40, 59, 128, *slow([8, 16, 96, 255, 256])])
def test_delta_of_every_head_dim(head_dim: int) -> None:
    assert failures(make_family(Pass.BWD_DELTA, head_dim=head_dim), probe_list=one_probe()) == ()


@every_kernel
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 80), *slow([(192, 128), (96, 16), (8, 256)])])
def test_head_dim_v_may_differ(head_dim: int, head_dim_v: int, kernel_pass: Pass, variant: Variant) -> None:
    assert failures(make_family(kernel_pass, head_dim=head_dim, head_dim_v=head_dim_v), variant, one_probe()) == ()


# --- lengths and masks ------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("seqlen_k", [17, *rest([1]), *slow([16, 64])])
@pytest.mark.parametrize("seqlen_q", [31, *rest([64]), *slow([1, 32])])
def test_causal_lengths_round_the_blocks(seqlen_q: int, seqlen_k: int, kernel_pass: Pass, variant: Variant) -> None:
    both = [*one_probe(seqlen_q, seqlen_k), *one_probe(seqlen_q, seqlen_k, top_left=True, seed=1)]
    assert failures(make_family(kernel_pass, causal=True), variant, both) == ()


@every_kernel
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(33, 17), *rest([(1, 40)]), *slow([(1, 1), (40, 1), (32, 16), (31, 15)])]
)
def test_full_lengths_round_the_blocks(seqlen_q: int, seqlen_k: int, kernel_pass: Pass, variant: Variant) -> None:
    assert failures(make_family(kernel_pass), variant, one_probe(seqlen_q, seqlen_k)) == ()


@every_kernel
@pytest.mark.parametrize("group", [3, *slow([1, 8])])
def test_heads_that_share_keys_are_summed(group: int, kernel_pass: Pass, variant: Variant) -> None:
    family = make_family(kernel_pass, causal=True)
    assert failures(family, variant, one_probe(group=group)) == ()


@every_kernel
def test_large_scores_do_not_overflow(kernel_pass: Pass, variant: Variant) -> None:
    family = make_family(kernel_pass, DType.FLOAT16, causal=True)
    assert failures(family, variant, one_probe(scale=10.0)) == ()


@every_kernel
def test_blocks_wider_than_the_lengths(kernel_pass: Pass, variant: Variant) -> None:
    family = make_family(kernel_pass, causal=True)
    assert failures(family, variant, one_probe(5, 7), BLOCK_M=64, BLOCK_N=64) == ()


def gradients(kernel_pass: Pass, workload: Workload, variant: Variant, **knobs: Any) -> list[Tensor]:
    outputs = workload.allocate()
    make_kernel(workload.family, variant, **knobs)(*workload.arguments(outputs))
    return list(outputs)


def make_workload(kernel_pass: Pass, text: str, diagonal: int | None) -> Workload:
    problem = AttentionProblem.parse(text).for_pass(kernel_pass)
    return seeded_workload(problem, device=CPU, diagonal=diagonal)


@every_kernel
def test_a_row_reaches_exactly_the_gradients_of_keys_that_it_sees(kernel_pass: Pass, variant: Variant) -> None:
    """One row's do is changed: dk and dv change for the keys up to its diagonal, dq of no other row."""
    workload = make_workload(kernel_pass, "1x1x1x40x50x32,causal", 10)
    plain = gradients(kernel_pass, workload, variant)
    workload.inputs[3][0, 0, 20] += 1e4  # so that it changes even what keys of little weight get
    changed = gradients(kernel_pass, workload, variant)
    for one, other in zip(plain, changed, strict=True):
        differs = (one != other).any(-1)[0, 0].tolist()
        expected = (
            [key <= 30 for key in range(50)] if kernel_pass is Pass.BWD_DKDV else [row == 20 for row in range(40)]
        )
        assert differs == expected


@every_kernel
def test_scheduling_knobs_keep_every_bit(kernel_pass: Pass, variant: Variant) -> None:
    workload = make_workload(kernel_pass, "1x6x3x70x70x32,causal", 0)
    one, other = (gradients(kernel_pass, workload, variant, HEADS_PER_GROUP=heads) for heads in (1, 16))
    assert all(map(torch.equal, one, other))


@every_kernel
def test_outputs_may_lie_in_memory_as_bshd(kernel_pass: Pass, variant: Variant) -> None:
    workload = make_workload(kernel_pass, "2x4x2x37x41x32,causal", 4)
    dense = gradients(kernel_pass, workload, variant)
    strided = [torch.full_like(output.transpose(1, 2).contiguous(), float("nan")).transpose(1, 2) for output in dense]
    make_kernel(workload.family, variant)(*workload.arguments(strided))
    assert all(map(torch.equal, dense, strided))


@pytest.mark.parametrize("kernel_pass", TILED)
def test_the_gradient_of_a_summed_output_is_read_by_its_strides(kernel_pass: Pass) -> None:
    """out.sum().backward() gives a do of one element, all strides 0."""
    workload = make_workload(kernel_pass, "1x2x2x37x41x32,any", None)
    q, k, v, d_out, lse, _ = workload.inputs
    ones = torch.ones(1, dtype=d_out.dtype).expand(d_out.shape)
    out, _ = attention_reference(q, k, v, softmax_scale=workload.softmax_scale)
    delta = out.sum(-1).float()
    expanded = replace(workload, inputs=(q, k, v, ones, lse, delta))
    dense = replace(workload, inputs=(q, k, v, ones.contiguous(), lse, delta))
    one, other = (gradients(kernel_pass, each, Variant.PORTABLE) for each in (expanded, dense))
    assert all(map(torch.equal, one, other))


# --- the three together -----------------------------------------------------------------------------------------------


def whole_backward(text: str, diagonal: int | None, d_lse: Tensor | None) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """dq, dk and dv from a forward's rounded out, through all three kernels; and the exact ones."""
    workload = make_workload(Pass.BWD_DKDV, text, diagonal)
    q, k, v, d_out, _, _ = workload.inputs
    scale = workload.softmax_scale
    exact_out, lse = attention_reference(q, k, v, softmax_scale=scale, diagonal=diagonal)
    delta = torch.full_like(lse, float("nan"))
    make_kernel(make_family(Pass.BWD_DELTA))(exact_out.to(q.dtype), d_out, delta)
    if d_lse is not None:
        delta.sub_(d_lse)
    inputs = (q, k, v, d_out, lse, delta)
    dk, dv = gradients(Pass.BWD_DKDV, replace(workload, inputs=inputs), Variant.TMA)
    (dq,) = gradients(Pass.BWD_DQ, replace(make_workload(Pass.BWD_DQ, text, diagonal), inputs=inputs), Variant.PORTABLE)
    exact = attention_gradients(q, k, v, d_out, d_lse, softmax_scale=scale, diagonal=diagonal)
    return [dq, dk, dv], exact


@pytest.mark.parametrize("with_d_lse", [False, True])
@pytest.mark.parametrize(("text", "diagonal"), [("1x4x2x37x41x32", None), ("1x4x2x37x41x32,causal", 4)])
def test_together_they_give_the_gradients_of_attention(text: str, diagonal: int | None, with_d_lse: bool) -> None:
    d_lse = torch.randn(1, 4, 37, generator=torch.Generator().manual_seed(0)) if with_d_lse else None
    found, exact = whole_backward(text, diagonal, d_lse)
    for one, other in zip(found, exact, strict=True):
        error = (one.float() - other).norm() / other.norm()
        assert error < 1e-2


# NumPy's word on Triton 3.6, which `launch` silences: here nothing of ours runs the kernel.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_a_module_runs_by_itself() -> None:
    """The launch() of each generated module needs nothing of ours."""
    q, k, v, d_out, lse, delta = make_workload(Pass.BWD_DQ, "2x4x2x20x30x32,causal", 10).inputs
    exact = attention_gradients(q, k, v, d_out, softmax_scale=32**-0.5, diagonal=10)
    out, _ = attention_reference(q, k, v, softmax_scale=32**-0.5, diagonal=10)
    modules = {p: make_kernel(make_family(p, causal=p is not Pass.BWD_DELTA)).module for p in SPLIT_BACKWARD}
    torch.testing.assert_close(modules[Pass.BWD_DELTA].launch(out.to(q.dtype), d_out), delta, atol=0.1, rtol=0.1)
    found = (
        modules[Pass.BWD_DQ].launch(q, k, v, d_out, lse, delta),
        *modules[Pass.BWD_DKDV].launch(q, k, v, d_out, lse, delta),
    )
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other).norm() / other.norm() < 1e-2


# --- scalar arithmetic ------------------------------------------------------------------------------------------------


def test_query_ranges_agree_with_the_mask_for_every_block() -> None:
    """Blocks before the range see no key of the block, those from full_m on see all of them."""
    module = make_kernel(make_family(Pass.BWD_DKDV, causal=True), BLOCK_M=16, BLOCK_N=16).module
    ranges = on_python_numbers(module.query_range, BLOCK_M=16, BLOCK_N=16)
    for seqlen_q in (1, 15, 16, 33, 48):
        for seqlen_k in (1, 16, 17, 40):
            for diagonal in (seqlen_k - seqlen_q, 0):
                seen = max(0, min(seqlen_k, seqlen_q + diagonal))
                for start_n in range(0, seen, 16):
                    first_m, full_m = ranges(start_n, seen, diagonal)
                    keys = range(start_n, min(start_n + 16, seen))
                    sees = [[key <= row + diagonal for key in keys] for row in range(seqlen_q)]
                    assert first_m % 16 == full_m % 16 == 0
                    assert not any(any(row) for row in sees[:first_m])
                    assert all(all(row) for row in sees[full_m:])
                    assert first_m >= seqlen_q or any(any(row) for row in sees[first_m : first_m + 16])


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "spec",
    [variant_spec(kernel_pass, variant) for kernel_pass in TILED for variant in PLAIN_VARIANTS]
    + [variant_spec(Pass.BWD_DELTA, Variant.PORTABLE)],
    ids=lambda spec: f"{spec.kernel_pass}-{spec.variant}",
)
def test_the_default_is_right_on_a_ragged_call(spec: VariantSpec, head_dim: int) -> None:
    family = make_family(spec.kernel_pass, head_dim=head_dim, causal=spec.kernel_pass is not Pass.BWD_DELTA)
    candidate = Candidate(family=family, variant=spec.variant, config=default_config(spec, family, "sm_90"))
    kernel = load_kernel(candidate, INTERPRETER.arch)
    shape = AttentionShape(batch_size=1, num_q_heads=2, num_kv_heads=1, seqlen_q=150, seqlen_k=170)
    assert verify(kernel, family, [Probe(shape=shape)], CPU, repeated=False).failures == ()
