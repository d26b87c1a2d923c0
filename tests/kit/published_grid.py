"""The cases of flash-attention's published tests of its output, as data, and a check of one against the numerics rule.

Its grid of `test_flash_attn_output` has 23,040 points: 2 dtypes × 3 kinds of heads × 2 (deterministic) × 16
combinations of four features × 12 head dims × 10 pairs of lengths. A kernel is compiled for each dtype, head dim and
combination; the rest are run-time numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kit.attention_calls import BFLOAT16, DEVICE, FLOAT16, assert_gradients_right, assert_right

DTYPES = (FLOAT16, BFLOAT16)
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
KV_HEADS = {"mha": 6, "mqa": 1, "gqa": 2}  # of 6 query heads
BATCH_SIZE = 4
SOFTCAP = 50.0
PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
_CAUSAL = (
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
    (1023, 1024),
)  # fmt: skip
CAUSAL_PAIRS = (*_CAUSAL, *((seqlen_k, seqlen_q) for seqlen_q, seqlen_k in _CAUSAL))
# What the tests of its third and fourth version add.
LATER_PAIRS = (
    (1, 1), (3, 3), (64, 1), (64, 32), (64, 128), (128, 192), (255, 256), (384, 256), (640, 128), (4096, 4096),
    (4224, 4224),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Which of the four features that need a kernel of their own a call has."""

    causal: bool = False
    local: bool = False
    alibi: bool = False
    softcap: bool = False

    @property
    def label(self) -> str:
        """Its features by name."""
        names = [name for name in ("causal", "local", "alibi", "softcap") if getattr(self, name)]
        return "-".join(names) or "plain"


COMBINATIONS = tuple(
    Combination(causal=bool(n & 1), local=bool(n & 2), alibi=bool(n & 4), softcap=bool(n & 8)) for n in range(16)
)


def sample() -> list[tuple[torch.dtype, int, Combination]]:
    """Two combinations for each dtype and head dim, one having what the other has not: each of the four is on and off
    beside every dtype and head dim, and each of the 16 combinations occurs three times."""
    found = []
    for place, (head_dim, dtype) in enumerate((head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES):
        first = (5 * place) % 8
        found += [(dtype, head_dim, COMBINATIONS[first]), (dtype, head_dim, COMBINATIONS[15 - first])]
    return found


def check(
    dtype: torch.dtype,
    head_dim: int,
    combination: Combination,
    lengths: tuple[int, int],
    *,
    kv_heads: int,
    deterministic: bool,
    heads: int = 6,
    batch_size: int = BATCH_SIZE,
) -> None:
    """One call, forward and backward; the same arguments give the same tensors and window."""
    seqlen_q, seqlen_k = lengths
    generator = torch.Generator(device=DEVICE).manual_seed(seqlen_q + 5000 * seqlen_k)
    if max(lengths) > 4000:  # whose scores fill the memory that workers share
        batch_size = 1

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE).to(dtype)

    q = randn(batch_size, seqlen_q, heads, head_dim)
    k, v = (randn(batch_size, seqlen_k, kv_heads, head_dim) for _ in range(2))
    arguments: dict[str, Any] = {"causal": combination.causal}
    if combination.local:
        left, right = torch.randint(0, seqlen_k, (2,), generator=generator, device=DEVICE).tolist()
        arguments["window_size"] = (left, right)
    if combination.alibi:
        arguments["alibi_slopes"] = 0.3 * torch.rand(batch_size, heads, generator=generator, device=DEVICE)
    if combination.softcap:
        q, arguments["softcap"] = q * SOFTCAP, SOFTCAP  # so that the cap bends most scores
    with torch.no_grad():
        assert_right(q, k, v, **arguments)
    is_wide_group = dtype is BFLOAT16 and head_dim == 256 and kv_heads < heads
    factor = 3.0 if combination.softcap or is_wide_group else 2.0
    assert_gradients_right(q, k, v, **arguments, factor=factor, deterministic=deterministic)
