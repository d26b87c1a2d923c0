"""The kernels of the attention operator, a pass each, and one row for a pass of what its kernel takes, gives and owns.

What the rest of the package asks of a pass is said here: a new one is a word of `Pass` and a row of `_SPECS`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from fa_autotune.errors import InvalidProblemError


class Pass(StrEnum):
    """One kernel of the attention operator: the forward, and those of the two ways to compute the backward.

    Split: BWD_DELTA gives delta = rowsum(do ∘ out), which the others read; BWD_DKDV gives dk and dv, BWD_DQ gives dq.
    Fused: BWD_PREPROCESS gives delta and lse as BWD_FUSED reads them, that gives dk, dv and dq in a form of its own,
    and BWD_POSTPROCESS makes dq of it.
    """

    FWD = "fwd"
    BWD_DELTA = "bwd_delta"
    BWD_DKDV = "bwd_dkdv"
    BWD_DQ = "bwd_dq"
    BWD_PREPROCESS = "bwd_preprocess"
    BWD_FUSED = "bwd_fused"
    BWD_POSTPROCESS = "bwd_postprocess"

    @property
    def spec(self) -> "PassSpec":
        """What its kernel takes, gives and owns."""
        return _SPECS[self]


SPLIT_BACKWARD = (Pass.BWD_DELTA, Pass.BWD_DKDV, Pass.BWD_DQ)
FUSED_BACKWARD = (Pass.BWD_PREPROCESS, Pass.BWD_FUSED, Pass.BWD_POSTPROCESS)
BACKWARD_PASSES = (*SPLIT_BACKWARD, *FUSED_BACKWARD)


class Extent(StrEnum):
    """What a tensor has rows or columns of: query rows (of query heads), keys (of kv heads), or a head dim."""

    QUERIES = "seqlen_q"
    KEYS = "seqlen_k"
    HEAD_DIM = "head_dim"
    HEAD_DIM_V = "head_dim_v"


class Element(StrEnum):
    """What a tensor's numbers are: of the call's own dtype, as q's, or of a fixed one."""

    OF_CALL = "of_call"
    FLOAT32 = "float32"
    INT32 = "int32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that kernels take or give: (batch, heads, rows, columns), or so many numbers in a form of its own.

    `columns`: numbers that go with a row; 1 has no axis, and 0 stands for fewer than one.
    `in_blocks`: its form and size are those of `space.workspace`.
    """

    rows: Extent
    columns: Extent | int
    element: Element = Element.OF_CALL
    in_blocks: bool = False


TENSORS = {
    "q": TensorSpec(rows=Extent.QUERIES, columns=Extent.HEAD_DIM),
    "k": TensorSpec(rows=Extent.KEYS, columns=Extent.HEAD_DIM),
    "v": TensorSpec(rows=Extent.KEYS, columns=Extent.HEAD_DIM_V),
    "out": TensorSpec(rows=Extent.QUERIES, columns=Extent.HEAD_DIM_V),
    "do": TensorSpec(rows=Extent.QUERIES, columns=Extent.HEAD_DIM_V),
    "lse": TensorSpec(rows=Extent.QUERIES, columns=1, element=Element.FLOAT32),
    "delta": TensorSpec(rows=Extent.QUERIES, columns=1, element=Element.FLOAT32),
    "statistics": TensorSpec(rows=Extent.QUERIES, columns=2, element=Element.FLOAT32, in_blocks=True),
    "turns": TensorSpec(rows=Extent.QUERIES, columns=0, element=Element.INT32, in_blocks=True),
    "dk": TensorSpec(rows=Extent.KEYS, columns=Extent.HEAD_DIM),
    "dv": TensorSpec(rows=Extent.KEYS, columns=Extent.HEAD_DIM_V),
    "dq": TensorSpec(rows=Extent.QUERIES, columns=Extent.HEAD_DIM),
    "dq_acc": TensorSpec(rows=Extent.QUERIES, columns=Extent.HEAD_DIM, element=Element.FLOAT32, in_blocks=True),
    "d_mask": TensorSpec(rows=Extent.QUERIES, columns=Extent.KEYS, element=Element.FLOAT32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSpec:
    """What a pass's kernel takes and gives, by names of `TENSORS` in the order of its arguments; a family adds to both.

    `owns`: the tensor whose rows its programs share out.
    `products`: matrix products per pair of query and key, of head_dim columns and of head_dim_v. Without any, a pass
    knows no scores, and so nothing that changes them.
    `knows_keys`: which keys a row sees matters; without, it goes over rows of out, and no diagonal or scale is taken.
    `knows_sequences`: it must know which sequence a row belongs to where they are packed.
    `owns_keys`: its programs own keys, of kv heads, and loop over query rows.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    owns: str
    products: tuple[int, int] = (0, 0)
    knows_keys: bool = True
    knows_sequences: bool = True
    owns_keys: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owns_keys", TENSORS[self.owns].rows is Extent.KEYS)

    @property
    def knows_scores(self) -> bool:
        """Whether it computes scores, and so knows a softcap, a bias, dropout, …"""
        return any(self.products)

    @property
    def strided(self) -> tuple[str, ...]:
        """The tensors of any strides; all others are contiguous."""
        return tuple(name for name in (*self.takes, *self.gives) if TENSORS[name].element is Element.OF_CALL)


_GRADIENT_TAKES = ("q", "k", "v", "do", "lse", "delta")
_SPECS = {
    Pass.FWD: PassSpec(takes=("q", "k", "v"), gives=("out", "lse"), owns="q", products=(1, 1)),
    Pass.BWD_DELTA: PassSpec(
        takes=("out", "do"), gives=("delta",), owns="out", knows_keys=False, knows_sequences=False
    ),
    Pass.BWD_DKDV: PassSpec(takes=_GRADIENT_TAKES, gives=("dk", "dv"), owns="k", products=(2, 2)),
    Pass.BWD_DQ: PassSpec(takes=_GRADIENT_TAKES, gives=("dq",), owns="q", products=(2, 1)),
    Pass.BWD_PREPROCESS: PassSpec(
        takes=("out", "do", "lse"), gives=("statistics", "turns"), owns="out", knows_keys=False
    ),
    Pass.BWD_FUSED: PassSpec(
        takes=("q", "k", "v", "do", "statistics", "turns"), gives=("dk", "dv", "dq_acc"), owns="k", products=(3, 2)
    ),
    Pass.BWD_POSTPROCESS: PassSpec(takes=("dq_acc",), gives=("dq",), owns="dq"),
}
KEYLESS_PASSES = tuple(one for one in Pass if not one.spec.knows_keys)


def parse_passes(text: str) -> tuple[Pass, ...]:
    """The passes of `fwd`, `bwd` (all of the backward) or their own names, separated by commas; each once."""
    if not isinstance(text, str):
        raise InvalidProblemError(f"passes={text!r} is no text; write it such as fwd or fwd,bwd")
    found: list[Pass] = []
    for word in (part.strip().lower() for part in text.split(",")):
        if word == "bwd":
            found += BACKWARD_PASSES
        elif word in set(Pass):
            found.append(Pass(word))
        else:
            raise InvalidProblemError(f"{word!r} in {text!r} is not one of: fwd, bwd, {', '.join(BACKWARD_PASSES)}")
    return tuple(dict.fromkeys(found))
