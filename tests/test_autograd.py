"""Gradients of `attention` as its callers see them: values, edges, strides, what is computed and what is kept.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere. Tensors are (batch, seqlen, heads,
head_dim), layout "bshd", unless a test says otherwise.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck
from torch.utils.checkpoint import checkpoint

from fa_autotune import (
    attention,
    backward_plan,
    calls,
    kernel_plan,
    tensors,
    warmup,
)
from fa_autotune.errors import UnsupportedError
from fa_autotune.problem import SPLIT_BACKWARD, Access, Pass
from fa_autotune.records import Candidate
from fa_autotune.reference import (
    attention_gradients,
    attention_reference,
    backward_statistics,
    gradients_from_statistics,
)
from tests import test_ops
from tests.test_ops import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    VIEWS,
    causal_or_not,
    cold,
    every_second_column,
    every_second_row,
    in_larger_buffers,
    kernels,
    loads,
    one_element_late,
    reference_only,
    runs_kernels,
    swapped,
    together,
    transposed,
)

__all__ = ["cold", "kernels", "loads", "reference_only"]  # fixtures

of_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # its forward mode needs that
COMBINATIONS = ["q", "k", "v", "qk", "qv", "kv", "qkv"]


def make(seqlen_q: int = 37, seqlen_k: int = 41, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As in test_ops, but smaller: the interpreter takes its time for a backward."""
    return test_ops.make(seqlen_q, seqlen_k, **{"batch": 1, "heads": 2, "kv_heads": 1, **sizes})


def requiring(*tensors: Tensor) -> list[Tensor]:
    """The same tensors as leaves that require a gradient; views stay views."""
    return [tensor.detach().requires_grad_() for tensor in tensors]


