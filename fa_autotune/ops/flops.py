"""How many floating-point operations attention counts for, by PyTorch's own rules: see `torch.utils.flop_counter`.

As those of its own attention, they are of all scores, whatever a mask, a window or dropout hides, and a backward counts
for all of its five products. Packed sequences count one by one.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fa_autotune.ops.call import PACKED, Call, Extras
from fa_autotune.ops.rows.kinds import rows_of
from fa_autotune.ops.sharding import is_sharded
from fa_autotune.ops.tensor_kinds import PLAIN

_NUM_CALL = len(Call._fields)


def register_flops(forward: Any, backward: Any) -> None:
    """Have torch's FlopCounterMode know the operators."""
    for op, formula in ((forward, forward_flops), (backward, backward_flops)):
        flop_registry.pop(op, None)
        register_flop_formula(op, get_raw=True)(formula)


def forward_flops(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, mask: int, layout: int, *others: Any, **named: Any
) -> int:
    """Of the scores and of out."""
    return 2 * _num_scores(q, k, layout, others, named) * (q.shape[-1] + v.shape[-1])


def backward_flops(
    d_out: Any, d_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, needed: Any, softmax_scale: Any,
    mask: int, layout: int, *others: Any, **named: Any,
) -> int:  # fmt: skip
    """Of the scores again, and of the gradients of weights, v, q and k."""
    return 2 * _num_scores(q, k, layout, others, named) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _num_scores(q: Tensor, k: Tensor, layout: int, others: tuple[Any, ...], named: dict[str, Any]) -> int:
    rows = rows_of(layout)
    batch_size, heads, seqlen_q, _ = rows.view(q).shape
    seqlen_k = rows.view(k).shape[2]
    if layout != PACKED:
        return int(batch_size * heads * seqlen_q * seqlen_k)
    tensors = others[_NUM_CALL - 3 :][: len(Extras._fields)]  # the call's first three have names of their own
    extras = Extras(*tensors)._replace(**{name: one for name, one in named.items() if name in Extras._fields})
    lengths_q, lengths_k = _lengths(extras.cu_seqlens_q, seqlen_q), _lengths(extras.cu_seqlens_k, seqlen_k)
    return int(heads * sum(rows * keys for rows, keys in zip(lengths_q, lengths_k, strict=True)))


def _lengths(cu_seqlens: Any, total: int) -> Iterator[float]:
    """Each sequence's; where none can be read, equal ones that make up the total."""
    if is_sharded(cu_seqlens) and all(place.is_replicate() for place in cu_seqlens.placements):  # as `prepared` has it
        cu_seqlens = cu_seqlens.to_local()
    if type(cu_seqlens) in PLAIN and cu_seqlens.device.type != "meta":
        yield from cu_seqlens.diff().tolist()
        return
    count = cu_seqlens.shape[0] - 1
    yield from [total / max(count, 1)] * count
