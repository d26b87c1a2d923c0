"""What the arguments of a call may be, and what they mean to kernels.

Checks of tensors are made once for each kind of call (`plans`), so they may take their time.
"""

from collections.abc import Mapping, Sequence, Set
from enum import Enum
from numbers import Complex, Real
from operator import index
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import InvalidProblemError, UnsupportedError
from fa_autotune.ops.call import (
    BOTTOM_RIGHT,
    BSHD,
    FULL,
    NO_EXTRAS,
    OPEN,
    WINDOW,
    Call,
    Extras,
)
from fa_autotune.ops.seeds import seed_for
from fa_autotune.ops.tangents import check_tangents
from fa_autotune.ops.tensor_kinds import check_tensor, refuse_proxy
from fa_autotune.ops.torch_private import break_graph, has_forward_mode
from fa_autotune.problem.family import MAX_HEAD_DIM, MIN_HEAD_DIM
from fa_autotune.reference.attention import TORCH_DTYPES

MIN_SCALE, MAX_SCALE = 2.0**-125, 2.0**127  # times log2(e), still a normal fp32 number
DEVICE_TYPES = ("cuda", "cpu", "meta")  # meta: shapes alone, as torch's own attention
_is_compiling, _is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_INTEGERS: tuple[Any, ...] = int, torch.SymInt
DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def call_of(
    layout: int,
    backend: int,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any = 0.0,
    dropout_p: Any = 0.0,
    tf32: bool = False,
) -> Call:
    """What a call says, of arguments as users give them; InvalidProblemError names the first that is none."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_scale(softmax_scale)
    if type(softcap) is not float:
        softcap = as_softcap(softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = as_dropout(dropout_p)
    if causal is not False and causal is not True:
        causal = as_flag("causal", causal)
    mask, left, right = mask_of(causal, window_size)
    return Call(softmax_scale, mask, layout, backend, left, right, softcap, dropout_p, tf32)


def as_flag(name: str, value: Any) -> bool:
    """A yes or no of a call: a bool of Python or numpy, 0 or 1; InvalidProblemError for all else, tensors too.

    Callers look for True and False themselves first.
    """
    if value is True or value is False:
        return bool(value)
    _check_known(name, value, "it is True or False: pass bool(…)")
    if isinstance(value, torch.SymBool) or (_is_bool_of_numpy(value) and value.ndim == 0):
        return bool(value)
    refuse_proxy(name, value)
    try:
        if isinstance(value, (Tensor, Enum)):  # an enum's member means something else than its number
            raise TypeError
        number = index(value)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if number not in (0, 1):
        what = "a tensor, for whose value the host would wait" if isinstance(value, Tensor) else f"{value!r}"
        raise InvalidProblemError(f"{name} is {what}; it is True or False: pass bool(…) of it if that is what is meant")
    return number == 1


def _is_unknown(value: Any) -> bool:
    """Whether a graph that is being recorded computes a value; for Dynamo that is each of numpy's, constants too."""
    return _is_compiling() and (
        isinstance(value, Tensor) or (_is_dynamo_compiling() and type(value).__module__ == "numpy")
    )


def _check_known(name: str, value: Any, way: str) -> None:
    """End the graph before what decides which kernel runs, and is not known while it is recorded.

    InvalidProblemError where there must be one graph: of torch.export, or, within an error of torch's, of fullgraph.
    """
    if not _is_unknown(value):
        return
    reason = (
        f"{name} is a {type(value).__name__}, whose value a graph does not know while it is recorded; {way} of it, "
        "from outside of what is compiled"
    )
    if not _is_dynamo_compiling():
        raise InvalidProblemError(reason)
    break_graph(reason)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def as_scale(value: Any) -> float:
    """A softmax_scale of any number type as a float; InvalidProblemError if it is no number, or wants a gradient."""
    if _wants_gradient(value):
        raise InvalidProblemError(
            "softmax_scale requires a gradient, which kernels do not give; multiply q by it and pass softmax_scale=1.0"
        )
    return _as_float("softmax_scale", value, "None means 1/sqrt(head_dim)")


def as_softcap(value: Any) -> float:
    """A softcap of any number type as a float; InvalidProblemError if it is no number, or wants a gradient."""
    if _wants_gradient(value):
        raise InvalidProblemError("softcap requires a gradient, which kernels do not give; pass it detached")
    _check_known("softcap", value, "pass float(…)")
    return _as_float("softcap", value, "0.0 means none")


