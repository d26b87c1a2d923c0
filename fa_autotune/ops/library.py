"""Attention as operators of torch's dispatcher: `fa_autotune::forward` and `fa_autotune::backward`.

They are what a graph holds (torch.compile, export, make_fx) and what modes and transforms see; calls in eager mode go
past them. Registered when this module is imported.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.arguments import MASK, NUM_EXTRAS, SINKS, Extras, check_kinds, check_tensors, extra_of
from fa_autotune.ops.kernel_plan import GRADIENTS, CallArguments, Gradients, Needed
from fa_autotune.ops.memory import Quad, dense, heads_first, lse_size, out_size, quad
from fa_autotune.ops.plans import plan_of

_library: Any = torch.library  # its functions lack types
_torch_autograd: Any = getattr(torch._library, "autograd", None)
_unpack_dual: Any = forward_ad.unpack_dual
LIBRARY = _library.Library("fa_autotune", "DEF")

_CALL = "float? softmax_scale, int mask, int layout, int backend, int window_left=-1, int window_right=-1, "
_CALL += "float softcap=0.0, float dropout_p=0.0"
_EXTRAS = "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, Tensor? dropout_seed=None"
_NUM_CALL = _CALL.count(",") + 1
_NUM_INPUTS = 3 + _NUM_CALL + NUM_EXTRAS  # q, k, v, the call, and its extras
LIBRARY.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_CALL}, {_EXTRAS}) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "backward(Tensor? d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[] needed, "
    f"{_CALL}, {_EXTRAS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_sinks, Tensor d_mask)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _split(arguments: tuple[Any, ...]) -> tuple[CallArguments, Extras]:
    """An operator's arguments after its tensors and `needed`: what the call says, and its extras."""
    extras = (*arguments[_NUM_CALL:], *(None,) * NUM_EXTRAS)[:NUM_EXTRAS]
    return CallArguments(*arguments[:_NUM_CALL]), extras if any(tensor is not None for tensor in extras) else ()


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, extras = _split(arguments)
    return plan_of(q, k, v, call, extras).forward(q, k, v, *extras)


def _backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, extras = _split(arguments)
    plan = plan_of(q, k, v, call, extras)
    gradients = plan.backward((q, k, v, out, lse, *extras), d_out, d_lse, _whole(needed))
    # An operator's results are tensors: one of no element stands for a gradient that nobody needs.
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _whole(needed: Sequence[bool]) -> Needed:
    """What an operator is told of; gradients that are not mentioned are not needed."""
    dq, dk, dv, d_sinks, d_mask = (*needed, *(False,) * len(GRADIENTS))[: len(GRADIENTS)]
    return dq, dk, dv, d_sinks, d_mask


for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("forward", _forward, _backend)
    LIBRARY.impl("backward", _backward, _backend)


def _empty(size: Quad, like: Tensor, layout: int) -> Tensor:
    return like.new_empty_strided(*dense(size, layout))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    layout = _split(arguments)[0].layout
    check_kinds(q, k, v)
    check_tensors(*(heads_first(tensor, layout) for tensor in (q, k, v)))
    return _empty(out_size(q, v), q, layout), q.new_empty(lse_size(q, layout), dtype=torch.float32)


def _fake_backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needed: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, extras = _split(arguments)
    gradients = [
        _empty(quad(tensor), tensor, call.layout) if wanted else q.new_empty(0)
        for tensor, wanted in zip((q, k, v), needed[:3], strict=True)
    ]
    *_, wants_sinks, wants_mask = _whole(needed)
    for place, wanted in ((SINKS, wants_sinks), (MASK, wants_mask)):
        extra = extra_of(extras, place)
        gradients.append(q.new_empty(0) if extra is None or not wanted else extra.new_empty(extra.shape))
    return tuple(gradients)


_library.register_fake("fa_autotune::forward", _fake_forward, lib=LIBRARY)
_library.register_fake("fa_autotune::backward", _fake_backward, lib=LIBRARY)


def attention_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`plans.plan_of(...).forward`, through the dispatcher."""
    out, lse = torch.ops.fa_autotune.forward(q, k, v, *arguments)
    return out, lse


def gradients_op(
    saved: tuple[Any, ...], d_out: Tensor | None, d_lse: Tensor | None, arguments: tuple[Any, ...], needed: Any
) -> Gradients:
    """A plan's `backward`, through the dispatcher."""
    found = torch.ops.fa_autotune.backward(d_out, d_lse, *saved[:5], list(needed), *arguments, *saved[5:])
    dq, dk, dv, d_sinks, d_mask = (gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True))
    return dq, dk, dv, d_sinks, d_mask


def needed_of(needs_input_grad: tuple[bool, ...], first_extra: int) -> Needed:
    """Which gradients an autograd function is asked for; its extras are its inputs from `first_extra` on."""
    dq, dk, dv, *_ = needs_input_grad
    _, sinks, mask, _ = (*needs_input_grad[first_extra:], *(False,) * NUM_EXTRAS)[:NUM_EXTRAS]
    return dq, dk, dv, sinks, mask


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    call, extras = _split(tuple(arguments))
    ctx.save_for_backward(q, k, v, *output, *extras)
    ctx.set_materialize_grads(False)
    ctx.call = tuple(call)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    if d_out is None and d_lse is None:
        return (None,) * _NUM_INPUTS
    needed = needed_of(ctx.needs_input_grad, 3 + _NUM_CALL)
    return _for_inputs(gradients_op(ctx.saved_tensors, d_out, d_lse, ctx.call, needed), needed)


