"""Attention of sequences in a row as operators: `fa_autotune::varlen_forward` and `fa_autotune::varlen_backward`.

As those of `op_library`, they are what a graph holds and what modes see; calls in eager mode go past them. Registered
when this module is imported.
"""

from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.library import LIBRARY, needed_of
from fa_autotune.ops.varlen_calls import check_varlen, varlen_plan_of
from fa_autotune.ops.varlen_plan import Gradients, VarlenTensors

_library: Any = torch.library  # its functions lack types
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_CALL = "float? softmax_scale, int window_left, int window_right, float softcap, int backend, float dropout_p"
_EXTRAS = "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? dropout_seed=None"
_NUM_EXTRAS = _EXTRAS.count(",") + 1
_NUM_CALL = _CALL.count(",") + 1
_NUM_INPUTS = 5 + _NUM_CALL + _NUM_EXTRAS
LIBRARY.define(
    f"varlen_forward({_TENSORS}, {_CALL}, {_EXTRAS}) -> (Tensor out, Tensor lse)", tags=torch.Tag.pt2_compliant_tag
)
LIBRARY.define(
    f"varlen_backward(Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[4] needed, {_TENSORS}, {_CALL}, "
    f"{_EXTRAS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_sinks)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _split(arguments: tuple[Any, ...]) -> tuple[VarlenTensors, tuple[Any, ...]]:
    """An operator's tensors, and what its call says."""
    return VarlenTensors(*arguments[:5], *arguments[5 + _NUM_CALL :]), arguments[5 : 5 + _NUM_CALL]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, call = _split(arguments)
    return varlen_plan_of(tensors, call).forward(tensors)


def _backward(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    tensors, call = _split(arguments)
    wanted = (needed[0], needed[1], needed[2], needed[3])
    gradients = varlen_plan_of(tensors, call).backward(tensors, out, lse, d_out, d_lse, wanted)
    # An operator's results are tensors: one of no element stands for a gradient that nobody needs.
    return tuple(out.new_empty(0) if gradient is None else gradient for gradient in gradients)


for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("varlen_forward", _forward, _backend)
    LIBRARY.impl("varlen_backward", _backward, _backend)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, call = _split(arguments)
    check_varlen(tensors, call[-1])
    q, v = tensors.q, tensors.v
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_backward(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    tensors, _ = _split(arguments)
    gradients = [
        tensor.new_empty(tensor.shape) if wanted else tensor.new_empty(0)
        for tensor, wanted in zip(tensors[:3], needed[:3], strict=True)
    ]
    has_sinks = tensors.sinks is not None and needed[3]
    return *gradients, out.new_empty(lse.shape[:1] if has_sinks else (0,), dtype=torch.float32 if has_sinks else None)


_library.register_fake("fa_autotune::varlen_forward", _fake_forward, lib=LIBRARY)
_library.register_fake("fa_autotune::varlen_backward", _fake_backward, lib=LIBRARY)


def varlen_op(tensors: VarlenTensors, call: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """`varlen_calls.varlen_plan_of(...).forward`, through the dispatcher."""
    out, lse = torch.ops.fa_autotune.varlen_forward(*tensors[:5], *call, *tensors[5:])
    return out, lse


def varlen_gradients_op(
    tensors: VarlenTensors,
    call: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    needed: Any,
) -> Gradients:
    """A plan's `backward`, through the dispatcher."""
    found = torch.ops.fa_autotune.varlen_backward(
        d_out, d_lse, out, lse, list(needed), *tensors[:5], *call, *tensors[5:]
    )
    dq, dk, dv, d_sinks = (gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True))
    return dq, dk, dv, d_sinks


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, call = _split(inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)
    ctx.call = call


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    if d_out is None and d_lse is None:
        return (None,) * _NUM_INPUTS
    *tensors, out, lse = ctx.saved_tensors
    needed = needed_of(ctx.needs_input_grad, 5 + _NUM_CALL)[:4]  # there is no mask
    dq, dk, dv, d_sinks = varlen_gradients_op(VarlenTensors(*tensors), ctx.call, out, lse, d_out, d_lse, needed)
    return dq, dk, dv, *(None,) * (_NUM_CALL + 3), d_sinks, None


def _refuse_to_differentiate_twice(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedError(
        "attention_varlen has no second derivative: a gradient of its gradients was asked for; use "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), sequence by sequence"
    )


_library.register_autograd("fa_autotune::varlen_forward", _differentiate, setup_context=_save, lib=LIBRARY)
_library.register_autograd("fa_autotune::varlen_backward", _refuse_to_differentiate_twice, lib=LIBRARY)
