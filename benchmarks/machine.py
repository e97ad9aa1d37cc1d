"""What the figures were taken on, and how quiet it was."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # else we were killed
    for _ in range(1 << 20):
        pass
"""


class Machine(NamedTuple):
    """One line of the report's head."""

    cores: int
    model: str
    memory_gb: float
    python: str
    torch: str
    system: str

    def __str__(self) -> str:
        return (
            f"{self.cores} cores ({self.model}), {self.memory_gb:.0f} GB, Python {self.python}, "
            f"torch {self.torch}, {self.system}"
        )


def describe() -> Machine:
    """Return this machine; the core count is what we may use, not what is built in."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Machine(
        len(os.sched_getaffinity(0)),
        model,
        memory_gb,
        platform.python_version(),
        _version("torch"),
        f"{platform.system()} {platform.release()}",
    )


def forget_test_settings() -> None:
    """Drop the variables that change how Python writes and caches: no process of ours shall inherit them.

    Unbuffered output costs two system calls per line; without bytecode files each start compiles anew.
    """
    for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have so many processes compute while the block runs, each in a session of its own."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())], start_new_session=True))
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def others_load(settle_s: float = 1.0, window_s: float = 1.0) -> float:
    """Return the share of all cores, 0 to 1, that is busy or stolen while we sleep for ``window_s``.

    Taken between benchmarks, when nothing of ours runs: what remains is other people's work.
    settle_s: how long what we have just stopped may take to end.
    """
    time.sleep(settle_s)
    busy, total = _cpu_ticks()
    time.sleep(window_s)
    busy_after, total_after = _cpu_ticks()
    return (busy_after - busy) / max(1, total_after - total)


def _cpu_ticks() -> tuple[int, int]:
    """Return (busy, all) clock ticks of all cores since boot; waiting for the disk counts as idle."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
