"""The arguments of a generated kernel, a row each: its parameter, type, divisor and value are said together, once.

Templates loop over the rows (templates/_arguments.py.jinja): for the kernel's parameters, its module's SIGNATURE and
ALIGNMENT, and what its `arguments()` returns. Texts are Python of the generated module: a value reads the local names
of `arguments()`, and a type of a kernel in Gluon the module's layouts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fa_autotune.kernels.pieces import HeadDimPiece, pieces_of
from fa_autotune.problem.family import SHORT_DTYPES, AttentionFamily
from fa_autotune.problem.passes import TENSORS, Element, Extent, Pass
from fa_autotune.space.candidate import Candidate, CompileForm, Variant
from fa_autotune.space.config import HopperWsFwdConfig, Schedule, TmaBwdDkDvConfig, TmaFwdConfig
from fa_autotune.space.registry import compile_form

UNIT_BYTES = 16  # what divides pointers and strides in the aligned form
_FIXED_TYPES = {Element.FLOAT32: "fp32", Element.INT32: "i32"}
# Whose layout in shared memory a tensor's tiles have: its own, or that of a tensor as wide.
_LAYOUTS = {"q": "Q_TILE", "k": "K_TILE", "v": "V_TILE", "do": "DO_TILE", "out": "OUT_TILE"}
_LAYOUTS |= {"dk": "K_TILE", "dv": "V_TILE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRow:
    """An argument of a kernel, or several that one value gives, such as a tensor's strides.

    `type` is Triton's; braces in it are filled in by the generated module. `divisor`: what divides each in the form
    compiled ahead, pointers in bytes and strides in elements. `tensor`: that of a feature which they belong to.
    """

    names: tuple[str, ...]
    type: str
    value: str
    divisor: int | None = None
    tensor: str = ""

    @property
    def type_literal(self) -> str:
        """The type as Python of the module."""
        return f'{"f" if "{" in self.type else ""}"{self.type}"'

    @property
    def divisors(self) -> tuple[str, ...]:
        """What divides each, as entries of the module's ALIGNMENT."""
        return tuple(f'"{name}": {self.divisor}' for name in self.names) if self.divisor else ()

    @property
    def is_number(self) -> bool:
        """True for numbers, false for pointers and descriptors."""
        return not self.type.startswith(("*", "tensordesc"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What the rows of a kernel depend on."""

    candidate: Candidate
    qk_pieces: tuple[HeadDimPiece, ...]
    v_pieces: tuple[HeadDimPiece, ...]

    @property
    def family(self) -> AttentionFamily:
        return self.candidate.family

    @property
    def dtype(self) -> str:
        return SHORT_DTYPES[self.family.dtype]

    @property
    def is_aligned(self) -> bool:
        return compile_form(self.family) is CompileForm.ALIGNED

    @property
    def shift(self) -> str:
        """How keys are counted where a program owns query rows: from the first that some row sees."""
        family = self.family
        counts_on = family.bounded_left and not family.varlen and not family.kernel_pass.spec.owns_keys
        return " - unseen_keys" if counts_on else ""

    def pieces_of(self, tensor: str) -> tuple[HeadDimPiece, ...]:
        return self.qk_pieces if TENSORS[tensor].columns is Extent.HEAD_DIM else self.v_pieces


def argument_rows(candidate: Candidate) -> tuple[ArgumentRow, ...]:
    """The arguments of a candidate's kernel, in order."""
    qk_pieces, v_pieces = pieces_of(candidate)
    kernel = _Kernel(candidate=candidate, qk_pieces=qk_pieces, v_pieces=v_pieces)
    rows = _ROWS_OF.get(candidate.family.kernel_pass, _of_scores)
    return tuple(rows(kernel))


# --- of each pass -----------------------------------------------------------------------------------------------------


def _of_scores(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Of a pass that computes scores: its tensors, then the numbers."""
    family, config = kernel.family, kernel.candidate.config
    tensors = tuple(_TENSOR_ROWS[kernel.candidate.variant](kernel))
    yield from tensors
    yield from _feature_tensors(family)
    yield from _sequence_starts(family)
    if family.kernel_pass is not Pass.FWD:
        yield _number("softmax_scale", "fp32")
    yield from _scales(kernel)
    yield from _bounds(kernel)
    by_pointer = {row.value for row in tensors if row.type.startswith("*")}
    yield from _strides(kernel, *(name for name in family.kernel_pass.spec.strided if name in by_pointer))
    if family.mask_gradient:
        yield ArgumentRow(
            names=("stride_d_maskm",), type="i64", value="d_mask.stride(2)", divisor=UNIT_BYTES, tensor="d_mask"
        )
    yield from _feature_strides(kernel)
    yield from _counts(kernel)
    if isinstance(config, HopperWsFwdConfig) and config.SCHEDULE in (Schedule.PERSISTENT, Schedule.PIPELINED):
        yield ArgumentRow(names=("scratch_ptr",), type="*i32", value="scratch")


def _of_delta(kernel: _Kernel) -> Iterator[ArgumentRow]:
    yield from _pointers(kernel)
    yield from _strides(kernel, "out", "do")
    yield _number("num_q_heads", "i32", "out.shape[1]")
    yield _number("seqlen_q", "i32", "out.shape[2]")


def _of_preprocess(kernel: _Kernel) -> Iterator[ArgumentRow]:
    is_varlen = kernel.family.varlen
    yield from _pointers(kernel)
    yield from _sequence_starts(kernel.family)
    out, do = _strides(kernel, "out", "do")
    yield ArgumentRow(names=(*out.names, *do.names), type="i64", value="*strides", divisor=out.divisor)
    if is_varlen:
        yield _number("num_sequences", "i32")
    else:
        yield _number("batch_heads", "i32", "batch_size * num_q_heads")
    yield _number("num_q_heads", "i32")
    yield _number("total_q" if is_varlen else "seqlen_q", "i32")


def _of_postprocess(kernel: _Kernel) -> Iterator[ArgumentRow]:
    family = kernel.family
    yield from _pointers(kernel)
    yield from _sequence_starts(family)
    (strides,) = _strides(kernel, "dq")
    yield ArgumentRow(names=strides.names, type="i64", value="*strides", divisor=strides.divisor)
    yield _number("softmax_scale", "fp32")
    if family.bounded_right:
        yield _number("diagonal", "i32")
    if family.bounded_left:
        yield _number("left_diagonal" if family.varlen else "end_m", "i32")
    if family.varlen:
        yield ArgumentRow(names=("num_sequences", "total_q"), type="i32", value="*counts")
    else:
        yield _number("num_q_heads", "i32", "dq.shape[1]")
        yield _number("seqlen_q", "i32", "dq.shape[2]")


_ROWS_OF = {
    Pass.BWD_DELTA: _of_delta,
    Pass.BWD_PREPROCESS: _of_preprocess,
    Pass.BWD_POSTPROCESS: _of_postprocess,
}

# --- tensors of each variant ------------------------------------------------------------------------------------------


def _pointers(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Every input and output by its pointer."""
    for name in (*kernel.family.kernel_pass.spec.takes, *kernel.family.outputs):
        yield _pointer(kernel, name)


def _by_descriptors(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Tensors in pieces through descriptors, those of a piece side by side; the others by pointers."""
    family, config = kernel.family, kernel.candidate.config
    described = ["q", "k", "v", "do"]
    if kernel.candidate.variant.is_gluon or (isinstance(config, TmaFwdConfig) and config.STORE_BY_TMA):
        described += ["out"]
    names = (*family.kernel_pass.spec.takes, *family.outputs)
    for columns, pieces in ((Extent.HEAD_DIM, kernel.qk_pieces), (Extent.HEAD_DIM_V, kernel.v_pieces)):
        for number, piece in enumerate(pieces):
            for name in names:
                if name in described and TENSORS[name].columns is columns:
                    yield _descriptor(kernel, name, number, piece)
    for name in names:
        if name in ("dk", "dv") and isinstance(config, TmaBwdDkDvConfig) and config.SPLIT_OUTPUTS:
            for number, piece in enumerate(kernel.pieces_of(name)):
                yield _descriptor(kernel, name, number, piece)
        elif name not in described:
            yield _pointer(kernel, name)


def _descriptor(kernel: _Kernel, tensor: str, number: int, piece: HeadDimPiece) -> ArgumentRow:
    """A descriptor of a tensor's columns in a piece."""
    owned_rows, width = TENSORS[tensor].rows is Extent.QUERIES, piece.width
    if not kernel.candidate.variant.is_gluon:
        block = "BLOCK_M" if owned_rows else "BLOCK_N"
        form = f"{tensor}_shape, {tensor}_strides"
        if tensor == "out":
            form = "out_shape, out.stride()"
        elif tensor in ("dk", "dv"):
            form = f"list({tensor}.shape), {tensor}.stride()"
        return ArgumentRow(
            names=(f"{tensor}_desc_{number}",),
            type=f"tensordesc<{kernel.dtype}[1, 1, {getattr(kernel.candidate.config, block)}, {width}]>",
            value=f"TensorDescriptor({tensor}, {form}, [1, 1, {block}.value, {width}])",
        )
    rows, layout = "ROWS" if owned_rows else "BLOCK_N", f"{_LAYOUTS[tensor]}_{number}"
    if kernel.family.varlen:
        value = f"descriptor({tensor}, {TENSORS[tensor].columns}, {rows}, {width}, {layout})"
    else:
        box = f"[1, 1, {rows}.value, {width}]"
        value = f"TensorDescriptor({tensor}, {tensor}_shape, {tensor}_strides, {box}, {layout})"
    return ArgumentRow(
        names=(f"{tensor}_desc_{number}",),
        type=f"tensordesc<{kernel.dtype}[{_ones(kernel)}, {{{rows}.value}}, {width}],{{{layout}!r}}>",
        value=value,
    )


def _of_fused(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Descriptors of all that the fused backward reads and writes but counters."""
    family = kernel.family
    seen = "seen" if family.bounded_right else "seqlen_k"
    for name in ("q", "k", "v", "do", "dk", "dv"):
        if kernel.candidate.variant is Variant.HOPPER_WIDE:
            yield from _in_pieces(kernel, name)
            continue
        of_queries = TENSORS[name].rows is Extent.QUERIES
        rows, layout, box = ("BLOCK_M", "Q_TILE", "query_box") if of_queries else ("ROWS", "K_TILE", "key_box")
        shape = f"list({name}.shape)"
        if name in ("k", "v"):
            shape = f"[batch_size, num_kv_heads, {seen}, {TENSORS[name].columns}]"
        value = f"TensorDescriptor({name}, {shape}, {name}.stride(), {box}, {layout})"
        yield ArgumentRow(
            names=(f"{name}_desc",),
            type=f"tensordesc<{kernel.dtype}[{_ones(kernel)}, {{{rows}.value}}, {{COLUMNS.value}}],{{{layout}!r}}>",
            value=f"descriptor({name}, {rows}, {layout})" if family.varlen else value,
        )
    statistics, dq_acc = "list(statistics.shape), statistics.stride()", "list(dq_acc.shape)"
    if family.varlen:
        statistics, dq_acc = "[1, 1, MAX_EXTENT], [4, 4, 1]", "[MAX_EXTENT, DQ_LANES.value]"
    yield ArgumentRow(
        names=("statistics_desc",),
        type="tensordesc<fp32[1, 1, {BLOCK_M.value}],{STATISTICS!r}>",
        value=f"TensorDescriptor(statistics, {statistics}, [1, 1, BLOCK_M.value], STATISTICS)",
    )
    yield ArgumentRow(
        names=("dq_acc_desc",),
        type="tensordesc<fp32[{DQ_ROWS.value}, {DQ_LANES.value}],{DQ_ACC!r}>",
        value=f"TensorDescriptor(dq_acc, {dq_acc}, dq_acc.stride(), [DQ_ROWS.value, DQ_LANES.value], DQ_ACC)",
    )
    if not family.unordered:
        yield _pointer(kernel, "turns")


def _in_pieces(kernel: _Kernel, tensor: str) -> Iterator[ArgumentRow]:
    """Descriptors of a tensor of the fused backward for wide head dims, whose tiles all have 64 rows."""
    shape = f"{tensor}_shape" if tensor in ("k", "v") else f"list({tensor}.shape)"
    for number, piece in enumerate(kernel.pieces_of(tensor)):
        width, layout = piece.width, f"{_LAYOUTS[tensor]}_{number}"
        value = f"TensorDescriptor({tensor}, {shape}, {tensor}.stride(), [1, 1, 64, {width}], {layout})"
        yield ArgumentRow(
            names=(f"{tensor}_desc_{number}",),
            type=f"tensordesc<{kernel.dtype}[{_ones(kernel)}, 64, {width}],{{{layout}!r}}>",
            value=f"descriptor({tensor}, {width}, {layout})" if kernel.family.varlen else value,
        )


def _gluon_tensors(kernel: _Kernel) -> Iterator[ArgumentRow]:
    return _by_descriptors(kernel) if kernel.family.kernel_pass is Pass.FWD else _of_fused(kernel)


_TENSOR_ROWS = {
    Variant.PORTABLE: _pointers,
    Variant.TMA: _by_descriptors,
    Variant.HOPPER_WS: _gluon_tensors,
    Variant.HOPPER_WIDE: _gluon_tensors,
}


def _ones(kernel: _Kernel) -> str:
    """Extents of a tile beside its rows and columns."""
    return "1, 1, 1" if kernel.family.varlen else "1, 1"


# --- single rows, and those of a subject ------------------------------------------------------------------------------


def _number(name: str, kind: str, value: str | None = None) -> ArgumentRow:
    return ArgumentRow(names=(name,), type=kind, value=name if value is None else value)


def _pointer(kernel: _Kernel, tensor: str) -> ArgumentRow:
    """What is contiguous is aligned in every form."""
    element = TENSORS[tensor].element
    is_aligned = kernel.is_aligned or element is not Element.OF_CALL
    return ArgumentRow(
        names=(f"{tensor}_ptr",),
        type=f"*{_FIXED_TYPES.get(element, kernel.dtype)}",
        value=tensor,
        divisor=UNIT_BYTES if is_aligned else None,
        tensor=tensor if tensor == "d_mask" else "",
    )


def _strides(kernel: _Kernel, *tensors: str) -> Iterator[ArgumentRow]:
    """A row for each tensor; not of the batch where there is one, nor of columns that lie side by side."""
    family, is_aligned = kernel.family, kernel.is_aligned
    taken = f"[{1 if family.varlen else ''}:{3 if is_aligned else ''}]"
    for tensor in tensors:
        axes = ("" if family.varlen else "b") + ("hn" if TENSORS[tensor].rows is Extent.KEYS else "hm")
        axes += "" if is_aligned else "d"
        yield ArgumentRow(
            names=tuple(f"stride_{'o' if tensor == 'out' else tensor}{axis}" for axis in axes),
            type="i64",
            value=f"*{tensor}.stride(){taken if taken != '[:]' else ''}",
            divisor=UNIT_BYTES // family.dtype.itemsize if is_aligned else None,
        )


def _feature_tensors(family: AttentionFamily) -> Iterator[ArgumentRow]:
    mask = "i1" if family.bool_mask else SHORT_DTYPES[family.dtype] if family.bias else "fp32"
    types = {"attn_mask": mask, "dropout_seed": "i64"}
    for name in family.feature_tensors:
        is_aligned = name == "attn_mask" and not family.loose_mask
        yield ArgumentRow(
            names=(f"{name}_ptr",),
            type=f"*{types.get(name, 'fp32')}",
            value=name,
            divisor=UNIT_BYTES if is_aligned else None,
            tensor=name,
        )


def _sequence_starts(family: AttentionFamily) -> Iterator[ArgumentRow]:
    for name in family.length_tensors:
        yield ArgumentRow(names=(f"{name}_ptr",), type="*i32", value=name)


def _scales(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """The factor of the scores in the exponent, and what comes before it; in base 2 unless something is added that is
    natural."""
    family = kernel.family
    is_natural = {Pass.FWD: family.has_bias, Pass.BWD_FUSED: False}.get(family.kernel_pass, family.is_shifted)
    to_base_2 = "" if is_natural else " * LOG2_E"
    if family.softcap:
        yield _number("qk_scale", "fp32", f"softcap{to_base_2}")
        yield _number("cap_scale", "fp32", "min(softmax_scale / softcap, 2.0**127)")
    else:
        yield _number("qk_scale", "fp32", f"softmax_scale{to_base_2}")
    if family.dropout:
        threshold = "min(65535, round(dropout_p * 65536))"
        yield _number("dropout_threshold", "i32", threshold)
        yield _number("dropout_scale", "fp32", f"65536 / (65536 - {threshold})")


def _bounds(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Where the keys of a row, or the rows of a key, begin and end."""
    family, owns_keys = kernel.family, kernel.family.kernel_pass.spec.owns_keys
    if family.bounded_right:
        yield _number("diagonal", "i32", f"diagonal{kernel.shift}")
    elif not family.bounded_left and not owns_keys and not kernel.candidate.variant.is_gluon:
        # An argument, that the compiler knows nothing of it: see templates/_forward.py.jinja.
        if family.varlen:
            yield _number("block_n", "i32", "BLOCK_N.value")
        else:
            yield _number("full_end", "i32", "seqlen_k // BLOCK_N.value * BLOCK_N.value")
    if family.bounded_left:
        yield _number("left_diagonal", "i32", f"left_diagonal{kernel.shift}")
    if kernel.shift:
        yield _number("unseen_keys", "i32")
    if family.kernel_pass is Pass.BWD_DKDV and not family.varlen and not _has_one_loop(kernel):
        yield _number("full_end", "i32", "seqlen_q // BLOCK_M.value * BLOCK_M.value")


def _has_one_loop(kernel: _Kernel) -> bool:
    """Whether a kernel of dk or dv masks every block that it visits."""
    family, config = kernel.family, kernel.candidate.config
    is_split = isinstance(config, TmaBwdDkDvConfig) and config.SPLIT_OUTPUTS
    return is_split and (family.bounded_left or family.bounded_right)


def _feature_strides(kernel: _Kernel) -> Iterator[ArgumentRow]:
    family = kernel.family
    elements = UNIT_BYTES // family.mask_itemsize
    for name in family.feature_tensors:
        if name not in ("attn_mask", "dropout_seed"):
            names = (f"stride_{name}_b", f"stride_{name}_h")
            yield ArgumentRow(names=names, type="i64", value=f"*{name}.stride()", tensor=name)
    if family.has_mask:
        axes, taken = ("bhmn", "") if family.loose_mask else ("bhm", "[:3]")
        pairs = f"zip(attn_mask.shape{taken}, attn_mask.stride(){taken}, strict=True)"
        yield ArgumentRow(
            names=tuple(f"stride_attn_mask_{axis}" for axis in axes),
            type="i64",
            value=f"*(0 if size == 1 else stride for size, stride in {pairs})",
            divisor=None if family.loose_mask else elements,
            tensor="attn_mask",
        )
        if not family.loose_mask and not family.bounded_left:
            end = f"-(-seqlen_k // {elements}) * {elements}"  # of whole loads
            yield ArgumentRow(names=("mask_end",), type="i32", value=end, divisor=elements, tensor="attn_mask")
    if family.alibi and not family.varlen:
        yield _number("key_offset", "i32", f"k.shape[2] - seqlen_q{kernel.shift}")


def _counts(kernel: _Kernel) -> Iterator[ArgumentRow]:
    """Extents: of the heads that programs go over, of groups, and of rows."""
    family, owner = kernel.family, "kv" if kernel.family.kernel_pass.spec.owns_keys else "q"
    if family.varlen:
        yield _number("num_sequences", "i32", "cu_seqlens_q.shape[0] - 1")
    else:
        yield _number("batch_heads", "i32", f"batch_size * num_{owner}_heads")
    yield _number(f"num_{owner}_heads", "i32")
    is_plain_forward = family.kernel_pass is Pass.FWD and kernel.candidate.variant is Variant.PORTABLE
    num_kv_heads = "k.shape[1]" if is_plain_forward and not family.varlen else "num_kv_heads"
    yield _number("gqa_group_size", "i32", f"num_q_heads // {num_kv_heads}")
    if family.varlen:
        yield _number("total_q", "i32")
        yield _number("total_k", "i32")
        return
    yield _number("seqlen_q", "i32")
    yield _number("seqlen_k", "i32", f"seqlen_k{kernel.shift}")
    if family.kernel_pass is Pass.BWD_DKDV and family.bounded_right:
        seen = "max(0, min(seqlen_k, seqlen_q + diagonal))"
        is_named = kernel.candidate.variant is not Variant.PORTABLE  # among what `arguments()` knows
        yield _number("seqlen_k_seen", "i32", "seqlen_k_seen" if is_named else seen)
