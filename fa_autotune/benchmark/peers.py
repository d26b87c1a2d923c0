"""What a benchmark sets ours beside: other attention kernels, and ours called in other ways."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_autotune.benchmark.packed import document_mask, packed
from fa_autotune.errors import UnsupportedError
from fa_autotune.evaluation.measure import TimedRun
from fa_autotune.evaluation.seeded import seeded_features
from fa_autotune.ops.api import attention
from fa_autotune.ops.torch_private import allow_recompilations
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.features import Features

# (problem, q, k, v) → what computes attention and gives it, and a note; tensors are (batch, heads, seqlen, head_dim).
Peer = Callable[[AttentionProblem, Tensor, Tensor, Tensor], tuple[Callable[[], Any], str]]


def _ours_unordered(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple["partial[Any]", str]:
    features = seeded_features(problem, device=q.device)
    options: dict[str, Any] = {
        "window_size": problem.window,
        "softcap": features.softcap,
        "alibi_slopes": features.alibi_slopes,
        "sinks": None if features.sinks is None else features.sinks[0],
        "attn_mask": features.attn_mask,
        "dropout_p": features.dropout_p,
        "deterministic": False,
        "fp32_precision": "tf32" if problem.family.tf32 else "ieee",
    }
    launch: partial[Any] = partial(attention, q, k, v, layout="bhsd", **options)
    return launch, "ours with deterministic=False"


def _ours_padded(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], str]:
    if not problem.family.varlen:
        raise UnsupportedError("this problem is a batch of one length already; the peer is for varlen ones")
    launch, _ = _ours_unordered(problem, q, k, v)
    return partial(launch, deterministic=True), "our kernels on the same sequences as a batch"


def backward_of(make: Peer, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[TimedRun, str]:
    """A peer's whole backward, through autograd: its graph is kept, so that it can run again."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        attend, note = make(problem, *leaves)
        out = attend()
    do = torch.randn_like(out)

    def launch() -> None:
        torch.autograd.grad(out, leaves, do, retain_graph=True)

    return launch, note


def _sdpa(
    backend: SDPBackend, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Tensor], str]:
    _require_square(problem)
    grouped, causal = problem.shape.gqa_group_size > 1, problem.family.bounded_right
    mask = seeded_features(problem, device=q.device).attn_mask

    def launch() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

    return launch, f"torch {torch.__version__} SDPA, {backend.name}"


def _flex(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], str]:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 - imports the compiler

    if problem.family.sinks:
        raise UnsupportedError("sinks are no score of a key, so FlexAttention can't express them in one call")
    if problem.family.has_mask or problem.family.dropout:
        raise UnsupportedError("FlexAttention is not compared where a mask lies in memory, or with dropout")
    shape = problem.shape
    mask = None
    left, right = problem.window
    if problem.family.bounded_left or problem.family.bounded_right:
        offset = shape.seqlen_k - shape.seqlen_q
        first = offset - (left if left >= 0 else shape.seqlen_k)
        last = offset + (right if right >= 0 else shape.seqlen_q)

        def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key >= row + first) & (key <= row + last)

        def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return key <= row + last

        shown = visible if problem.family.bounded_left else causal
        mask = create_block_mask(shown, None, None, shape.seqlen_q, shape.seqlen_k, device=q.device)
    if problem.family.varlen:
        q, k, v = map(packed, (q, k, v))
        mask = create_block_mask(document_mask(problem), None, None, q.shape[2], k.shape[2], device=q.device)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": shape.gqa_group_size > 1}
    features = seeded_features(problem, device=q.device)
    if score_mod := _score_mod(features, shape.seqlen_k - shape.seqlen_q):
        options["score_mod"] = score_mod
    launch = partial(_compiled_flex(), q, k, v, **options)
    return launch, f"torch {torch.__version__} FlexAttention, compiled with dynamic=False"


def _score_mod(features: Features, offset: int) -> Callable[..., Tensor] | None:
    """What FlexAttention makes of a score; row i's own key is i + offset."""
    softcap, slopes = features.softcap, features.alibi_slopes

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        assert slopes is not None
        score = capped(score, batch, head, row, key) if softcap else score
        return score - slopes[batch, head] * (row + offset - key).abs()

    if slopes is not None:
        return biased
    return capped if softcap else None


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - imports the compiler

    allow_recompilations(1000)  # one for each shape
    return torch.compile(flex_attention, dynamic=False)


def _fa3(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Any], str]:
    _require_no_tensors(problem)
    library = _first_module("flash_attn_interface", "fa3_fwd_interface")
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    is_causal = problem.window == (-1, 0)
    options: dict[str, Any] = {} if is_causal else {"window_size": problem.window}
    if problem.family.softcap:
        options["softcap"] = seeded_features(problem, device=q.device).softcap
    launch = partial(library.flash_attn_func, q, k, v, causal=is_causal, **options)
    return launch, f"{library.__name__} (FlashAttention-3), (batch, seqlen, heads, head_dim)"


def _first_module(*names: str) -> Any:
    """The first of these modules that is installed; the last one's ImportError if none is."""
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return importlib.import_module(found[0] if found else names[-1])


def _require_no_tensors(problem: AttentionProblem, known: tuple[str, ...] = ()) -> None:
    others = [name for name in problem.family.feature_tensors if name not in known]
    if others:
        raise UnsupportedError(f"this peer is not compared with {' and '.join(others)}")


def _require_square(problem: AttentionProblem) -> None:
    if problem.family.softcap:
        raise UnsupportedError("SDPA has no cap on its scores")
    _require_no_tensors(problem, known=("attn_mask",))
    if problem.family.has_mask and problem.family.bounded_right:
        raise UnsupportedError("SDPA takes a mask or is_causal")
    if problem.window not in ((-1, -1), (-1, 0)):
        raise UnsupportedError("SDPA has no window; a mask for it would be another kernel")
    if problem.family.bounded_right and problem.shape.seqlen_q != problem.shape.seqlen_k:
        raise UnsupportedError("SDPA's is_causal is top-left aligned: not the same problem for unequal lengths")


OURS_UNORDERED, OURS_PADDED = "ours-unordered", "ours-padded"

PEERS: dict[str, Peer] = {
    "sdpa-flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "fa3": _fa3,
    OURS_UNORDERED: _ours_unordered,
    OURS_PADDED: _ours_padded,
}
