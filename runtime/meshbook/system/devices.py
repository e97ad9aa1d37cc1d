"""What a host has to run ranks on, found without importing torch and without touching CUDA.

The host agent asks here. A process that has called cuInit must not fork workers that use CUDA, so devices are counted
by NVML (libnvidia-ml makes no CUDA context), else by what the driver shows in /proc.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshbook.errors import DeviceError, UsageError

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/sys/fs/cgroup")


class DevicePlan(NamedTuple):
    """Where the ranks of one mesh run on one host."""

    device: str
    """``cpu`` or ``cuda``."""
    environments: tuple[dict[str, str], ...]
    """What to add to the environment of each local rank: LOCAL_RANK, and the mesh's devices as CUDA_VISIBLE_DEVICES.

    As under torchrun every rank sees the devices of all ranks of its host and uses number LOCAL_RANK of them: scripts
    that call ``torch.cuda.set_device(LOCAL_RANK)`` work.
    """
    threads_per_rank: int
    """For `torch.set_num_threads`: the host's cores, divided so that ranks do not crowd each other out."""


def plan_devices(ranks_per_host: int, requested: str | None, host: str) -> DevicePlan:
    """Decide where ``ranks_per_host`` ranks run here.

    requested: ``cpu``, ``cuda``, or None for CUDA if this host has any device of it.
    host: this host's name, for the error.
    Raises: DeviceError if there are fewer CUDA devices than ranks; UsageError for another kind of device.
    """
    if requested not in (None, "cpu", "cuda"):
        raise UsageError(f'device "{requested}" is not known; ask for cpu or cuda, or leave it out.')
    devices = [] if requested == "cpu" else visible_cuda_devices()
    use_cuda = requested == "cuda" or bool(devices)
    if use_cuda and len(devices) < ranks_per_host:
        raise DeviceError(ranks_per_host, len(devices), host)
    environments = []
    for local_rank in range(ranks_per_host):
        environment = {"LOCAL_RANK": str(local_rank)}
        if use_cuda:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:ranks_per_host])
        environments.append(environment)
    threads = max(1, count_cores() // max(1, ranks_per_host))
    return DevicePlan("cuda" if use_cuda else "cpu", tuple(environments), threads)


def count_cuda_devices() -> int:
    """How many CUDA devices a process of ours may use."""
    return len(visible_cuda_devices())


def visible_cuda_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Name the usable CUDA devices as CUDA_VISIBLE_DEVICES does: by index, or as that variable spells them now.

    As CUDA does, the variable's list ends at the first entry that names no device (``0,-1,1`` is ``0``).
    """
    count = _count_installed(environment)
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


def _count_installed(environment: Mapping[str, str]) -> int:
    if environment.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):  # a container that was given no device
        return 0
    by_library = _count_by_nvml()
    if by_library is not None:
        return by_library
    try:
        return len(list(_PROC_GPUS.iterdir()))
    except OSError:
        return 0


def _count_by_nvml() -> int | None:
    """Devices as the driver's management library counts them, None where it is missing or refuses."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
