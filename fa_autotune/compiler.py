"""Compiles generated modules ahead of time, without a GPU, and judges what comes out.

A candidate that spills, does not fit, or lost what its template was written for (wide loads, warps that split query
rows only) never reaches the GPU. Each such check is a gate: a named function that gives a reason, or None.
"""

import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from types import ModuleType, TracebackType
from typing import Any, Self

from fa_autotune.disassembly import disassembled, products_of_unset_addresses, spills_beside_products
from fa_autotune.errors import CompileError, WorkerDied, WorkerTimeout
from fa_autotune.generated import compile_module, load_module
from fa_autotune.paths import triton_cache_dir
from fa_autotune.records import CompileForm, ResourceReport, TrialStatus, Variant
from fa_autotune.worker import WorkerPool

DEFAULT_DEADLINE_S = 120.0
MAX_SPILL_BYTES = 64  # per thread; a few words outside the loop cost nothing that a measurement shows
MAX_SPILL_BYTES_PER_TILE = 256  # the same where the loops' machine code was looked at and none of it spills
TENSOR_MEMORY_COLUMNS = 512
VECTOR_BYTES = 16

_JOBS_PER_PROCESS = 200  # Triton keeps what it compiled
_ERROR_CHARACTERS = 1000  # compilers print pages of intermediate code
_LOG_NAME = "assembler_log.json"
_WORD_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A generated module, the arch to compile it for, and what the gates must know about it."""

    module_path: Path
    arch: str
    form: CompileForm
    variant: Variant
    smem_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What became of a request: OK, COMPILE_FAILED, OVER_RESOURCES, TIMED_OUT or CRASHED.

    `resources` is there whenever the kernel compiled; `error` says why it can't be used, and `gate` which gate said so.
    """

    status: TrialStatus
    resources: ResourceReport | None = None
    error: str | None = None
    gate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledText:
    """What the gates read of a compiled kernel: its TTGIR, its assembly (PTX or AMD GCN), the assembler's log, and the
    binary."""

    ttgir: str
    assembly: str
    log: str
    threads: int
    smem_bytes: int
    tensor_memory_columns: int
    is_nvidia: bool
    binary: bytes
    reads_elements: bool = False  # of a mask that does not lie in whole 16 bytes


Gate = Callable[[CompileRequest, CompiledText, ResourceReport], str | None]


def compile_request(request: CompileRequest) -> CompileResult:
    """Compile a module and put it through the gates: the job of a compile worker. A bad kernel is a result.

    OSError (a cache folder that can't be written, a missing assembler) is raised: it is not the kernel's fault.
    """
    try:
        text, compile_s = _compiled_text(load_module(request.module_path), request.arch)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton, MLIR and the assembler raise all sorts
        return CompileResult(status=TrialStatus.COMPILE_FAILED, error=_brief(error))
    resources = resource_report(text, compile_s)
    for name, gate in GATES:
        if reason := gate(request, text, resources):
            return CompileResult(status=TrialStatus.OVER_RESOURCES, resources=resources, error=reason, gate=name)
    return CompileResult(status=TrialStatus.OK, resources=resources)


def resource_report(text: CompiledText, compile_s: float) -> ResourceReport:
    """Registers, spills and warnings, from the assembler's log (NVIDIA) or the assembly's notes (AMD)."""
    if text.is_nvidia:
        registers = _numbers(r"Used (\d+) registers", text.log)
        spill_bytes = max(_numbers(r"(\d+) bytes spill (?:stores|loads)", text.log), default=0)
        warnings = [line.strip() for line in text.log.splitlines() if re.search(r"warning|\(C\d{4}\)", line)]
    else:
        registers = _numbers(r"\.vgpr_count:\s*(\d+)", text.assembly)
        spill_bytes = max(_numbers(r"\.private_segment_fixed_size:\s*(\d+)", text.assembly), default=0)
        warnings = ["access widths are checked in PTX only, not in this assembly"]
    return ResourceReport(
        registers=max(registers, default=None),
        spill_bytes=spill_bytes,
        smem_bytes=text.smem_bytes,
        compile_s=compile_s,
        warnings=tuple(line[:_ERROR_CHARACTERS] for line in warnings),
    )


