"""float32 in tf32, on request: never by itself, held to the error that cutting the operands makes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_autotune import attention, scaled_dot_product_attention
from fa_autotune.errors import InvalidProblemError
from fa_autotune.evaluation.probes import probes
from fa_autotune.evaluation.verify import verify
from fa_autotune.kernels.compiler import CompileResult
from fa_autotune.kernels.loaded import LoadedKernel, load_kernel
from fa_autotune.kernels.render import render
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec
from fa_autotune.problem.family import Access, AttentionFamily, DType
from fa_autotune.problem.passes import Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.attention import cut_to_tf32
from fa_autotune.space.candidate import Candidate, Variant
from fa_autotune.space.registry import supported_variants, variant_spec
from fa_autotune.space.seeds import default_config
from kit.attention_calls import BFLOAT16, FLOAT32, gradients, interpreted, make_small, requiring, runs_kernels
from kit.combinations import rest, sampled, slow
from kit.compile_candidates import CompileAll, unexpected
from kit.releases import THIS_TRITON

TILED = (Pass.FWD, Pass.BWD_DKDV, Pass.BWD_DQ)
Compile = Callable[[Sequence[Candidate], DeviceSpec], list[CompileResult]]


def make_family(
    kernel_pass: Pass, head_dim: int = 32, *, access: Access = Access.TMA, tf32: bool = True, **features: bool
) -> AttentionFamily:
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=DType.FLOAT32,
        head_dim=head_dim,
        head_dim_v=head_dim,
        bounded_right=True,
        access=access,
        tf32=tf32,
        **features,
    )


def make_kernel(family: AttentionFamily) -> LoadedKernel:
    config = variant_spec(family.kernel_pass, Variant.PORTABLE).config(
        BLOCK_M=16, BLOCK_N=16, num_warps=1, num_stages=1
    )
    return load_kernel(Candidate(family=family, variant=Variant.PORTABLE, config=config), INTERPRETER.arch)


def failures(kernel: Callable[..., None], family: AttentionFamily) -> tuple[str, ...]:
    chosen = probes(family, block_m=16, block_n=16, exact_lengths=False)
    return verify(kernel, family, chosen, torch.device("cpu"), repeated=False).failures


# --- what is cut, and what that may cost ------------------------------------------------------------------------------


def test_ten_bits_of_a_mantissa_are_left() -> None:
    values = torch.tensor([1.0 + 2**-10, 1.0 + 2**-10 + 2**-11, 1.0 + 2**-11, -1.0 - 2**-11, 0.0, float("inf"), -3e38])
    cut = cut_to_tf32(values)
    assert cut[:6].tolist() == [1.0 + 2**-10, 1.0 + 2**-10, 1.0, -1.0, 0.0, float("inf")]
    assert 0 < (cut[6] - values[6]) / 3e38 < 2**-10
    assert cut_to_tf32(torch.tensor([float("nan")])).isnan().all()


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("kernel_pass", [Pass.FWD, *rest([Pass.BWD_DKDV, Pass.BWD_DQ])])
def test_every_pass_passes_its_probes(kernel_pass: Pass) -> None:
    family = make_family(kernel_pass, bounded_left=True)
    assert failures(make_kernel(family), family) == ()


@interpreted
@pytest.mark.parametrize("kernel_pass", [Pass.BWD_DQ, *rest([Pass.FWD, Pass.BWD_DKDV])])
def test_operands_cut_to_tf32_pass_where_tf32_is_asked_for_and_nowhere_else(kernel_pass: Pass) -> None:
    """What a tensor core does to q, k, v and do."""
    count = 3 if kernel_pass is Pass.FWD else 4
    for tf32 in (True, False):
        family = make_family(kernel_pass, tf32=tf32)
        kernel = make_kernel(family)

        def cutting(*values: Any, kernel: LoadedKernel = kernel) -> None:
            kernel(*map(cut_to_tf32, values[:count]), *values[count:])

        found = failures(cutting, family)
        assert (found == ()) is tf32, found


@interpreted
@pytest.mark.parametrize("kernel_pass", TILED)
def test_operands_cut_further_are_caught(kernel_pass: Pass) -> None:
    """To bfloat16: 7 bits."""
    family = make_family(kernel_pass)
    kernel, count = make_kernel(family), 3 if kernel_pass is Pass.FWD else 4

    def cutting(*values: Any) -> None:
        kernel(*(value.to(BFLOAT16).to(FLOAT32) for value in values[:count]), *values[count:])

    assert failures(cutting, family) != ()


# --- who gets it ------------------------------------------------------------------------------------------------------


def test_tf32_stands_in_keys_labels_and_products_only_where_it_is_on() -> None:
    problem = AttentionProblem.parse("1x2x2x64x64x64,fp32,tf32,softcap")
    plain = AttentionProblem.parse("1x2x2x64x64x64,fp32")
    assert '"tf32":true' in problem.key
    assert "tf32" not in plain.key
    assert problem.label == "fwd fp32 d64 full softcap tf32 1×2×2×64×64"
    assert AttentionProblem.parse(problem.label) == AttentionProblem.from_key(problem.key) == problem
    assert not problem.for_pass(Pass.BWD_DELTA).family.tf32
    assert problem.for_pass(Pass.BWD_DQ).family.tf32
    for one, precision in ((problem, "tf32"), (plain, "ieee")):
        for kernel_pass in TILED:
            family = one.for_pass(kernel_pass).family
            config = default_config(variant_spec(kernel_pass, Variant.PORTABLE), family, "sm_80")
            text = render(Candidate(family=family, variant=Variant.PORTABLE, config=config)).text
            products = [line for line in text.splitlines() if "tl.dot(" in line]
            assert products
            assert all(f'input_precision="{precision}"' in line for line in products)


@pytest.mark.parametrize("text", ["1x2x2x64x64x64,bf16,tf32", "1x2x2x64x64x64,tf32"])
def test_tf32_of_16_bits_is_refused(text: str) -> None:
    with pytest.raises(InvalidProblemError, match="tf32=True is for float32 products, fwd of bfloat16 has none"):
        AttentionProblem.parse(text)


def test_a_pass_without_products_has_no_tf32() -> None:
    with pytest.raises(InvalidProblemError, match="bwd_delta of float32 has none"):
        AttentionFamily(
            kernel_pass=Pass.BWD_DELTA, dtype=DType.FLOAT32, head_dim=64, head_dim_v=64, bounded_right=False, tf32=True
        )


@pytest.mark.parametrize(
    ("variant", "arch", "says"),
    [
        (Variant.PORTABLE, "sm_75", "tf32 matrix products need sm_80"),
        (Variant.PORTABLE, "gfx942", "tf32 is multiplied by NVIDIA's tensor cores"),
        (Variant.TMA, "sm_90", "the portable variant serves"),
        (Variant.HOPPER_WS, "sm_90", "wgmma multiplies no float32"),
        (Variant.PORTABLE, "sm_90", "spill above head_dim 256"),
    ],
)
def test_variants_that_do_not_serve_it_say_why(variant: Variant, arch: str, says: str) -> None:
    family = make_family(Pass.FWD, 320 if "spill" in says else 64)
    reason = variant_spec(Pass.FWD, variant).supports(family, arch, (3, 7))
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("precision", ["fp32", "TF32", "", None, True])
def test_another_precision_is_refused(precision: Any) -> None:
    with pytest.raises(InvalidProblemError, match=r'fp32_precision=.* is not "ieee" or "tf32"'):
        attention(*make_small(dtype=FLOAT32), fp32_precision=precision)


def tf32_of(loads: list[Candidate]) -> list[bool]:
    return [candidate.family.tf32 for candidate in loads]


@runs_kernels
def test_a_call_gets_tf32_for_its_products_if_it_asks(loads: list[Candidate]) -> None:
    tensors = make_small(dtype=FLOAT32)
    results = [attention(*tensors, fp32_precision=precision) for precision in ("ieee", "tf32")]
    assert tf32_of(loads) == [False, True]
    torch.testing.assert_close(*results, atol=5e-3, rtol=0)
    loads.clear()
    found = gradients(*tensors, fp32_precision="tf32")
    assert {(one.family.kernel_pass, one.family.tf32) for one in loads} == {
        (Pass.BWD_DELTA, False),
        (Pass.BWD_DKDV, True),
        (Pass.BWD_DQ, True),
    }
    for gradient, exact in zip(found, gradients(*tensors), strict=True):
        torch.testing.assert_close(gradient, exact, atol=2e-2, rtol=0)


@runs_kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_tensors_of_16_bits_do_not_care(deterministic: bool, loads: list[Candidate]) -> None:
    attention(*make_small(), fp32_precision="tf32", deterministic=deterministic)
    assert tf32_of(loads) == [False]


@runs_kernels
def test_head_dims_above_256_do_not_care(loads: list[Candidate]) -> None:
    with torch.no_grad():
        attention(*make_small(3, 5, dtype=FLOAT32, head_dim=264), fp32_precision="tf32")
    assert tf32_of(loads) == [False]


@runs_kernels
def test_settings_of_torch_ask_for_nothing(loads: list[Candidate]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        attention(*make_small(dtype=FLOAT32))
        scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in make_small(dtype=FLOAT32, kv_heads=2)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(tf32_of(loads)) == {False}


@runs_kernels
def test_a_negative_scale_keeps_it(loads: list[Candidate]) -> None:
    attention(*make_small(dtype=FLOAT32), fp32_precision="tf32", softmax_scale=-0.5)
    assert tf32_of(loads) == [True]


def test_the_reference_computes_in_full(reference_only: None) -> None:
    tensors = make_small(dtype=FLOAT32, device=torch.device("cpu"))
    results = [attention(*tensors, fp32_precision=precision) for precision in ("ieee", "tf32")]
    assert torch.equal(*results)


@runs_kernels
def test_a_recorded_graph_keeps_it(loads: list[Candidate]) -> None:
    """As an argument of the operator, forward and backward."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        inputs = requiring(q, k, v)
        out = attention(*inputs, fp32_precision="tf32")
        return torch.autograd.grad(out.sum(), inputs)

    tensors = make_small(dtype=FLOAT32)
    graph = make_fx(step)(*tensors)
    loads.clear()
    assert all(map(torch.equal, graph(*tensors), step(*tensors)))
    assert all(one.family.tf32 for one in loads if one.family.kernel_pass is not Pass.BWD_DELTA)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(compile_all: CompileAll) -> Compile:
    """Compile candidates for a GPU, with the shared memory that it has."""
    return lambda candidates, device: compile_all(candidates, device.arch, device.smem_optin_bytes)


CASES = [(64, Access.TMA), (128, Access.TMA), (64, Access.ANY), (256, Access.TMA)]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *rest([("a10", CASES[:1])]),
        *sampled([("h200", CASES[:2])]),
        *slow([("a10", CASES[1:]), ("h200", CASES[2:]), ("b200", CASES), ("rtx5090", CASES), ("a100", CASES[3:])]),
    ],
)
def test_defaults_compile_and_pass_all_gates(name: str, cases: list[tuple[int, Access]], compiled: Compile) -> None:
    device = KNOWN_DEVICES[name]
    candidates = [
        Candidate(family=family, variant=spec.variant, config=default_config(spec, family, device.arch))
        for kernel_pass in TILED
        for head_dim, access in cases
        for family in (make_family(kernel_pass, head_dim, access=access),)
        for spec in supported_variants(family, device.arch, THIS_TRITON)
    ]
    assert len(candidates) == len(TILED) * len(cases)
    assert unexpected(device.arch, candidates, compiled(candidates, device)) == {}
