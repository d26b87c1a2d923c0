"""Attention for torch tensors, by the kernel that was tuned for the call's shape.

The first call of a shape decides, renders, compiles and loads; later ones cost one dict look-up and the launch. Nothing
is ever tuned here, and nothing is compiled or synchronised inside a CUDA-graph capture: `warmup` does that ahead.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fa_autotune.dispatch import Dispatcher, decide, rendered_digest
from fa_autotune.errors import InvalidProblemError, LaunchError, UnsupportedError
from fa_autotune.launch import LoadedKernel, live_device, live_toolchain, load_kernel
from fa_autotune.paths import interpreting
from fa_autotune.problem import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    Access,
    AttentionFamily,
    AttentionProblem,
    AttentionShape,
)
from fa_autotune.records import Candidate
from fa_autotune.reference import TORCH_DTYPES, attention_reference

MAX_REMEMBERED_CALLS = 16_384  # a stream of ever new lengths must not fill memory
MIN_SCALE, MAX_SCALE = 2.0**-125, 2.0**127  # times log2(e), still a normal fp32 number

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
_logger = logging.getLogger("fa_autotune")
_lock = threading.RLock()
_calls: dict[tuple[Any, ...], LoadedKernel] = {}
_kernels: dict[tuple[int, Candidate], LoadedKernel] = {}
_dispatchers: dict[int, Dispatcher] = {}
_INTERPRETER_INDEX = -1  # in place of a GPU's index


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
) -> Any:
    """softmax(q·kᵀ·softmax_scale)·v, forward only; gives out, or (out, lse) with return_lse.

    q is (batch, seqlen_q, num_q_heads, head_dim), k (batch, seqlen_k, num_kv_heads, head_dim), v (batch, seqlen_k,
    num_kv_heads, head_dim_v); with layout="bhsd" heads come before seqlen. Any strides. num_q_heads is a multiple of
    num_kv_heads (GQA, MQA); float16, bfloat16 or float32 (computed in ieee precision); head dims 8 … 256.

    causal: query i sees keys j ≤ i + seqlen_k − seqlen_q (bottom-right, as flash-attn ≥ 2.1). A row that sees no key
    gives 0. softmax_scale: None is 1/sqrt(head_dim). return_lse: also give the natural-log log-sum-exp, fp32 (batch,
    num_q_heads, seqlen_q), −inf for a row that sees no key. Results are bit-for-bit repeatable.

    CPU tensors run a plain torch reference, or Triton's interpreter in a process started with TRITON_INTERPRET=1.
    Raises InvalidProblemError for tensors that do not fit together, and UnsupportedError for arguments that this
    release does not serve (all that is not described above), before any kernel runs.
    """
    _refuse_unsupported(
        window_size=(window_size not in ((-1, -1), [-1, -1]), "a sliding window; (-1, -1) is none"),
        softcap=(softcap != 0.0, "a cap on the scores"),
        alibi_slopes=(alibi_slopes is not None, "ALiBi"),
        attn_mask=(attn_mask is not None, "an arbitrary mask; causal=True needs none"),
        sinks=(sinks is not None, "attention sinks"),
        dropout_p=(dropout_p != 0.0, "dropout"),
        score_mod=(score_mod is not None, "a score function"),
        mask_mod=(mask_mod is not None, "a mask function"),
        q_scale=(q_scale is not None, "8-bit inputs"),
        k_scale=(k_scale is not None, "8-bit inputs"),
        v_scale=(v_scale is not None, "8-bit inputs"),
    )
    if backend not in ("generated", "reference"):
        raise InvalidProblemError(f'backend={backend!r} is not "generated" or "reference"; leave it out for kernels')
    if layout not in ("bshd", "bhsd"):
        raise InvalidProblemError(
            f'layout={layout!r} is not "bshd" (batch, seqlen, heads, head_dim) or "bhsd" (heads before seqlen)'
        )
    _check_kinds(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedError(
            "attention has no backward in this release, but q, k or v requires a gradient; call it under "
            "torch.no_grad(), or train with torch.nn.functional.scaled_dot_product_attention"
        )
    if q.is_neg() or k.is_neg() or v.is_neg():  # views such as z.conj().imag, whose memory holds the opposite sign
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = _forward(q, k, v, bool(causal), softmax_scale, bshd=layout == "bshd", generated=backend == "generated")
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


def warmup(problems: Iterable[AttentionProblem | str], *, device: torch.device | str | int | None = None) -> None:
    """Decide, compile and load the kernels of problems ahead, so that their first calls need none of it.

    Problems as `AttentionProblem` or its short text, such as "4x32x8x4096x4096x128,causal". Needed before a call is
    captured in a CUDA graph. The device is the current GPU unless named.
    """
    index = _device_index(device)
    for problem in problems:
        _kernel(_as_called(problem), index)


def explain(problem: AttentionProblem | str, *, device: torch.device | str | int | None = None) -> str:
    """Which kernel would run a problem on a GPU, where that decision comes from, and why, as text."""
    asked = _dispatcher(_device_index(device))
    decision = decide(  # not asked.decide, which counts a problem without a winner as one that ran
        _as_called(problem),
        device=asked.device,
        triton_version=asked.triton_version,
        snapshot=asked.snapshot,
        digest_of=rendered_digest,
    )
    return decision.describe()


def flush_misses() -> int:
    """Append the problems that ran without a winner of their own to the user's database; gives their number.

    `fa-autotune tune --missed` tunes them. Happens by itself at exit.
    """
    with _lock:
        return sum(dispatcher.flush_misses() for dispatcher in _dispatchers.values())


def access_of(*tensors: Tensor) -> Access:
    """The strongest access that tensors (batch, heads, seqlen, head_dim) allow, by their pointers and strides."""
    access = Access.TMA
    for tensor in tensors:
        itemsize = tensor.element_size()
        *outer, last = tensor.stride()
        misaligned = tensor.data_ptr() % 16 or any(stride * itemsize % 16 for stride in outer)
        if last != 1 or misaligned or tensor.shape[3] * itemsize % 16:
            return Access.ANY
        if 0 in outer:
            access = Access.ALIGNED
    return access


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, *, bshd: bool, generated: bool
) -> tuple[Tensor, Tensor]:
    """Forward of (batch, heads, seqlen, head_dim) tensors; `bshd` says how the output lies in memory."""
    scale = None if softmax_scale is None else _as_scale(softmax_scale)
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        _check_tensors(q, k, v)
        q, scale = _with_positive_scale(q, scale)
    key, kernel = None, None
    if generated and q.device == k.device == v.device and _runs_kernels(q):
        key = (q.device, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape, causal, access_of(q, k, v))
        kernel = _calls.get(key)
    if kernel is None:
        _check_tensors(q, k, v)
    if scale is None:
        scale = q.shape[3] ** -0.5
    out, lse = _allocate(q, v, bshd)
    if kernel is None:
        if out.numel() == 0:
            return out, lse
        if k.shape[2] == 0:
            return out.zero_(), lse.fill_(float("-inf"))
        if key is None:
            return _reference(q, k, v, out, lse, scale, causal, told=not generated)
        kernel = _kernel_of_call(q, k, v, causal)
        _remember(key, kernel)
    kernel(q, k, v, out, lse, scale, k.shape[2] - q.shape[2] if kernel.candidate.family.bounded_right else None)
    return out, lse


def _runs_kernels(q: Tensor) -> bool:
    return q.is_cuda or (q.device.type == "cpu" and interpreting())


def _allocate(q: Tensor, v: Tensor, bshd: bool) -> tuple[Tensor, Tensor]:
    batch_size, num_q_heads, seqlen_q, _ = q.shape
    head_dim_v = v.shape[3]
    lse = torch.empty((batch_size, num_q_heads, seqlen_q), dtype=torch.float32, device=q.device)
    if bshd:
        out = torch.empty((batch_size, seqlen_q, num_q_heads, head_dim_v), dtype=q.dtype, device=q.device)
        return out.transpose(1, 2), lse
    return torch.empty((batch_size, num_q_heads, seqlen_q, head_dim_v), dtype=q.dtype, device=q.device), lse


def _kernel_of_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> LoadedKernel:
    shape = AttentionShape(
        batch_size=q.shape[0],
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
    )
    family = AttentionFamily(
        dtype=_DTYPES[q.dtype],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        bounded_right=causal,
        access=access_of(q, k, v),
    )
    problem = _as_called(AttentionProblem(family=family, shape=shape))
    return _kernel(problem, q.device.index if q.is_cuda else _INTERPRETER_INDEX)


def _remember(key: tuple[Any, ...], kernel: LoadedKernel) -> None:
    with _lock:
        while len(_calls) >= MAX_REMEMBERED_CALLS:
            del _calls[next(iter(_calls))]
        _calls[key] = kernel


def _as_called(problem: AttentionProblem | str) -> AttentionProblem:
    """The problem that `attention` asks for: a single row, bottom-right, sees every key and needs no bound."""
    parsed = AttentionProblem.parse(problem) if isinstance(problem, str) else problem
    if parsed.shape.seqlen_q > 1 or not parsed.family.bounded_right:
        return parsed
    return replace(parsed, family=replace(parsed.family, bounded_right=False))


def _kernel(problem: AttentionProblem, index: int) -> LoadedKernel:
    with _lock:
        candidate = _dispatcher(index).decide(problem).candidate
        kernel = _kernels.get((index, candidate))
        if kernel is None:
            if index >= 0 and torch.cuda.is_current_stream_capturing():
                raise LaunchError(
                    f"the kernel for {problem.label} is not loaded and a CUDA-graph capture is under way; call "
                    f'fa_autotune.warmup(["{problem.key}"]) or run the model once before capturing'
                )
            device_index = None if index == _INTERPRETER_INDEX else index
            kernel = load_kernel(candidate, _dispatcher(index).device.arch, device_index)
            _kernels[index, candidate] = kernel
        return kernel


def _dispatcher(index: int) -> Dispatcher:
    with _lock:
        found = _dispatchers.get(index)
        if found is None:
            found = Dispatcher(device=live_device(max(index, 0)), triton_version=live_toolchain().triton)
            _dispatchers[index] = found
        return found


def _device_index(device: torch.device | str | int | None) -> int:
    if interpreting():
        return _INTERPRETER_INDEX
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (RuntimeError, TypeError) as error:
        raise InvalidProblemError(f"device={device!r} is no device: {error}; write it like cuda:0") from None
    if chosen.type != "cuda":
        raise InvalidProblemError(f"device={device!r} is no GPU; kernels run on cuda devices, such as cuda:0")
    if chosen.index is not None:
        return chosen.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _reference(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool, *, told: bool
) -> tuple[Tensor, Tensor]:
    if not told:
        with _lock:  # once, however many threads come first
            _tell_of_reference()
    diagonal = k.shape[2] - q.shape[2] if causal else None
    with torch.autocast(q.device.type, enabled=False):  # it would round the reference's products
        result, result_lse = attention_reference(q, k, v, softmax_scale=scale, diagonal=diagonal)
    return out.copy_(result), lse.copy_(result_lse)


@cache
def _tell_of_reference() -> None:
    _logger.warning(
        "attention got CPU tensors and runs a plain torch reference: exact, but slow and O(seqlen_q · seqlen_k) in "
        "memory. Generated kernels need a GPU (or TRITON_INTERPRET=1, for tests). Told once."
    )


def _as_scale(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidProblemError(f"softmax_scale={value!r} is not a number; None means 1/sqrt(head_dim)") from None


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Kernels fold the scale into an fp32 exponent, where it must be positive: move a sign, or a zero, into q."""
    if not abs(scale) <= MAX_SCALE:
        raise InvalidProblemError(f"softmax_scale={scale} is not finite in float32; None means 1/sqrt(head_dim)")
    return (torch.zeros_like(q), 1.0) if abs(scale) < MIN_SCALE else (q.neg(), -scale)


