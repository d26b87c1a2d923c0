"""Gates: named checks of a compiled kernel, each of which gives a reason why it may not run, or None."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fa_autotune.kernels.modules import ModuleFile
from fa_autotune.kernels.sass import disassembled, products_of_unset_addresses, spills_beside_products
from fa_autotune.kernels.triton_private import CompiledParts
from fa_autotune.records import ResourceReport
from fa_autotune.space.candidate import CompileForm, Variant

MAX_SPILL_BYTES = 64  # per thread; a few words outside the loop cost nothing that a measurement shows


MAX_SPILL_BYTES_PER_TILE = 256  # the same where the loops' machine code was looked at and hardly spills
MAX_SPILLS_BESIDE_PRODUCTS = 8  # instructions in these loops: so few run while products do, and a measurement decides


TENSOR_MEMORY_COLUMNS = 512


VECTOR_BYTES = 16


_WORD_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A generated module, the arch to compile it for, and what the gates must know about it."""

    module: ModuleFile
    arch: str
    form: CompileForm
    variant: Variant
    smem_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledText(CompiledParts):
    """What the gates read of a compiled kernel: its parts, and the assembler's log."""

    log: str
    reads_elements: bool = False  # of a mask that does not lie in whole 16 bytes


Gate = Callable[[CompileRequest, CompiledText, ResourceReport], str | None]


