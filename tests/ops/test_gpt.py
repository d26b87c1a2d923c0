"""A small GPT trains to the same losses with our attention as with PyTorch's: eager, compiled, checkpointed."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fa_autotune import attention, flash_attn_qkvpacked_func, scaled_dot_product_attention
from kit.attention_calls import DEVICE, runs_kernels
from kit.combinations import rest

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, STEPS = 17, 24, 32, 2, 2, 6

Attend = Callable[[Tensor], Tensor]  # of (batch, seqlen, 3, heads, head_dim)


def with_pytorch(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_attention(qkv: Tensor) -> Tensor:
    return attention(*qkv.unbind(2), causal=True)  # type: ignore[no-any-return]


def with_sdpa_drop_in(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_flash_attn_drop_in(qkv: Tensor) -> Tensor:
    return flash_attn_qkvpacked_func(qkv, causal=True)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))
        x = x + self.out(self.attend(qkv).flatten(2))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, attend: Attend, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def losses(attend: Attend, *, checkpointed: bool = False, compiled: bool = False) -> list[float]:
    """The loss of each training step, from one seed."""
    torch.manual_seed(0)
    model: Any = Gpt(attend, checkpointed).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if compiled:
        torch.compiler.reset()
        model = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for _ in range(STEPS):
        start = torch.randint(VOCABULARY, (2, 1))
        sequence = ((start + torch.arange(LENGTH + 1) * 3) % VOCABULARY).to(DEVICE)  # to be learnt
        loss = model(sequence[:, :-1], sequence[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@cache
def expected() -> list[float]:
    return losses(with_pytorch)


@runs_kernels
@pytest.mark.parametrize(
    ("compiled", "checkpointed"),
    [(False, False), (True, True), *rest([(False, True), (True, False)])],
    ids=["eager-kept", "compiled-checkpointed", "eager-checkpointed", "compiled-kept"],
)
def test_a_gpt_trains_to_the_losses_that_it_has_with_pytorch(compiled: bool, checkpointed: bool) -> None:
    found = losses(with_attention, checkpointed=checkpointed, compiled=compiled)
    assert found == pytest.approx(expected(), rel=1e-4)


@runs_kernels
@pytest.mark.parametrize("attend", [with_sdpa_drop_in, with_flash_attn_drop_in])
def test_a_gpt_trains_the_same_with_the_drop_ins(attend: Attend) -> None:
    assert losses(attend) == pytest.approx(expected(), rel=1e-4)


def test_the_gpt_of_these_tests_learns() -> None:
    first, *_, last = expected()
    assert last < 0.9 * first
