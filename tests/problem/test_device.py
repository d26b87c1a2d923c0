"""Devices: identity and the table of known GPUs."""

from dataclasses import replace

import pytest

from fa_autotune.errors import FaAutotuneError
from fa_autotune.problem.device import INTERPRETER, KNOWN_DEVICES, DeviceSpec, known_device, nearest_memory_gb


def test_the_fingerprint_is_this_text_for_ever() -> None:
    assert KNOWN_DEVICES["h200"].fingerprint == "sm_90/132sm/227KB/60MB/141GB"


@pytest.mark.parametrize("change", [{"name": "H200 of another vendor"}, {"power_limit_w": 500.0}])
def test_provenance_is_no_part_of_the_fingerprint(change: dict[str, object]) -> None:
    h200 = KNOWN_DEVICES["h200"]
    assert replace(h200, **change).fingerprint == h200.fingerprint


def test_known_gpus_have_different_fingerprints() -> None:
    known = [*KNOWN_DEVICES.values(), INTERPRETER]
    assert len({device.fingerprint for device in known}) == len(known)


# MiB as the driver's tools print them for these cards.
@pytest.mark.parametrize(
    ("short_name", "total_mib"),
    [
        ("t4", 15_360),
        ("a10", 23_028),
        ("a100", 81_920),
        ("l4", 23_034),
        ("l40s", 46_068),
        ("rtx3090", 24_576),
        ("rtx4090", 24_564),
        ("rtx5090", 32_607),
        ("h100", 81_559),
        ("h200", 143_771),
        ("b200", 183_359),
    ],
)
def test_reported_memory_gives_the_size_in_the_table(short_name: str, total_mib: int) -> None:
    assert nearest_memory_gb(total_mib * 2**20) == KNOWN_DEVICES[short_name].memory_gb


@pytest.mark.parametrize("spelling", ["h200", "H200", "RTX 4090", "rtx-4090", "rtx_4090"])
def test_spellings_of_a_known_gpu_are_found(spelling: str) -> None:
    assert known_device(spelling) in KNOWN_DEVICES.values()


def test_an_unknown_gpu_error_lists_the_known_ones() -> None:
    with pytest.raises(FaAutotuneError, match=r"'voodoo2' is not a known GPU.*h200"):
        known_device("voodoo2")


@pytest.mark.parametrize(("device", "capability"), [("h200", 90), ("rtx5090", 120), ("mi300x", None)])
def test_capability_is_that_of_nvidia_gpus(device: str, capability: int | None) -> None:
    assert KNOWN_DEVICES[device].capability == capability


@pytest.mark.parametrize("device", [*KNOWN_DEVICES.values(), INTERPRETER], ids=lambda device: device.arch)
def test_a_block_gets_no_more_shared_memory_than_its_sm_has(device: DeviceSpec) -> None:
    assert 0 < device.smem_optin_bytes <= device.smem_per_sm_bytes