def gradient_of(shape: torch.Size, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """A random gradient of a result."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd gives for q, k and v."""
    inputs = requiring(q, k, v)
    out = attention(*inputs, **arguments)
    dq, dk, dv = torch.autograd.grad(out, inputs, gradient_of(out.shape, out.dtype) if d_out is None else d_out)
    return dq, dk, dv


def assert_gradients_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    d_out: Tensor | None = None,
    factor: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hold the gradients to the numerics rule, and give them."""
    if d_out is None:
        d_out = gradient_of(torch.Size((*q.shape[:3], v.shape[3])), q.dtype)
    found = gradients(q, k, v, d_out, causal=causal, softmax_scale=softmax_scale)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    diagonal = k.shape[1] - q.shape[1] if causal else None
    tensors = swapped(q, k, v, d_out)
    refs = attention_gradients(*tensors, softmax_scale=scale, diagonal=diagonal)
    lse, delta = backward_statistics(*tensors, softmax_scale=scale, diagonal=diagonal)
    pts = gradients_from_statistics(*tensors, lse, delta, softmax_scale=scale, diagonal=diagonal, dtype=q.dtype)
    for name, tensor, gradient, ref, pt in zip("qkv", (q, k, v), found, refs, pts, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        rounded = ref.to(q.dtype)
        roundings = 2 * (((rounded + 0.3) - 0.3) - rounded).abs().to(ref.dtype)
        error, pt_error = (swapped(gradient)[0].to(ref.dtype) - ref).abs(), (pt.to(ref.dtype) - ref).abs()
        assert error.max() <= factor * pt_error.max() + roundings.max(), f"d{name}"
        assert error.mean() <= 1.5 * pt_error.mean() + roundings.mean(), f"d{name}"
    return found


# --- values -----------------------------------------------------------------------------------------------------------


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_gradients_follow_the_numerics_rule(dtype: torch.dtype, causal: bool) -> None:
    assert_gradients_right(*make(70, 50, dtype=dtype), causal=causal)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(20, 33), (33, 20), (1, 17), (17, 1)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_float32_gradients_equal_those_of_float64_to_1e_5(
    heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    q, k, v = make(seqlen_q, seqlen_k, heads=heads, kv_heads=kv_heads, dtype=FLOAT32)
    inputs = requiring(*(tensor.double() for tensor in (q, k, v)))
    keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in inputs[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs[0], keys) / 32**0.5
    if causal:
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~seen, -1e300)  # an explicit mask; rows that see nothing are zeroed below
        weights = torch.softmax(scores, -1) * seen.any(-1)[:, None]
    else:
        weights = torch.softmax(scores, -1)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    d_out = gradient_of(exact.shape, FLOAT32)
    for gradient, expected in zip(
        gradients(q, k, v, d_out, causal=causal), torch.autograd.grad(exact, inputs, d_out.double()), strict=True
    ):
        torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_passes_gradcheck_in_what_precision_it_has(causal: bool, reference_only: None) -> None:
    inputs = requiring(*make(5, 7, head_dim=8, dtype=FLOAT32, device=torch.device("cpu")))
    with pytest.warns(UserWarning, match="double precision"):
        assert gradcheck(lambda *x: attention(*x, causal=causal), inputs, eps=1e-2, atol=1e-3, rtol=1e-2)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (2, 3), (3, 2), (5, 15), (15, 5), (17, 17), (1, 100), (5, 1)]
)
def test_lengths_below_a_block(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    assert_gradients_right(*make(seqlen_q, seqlen_k), causal=causal)


@runs_kernels
@causal_or_not
def test_rows_and_keys_next_to_a_blocks_edge_survive_large_magnitudes(causal: bool, loads: list[Candidate]) -> None:
    gradients(*make(200, 200), causal=causal)
    blocks = {candidate.config.BLOCK_M for candidate in loads}
    blocks |= {candidate.config.BLOCK_N for candidate in loads if candidate.family.kernel_pass is not Pass.BWD_DELTA}
    for block in blocks:
        for seqlen_q, seqlen_k in ((block - 1, block + 1), (block, block), (block + 1, block - 1)):
            q, k, v = make(seqlen_q, seqlen_k, heads=2, kv_heads=1)
            assert_gradients_right(q * 5, k * 3, v, causal=causal, factor=5.0)


@runs_kernels
@pytest.mark.parametrize("magnitude", [1, 4, 10])
def test_float16_gradients_do_not_overflow(magnitude: int) -> None:
    q, k, v = make(dtype=FLOAT16)
    found = assert_gradients_right(q * magnitude, k * magnitude, v * magnitude, causal=True, factor=5.0)
    assert all(torch.isfinite(gradient).all() for gradient in found)


@runs_kernels
@pytest.mark.parametrize("head_dim", [8, 16, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    assert_gradients_right(*make(20, 20, head_dim=head_dim), causal=True)


@runs_kernels
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_head_dim_256_in_bfloat16_with_shared_kv_heads(kv_heads: int) -> None:
    assert_gradients_right(*make(40, 40, heads=4, kv_heads=kv_heads, head_dim=256), causal=True, factor=3.0)


@runs_kernels
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (32, 80), (64, 9), (8, 256)])
def test_value_columns_may_differ_from_key_columns(head_dim: int, head_dim_v: int) -> None:
    assert_gradients_right(*make(20, 30, head_dim=head_dim, head_dim_v=head_dim_v), causal=True)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("softmax_scale", [1.0, 0.03, -0.2, 0.0, 1e-46, -1e-46])
def test_gradients_of_any_finite_scale(softmax_scale: float, causal: bool) -> None:
    dq, dk, _ = assert_gradients_right(*make(41, 37), softmax_scale=softmax_scale, causal=causal)
    if abs(softmax_scale) < 1e-40:
        assert (dq == 0).all()
        assert (dk == 0).all()


@runs_kernels
def test_bhsd_has_the_same_gradients_with_axes_exchanged() -> None:
    q, k, v = make()
    d_out = gradient_of(q.shape)
    usual = gradients(q, k, v, d_out, causal=True)
    other = gradients(*swapped(q, k, v, d_out), causal=True, layout="bhsd")
    assert all(map(torch.equal, usual, swapped(*other)))


@runs_kernels
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_are_contiguous_in_the_callers_layout(layout: str) -> None:
    q, k, v = make(head_dim_v=48)
    tensors = (q, k, v) if layout == "bshd" else tuple(tensor.contiguous() for tensor in swapped(q, k, v))
    strided = (every_second_column(tensor) for tensor in tensors)
    assert all(gradient.is_contiguous() for gradient in gradients(*strided, layout=layout))


# --- rows and keys that see nothing -----------------------------------------------------------------------------------


@runs_kernels
def test_rows_without_a_visible_key_have_zero_gradients_and_spoil_no_other() -> None:
    q, k, v = make(50, 20)
    q.data[:, :30] = 3e4  # what a row without keys holds is nobody's business
    dq, dk, dv = assert_gradients_right(q, k, v, causal=True)
    assert (dq[:, :30] == 0).all()
    assert all(torch.isfinite(gradient).all() for gradient in (dq, dk, dv))


@runs_kernels
def test_rows_that_meet_their_first_key_late_keep_no_nan() -> None:
    assert_gradients_right(*make(150, 20), causal=True)  # whole blocks of rows see nothing, one is mixed


@causal_or_not
def test_without_keys_the_queries_have_zero_gradients(causal: bool) -> None:
    dq, dk, dv = gradients(*make(5, 0), causal=causal)
    assert dq.shape == (1, 5, 2, 32)
    assert (dq == 0).all()
    assert dk.shape == dv.shape == (1, 0, 1, 32)


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}],
    ids=lambda sizes: "-".join(sizes),
)
def test_empty_queries_give_the_keys_zero_gradients(sizes: dict[str, int]) -> None:
    tensors = make(**sizes)
    found = gradients(*tensors)
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in tensors]
    assert all((gradient == 0).all() for gradient in found)


@runs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [32, 59])
@causal_or_not
def test_garbage_behind_the_last_row_and_column_never_leaks(poison: float, head_dim: int, causal: bool) -> None:
    q, k, v = make(head_dim=head_dim)
    d_out = gradient_of(q.shape)
    found = []
    for fill in (0.0, poison):
        *tensors, d_out_part = in_larger_buffers(q, k, v, d_out, fill=fill)
        found.append(gradients(*tensors, d_out_part, causal=causal))
    assert all(map(torch.equal, *found))


# --- strides ----------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_strided_tensor_gives_the_gradients_of_its_copy(view: Callable[[Tensor], Tensor], which: str) -> None:
    q, k, v = make(kv_heads=2)
    q, k, v = (view(tensor) if name in which else tensor for name, tensor in zip("qkv", (q, k, v), strict=True))
    assert_gradients_right(q, k, v, causal=True)


@runs_kernels
@pytest.mark.parametrize("view", [*VIEWS, lambda tensor: tensor[:, ::2].repeat_interleave(2, 1)[:, :37]])
def test_a_strided_gradient_of_out_gives_the_gradients_of_its_copy(view: Callable[[Tensor], Tensor]) -> None:
    q, k, v = make()
    assert_gradients_right(q, k, v, causal=True, d_out=view(gradient_of(q.shape)))


@runs_kernels
def test_the_gradient_of_a_sum_has_stride_zero() -> None:
    inputs = requiring(*make())
    attention(*inputs, causal=True).sum().backward()
    expected = gradients(*inputs, torch.ones_like(inputs[0]), causal=True)
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(inputs, expected, strict=True))


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_an_expanded_gradient_of_out_is_read_with_stride_zero(dim: int) -> None:
    q, k, v = make(batch=2)
    d_out = gradient_of(q.shape)
    assert_gradients_right(q, k, v, causal=True, d_out=d_out.narrow(dim, 0, 1).expand(d_out.shape))


@runs_kernels
def test_gradients_through_views_of_out() -> None:
    q, k, v = make(38, 38)
    for view in (lambda out: out[:, ::2], lambda out: out.transpose(1, 2), lambda out: out[..., 1:], torch.diagonal):
        inputs, copies = requiring(q, k, v), requiring(q, k, v)
        view(attention(*inputs, causal=True)).square().sum().backward()
        view(attention(*copies, causal=True) * 1).square().sum().backward()
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(inputs, copies, strict=True))


@runs_kernels
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_expanded_keys_and_values_collect_the_gradients_of_their_copies(dim: int) -> None:
    q, k, v = make(batch=2, kv_heads=2, dtype=FLOAT32)
    whole = gradients(q, *(tensor.narrow(dim, 0, 1).expand(tensor.shape).contiguous() for tensor in (k, v)))
    inputs = requiring(q, *(tensor.narrow(dim, 0, 1) for tensor in (k, v)))
    out = attention(inputs[0], *(tensor.expand(k.shape) for tensor in inputs[1:]))
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape, FLOAT32))
    torch.testing.assert_close(found[0], whole[0], atol=1e-5, rtol=1e-5)
    for gradient, expected in zip(found[1:], whole[1:], strict=True):
        torch.testing.assert_close(gradient, expected.sum(dim, keepdim=True), atol=1e-5, rtol=1e-5)


@runs_kernels
def test_real_strides_after_expanded_ones_of_the_same_shape() -> None:
    q, k, v = make(batch=2)
    gradients(q, k[:1].expand(k.shape), v[:1].expand(v.shape))
    assert_gradients_right(q, k, v)


@runs_kernels
def test_unaligned_tensors_after_aligned_ones_of_the_same_shape() -> None:
    q, k, v = make()
    d_out = gradient_of(q.shape)
    aligned = gradients(q, k, v, d_out)
    assert_gradients_right(q, k, v, d_out=one_element_late(d_out))
    assert_gradients_right(*map(one_element_late, (q, k, v)), d_out=one_element_late(d_out))
    assert all(map(torch.equal, gradients(q, k, v, d_out), aligned))


@runs_kernels
def test_q_k_and_v_may_be_one_tensor() -> None:
    q, _, _ = make(dtype=FLOAT32)
    (x,) = requiring(q)
    out = attention(x, x, x, causal=True)
    d_out = gradient_of(out.shape, FLOAT32)
    (found,) = torch.autograd.grad(out, x, d_out)
    torch.testing.assert_close(found, sum(gradients(q, q, q, d_out, causal=True)), atol=1e-6, rtol=1e-6)


@runs_kernels
def test_the_callers_tensors_are_never_written() -> None:
    tensors = make()
    d_out = gradient_of(tensors[0].shape)
    before = [tensor.clone() for tensor in (*tensors, d_out)]
    for softmax_scale in (None, -0.5, 0.0):
        gradients(*tensors, d_out, causal=True, softmax_scale=softmax_scale)
    assert all(map(torch.equal, (*tensors, d_out), before))


# --- lse --------------------------------------------------------------------------------------------------------------


def lse_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, d_lse: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    inputs = requiring(q, k, v)
    out, lse = attention(*inputs, causal=causal, return_lse=True)
    outputs, given = ([lse], [d_lse]) if d_out is None else ([out, lse], [d_out, d_lse])
    return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


@runs_kernels
@causal_or_not
@pytest.mark.parametrize("with_out", [True, False], ids=["beside out", "alone"])
def test_a_gradient_into_lse_is_honoured(with_out: bool, causal: bool) -> None:
    q, k, v = make(40, 30, dtype=FLOAT32)
    d_out = gradient_of(q.shape, FLOAT32) if with_out else None
    d_lse = gradient_of(torch.Size((1, 2, 40)), FLOAT32)
    found = lse_gradients(q, k, v, d_out, d_lse, causal)
    exact = attention_gradients(
        *swapped(q, k, v, torch.zeros_like(q) if d_out is None else d_out),
        d_lse,
        softmax_scale=32**-0.5,
        diagonal=-10 if causal else None,
    )
    for gradient, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(swapped(gradient)[0].double(), expected, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_a_gradient_into_lse_of_any_strides() -> None:
    q, k, v = make(batch=2, dtype=FLOAT32)
    d_lse = gradient_of(torch.Size((2, 2, 37)), FLOAT32)
    dense = lse_gradients(q, k, v, None, d_lse, causal=True)
    strided = torch.stack([d_lse, d_lse], -1)[..., 0]
    assert all(map(torch.equal, lse_gradients(q, k, v, None, strided, causal=True), dense))
    expanded = d_lse[:1, :1, :1].expand(2, 2, 37)
    dense = lse_gradients(q, k, v, None, expanded.contiguous(), causal=True)
    assert all(map(torch.equal, lse_gradients(q, k, v, None, expanded, causal=True), dense))


@runs_kernels
def test_returning_lse_without_using_it_changes_no_gradient() -> None:
    q, k, v = make()
    inputs = requiring(q, k, v)
    out, _ = attention(*inputs, causal=True, return_lse=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    assert all(map(torch.equal, found, gradients(q, k, v, causal=True)))


@runs_kernels
def test_gradients_through_parts_that_are_merged_by_their_lse_are_those_of_the_whole() -> None:
    q, k, v = make(20, 60, dtype=FLOAT32)
    inputs = requiring(q, k, v)
    parts = [
        attention(inputs[0], *(t[:, keys] for t in inputs[1:]), return_lse=True) for keys in (slice(25), slice(25, 60))
    ]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).transpose(2, 3)[..., None]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    found = torch.autograd.grad(merged, inputs, gradient_of(q.shape, FLOAT32))
    for gradient, expected in zip(found, gradients(q, k, v), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


# --- only what is asked for -------------------------------------------------------------------------------------------


@pytest.fixture
def launches(cold: None, monkeypatch: pytest.MonkeyPatch) -> Counter[Pass]:
    """How often a kernel of each pass ran since the process was cold."""
    counted: Counter[Pass] = Counter()
    bind = backward_plan.bind

    def counting(kernel: Any, *arguments: Any) -> Callable[..., None]:
        launch = bind(kernel, *arguments)

        def launch_and_count(*tensors: Tensor) -> None:
            counted[kernel.candidate.family.kernel_pass] += 1
            launch(*tensors)

        return launch_and_count

    for module in (kernel_plan, backward_plan):
        monkeypatch.setattr(module, "bind", counting)
    return counted


@runs_kernels
@pytest.mark.parametrize("which", COMBINATIONS)
def test_exactly_the_needed_gradients_are_computed(which: str, launches: Counter[Pass]) -> None:
    tensors = dict(zip("qkv", make(), strict=True))
    everything = dict(zip("qkv", gradients(*tensors.values(), causal=True), strict=True))
    launches.clear()
    for name in which:
        tensors[name].requires_grad_()
    out = attention(*tensors.values(), causal=True)
    out.backward(gradient_of(out.shape))
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in which)
        assert tensor.grad is None or torch.equal(tensor.grad, everything[name])
    expected = {Pass.FWD: 1, Pass.BWD_DELTA: 1}
    expected |= {Pass.BWD_DQ: 1} if "q" in which else {}
    expected |= {Pass.BWD_DKDV: 1} if which != "q" else {}
    assert launches == expected


@runs_kernels
def test_a_call_whose_result_is_not_used_runs_no_backward(launches: Counter[Pass]) -> None:
    q, k, v = requiring(*make())
    (attention(q, k, v).detach().sum() + q.sum()).backward()
    assert launches == {Pass.FWD: 1}


@runs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
def test_nothing_is_kept_where_nothing_needs_a_gradient(mode: Any) -> None:
    q, k, v = make()
    if mode is None:
        out, lse = attention(q, k, v, return_lse=True)
    else:
        with mode():
            out, lse = attention(q.requires_grad_(), k, v, return_lse=True)
    assert out.grad_fn is lse.grad_fn is None
    watched = [weakref.ref(tensor) for tensor in (k, v, lse)]
    del q, k, v, lse
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


@runs_kernels
def test_only_inputs_results_and_lse_are_kept_for_the_backward() -> None:
    q, k, v = requiring(*make())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = attention(q, k, v)
    addresses = {tensor.data_ptr() for tensor in (q, k, v, out)}
    assert {tensor.data_ptr() for tensor in kept if tensor.ndim == 4} == addresses
    assert [(tensor.shape, tensor.dtype) for tensor in kept if tensor.ndim != 4] == [((1, 2, 37), FLOAT32)]


@runs_kernels
def test_a_changed_input_is_noticed_before_the_backward() -> None:
    q, k, v = make()
    out = attention(q.requires_grad_(), k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@runs_kernels
def test_saved_tensors_may_come_back_with_other_strides() -> None:
    q, k, v = (transposed(tensor) for tensor in make())
    inputs, plain = requiring(q, k, v), gradients(q, k, v, causal=True)
    with torch.autograd.graph.save_on_cpu():  # gives contiguous tensors back
        out = attention(*inputs, causal=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    assert all(map(torch.equal, found, plain))


# --- repeatable -------------------------------------------------------------------------------------------------------


@runs_kernels
def test_repeated_backwards_give_the_same_bits() -> None:
    inputs = requiring(*make(70, 90))
    out = attention(*inputs, causal=True)
    first, *others = (torch.autograd.grad(out, inputs, gradient_of(out.shape), retain_graph=True) for _ in range(5))
    assert all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every fresh buffer holds NaN."""
    filled: list[Tensor] = []

    def poisoning(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            tensor = plain(*arguments, **options)
            filled.append(tensor)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(tensors, "_empty_on_gpu", None)  # past torch's own names
    monkeypatch.setattr(calls, "_plans", {})
    return filled


@runs_kernels
@causal_or_not
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 20), (20, 150), (130, 131)])
def test_a_poisoned_allocator_changes_nothing(
    seqlen_q: int, seqlen_k: int, causal: bool, request: pytest.FixtureRequest
) -> None:
    tensors = make(seqlen_q, seqlen_k)
    d_out = gradient_of(tensors[0].shape)
    clean_out, clean = attention(*tensors, causal=causal), gradients(*tensors, d_out, causal=causal)
    filled = request.getfixturevalue("poisoned")
    assert torch.equal(attention(*tensors, causal=causal), clean_out)
    assert all(map(torch.equal, gradients(*tensors, d_out, causal=causal), clean))
    assert len(filled) >= 8


