"""The dropout cases of flash-attention's published tests: what was dropped is read from S_dmask, as they read it, and
results and gradients are held to plain torch that drops the same, in fp32 and in the call's dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_autotune import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from kit.attention_calls import DEVICE, MINUS_INF
from kit.packed_calls import cu_seqlens

DROPOUT_P = 0.17
HEADS, BATCH_SIZE = 6, 4
MAX_SCORES = 2**23  # of a batch, which is made smaller than flash-attn's: plain torch holds them several times
FIXED, PACKED = ("func", "kvpacked", "qkvpacked"), ("varlen", "varlen_kvpacked", "varlen_qkvpacked")
FORMS = (*FIXED, *PACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCase:
    """A call of one of flash-attn's functions; the forms that stack q too take their lengths from seqlen_q."""

    form: str
    dtype: torch.dtype
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    kv_heads: int = HEADS
    causal: bool = False
    local: bool = False
    alibi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Padded:
    """A padded batch: q, k, v and d_out (batch, seqlen, heads, head_dim), what a row sees, what is added to scores."""

    tensors: tuple[Tensor, Tensor, Tensor]
    d_out: Tensor
    visible: Tensor
    rows: Tensor  # bool (batch, seqlen_q): of a sequence
    keys: Tensor
    bias: Tensor | float

    def by_torch(self, kept: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(out, probabilities before dropout, gradients of q, k and v), computed in a dtype."""
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in self.tensors)
        group = q.shape[2] // k.shape[2]
        keys, values = (tensor.repeat_interleave(group, 2) for tensor in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, keys / q.shape[-1] ** 0.5)
        if dtype is not torch.float32:  # another order of the same
            scores = torch.einsum("bthd,bshd->bhts", q / q.shape[-1] ** 0.5, keys)
        scores = (scores + self.bias).masked_fill(~self.visible, MINUS_INF)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(dtype).masked_fill(~self.visible, 0.0)
        dropped = weights.masked_fill(~kept, 0.0)
        out = torch.einsum("bhts,bshd->bthd", dropped, values / (1 - DROPOUT_P)).to(self.d_out.dtype)
        gradients = torch.autograd.grad(out, (q, k, v), self.d_out)
        return out.detach(), weights.detach(), [gradient.float() for gradient in gradients]


def check_dropout(case: DropoutCase) -> None:
    """Out and gradients, the probabilities that S_dmask tells, and the share that was dropped."""
    padded, slopes, window = _inputs(case)
    torch.manual_seed(case.seqlen_q + case.seqlen_k)
    options: dict[str, Any] = {
        "dropout_p": DROPOUT_P,
        "causal": case.causal,
        "window_size": window,
        "alibi_slopes": slopes,
        "return_attn_probs": True,
    }
    out, signed, gradients = _called(case, padded, options)
    kept = signed >= 0
    exact, probabilities, exact_gradients = padded.by_torch(kept, torch.float32)
    plain, plain_probabilities, plain_gradients = padded.by_torch(kept, case.dtype)
    _within("out", out, exact, plain, 2.0)
    _within("S_dmask", _normalized(signed, padded.visible), probabilities, plain_probabilities, 2.0)
    for name, found, right, other in zip(("dq", "dk", "dv"), gradients, exact_gradients, plain_gradients, strict=True):
        _within(name, found, right, other, 3.0)
    seen = padded.visible.expand_as(kept) & (signed != 0)  # beside ALiBi many are too small to have a sign
    if (count := int(seen.sum())) > 40_000:
        share = 1 - float(kept[seen].float().mean())
        assert abs(share - DROPOUT_P) <= 0.01, f"{share} of {count} weights were dropped"


def _within(name: str, found: Tensor, exact: Tensor, plain: Tensor, factor: float) -> None:
    error, allowed = ((one.float() - exact.float()).abs().max().item() for one in (found, plain))
    assert error <= factor * allowed + 1e-5, f"{name} errs by {error}, plain torch by {allowed}"


def _normalized(signed: Tensor, visible: Tensor) -> Tensor:
    """The probabilities of which S_dmask tells size and fate."""
    return signed.abs().masked_fill(~visible.expand_as(signed), 0.0)


def _inputs(case: DropoutCase) -> tuple[_Padded, Tensor | None, tuple[int, int]]:
    generator = torch.Generator(device=DEVICE).manual_seed(case.seqlen_q + 5000 * case.seqlen_k)
    seqlen_q, stacked = case.seqlen_q, case.form.endswith("qkvpacked")
    seqlen_k, kv_heads = (seqlen_q, HEADS) if stacked else (case.seqlen_k, case.kv_heads)
    batch_size = max(1, min(BATCH_SIZE, MAX_SCORES // (HEADS * seqlen_q * seqlen_k)))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE).to(case.dtype)

    def used(seqlen: int) -> Tensor:
        least = max(1, seqlen - 20) if case.form in PACKED else seqlen
        lengths = torch.randint(least, seqlen + 1, (batch_size, 1), generator=generator, device=DEVICE)
        return torch.arange(seqlen, device=DEVICE)[None, :] < lengths

    rows = used(seqlen_q)
    keys = rows if stacked else used(seqlen_k)
    window = (-1, -1)
    if case.local:
        left, right = torch.randint(0, seqlen_k, (2,), generator=generator, device=DEVICE).tolist()
        window = (left, right)
    own = torch.arange(seqlen_q, device=DEVICE)[None, :, None] + (keys.sum(-1) - rows.sum(-1))[:, None, None]
    distance = torch.arange(seqlen_k, device=DEVICE)[None, None, :] - own
    visible = rows[:, :, None] & keys[:, None, :]
    if case.causal:
        visible = visible & (distance <= 0)
    elif case.local:
        visible = visible & (distance <= window[1])
    if case.local:
        visible = visible & (distance >= -window[0])
    slopes, bias = None, 0.0
    if case.alibi:
        slopes = 0.3 * torch.rand(batch_size, HEADS, generator=generator, device=DEVICE)
        bias = -slopes[:, :, None, None] * distance.abs()[:, None]
    q, d_out = (randn(batch_size, seqlen_q, HEADS, case.head_dim) * rows[:, :, None, None] for _ in range(2))
    k, v = (randn(batch_size, seqlen_k, kv_heads, case.head_dim) * keys[:, :, None, None] for _ in range(2))
    return (
        _Padded(tensors=(q, k, v), d_out=d_out, visible=visible[:, None], rows=rows, keys=keys, bias=bias),
        slopes,
        window,
    )


def _called(case: DropoutCase, padded: _Padded, options: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, S_dmask, gradients of q, k and v), of the padded batch."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in padded.tensors)
    parts, stack = (q, k, v), 2
    if case.form in PACKED:
        parts, stack = (q[padded.rows], k[padded.keys], v[padded.keys]), 1
    starts_q, starts_k = (cu_seqlens(mask.sum(-1).tolist()) for mask in (padded.rows, padded.keys))
    longest = q.shape[1], k.shape[1]
    pair, whole = torch.stack(parts[1:], stack), torch.stack(parts, stack) if case.form.endswith("qkvpacked") else None
    calls = {
        "func": lambda: flash_attn_func(*parts, **options),
        "kvpacked": lambda: flash_attn_kvpacked_func(parts[0], pair, **options),
        "qkvpacked": lambda: flash_attn_qkvpacked_func(whole, **options),
        "varlen": lambda: flash_attn_varlen_func(*parts, starts_q, starts_k, *longest, **options),
        "varlen_kvpacked": lambda: flash_attn_varlen_kvpacked_func(
            parts[0], pair, starts_q, starts_k, *longest, **options
        ),
        "varlen_qkvpacked": lambda: flash_attn_varlen_qkvpacked_func(whole, starts_q, longest[0], **options),
    }
    out, _, signed = calls[case.form]()
    if case.form in PACKED:
        out = torch.zeros_like(padded.d_out).masked_scatter(padded.rows[:, :, None, None], out)
    gradients = torch.autograd.grad(out, (q, k, v), padded.d_out)
    return out.detach(), signed, [gradient.float() for gradient in gradients]
