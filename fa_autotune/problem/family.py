"""What changes a kernel's source: pass, dtype, head dims, mask, access, features; and the keys of what is computed.

A key is canonical JSON with a schema version. Optional features are written into it only when they are on, so adding
one never changes old keys.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NoReturn, Self

from fa_autotune.errors import InvalidProblemError
from fa_autotune.problem.passes import (
    Pass,
)

SCHEMA_VERSION = 1
MIN_HEAD_DIM = 8
MAX_HEAD_DIM = 512
MAX_JSON_DEPTH = 32
MAX_REMEMBERED_FAMILIES = 1024  # of a process; what follows from a family is worked out once


class DType(StrEnum):
    """Element type of q, k, v and out. Accumulators and statistics are always fp32."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FLOAT32 else 2


class Access(StrEnum):
    """How q, k and v (and do) can be read, from their pointers and strides (the 16-byte rules), strongest first.

    TMA: last stride 1; pointers, the strides of batch, head and row, and the rows themselves (head_dim, head_dim_v) are
    multiples of 16 bytes, and no stride is 0.
    ALIGNED: as TMA, but a stride may be 0 (an expanded tensor).
    ANY: everything else.
    """

    TMA = "tma"
    ALIGNED = "aligned"
    ANY = "any"


def require_int(name: str, value: object, low: int, high: int) -> None:
    """InvalidProblemError unless a value is an integer in a range, both ends of which count."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidProblemError(f"{name}={value!r} is not an integer from {low} to {high}")


class KeepsHash:
    """A frozen dataclass whose hash is worked out once, since that of many fields takes long.

    It is no field, so that it stays behind when a value goes to another process, where texts have other hashes.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            values = tuple([getattr(self, one.name) for one in fields(self)])  # type: ignore[arg-type]
            object.__setattr__(self, "_hash", hash(values))
            return self._hash


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFamily(KeepsHash):
    """What changes the generated source.

    `bounded_right` is true where a query row must not see keys past a diagonal (causal, or a window to the right), and
    `bounded_left` where it must not see keys before one (a window to the left). Where the diagonals lie (the window's
    sizes, bottom-right or top-left) is a run-time argument, so one kernel serves them all.
    `unordered`: the fused backward may add the parts of dq in any order, so that two runs differ in the last bits.
    `softcap`: scores are capped, softcap · tanh(score / softcap); the number is a run-time argument.
    `alibi`: scores get −slope · |distance of the key from the row's own|, a slope for each batch and head.
    `tf32`: the operands of float32 products are cut to tf32, so that tensor cores multiply them.
    `sinks`: a score for each batch and head is added to the softmax, with a value of 0. The forward alone knows it: a
    backward has it in lse.
    `bool_mask`, `bias`, `wide_bias`: a mask tells each row its keys: of bools, or numbers that are added to the scores,
    in the family's dtype or, wide, in fp32 beside 16 bits. `loose_mask`: its memory is not read 16 bytes at a time.
    `dropout`: some probabilities become 0, by random bits of a seed; which share of them is a run-time argument.
    `mask_gradient`: the kernel of dq also writes the gradient of what a mask adds.
    `varlen`: sequences of any lengths lie one after another in the rows of q, and of k and v; the diagonals are those
    of each sequence, and count from bottom-right.
    BWD_POSTPROCESS knows no scores, and so nothing that changes them.
    """

    kernel_pass: Pass = Pass.FWD
    dtype: DType
    head_dim: int
    head_dim_v: int
    bounded_right: bool
    access: Access = Access.TMA
    unordered: bool = False
    bounded_left: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    bool_mask: bool = False
    bias: bool = False
    wide_bias: bool = False
    loose_mask: bool = False
    mask_gradient: bool = False
    dropout: bool = False
    varlen: bool = False
    tf32: bool = False

    __hash__ = KeepsHash.__hash__

    def __post_init__(self) -> None:
        kinds = {"kernel_pass": Pass, "dtype": DType, "access": Access, "bounded_right": bool}
        for name, kind in (kinds | dict.fromkeys(sorted(FAMILY_OPTIONS), bool)).items():
            if not isinstance(getattr(self, name), kind):
                raise InvalidProblemError(f"{name}={getattr(self, name)!r} is not a {kind.__name__}")
        if self.unordered and self.kernel_pass is not Pass.BWD_FUSED:
            raise InvalidProblemError(
                f"unordered=True is for bwd_fused, no {self.kernel_pass.value} kernel adds up dq; write "
                "…,bwd_fused,unordered"
            )
        if self.sinks and self.kernel_pass is not Pass.FWD:
            raise InvalidProblemError(
                f"sinks=True is for fwd: {self.kernel_pass.value} finds the sinks in lse; leave it out there"
            )
        for name in SCORE_WORDS:
            if getattr(self, name) and self.kernel_pass is Pass.BWD_POSTPROCESS:
                raise InvalidProblemError(
                    f"{name}=True is not for bwd_postprocess, which knows no scores; leave it out"
                )
        self._check_mask()
        self._check_varlen()
        if self.tf32 and (self.dtype is not DType.FLOAT32 or not self.kernel_pass.spec.knows_keys):
            raise InvalidProblemError(
                f"tf32=True is for float32 products, {self.kernel_pass.value} of {self.dtype.value} has none; leave it "
                "out"
            )
        for name in ("head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), MIN_HEAD_DIM, MAX_HEAD_DIM)
        if self.access is not Access.ANY and strongest_access(self.dtype, self.head_dim, self.head_dim_v) is Access.ANY:
            raise InvalidProblemError(
                f"access={self.access.value} needs rows of whole 16 bytes, but head_dim={self.head_dim} and "
                f"head_dim_v={self.head_dim_v} of {self.dtype.value} are not; say access=any"
            )

    def _check_mask(self) -> None:
        kinds = [name for name in MASK_KINDS if getattr(self, name)]
        if len(kinds) > 1:
            raise InvalidProblemError(f"{' and '.join(kinds)} are masks of one call, which has one; leave one out")
        if self.wide_bias and self.dtype is DType.FLOAT32:
            raise InvalidProblemError("wide_bias=True is fp32 beside 16 bits; in float32 write bias")
        if self.loose_mask and not kinds:
            raise InvalidProblemError(f"loose_mask=True says how a mask lies; add one of {', '.join(MASK_KINDS)}")
        if self.mask_gradient and not (self.has_bias and self.kernel_pass is Pass.BWD_DQ):
            raise InvalidProblemError(
                f"mask_gradient=True is for bwd_dq with bias or wide_bias, not {self.kernel_pass.value}; leave it out"
            )

    def _check_varlen(self) -> None:
        if self.varlen and not self.kernel_pass.spec.knows_sequences:
            raise InvalidProblemError(
                f"varlen=True is for passes that know sequences: {self.kernel_pass.value} goes over rows, whatever "
                "sequence they belong to; leave it out there"
            )
        found = [name for name in MASK_KINDS if getattr(self, name)]
        if self.varlen and found:
            raise InvalidProblemError(
                f"{' and '.join(found)} with varlen: kernels of packed sequences know no masks; leave one out"
            )

    def as_json(self) -> dict[str, Any]:
        """Plain values, keyed as in the canonical key."""
        return {
            "pass": self.kernel_pass.value,
            "dtype": self.dtype.value,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "bounded_right": self.bounded_right,
            "access": self.access.value,
            **{name: True for name in sorted(FAMILY_OPTIONS) if getattr(self, name)},
        }

    @property
    def key(self) -> str:
        """Canonical JSON of the family, with the schema version."""
        return canonical_json({"schema": SCHEMA_VERSION, **self.as_json()})

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Parse a canonical key; InvalidProblemError if it is not exactly one."""
        return cls(**family_fields(parse_key(key, FAMILY_KEYS, FAMILY_OPTIONS)))

    def for_pass(self, kernel_pass: Pass, *, unordered: bool = False, mask_gradient: bool = False) -> "AttentionFamily":
        """The family of another kernel of the same call, as `AttentionProblem.for_pass` says; each is made once."""
        if kernel_pass is self.kernel_pass and unordered is self.unordered and mask_gradient is self.mask_gradient:
            return self
        return _family_for_pass(self, kernel_pass, unordered, mask_gradient)

    @property
    def mask_word(self) -> str:
        """Which sides are bounded, in a word: full, causal (the right one), left, or window (both)."""
        return MASK_WORDS[self.bounded_left, self.bounded_right]

    @property
    def has_bias(self) -> bool:
        """True where a mask adds numbers to the scores."""
        return self.bias or self.wide_bias

    @property
    def has_mask(self) -> bool:
        """True where a mask, of bools or numbers, says what each row sees."""
        return self.bool_mask or self.has_bias

    @property
    def is_shifted(self) -> bool:
        """True where something is added to the scores."""
        return self.alibi or self.has_bias

    @property
    def mask_itemsize(self) -> int:
        """Bytes per element of the mask."""
        return 1 if self.bool_mask else 4 if self.wide_bias else self.dtype.itemsize

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the kernel writes, names of `passes.TENSORS`."""
        return (*self.kernel_pass.spec.gives, *(("d_mask",) if self.mask_gradient else ()))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor that the kernel takes, in its order: inputs, outputs, those of features and of sequences."""
        return (*self.kernel_pass.spec.takes, *self.outputs, *self.feature_tensors, *self.length_tensors)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Every number that the kernel takes, in its order, after the tensors."""
        return ("softmax_scale", "diagonal", *self.feature_numbers) if self.kernel_pass.spec.knows_keys else ()

    @property
    def feature_tensors(self) -> tuple[str, ...]:
        """What the kernel takes after its outputs: fields of `features.Features`, which say their sizes."""
        names = {"alibi_slopes": self.alibi, "sinks": self.sinks, "attn_mask": self.has_mask}
        names["dropout_seed"] = self.dropout
        return tuple(name for name, is_on in names.items() if is_on)

    @property
    def length_tensors(self) -> tuple[str, ...]:
        """What the kernel takes after those, int32 (sequences + 1): fields of `features.Features`."""
        return ("cu_seqlens_q", "cu_seqlens_k") if self.varlen else ()

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Both of these, in the kernel's order."""
        return (*self.feature_tensors, *self.length_tensors)

    @property
    def feature_numbers(self) -> tuple[str, ...]:
        """What the kernel takes after the diagonal: fields of `features.Features`."""
        if not self.kernel_pass.spec.knows_scores:
            known = ("left_diagonal",) if self.varlen else ("left_diagonal", "key_offset")
            return known if self.bounded_left else ()
        names = {"left_diagonal": self.bounded_left, "softcap": self.softcap, "dropout_p": self.dropout}
        return tuple(name for name, is_on in names.items() if is_on)

    @property
    def label(self) -> str:
        """Short name for people, such as `fwd bf16 d128 causal`; the access is named unless it is tma."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        words = [self.kernel_pass.value, SHORT_DTYPES[self.dtype], dims, self.mask_word]
        words += [self.access.value] if self.access is not Access.TMA else []
        return " ".join([*words, *(word for word in FEATURE_WORDS if getattr(self, word))])


@lru_cache(maxsize=MAX_REMEMBERED_FAMILIES)
def _family_for_pass(
    family: AttentionFamily, kernel_pass: Pass, unordered: bool, mask_gradient: bool
) -> AttentionFamily:
    if not family.kernel_pass.spec.knows_keys and kernel_pass is not family.kernel_pass:
        raise InvalidProblemError(
            f"{family.label} knows no keys, so it has no {kernel_pass.value} problem; start from the forward's"
        )
    if kernel_pass.spec.knows_keys:
        scoreless: dict[str, Any] = {} if kernel_pass.spec.knows_scores else dict.fromkeys(SCORE_WORDS, False)
        return replace(
            family,
            kernel_pass=kernel_pass,
            sinks=family.sinks and kernel_pass is Pass.FWD,
            unordered=unordered,
            mask_gradient=mask_gradient,
            **scoreless,
        )
    head_dim_v = family.head_dim_v
    is_usual = family.access is strongest_access(family.dtype, family.head_dim, head_dim_v)
    return AttentionFamily(
        kernel_pass=kernel_pass,
        dtype=family.dtype,
        head_dim=head_dim_v,
        head_dim_v=head_dim_v,
        bounded_right=False,
        varlen=family.varlen and kernel_pass.spec.knows_sequences,
        access=strongest_access(family.dtype, head_dim_v, head_dim_v) if is_usual else family.access,
        unordered=unordered,
        mask_gradient=mask_gradient,
    )


def strongest_access(dtype: DType, head_dim: int, head_dim_v: int) -> Access:
    """The access of ordinary contiguous tensors: TMA where rows are whole 16-byte units, ANY otherwise."""
    return Access.ANY if head_dim * dtype.itemsize % 16 or head_dim_v * dtype.itemsize % 16 else Access.TMA


def canonical_json(values: Mapping[str, Any]) -> str:
    """Sorted, compact JSON: equal values give equal text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(text: str) -> Any:
    """Parse JSON of unknown origin; ValueError for what only Python takes for JSON, and for what nobody writes.

    NaN and infinity, numbers past a double's range, a name that an object has twice, and MAX_JSON_DEPTH passed.
    """
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_object_of_distinct_names
        )
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH}") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = [part for part in level if isinstance(part, dict | list)]
        level = [item for part in nested for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return value
    raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH}")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is past the range of a double")
    return value


