"""How busy and how full the GPU of a rank is.

The driver's management library (NVML) tells of the whole device; torch tells what this process has reserved of it.
Both may block while the driver is in trouble, and whoever asks is the thread that hears interrupts: readings are made
aside, and the last one is told. Nothing here makes a CUDA context.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any, NamedTuple

from meshbook.concurrency.background import run_in_background
from meshbook.formatting import format_bytes

OLD_S = 0.5
"""A reading older than this is made anew."""


class GpuUse(NamedTuple):
    """One device at one moment, as one of the processes on it sees it."""

    busy_percent: int
    """Share of the last second or so in which it computed; -1 where that is not known."""
    used_bytes: int
    """By all processes on the device."""
    total_bytes: int
    own_bytes: int
    """What torch holds in this process, for tensors and for reuse."""

    def __str__(self) -> str:
        """``83 %, 38.7 GB of 80 GB``; without the percents where they are not known."""
        filled = f"{format_bytes(self.used_bytes)} of {format_bytes(self.total_bytes)}"
        return filled if self.busy_percent < 0 else f"{self.busy_percent} %, {filled}"


class GpuGauge:
    """The readings of one device."""

    def __init__(self, device: str) -> None:
        """device: as torch names it, ``cuda:0``."""
        self._device = device
        self._last: GpuUse | None = None
        self._read_at = float("-inf")
        self._reading = False
        self._nvml: NvmlDevice | None = None
        self._tried_nvml = False

    def last(self) -> GpuUse | None:
        """The last reading, at most about two askings old; None before the first, and where CUDA is not in use."""
        if not self._device.startswith("cuda"):
            return None
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        if not self._reading and time.monotonic() - self._read_at > OLD_S:
            self._reading = True
            run_in_background(self._read_aside)
        return self._last

    def _read_aside(self) -> None:
        try:
            self._last = self._read()
        except (RuntimeError, OSError, AttributeError):  # a sick or lost device; the rank's own errors say more
            self._last = None
        finally:
            self._read_at = time.monotonic()
            self._reading = False

    def _read(self) -> GpuUse:
        import torch

        if not self._tried_nvml:
            self._tried_nvml = True
            uuid = getattr(torch.cuda.get_device_properties(self._device), "uuid", "")  # unknown to older versions
            self._nvml = NvmlDevice.find(f"GPU-{uuid}")
        own = torch.cuda.memory_reserved(self._device)
        if self._nvml is not None and (told := self._nvml.read()) is not None:
            return GpuUse(*told, own)
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuUse(-1, total - free, total, own)


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def load_nvml() -> Any:
    """The driver's library. Raises: OSError where there is no driver."""
    return ctypes.CDLL("libnvidia-ml.so.1")


class NvmlDevice:
    """One device in the driver's management library."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def find(cls, uuid: str, library: Any = None) -> NvmlDevice | None:
        """The device with this UUID, None where the library is missing or does not know it.

        library: what `load_nvml` returns, or a stand-in.
        """
        try:
            library = library or load_nvml()
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
                return None
        except (OSError, AttributeError):
            return None
        return cls(library, handle)

    def read(self) -> tuple[int, int, int] | None:
        """(busy percent, or -1; bytes used; bytes in all); None where it does not tell its memory."""
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) != 0:
            return None
        known = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(utilization)) == 0
        return utilization.gpu if known else -1, memory.used, memory.total
