"""Generated kernels against the reference, in Triton's interpreter: every variant, dtype, mask, access and head dim."""

from dataclasses import replace

import pytest
import torch

from fa_autotune.evaluation.probes import Probe, probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER
from fa_autotune.problem.family import Access, AttentionFamily, DType, strongest_access
from fa_autotune.problem.problem import AttentionShape
from fa_autotune.reference.attention import attention_reference, seeded_inputs
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.config import KernelConfig, PortableFwdConfig, TmaFwdConfig
from kit.combinations import one_in, rest
from kit.scalar_functions import on_python_numbers
from kit.strategies import PLAIN_VARIANTS

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not interpreting(), reason="needs TRITON_INTERPRET=1: on a GPU, test_gpu.py runs the same checks"
    ),
]

CPU = torch.device("cpu")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}


def make_family(
    dtype: DType = DType.BFLOAT16,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    *,
    causal: bool = False,
    access: Access | None = None,
) -> AttentionFamily:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return AttentionFamily(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=causal,
        access=access or strongest_access(dtype, head_dim, head_dim_v),
    )


def make_config(variant: Variant, **knobs: object) -> KernelConfig:
    kind = PortableFwdConfig if variant is Variant.PORTABLE else TmaFwdConfig
    return kind(**{**SMALL, **knobs})  # type: ignore[arg-type]


def make_kernel(family: AttentionFamily, variant: Variant, **knobs: object) -> LoadedKernel:
    candidate = Candidate(family=family, variant=variant, config=make_config(variant, **knobs))
    return load_kernel(candidate, INTERPRETER.arch)


def failures(
    family: AttentionFamily, variant: Variant, probe_list: list[Probe] | None = None, **knobs: object
) -> object:
    kernel = make_kernel(family, variant, **knobs)
    config = kernel.candidate.config
    chosen = probe_list or probes(
        family, block_m=config.BLOCK_M, block_n=config.BLOCK_N, exact_lengths=config.EXACT_LENGTHS
    )
    return verify(kernel, family, chosen, CPU, repeated=False).failures


def one_probe(seqlen_q: int = 37, seqlen_k: int = 41, **probe: object) -> list[Probe]:
    shape = AttentionShape(batch_size=2, num_q_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return [Probe(shape=shape, **probe)]  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_passes_every_probe(dtype: DType, variant: Variant, causal: bool) -> None:
    assert failures(make_family(dtype, causal=causal), variant) == ()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [32, 59])
def test_fp32_is_computed_in_ieee_precision(head_dim: int, causal: bool) -> None:
    family = make_family(DType.FLOAT32, head_dim, causal=causal)
    assert failures(family, Variant.PORTABLE, HEAD_DIM_PIECE=32) == ()


KNOBS: list[dict[str, object]] = [
    {"EXACT_LENGTHS": True},
    {"ROW_SUM_LANES": 8, "BLOCK_N": 32},
    {"BLOCK_M": 16, "BLOCK_N": 64},
    {"HEADS_PER_GROUP": 1},
    {"HEADS_PER_GROUP": 4},
    {"HEAD_DIM_PIECE": 16},
]


@pytest.mark.parametrize(
    ("causal", "variant", "knobs"),
    one_in(2, [False, True], PLAIN_VARIANTS, KNOBS, default=4),
    ids=lambda value: "-".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else None,
)
def test_every_structural_knob_keeps_the_result(knobs: dict[str, object], variant: Variant, causal: bool) -> None:
    assert failures(make_family(causal=causal), variant, **knobs) == ()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_storing_through_pointers_keeps_the_result(causal: bool) -> None:
    assert failures(make_family(causal=causal), Variant.TMA, STORE_BY_TMA=False) == ()


@pytest.mark.parametrize(
    ("variant", "head_dim"),
    one_in(2, PLAIN_VARIANTS, [8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256], default=6),
)
def test_every_head_dim_of_whole_vectors(variant: Variant, head_dim: int) -> None:
    assert failures(make_family(head_dim=head_dim, causal=True), variant, one_probe()) == ()


@pytest.mark.parametrize("head_dim", [9, 59, 129, *rest([15, 17, 31, 33, 63, 65, 97, 111, 127, 193, 255])])
def test_every_odd_head_dim(head_dim: int) -> None:
    assert failures(make_family(head_dim=head_dim, causal=True), Variant.PORTABLE, one_probe()) == ()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), *rest([(32, 80), (96, 16), (8, 256)])])
@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_head_dim_v_may_differ(variant: Variant, head_dim: int, head_dim_v: int) -> None:
    assert failures(make_family(head_dim=head_dim, head_dim_v=head_dim_v), variant, one_probe()) == ()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tensors_with_any_strides(causal: bool) -> None:
    assert failures(make_family(causal=causal, access=Access.ANY), Variant.PORTABLE) == ()


@pytest.mark.parametrize(
    ("variant", "seqlen_q", "seqlen_k"),
    one_in(1, PLAIN_VARIANTS, [1, 31, 32, 33, 64], [1, 2, 15, 16, 17, 64], default=5),
)
def test_causal_lengths_round_the_blocks(variant: Variant, seqlen_q: int, seqlen_k: int) -> None:
    both = [*one_probe(seqlen_q, seqlen_k), *one_probe(seqlen_q, seqlen_k, top_left=True, seed=1)]
    assert failures(make_family(causal=True), variant, both) == ()


