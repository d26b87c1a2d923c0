"""attn_mask on a GPU: compiled kernels against the reference at many sizes, under graphs, compilers and streams.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_autotune import attention, scaled_dot_product_attention
from kit.attention_calls import assert_gradients_right, assert_right, gradient_of, gradients, requiring

pytestmark = pytest.mark.gpu

KINDS = {"bools": torch.bool, "numbers": torch.bfloat16, "wide numbers": torch.float32}
every_kind = pytest.mark.parametrize("kind", KINDS)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def make_mask(kind: str, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A mask that hides a fifth of the keys and, where it knows rows, some rows' all; numbers in `dtype` or fp32."""
    shown = torch.rand(size, device="cuda") < 0.8
    if size[-2] > 1:
        shown[..., ::17, :] = False
    if kind == "bools":
        return shown
    number_dtype = torch.float32 if kind == "wide numbers" else dtype
    return randn(*size, dtype=number_dtype).masked_fill(~shown, float("-inf"))


@every_kind
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "size"),
    [
        (1024, 1024, (1, 1)),
        (1023, 1024, (2, 6)),
        (1024, 1023, (1, 6)),
        (113, 203, (2, 1)),
        (256, 512, (2, 6)),
        (1, 239, (1, 6)),
        (799, 3, (1, 1)),
        (2048, 2048, (1, 1)),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (200, 30)}], ids=["", "causal", "window"])
def test_a_mask_follows_the_numerics_rule(
    arguments: dict[str, Any], seqlen_q: int, seqlen_k: int, size: tuple[int, int], kind: str
) -> None:
    q, k, v = randn(2, seqlen_q, 6, 64), randn(2, seqlen_k, 2, 64), randn(2, seqlen_k, 2, 64)
    mask = make_mask(kind, *size, seqlen_q, seqlen_k)
    with torch.no_grad():
        assert_right(q, k, v, attn_mask=mask, **arguments)
    assert_gradients_right(q, k, v, attn_mask=mask, **arguments, factor=3.0)


@every_kind
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (256, torch.float16), (59, torch.bfloat16), (96, torch.float16), (64, torch.float32)],
    ids=str,
)
def test_a_mask_of_every_head_dim(head_dim: int, dtype: torch.dtype, kind: str) -> None:
    q, k, v = (randn(2, 300, 2, head_dim, dtype=dtype) for _ in range(3))
    for size in ((1, 1, 300, 304), (2, 2, 300, 300)):
        mask = make_mask(kind, *size, dtype=dtype)[..., :300]
        with torch.no_grad():
            assert_right(q, k, v, attn_mask=mask)
        assert_gradients_right(q, k, v, attn_mask=mask, factor=3.0)


@every_kind
def test_a_mask_of_any_strides_gives_the_bits_of_its_copy_that_is_read_alike(kind: str) -> None:
    q, k, v = (randn(1, 128, 4, 64) for _ in range(3))
    mask = make_mask(kind, 1, 4, 128, 128)
    expected, expected_gradients = attention(q, k, v, attn_mask=mask), gradients(q, k, v, attn_mask=mask)
    views = [
        mask.transpose(2, 3).contiguous().transpose(2, 3),
        mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        torch.empty(mask.numel() + 1, dtype=mask.dtype, device="cuda")[1:].view(mask.shape).copy_(mask),
    ]
    for view in views:
        torch.testing.assert_close(attention(q, k, v, attn_mask=view), expected, atol=1e-2, rtol=1e-2)
        for one, other in zip(gradients(q, k, v, attn_mask=view), expected_gradients, strict=True):
            torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("size", [(2, 4, 257, 300), (1, 4, 257, 300), (2, 1, 1, 300), (257, 300)], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (50, 20)}], ids=["", "causal", "window"])
