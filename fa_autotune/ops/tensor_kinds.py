"""What kind of tensor an argument is: one whose memory says all that it means, one that answers for itself, or neither.

A subclass answers for itself by `__torch_dispatch__`: the operators of `library` ask it. One that answers by
`__torch_function__` is asked for q, k and v; beside them it is refused: what it stands for may be in no memory, and
nobody would tell.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import FaAutotuneError, InvalidProblemError, UnsupportedError
from fa_autotune.ops.torch_private import is_without_memory

PLAIN = (Tensor, torch.nn.Parameter)  # torch.nn.Buffer makes Tensors

_UNINITIALIZED = torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer
_is_compiling = torch.compiler.is_compiling
_Kind: Any = Tensor  # its class methods lack types
_SILENT = (_Kind.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)


def check_tensor(name: str, tensor: Any, *, beside: bool = False) -> None:
    """InvalidProblemError for what is no dense tensor, or stands for something that is not in its memory.

    beside: it is none of q, k and v.
    """
    if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        return
    refuse_proxy(name, tensor)
    if not isinstance(tensor, Tensor):
        raise InvalidProblemError(f"{name} is a {type(tensor).__name__}, attention takes torch tensors; convert it")
    _check_layout(name, tensor)
    kind = type(tensor)
    if kind in PLAIN:
        return
    if isinstance(tensor, _UNINITIALIZED):
        raise InvalidProblemError(f"{name} is an {kind.__name__}: it has no shape yet; run its module once first")
    if kind is torch.masked.MaskedTensor:
        raise InvalidProblemError(
            f"{name} is a MaskedTensor, whose mask attention does not read; pass its get_data(), and the keys to be "
            "seen as attn_mask"
        )
    if _is_causal_bias(tensor):
        raise InvalidProblemError(
            f"{name} is a {kind.__name__}: it stands for a mask and holds none; pass it as attn_mask, and nowhere else"
        )
    if beside and _answers_by_function(kind):
        raise InvalidProblemError(
            f"{name} is a {kind.__name__}, which says by its __torch_function__ what it stands for, and kernels read "
            f"memory; pass the tensor that it stands for: its as_subclass(torch.Tensor) if its memory holds that"
        )


def _check_layout(name: str, tensor: Tensor) -> None:
    layout = tensor.layout
    if tensor.is_nested:
        what, way = "nested tensor", "pack its sequences one after another for `attention_varlen`"
    elif layout is torch.strided:
        return
    else:
        what = "tensor of mkldnn" if "mkldnn" in str(layout) else f"sparse tensor ({layout})"
        way = "convert it with to_dense()"
    raise InvalidProblemError(f"{name} is a {what}, attention takes dense ones; {way}")


def is_in_memory(tensor: Tensor) -> bool:
    """Whether a plain tensor's numbers lie in its memory: no zeros without any, and no view of the opposite sign."""
    return not (tensor.is_neg() or is_without_memory(tensor))


def in_memory(tensor: Tensor) -> Tensor:
    """The same numbers as they lie in memory; copied where they did not. A graph's operators do that themselves."""
    if _is_compiling():
        return tensor
    return (tensor.clone() if is_without_memory(tensor) else tensor).resolve_neg()


def refuse_proxy(name: str, value: Any) -> None:
    """InvalidProblemError for what stands for a value while torch.fx traces symbolically."""
    if isinstance(value, torch.fx.Proxy):
        raise InvalidProblemError(
            f"{name} is a {type(value).__name__}: torch.fx.symbolic_trace can't look into attention; keep the call "
            'whole by torch.fx.wrap("…") of its name in the module that calls it, or use torch.compile or torch.export'
        )


def _answers_by_function(kind: type[Tensor]) -> bool:
    """Whether a class has a `__torch_function__` of its own: neither Tensor's nor none."""
    function: Any = kind.__torch_function__
    function = getattr(function, "__func__", function)
    return all(function is not silent for silent in _SILENT)  # a graph has no hash of them


def ask(op: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What an operator gives for tensors that answer for themselves; UnsupportedError where one of them can't."""
    try:
        return op(*arguments)
    except FaAutotuneError:
        raise
    except (TypeError, NotImplementedError) as error:
        kinds = {type(tensor).__name__ for tensor in arguments if isinstance(tensor, Tensor)}
        kinds -= {kind.__name__ for kind in PLAIN}
        raise UnsupportedError(
            f"attention was given a {' and a '.join(sorted(kinds))}, which does not know it; pass plain tensors. It "
            f"said: {error}"
        ) from error


# --- the mask that a causal bias of torch stands for ------------------------------------------------------------------


def _is_causal_bias(tensor: Any) -> bool:
    module: Any = sys.modules.get("torch.nn.attention.bias")  # slow to import; without it there is no bias
    return module is not None and isinstance(tensor, module.CausalBias)


def causal_bias_of(attn_mask: Any, seqlen_q: int, seqlen_k: int) -> bool | None:
    """Whether a causal bias is top-left aligned, for a call of these lengths; None for what is no causal bias.

    InvalidProblemError for a bias of other lengths. One of a square is both, and called top-left.
    """
    if type(attn_mask) in PLAIN or not _is_causal_bias(attn_mask):
        return None
    if not hasattr(attn_mask, "seq_len_q"):
        raise InvalidProblemError(
            f"attn_mask is a {type(attn_mask).__name__} that went through an operation, after which it no longer says "
            f"what it stands for; make it anew with torch.nn.attention.bias.causal_lower_right({seqlen_q}, {seqlen_k})"
        )
    rows, keys = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if (rows, keys) != (seqlen_q, seqlen_k):
        raise InvalidProblemError(
            f"attn_mask is a causal bias for {rows} queries and {keys} keys, and the call has {seqlen_q} and "
            f"{seqlen_k}; make it with torch.nn.attention.bias.causal_lower_right({seqlen_q}, {seqlen_k}), or pass "
            "causal=True"
        )
    return rows == keys or bool(attn_mask.variant.name == "UPPER_LEFT")