@runs_kernels
@pytest.mark.parametrize("access", [None, every_second_row, every_second_column])
def test_kernels_with_blocks_of_different_sizes_work_together(
    access: Callable[[Tensor], Tensor] | None, loads: list[Candidate], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("poisoned")
    q, k, v = make(150, 140)
    if access is not None:
        q, k, v = access(q), access(k), access(v)
    assert_gradients_right(q, k, v, causal=True)
    rows = {candidate.family.kernel_pass: candidate.config.BLOCK_M for candidate in loads}
    assert set(rows) == {Pass.FWD, *SPLIT_BACKWARD}
    assert len(set(rows.values())) > 1


# --- autograd's other modes -------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    q, k, v = make()
    inputs = requiring(q, k, v)
    out = checkpoint(lambda *x: attention(*x, causal=True), *inputs, use_reentrant=use_reentrant)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape)) if not use_reentrant else None
    if found is None:
        out.backward(gradient_of(out.shape))
        found = tuple(tensor.grad for tensor in inputs)
    assert all(map(torch.equal, found, gradients(q, k, v, causal=True)))


@runs_kernels
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_gradients_under_autocast_come_in_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = make(dtype=dtype)
    inputs = requiring(q, k, v)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        out = attention(*inputs, causal=True)
    found = torch.autograd.grad(out, inputs, gradient_of(out.shape))
    cast = gradients(*(tensor.bfloat16() for tensor in (q, k, v)), causal=True)
    assert all(torch.equal(gradient, expected.to(dtype)) for gradient, expected in zip(found, cast, strict=True))


