"""Plain-torch attention and seeded inputs: what every kernel is compared with, and what CPU tensors run.

Tensors are (batch, heads, seqlen, head_dim) throughout. `diagonal` is None (no bound) or the offset by which query row
i sees keys j <= i + diagonal.
"""

import torch
from torch import Tensor

from fa_autotune.problem import Access, AttentionFamily, AttentionShape, DType

TORCH_DTYPES = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the reference: fp64 for fp32 inputs, fp32 otherwise."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def hidden_keys(seqlen_q: int, seqlen_k: int, diagonal: int, device: torch.device, first_row: int = 0) -> Tensor:
    """(seqlen_q, seqlen_k) mask, true where query row first_row + i must not see key j."""
    rows = torch.arange(first_row, first_row + seqlen_q, device=device)
    return torch.arange(seqlen_k, device=device)[None, :] > (rows + diagonal)[:, None]


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, diagonal: int | None = None, first_row: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention in the reference precision: (out, lse), out still in that precision.

    A row that sees no key gives out 0 and lse −inf. Keys hidden from a row never reach it, NaN or not. `first_row` is
    the position of q's first row, for checking a slice of the rows. O(seqlen_q · seqlen_k) memory per head.
    """
    precise = reference_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.to(precise).repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q.to(precise) @ k.transpose(-1, -2) * softmax_scale
    hidden = None
    if diagonal is not None:
        hidden = hidden_keys(q.shape[2], k.shape[2], diagonal, q.device, first_row)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    out = weights @ v
    if hidden is not None and not torch.isfinite(v).all():
        out = _without_hidden_nan(weights, v, hidden)
    return out, lse.to(torch.float32)


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    *,
    softmax_scale: float,
    diagonal: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in the reference precision, from those of out and (if any) of lse.

    Written out, so that it also works where nothing is recorded. Rows that see no key and keys that no row sees get 0,
    and those keys are never read. O(seqlen_q · seqlen_k) memory per head.
    """
    precise = reference_dtype(q.dtype)
    batch_size, num_q_heads, seqlen_q, _ = q.shape
    group = num_q_heads // k.shape[1]
    seen = k.shape[2] if diagonal is None else max(0, min(k.shape[2], seqlen_q + diagonal))
    q, d_out = q.to(precise), d_out.to(precise)
    keys, values = (tensor[:, :, :seen].to(precise).repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q @ keys.transpose(-1, -2) * softmax_scale
    if diagonal is not None:
        scores = scores.masked_fill(hidden_keys(seqlen_q, seen, diagonal, q.device), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    delta = ((weights @ values) * d_out).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse.to(precise)
    d_scores = weights * (d_out @ values.transpose(-1, -2) - delta[..., None]) * softmax_scale
    dk, dv = k.new_zeros(k.shape, dtype=precise), v.new_zeros(v.shape, dtype=precise)
    for gradient, rows in ((dk, d_scores.transpose(-1, -2) @ q), (dv, weights.transpose(-1, -2) @ d_out)):
        gradient[:, :, :seen] = rows.unflatten(1, (-1, group)).sum(2)
    return d_scores @ keys, dk, dv


def _without_hidden_nan(weights: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """weights @ v where a hidden 0 · NaN counts as 0: NaN reaches only the rows that see it."""
    finite = torch.isfinite(v)
    clean = weights @ torch.where(finite, v, 0.0)
    seen = (~hidden).to(v.dtype) @ (~finite).to(v.dtype) > 0
    return torch.where(seen, float("nan"), clean)


def attention_same_precision(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, diagonal: int | None = None
) -> Tensor:
    """The same computation in the inputs' own precision, scale applied to k: the error plain torch makes."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q @ (k * softmax_scale).transpose(-1, -2)
    if diagonal is not None:
        hidden = hidden_keys(q.shape[2], k.shape[2], diagonal, q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1).masked_fill(hidden.all(-1)[:, None], 0.0) @ v
    return torch.softmax(scores, dim=-1) @ v


def seeded_inputs(
    family: AttentionFamily, shape: AttentionShape, *, device: torch.device, seed: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal q, k, v of a shape with the family's dtype, dims and access: same seed, same values.

    Access `any` gives tensors whose last stride is 2 and whose storage starts one element late.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = (
        (shape.num_q_heads, shape.seqlen_q, family.head_dim),
        (shape.num_kv_heads, shape.seqlen_k, family.head_dim),
        (shape.num_kv_heads, shape.seqlen_k, family.head_dim_v),
    )
    q, k, v = (_random((shape.batch_size, *size), family, generator, device, scale) for size in sizes)
    return q, k, v


def _random(
    size: tuple[int, ...], family: AttentionFamily, generator: torch.Generator, device: torch.device, scale: float
) -> Tensor:
    values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
    tensor = (values * scale).to(TORCH_DTYPES[family.dtype])
    if family.access is not Access.ANY:
        return tensor
    padded = torch.empty(2 * tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
    strided = padded.view(*size, 2)[..., 0]
    return strided.copy_(tensor)
