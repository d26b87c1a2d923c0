"""What is to be computed: a problem is a family (what changes the kernel's source) and a shape (run-time numbers)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.family import (
    FAMILY_KEYS,
    FAMILY_OPTIONS,
    FEATURE_WORDS,
    MASK_WORDS,
    PASS_WORDS,
    SCHEMA_VERSION,
    SHAPE_OPTIONS,
    SHORT_DTYPES,
    Access,
    AttentionFamily,
    DType,
    canonical_json,
    family_fields,
    parse_key,
    require_int,
    strongest_access,
)
from fa_autotune.problem.passes import BACKWARD_PASSES, TENSORS, Element, Extent, Pass

MAX_EXTENT = 2**31 - 1  # lengths and grid axis 0 are 32-bit in every kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Run-time numbers of one call; extents are at least 1 (empty calls never reach a kernel).

    `window_left` and `window_right`: keys that a row sees before and after its own, on the sides that the family
    bounds; 0 elsewhere, and where causal. A row's own key is that of bottom-right alignment.
    Of a varlen problem: `batch_size` sequences of mean lengths `seqlen_q` and `seqlen_k`.
    """

    batch_size: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    window_left: int = 0
    window_right: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            require_int(name, getattr(self, name), least, MAX_EXTENT)
        if self.num_q_heads % self.num_kv_heads:
            raise InvalidProblemError(
                f"num_q_heads={self.num_q_heads} is no multiple of num_kv_heads={self.num_kv_heads}: "
                "GQA needs whole groups; change either"
            )
        if self.batch_size * self.num_q_heads > MAX_EXTENT:
            raise InvalidProblemError(
                f"batch_size × num_q_heads = {self.batch_size * self.num_q_heads} passes {MAX_EXTENT}: split the batch"
            )

    def as_json(self) -> dict[str, Any]:
        """Plain values, keyed as in the canonical key."""
        return {name: value for name in (*_SHAPE_KEYS, *SHAPE_OPTIONS) if (value := getattr(self, name))}

    @property
    def gqa_group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def label(self) -> str:
        """batch×q heads×kv heads×seqlen_q×seqlen_k, for people; then the window's sides that are not 0."""
        sides = {"left": self.window_left, "right": self.window_right}
        numbers = "×".join(str(getattr(self, name)) for name in _SHAPE_KEYS)
        return " ".join([numbers, *(f"{side}={size}" for side, size in sides.items() if size)])


_SIDE = re.compile(r"(left|right)=([0-9]{1,10})")


