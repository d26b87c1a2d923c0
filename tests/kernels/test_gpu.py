"""The live GPU: what is read of torch's and the driver's answers, and what where they give none."""

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from fa_autotune.errors import FaAutotuneError
from fa_autotune.kernels import gpu
from fa_autotune.kernels.gpu import GpuState, bind_thread, gpu_state, gpu_uuid, live_device, live_toolchain, num_sms_of
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES

H200, MI300X = KNOWN_DEVICES["h200"], KNOWN_DEVICES["mi300x"]
UUID = "1b2f-33"
NVIDIA = SimpleNamespace(
    name=H200.name,
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=60 * 2**20,
    total_memory=143_771 * 2**20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    uuid=UUID,
)
AMD = SimpleNamespace(
    name=MI300X.name,
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    L2_cache_size=4 * 2**20,
    total_memory=191 * 2**30,
    uuid=UUID,
)


class FakeDriver:
    """The driver's management library of one GPU, found by its UUID."""

    NVML_CLOCK_SM = "sm"
    NVML_TEMPERATURE_GPU = "gpu"
    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: str) -> int:
        return {"sm": 1980}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 651_500

    def nvmlDeviceGetTemperature(self, handle: str, kind: str) -> int:
        return {"gpu": 61}[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with two GPUs, the second an H200."""
    fake = FakeDriver()
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {1: NVIDIA}[index])
    for name in dir(FakeDriver):
        if "nvml" in name.lower():
            monkeypatch.setattr(pynvml, name, getattr(fake, name))
    return fake


@pytest.fixture
def silent_driver(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but the driver refuses to answer."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)


def test_an_nvidia_gpu_is_what_torch_says_and_its_power_limit_is_the_drivers(driver: FakeDriver) -> None:
    found = live_device(1)
    assert found.fingerprint == H200.fingerprint
    assert (found.name, found.power_limit_w, found.warp_size) == (H200.name, 700.0, 32)
    assert driver.asked == [f"GPU-{UUID}"]  # as the driver writes it


def test_a_driver_that_does_not_answer_leaves_the_gpu_as_it_is(silent_driver: None) -> None:
    found = live_device(1)
    assert (found.fingerprint, found.power_limit_w) == (H200.fingerprint, None)
    assert gpu_state(1) is None
    assert live_toolchain().driver is None


def test_an_amd_gpu_has_waves_of_64_and_an_arch_without_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: AMD)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = live_device()
    assert (found.arch, found.warp_size) == ("gfx942", 64)
    assert found.fingerprint == MI300X.fingerprint


@pytest.mark.parametrize("index", [2, -1])
def test_a_gpu_that_is_not_there_is_an_error_with_a_next_step(index: int, driver: FakeDriver) -> None:
    with pytest.raises(FaAutotuneError, match=rf"there is no GPU {index}: torch .* sees 2; `fa-autotune doctor` says"):
        live_device(index)


def test_a_process_that_interprets_has_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreting", lambda: True)
    assert live_device(7) is INTERPRETER


def test_the_drivers_figures_have_their_units(driver: FakeDriver) -> None:
    assert gpu_state(1) == GpuState(sm_clock_mhz=1980, power_w=651.5, temperature_c=61)
    assert (live_toolchain().driver, live_toolchain().torch) == ("580.65", torch.__version__)


def test_a_uuid_is_read_with_or_without_its_prefix(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixed = SimpleNamespace(**{**vars(NVIDIA), "uuid": f"GPU-{UUID}"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: prefixed)
    assert gpu_uuid(1) == f"GPU-{UUID}"
    gpu_state(1)
    assert driver.asked == [f"GPU-{UUID}"]


def test_multiprocessors_are_counted_once(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    num_sms_of.cache_clear()
    assert num_sms_of(1) == 132
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("asked again"))
    assert num_sms_of(1) == 132
    num_sms_of.cache_clear()


@pytest.mark.parametrize("capturing", [False, True])
def test_each_thread_gets_a_gpus_context_once_and_none_inside_a_capture(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(gpu, "_thread", threading.local())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)

    def twice() -> None:
        bind_thread(3)
        bind_thread(3)

    for _ in range(2):
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()
    assert asked == ([] if capturing else [3, 3])
