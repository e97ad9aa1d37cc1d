"""The devices, cores and memory that a host has for ranks, how busy its GPUs are, and the binding of a process to some.

The host agent asks here, and imports no torch. A process that has called cuInit must not fork workers that use CUDA, so
devices are counted by the driver's management library (NVML, libnvidia-ml), which makes no CUDA context, else by the
driver's entries in /proc.

On a rank NVML tells of the whole device, and torch of the memory that this process has reserved (`GpuGauge`). Both may
block while the driver is in trouble, and the asking thread is the one that hears interrupts: readings are made aside,
and the last one is returned. No reading makes a CUDA context.

A process binds itself to CPUs and NUMA nodes (`bind`), before it has threads: nothing has to be installed for it. The
words are Monarch's:

    {"cpus": "0-3,8"}          as taskset -c
    {"physcpubind": "0-3"}     the same, as numactl calls it
    {"cpunodebind": "1"}       the CPUs of these nodes
    {"membind": "1"}           memory of these nodes, and of no other
"""

from __future__ import annotations

import ctypes
import difflib
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshbook.concurrency.background import run_in_background
from meshbook.errors import DeviceError, UsageError
from meshbook.formatting import format_bytes

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/sys/fs/cgroup")


def plan_devices(ranks_per_host: int, requested: str | None, host: str) -> list[str]:
    """Return the CUDA devices of ``ranks_per_host`` ranks here, as CUDA_VISIBLE_DEVICES names them; none on CPU.

    As under torchrun every rank sees the devices of all ranks of its host and uses number LOCAL_RANK of them: scripts
    that call ``torch.cuda.set_device(LOCAL_RANK)`` work.

    requested: ``cpu``, ``cuda``, or None for CUDA if this host has any device of it.
    host: this host's name, for the error.
    Raises: DeviceError if there are fewer CUDA devices than ranks; UsageError for another kind of device.
    """
    if requested not in (None, "cpu", "cuda"):
        raise UsageError(f'device "{requested}" is not known; ask for cpu or cuda, or leave it out.')
    devices = [] if requested == "cpu" else visible_cuda_devices()
    if (requested == "cuda" or devices) and len(devices) < ranks_per_host:
        raise DeviceError(ranks_per_host, len(devices), host)
    return devices[:ranks_per_host]


def count_cuda_devices() -> int:
    """Return how many CUDA devices a process of ours may use."""
    return len(visible_cuda_devices())


def visible_cuda_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Name the usable CUDA devices as CUDA_VISIBLE_DEVICES does: by index, or as that variable spells them now.

    As CUDA does, the variable's list ends at the first entry that names no device (``0,-1,1`` is ``0``).
    """
    count = _count_by_nvml()
    if environment.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):  # a container that was given no device
        count = 0
    elif count is None:
        count = len(list(_PROC_GPUS.iterdir())) if _PROC_GPUS.is_dir() else 0
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(count)]
    usable: list[str] = []
    for name in (entry.strip() for entry in listed.split(",")):
        is_index = name.isdecimal() and int(name) < count
        if name in usable or not (is_index or (count and name.startswith(("GPU-", "MIG-")))):
            break
        usable.append(name)
    return usable


def _count_by_nvml() -> int | None:
    """Devices as the driver's management library counts them, None where it is missing or refuses."""
    try:
        library = load_nvml()
        if library.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint()
        return int(count.value) if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None
    finally:
        library.nvmlShutdown()


def count_cores() -> int:
    """Cores that this process may use: its affinity mask, cut to the CPU quota of its control group; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cpu_quota(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of CPU time that our control group and those around it grant, None for no limit.

    membership: lines ``id:controllers:path``; version 2 names no controllers, version 1 mounts each in its own folder.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    grants = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "cpu" if controllers else root
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                grants.append(_read_quota(folder))
    return min((grant for grant in grants if grant is not None), default=None)


def _read_quota(folder: Path) -> float | None:
    """The limit of one control group: version 2 keeps it in one file, version 1 in two."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


OLD_S = 0.5
"""A reading older than this is made anew."""


class GpuUse(NamedTuple):
    """The use of one device at one moment, as one of the processes on it sees it."""

    busy_percent: int
    """Share of the last second or so in which it computed; -1 where that is not known."""
    used_bytes: int
    """The memory that all processes on the device use."""
    total_bytes: int
    own_bytes: int
    """The memory that torch holds in this process, for tensors and for reuse."""

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
    """A device in the driver's management library."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def find(cls, uuid: str, library: Any = None) -> NvmlDevice | None:
        """The device with this UUID, None where the library is missing or does not know it.

        library: the result of `load_nvml`, or a stand-in.
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


KEYS = ("cpunodebind", "membind", "physcpubind", "cpus")

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "s390x": 270, "riscv64": 237}
_MPOL_BIND = 2
_NODES_MAX = 1024
_NUMBERS_MAX = 1 << 16


def check_binding(binding: object) -> dict[str, str]:
    """Refuse bindings that no machine could have. Raises: UsageError."""
    if not isinstance(binding, Mapping):
        raise UsageError(f'a binding maps names to numbers, as in {{"cpus": "0-3"}}; got {binding!r}.')
    for key, numbers in binding.items():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            meant = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(KEYS)}."
            raise UsageError(f"a process is not bound by {key!r}; {meant}")
        if not isinstance(numbers, str) or not _parse(numbers):
            raise UsageError(f'{key} is a text that lists numbers, as in "0-3,8"; got {numbers!r}.')
    if len(cpus := [key for key in KEYS if key in binding and key != "membind"]) > 1:
        raise UsageError(f"{' and '.join(cpus)} all name CPUs; one of them is enough.")
    return dict(binding)


def bind(binding: Mapping[str, str]) -> None:
    """Bind this process; its threads to come inherit it. Raises: OSError, which names the missing device or CPU."""
    for key, numbers in binding.items():
        if key == "membind":
            _bind_memory(_parse(numbers))
        else:
            cpus = _parse(numbers) if key != "cpunodebind" else _cpus_of(_parse(numbers))
            allowed = os.sched_getaffinity(0)
            if missing := sorted(set(cpus) - allowed):
                raise OSError(
                    f"proc_bind {key}={numbers}: this process may not use CPU {_join(missing)}, but {_join(allowed)}"
                )
            os.sched_setaffinity(0, cpus)


def _cpus_of(nodes: Collection[int]) -> set[int]:
    """The CPUs of NUMA nodes. Raises: OSError."""
    cpus: set[int] = set()
    for node in nodes:
        try:
            cpus.update(_parse((_NODES / f"node{node}" / "cpulist").read_text().strip()))
        except OSError as error:
            raise OSError(f"proc_bind: this machine has no NUMA node {node}") from error
    return cpus


def _bind_memory(nodes: Collection[int]) -> None:
    """Raises: OSError."""
    if (number := _SET_MEMPOLICY.get(platform.machine())) is None or max(nodes) >= _NODES_MAX:
        raise OSError(f"proc_bind membind={_join(nodes)}: not on {platform.machine()}")
    mask = sum(1 << node for node in nodes).to_bytes(_NODES_MAX // 8, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, ctypes.c_char_p(mask), ctypes.c_ulong(_NODES_MAX)):
        why = os.strerror(ctypes.get_errno())
        raise OSError(f"proc_bind membind={_join(nodes)}: the system does not bind memory there ({why})")


def _parse(text: str) -> set[int]:
    """The numbers of a list as in ``0-3,8``; none where it is no such list."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not int(first) <= int(last) < _NUMBERS_MAX:
            return set()
        numbers.update(range(int(first), int(last) + 1))
    return numbers


def _join(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
