"""Load generated kernels and call them; where torch is asked about the live GPU.

On a GPU the kernel compiled ahead is launched on the tensors' device and its current stream. In a process started with
TRITON_INTERPRET=1, CPU tensors run through Triton's interpreter instead, which is not thread-safe and rounds bfloat16
wrongly: a lock and a shim see to both.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fa_autotune.device import INTERPRETER, DeviceSpec, Toolchain, nearest_memory_gb
from fa_autotune.errors import CompileError, FaAutotuneError, LaunchError
from fa_autotune.family import Pass
from fa_autotune.generated import candidates_dir, compile_module, load_module, write_module
from fa_autotune.paths import interpreting
from fa_autotune.records import Candidate
from fa_autotune.render import render
from fa_autotune.scratch import SLOT_INTS, prepare_scratch, scratch_of

MAX_GRID = 2**31 - 1
MAX_ERROR_CHARACTERS = 1000  # compilers print pages of intermediate code
Answer = TypeVar("Answer")

_interpreter_lock = threading.Lock()
_thread = threading.local()


def live_device(index: int = 0) -> DeviceSpec:
    """The spec of a live GPU; the interpreter's in a process that interprets kernels.

    FaAutotuneError if there is no such GPU.
    """
    if interpreting():
        return INTERPRETER
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise FaAutotuneError(
            f"there is no GPU {index}: torch {torch.__version__} sees {count or 'none'}; "
            "`fa-autotune doctor` says what is missing"
        )
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack some of its attributes
    if torch.version.hip:
        return DeviceSpec(
            name=properties.name,
            arch=properties.gcnArchName.split(":")[0],
            num_sms=properties.multi_processor_count,
            smem_optin_bytes=65536,
            smem_per_sm_bytes=65536,
            l2_bytes=properties.L2_cache_size,
            memory_gb=nearest_memory_gb(properties.total_memory),
            regs_per_sm=131072,
            warp_size=64,
        )
    return DeviceSpec(
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        smem_optin_bytes=properties.shared_memory_per_block_optin,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        l2_bytes=properties.L2_cache_size,
        memory_gb=nearest_memory_gb(properties.total_memory),
        regs_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
        power_limit_w=_power_limit_w(index),
    )


def live_toolchain() -> Toolchain:
    """The versions that compile and run kernels here."""
    import triton  # noqa: PLC0415

    return Toolchain(
        triton=triton.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        driver=_driver_version(),
        torch=torch.__version__,
    )


def gpu_uuid(index: int) -> str:
    """The UUID of a live GPU, as text."""
    return str(torch.cuda.get_device_properties(index).uuid)


# Which of its tensors has the rows that a kernel's programs own, where it is not the first.
OWNERS = {Pass.BWD_DKDV: 1, Pass.BWD_FUSED: 1, Pass.BWD_POSTPROCESS: 1}
# How many tensors come before those of a family's features, in the passes that serve sequences in a row.
_TENSORS_BEFORE = {
    Pass.FWD: 5,
    Pass.BWD_DKDV: 8,
    Pass.BWD_DQ: 7,
    Pass.BWD_PREPROCESS: 5,
    Pass.BWD_FUSED: 9,
    Pass.BWD_POSTPROCESS: 2,
}


class LoadedKernel:
    """A candidate's kernel, ready to be called on one device."""

    def __init__(self, candidate: Candidate, module_path: Path, arch: str, device_index: int | None = None) -> None:
        """Import a candidate's generated module and compile its kernel, or find it in Triton's cache. CompileError.

        The binary is put on GPU `device_index` now; without one, on the GPU of the first call, when that comes.
        """
        self.candidate = candidate
        self.module: ModuleType = load_module(module_path)
        self._owner = OWNERS.get(candidate.family.kernel_pass, 0)
        self.compiled: Any = None if interpreting() else compile_module(self.module, arch)  # Triton's CompiledKernel
        self.run = _interpreted(self.module) if interpreting() else _compiled(self.compiled)
        # Persistent kernels have a program per SM and take a tile counter.
        self.is_persistent = hasattr(self.module, "SCRATCH_INTS")
        assert getattr(self.module, "SCRATCH_INTS", 0) <= SLOT_INTS
        if self.compiled is not None and device_index is not None:
            if self.is_persistent:
                prepare_scratch(device_index)
            with torch.cuda.device(device_index):
                _ = self.compiled.run  # Triton builds the launcher and loads the binary when this is first read

    def __call__(self, *values: Any) -> None:
        """Run the kernel on what its module's `arguments` takes, which is for each pass

        fwd: q, k, v, out, lse, *tensors, softmax_scale, diagonal, *numbers, and out and lse are written;
        bwd_delta: out, do, delta, and delta is written;
        bwd_dkdv: q, k, v, do, lse, delta, dk, dv, *tensors, softmax_scale, diagonal, *numbers, and dk, dv are written;
        bwd_dq: q, k, v, do, lse, delta, dq, *tensors, softmax_scale, diagonal, *numbers, and dq is written;
        bwd_preprocess: out, do, lse, statistics, turns, *tensors, and the last two are written;
        bwd_fused: q, k, v, do, statistics, turns, dk, dv, dq_acc, *tensors, softmax_scale, diagonal, *numbers, and dk,
        dv and dq_acc are written (an unordered kernel adds to dq_acc), and turns is 0 again;
        bwd_postprocess: dq_acc, dq, *tensors, softmax_scale, diagonal, *numbers, and dq is written.

        *tensors and *numbers: a family's `feature_tensors`, fp32 (batch, num_q_heads), then its `length_tensors`, int32
        (sequences + 1), where the batch is that of the sequences and 1 for all else; and its `feature_numbers`. Others
        are (batch, heads, seqlen, head_dim), none of them empty; lse and delta are contiguous fp32 (batch,
        num_q_heads, seqlen_q), lse in natural log; what the fused backward's kernels hand on has the sizes of
        `fused_workspace`. The kernel runs on the tensors' device and its current stream.
        """
        owner: Tensor = values[self._owner]
        grid = self.grid(*values)
        if owner.is_cuda:
            bind_thread(owner.device.index)
        arguments = self.module.arguments(*values, *self.scratch(owner.device))
        if owner.is_cuda and owner.device.index != torch.cuda.current_device():
            with torch.cuda.device(owner.device):
                self.run(grid, arguments)
        else:
            self.run(grid, arguments)

    def grid(self, *values: Any) -> tuple[int, ...]:
        """The programs of a call with these values; LaunchError if a launch can't take that many."""
        owner: Tensor = values[self._owner]
        num_sms = (num_sms_of(owner.device.index),) if self.is_persistent else ()
        batch_size, family = owner.shape[0], self.candidate.family
        if family.varlen:
            cu_seqlens: Tensor = values[_TENSORS_BEFORE[family.kernel_pass] + len(family.feature_tensors)]
            batch_size = cu_seqlens.shape[0] - 1
        return self.grid_of(batch_size, owner.shape[1], owner.shape[2], *num_sms)

    def grid_of(self, batch_size: int, num_heads: int, length: int, *num_sms: int) -> tuple[int, ...]:
        """The programs for tensors of such extents; of sequences in a row: their number, and all rows of a head."""
        grid: tuple[int, ...] = self.module.grid(batch_size, num_heads, length, *num_sms)
        if grid[0] > MAX_GRID:
            raise LaunchError(f"{grid[0]} programs, a launch takes at most {MAX_GRID}: split the batch")
        return grid

    def scratch(self, device: torch.device) -> tuple[Tensor, ...]:
        """What a launch on a device's current stream takes after a call's values: a tile counter, or nothing."""
        return (scratch_of(device.index),) if self.is_persistent else ()