@runs_kernels
def test_a_second_derivative_is_refused_not_wrong() -> None:
    inputs = requiring(*make())
    first = torch.autograd.grad(attention(*inputs).square().sum(), inputs, create_graph=True)
    plain = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, first, plain))
    with pytest.raises(UnsupportedError, match=r"no second derivative.*SDPBackend\.MATH"):
        first[0].sum().backward()


@runs_kernels
@of_torch
def test_forward_mode_is_refused_not_lost() -> None:
    q, k, v = make()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"no forward-mode derivative.* reverse mode"):
        attention(forward_ad.make_dual(q, q), k, v)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"no forward-mode derivative.* reverse mode"):
        attention(forward_ad.make_dual(q, q), k.requires_grad_(), v)


@runs_kernels
@of_torch
def test_a_level_of_forward_mode_without_tangents_is_served() -> None:
    q, k, v = make()
    with forward_ad.dual_level():
        assert torch.equal(attention(q, k, v), attention(q, k, v))


@of_torch
def test_jvp_of_torch_func_is_refused_not_lost(reference_only: None) -> None:
    tensors = make(device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        torch.func.jvp(attention, tensors, tensors)


def test_grad_of_torch_func_is_the_gradient(reference_only: None) -> None:
    tensors = make(dtype=FLOAT32, device=torch.device("cpu"))
    found = torch.func.grad(lambda *x: attention(*x, causal=True).square().sum(), argnums=(0, 1, 2))(*tensors)
    inputs = requiring(*tensors)
    expected = torch.autograd.grad(attention(*inputs, causal=True).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, 0)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], reference_only: None) -> None:
    tensors = [
        tensor if dim is None else torch.stack([tensor, tensor * 2, -tensor], dim)
        for tensor, dim in zip(make(dtype=FLOAT32, device=torch.device("cpu")), in_dims, strict=True)
    ]

    def values(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *y: attention(*y, causal=True).square().sum(), argnums=(0, 1, 2))(*x)

    for function in (lambda *x: (attention(*x, causal=True),), values):
        mapped = torch.vmap(function, in_dims=in_dims)(*tensors)
        for number in range(3):
            one = function(
                *(t if dim is None else t.select(dim, number) for t, dim in zip(tensors, in_dims, strict=True))
            )
            for whole, part in zip(mapped, one, strict=True):
                torch.testing.assert_close(whole[number], part, atol=1e-5, rtol=1e-5)