def as_flash_attn_softcap(value: Any) -> float:
    """`as_softcap` as flash-attn means it: what is not above 0 is none."""
    number = as_softcap(value)
    return number if number > 0.0 or number != number else 0.0


def as_dropout(value: Any) -> float:
    """A dropout_p of any number type as a float; InvalidProblemError if it is none from 0 to less than 1."""
    if _wants_gradient(value):
        raise InvalidProblemError("dropout_p requires a gradient, which kernels do not give; pass it detached")
    _check_known("dropout_p", value, "pass float(…)")
    number = _as_float("dropout_p", value, "0.0 means none")
    check_dropout(number)
    return number


def check_seed(seed: Tensor | None, dropout_p: float, device: torch.device) -> None:
    """InvalidProblemError for dropout without a seed, a seed without dropout, or one that `draw_seed` does not give."""
    if (seed is not None) != (dropout_p != 0.0) or (
        seed is not None and (seed.shape != (1,) or seed.dtype != torch.int64 or seed.device != device)
    ):
        raise InvalidProblemError(
            f"dropout_p={dropout_p} with dropout_seed={seed}: dropout takes both, the seed int64 (1,) on {device} as "
            "fa_autotune.reference.dropout.draw_seed gives; no dropout takes neither"
        )


def check_dropout(dropout_p: float) -> None:
    """InvalidProblemError for a share of probabilities that is none, or leaves nothing."""
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidProblemError(
            f"dropout_p={dropout_p} is not from 0 to less than 1: the share of attention weights that become 0; 0.0 "
            "means none"
        )


def _is_bool(value: Any) -> bool:
    """Whether a value is a yes or no, of Python, numpy or torch, which Python takes for a number."""
    return (
        type(value) is bool
        or (isinstance(value, Tensor) and value.dtype is torch.bool)
        or (not _is_unknown(value) and _is_bool_of_numpy(value))
    )


def _is_bool_of_numpy(value: Any) -> bool:
    """Of one or of many."""
    return type(value).__module__ == "numpy" and str(getattr(value, "dtype", "")) == "bool"