# --- gates ------------------------------------------------------------------------------------------------------------


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
        if count:
            return f"{count} instructions spill in loops of matrix products ({resources.spill_bytes} bytes per thread)"
        if count == 0:
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


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


# --- compiling --------------------------------------------------------------------------------------------------------


def _compiled_text(module: ModuleType, arch: str) -> tuple[CompiledText, float]:
    """Compile; also gives the seconds it took, of the first time where Triton's cache has the kernel."""
    from triton import knobs  # noqa: PLC0415 - a second or more to import
    from triton.runtime.cache import get_cache_manager  # noqa: PLC0415 - as above

    kernel, log, compile_s = _compile(module, arch)
    beside_kernel = get_cache_manager(kernel.hash)
    if (known := beside_kernel.get_file(_LOG_NAME)) and not log:
        log, compile_s = json.loads(Path(known).read_text())
    else:
        if not log and "ptx" in kernel.asm:  # cached by a process that kept no log
            with knobs.compilation.scope():
                knobs.compilation.always_compile = True
                kernel, log, compile_s = _compile(module, arch)
        beside_kernel.put(json.dumps([log, compile_s]), _LOG_NAME, binary=False)
    target = kernel.metadata.target
    text = CompiledText(
        ttgir=kernel.asm["ttgir"],
        assembly=kernel.asm["ptx"] if target.backend == "cuda" else kernel.asm["amdgcn"],
        log=log,
        threads=kernel.metadata.num_warps * target.warp_size,
        smem_bytes=kernel.metadata.shared,
        tensor_memory_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        is_nvidia=target.backend == "cuda",
        binary=kernel.asm["cubin"] if target.backend == "cuda" else b"",
        reads_elements="stride_attn_mask_n" in module.SIGNATURE,
    )
    return text, compile_s


def _compile(module: ModuleType, arch: str) -> tuple[Any, str, float]:
    """Triton's compiled kernel, the log of the assembler it ran (empty if it ran none), and the seconds it took.

    Triton runs ptxas with -v and can print what that said, so nothing has to be assembled twice.
    """
    from triton import knobs  # noqa: PLC0415 - a second or more to import

    start = time.perf_counter()
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        kernel = compile_module(module, arch)
    return kernel, log.getvalue(), round(time.perf_counter() - start, 3)


def _brief(error: Exception) -> str:
    """One error as text of bounded length: the end says what is wrong, the start where."""
    text = str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"
    text = text.partition("\nRepro command:")[0].strip()  # a path of this machine, and of a file that is gone
    if len(text) <= _ERROR_CHARACTERS:
        return text
    head, tail = _ERROR_CHARACTERS // 4, 3 * _ERROR_CHARACTERS // 4
    return f"{text[:head]} […] {text[-tail:]}"


# --- the pool ---------------------------------------------------------------------------------------------------------


def compile_environ() -> dict[str, str | None]:
    """What a compiling process's environment must override: no interpreter, and the cache that all processes share."""
    return {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(triton_cache_dir())}


def available_cpus() -> int:
    """CPUs that this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)))


class CompilePool:
    """Compile workers. Equal requests are compiled once; one that hangs or crashes its worker is a result too."""

    def __init__(self, size: int | None = None, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._workers = WorkerPool(
            available_cpus() if size is None else size,
            name="compile",
            environ=compile_environ(),
            max_jobs=_JOBS_PER_PROCESS,
        )
        self._futures: dict[CompileRequest, Future[CompileResult]] = {}
        self._lock = Lock()

    def submit(self, request: CompileRequest) -> Future[CompileResult]:
        """Start compiling, or find the same request already under way or done."""
        with self._lock:
            known = self._futures.get(request)
            if known is None or known.cancelled():
                known = self._workers.submit(
                    compile_request, request, deadline_s=self._deadline_s, recover=_result_of_failure
                )
                self._futures[request] = known
            return known

    def close(self, *, cancel: bool = True) -> None:
        """Stop the workers, with `cancel` in the middle of what they do."""
        self._workers.close(cancel=cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def _result_of_failure(error: Exception) -> CompileResult:
    if isinstance(error, WorkerTimeout):
        return CompileResult(status=TrialStatus.TIMED_OUT, error=_brief(error))
    if isinstance(error, WorkerDied):
        return CompileResult(status=TrialStatus.CRASHED, error=_brief(error))
    raise error