@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_a_key_is_hidden_from_exactly_the_rows_before_it(variant: Variant) -> None:
    """One key far larger than the others takes over each row that sees it, and leaves the others as they were."""
    family = make_family(causal=True)
    shape = AttentionShape(batch_size=1, num_q_heads=1, num_kv_heads=1, seqlen_q=40, seqlen_k=50)
    q, k, v = seeded_inputs(family, shape, device=CPU, seed=0)
    kernel = make_kernel(family, variant)
    plain, changed = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(1, 1, 40)
    kernel(q, k, v, plain, lse, 0.2, 10)
    v[0, 0, 30] += 100.0
    kernel(q, k, v, changed, lse, 0.2, 10)
    differs = (plain != changed).any(-1)[0, 0]
    assert differs.tolist() == [row + 10 >= 30 for row in range(40)]


@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_a_late_first_visible_key_leaves_no_nan(variant: Variant) -> None:
    """Rows of one block whose first visible key lies in a later key block: their running maximum starts at −inf."""
    family = make_family(causal=True)
    assert failures(family, variant, one_probe(64, 20), BLOCK_M=64, BLOCK_N=16) == ()


@pytest.mark.parametrize("variant", PLAIN_VARIANTS)
def test_large_scores_do_not_overflow(variant: Variant) -> None:
    family = make_family(DType.FLOAT16, causal=True)
    assert failures(family, variant, one_probe(scale=40.0)) == ()


# NumPy's word on Triton 3.6, which `launch` silences: here nothing of ours runs the kernel.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_a_module_runs_by_itself() -> None:
    """The launch() of a generated module needs nothing of ours."""
    family = make_family(causal=True)
    shape = AttentionShape(batch_size=2, num_q_heads=4, num_kv_heads=2, seqlen_q=20, seqlen_k=30)
    q, k, v = seeded_inputs(family, shape, device=CPU, seed=0)
    out, lse = make_kernel(family, Variant.PORTABLE).module.launch(q, k, v)
    ref, ref_lse = attention_reference(q, k, v, softmax_scale=32**-0.5, diagonal=10)
    torch.testing.assert_close(out.float(), ref, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, ref_lse, atol=1e-5, rtol=1e-5)


def test_key_ranges_agree_with_the_mask_for_every_block() -> None:
    """The scalar arithmetic that all variants share: full blocks hide nothing, skipped blocks show nothing."""
    family = make_family(causal=True)
    module = make_kernel(family, Variant.PORTABLE, BLOCK_M=16, BLOCK_N=16).module
    ranges = on_python_numbers(module.key_range, BLOCK_M=16, BLOCK_N=16)
    for seqlen_q in (1, 15, 16, 33, 48):
        for seqlen_k in (1, 16, 17, 40):
            for diagonal in (seqlen_k - seqlen_q, 0):
                for start_m in range(0, seqlen_q, 16):
                    full_end, key_end = ranges(start_m, seqlen_q, seqlen_k, diagonal)
                    rows = range(start_m, min(start_m + 16, seqlen_q))
                    sees = [[key <= row + diagonal for key in range(seqlen_k)] for row in rows]
                    assert full_end % 16 == 0
                    assert all(all(row[:full_end]) for row in sees)
                    assert not any(any(row[key_end:]) for row in sees)
                    assert key_end == max((key + 1 for row in sees for key, seen in enumerate(row) if seen), default=0)


def test_every_program_owns_another_block_and_none_is_left_out() -> None:
    family = make_family(causal=True)
    module = make_kernel(family, Variant.PORTABLE, HEADS_PER_GROUP=4).module
    place = on_python_numbers(module.block_of_program, HEADS_PER_GROUP=4)
    for num_blocks in (1, 3, 8):
        for batch_heads in (1, 4, 6, 11):
            owned = [place(pid, num_blocks, batch_heads) for pid in range(num_blocks * batch_heads)]
            assert sorted(owned) == [(block, head) for block in range(num_blocks) for head in range(batch_heads)]
            first_group = [block for block, head in owned if head < 4]
            assert first_group == sorted(first_group, reverse=True)  # blocks that see most keys first


def test_scheduling_knobs_keep_every_bit() -> None:
    family = make_family(causal=True)
    shape = AttentionShape(batch_size=1, num_q_heads=3, num_kv_heads=3, seqlen_q=70, seqlen_k=70)
    q, k, v = seeded_inputs(family, shape, device=CPU, seed=0)
    results = []
    for heads in (1, 16):
        out, lse = torch.empty_like(q), torch.empty(1, 3, 70)
        make_kernel(family, Variant.PORTABLE, HEADS_PER_GROUP=heads)(q, k, v, out, lse, 0.2, 0)
        results.append(out)
    assert torch.equal(*results)


def test_candidates_of_one_body_share_a_digest() -> None:
    """The aligned kernel of a family is the same whether its tensors could be read by TMA or not."""
    from fa_autotune.kernels.render import render

    family = make_family()
    one = Candidate(family=family, variant=Variant.PORTABLE, config=make_config(Variant.PORTABLE))
    other = replace(one, family=replace(family, access=Access.ALIGNED))
    assert render(one).digest == render(other).digest
