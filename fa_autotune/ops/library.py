"""Attention as operators of torch's dispatcher: `fa_autotune::forward` and `fa_autotune::backward`.

They are what a graph holds (torch.compile, export, make_fx) and what modes and transforms see; calls in eager mode go
past them. Registered when this module is imported.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.call import NO_EXTRAS, Call, Extras, Gradients, Needed, Saved
from fa_autotune.ops.flops import register_flops
from fa_autotune.ops.operators import LIBRARY
from fa_autotune.ops.plans import plan_of
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.sharding import check_gradients, is_sharded, prepared
from fa_autotune.ops.tangents import check_tangents, refuse_forward_mode
from fa_autotune.ops.tensor_kinds import ask
from fa_autotune.ops.torch_private import (
    autograd_info,
    has_forward_mode,
    is_transforming,
    make_autograd_impl,
)

_library: Any = torch.library  # its functions lack types
_is_compiling = torch.compiler.is_compiling

# Numbers of a type that a graph may leave open, where `float` would make each a constant.
_CALL = (
    "Scalar? softmax_scale, int mask, int layout, int backend, SymInt window_left=-1, SymInt window_right=-1, "
    "Scalar softcap=0.0, Scalar dropout_p=0.0, bool tf32=False"
)
_EXTRAS = ", ".join(f"Tensor? {name}=None" for name in (*Extras._fields, "numbers"))
_GRADIENTS = ", ".join(f"Tensor d_{name}" for name in Gradients._fields)
_NUM_CALL = len(Call._fields)
_NUM_ARGUMENTS = _NUM_CALL + len(Extras._fields)  # and `numbers`, see `opened`
LIBRARY.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_CALL}, {_EXTRAS}) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "backward(Tensor? d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[] needed, "
    f"{_CALL}, {_EXTRAS}) -> ({_GRADIENTS})",
    tags=torch.Tag.pt2_compliant_tag,
)


def extras_of(tensors: Iterable[Tensor | None]) -> Extras:
    """A call's extras, of its tensors in their order; those at the end may be left out."""
    extras = Extras(*tensors)
    return extras if any(tensor is not None for tensor in extras) else NO_EXTRAS


def needed_of(q: bool, k: bool, v: bool, of_extras: Iterable[bool]) -> Needed:
    """Which gradients an autograd function is asked for."""
    for_extras = dict(zip(Extras._fields, of_extras, strict=False))
    return Needed(q, k, v, for_extras.get("sinks", False), for_extras.get("attn_mask", False))


def _said(arguments: tuple[Any, ...]) -> tuple[Call, Extras]:
    """An operator's arguments after its first tensors: what the call says, and its extras."""
    return Call(*arguments[:_NUM_CALL]), extras_of(arguments[_NUM_CALL:_NUM_ARGUMENTS])


def _numbers_of(arguments: tuple[Any, ...]) -> Tensor | None:
    """What a graph left open: see `opened`. Defaults at the end may be missing."""
    return arguments[_NUM_ARGUMENTS] if len(arguments) > _NUM_ARGUMENTS else None


def _said_with_numbers(arguments: tuple[Any, ...]) -> tuple[Call, Extras]:
    """`_said`, with the numbers that a graph left open."""
    (call, extras), numbers = _said(arguments), _numbers_of(arguments)
    if numbers is None:
        return call, extras
    scale, softcap, dropout_p = numbers.tolist()  # on the host
    scale = None if call.softmax_scale is None else scale
    return call._replace(softmax_scale=scale, softcap=softcap, dropout_p=dropout_p), extras