def test_the_gradient_of_a_mask_is_that_of_its_definition(arguments: dict[str, Any], size: tuple[int, ...]) -> None:
    q, k, v = (randn(2, rows, 4, 64) for rows in (257, 300, 300))
    mask = randn(*size, dtype=torch.float32).requires_grad_()
    out = attention(q, k, v, attn_mask=mask, **arguments)
    d_out = gradient_of(out.shape)
    (found,) = torch.autograd.grad(out, mask, d_out)
    exact = mask.detach().double().requires_grad_()
    rows, keys = torch.arange(257, device="cuda")[:, None] + 43, torch.arange(300, device="cuda")[None, :]
    left, right = arguments.get("window_size", (-1, 0 if arguments else -1))
    hidden = (keys > rows + (right if right >= 0 else 999)) | (keys < rows - (left if left >= 0 else 999))
    expanded = (exact + torch.zeros(257, 300, device="cuda")).masked_fill(hidden, float("-inf"))
    tensors = [tensor.double().transpose(1, 2) for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=expanded)
    (reference,) = torch.autograd.grad(expected, exact, d_out.double().transpose(1, 2))
    tolerance = 0.02 * reference.abs().max().item()
    torch.testing.assert_close(found, reference.float(), atol=tolerance, rtol=0.02)


@every_kind
def test_fifty_backwards_are_equal_to_the_bit(kind: str) -> None:
    tensors = requiring(*(randn(2, 500, 4, 64) for _ in range(3)))
    mask = make_mask(kind, 1, 4, 500, 504)[..., :500]
    leaves = [*tensors, *([] if kind == "bools" else requiring(mask))]
    d_out = gradient_of(tensors[0].shape)

    def step() -> tuple[Tensor, ...]:
        given = mask if kind == "bools" else leaves[3]
        return torch.autograd.grad(attention(*tensors, attn_mask=given, causal=True), leaves, d_out)

    first = step()
    for _ in range(50):
        assert all(map(torch.equal, step(), first))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
@every_kind
def test_a_compiled_step_gives_the_bits_of_the_eager_one(kind: str) -> None:
    tensors, mask = [randn(2, 300, 4, 64) for _ in range(3)], make_mask(kind, 2, 1, 300, 304)[..., :300]

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, attn_mask=mask)
        return out

    compiled, eager = requiring(*tensors), requiring(*tensors)
    out, expected = torch.compile(step, fullgraph=True)(*compiled, mask), step(*eager, mask)
    d_out = gradient_of(out.shape)
    found = [out, *torch.autograd.grad(out, compiled, d_out)]
    assert all(map(torch.equal, found, [expected, *torch.autograd.grad(expected, eager, d_out)]))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # that nothing is accumulated in
@every_kind
def test_a_captured_step_replays_with_later_masks(kind: str) -> None:
    static = requiring(*(randn(2, 500, 4, 64) for _ in range(3)))
    mask = make_mask(kind, 1, 4, 500, 512)[..., :500]
    leaves = [*static, *([] if kind == "bools" else requiring(mask))]
    given = mask if kind == "bools" else leaves[3]
    d_out = gradient_of(static[0].shape)

    def step() -> tuple[Tensor, ...]:
        out = attention(*static, attn_mask=given)
        return out, *torch.autograd.grad(out, leaves, d_out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        given.copy_(make_mask(kind, 1, 4, 500, 500))
    graph.replay()
    assert all(map(torch.equal, captured, step()))


def test_a_side_stream_runs_what_the_usual_one_does() -> None:
    q, k, v = (randn(2, 500, 4, 64) for _ in range(3))
    mask = make_mask("numbers", 2, 1, 500, 504)[..., :500]
    expected = gradients(q, k, v, attn_mask=mask)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = gradients(q, k, v, attn_mask=mask)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


def test_offsets_of_a_mask_past_2_to_the_31_elements() -> None:
    """Heads so far apart that the last ones' masks lie past 2^31 elements."""
    q, k, v = (randn(1, 64, 3, 64) for _ in range(3))
    apart = 2**30 + 2**29
    storage = torch.empty(2 * apart + 64 * 64, dtype=torch.bool, device="cuda")
    mask = storage.as_strided((1, 3, 64, 64), (0, apart, 64, 1))
    mask.copy_(make_mask("bools", 1, 3, 64, 64))
    assert torch.equal(attention(q, k, v, attn_mask=mask), attention(q, k, v, attn_mask=mask.contiguous()))
    found, expected = (gradients(q, k, v, attn_mask=one) for one in (mask, mask.contiguous()))
    assert all(map(torch.equal, found, expected))


def test_sdpa_with_a_mask_is_that_of_pytorch() -> None:
    q, k, v = (randn(2, 4, 300, 64) for _ in range(3))
    for kind in KINDS:
        mask = make_mask(kind, 2, 1, 300, 300)
        expected = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=mask if kind == "bools" else mask.float()
        ).nan_to_num(0.0)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
