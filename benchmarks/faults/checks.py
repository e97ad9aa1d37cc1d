"""What a run may leave behind: nothing. Processes are found by a mark in their environment."""

from __future__ import annotations

import gc
import os
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshbook.concurrency.background import IDLE_S
from meshbook.launchers.agent_start import LASTING
from meshbook.system.processes import resident_bytes

MARK = "MESHBOOK_FAULTS_RUN"
GONE_WITHIN_S = 10.0


class Held(NamedTuple):
    """What one process holds."""

    files: int
    memory_files: int
    threads: int
    resident_mb: float

    @classmethod
    def of(cls, pid: int) -> Held:
        """Of a process of ours, now."""
        if pid == os.getpid():
            gc.collect()
        links = list(_links(pid))
        return cls(
            files=len(links),
            memory_files=sum("/memfd:" in link for link in links),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            resident_mb=resident_bytes(pid) / 1e6,
        )

    def since(self, before: Held) -> str:
        """``files +0, memory files +0, threads +0, memory +1.2 MB``"""
        return (
            f"files {self.files - before.files:+d}, memory files {self.memory_files - before.memory_files:+d}, "
            f"threads {self.threads - before.threads:+d}, memory {self.resident_mb - before.resident_mb:+.1f} MB"
        )


def _links(pid: int) -> Iterable[str]:
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue


def mark_ourselves() -> str:
    """Mark this process's environment; what it starts from now on inherits the mark. Returns the mark."""
    environment = marked_environment()
    os.environ.clear()
    os.environ.update(environment)
    return environment[MARK]


def marked_environment() -> dict[str, str]:
    """Return our environment with a new mark. Hosts are not forked from a lasting template, which has no mark."""
    return {**{name: value for name, value in os.environ.items() if name != LASTING}, MARK: secrets.token_hex(8)}


def marked(mark: str) -> list[int]:
    """Living processes with the mark that are not this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:  # it has just ended, or is not ours
                continue
    return found


def orphans(mark: str, within_s: float = GONE_WITHIN_S) -> list[int]:
    """The marked processes that are still there after ``within_s``."""
    deadline = time.monotonic() + within_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def shared_memory_names() -> set[str]:
    """Names in /dev/shm."""
    try:
        return set(os.listdir("/dev/shm"))
    except FileNotFoundError:
        return set()


def thread_names() -> list[str]:
    """Of this process."""
    return sorted(thread.name for thread in threading.enumerate())


def new_threads(before: list[str]) -> list[str]:
    """Those of this process that were not there before, once idle ones have had the time to end."""
    deadline = time.monotonic() + 2 * IDLE_S
    while (new := [name for name in thread_names() if name not in before]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return new
