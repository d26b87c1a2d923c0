"""Dropout on a GPU: compiled kernels against the reference with the achieved mask, under graphs, compilers and streams.

`pytest -m gpu -n 0`. Skipped where torch sees no GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_autotune import attention, flash_attn_qkvpacked_func, scaled_dot_product_attention
from fa_autotune.reference.dropout import draw_seed, dropout_mask
from kit.attention_calls import FLOAT32, gradient_of, requiring

pytestmark = pytest.mark.gpu

CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 40)},
    "left": {"window_size": (150, -1)},
    "softcap": {"softcap": 5.0, "causal": True},
}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def seed_once() -> None:
    torch.manual_seed(11)


def with_reference(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> list[tuple[Tensor, Tensor]]:
    """(out, reference) and the same of the gradients of q, k and v, from one seed; the reference in fp32."""
    d_out = gradient_of(torch.Size((*q.shape[:3], v.shape[3])))
    results = []
    for backend, dtype in (("generated", q.dtype), ("reference", FLOAT32)):
        tensors = requiring(*(tensor.to(dtype) for tensor in (q, k, v)))
        seed_once()
        out = attention(*tensors, **call, backend=backend)
        results.append([out, *torch.autograd.grad(out, tensors, d_out.to(dtype))])
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(113, 203), (512, 256), (1023, 1024), (1, 239), (799, 3), (1024, 1024)]
)
def test_dropout_is_that_of_the_reference_with_the_same_seed(seqlen_q: int, seqlen_k: int, name: str) -> None:
    q, k, v = randn(2, seqlen_q, 6, 64), randn(2, seqlen_k, 2, 64), randn(2, seqlen_k, 2, 64)
    for found, exact in with_reference(q, k, v, **CALLS[name], dropout_p=0.17):
        assert torch.isfinite(found).all()
        assert (found.float() - exact).abs().max() <= 0.02 * exact.abs().max() + 1e-3


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (256, torch.float16), (59, torch.bfloat16), (96, torch.float16), (64, torch.float32)],
    ids=str,
)
def test_dropout_of_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = (randn(2, 300, 2, head_dim, dtype=dtype) for _ in range(3))
    for found, exact in with_reference(q, k, v, causal=True, dropout_p=0.5):
        assert (found.float() - exact).abs().max() <= 0.02 * exact.abs().max() + 1e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_exactly_the_weights_of_the_mask_are_kept(head_dim: int) -> None:
    """Values of one hot key each show them, block by block of keys."""
    q, k = randn(2, 500, 4, head_dim), randn(2, 512, 4, head_dim)
    seed_once()
    kept = dropout_mask(draw_seed(q.device), 2, 4, 500, 512, dropout_p=0.3)
    for first in range(0, 512, head_dim):
        v = torch.zeros(2, 512, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        v[:, first : first + head_dim] = torch.eye(head_dim, device="cuda", dtype=torch.bfloat16)[:, None]
        seed_once()
        out = attention(q, k, v, dropout_p=0.3)
        assert torch.equal((out != 0).transpose(1, 2), kept[..., first : first + head_dim])


@pytest.mark.parametrize("dropout_p", [0.001, 0.17, 0.9])
def test_the_share_of_kept_weights_is_binomial(dropout_p: float) -> None:
    kept = dropout_mask(draw_seed(torch.device("cuda")), 4, 8, 512, 512, dropout_p=dropout_p).double()
    deviation = (dropout_p * (1 - dropout_p) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - dropout_p)) <= 5 * deviation + 2**-16


def test_each_replay_of_a_graph_drops_other_weights_in_both_directions() -> None:
    """And the backward of a replay those of its own forward: dv of a gradient of ones adds up the kept weights."""
    q, k, v = requiring(*(randn(1, 256, 2, 64) for _ in range(3)))
    d_out = torch.ones(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, dropout_p=0.4)
        return out, *torch.autograd.grad(out, (q, k, v), d_out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([tensor.clone() for tensor in captured])
    for number, replay in enumerate(replays):
        assert all(not torch.equal(replay[0], other[0]) for other in replays[:number])
        out, _, _, dv = (tensor.double() for tensor in replay)
        # For a gradient of ones both sides are the sum of kept weight · value, head by head.
        assert (out.sum((0, 1, 3)) - (dv * v.double()).sum((0, 1, 3))).abs().max() <= 1.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_weights_again(reentrant: bool) -> None:
    tensors = requiring(*(randn(2, 300, 4, 64) for _ in range(3)))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, dropout_p=0.4)
        return out.sin()

    d_out = gradient_of(tensors[0].shape)
    seed_once()
    plain = torch.autograd.grad(step(*tensors), tensors, d_out)
    seed_once()
    checkpoint(step, *tensors, use_reentrant=reentrant).backward(d_out)
    assert all(torch.equal(tensor.grad, one) for tensor, one in zip(tensors, plain, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on import
def test_a_compiled_step_has_the_gradients_of_its_own_weights() -> None:
    """The compiler draws other seeds than eager mode, but the backward shares its forward's."""
    q, k, v = requiring(*(randn(1, 256, 2, 64) for _ in range(3)))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, dropout_p=0.4)
        return out

    compiled = torch.compile(step, fullgraph=True)
    first, out = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, out)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    both = (out.double().sum((0, 1, 3)), (dv.double() * v.double()).sum((0, 1, 3)))
    assert (both[0] - both[1]).abs().max() <= 1.0


def test_fifty_backwards_from_one_seed_are_equal_to_the_bit() -> None:
    tensors = requiring(*(randn(2, 500, 4, 64) for _ in range(3)))
    d_out = gradient_of(tensors[0].shape)

    def step() -> tuple[Tensor, ...]:
        seed_once()
        return torch.autograd.grad(attention(*tensors, dropout_p=0.2, causal=True), tensors, d_out)

    first = step()
    for _ in range(50):
        assert all(map(torch.equal, step(), first))


def test_a_side_stream_and_the_drop_ins_drop_alike() -> None:
    q, k, v = (randn(2, 500, 4, 64) for _ in range(3))
    seed_once()
    expected = attention(q, k, v, dropout_p=0.3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        seed_once()
        found = attention(q, k, v, dropout_p=0.3)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    seed_once()
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), dropout_p=0.3), expected)
    seed_once()
    out = scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), dropout_p=0.3)
    assert torch.equal(out.transpose(1, 2), expected)
