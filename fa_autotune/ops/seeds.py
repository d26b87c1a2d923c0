"""The seed of dropout that a call draws: at once, or where a graph is recorded, by an operator.

A compiler may compute a forward's values again in the backward. A seed that is drawn again is another, so a graph is
told to keep this one; where it is to keep nothing at all, dropout is refused.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from fa_autotune.errors import UnsupportedError
from fa_autotune.ops.operators import LIBRARY
from fa_autotune.ops.sharding import refuse_dropout
from fa_autotune.ops.torch_private import (
    is_in_dispatch_mode,
    is_transforming,
    kept_for_backward,
    least_memory_budget,
    may_have_backward,
)
from fa_autotune.reference.dropout import draw_seed

_library: Any = torch.library  # its functions lack types
_is_compiling = torch.compiler.is_compiling

# Calls name the first one; tracing takes it apart, which is when a graph can be told to keep what the other draws.
LIBRARY.define("seed(Tensor like) -> Tensor")
LIBRARY.define("drawn_seed(Tensor like) -> Tensor", tags=torch.Tag.nondeterministic_seeded)


def seed_for(q: Tensor) -> Tensor:
    """A new seed for a call on q's device, int64 (1,)."""
    if _is_compiling() or is_in_dispatch_mode():
        seed: Tensor = torch.ops.fa_autotune.seed(q)
        return seed
    try:
        return draw_seed(q.device)
    except RuntimeError:
        if is_transforming():  # vmap lets nothing be drawn, unless it is told how
            _no_seed_for_many()
        raise


def _seed(like: Tensor) -> Tensor:
    refuse_dropout(like)
    if torch.is_grad_enabled() and least_memory_budget() <= 0.0 and may_have_backward():
        raise UnsupportedError(
            "attention with dropout_p can't be differentiated where torch.compile keeps nothing of the forward "
            "(activation_memory_budget=0): its seed would be drawn again; give it a budget above 0, or use "
            "torch.utils.checkpoint"
        )
    with kept_for_backward():
        seed: Tensor = torch.ops.fa_autotune.drawn_seed(like.detach())
        return seed


def _drawn_seed(like: Tensor) -> Tensor:
    return draw_seed(like.device)


def _no_seed_for_many(*arguments: Any) -> NoReturn:
    raise UnsupportedError(
        "attention with dropout_p has no rule for vmap: one seed tells what every example drops; map over examples "
        "with dropout_p=0.0, or make the mapped axis part of the batch"
    )


LIBRARY.impl("seed", _seed, "CompositeImplicitAutograd")
for _backend in ("CPU", "CUDA"):
    LIBRARY.impl("drawn_seed", _drawn_seed, _backend)
_library.register_fake("fa_autotune::drawn_seed", lambda like: like.new_empty(1, dtype=torch.int64), lib=LIBRARY)
_library.register_vmap("fa_autotune::drawn_seed", _no_seed_for_many, lib=LIBRARY)
