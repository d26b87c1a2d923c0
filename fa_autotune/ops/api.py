"""Attention for torch tensors, by the kernel that was tuned for the call's shape, with its gradient.

The first call of a family decides, renders, compiles and loads; later ones cost one dict look-up and the launch, and
other lengths some arithmetic. Nothing is ever tuned here, and nothing is compiled or synchronised inside a CUDA-graph
capture: `warmup` does that ahead.
"""

from collections.abc import Iterable
from operator import index
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fa_autotune.dispatch.loaded_kernels import device_index, dispatcher_of, flush_misses, kernel_for
from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.arguments import as_extras, as_flag, as_tf32, call_of
from fa_autotune.ops.autograd import attend
from fa_autotune.ops.call import BHSD, BSHD, GENERATED, NO_EXTRAS, PACKED, REFERENCE, UNORDERED, Extras
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.tensor_kinds import PLAIN, causal_bias_of, refuse_proxy
from fa_autotune.problem.passes import SPLIT_BACKWARD, Pass
from fa_autotune.problem.problem import AttentionProblem
from fa_autotune.reference.scripting import keep_out_of_scripts

__all__ = ["attention", "attention_varlen", "explain", "flush_misses", "warmup"]

_LAYOUTS = {"bshd": BSHD, "bhsd": BHSD}
_GENERATED, _IEEE = "generated", "ieee"  # the defaults are these very objects
_is_compiling = torch.compiler.is_compiling


@overload
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
    return_lse: Literal[False] = False,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Tensor: ...
@overload
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
    return_lse: Literal[True],
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> tuple[Tensor, Tensor]: ...
@overload
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
    return_lse: bool,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Tensor | tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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
        _check_served(score_mod=score_mod, mask_mod=mask_mod, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        refuse_proxy("layout", layout)
        raise InvalidProblemError(
            f'layout={layout!r} is not "bshd" (batch, seqlen, heads, head_dim) or "bhsd" (heads before seqlen)'
        )
    if return_lse is not False and return_lse is not True:
        return_lse = as_flag("return_lse", return_lse)
    if deterministic is not True and deterministic is not False:
        deterministic = as_flag("deterministic", deterministic)
    by = GENERATED if deterministic else UNORDERED
    if backend is not _GENERATED:
        by = _backend_of(backend, by)
    tf32 = False if fp32_precision is _IEEE else as_tf32(fp32_precision)
    if attn_mask is not None and type(attn_mask) not in PLAIN:
        causal, attn_mask = _causal_bias_of(q, k, v, layout, causal, attn_mask)
    call = call_of(_LAYOUTS[layout], by, softmax_scale, causal, window_size, softcap, dropout_p, tf32)
    if alibi_slopes is sinks is attn_mask is None and call.dropout_p == 0.0:
        return attend(q, k, v, NO_EXTRAS, call, return_lse)
    rows_of(call.layout).check_kinds(q, k, v, NO_EXTRAS)
    extras = as_extras(q, call, alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask)
    return attend(q, k, v, extras, call, return_lse)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
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
    return_lse: Literal[False] = False,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
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
    return_lse: Literal[True],
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
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
    return_lse: bool,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
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
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str = "generated",
    fp32_precision: str = "ieee",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each of many sequences, which see nothing of one another; gives out, or (out, lse).

    q is (total_q, num_q_heads, head_dim), k (total_k, num_kv_heads, head_dim), v (total_k, num_kv_heads, head_dim_v);
    any strides. cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,) on q's device, contiguous, say where each
    sequence starts and where the last one ends: sequence b has rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] − 1 and keys
    cu_seqlens_k[b] … cu_seqlens_k[b + 1] − 1. Either may be none, and a row without keys gives 0. Rows after the last
    sequence belong to none: their out and gradients are 0, their lse −inf, whatever they hold.

    causal, window_size, softcap, alibi_slopes, sinks, dropout_p and fp32_precision mean for each sequence what they
    mean in `attention`, aligned bottom-right; alibi_slopes may be (sequences, num_q_heads), and dropout keeps what it
    keeps of a padded batch with the same seed. max_seqlen_q and max_seqlen_k are taken for compatibility and never
    read: they may be numbers, tensors or left out. return_lse: also the natural-log log-sum-exp, fp32 (num_q_heads,
    total_q), differentiable. Results and gradients are bit-for-bit repeatable, also with deterministic=False.

    The host never waits for the GPU, so what lies in cu_seqlens is not checked: it is to start at 0, not to fall, and
    to end at or before the totals. Where it does not, results are of no use, but nothing outside of the tensors is
    read or written. Raises InvalidProblemError for tensors that do not fit together, and UnsupportedError for what this
    release does not serve, before any kernel runs.
    """
    if not attn_mask is score_mod is mask_mod is q_scale is k_scale is v_scale is None:
        _check_served(
            attn_mask=attn_mask,
            score_mod=score_mod,
            mask_mod=mask_mod,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if return_lse is not False and return_lse is not True:
        return_lse = as_flag("return_lse", return_lse)
    if deterministic is not True and deterministic is not False:
        as_flag("deterministic", deterministic)
    by = GENERATED if backend is _GENERATED else _backend_of(backend, GENERATED)
    tf32 = False if fp32_precision is _IEEE else as_tf32(fp32_precision)
    call = call_of(PACKED, by, softmax_scale, causal, window_size, softcap, dropout_p, tf32)
    starts = Extras(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if alibi_slopes is sinks is None and call.dropout_p == 0.0:
        return attend(q, k, v, starts, call, return_lse)
    rows_of(PACKED).check_kinds(q, k, v, starts)
    extras = as_extras(q, call, alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens=(cu_seqlens_q, cu_seqlens_k))
    return attend(q, k, v, extras, call, return_lse)


def check_max_seqlens(**values: Any) -> None:
    """InvalidProblemError for maxima that are no lengths; their values are never read: no kernel needs them.

    A graph that looked at them would be one of these numbers.
    """
    if _is_compiling():
        return
    for name, value in values.items():
        if value is None or type(value) is int or isinstance(value, Tensor):
            continue
        refuse_proxy(name, value)
        try:
            index(value)
        except TypeError:
            raise InvalidProblemError(f"{name}={value!r} is no integer; leave it out, no kernel needs it") from None


def _backend_of(backend: Any, usual: int) -> int:
    """What a backend's name means; InvalidProblemError for one that is none."""
    if not (isinstance(backend, str) and backend in (_GENERATED, "reference")):
        refuse_proxy("backend", backend)
        raise InvalidProblemError(f'backend={backend!r} is not "generated" or "reference"; leave it out for kernels')
    return usual if backend == _GENERATED else REFERENCE