@cache
def num_sms_of(index: int) -> int:
    """How many streaming multiprocessors a GPU has."""
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def bind_thread(index: int) -> None:
    """`make_context_current`, once in each thread."""
    if not getattr(_thread, "bound", False):
        make_context_current(index)
        _thread.bound = True


def make_context_current(index: int) -> None:
    """Give this thread a GPU's context: one that has not used CUDA yet has none, and Triton encodes tensor descriptors
    through the driver, which needs it."""
    if not torch.cuda.is_current_stream_capturing():  # a thread that captures has a context
        torch.cuda.mem_get_info(index)


def load_kernel(candidate: Candidate, arch: str, device_index: int | None = None) -> LoadedKernel:
    """Render a candidate, write its module to the cache folder and load it; TemplateError, CompileError."""
    path = write_module(render(candidate), candidates_dir())
    try:
        return LoadedKernel(candidate, path, arch, device_index)
    except FaAutotuneError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        raise CompileError(
            f"the {candidate.variant} kernel of {candidate.family.label} does not compile or load for {arch}: {text}; "
            f"it is {path}, and `fa-autotune doctor` says what may be missing"
        ) from error


def _compiled(compiled: Any) -> Callable[[tuple[int, ...], Sequence[Any]], None]:
    def run(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        compiled[grid](*arguments)

    return run


def _interpreted(module: ModuleType) -> Callable[[tuple[int, ...], Sequence[Any]], None]:
    import numpy  # noqa: PLC0415 - Triton's interpreter brings it

    install_interpreter_shim()

    def run(grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        # log2(0), inf − inf and a row of NaN have defined results in a kernel; numpy would warn, and of Triton 3.6.
        with _interpreter_lock, numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            module.KERNEL[grid](*arguments)

    return run


@cache
def install_interpreter_shim() -> None:
    """Make Triton's interpreter treat bfloat16 as a GPU does.

    Triton 3.6 and 3.7 keep bfloat16 as raw 16-bit integers there, multiply those integers in `dot`, and truncate on the
    way from fp32. Here dot operands are widened to fp32 first and casts round to nearest even.
    """
    import numpy  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    def widen(data: Any) -> Any:
        return (data.astype(numpy.uint32) << 16).view(numpy.float32)

    def narrow(data: Any) -> Any:
        bits = numpy.ascontiguousarray(data).view(numpy.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
        quiet_nan = ((bits >> 16) | 0x40).astype(numpy.uint16)
        return numpy.where(numpy.isnan(data), quiet_nan, rounded)

    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def operand(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(widen(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, operand(a), operand(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrow(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Clock, power and temperature of a GPU at one moment."""

    sm_clock_mhz: int
    power_w: float
    temperature_c: int


def gpu_state(index: int) -> GpuState | None:
    """What the driver says of a GPU now; None where it says nothing (no NVIDIA GPU, or not allowed to)."""

    def read(nvml: Any) -> GpuState:
        handle = nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(index))
        return GpuState(
            sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )

    return _ask_nvml(read)


def _nvml_uuid(index: int) -> str:
    uuid = gpu_uuid(index)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _power_limit_w(index: int) -> float | None:
    def read(nvml: Any) -> float:
        handle = nvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(index))
        return float(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1000

    return _ask_nvml(read)


def _driver_version() -> str | None:
    return _ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def _ask_nvml(question: Callable[[Any], Answer]) -> Answer | None:
    """The answer, or None where the driver's management library is absent or refuses: all of it is provenance."""
    import pynvml  # noqa: PLC0415

    try:
        pynvml.nvmlInit()  # counted by the library: cheap after the first call, and kept open for the process
        return question(pynvml)
    except pynvml.NVMLError:
        return None