def shared_memory(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The kernel fits the shared memory that a block may opt into."""
    need, limit = resources.smem_bytes, request.smem_limit_bytes
    return None if need <= limit else f"needs {need} bytes of shared memory, {request.arch} offers {limit}"


def tensor_memory(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The kernel fits the tensor memory of Blackwell's matrix units."""
    need = text.tensor_memory_columns
    return None if need <= TENSOR_MEMORY_COLUMNS else f"needs {need} tensor memory columns of {TENSOR_MEMORY_COLUMNS}"


def spills(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The kernel keeps its values in registers; on Hopper it may spill more outside of its loops of matrix products."""
    limit = MAX_SPILL_BYTES
    if request.variant.is_gluon:
        is_worth_a_look = resources.spill_bytes > 0
    else:
        is_worth_a_look = request.arch == "sm_90" and limit < resources.spill_bytes <= MAX_SPILL_BYTES_PER_TILE
    if is_worth_a_look and (sass := disassembled(text.binary)):
        count = spills_beside_products(sass)
        if count is not None and count > MAX_SPILLS_BESIDE_PRODUCTS:
            return f"{count} instructions spill in loops of matrix products ({resources.spill_bytes} bytes per thread)"
        if count is not None:
            limit = MAX_SPILL_BYTES_PER_TILE
    if resources.spill_bytes <= limit:
        return None
    return f"spills {resources.spill_bytes} bytes per thread, at most {limit} are let through"


def wgmma_serialized(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The assembler let Hopper's matrix products run asynchronously."""
    serialized = re.search(r"\((C751[0-5])\)", text.log)
    return f"the assembler serialized wgmma ({serialized[1]})" if serialized else None


def set_addresses(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """Matrix products know where their operands are: the assembler may compute an address for two loops ahead of the
    first, and use it also where that one is skipped and with it the computation."""
    if not request.variant.is_gluon:
        return None
    count = products_of_unset_addresses(disassembled(text.binary) or "")
    return f"{count} matrix products take an address from a register that may be unset" if count else None


def score_layout(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """Warps split the query rows: nothing that is reduced along a row crosses warps, so the softmax needs no merge.

    A kernel without matrix products (delta) has no softmax, and a tensor of one axis no rows.
    """
    if not _PRODUCT.search(text.ttgir):
        return None
    layouts = {match[1]: match[2] for match in _LAYOUT.finditer(text.ttgir)}
    for match in _REDUCTION.finditer(text.ttgir):
        axis, shape, layout = int(match[1]), match[2], layouts.get(match[3], "")
        if "x" in shape and (warps := _warps_along(layout, axis)) > 1:
            return f"{warps} warps share a row of scores; more rows or fewer warps avoid it"
    return None


def vector_access(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The aligned form reads units of 16 bytes, or what a small tile has for each thread; tma reads by descriptors."""
    if not text.is_nvidia or request.form is not CompileForm.ALIGNED:
        return None
    if request.variant is Variant.TMA or request.variant.is_gluon:
        return None if "cp.async.bulk.tensor" in text.assembly else "no tensor descriptor load was generated"
    tiles = [prod(map(int, m[1].split("x"))) * _WORD_BYTES.get(m[2], 1) for m in _TILE_LOAD.finditer(text.ttgir)]
    if not tiles:
        return None
    expected = min(VECTOR_BYTES, min(tiles) // text.threads)
    if _BOOL_TILE.search(text.ttgir):
        expected = min(expected, VECTOR_BYTES // 2)  # its threads may have the 8 columns that 16 bits give them
    widths = _load_widths(text.assembly)
    if text.reads_elements:
        widths = Counter({width: count for width, count in widths.items() if width > max(_WORD_BYTES.values())})
    if widths[8] <= len(_SEED_LOAD.findall(text.ttgir)):
        del widths[8]
    if widths[4] <= len(_SCALAR_LOAD.findall(text.ttgir)):  # a head's slope or sink, where a sequence starts
        del widths[4]
    narrowest = min(widths.keys() - _row_widths(text), default=VECTOR_BYTES)
    return None if narrowest >= expected else f"reads global memory in units of {narrowest} bytes, not {expected}"


def added_dq(request: CompileRequest, text: CompiledText, resources: ResourceReport) -> str | None:
    """The fused backward adds dq up through a descriptor."""
    if _FUSED not in text.assembly or "cp.reduce.async.bulk.tensor" in text.assembly:
        return None
    return "no addition through a tensor descriptor was generated"


GATES: tuple[tuple[str, Gate], ...] = (
    ("shared_memory", shared_memory),
    ("tensor_memory", tensor_memory),
    ("spills", spills),
    ("wgmma_serialized", wgmma_serialized),
    ("set_addresses", set_addresses),
    ("score_layout", score_layout),
    ("vector_access", vector_access),
    ("added_dq", added_dq),
)


_FUSED = ".entry attention_bwd_fused("


_PRODUCT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)")


_REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+).*?\}\) : \(tensor<([\dx]+)x\w+, #(\w+)', re.DOTALL)


_TILE_LOAD = re.compile(r"(?:tt\.load|ttg\.async_copy_global_to_local) .*: tensor<(\d+(?:x\d+)+)x!tt\.ptr<(\w+)>")


_ROW_LOAD = re.compile(r"(?:tt\.load|ttg\.async_copy_global_to_local) .*: tensor<(\d+)x!tt\.ptr<[fi]32>")


_BOOL_TILE = re.compile(r"(?:tt\.load|ttg\.async_copy_global_to_local) .*: tensor<\d+x\d+x!tt\.ptr<i8>")


_SEED_LOAD = re.compile(r"tt\.load .*: !tt\.ptr<i64>")


_SCALAR_LOAD = re.compile(r"tt\.load .*: !tt\.ptr<[fi]32>")


_LAYOUT = re.compile(r"^#(\w+) = (#ttg\.(?:blocked|linear|nvidia_mma|amd_mfma)<.*>)$", re.MULTILINE)


_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x[0-9a-f]+|\d+)")


_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bsuf](\d+)\s")


def _warps_along(layout: str, axis: int) -> int:
    """Warps that share one row along an axis; 1 for a layout of a kind that says nothing about warps."""
    if match := re.search(r"warpsPerCTA = \[([\d, ]+)\]", layout):
        return int(match[1].split(", ")[axis])
    if match := re.search(r"warp = \[(.*?)\], block", layout):
        bases = re.findall(r"\[([\d, ]+)\]", match[1])
        shared: int = 1 << sum(basis.split(", ")[axis] != "0" for basis in bases)
        return shared
    return 1


def _load_widths(ptx: str) -> Counter[int]:
    """Bytes of each kind of load from global memory, with the number of such loads."""
    copies = Counter(int(match[1], 0) for match in _COPY.finditer(ptx))
    return copies + Counter(int(match[1] or 1) * int(match[2]) // 8 for match in _LOAD.finditer(ptx))


def _row_widths(text: CompiledText) -> set[int]:
    """Bytes by which lse, delta and the starts of sequences may be read: one by one, or as many as a thread has."""
    lengths = [int(match[1]) for match in _ROW_LOAD.finditer(text.ttgir)]
    return {width for length in lengths for width in (4, max(4, min(VECTOR_BYTES, 4 * length // text.threads)))}
