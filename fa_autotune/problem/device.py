"""What a kernel runs on: the GPU's identity and limits, and the toolchain that compiled it.

A DeviceSpec comes from the live GPU (`kernels.gpu.live_device`) or from `KNOWN_DEVICES`, so kernels for a GPU that is
not present can be rendered, screened and compiled. Its fingerprint is what makes two GPUs the same to the tuner; name
and power limit are provenance.
"""

import re
from dataclasses import dataclass

from fa_autotune.errors import FaAutotuneError, UnsupportedError

# What vendors call GB are GiB here: total_memory as drivers report it is a little below one, and differs by driver.
_STANDARD_MEMORY_GB = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 256, 288)
INTERPRETER_ARCH = "interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One GPU model as the tuner sees it. Sizes in bytes; `arch` is `sm_90`, `gfx942` or `interpreter`."""

    name: str
    arch: str
    num_sms: int
    smem_optin_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    memory_gb: int
    regs_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    warp_size: int = 32
    power_limit_w: float | None = None

    @property
    def fingerprint(self) -> str:
        """Identity: arch, SM count, shared memory a block may opt into, L2, nearest standard memory size."""
        smem_kb, l2_mb = self.smem_optin_bytes // 1024, round(self.l2_bytes / 2**20)
        return f"{self.arch}/{self.num_sms}sm/{smem_kb}KB/{l2_mb}MB/{self.memory_gb}GB"

    @property
    def capability(self) -> int | None:
        """90 for sm_90; None where the device is not an NVIDIA GPU."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else None


def nearest_memory_gb(total_bytes: int) -> int:
    """The standard memory size, as on the label, nearest to what the driver reports."""
    return min(_STANDARD_MEMORY_GB, key=lambda size: abs(size * 2**30 - total_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What turned a generated kernel into code. `torch` is provenance; the others decide whether a row is stale."""

    triton: str
    cuda: str | None = None
    driver: str | None = None
    torch: str | None = None

    @property
    def triton_release(self) -> str:
        """Triton's major and minor version, such as 3.7: a patch of a release compiles as the release does."""
        return triton_release(self.triton)


def _nvidia(
    name: str, arch: str, sms: int, optin_kb: int, per_sm_kb: int, l2_mb: int, memory: int, threads: int
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        arch=arch,
        num_sms=sms,
        smem_optin_bytes=optin_kb * 1024,
        smem_per_sm_bytes=per_sm_kb * 1024,
        l2_bytes=l2_mb * 2**20,
        memory_gb=memory,
        max_threads_per_sm=threads,
    )


# Shared memory and thread limits: CUDA C++ programming guide, table of compute capabilities. SMs, L2 and memory: the
# vendors' data sheets, L2 as the CUDA runtime reports it.
KNOWN_DEVICES: dict[str, DeviceSpec] = {
    "t4": _nvidia("Tesla T4", "sm_75", 40, 64, 64, 4, 16, 1024),
    "a10": _nvidia("NVIDIA A10", "sm_86", 72, 99, 100, 6, 24, 1536),
    "a100": _nvidia("NVIDIA A100-SXM4-80GB", "sm_80", 108, 163, 164, 40, 80, 2048),
    "l4": _nvidia("NVIDIA L4", "sm_89", 58, 99, 100, 48, 24, 1536),
    "l40s": _nvidia("NVIDIA L40S", "sm_89", 142, 99, 100, 96, 48, 1536),
    "rtx3090": _nvidia("NVIDIA GeForce RTX 3090", "sm_86", 82, 99, 100, 6, 24, 1536),
    "rtx4090": _nvidia("NVIDIA GeForce RTX 4090", "sm_89", 128, 99, 100, 72, 24, 1536),
    "rtx5090": _nvidia("NVIDIA GeForce RTX 5090", "sm_120", 170, 99, 100, 96, 32, 1536),
    "h100": _nvidia("NVIDIA H100 80GB HBM3", "sm_90", 132, 227, 228, 50, 80, 2048),
    "h200": _nvidia("NVIDIA H200", "sm_90", 132, 227, 228, 60, 141, 2048),
    "b200": _nvidia("NVIDIA B200", "sm_100", 148, 227, 228, 126, 180, 2048),
    "mi300x": DeviceSpec(
        name="AMD Instinct MI300X",
        arch="gfx942",
        num_sms=304,
        smem_optin_bytes=64 * 1024,
        smem_per_sm_bytes=64 * 1024,
        l2_bytes=4 * 2**20,
        memory_gb=192,
        regs_per_sm=131072,
        warp_size=64,
    ),
}

# Kernels "on" this device run in Triton's interpreter: a check of the pipeline, never a speed. No GPU uses its rows.
INTERPRETER = DeviceSpec(
    name="Triton interpreter",
    arch=INTERPRETER_ARCH,
    num_sms=1,
    smem_optin_bytes=227 * 1024,
    smem_per_sm_bytes=228 * 1024,
    l2_bytes=0,
    memory_gb=0,
)


def known_device(name: str) -> DeviceSpec:
    """Look a GPU up by its short name, such as `h200`; FaAutotuneError lists the names otherwise."""
    try:
        return KNOWN_DEVICES[name.lower().replace("-", "").replace(" ", "").replace("_", "")]
    except KeyError:
        raise FaAutotuneError(f"{name!r} is not a known GPU; known are: {', '.join(KNOWN_DEVICES)}") from None


def triton_release(version: str) -> str:
    """`3.7` for `3.7.1+cu130`; what is no version stays as it is, equal to itself alone."""
    match = re.match(r"[0-9]{1,9}\.[0-9]{1,9}(?![0-9])", version)
    return match[0] if match else version


def parse_triton_version(version: str) -> tuple[int, int]:
    """(3, 7) for `3.7.1`; UnsupportedError if the text is no version."""
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    if match is None:
        raise UnsupportedError(f"Triton version {version!r} is not like 3.7.1; reinstall Triton")
    return int(match[1]), int(match[2])