def _as_float(name: str, value: Any, off: str) -> float:
    refuse_proxy(name, value)
    if _is_bool(value) and (name != "dropout_p" or value):  # `training and 0.1` is a dropout_p
        raise InvalidProblemError(f"{name}={_shown(value)} is no number: are the arguments in their order? {off}")
    if isinstance(value, Tensor) and has_forward_mode():
        check_tangents(value)
    try:
        if isinstance(value, torch.SymFloat):  # a graph's own, which float() would make a constant
            return value  # type: ignore[return-value]
        if isinstance(value, torch.SymInt):
            return torch.sym_float(value)  # type: ignore[no-untyped-call, no-any-return]
        if isinstance(value, (str, bytes)) or (isinstance(value, Complex) and not isinstance(value, Real)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        _refuse_unreadable(name, value, error)
        raise InvalidProblemError(f"{name}={_shown(value)} is not a number; {off}") from None


def _refuse_unreadable(name: str, value: Any, error: Exception) -> None:
    """InvalidProblemError for one number that torch does not tell."""
    if isinstance(error, RuntimeError) and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        raise InvalidProblemError(
            f"{name} is a {type(value).__name__} whose value can't be read: it has no memory, or a transform or a "
            "trace looks on; pass a number of Python"
        ) from None


def _shown(value: Any) -> str:
    """A value in a message; a graph has no text of its own."""
    return type(value).__name__ if _is_unknown(value) else repr(value)


def as_tf32(fp32_precision: Any) -> bool:
    """Whether float32 products may be in tf32; InvalidProblemError for a precision that is none."""
    if not (isinstance(fp32_precision, str) and fp32_precision in ("ieee", "tf32")):
        refuse_proxy("fp32_precision", fp32_precision)
        raise InvalidProblemError(
            f'fp32_precision={fp32_precision!r} is not "ieee" or "tf32"; leave it out for float32 products in full'
        )
    return fp32_precision == "tf32"


def as_extras(
    q: Tensor,
    call: Call,
    *,
    alibi_slopes: Any = None,
    sinks: Any = None,
    attn_mask: Any = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> Extras:
    """Slopes and sinks of each head, a mask, and a new seed for dropout, as kernels take them; q's axes are there.

    InvalidProblemError for what is none.
    """
    seed = seed_for(q) if call.dropout_p != 0.0 else None
    if cu_seqlens is None:
        if alibi_slopes is sinks is attn_mask is seed is None:
            return NO_EXTRAS
        batch_size, heads = q.shape[0], q.shape[2 if call.layout == BSHD else 1]
        return Extras(
            alibi_slopes=as_heads_numbers("alibi_slopes", alibi_slopes, q, batch_size, heads, batched=True),
            sinks=as_heads_numbers("sinks", sinks, q, batch_size, heads, batched=False),
            attn_mask=_as_mask(attn_mask),
            dropout_seed=seed,
        )
    starts_q, starts_k = cu_seqlens
    if alibi_slopes is sinks is seed is None:
        return Extras(None, None, None, None, starts_q, starts_k)
    count, heads = starts_q.shape[0] - 1, q.shape[1]
    scores = as_heads_numbers("sinks", sinks, q, 1, heads, batched=False)
    return Extras(
        alibi_slopes=as_heads_numbers("alibi_slopes", alibi_slopes, q, count, heads, batched=True),
        sinks=None if scores is None else scores.squeeze(0),
        dropout_seed=seed,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
    )


def _as_mask(mask: Any) -> Tensor | None:
    """A mask with four axes; what they must be is checked once for each kind of call."""
    if mask is None:
        return None
    check_tensor("attn_mask", mask, beside=True)
    if mask.ndim > 4:
        raise InvalidProblemError(
            f"attn_mask has shape {tuple(mask.shape)}; it has at most 4 dimensions: batch, heads, seqlen_q, seqlen_k"
        )
    shaped: Tensor = mask[(None,) * (4 - mask.ndim)]
    return shaped


def check_mask(mask: Tensor, size: tuple[int, int, int, int], q: Tensor) -> None:
    """InvalidProblemError for a mask that is not of a call with scores of that size (batch, heads, queries, keys)."""
    if mask.ndim != 4 or any(have not in (1, want) for have, want in zip(mask.shape, size, strict=True)):
        raise InvalidProblemError(
            f"attn_mask has shape {tuple(mask.shape)}; it broadcasts to {size}: batch, query heads, seqlen_q, seqlen_k "
            "in either layout; 1 stands for all, and leading dimensions may be left out"
        )
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise InvalidProblemError(
            f"attn_mask is {mask.dtype}; it is torch.bool (True: take part), or {q.dtype} as q or torch.float32 and "
            "added to the scores; cast it"
        )
    if mask.device != q.device:
        raise InvalidProblemError(f"attn_mask is on {mask.device} and q on {q.device}; move one of them")


def as_heads_numbers(name: str, tensor: Any, q: Tensor, batch_size: int, heads: int, *, batched: bool) -> Tensor | None:
    """A number for each head, or (`batched`) of each batch too, as kernels take them: fp32 (batch, heads)."""
    if tensor is None:
        return None
    check_tensor(name, tensor, beside=True)
    sizes = [(heads,), *([(batch_size, heads)] if batched else [])]
    if not any(_are_equal(tensor.shape, size) for size in sizes):
        rule = f"({heads},){f' or ({batch_size}, {heads})' if batched else ''}"
        raise InvalidProblemError(
            f"{name} has shape {tuple(tensor.shape)}; it is {rule}, a number for each query head"
            f"{', or each of a batch' if batched else ''}"
        )
    if not tensor.is_floating_point():
        raise InvalidProblemError(f"{name} is {tensor.dtype}, attention takes floating-point numbers; cast it")
    if tensor.device != q.device:
        raise InvalidProblemError(f"{name} is on {tensor.device} and q on {q.device}; move one of them")
    if name == "alibi_slopes" and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidProblemError(
            "alibi_slopes requires a gradient, which kernels do not give; pass alibi_slopes.detach()"
        )
    wide: Tensor = tensor.to(torch.float32).expand(batch_size, heads)
    return wide


def _are_equal(shape: Sequence[int], size: Sequence[int]) -> bool:
    """One by one: some may be a graph's own integers, which are not found in a tuple."""
    return len(shape) == len(size) and all(one == other for one, other in zip(shape, size, strict=True))


def check_softcap(softcap: float) -> None:
    """InvalidProblemError if a softcap is neither 0 nor a positive normal fp32 number."""
    if softcap != 0.0 and not MIN_SCALE <= softcap <= MAX_SCALE:
        raise InvalidProblemError(
            f"softcap={softcap} is not a positive number that float32 holds; 0.0 means none, and any other caps the "
            "scores at ±softcap"
        )


def check_scale(scale: float) -> None:
    """InvalidProblemError if a scale is not finite in fp32."""
    if not abs(scale) <= MAX_SCALE:
        raise InvalidProblemError(f"softmax_scale={scale} is not finite in float32; None means 1/sqrt(head_dim)")


def mask_of(causal: Any, window_size: Any) -> tuple[int, int, int]:
    """(mask, window_left, window_right) of a call; where causal, a row sees no key after its own."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is type(right) is int and left == OPEN == right:  # open sizes are not compared with each other
            return BOTTOM_RIGHT if causal else FULL, OPEN, OPEN
    left, right = as_window(window_size)
    right = 0 if causal else right
    if left == OPEN and right in (OPEN, 0):
        return FULL if right else BOTTOM_RIGHT, OPEN, OPEN
    return WINDOW, left, right


def as_window(value: Any) -> tuple[int, int]:
    """A window's (left, right) as integers, OPEN where they are negative; InvalidProblemError if they are no two."""
    refuse_proxy("window_size", value)
    way = "pass int(…)"
    _check_known("window_size", value, way)
    left: Any
    right: Any
    try:
        if isinstance(value, (Set, Mapping, bytes, bytearray)):  # no order, or none that was meant
            raise TypeError
        left, right = value
        for side in (left, right):
            _check_known("window_size", side, way)
        if _is_bool(left) or _is_bool(right):
            raise TypeError
        # A graph's own integers pass for int, or are SymInts, and index() would make them constants.
        left, right = (side if type(side) in _INTEGERS else index(side) for side in (left, right))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidProblemError):
            raise
        for side in value if isinstance(value, (tuple, list)) else (value,):
            _refuse_unreadable("window_size", side, error)
        raise InvalidProblemError(
            f"window_size={value!r} is not (left, right): how many keys a row sees before and after its own, integers, "
            "-1 for all; leave it out for no window"
        ) from None
    return left if left >= 0 else OPEN, right if right >= 0 else OPEN


def are_right(q: Tensor, k: Tensor, v: Tensor, *, rows_first: bool) -> bool:
    """Whether tensors with four axes keep all rules of `check_tensors`, in one look; heads may come after rows."""
    if not q.ndim == k.ndim == v.ndim == 4:
        return False
    batch_size, heads, length, head_dim = q.shape
    of_k, kv_heads, seqlen_k, key_dim = k.shape
    of_v, value_heads, seqlen_v, head_dim_v = v.shape
    if rows_first:
        heads, kv_heads, seqlen_k, value_heads, seqlen_v = length, seqlen_k, kv_heads, seqlen_v, value_heads
    return (
        q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.device == k.device == v.device
        and q.device.type in DEVICE_TYPES
        and batch_size == of_k == of_v
        and (kv_heads, seqlen_k) == (value_heads, seqlen_v)
        and head_dim == key_dim
        and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM >= head_dim_v >= MIN_HEAD_DIM
        and (heads == 0 or (kv_heads != 0 and heads % kv_heads == 0))
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """All rules of q, k and v in (batch, heads, seqlen, head_dim) order; InvalidProblemError names the first broken."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            way = "pass its dequantize()" if tensor.is_quantized else "cast it"
            raise InvalidProblemError(f"{name} is {tensor.dtype}, attention takes {known}; {way}")
        if tensor.device != q.device:
            raise InvalidProblemError(f"{name} is on {tensor.device} and q on {q.device}; move one of them")
        if tensor.dtype != q.dtype:
            raise InvalidProblemError(f"{name} is {tensor.dtype} and q {q.dtype}; cast one of them")
        if tensor.shape[0] != q.shape[0]:
            raise InvalidProblemError(f"{name} has batch size {tensor.shape[0]} and q {q.shape[0]}; they must be equal")
    if q.device.type not in DEVICE_TYPES:
        raise UnsupportedError(f"attention runs on cuda and cpu tensors, not on {q.device}; move them")
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