def test_a_second_derivative_of_torch_func_is_refused(reference_only: None) -> None:
    q, k, v = make(device=torch.device("cpu"))

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: attention(y, k, v).square().sum())(x).sum()

    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.func.grad(slope)(q)


# --- CPU tensors without the interpreter ------------------------------------------------------------------------------


@causal_or_not
@pytest.mark.parametrize("softmax_scale", [None, -0.3, 0.0])
def test_the_reference_is_differentiable_with_zero_rows(
    softmax_scale: float | None, causal: bool, reference_only: None
) -> None:
    q, k, v = make(50, 20, device=torch.device("cpu"))
    dq, _, _ = found = gradients(q, k, v, causal=causal, softmax_scale=softmax_scale)
    exact = attention_gradients(
        *swapped(q, k, v, gradient_of(q.shape)),
        softmax_scale=32**-0.5 if softmax_scale is None else softmax_scale,
        diagonal=-30 if causal else None,
    )
    for gradient, expected in zip(found, exact, strict=True):
        assert torch.equal(gradient, *swapped(expected.to(BFLOAT16)))
    assert not causal or (dq[:, :30] == 0).all()


def test_the_written_out_gradients_are_those_of_autograd_on_the_reference() -> None:
    inputs = requiring(*(t.double() for t in swapped(*make(20, 30, device=torch.device("cpu")))))
    out, _ = attention_reference(*inputs, softmax_scale=0.3, diagonal=-5)
    d_out = torch.randn(out.shape, dtype=torch.float64)
    written = attention_gradients(*(t.detach() for t in inputs), d_out, softmax_scale=0.3, diagonal=-5)
    for gradient, expected in zip(written, torch.autograd.grad(out, inputs, d_out), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_the_reference_backend_has_the_gradients_of_the_kernels_contract() -> None:
    q, k, v = make(device=torch.device("cpu"))
    inputs = requiring(q, k, v)
    out = attention(*inputs, causal=True, backend="reference")
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    exact = attention_gradients(*swapped(q, k, v, torch.ones_like(q)), softmax_scale=32**-0.5, diagonal=4)
    assert all(torch.equal(g, *swapped(e.to(BFLOAT16))) for g, e in zip(found, exact, strict=True))


# --- what later calls cost --------------------------------------------------------------------------------------------


@runs_kernels
def test_a_second_backward_decides_binds_and_loads_nothing(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make()
    first = gradients(q, k, v, causal=True)
    for module in (kernel_plan, backward_plan):
        monkeypatch.setattr(module, "bind", None)  # not to be called
        monkeypatch.setattr(module, "kernel_for", None)
    monkeypatch.setattr(calls, "KernelPlan", None)
    assert all(map(torch.equal, gradients(q.clone(), k, v, causal=True), first))


@runs_kernels
def test_new_lengths_reuse_the_backward_kernels_of_old_ones(loads: list[Candidate]) -> None:
    for seqlen in (1, 17, 33, 64, 65, 90, 128, 150):
        gradients(*make(seqlen, seqlen), causal=True)
    assert len(loads) <= 20


@runs_kernels
def test_a_gradient_of_many_strides_does_not_fill_memory(cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "MAX_REMEMBERED_BACKWARDS", 2)
    q, k, v = make(20, 20)
    for padding in range(1, 6):
        d_out = torch.nn.functional.pad(gradient_of(q.shape), (0, 8 * padding))[..., :32]
        assert_gradients_right(q, k, v, d_out=d_out)
    (plan,) = calls._plans.values()
    assert len(plan._backwards) <= 2


@runs_kernels
def test_a_backward_after_warmup_loads_nothing(loads: list[Candidate]) -> None:
    warmup(["1x2x1x37x41x32,causal"], backward=True)
    before = len(loads)
    gradients(*make(), causal=True)
    assert len(loads) == before == 4


@runs_kernels
def test_a_worse_gradient_of_out_is_copied_rather_than_slowing_the_kernels(loads: list[Candidate]) -> None:
    q, k, v = make()
    gradients(q, k, v, every_second_column(gradient_of(q.shape)))
    assert {candidate.family.access for candidate in loads} == {Access.TMA}


@runs_kernels
def test_threads_that_cold_start_together_load_each_backward_kernel_once(loads: list[Candidate]) -> None:
    q, k, v = make()
    results = together(lambda: gradients(q, k, v, causal=True))
    assert Counter(candidate.family.kernel_pass for candidate in loads) == dict.fromkeys((Pass.FWD, *SPLIT_BACKWARD), 1)
    assert all(torch.equal(one, other) for found in results for one, other in zip(found, results[0], strict=True))