def _refuse_unsupported(**arguments: tuple[bool, str]) -> None:
    for name, (used, meaning) in arguments.items():
        if used:
            raise UnsupportedError(f"{name} ({meaning}) is not served by this release of fa_autotune; leave it out")


def _check_kinds(q: Any, k: Any, v: Any) -> None:
    """What must hold before a tensor's dimensions and strides can be read."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise InvalidProblemError(f"{name} is a {type(tensor).__name__}, attention takes torch tensors; convert it")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise InvalidProblemError(f"{name} is a sparse or nested tensor, attention takes dense ones; convert it")
        if tensor.ndim != 4:
            raise InvalidProblemError(
                f"{name} has shape {tuple(tensor.shape)}, attention takes 4 dimensions: batch, seqlen, heads, head_dim "
                '(layout="bhsd": heads before seqlen); add what is missing with unsqueeze'
            )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """All rules of q, k and v in (batch, heads, seqlen, head_dim) order; InvalidProblemError names the first broken."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise InvalidProblemError(f"{name} is {tensor.dtype}, attention takes {known}; cast it")
        if tensor.device != q.device:
            raise InvalidProblemError(f"{name} is on {tensor.device} and q on {q.device}; move one of them")
        if tensor.dtype != q.dtype:
            raise InvalidProblemError(f"{name} is {tensor.dtype} and q {q.dtype}; cast one of them")
        if tensor.shape[0] != q.shape[0]:
            raise InvalidProblemError(f"{name} has batch size {tensor.shape[0]} and q {q.shape[0]}; they must be equal")
    if q.device.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"attention runs on cuda and cpu tensors, not on {q.device}")
    if q.shape[3] != k.shape[3]:
        raise InvalidProblemError(f"q has head_dim {q.shape[3]} and k {k.shape[3]}; they must be equal")
    for name, head_dim in (("q", q.shape[3]), ("v", v.shape[3])):
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
            raise InvalidProblemError(
                f"{name} has head_dim {head_dim}, kernels serve {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; pad or split it"
            )
    if k.shape[1:3] != v.shape[1:3]:
        raise InvalidProblemError(
            f"k has {k.shape[1]} heads × {k.shape[2]} keys and v {v.shape[1]} × {v.shape[2]}; they must be equal"
        )
    if q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise InvalidProblemError(
            f"q has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} kv heads: GQA needs whole groups; "
            'is the layout right? it is "bshd" (batch, seqlen, heads, head_dim) unless layout="bhsd" is given'
        )
