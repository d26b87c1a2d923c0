"""Template and config → the text of a generated module. Pure: nothing is written here.

Jinja decides the program's structure; numbers become named constants at the top of the module. Every value that
reaches a template is a validated int, bool, enum or None of our own dataclasses, never a string from outside.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fa_autotune.errors import TemplateError
from fa_autotune.paths import templates_dir
from fa_autotune.problem.family import AttentionFamily, DType, Pass
from fa_autotune.space.candidate import Candidate, CompileForm
from fa_autotune.space.config import (
    config_key,
    config_label,
)
from fa_autotune.space.estimates import WIDEST_PIECE, head_dim_pieces, part_columns, value_parts
from fa_autotune.space.registry import compile_form, variant_spec
from fa_autotune.space.workspace import DQ_LANES, PART_COLUMNS, ROWS_PER_TURN, STATISTIC_ROWS, fused_tile

if TYPE_CHECKING:
    import jinja2

DIGEST_CHARACTERS = 16
# Tensors that a pass's pointer kernels take strides of, in the order of the kernel's parameters: batch, head, row.
_STRIDES = {
    Pass.FWD: {"q": "bhm", "k": "bhn", "v": "bhn", "o": "bhm"},
    Pass.BWD_DELTA: {"o": "bhm", "do": "bhm"},
    Pass.BWD_DKDV: {"q": "bhm", "k": "bhn", "v": "bhn", "do": "bhm", "dk": "bhn", "dv": "bhn"},
    Pass.BWD_DQ: {"q": "bhm", "k": "bhn", "v": "bhn", "do": "bhm", "dq": "bhm"},
    Pass.BWD_PREPROCESS: {"o": "bhm", "do": "bhm"},
    Pass.BWD_FUSED: {},
    Pass.BWD_POSTPROCESS: {"dq": "bhm"},
}
_TRITON_DTYPES = {DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A generated module. `digest` identifies the body (header excluded); `name` is the file name without `.py`."""

    text: str
    digest: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDimPiece:
    """Columns start … end−1 of a head dim, covered by a tile of `width` columns."""

    start: int
    end: int
    width: int

    @property
    def padded(self) -> bool:
        """True if the tile is wider than the columns it covers."""
        return self.end - self.start < self.width


def pieces(head_dim: int, widest: int) -> tuple[HeadDimPiece, ...]:
    """The tiles that cover a head dim."""
    covered, start = [], 0
    for width in head_dim_pieces(head_dim, widest):
        covered.append(HeadDimPiece(start=start, end=min(start + width, head_dim), width=width))
        start += width
    return tuple(covered)


def part_pieces(family: AttentionFamily, widest: int) -> tuple[HeadDimPiece, ...]:
    """The tiles that cover a part of head_dim_v; `end` as in the last part, which may end before its tiles do."""
    columns = part_columns(family)
    last = family.head_dim_v - (value_parts(family) - 1) * columns
    return tuple(
        HeadDimPiece(start=piece.start, end=max(piece.start, min(piece.end, last)), width=piece.width)
        for piece in pieces(columns, widest)
    )


def render(candidate: Candidate) -> KernelSource:
    """The generated module of a candidate; TemplateError if the template is missing or broken."""
    import jinja2  # noqa: PLC0415  only where a kernel must be rendered

    family, config = candidate.family, candidate.config
    spec = variant_spec(family.kernel_pass, candidate.variant)
    if type(config) is not spec.config_type:
        raise TemplateError(
            f"{type(config).__name__} is no config of the {candidate.variant} variant: "
            f"it takes {spec.config_type.__name__}"
        )
    aligned = compile_form(family) is CompileForm.ALIGNED
    last = "" if aligned else "d"
    widest = getattr(config, "HEAD_DIM_PIECE", WIDEST_PIECE)
    tile = fused_tile(family)
    axes_of = {
        name: (axes[1:] if family.varlen else axes) + last for name, axes in _STRIDES[family.kernel_pass].items()
    }
    is_padded = family.kernel_pass is Pass.BWD_FUSED  # to columns that its tile says
    columns = (tile.columns, tile.v_columns) if is_padded else (family.head_dim, family.head_dim_v)
    try:
        body = (
            _environment()
            .get_template(spec.template)
            .render(
                family=family,
                config=config,
                qk_pieces=pieces(columns[0], widest),
                v_pieces=pieces(columns[1], widest) if value_parts(family) == 1 else part_pieces(family, widest),
                v_parts=value_parts(family),
                v_part_columns=part_columns(family),
                aligned=aligned,
                strides=axes_of,
                triton_dtype=_TRITON_DTYPES[family.dtype],
                itemsize=family.dtype.itemsize,
                tile=tile,
                statistic_rows=STATISTIC_ROWS,
                rows_per_turn=ROWS_PER_TURN,
                dq_lanes=DQ_LANES,
                part_columns=PART_COLUMNS,
                register_axes=tile.register_axes,
            )
        )
    except jinja2.TemplateError as error:
        raise TemplateError(f"template {spec.template} in {templates_dir()} does not render: {error}") from error
    digest = hashlib.sha256(body.encode()).hexdigest()[:DIGEST_CHARACTERS]
    header = (
        f"# Generated by fa_autotune from templates/{spec.template}; change that, not this.\n"
        f"# Kernel {digest}: {family.label}, {candidate.variant} {config_label(config)}\n"
        f"# Family: {family.key}\n"
        f"# Config: {config_key(config)}\n"
    )
    return KernelSource(text=header + body, digest=digest, name=f"{family.kernel_pass.value}_{digest}")


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # noqa: PLC0415

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def rendered_digest(candidate: Candidate) -> str:
    """The digest that a candidate's kernel has with today's templates."""
    return render(candidate).digest
