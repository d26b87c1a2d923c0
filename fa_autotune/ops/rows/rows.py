"""What a kind of rows is: all that calls on tensors of a fixed length and on packed sequences do differently."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fa_autotune.kernels.fast_launch import Counts
from fa_autotune.ops.call import Call, Extras, Gradients, Needed, Saved
from fa_autotune.ops.memory import Geometry
from fa_autotune.problem.family import AttentionFamily
from fa_autotune.problem.problem import AttentionShape

Bounds = tuple[int | None, int | None]  # (left diagonal, diagonal), None where a side hides no key


class Results(NamedTuple):
    """Where a forward's results lie."""

    out_size: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_size: tuple[int, ...]
    lse_strides: tuple[int, ...]


class Workspaces(NamedTuple):
    """What the kernels of a fused backward hand to each other; see `space.workspace`."""

    statistics: Geometry
    turns: Geometry
    dq_acc: Geometry


class Rows(Protocol):
    """Where rows and keys lie, and what follows from it."""

    stack_axis: int  # along which q, k and v, or k and v, are stacked in one tensor
    is_packed: bool

    def key(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Any, ...]:
        """Calls with equal keys share a plan, but for the numbers of `call`. Raises as `check` for what has no key."""
        ...

    def check_kinds(self, q: Any, k: Any, v: Any, extras: Extras) -> None:
        """What must hold before dimensions and strides can be read; InvalidProblemError."""
        ...

    def check(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> None:
        """All rules of a call's tensors; InvalidProblemError, UnsupportedError."""
        ...

    def kinds(self, extras: Extras) -> tuple[Any, ...]:
        """What the extras of a call are; those that were saved must come back so."""
        ...

    def is_empty(self, q: Tensor, k: Tensor, extras: Extras) -> bool:
        """Whether there is nothing to compute."""
        ...

    def view(self, tensor: Tensor) -> Tensor:
        """A call's tensor as kernels take it: (batch, heads, seqlen, head_dim)."""
        ...

    def row_numbers(self, tensor: Tensor) -> Tensor:
        """lse or delta, (batch, num_q_heads, seqlen_q), as kernels take it."""
        ...

    def extra(self, name: str, tensor: Tensor) -> Tensor:
        """One of a call's extras as kernels take it."""
        ...

    def counts(self, q: Tensor, k: Tensor, extras: Extras) -> Counts | None:
        """What a launch must be told of the tensors, where it changes from call to call of one plan."""
        ...

    def results(self, q: Tensor, v: Tensor) -> Results:
        """Where out and lse lie."""
        ...

    def gradient(self, tensor: Tensor) -> Geometry:
        """Where the gradient of q, k or v lies."""
        ...

    def bounds(self, call: Call, q: Tensor, k: Tensor) -> Bounds:
        """The diagonals between which keys are seen."""
        ...

    def shape(self, call: Call, bounds: Bounds, q: Tensor, k: Tensor, extras: Extras) -> AttentionShape:
        """The numbers by which a kernel is chosen."""
        ...

    def saved_sizes(self, family: AttentionFamily, shape: AttentionShape, saved: Saved) -> tuple[tuple[int, ...], ...]:
        """What the sizes of q, k, v, out and lse were when they were saved."""
        ...

    def workspaces(self, family: AttentionFamily, shape: AttentionShape, counts: Counts | None) -> Workspaces:
        """Where a fused backward's workspaces lie."""
        ...

    def delta(self, statistics: Tensor, saved: Saved) -> Tensor:
        """delta of a fused backward's statistics, as lse lies; a copy where rows are padded."""
        ...

    def subtract(self, statistics: Tensor, d_lse: Tensor, saved: Saved) -> None:
        """Take the gradient of lse off the delta of a fused backward's statistics."""
        ...

    def lse_without_keys(self, lse: Tensor, extras: Extras) -> Tensor:
        """Fill lse as where no row sees a key."""
        ...

    def probabilities(self, q: Tensor, k: Tensor, extras: Extras, call: Call, maxima: tuple[Any, Any]) -> Tensor:
        """Those of a call, negative where dropout hides them, (batch, num_q_heads, rows, keys) in plain torch; `maxima`
        are the rows and keys of packed sequences that are asked for."""
        ...

    def reference_forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) in plain torch, as kernels take them."""
        ...

    def reference_backward(
        self, saved: Saved, call: Call, d_out: Tensor, d_lse: Tensor | None, needed: Needed
    ) -> Gradients:
        """Exact gradients in plain torch: of q, k and v as kernels take them, of sinks and mask as they were given."""
        ...
