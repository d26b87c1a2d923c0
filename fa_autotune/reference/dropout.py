"""Which probabilities dropout keeps: random bits of a seed, the (batch, head), the row and the key, by Philox 4x32.

The kernels compute the same bits (`is_kept` in templates/_forward.py.jinja), whatever their tiles.
"""

from operator import index

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError
from fa_autotune.reference.scripting import keep_out_of_scripts

STEPS = 65_536  # p is rounded to a whole number of them: a probability is kept by 16 bits
ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A seed, int64 (1,) on a device, from torch's default generator there: it advances as for torch's own dropout.

    So a CUDA graph draws a new one in each replay, and checkpointing restores the one of the first forward.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def threshold_of(dropout_p: float) -> int:
    """p in steps; at least one step is left to be kept."""
    return min(STEPS - 1, round(dropout_p * STEPS))


def scale_of(dropout_p: float) -> float:
    """What kept probabilities are multiplied by: 1 / (1 − p), of the rounded p."""
    return STEPS / (STEPS - threshold_of(dropout_p))


def dropout_mask(
    seed: Tensor, batch_size: int, num_q_heads: int, seqlen_q: int, seqlen_k: int, *, dropout_p: float
) -> Tensor:
    """Which probabilities a call keeps that draws this seed: bool (batch, num_q_heads, seqlen_q, seqlen_k), for tests.

    `torch.manual_seed(n); draw_seed(device)` is the seed of the first call after the same `torch.manual_seed(n)`.
    """
    if not isinstance(seed, Tensor) or seed.numel() != 1 or seed.dtype != torch.int64:
        raise InvalidProblemError(f"seed={seed!r} is no seed; draw_seed(device) gives one, an int64 tensor (1,)")
    try:
        share = -1.0 if dropout_p is True or isinstance(dropout_p, (str, bytes)) else float(dropout_p)
    except (TypeError, ValueError, RuntimeError):
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise InvalidProblemError(f"dropout_p={dropout_p!r} is not from 0 to less than 1; 0.0 means none")
    sizes = {"batch_size": batch_size, "num_q_heads": num_q_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        try:
            sizes[name] = -1 if isinstance(size, bool) else index(size)
        except (TypeError, ValueError, RuntimeError):
            sizes[name] = -1
        if sizes[name] < 0:
            raise InvalidProblemError(f"{name}={size!r} is no size; it is an integer from 0 on")
    heads = head_numbers(sizes["batch_size"], sizes["num_q_heads"], seed.device)
    return kept_of(seed, heads, range(sizes["seqlen_q"]), range(sizes["seqlen_k"]), share)


def head_numbers(batch_size: int, num_q_heads: int, device: torch.device) -> Tensor:
    """The number of each (batch, query head), int64."""
    return torch.arange(batch_size * num_q_heads, device=device).view(batch_size, num_q_heads)


def kept_of(seed: Tensor, heads: Tensor, rows: range, keys: range, dropout_p: float) -> Tensor:
    """Which probabilities of stretches of rows and keys are kept; `heads` are numbers of each (batch, query head)."""
    row = torch.arange(rows.start, rows.stop, device=seed.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=seed.device)[None, :]
    words = _philox(seed, row & ~8, key & ~9, heads[:, :, None, None])
    later = (key & 8) != 0
    bits = torch.where((row & 8) == 0, torch.where(later, words[1], words[0]), torch.where(later, words[3], words[2]))
    return torch.where((key & 1) == 0, bits & 0xFFFF, bits >> 16) >= threshold_of(dropout_p)


def _philox(seed: Tensor, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, ...]:
    """The four 32-bit words of Philox for a counter (first, second, third, 0), in int64."""
    seed = seed.reshape(())
    key_0, key_1 = seed & _LOW, (seed >> 32) & _LOW
    words: tuple[Tensor, ...] = (first, second, third, torch.zeros_like(seed))
    for _ in range(ROUNDS):
        product_0, product_1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]  # their low 64 bits are exact
        words = (
            ((product_1 >> 32) & _LOW) ^ words[1] ^ key_0,
            product_1 & _LOW,
            ((product_0 >> 32) & _LOW) ^ words[3] ^ key_1,
            product_0 & _LOW,
        )
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _LOW, (key_1 + _KEY_STEPS[1]) & _LOW
    return words


for _function in (draw_seed, dropout_mask):
    keep_out_of_scripts(_function)
