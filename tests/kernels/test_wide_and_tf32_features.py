"""Head dims above 256, and tf32, beside masks, dropout and packed sequences."""

from typing import Any

import pytest
import torch

from fa_autotune import attention, attention_varlen, flash_attn_varlen_kvpacked_func
from fa_autotune.dispatch.dispatcher import Dispatcher
from fa_autotune.dispatch.winners import Snapshot
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.kernels.render import render
from fa_autotune.ops import kernel_plan
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES
from fa_autotune.problem.family import AttentionFamily, DType, strongest_access
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import cut_to_tf32
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import variant_spec
from fa_autotune.space.seeds import default_config
from kit.attention_calls import BFLOAT16, FLOAT16, FLOAT32, interpreted, make_small, requiring, runs_kernels
from kit.combinations import rest, slow
from kit.packed_calls import assert_packed_gradients_right, assert_packed_right, make_packed, varlen_gradients_of

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1}
TILED = (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
LENGTHS = [(5, 9), (20, 0), (17, 33)]
every_pass = pytest.mark.parametrize("kernel_pass", TILED)


def make_family(
    kernel_pass: Pass, head_dim: int, head_dim_v: int, *, dtype: DType = DType.BFLOAT16, **features: bool
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        bounded_right=True,
        access=strongest_access(dtype, head_dim, head_dim_v),
        **features,
    )


def make_kernel(family: AttentionFamily, variant: Variant = Variant.PORTABLE) -> LoadedKernel:
    config = variant_spec(family.kernel_pass, variant).config(**SMALL)
    return load_kernel(Candidate(family=family, variant=variant, config=config), INTERPRETER.arch)


def failures(kernel: Any, family: AttentionFamily) -> tuple[str, ...]:
    chosen = probes(family, block_m=16, block_n=16, exact_lengths=False)
    return verify(kernel, family, chosen, torch.device("cpu"), repeated=False).failures


# --- tf32 -------------------------------------------------------------------------------------------------------------


@every_pass
@pytest.mark.parametrize(
    "features", [{"varlen": True, "alibi": True}, {"bias": True, "dropout": True}, {"bool_mask": True, "softcap": True}]
)
def test_every_product_asks_for_tf32_whatever_else_a_call_has(kernel_pass: Pass, features: dict[str, bool]) -> None:
    family = make_family(kernel_pass, 64, 48, dtype=DType.FLOAT32, tf32=True, **features)
    config = default_config(variant_spec(kernel_pass, Variant.PORTABLE), family, "sm_90")
    text = render(Candidate(family=family, variant=Variant.PORTABLE, config=config)).text
    products = [line for line in text.splitlines() if "tl.dot(" in line]
    assert products
    assert all('input_precision="tf32"' in line for line in products)


@interpreted
@pytest.mark.kernel
@every_pass
@pytest.mark.parametrize(
    "features",
    [*slow([{"varlen": True, "bounded_left": True}]), *rest([{"bias": True, "dropout": True}])],
)
def test_operands_cut_to_tf32_pass_where_tf32_is_asked_for_and_nowhere_else(
    kernel_pass: Pass, features: dict[str, bool]
) -> None:
    count = 3 if kernel_pass is Pass.FWD else 4
    for tf32 in (True, False):
        family = make_family(kernel_pass, 32, 32, dtype=DType.FLOAT32, tf32=tf32, **features)
        kernel = make_kernel(family)

        def cutting(*values: Any, kernel: LoadedKernel = kernel) -> None:
            kernel(*map(cut_to_tf32, values[:count]), *values[count:])

        found = failures(cutting, family)
        assert (found == ()) is tf32, found


@runs_kernels
def test_sequences_in_a_row_get_tf32_if_they_ask(loads: list[Candidate]) -> None:
    tensors = make_packed(LENGTHS, dtype=FLOAT32)
    results = [attention_varlen(*tensors, fp32_precision=precision) for precision in ("ieee", "tf32")]
    assert [one.family.tf32 for one in loads] == [False, True]
    torch.testing.assert_close(*results, atol=5e-3, rtol=0)
    loads.clear()
    d_out = torch.randn_like(results[0])
    found = varlen_gradients_of(tensors, d_out, fp32_precision="tf32")
    assert all(one.family.tf32 for one in loads if one.family.kernel_pass is not Pass.BWD_DELTA)
    for gradient, exact in zip(found, varlen_gradients_of(tensors, d_out), strict=True):
        torch.testing.assert_close(gradient, exact, atol=2e-2, rtol=0)


@runs_kernels
@pytest.mark.parametrize("case", [(BFLOAT16, 32), (FLOAT32, 264)])
def test_sequences_of_16_bits_or_wide_heads_do_not_care(case: tuple[torch.dtype, int], loads: list[Candidate]) -> None:
    with torch.no_grad():
        attention_varlen(*make_packed([(3, 5)], dtype=case[0], head_dim=case[1]), fp32_precision="tf32")
    assert [one.family.tf32 for one in loads] == [False]


def test_another_precision_of_sequences_in_a_row_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match=r'fp32_precision=\'high\' is not "ieee" or "tf32"'):
        attention_varlen(*make_packed(LENGTHS, dtype=FLOAT32), fp32_precision="high")


