"""What a call of attention is: what it says, its tensors by name, and the gradients that it may be asked for.

Operators, autograd and plans share these names and their order: a new tensor of a call is one more field of `Extras`.
"""

from typing import NamedTuple

from torch import Tensor

# Order of a call's axes, and how its results lie in memory: how rows are found. Plain integers, as all below: they are
# arguments of an operator. PACKED: sequences of any lengths, one after another: (total, heads, head_dim).
BHSD, BSHD, BHSD_STORED_AS_BSHD, PACKED = range(4)

# Which keys a query row sees: all, those up to a diagonal that ends in one of two corners (causal), or those of a
# bottom-right window, whose sizes are arguments of their own.
FULL, BOTTOM_RIGHT, TOP_LEFT, WINDOW = range(4)
OPEN = -1  # size of a window's side that bounds nothing

# What runs a call: plain torch, generated kernels, or those with a backward that may add up dq in any order.
REFERENCE, GENERATED, UNORDERED = range(3)


class Call(NamedTuple):
    """What a call says beside its tensors. The window's sizes count where the mask is WINDOW.

    tf32: the operands of float32 products may be cut to tf32.
    """

    softmax_scale: float | None
    mask: int
    layout: int
    backend: int
    window_left: int = OPEN
    window_right: int = OPEN
    softcap: float = 0.0
    dropout_p: float = 0.0
    tf32: bool = False

    @property
    def window(self) -> tuple[int, int]:
        """Keys that a row sees before and after its own, OPEN for all."""
        if self.mask == WINDOW:
            return self.window_left, self.window_right
        return OPEN, OPEN if self.mask == FULL else 0

    def scale_for(self, q: Tensor) -> float:
        """What scores are multiplied by: 1/sqrt(head_dim) unless the call says it."""
        return float(q.shape[-1] ** -0.5) if self.softmax_scale is None else self.softmax_scale


class Extras(NamedTuple):
    """A call's tensors beside q, k and v, in the order in which kernels take them; None for what a call has not.

    alibi_slopes: fp32 (batch, num_q_heads); packed, (sequences, num_q_heads). sinks: fp32 (batch, num_q_heads); packed,
    (num_q_heads,). attn_mask: (batch, num_q_heads, seqlen_q, seqlen_k), or 1 in place of any. dropout_seed: what
    `dropout.draw_seed` gives. cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1), of packed calls alone.
    """

    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def given(self) -> tuple[Tensor, ...]:
        """Those that a call has, which its forward's kernel takes after its results."""
        return tuple(tensor for tensor in self if tensor is not None)


NO_EXTRAS = Extras()  # this very object, where a call has none


class Gradients(NamedTuple):
    """The gradients of a call; None for one that is not needed, or counts as 0."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None

    def of_extras(self) -> Extras:
        """Those of a call's extras, in their places."""
        return Extras(sinks=self.sinks, attn_mask=self.attn_mask)


class Needed(NamedTuple):
    """Which gradients of a call are needed."""

    q: bool
    k: bool
    v: bool
    sinks: bool = False
    attn_mask: bool = False


class Saved(NamedTuple):
    """What a backward has of its forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    extras: Extras = NO_EXTRAS


class Into(NamedTuple):
    """Where gradients are to be written: those of k and v, and that of q unless it is None (to be allocated)."""

    q: Tensor | None
    k: Tensor
    v: Tensor