def _causal_bias_of(
    q: Tensor, k: Tensor, v: Tensor, layout: str, causal: Any, attn_mask: Tensor
) -> tuple[Any, Tensor | None]:
    """(causal, attn_mask) of a call whose mask may be a causal bias of torch."""
    rows_of(_LAYOUTS[layout]).check_kinds(q, k, v, NO_EXTRAS)
    axis = 1 if layout == "bshd" else 2
    seqlen_q, seqlen_k = q.shape[axis], k.shape[axis]
    top_left = causal_bias_of(attn_mask, seqlen_q, seqlen_k)
    if top_left is None:
        return causal, attn_mask
    if not top_left or seqlen_q == seqlen_k:
        return True, None
    return causal, torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril_()


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
    backward = as_flag("backward", backward)
    index = device_index(device)
    for called in (problem.as_called() for problem in AttentionProblem.several(problems)):
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
    backward = as_flag("backward", backward)
    asked, called = dispatcher_of(device_index(device)), AttentionProblem.of(problem).as_called()
    if not backward:
        return asked.peek(called).describe()
    choice = asked.backward_choice(called, unordered=called.family.unordered)
    return "\n".join([choice.describe(), *(asked.peek(one).describe() for one in choice.problems)])


# What arguments mean that are not served; None is off.
_FEATURES = {
    "attn_mask": "a mask, of packed sequences",
    "score_mod": "a score function",
    "mask_mod": "a mask function",
    "q_scale": "8-bit inputs",
    "k_scale": "8-bit inputs",
    "v_scale": "8-bit inputs",
}


def _check_served(**arguments: Any) -> None:
    """UnsupportedError for the first argument that asks for what this release does not serve."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} ({_FEATURES[name]}) is not served by this release of fa_autotune; leave it out"
            )


for _function in (attention, attention_varlen, warmup, explain):
    keep_out_of_scripts(_function)
