"""How busy and how full a GPU is: read from a stand-in of the driver's library and of torch.cuda; none is here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshbook.system import devices
from meshbook.system.devices import GpuGauge, GpuUse, NvmlDevice

GB = 1 << 30


class FakeNvml:
    """The four functions that are called, with the structures of libnvidia-ml."""

    def __init__(self, *, tells_use: bool = True, tells_memory: bool = True) -> None:
        self.asked: list[bytes] = []
        self._tells_use, self._tells_memory = tells_use, tells_memory

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked.append(uuid)
        return 0 if uuid == b"GPU-1234" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, into: Any) -> int:
        memory = ctypes.cast(into, ctypes.POINTER(devices._Memory)).contents
        memory.total, memory.free, memory.used = 80 * GB, 60 * GB, 20 * GB
        return 0 if self._tells_memory else 3

    def nvmlDeviceGetUtilizationRates(self, handle: Any, into: Any) -> int:
        ctypes.cast(into, ctypes.POINTER(devices._Utilization)).contents.gpu = 87
        return 0 if self._tells_use else 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch in a process that uses a device of 80 GB."""
    monkeypatch.setattr(devices, "run_in_background", lambda job: job())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GB, 80 * GB))


def test_the_drivers_library_tells_of_the_whole_device_and_torch_of_the_rank(
    cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "load_nvml", FakeNvml)
    assert GpuGauge("cuda:0").last() == GpuUse(87, 20 * GB, 80 * GB, 3 * GB)


def test_without_the_library_torch_tells_what_it_knows(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libnvidia-ml.so.1")

    monkeypatch.setattr(devices, "load_nvml", missing)
    assert GpuGauge("cuda:0").last() == GpuUse(-1, 10 * GB, 80 * GB, 3 * GB)


def test_a_part_of_a_device_tells_its_memory_only() -> None:
    device = NvmlDevice.find("GPU-1234", FakeNvml(tells_use=False))
    assert device is not None and device.read() == (-1, 20 * GB, 80 * GB)


def test_an_unknown_device_and_a_refusing_library_tell_nothing() -> None:
    assert NvmlDevice.find("GPU-9", FakeNvml()) is None
    device = NvmlDevice.find("GPU-1234", FakeNvml(tells_memory=False))
    assert device is not None and device.read() is None


def test_a_rank_on_the_cpu_has_none_and_none_is_read_before_cuda_is_in_use() -> None:
    assert GpuGauge("cpu").last() is None
    assert torch.cuda.is_initialized() or GpuGauge("cuda:0").last() is None


def test_a_lost_device_is_no_error(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: str) -> int:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lost)
    assert GpuGauge("cuda:0").last() is None
