"""The live GPU: what torch and the driver say of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from fa_autotune.errors import FaAutotuneError
from fa_autotune.paths import interpreting
from fa_autotune.problem.device import INTERPRETER, DeviceSpec, Toolchain, nearest_memory_gb

Answer = TypeVar("Answer")


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