def opened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments whose numbers, where a graph leaves one open, are a float64 tensor (3,) on the host.

    It holds scale, cap and dropout probability; what stands in their places says which of them there are. A graph that
    holds floats themselves is compiled anew for each value.
    """
    call = Call(*arguments[:_NUM_CALL])
    numbers = call.softmax_scale, call.softcap, call.dropout_p
    if not any(isinstance(number, torch.SymFloat) for number in numbers):
        return arguments
    unit = torch.ones((), dtype=torch.float64)
    held = torch.stack([unit * (0.0 if number is None else number) for number in numbers])
    call = call._replace(
        softmax_scale=None if call.softmax_scale is None else 1.0,
        softcap=1.0 if call.softcap != 0.0 else 0.0,
        dropout_p=0.5 if call.dropout_p != 0.0 else 0.0,
    )
    extras = (*arguments[_NUM_CALL:], *(None,) * (_NUM_ARGUMENTS - len(arguments)))
    return (*call, *extras[: len(Extras._fields)], held)


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, extras = _said_with_numbers(arguments)
    return plan_of(q, k, v, extras, call).forward(q, k, v, extras)


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
    call, extras = _said_with_numbers(arguments)
    plan = plan_of(q, k, v, extras, call)
    gradients = plan.backward(Saved(q, k, v, out, lse, extras), d_out, d_lse, Needed(*needed))
    if gradients.attn_mask is not None:  # what is written for whole 16 bytes is not what was promised to the compiler
        gradients = gradients._replace(attn_mask=gradients.attn_mask.contiguous())
    # An operator's results are tensors: one of no element stands for a gradient that nobody needs.
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("forward", _forward, _backend)
    LIBRARY.impl("backward", _backward, _backend)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, extras = _said(arguments)
    rows = rows_of(call.layout)
    rows.check(q, k, v, extras, call)
    out_size, out_strides, lse_size, lse_strides = rows.results(q, v)
    return q.new_empty_strided(out_size, out_strides), q.new_empty_strided(lse_size, lse_strides, dtype=torch.float32)


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
    (call, extras), wanted = _said(arguments), Needed(*needed)
    gradient = rows_of(call.layout).gradient
    sinks, mask = extras.sinks, extras.attn_mask
    found = Gradients(
        q=q.new_empty_strided(*gradient(q)) if wanted.q else None,
        k=k.new_empty_strided(*gradient(k)) if wanted.k else None,
        v=v.new_empty_strided(*gradient(v)) if wanted.v else None,
        sinks=sinks.new_empty(sinks.shape) if sinks is not None and wanted.sinks else None,
        attn_mask=mask.new_empty(mask.shape) if mask is not None and wanted.attn_mask else None,
    )
    return tuple(q.new_empty(0) if one is None else one for one in found)


_library.register_fake("fa_autotune::forward", _fake_forward, lib=LIBRARY)
_library.register_fake("fa_autotune::backward", _fake_backward, lib=LIBRARY)
register_flops(torch.ops.fa_autotune.forward, torch.ops.fa_autotune.backward)


def attention_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`plans.plan_of(...).forward`, through the dispatcher; `arguments`: a call's fields, then its extras."""
    out, lse = torch.ops.fa_autotune.forward(q, k, v, *arguments)
    return out, lse


def gradients_op(saved: Saved, d_out: Tensor | None, d_lse: Tensor | None, call: Call, needed: Needed) -> Gradients:
    """A plan's `backward`, through the dispatcher."""
    op: Any = torch.ops.fa_autotune.backward
    return _gradients_by(lambda *arguments: ask(op, arguments), saved, d_out, d_lse, call, needed)


def _gradients_by(
    op: Any,
    saved: Saved,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    call: Call,
    needed: Needed,
    numbers: Tensor | None = None,
) -> Gradients:
    q, k, v, out, lse, extras = saved
    open_numbers = () if numbers is None else (numbers,)
    found = op(d_out, d_lse, q, k, v, out, lse, list(needed), *call, *extras, *open_numbers)
    return Gradients(*(gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True)))


# --- S_dmask: an operator of its own, so that a graph of it is one for all lengths ------------------------------------