def _window_sides(words: Sequence[str], text: str) -> dict[str, int]:
    """How many keys a row sees to its left and right, where a word of a problem bounds them."""
    named = {("right", 0) for word in words if word == "causal"}
    named |= {(side[1], int(side[2])) for word in words if (side := _SIDE.fullmatch(word))}
    sides = dict(named)
    if len(named) > len(sides) or (sides and "full" in words):
        raise InvalidProblemError(
            f"{text!r} says in two ways which keys a row sees: causal is right=0, full bounds no side; leave one out"
        )
    return sides


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """One attention call to be tuned or dispatched: a family and a shape."""

    family: AttentionFamily
    shape: AttentionShape

    def __post_init__(self) -> None:
        if not isinstance(self.family, AttentionFamily) or not isinstance(self.shape, AttentionShape):
            raise InvalidProblemError(
                f"AttentionProblem takes an AttentionFamily and an AttentionShape, not {self.family!r} and "
                f"{self.shape!r}; AttentionProblem.parse reads the short text form"
            )
        shape, family = self.shape, self.family
        for side, size, is_bounded in (
            ("left", shape.window_left, family.bounded_left),
            ("right", shape.window_right, family.bounded_right),
        ):
            if size and not is_bounded:
                raise InvalidProblemError(
                    f"window_{side}={size} is of no use where bounded_{side} is False; set that too, or write "
                    f"{side}={size} in the short form"
                )

    @property
    def key(self) -> str:
        """Canonical JSON of the problem, with the schema version."""
        return canonical_json({"schema": SCHEMA_VERSION, **self.family.as_json(), **self.shape.as_json()})

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Parse a canonical key; InvalidProblemError if it is not exactly one."""
        values = parse_key(key, FAMILY_KEYS | set(_SHAPE_KEYS), FAMILY_OPTIONS | set(SHAPE_OPTIONS))
        numbers = {name: values.pop(name) for name in (*_SHAPE_KEYS, *SHAPE_OPTIONS) if name in values}
        shape = AttentionShape(**numbers)
        return cls(family=AttentionFamily(**family_fields(values)), shape=shape)

    @classmethod
    def of(cls, problem: Any) -> Self:
        """A problem as it is, or of its text; InvalidProblemError for what is neither."""
        if isinstance(problem, str):
            return cls.parse(problem)
        if not isinstance(problem, cls):
            raise InvalidProblemError(
                f"problem={problem!r} is a {type(problem).__name__}, and no problem; write it as "
                '"4x32x8x4096x4096x128,causal", or as an AttentionProblem'
            )
        return problem

    @classmethod
    def several(cls, problems: Any) -> list[Self]:
        """Problems of a list of them or of their texts, or of one alone; InvalidProblemError for what is none."""
        if isinstance(problems, (str, cls)):
            return [cls.of(problems)]
        if not isinstance(problems, Iterable):
            raise InvalidProblemError(
                f'problems={problems!r} is no list of problems; write it as ["4x32x8x4096x4096x128,causal"]'
            )
        return [cls.of(problem) for problem in problems]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the short form `BxHqxHkvxLqxLkxD[xDv][,word…]`, a label or a key.

        A word is causal, left=N or right=N (a window: so many keys before and after a row's own; causal is right=0),
        a dtype (bf16, fp16, fp32), an access (tma, aligned, any), a pass (fwd or one of the backward's, such as
        bwd_dkdv), softcap, alibi, sinks, tf32 (with fp32), dropout, varlen, a mask (bool_mask, bias, wide_bias; and
        loose_mask), or unordered, which goes with bwd_fused, and mask_gradient, which goes with bwd_dq.

        `AttentionProblem.parse("4x32x8x4096x4096x128,causal")` is Llama-like prefill in bfloat16. `×` may stand for x.
        A pass makes it that kernel's problem of the same call, as `for_pass` does.
        """
        if not isinstance(text, str):
            raise InvalidProblemError(f"{text!r} is no text of a problem; write it as 4x32x8x4096x4096x128,causal")
        if text.lstrip().startswith("{"):
            return cls.from_key(text)
        if label := _LABEL.fullmatch(text.strip()):
            return cls._from_label(**label.groupdict())
        numbers, *flags = (part.strip() for part in text.lower().replace("×", "x").split(","))
        if not re.fullmatch(r"[0-9]{1,10}(x[0-9]{1,10}){5,6}", numbers):
            raise InvalidProblemError(
                f"{text!r} is no problem: write BxHqxHkvxLqxLkxD[xDv][,causal][,left=N][,right=N]"
                f"[,{'|'.join(FEATURE_WORDS)}][,bf16|fp16|fp32][,tma|aligned|any][,{'|'.join(BACKWARD_PASSES)}], "
                "for example 4x32x8x4096x4096x128,causal"
            )
        batch, q_heads, kv_heads, seqlen_q, seqlen_k, head_dim, *rest = map(int, numbers.split("x"))
        dtype, access, kernel_pass = DType.BFLOAT16, None, Pass.FWD
        features = dict[str, Any]()
        sides = _window_sides(flags, text)
        for flag in flags:
            if flag in ("causal", "full") or _SIDE.fullmatch(flag):
                continue
            if flag in FEATURE_WORDS:
                features[flag] = True
            elif flag in _DTYPES_BY_WORD:
                dtype = _DTYPES_BY_WORD[flag]
            elif flag in set(Access):
                access = Access(flag)
            elif flag in set(Pass):
                kernel_pass = Pass(flag)
            else:
                known = ["causal", "full", "left=N", "right=N", *_DTYPES_BY_WORD, *Access, *Pass, *FEATURE_WORDS]
                raise InvalidProblemError(f"{flag!r} in {text!r} is not one of: {', '.join(known)}")
        of_pass = {word: features.pop(word, False) for word in PASS_WORDS}
        head_dim_v = rest[0] if rest else head_dim
        family = AttentionFamily(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            bounded_right="right" in sides,
            bounded_left="left" in sides,
            access=access or strongest_access(dtype, head_dim, head_dim_v),
            **features,
        )
        shape = AttentionShape(
            batch_size=batch,
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window_left=sides.get("left", 0),
            window_right=sides.get("right", 0),
        )
        return cls(family=family, shape=shape).for_pass(kernel_pass, **of_pass)

    def as_called(self) -> Self:
        """The problem whose kernel runs when this one is called: without a bound that hides nothing, bottom-right.

        A single query row needs no causal bound; no row needs a window that reaches past every key. Calls of varlen
        keep their bounds, and are rounded as `packed_shape` says.
        """
        shape, family = self.shape, self.family
        if family.varlen:
            rounded = (rounded_up(count) for count in (shape.batch_size, shape.seqlen_q, shape.seqlen_k))
            return replace(self, shape=replace(shape, **dict(zip(_ROUNDED, rounded, strict=True))))
        right = family.bounded_right and shape.window_right < shape.seqlen_q - 1
        left = family.bounded_left and shape.window_left < shape.seqlen_k - 1
        if (left, right) == (family.bounded_left, family.bounded_right):
            return self
        return replace(
            self,
            family=replace(family, bounded_left=left, bounded_right=right),
            shape=replace(
                shape,
                window_left=shape.window_left if left else 0,
                window_right=shape.window_right if right else 0,
            ),
        )

    def for_pass(self, kernel_pass: Pass, *, unordered: bool = False, mask_gradient: bool = False) -> Self:
        """The problem that another kernel of the same call solves.

        delta and the preprocessing know neither keys nor a mask, and the postprocessing no scores: calls that differ in
        these alone share their problem, and delta knows no sequences either. The access stays, but is that of ordinary
        tensors where this problem's is.
        `unordered` is that of the fused kernel. InvalidProblemError from a pass without keys to another one.
        """
        family = self.family.for_pass(kernel_pass, unordered=unordered, mask_gradient=mask_gradient)
        if family is self.family:
            return self
        shape = self.shape
        if not kernel_pass.spec.knows_keys:
            is_flat = self.family.varlen and not family.varlen  # rows one after another, whatever their sequence
            seqlen_q = min(MAX_EXTENT, shape.batch_size * shape.seqlen_q) if is_flat else shape.seqlen_q
            shape = AttentionShape(
                batch_size=1 if is_flat else shape.batch_size,
                num_q_heads=shape.num_q_heads,
                num_kv_heads=shape.num_q_heads,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_q,
            )
        return type(self)(family=family, shape=shape)

    @classmethod
    def _from_label(
        cls,
        *,
        kernel_pass: str,
        dtype: str,
        dims: str,
        mask: str,
        access: str | None,
        words: str,
        shape: str,
        left: str | None,
        right: str | None,
    ) -> Self:
        if kernel_pass not in set(Pass):
            raise InvalidProblemError(f"pass={kernel_pass!r} is not one of: {', '.join(Pass)}")
        sides = {"left": left or (0 if mask in ("left", "window") else None)}
        sides["right"] = right or (0 if mask in ("causal", "window") else None)
        bounds = "".join(f",{side}={size}" for side, size in sides.items() if size is not None)
        flags = "".join(f",{word}" for word in words.split() if word not in PASS_WORDS)
        found = cls.parse(f"{shape}x{dims.replace('/', 'x')},{dtype},{access or Access.TMA}{bounds}{flags}")
        if found.family.mask_word != mask:
            raise InvalidProblemError(
                f"a {mask} mask has no {bounds.lstrip(',')}; the word is {found.family.mask_word}"
            )
        of_pass: dict[str, Any] = {word: word in words.split() for word in PASS_WORDS}
        family = replace(found.family, kernel_pass=Pass(kernel_pass), **of_pass)
        return replace(found, family=family)

    @property
    def label(self) -> str:
        """Short name for people: the family's label and the shape's."""
        return f"{self.family.label} {self.shape.label}"

    @property
    def window(self) -> tuple[int, int]:
        """Keys that a row sees before and after its own, -1 for all; causal is (-1, 0)."""
        family, shape = self.family, self.shape
        return shape.window_left if family.bounded_left else -1, shape.window_right if family.bounded_right else -1

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs per head that the mask lets through, its diagonals counted bottom-right."""
        return visible_pairs(self.family, self.shape)

    @property
    def flops(self) -> int:
        """Operations of the kernel's own matrix products, the literature's way: square causal counts as half of full.

        The forward has 2 products per pair of query and key, dk and dv together 4, dq 3, all of them fused 5; what goes
        over rows only has none.
        """
        shape, family = self.shape, self.family
        pairs = self.visible_pairs
        if family.mask_word == "causal" and not shape.window_right and shape.seqlen_q == shape.seqlen_k:
            pairs = shape.seqlen_q * shape.seqlen_k // 2
        qk_products, v_products = family.kernel_pass.spec.products
        columns = qk_products * family.head_dim + v_products * family.head_dim_v
        return 2 * pairs * columns * shape.batch_size * shape.num_q_heads

    def tflops(self, time_ms: float) -> float | None:
        """TFLOP/s of a run that took `time_ms`; None for a pass without matrix products."""
        return self.flops / time_ms / 1e9 if self.flops else None

    @property
    def io_bytes(self) -> int:
        """Bytes of every tensor that the kernel reads or writes, each counted once; of a mask, those of one head."""
        shape, family = self.shape, self.family
        rows = {
            Extent.QUERIES: shape.batch_size * shape.num_q_heads * shape.seqlen_q,
            Extent.KEYS: shape.batch_size * shape.num_kv_heads * shape.seqlen_k,
        }
        columns = {
            Extent.HEAD_DIM: family.head_dim,
            Extent.HEAD_DIM_V: family.head_dim_v,
            Extent.KEYS: shape.seqlen_k,
        }
        found = shape.seqlen_q * shape.seqlen_k * family.mask_itemsize if family.has_mask else 0  # one for all heads
        for name in (*family.kernel_pass.spec.takes, *family.outputs):
            tensor = TENSORS[name]
            width = tensor.columns if isinstance(tensor.columns, int) else columns[tensor.columns]
            itemsize = family.dtype.itemsize if tensor.element is Element.OF_CALL else 4
            found += rows[tensor.rows] * width * itemsize
        return found


def visible_pairs(family: AttentionFamily, shape: AttentionShape) -> int:
    """`AttentionProblem.visible_pairs`, without the problem."""
    seqlen_q, seqlen_k = shape.seqlen_q, shape.seqlen_k
    offset, pairs = seqlen_k - seqlen_q, seqlen_q * seqlen_k
    if family.bounded_right:
        pairs = _pairs_up_to(offset + shape.window_right, seqlen_q, seqlen_k)
    if family.bounded_left:
        pairs -= _pairs_up_to(offset - shape.window_left - 1, seqlen_q, seqlen_k)
    return pairs


def rounded_up(count: int) -> int:
    """The next power of two that an extent can be, at least 1."""
    return min(1 << max(0, count - 1).bit_length(), MAX_EXTENT)


def packed_shape(
    *, num_sequences: int, num_q_heads: int, num_kv_heads: int, total_q: int, total_k: int, window: tuple[int, int]
) -> AttentionShape:
    """The shape that stands for sequences with so many rows in all: their number and mean lengths, each rounded up to a
    power of two, so that a stream of ever new totals asks for few kernels.

    `window`: keys that a row sees before and after its own, 0 where that side is open.
    """
    count = max(1, num_sequences)
    return AttentionShape(
        batch_size=rounded_up(num_sequences),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=rounded_up(-(-total_q // count)),
        seqlen_k=rounded_up(-(-total_k // count)),
        window_left=window[0],
        window_right=window[1],
    )


def _pairs_up_to(diagonal: int, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs of a row i and a key j <= i + diagonal."""
    first, last = diagonal + 1, diagonal + seqlen_q  # keys that the first and the last row see, were there so many
    start, end = max(first, 0), min(last, seqlen_k)
    growing = (start + end) * (end - start + 1) // 2 if end >= start else 0
    return growing + seqlen_k * max(0, last - max(seqlen_k, first - 1))


_ROUNDED = ("batch_size", "seqlen_q", "seqlen_k")
_SHAPE_KEYS = ("batch_size", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
_LEAST = {**dict.fromkeys(_SHAPE_KEYS, 1), **dict.fromkeys(SHAPE_OPTIONS, 0)}
_LABEL = re.compile(
    r"(?P<kernel_pass>[a-z_]+) (?P<dtype>[a-z0-9]+) d(?P<dims>[0-9]{1,4}(?:/[0-9]{1,4})?) "
    rf"(?P<mask>{'|'.join(MASK_WORDS.values())})(?: (?P<access>tma|aligned|any))?"
    rf"(?P<words>(?: (?:{'|'.join(FEATURE_WORDS)}))*) "
    r"(?P<shape>[0-9x×]+)(?: left=(?P<left>[0-9]{1,10}))?(?: right=(?P<right>[0-9]{1,10}))?"
)
_DTYPES_BY_WORD = {**{short: dtype for dtype, short in SHORT_DTYPES.items()}, **{d.value: d for d in DType}}