def _object_of_distinct_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a name twice")
    return values


MASK_KINDS = ("bool_mask", "bias", "wide_bias")
SCORE_WORDS = ("softcap", "alibi", *MASK_KINDS, "loose_mask", "dropout")  # options that change scores
PASS_WORDS = ("unordered", "mask_gradient")  # options of one pass, which a problem of another has not
# Options that a text names by their own word.
FEATURE_WORDS = ("softcap", "alibi", "sinks", "tf32", *MASK_KINDS, "loose_mask", "dropout", "varlen", *PASS_WORDS)
FAMILY_OPTIONS = {"bounded_left", *FEATURE_WORDS}  # in a key only where it is true
SHAPE_OPTIONS = ("window_left", "window_right")  # in a key only where it is not 0
FAMILY_KEYS = {"pass", "dtype", "head_dim", "head_dim_v", "bounded_right", "access"}
MASK_WORDS = {
    (False, False): "full",
    (False, True): "causal",
    (True, False): "left",
    (True, True): "window",
}  # by bounded_left, bounded_right
SHORT_DTYPES = {DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32"}


def _is_schema(value: object) -> bool:
    return type(value) is int and value == SCHEMA_VERSION  # JSON's true equals 1


def parse_key(key: str, expected: set[str], optional: set[str]) -> dict[str, Any]:
    """The entries of a canonical key, less its schema; InvalidProblemError unless they are exactly those."""
    try:
        values = parse_json(key)
    except (ValueError, TypeError) as error:
        raise InvalidProblemError(f"{key!r} is not JSON: {error}") from None
    if not isinstance(values, dict) or not _is_schema(values.pop("schema", None)):
        raise InvalidProblemError(
            f"{key!r} is not a JSON object of schema {SCHEMA_VERSION}; was it written by another release?"
        )
    wrong = (expected - values.keys()) | (values.keys() - expected - optional)
    given = optional & values.keys()
    wrong |= {name for name in given & FAMILY_OPTIONS if values[name] is not True}
    wrong |= {name for name in given & set(SHAPE_OPTIONS) if type(values[name]) is not int or values[name] < 1}
    if wrong:
        raise InvalidProblemError(f"{key!r} has missing or unknown entries: {', '.join(sorted(wrong))}")
    return values


def family_fields(values: dict[str, Any]) -> dict[str, Any]:
    """A key's entries as fields of `AttentionFamily`."""
    fields = dict(values)
    for name, kind in (("pass", Pass), ("dtype", DType), ("access", Access)):
        value = fields.pop(name)
        try:
            fields["kernel_pass" if name == "pass" else name] = kind(value)
        except ValueError:
            raise InvalidProblemError(f"{name}={value!r} is not one of: {', '.join(kind)}") from None
    return fields