# Calls name the first one; tracing takes it apart, where numbers that a graph leaves open are told.
LIBRARY.define(f"probabilities(Tensor q, Tensor k, {_CALL}, {_EXTRAS}) -> Tensor")
LIBRARY.define(
    f"signed_probabilities(Tensor q, Tensor k, {_CALL}, {_EXTRAS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)


def probabilities_of(
    q: Tensor, k: Tensor, extras: Extras, call: Call, maxima: tuple[Any, Any] = (None, None)
) -> Tensor:
    """A call's signed probabilities, see `Rows.probabilities`; autocast would round their products."""
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        return rows_of(call.layout).probabilities(q, k, extras, call, maxima)


def probabilities_op(q: Tensor, k: Tensor, extras: Extras, call: Call) -> Tensor:
    """`probabilities_of` rows of fixed lengths, through the dispatcher."""
    found: Tensor = torch.ops.fa_autotune.probabilities(q, k, *call, *extras)
    return found


def _probabilities(q: Tensor, k: Tensor, *arguments: Any) -> Tensor:
    op: Any = torch.ops.fa_autotune.signed_probabilities
    given = (one.detach() if isinstance(one, Tensor) else one for one in (q, k, *opened(arguments)))
    found: Tensor = op(*given)
    return found


def _signed_probabilities(q: Tensor, k: Tensor, *arguments: Any) -> Tensor:
    call, extras = _said_with_numbers(arguments)
    return probabilities_of(q, k, extras, call)


def _fake_probabilities(q: Tensor, k: Tensor, *arguments: Any) -> Tensor:
    call, _ = _said(arguments)
    view = rows_of(call.layout).view
    batch_size, heads, seqlen_q, _ = view(q).shape
    return q.new_empty(batch_size, heads, seqlen_q, view(k).shape[2])


LIBRARY.impl("probabilities", _probabilities, "CompositeImplicitAutograd")
for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("signed_probabilities", _signed_probabilities, _backend)
_library.register_fake("fa_autotune::signed_probabilities", _fake_probabilities, lib=LIBRARY)


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    call, extras = _said(tuple(arguments))
    ctx.save_for_backward(q, k, v, *output, *extras, _numbers_of(tuple(arguments)))
    ctx.set_materialize_grads(False)
    ctx.call = call


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    return _differentiate_by(torch.ops.fa_autotune.backward, ctx, d_out, d_lse)


def _differentiate_by(op: Any, ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    """What autograd is given for each input of `forward`."""
    for_q, for_k, for_v, *for_others = ctx.needs_input_grad
    if d_out is None and d_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    q, k, v, out, lse, *extras, numbers = ctx.saved_tensors
    needed = needed_of(for_q, for_k, for_v, for_others[_NUM_CALL:])
    found = _gradients_by(op, Saved(q, k, v, out, lse, extras_of(extras)), d_out, d_lse, ctx.call, needed, numbers)
    of_others = (*(None,) * _NUM_CALL, *found.of_extras(), None)
    return found.q, found.k, found.v, *of_others[: len(for_others)]


def _refuse_to_differentiate_twice(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedError(
        "attention has no second derivative: a gradient of its gradients was asked for; use "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )


def _register_forward_autograd() -> None:
    """As `torch.library.register_autograd` does, with a check: what it registers lets tangents get lost in silence."""
    differentiated = make_autograd_impl(torch.ops.fa_autotune.forward.default, autograd_info(_differentiate, _save))

    def forward(keys: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
        if has_forward_mode():
            check_tangents(q, k, v, *arguments)
        if is_transforming() and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            if _is_compiling():
                what, way = "inside torch.compile", "use torch.autograd, or transform what is not compiled"
            else:
                what = "where torch.func.functionalize meets it"
                way = (
                    "leave functionalize out, since attention changes none of its tensors, or trace with torch.compile"
                )
            raise UnsupportedError(f"attention has no gradient by torch.func.grad (vjp, jacrev) {what}; {way}")
        call, extras = _said(arguments)
        as_sharded = prepared(q, k, v, extras)
        if is_sharded(q):
            return differentiated(keys, q, k, v, *call, *as_sharded, *arguments[_NUM_ARGUMENTS:])
        return differentiated(keys, q, k, v, *opened(arguments))

    LIBRARY.impl("forward", forward, "Autograd", with_keyset=True)


def _register_backward_autograd() -> None:
    """As `_register_forward_autograd`; a second derivative is refused."""
    info = autograd_info(_refuse_to_differentiate_twice, None)
    refusing = make_autograd_impl(torch.ops.fa_autotune.backward.default, info)

    def backward(keys: Any, *arguments: Any) -> Any:
        if has_forward_mode():
            check_tangents(*arguments)
        d_out, d_lse, q, *_ = arguments
        check_gradients(q, d_out, d_lse)
        return refusing(keys, *arguments)

    LIBRARY.impl("backward", backward, "Autograd", with_keyset=True)


if make_autograd_impl is not None and autograd_info is not None:
    _register_forward_autograd()
    _register_backward_autograd()
else:
    _library.register_autograd("fa_autotune::forward", _differentiate, setup_context=_save, lib=LIBRARY)
    _library.register_autograd("fa_autotune::backward", _refuse_to_differentiate_twice, lib=LIBRARY)


# --- one more batch axis, for vmap -----------------------------------------------------------------------------------


def fold_batch(op: Any, batch_size: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """What vmap asks of an operator: its results with the mapped axis in front, and where that is in each.

    The mapped axis becomes part of the batch; a tensor without one is expanded.
    """
    tensors = [(tensor, dim) for tensor, dim in zip(arguments, in_dims, strict=True) if isinstance(tensor, Tensor)]
    if any(tensor.dtype is torch.int64 for tensor, _ in tensors):
        raise UnsupportedError(
            "attention with dropout_p has no rule for vmap: one seed tells what every example drops; map over examples "
            "with dropout_p=0.0, or make the mapped axis part of the batch"
        )
    if any(tensor.dtype is torch.int32 for tensor, _ in tensors):
        raise UnsupportedError("attention_varlen has no rule for vmap; use `attention` on a padded batch")
    if batch_size == 0:  # no example to fold: one that is made up gives the results' kinds and shapes
        return _results_of_nothing(op, in_dims, arguments)
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


def _results_of_nothing(op: Any, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """`fold_batch` of no example."""
    results = op(
        *(
            argument.new_zeros([size for axis, size in enumerate(argument.shape) if axis != dim])
            if isinstance(argument, Tensor) and dim is not None
            else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        )
    )
    dims = tuple(None if result.ndim == 1 else 0 for result in results)
    return tuple(
        result if dim is None else result.new_empty((0, *result.shape))
        for result, dim in zip(results, dims, strict=True)
    ), dims


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
        return _differentiate_by(_TransformableGradients.apply, ctx, d_out, d_lse)

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
