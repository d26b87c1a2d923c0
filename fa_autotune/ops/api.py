"""Attention for torch tensors, by the kernel that was tuned for the call's shape, with its gradient.

The first call of a shape decides, renders, compiles and loads; later ones cost one dict look-up and the launch. Nothing
is ever tuned here, and nothing is compiled or synchronised inside a CUDA-graph capture: `warmup` does that ahead.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fa_autotune.dispatch.loaded_kernels import device_index, dispatcher_of, flush_misses, kernel_for
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.arguments import (
    GENERATED,
    REFERENCE,
    UNORDERED,
    as_dropout,
    as_extras,
    as_scale,
    as_softcap,
    as_tf32,
    check_kinds,
    mask_of,
)
from fa_autotune.ops.autograd import attend
from fa_autotune.ops.memory import BHSD, BSHD
from fa_autotune.problem.family import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.dropout import draw_seed

__all__ = ["attention", "explain", "flush_misses", "warmup"]

_LAYOUTS = {"bshd": BSHD, "bhsd": BHSD}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: Any = None,
    mask_mod: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Any:
    """softmax(q·kᵀ·softmax_scale)·v, differentiable; gives out, or (out, lse) with return_lse.

    q is (batch, seqlen_q, num_q_heads, head_dim), k (batch, seqlen_k, num_kv_heads, head_dim), v (batch, seqlen_k,
    num_kv_heads, head_dim_v); with layout="bhsd" heads come before seqlen. Any strides. num_q_heads is a multiple of
    num_kv_heads (GQA, MQA); float16, bfloat16 or float32; head dims 8 … 512.

    causal: query i sees keys j ≤ i + seqlen_k − seqlen_q (bottom-right, as flash-attn ≥ 2.1). window_size: (left,
    right), so many keys before and after that last one, both inclusive, −1 for all; causal makes right 0. A row that
    sees no key gives 0. softmax_scale: None is 1/sqrt(head_dim). softcap: scores s become softcap·tanh(s / softcap),
    0.0 is none. alibi_slopes: (num_q_heads,) or (batch, num_q_heads); the score of query i and key j gets −slope·|i +
    seqlen_k − seqlen_q − j|. sinks: (num_q_heads,), differentiable, one more score for each row, whose value is 0; lse
    counts it. attn_mask: broadcasts to (batch, num_q_heads, seqlen_q, seqlen_k) in either layout, and is read by its
    strides; bool, True where a query sees a key, or of q's dtype or float32 and added to the scores last,
    differentiable; keys that causal or window_size hide stay hidden. dropout_p: this share of the attention weights,
    rounded to a multiple of 2⁻¹⁶, becomes 0 and the others grow by 1/(1 − dropout_p), by a seed that each call draws
    from torch's default generator; lse is that without dropout. `fa_autotune.dropout_mask` tells which stay.

    fp32_precision: "ieee", or "tf32": float32 products are of operands cut to 10 bits of mantissa, on tensor cores
    (sm_80 and newer), many times faster. It changes nothing for tensors of 16 bits, head dims above 256, the reference.

    return_lse: also give the natural-log log-sum-exp, fp32 (batch, num_q_heads, seqlen_q), −inf for a row that sees no
    key (with sinks: its sink); a gradient into lse counts. Results and gradients are bit-for-bit repeatable; with
    deterministic=False q's gradient need not be, and the backward may be faster for it. Under autocast the inputs are
    cast as for PyTorch's own attention.

    CPU tensors run a plain torch reference, or Triton's interpreter in a process started with TRITON_INTERPRET=1.
    Raises InvalidProblemError for tensors that do not fit together, and UnsupportedError for arguments that this
    release does not serve (all that is not described above), before any kernel runs.
    """
    if not (score_mod is mask_mod is q_scale is k_scale is v_scale is None):
        check_features(
            score_mod=score_mod,
            mask_mod=mask_mod,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    if backend not in ("generated", "reference"):
        raise InvalidProblemError(f'backend={backend!r} is not "generated" or "reference"; leave it out for kernels')
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise InvalidProblemError(
            f'layout={layout!r} is not "bshd" (batch, seqlen, heads, head_dim) or "bhsd" (heads before seqlen)'
        )
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_scale(softmax_scale)
    runs = REFERENCE if backend == "reference" else GENERATED if deterministic else UNORDERED
    if fp32_precision != "ieee":
        runs = as_tf32(runs, fp32_precision)
    if type(softcap) is not float:
        softcap = as_softcap(softcap)
    mask, left, right = mask_of(causal, window_size)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = as_dropout(dropout_p)
    call = (softmax_scale, mask, _LAYOUTS[layout], runs, left, right, softcap, dropout_p)
    if alibi_slopes is sinks is attn_mask is None and dropout_p == 0.0:
        return attend(q, k, v, call, return_lse)
    check_kinds(q, k, v)
    seed = draw_seed(q.device) if dropout_p != 0.0 else None
    return attend(q, k, v, call, return_lse, as_extras(q, _LAYOUTS[layout], alibi_slopes, sinks, attn_mask, seed))


def warmup(
    problems: Iterable[AttentionProblem | str],
    *,
    device: torch.device | str | int | None = None,
    backward: bool = False,
) -> None:
    """Decide, compile and load the kernels of problems ahead, so that their first calls need none of it.

    Problems as `AttentionProblem` or its short text, such as "4x32x8x4096x4096x128,causal"; with `backward` also the
    kernels of their backward, whichever gradients are needed. Needed before a call is captured in a CUDA graph. The
    device is the current GPU unless named.
    """
    index = device_index(device)
    for called in map(_as_called, problems):
        kernel_for(called, index)
        if backward:
            usual, unordered = (dispatcher_of(index).backward(called, unordered=free) for free in (False, True))
            for problem in usual:
                kernel_for(problem, index)
            split = [called.for_pass(kernel_pass) for kernel_pass in SPLIT_BACKWARD]
            if called.family.has_bias:
                split.append(called.for_pass(Pass.BWD_DQ, mask_gradient=True))
            for problem in (*unordered, *split):
                kernel_for(problem, index, ahead=True)


def explain(
    problem: AttentionProblem | str, *, device: torch.device | str | int | None = None, backward: bool = False
) -> str:
    """Which kernel would run a problem on a GPU, where that decision comes from, and why, as text.

    With `backward` the same of the kernels of its whole backward, and which way they are.
    """
    asked, called = dispatcher_of(device_index(device)), _as_called(problem)
    if not backward:
        return asked.peek(called).describe()
    choice = asked.backward_choice(called, unordered=called.family.unordered)
    return "\n".join([choice.describe(), *(asked.peek(one).describe() for one in choice.problems)])


def _as_called(problem: AttentionProblem | str) -> AttentionProblem:
    return (AttentionProblem.parse(problem) if isinstance(problem, str) else problem).as_called()


# What arguments mean that are not served; None is off.
_FEATURES = {
    "attn_mask": "a mask, of sequences in a row",
    "score_mod": "a score function",
    "mask_mod": "a mask function",
    "q_scale": "8-bit inputs",
    "k_scale": "8-bit inputs",
    "v_scale": "8-bit inputs",
}


def check_features(**arguments: Any) -> None:
    """UnsupportedError for the first argument that asks for what this release does not serve."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} ({_FEATURES[name]}) is not served by this release of fa_autotune; leave it out"
            )