def _for_inputs(gradients: Iterable[Tensor | None], needed: Needed) -> tuple[Tensor | None, ...]:
    """What autograd is given for each input of `forward`: those of q, k, v, sinks and mask that are needed."""
    found = (gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True))
    dq, dk, dv, d_sinks, d_mask = found
    return dq, dk, dv, *(None,) * (_NUM_CALL + 1), d_sinks, d_mask, None


def _refuse_to_differentiate_twice(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedError(
        "attention has no second derivative: a gradient of its gradients was asked for; use "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) there"
    )


def _register_forward_autograd() -> None:
    """As `torch.library.register_autograd` does, with a check: what it registers lets tangents get lost in silence."""
    differentiated = _torch_autograd.make_autograd_impl(
        torch.ops.fa_autotune.forward.default, _torch_autograd.Info(_differentiate, _save)
    )

    def forward(keys: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            check_tangents(q, k, v, *(tensor for tensor in arguments if isinstance(tensor, Tensor)))
        return differentiated(keys, q, k, v, *arguments)

    LIBRARY.impl("forward", forward, "Autograd", with_keyset=True)


if hasattr(_torch_autograd, "make_autograd_impl") and hasattr(_torch_autograd, "Info"):
    _register_forward_autograd()
else:
    _library.register_autograd("fa_autotune::forward", _differentiate, setup_context=_save, lib=LIBRARY)
_library.register_autograd("fa_autotune::backward", _refuse_to_differentiate_twice, lib=LIBRARY)


# --- one more batch axis, for vmap -----------------------------------------------------------------------------------


def fold_batch(op: Any, batch_size: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """What vmap asks of an operator: its results with the mapped axis in front, and where that is in each.

    The mapped axis becomes part of the batch; a tensor without one is expanded.
    """
    if any(isinstance(argument, Tensor) and argument.dtype is torch.int64 for argument in arguments):
        raise UnsupportedError(
            "attention with dropout_p has no rule for vmap: one seed tells what every example drops; map over examples "
            "with dropout_p=0.0, or make the mapped axis part of the batch"
        )
    tensors = [(tensor, dim) for tensor, dim in zip(arguments, in_dims, strict=True) if isinstance(tensor, Tensor)]
    batch = max(tensor.shape[0 if dim is None else int(dim == 0)] for tensor, dim in tensors)

    def folded(tensor: Any, dim: int | None) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        moved = tensor.unsqueeze(0).expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if moved.shape[1] == 1 < batch:  # a mask that a batch shares
            moved = moved.expand(batch_size, batch, *moved.shape[2:])
        return moved.flatten(0, 1)

    results = op(*(folded(argument, dim) for argument, dim in zip(arguments, in_dims, strict=True)))
    # A result of one axis stands for a gradient that nobody needs.
    dims = tuple(None if result.ndim == 1 else 0 for result in results)
    unfolded = zip(results, dims, strict=True)
    return tuple(result if dim is None else result.unflatten(0, (batch_size, -1)) for result, dim in unfolded), dims


def _vmap_of(op: Any) -> Any:
    return lambda info, in_dims, *arguments: fold_batch(op, info.batch_size, in_dims, arguments)


for _op in (torch.ops.fa_autotune.forward, torch.ops.fa_autotune.backward):
    _library.register_vmap(_op.default, _vmap_of(_op.default), lib=LIBRARY)


# --- torch.func: what an operator's autograd can't do there -----------------------------------------------------------


class TransformableAttention(torch.autograd.Function):
    """The forward operator under torch.func's transforms: grad, vjp and vmap in any nesting, but one derivative."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
        return torch.ops.fa_autotune.forward(q, k, v, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        if d_out is None and d_lse is None:
            return (None,) * _NUM_INPUTS
        needed = needed_of(ctx.needs_input_grad, 3 + _NUM_CALL)
        apply: Any = _TransformableGradients.apply
        saved = ctx.saved_tensors
        found = apply(d_out, d_lse, *saved[:5], list(needed), *ctx.call, *saved[5:])
        return _for_inputs(found, needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return fold_batch(TransformableAttention.apply, info.batch_size, in_dims, arguments)


class _TransformableGradients(torch.autograd.Function):
    """The backward operator under torch.func's transforms."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.fa_autotune.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        _refuse_to_differentiate_twice(ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return fold_batch(_TransformableGradients.apply, info.batch_size, in_dims, arguments)


def check_tangents(*tensors: Tensor) -> None:
    """UnsupportedError if a tensor has a tangent."""
    if any(_unpack_dual(tensor).tangent is not None for tensor in tensors):
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """A tangent would be lost in silence: kernels know nothing of it."""
    raise UnsupportedError(
        "attention has no forward-mode derivative (jvp, dual tensors); use reverse mode, or "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )
