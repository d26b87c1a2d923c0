"""How attention of DTensors is sharded: along the batch or the heads, each shard by itself, and else not at all.

DTensor is imported by who has one; the operators are registered with it then.
"""

import sys
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.call import BSHD, NO_EXTRAS, PACKED, Call, Extras, Needed
from fa_autotune.ops.torch_private import register_sharding

_compiler: Any = torch.compiler  # its functions lack types
_NUM_CALL = len(Call._fields)
_BATCH, _HEADS, _NOTHING = "batch", "heads", "nothing"  # what is shared out along one dimension of a mesh


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def prepared(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Extras:
    """A call's extras as its operator takes them beside DTensors: one that is none is the same on every device.

    cu_seqlens are made whole at once, for both directions and for who reads lengths.
    UnsupportedError where some are DTensors and q, k or v is not, and for dropout.
    """
    sharded: list[Any] = [tensor for tensor in (q, k, v) if is_sharded(tensor)]
    if not sharded:
        names = [name for name, tensor in extras._asdict().items() if is_sharded(tensor)]
        if names:
            raise UnsupportedError(
                f"q, k and v are no DTensors and {' and '.join(names)} beside them is one; pass its full_tensor(), or "
                "make q, k and v DTensors of its mesh"
            )
        return extras
    if len(sharded) < 3:
        raise UnsupportedError(
            "some of q, k and v are DTensors and some are not; make all of them DTensors of one mesh, or call "
            "attention of their to_local()"
        )
    if extras.dropout_seed is not None:
        refuse_dropout(q)
    registered()
    if extras is NO_EXTRAS:
        return extras
    of_tensors: Any = sys.modules["torch.distributed.tensor"]
    first, *_ = sharded
    mesh, whole = first.device_mesh, of_tensors.Replicate()

    def as_sharded(one: Any, *, is_whole: bool) -> Any:
        if one is None:
            return None
        if not is_sharded(one):
            return of_tensors.DTensor.from_local(one, mesh, [whole] * mesh.ndim, run_check=False)
        return one.redistribute(placements=[whole] * one.device_mesh.ndim) if is_whole else one

    return Extras(*(as_sharded(one, is_whole=name.startswith("cu_seqlens")) for name, one in extras._asdict().items()))


def refuse_dropout(tensor: Tensor) -> None:
    """UnsupportedError for a DTensor."""
    if is_sharded(tensor):
        raise UnsupportedError(
            "attention of DTensors is not served with dropout_p: all shards would drop alike what a batch drops "
            "apart; pass dropout_p=0.0, or call attention of their to_local()"
        )


def check_gradients(q: Tensor, d_out: Tensor | None, d_lse: Tensor | None) -> None:
    """UnsupportedError where a gradient is a DTensor and q is not, or the other way round."""
    for name, gradient in (("out", d_out), ("lse", d_lse)):
        if gradient is not None and is_sharded(gradient) != is_sharded(q):
            if is_sharded(q):
                what, way = f"{name} is a DTensor and its gradient is not", "make it one, by distribute_tensor"
            else:
                what, way = f"the gradient of {name} is a DTensor and {name} is not", "pass its full_tensor()"
            raise UnsupportedError(f"{what}; {way}")


@cache
def _registered() -> bool:
    ops = torch.ops.fa_autotune
    forward = register_sharding(ops.forward.default, _forward_shardings, _is_even_forward, first_static=3)
    backward = register_sharding(ops.backward.default, _backward_shardings, _is_even_backward, first_static=7)
    return forward and backward


def registered() -> bool:
    """Have DTensor know, once, how the operators' tensors may be sharded; False without DTensor."""
    return "torch.distributed.tensor" in sys.modules and _registered()


_compiler.assume_constant_result(registered)  # recording a graph calls it, too


class _Placements:
    """Where the tensors of a call lie, if its batch, or its heads, or nothing is shared out."""

    def __init__(self, shared: str, layout: int, k: Any) -> None:
        self._of: Any = sys.modules["torch.distributed.tensor"]
        self._shared = shared
        self._is_packed = layout == PACKED
        self._heads_axis = heads_axis(layout)
        # One kv head of all query heads is on every device, which has a part of its gradient.
        self._keys_are_whole = shared == _HEADS and k.shape[self._heads_axis] == 1

    def _at(self, batch_axis: int, heads_axis: int) -> Any:
        if self._shared == _NOTHING:
            return self._of.Replicate()
        return self._of.Shard(batch_axis if self._shared == _BATCH else heads_axis)

    def rows(self) -> Any:
        """Of q, out and their gradients."""
        return self._at(0, self._heads_axis)

    def keys(self) -> Any:
        """Of k and v."""
        return self._of.Replicate() if self._keys_are_whole else self.rows()

    def key_gradients(self) -> Any:
        """Of k's and v's gradients."""
        return self._of.Partial() if self._keys_are_whole else self.rows()

    def lse(self) -> Any:
        """Of lse and its gradient."""
        return self._at(0, 0 if self._is_packed else 1)

    def extras(self, given: Extras) -> list[Any]:
        """Of each, None for none."""
        whole = self._of.Replicate()
        places = Extras(
            alibi_slopes=self._at(0, 1),
            sinks=self._at(0, 0 if self._is_packed else 1),
            attn_mask=whole if given.attn_mask is None or self._is_broadcast(given.attn_mask) else self._at(0, 1),
            dropout_seed=whole,
            cu_seqlens_q=whole,
            cu_seqlens_k=whole,
        )
        return [None if one is None else place for one, place in zip(given, places, strict=True)]

    def mask_gradient(self, mask: Any) -> Any:
        """Of an attn_mask's, which is summed where the mask is broadcast."""
        return self._of.Partial() if self._is_broadcast(mask) else self._at(0, 1)

    def _is_broadcast(self, mask: Any) -> bool:
        return self._shared != _NOTHING and mask.shape[0 if self._shared == _BATCH else 1] == 1


def heads_axis(layout: int) -> int:
    """Where heads are in q, k, v and out."""
    return 2 if layout == BSHD else 1


def _ways(layout: int, extras: Extras) -> list[str]:
    if extras.dropout_seed is not None:
        return [_NOTHING]
    return [_NOTHING, _HEADS] if layout == PACKED else [_NOTHING, _BATCH, _HEADS]


def _given(arguments: tuple[Any, ...]) -> tuple[int, Extras]:
    """The layout and the extras of an operator's arguments after its first tensors."""
    return arguments[Call._fields.index("layout")], Extras(*arguments[_NUM_CALL:][: len(Extras._fields)])


def _beside(places: list[Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Placements of an operator's arguments after its first tensors, as many as there are."""
    return [*(None,) * _NUM_CALL, *places, None][: len(arguments)]


def _forward_shardings(q: Any, k: Any, v: Any, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    layout, extras = _given(arguments)
    found = []
    for shared in _ways(layout, extras):
        at = _Placements(shared, layout, k)
        tensors = [at.rows(), at.keys(), at.keys()]
        found.append(([at.rows(), at.lse()], [*tensors, *_beside(at.extras(extras), arguments)]))
    return found


def _backward_shardings(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, needed: Any, *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    (layout, extras), wanted = _given(arguments), Needed(*needed)
    found = []
    for shared in _ways(layout, extras):
        at = _Placements(shared, layout, k)
        of_extras = Extras(*at.extras(extras))
        none = _Placements(_NOTHING, layout, k).rows()  # of the empty tensor that stands for what nobody needs
        results = [
            at.rows() if wanted.q else none,
            at.key_gradients() if wanted.k else none,
            at.key_gradients() if wanted.v else none,
            of_extras.sinks if wanted.sinks and extras.sinks is not None else none,
            at.mask_gradient(extras.attn_mask) if wanted.attn_mask and extras.attn_mask is not None else none,
        ]
        tensors = [
            None if d_out is None else at.rows(),
            None if d_lse is None else at.lse(),
            *(at.rows(), at.keys(), at.keys(), at.rows(), at.lse(), None),
        ]
        found.append((results, [*tensors, *_beside(list(of_extras), arguments)]))
    return found


def _is_even_forward(specs: list[Any], q: Any, k: Any, v: Any, *arguments: Any) -> bool:
    of_q, of_k, *_ = specs
    return _is_even(of_q, of_k, arguments)


def _is_even_backward(
    specs: list[Any], d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, needed: Any, *arguments: Any
) -> bool:
    given = (d_out is not None) + (d_lse is not None)
    of_q, of_k, *_ = specs[given:]
    return _is_even(of_q, of_k, arguments)


def _is_even(q: Any, k: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether every device has as many heads, so that each has the kv heads of its query heads."""
    layout, _ = _given(arguments)
    axis = heads_axis(layout)
    for spec in (q, k):
        parts = prod(
            spec.mesh.size(dimension) for dimension, place in enumerate(spec.placements) if place.is_shard(axis)
        )
        if spec.shape[axis] % parts:
            return False
    return True