def test_the_reference_of_sequences_in_a_row_computes_in_full(reference_only: None) -> None:
    tensors = [tensor.cpu() for tensor in make_packed(LENGTHS, dtype=FLOAT32)]
    results = [attention_varlen(*tensors, fp32_precision=precision) for precision in ("ieee", "tf32")]
    assert torch.equal(*results)


@runs_kernels
def test_a_mask_and_its_gradient_go_with_tf32(loads: list[Candidate]) -> None:
    tensors = make_small(9, 21, dtype=FLOAT32)
    mask = torch.randn(9, 21, generator=torch.Generator().manual_seed(1)).to(tensors[0].device)
    found = []
    for precision in ("tf32", "ieee"):
        loads.clear()
        inputs = requiring(*tensors, mask)
        out = attention(*inputs[:3], attn_mask=inputs[3], fp32_precision=precision)
        found.append(torch.autograd.grad(out.square().sum(), inputs))
        products = [one.family for one in loads if one.family.kernel_pass is not Pass.BWD_DELTA]
        assert {family.tf32 for family in products} == {precision == "tf32"}
    assert any(family.mask_gradient for family in products)
    for gradient, exact in zip(*found, strict=True):
        torch.testing.assert_close(gradient, exact, atol=2e-2, rtol=0)


# --- wide heads -------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("variant", "features"),
    [
        *slow([(Variant.PORTABLE, {"varlen": True, "bounded_left": True, "sinks": True})]),
        *slow([(Variant.PORTABLE, {"bias": True, "dropout": True})]),
        *rest([(Variant.TMA, {"wide_bias": True, "dropout": True})]),
    ],
)
def test_a_wide_forward_passes_every_probe(variant: Variant, features: dict[str, bool]) -> None:
    family = make_family(Pass.FWD, 16, 264, **features)
    assert failures(make_kernel(family, variant), family) == ()


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("kernel_pass", "features"),
    [
        *rest([(Pass.BWD_DKDV, {"varlen": True}), (Pass.BWD_DQ, {"varlen": True})]),
        *rest([(Pass.BWD_DKDV, {"bool_mask": True, "dropout": True})]),
        *rest([(Pass.BWD_DQ, {"bias": True, "mask_gradient": True, "dropout": True})]),
    ],
)
def test_a_wide_backward_passes_every_probe(kernel_pass: Pass, features: dict[str, bool]) -> None:
    family = make_family(kernel_pass, 264, 24, **features)
    assert failures(make_kernel(family), family) == ()


@runs_kernels
def test_sequences_in_a_row_have_wide_heads() -> None:
    tensors = make_packed(LENGTHS, unused=3, head_dim=264, head_dim_v=300)
    assert_packed_gradients_right(tensors, LENGTHS, 3, causal=True)
    with torch.no_grad():
        out, lse = assert_packed_right(tensors, LENGTHS, 3, causal=True)
    assert not out[-3:].any()
    assert (lse[:, -3:] == float("-inf")).all()


def test_the_parts_of_a_block_of_a_sequence_lie_side_by_side_in_the_grid() -> None:
    kernel = make_kernel(make_family(Pass.FWD, 64, 320, varlen=True))
    assert kernel.module.grid(3, 5, 70) == ((70 // 16 + 3 + 1) * 5 * 2, 1, 1)
    assert make_kernel(make_family(Pass.FWD, 320, 64, varlen=True)).module.grid(3, 5, 70) == (40, 1, 1)


@runs_kernels
def test_gradients_of_sequences_in_a_row_that_no_kernel_gives_are_refused_at_the_forward_call(
    cold: None, loads: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    turing = Dispatcher(
        device=KNOWN_DEVICES["t4"],
        triton_version="3.7.1",
        load=lambda: Snapshot(rows=()),
        store_misses=lambda misses: None,
    )
    monkeypatch.setattr(kernel_plan, "dispatcher_of", lambda index: turing)
    q, k, v, *lengths = make_packed(LENGTHS, dtype=FLOAT16, head_dim=512)
    says = "gradients are served up to head_dim 256 on every GPU"
    with pytest.raises(UnsupportedError, match=says):
        attention_varlen(*requiring(q, k, v), *lengths)
    with pytest.raises(UnsupportedError, match=says):
        flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1).requires_grad_(), *lengths, None, None)
    with torch.no_grad():
        assert_packed_right((q, k, v, *lengths), LENGTHS)


def test_a_problem_of_a_wide_head_with_a_mask_is_written_as_it_is_read() -> None:
    problem = AttentionProblem.parse("1x2x2x64x64x512,bias,dropout")
    assert AttentionProblem.parse(problem.label) == AttentionProblem.from_key(problem.key) == problem
    both = AttentionProblem.parse("2x2x2x64x64x64,fp32,tf32,varlen")
    assert AttentionProblem.parse(both.label) == AttentionProblem.from_key(both.key) == both
