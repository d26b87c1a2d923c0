"""attn_mask: bools and numbers, broadcast over anything, read by their strides; the gradient of numbers; every edge.

Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import attention, scaled_dot_product_attention, warmup
from fa_autotune.errors import InvalidProblemError
from fa_autotune.ops.call import BSHD, FULL, GENERATED, Call, Needed
from fa_autotune.problem.passes import Pass
from fa_autotune.space.candidate import Candidate
from kit.attention_calls import (
    BFLOAT16,
    DEVICE,
    FLOAT16,
    FLOAT32,
    MINUS_INF,
    assert_gradients_right,
    assert_right,
    gradient_of,
    gradients,
    make,
    make_small,
    requiring,
    runs_kernels,
)
from kit.combinations import one_in

CPU = torch.device("cpu")
SIZES = [
    (37, 41),
    (41,),
    (1,),
    (37, 1),
    (4, 37, 41),
    (4, 1, 1),
    (2, 1, 1, 41),
    (2, 1, 37, 41),
    (1, 4, 37, 41),
    (2, 4, 37, 41),
]


def numbers(*size: int, dtype: torch.dtype = FLOAT32, device: torch.device = DEVICE) -> Tensor:
    """A mask that is added; its first key is hidden where it knows keys."""
    mask = 2.0 * torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)
    if size[-1] > 1:
        mask[..., 0] = MINUS_INF
    return mask


def bools(*size: int, device: torch.device = DEVICE) -> Tensor:
    return numbers(*size, device=device) > -1.0


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, causal: bool = False, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch and fp64, for autograd; a row that sees no key gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[3] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, MINUS_INF) if mask.dtype is torch.bool else scores + mask.double()
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, MINUS_INF)
    empty = (scores == MINUS_INF).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


@runs_kernels
@pytest.mark.parametrize(
    ("size", "causal", "backend"), one_in(1, SIZES, [False, True], ["generated", "reference"], default=2)
)
def test_a_mask_of_any_broadcast_is_what_its_definition_is(size: tuple[int, ...], causal: bool, backend: str) -> None:
    """Numbers and bools; results and gradients, that of the mask too, which has the mask's own shape."""
    q, k, v, mask = requiring(*make(head_dim=16, dtype=FLOAT32), numbers(*size))
    for given, leaves in ((mask, (q, k, v, mask)), (bools(*size), (q, k, v))):
        out, lse = attention(q, k, v, attn_mask=given, causal=causal, return_lse=True, backend=backend)
        expected, expected_lse = by_definition(q, k, v, given, causal=causal)
        torch.testing.assert_close(lse, expected_lse.to(FLOAT32), atol=1e-5, rtol=1e-5)
        d_out = gradient_of(out.shape, FLOAT32)
        found = [out, *torch.autograd.grad(out, leaves, d_out)]
        exact = [expected, *torch.autograd.grad(expected, leaves, d_out.double())]
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other.to(FLOAT32), atol=2e-5, rtol=2e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, torch.bool], ids=str)
@pytest.mark.parametrize(
    "arguments", [{"causal": True}, {"window_size": (20, 3)}, {"softcap": 3.0}, {"window_size": (30, -1)}]
)
def test_a_mask_follows_the_numerics_rule(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Beside 16-bit tensors; its rows are whole 16 bytes apart, so that they are read by such."""
    mask = bools(90, 96) if dtype is torch.bool else numbers(90, 96, dtype=dtype)
    assert_right(*make(90, 96), attn_mask=mask, **arguments)
    assert_gradients_right(*make_small(90, 96), attn_mask=mask, **arguments, factor=3.0)


@runs_kernels
@pytest.mark.parametrize("kind", ["bools", "numbers"])
def test_rows_that_a_mask_hides_every_key_from_give_zero_and_zero_gradients(kind: str) -> None:
    q, k, v = requiring(*make_small(37, 41))
    mask = torch.zeros(37, 41, device=DEVICE)
    mask[5:30] = MINUS_INF
    mask[:, :20] = MINUS_INF  # and the others meet their first key late
    given = mask == 0 if kind == "bools" else mask.requires_grad_()
    out, lse = attention(q, k, v, attn_mask=given, return_lse=True)
    assert (out[:, 5:30] == 0).all()
    assert (lse[:, :, 5:30] == MINUS_INF).all()
    assert torch.isfinite(lse[:, :, :5]).all()
    leaves = [q, k, v, *([given] if kind == "numbers" else [])]
    dq, dk, dv, *d_mask = torch.autograd.grad(out, leaves, gradient_of(out.shape))
    assert all(torch.isfinite(gradient).all() for gradient in (dq, dk, dv, *d_mask))
    assert (dq[:, 5:30] == 0).all()
    assert (dk[:, :20] == 0).all()
    assert (dv[:, :20] == 0).all()
    assert all((gradient[5:30] == 0).all() and (gradient[:, :20] == 0).all() for gradient in d_mask)


@runs_kernels
@pytest.mark.parametrize("kind", ["bools", "numbers"])
def test_garbage_in_keys_that_a_mask_hides_never_reaches_the_scores(kind: str) -> None:
    q, k, v = make_small(37, 41)
    mask = torch.zeros(37, 41, device=DEVICE)
    mask[:, 30:] = MINUS_INF
    given = mask == 0 if kind == "bools" else mask
    clean = attention(q, k, v, attn_mask=given, return_lse=True)
    for value in (float("nan"), float("inf")):
        k[:, 30:] = value
        assert all(map(torch.equal, attention(q, k, v, attn_mask=given, return_lse=True), clean))


@runs_kernels
def test_garbage_behind_a_mask_in_a_larger_buffer_never_leaks() -> None:
    q, k, v = make_small(37, 41)
    mask, clean = (
        torch.full((1, 2, 40, 48), around, device=DEVICE)[:, :, :37, :41].copy_(numbers(1, 2, 37, 41))
        for around in (float("nan"), 0.0)
    )
    for arguments in ({}, {"causal": True}):
        expected = attention(q, k, v, attn_mask=clean, **arguments)
        assert torch.equal(attention(q, k, v, attn_mask=mask, **arguments), expected)
        found, exact = (gradients(q, k, v, attn_mask=one, **arguments) for one in (mask, clean))
        assert all(map(torch.equal, found, exact))


@runs_kernels
def test_a_mask_is_read_by_its_strides(loads: list[Candidate]) -> None:
    """Those of 16-byte rows give the same bits by one kernel, and so do all others by another."""
    q, k, v = make_small(32, 48)
    dense = numbers(1, 2, 32, 48, dtype=BFLOAT16)
    expected = attention(q, k, v, attn_mask=dense)
    padded = torch.zeros(1, 2, 32, 64, dtype=BFLOAT16, device=DEVICE)[..., :48].copy_(dense)
    late = torch.zeros(dense.numel() + 1, dtype=BFLOAT16, device=DEVICE)[1:].view(dense.shape).copy_(dense)
    columns = torch.zeros(1, 2, 48, 32, dtype=BFLOAT16, device=DEVICE).transpose(2, 3).copy_(dense)
    heads_last = torch.zeros(1, 32, 48, 2, dtype=BFLOAT16, device=DEVICE).permute(0, 3, 1, 2).copy_(dense)
    assert torch.equal(attention(q, k, v, attn_mask=padded), expected)
    loose = [attention(q, k, v, attn_mask=mask) for mask in (late, columns, heads_last)]
    assert all(torch.equal(one, loose[0]) for one in loose)
    torch.testing.assert_close(loose[0], expected, atol=1e-2, rtol=1e-2)
    assert Counter(candidate.family.loose_mask for candidate in loads) == {False: 1, True: 1}


@runs_kernels
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_the_lowest_number_of_a_dtype_hides_keys_without_nan(dtype: torch.dtype) -> None:
    """As models write masks; and a row of nothing else is the mean of its values, as for PyTorch."""
    q, k, v = make_small(20, 30, dtype=dtype)
    mask = torch.zeros(20, 30, dtype=dtype, device=DEVICE)
    mask[:, 10:] = torch.finfo(dtype).min
    out = attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, attention(q, k[:, :10], v[:, :10]), atol=1e-2, rtol=1e-2)
    if dtype is not FLOAT16:  # whose lowest number does not swallow a score
        mask[:, :] = torch.finfo(dtype).min
        mean = v.float().mean(1, keepdim=True).to(dtype).expand(1, 20, 2, 32)
        for backend in ("generated", "reference"):
            torch.testing.assert_close(attention(q, k, v, attn_mask=mask, backend=backend), mean, atol=1e-2, rtol=1e-2)


@runs_kernels
@pytest.mark.parametrize("value", [6e4, 1e30, 3e38])
def test_large_numbers_neither_overflow_nor_turn_to_nan(value: float) -> None:
    q, k, v, mask = requiring(*make_small(20, 30, heads=1), torch.zeros(20, 30, device=DEVICE))
    with torch.no_grad():
        mask[:, 3] = value
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    torch.testing.assert_close(out, v[:, 3:4].expand_as(out))
    assert torch.isfinite(lse).all()
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(out, (q, k, v, mask), gradient_of(out.shape)))


@runs_kernels
def test_a_mask_of_zeros_or_of_true_changes_nothing_beyond_rounding() -> None:
    q, k, v = make(50, 60, dtype=FLOAT32)
    plain = attention(q, k, v, causal=True)
    for mask in (torch.zeros(60, device=DEVICE), torch.ones(60, dtype=torch.bool, device=DEVICE)):
        torch.testing.assert_close(attention(q, k, v, causal=True, attn_mask=mask), plain, atol=1e-6, rtol=1e-6)


@runs_kernels
def test_a_mask_goes_with_every_other_feature() -> None:
    """A cap bends the scores before a mask is added; sinks and ALiBi stand beside it."""
    arguments: dict[str, Any] = {
        "window_size": (30, 4), "softcap": 2.0, "alibi_slopes": torch.tensor([0.3, 0.1], device=DEVICE),
        "sinks": torch.tensor([1.0, -2.0], device=DEVICE), "attn_mask": numbers(2, 50, 60),
    }  # fmt: skip
    assert_right(*make_small(50, 60), **arguments)
    assert_gradients_right(*make_small(50, 60), **arguments, factor=3.0)


@runs_kernels
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (5, -1)])
def test_the_gradient_of_a_mask_is_zero_where_no_row_looks(window: tuple[int, int]) -> None:
    q, k, v, mask = requiring(*make_small(40, 90, dtype=FLOAT32), torch.zeros(40, 90, device=DEVICE))
    out = attention(q, k, v, attn_mask=mask, window_size=window, softcap=2.0)
    (found,) = torch.autograd.grad(out, mask, gradient_of(out.shape, FLOAT32))
    left, right = window
    distance = torch.arange(90, device=DEVICE)[None, :] - torch.arange(50, 90, device=DEVICE)[:, None]
    outside = (distance < -left if left >= 0 else distance < -90) | (distance > right if right >= 0 else distance > 90)
    assert (found[outside] == 0).all()
    (exact,) = torch.autograd.grad(
        by_definition(q, k, v, mask.masked_fill(outside, MINUS_INF), softcap=2.0)[0], mask,
        gradient_of(out.shape, FLOAT32).double(),
    )  # fmt: skip
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_a_mask_that_needs_no_gradient_costs_none(loads: list[Candidate]) -> None:
    q, k, v = make_small(dtype=FLOAT32)
    gradients(q, k, v, attn_mask=numbers(37, 41))
    assert not any(candidate.family.mask_gradient for candidate in loads)
    mask = numbers(37, 41).requires_grad_()
    out = attention(q, k, v, attn_mask=mask)
    (found,) = torch.autograd.grad(out, mask, gradient_of(out.shape, FLOAT32))
    assert found.shape == mask.shape
    (last,) = [candidate.family for candidate in loads if candidate.family.mask_gradient]
    assert last.kernel_pass is Pass.BWD_DQ


@runs_kernels
def test_warmup_loads_what_a_mask_with_a_gradient_needs(loads: list[Candidate]) -> None:
    warmup(["1x2x1x32x48x32,bias"], backward=True)
    before = len(loads)
    q, k, v, mask = requiring(*make_small(32, 48), numbers(32, 48, dtype=BFLOAT16))
    out = attention(q, k, v, attn_mask=mask)
    torch.autograd.grad(out, (q, k, v, mask), gradient_of(out.shape))
    assert len(loads) == before


@runs_kernels
def test_the_gradient_has_the_dtype_of_the_mask_and_repeats_to_the_bit() -> None:
    q, k, v = make_small()
    mask = numbers(37, 41, dtype=BFLOAT16).requires_grad_()

    def gradient() -> Tensor:
        out = attention(q, k, v, attn_mask=mask)
        (found,) = torch.autograd.grad(out, mask, gradient_of(out.shape))
        return found

    first = gradient()
    assert first.dtype == BFLOAT16
    assert torch.equal(first, gradient())


@runs_kernels
def test_later_masks_of_one_kind_are_read_anew(loads: list[Candidate]) -> None:
    q, k, v = make_small()
    for mask in (numbers(37, 41), -numbers(37, 41).clamp(min=-5.0)):
        assert_right(q, k, v, attn_mask=mask)
        assert_gradients_right(q, k, v, attn_mask=mask)
    assert len(loads) == 4


@runs_kernels
def test_bhsd_takes_the_same_mask() -> None:
    q, k, v = make(20, 30)
    mask = numbers(2, 4, 20, 30)
    out = attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), attn_mask=mask, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), attention(q, k, v, attn_mask=mask))


@runs_kernels
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive_goes_with_a_mask(scale: float) -> None:
    q, k, v = make_small()
    assert_right(q, k, v, attn_mask=numbers(37, 41), softmax_scale=scale)
    assert_gradients_right(q, k, v, attn_mask=numbers(37, 41), softmax_scale=scale)


def test_without_keys_a_mask_changes_nothing_and_gets_a_gradient_of_its_shape() -> None:
    q, k, v = make(5, 0, device=CPU)
    mask = torch.zeros(5, 0).requires_grad_()
    out = attention(q, k, v, attn_mask=mask)
    assert (out == 0).all()
    assert [one.shape for one in torch.autograd.grad(out.sum(), mask, allow_unused=True) if one is not None] in (
        [],
        [mask.shape],
    )


# --- as PyTorch's own -------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(
    ("lead", "size"),
    [
        ((2, 4), (37, 41)),
        ((2, 4), (2, 1, 1, 41)),
        ((4,), (4, 37, 41)),
        ((), (37, 41)),
        ((2, 3, 2), (3, 1, 37, 41)),
        ((2, 3, 2), (2, 1, 1, 37, 41)),
        ((2, 3, 2), (1, 1, 2, 37, 41)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bools", "numbers"])
def test_sdpa_takes_the_masks_that_pytorch_takes(kind: str, lead: tuple[int, ...], size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(*lead, rows, 16, generator=generator).to(DEVICE) for rows in (37, 41, 41))
    mask = bools(*size) if kind == "bools" else numbers(*size)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num(0.0)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected, atol=1e-5, rtol=1e-5)


@runs_kernels
def test_a_mask_of_another_dtype_goes_with_autocast() -> None:
    q, k, v = make_small(dtype=FLOAT32)
    with torch.autocast(DEVICE.type, dtype=BFLOAT16):
        for dtype in (FLOAT32, BFLOAT16, FLOAT16):
            if dtype is FLOAT16:
                half = (tensor.to(FLOAT16) for tensor in (q, k, v))
                out = attention(*half, attn_mask=numbers(37, 41, dtype=dtype))
            else:
                out = attention(q, k, v, attn_mask=numbers(37, 41, dtype=dtype))
            assert out.dtype == BFLOAT16


def test_sdpa_takes_a_mask_or_is_causal_as_pytorch_documents() -> None:
    tensors = [torch.ones(1, 2, 5, 16)] * 3
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(InvalidProblemError, match=r"attn_mask and is_causal=True are given; .* fa_autotune\.attention"):
        scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(36, 41), r"attn_mask has shape \(1, 1, 36, 41\); it broadcasts to \(2, 4, 37, 41\)"),
        (torch.ones(2, 37, 41), r"attn_mask has shape \(1, 2, 37, 41\); it broadcasts to"),
        (torch.ones(1, 1, 1, 37, 41), r"attn_mask has shape .*; it has at most 4 dimensions"),
        (torch.ones(37, 41, dtype=torch.int32), r"attn_mask is torch.int32; it is torch.bool .* cast it"),
        (torch.ones(37, 41, dtype=torch.float64), r"attn_mask is torch.float64; .* torch.bfloat16 as q"),
        (torch.ones(37, 41, device="meta"), "attn_mask is on meta and q on cpu; move one"),
        ([[True]], "attn_mask is a list, attention takes torch tensors; convert it"),
    ],
)
def test_masks_that_do_not_fit_are_an_error(mask: Any, says: str) -> None:
    with pytest.raises(InvalidProblemError, match=says):
        attention(*make(device=CPU), attn_mask=mask)


def test_batch_dimensions_of_a_mask_that_do_not_broadcast_are_an_error() -> None:
    tensors = [torch.ones(2, 3, 1, 5, 16)] * 3
    with pytest.raises(InvalidProblemError, match=r"attn_mask has batch dimensions \(2,\), which do not broadcast to"):
        scaled_dot_product_attention(*tensors, attn_mask=torch.ones(2, 1, 5, 5))


# --- transforms, graphs, operators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_vmap_gives_each_example_its_mask(shared: bool, reference_only: None) -> None:
    q, k, v = (torch.stack([tensor, tensor.flip(1)]) for tensor in make(20, 30, dtype=FLOAT32, device=CPU))
    masks = numbers(2, 4, 20, 30, device=CPU)

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, attn_mask=mask)
        return out.square().sum()

    in_dims = (0, 0, 0, None if shared else 0)
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 3)), in_dims)(q, k, v, masks[0] if shared else masks)
    for number in range(2):
        mask = masks[0 if shared else number]
        expected = torch.func.grad(loss, argnums=(0, 3))(q[number], k[number], v[number], mask)
        for one, other in zip(mapped, expected, strict=True):
            torch.testing.assert_close(one[number], other)


@pytest.mark.parametrize("kind", ["bools", "numbers"])
def test_the_operators_keep_their_promises_with_a_mask(kind: str, reference_only: None) -> None:
    mask = bools(1, 4, 20, 30, device=CPU) if kind == "bools" else numbers(1, 4, 20, 30, device=CPU).requires_grad_()
    tensors = requiring(*make(20, 30, dtype=FLOAT32, device=CPU))
    call = Call(None, FULL, BSHD, GENERATED)
    torch.library.opcheck(torch.ops.fa_autotune.forward.default, (*tensors, *call), {"attn_mask": mask})
    out, lse = (one.detach() for one in torch.ops.fa_autotune.forward(*tensors, *call, attn_mask=mask))
    plain = (one.detach() for one in (torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse))
    arguments = (*plain, list(Needed(True, False, True, attn_mask=kind == "numbers")), *call)
    torch.library.opcheck(torch.ops.fa_autotune.backward.default, arguments, {"attn_mask": mask.detach()})


@runs_kernels
def test_the_gradient_of_a_mask_lies_as_the_operator_promises() -> None:
    """Kernels write it with rows of whole 16 bytes."""
    tensors = make(12, 12, dtype=FLOAT32)
    mask = numbers(2, 4, 12, 12)
    call = Call(None, FULL, BSHD, GENERATED)
    out, lse = torch.ops.fa_autotune.forward(*tensors, *call, attn_mask=mask)
    arguments = (torch.randn_like(out), None, *tensors, out, lse, list(Needed(True, True, True, attn_mask=True)), *call)
    torch.library.opcheck(
        torch.ops.fa_autotune.backward.default, arguments, {"attn_mask": mask}, test_utils="test_faketensor"
    )


def test_a_compiled_call_gives_the_gradients_of_the_eager_one(reference_only: None) -> None:
    q, k, v, mask = requiring(*make_small(20, 30, dtype=FLOAT32, device=CPU), numbers(20, 30, device=CPU))

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, attn_mask=mask, causal=True)
        return out

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, mask)
    expected = step(q, k, v, mask)
    d_out = torch.randn(expected.shape)
    for one, other in zip(
        (found, *torch.autograd.grad(found, (q, k, v, mask), d_out)),
        (expected, *torch.autograd.grad(expected, (q, k, v, mask), d_out)),
        strict=True,
    ):
        assert torch.equal(one, other)
