"""Memory and descendants of processes, from /proc.

Standard library only: the peers' environments run it too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """``pss_mb`` shares each page among those that map it; ``private_mb`` is what ends with the process."""

    pss_mb: float
    private_mb: float


def memory(pid: int) -> Memory:
    """Return the memory of one process.

    Raises: OSError when it is gone or is not ours.
    """
    kilobytes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        kilobytes[name] = int(value.split()[0])
    return Memory(kilobytes["Pss"] / 1024, (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024)


def descendants(root: int) -> list[int]:
    """Return the pids of all children of ``root``, and of theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := _parent(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found.append(pid)
            waiting.append(pid)
    return found


def end(pids: Iterable[int], *, grace_s: float = 2.0) -> None:
    """End processes that we started: SIGTERM, then SIGKILL for what is still there after ``grace_s``."""
    remaining = set(pids)
    deadline = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in remaining:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        while (remaining := set(living(remaining))) and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = time.monotonic() + grace_s


def living(pids: Iterable[int]) -> list[int]:
    """Return those that still run; zombies among our own children are reaped on the way."""
    return [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    """Whether the process still runs; a zombie of ours is reaped on the way."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass
    return _field(pid, 0) not in (None, "Z")


def _parent(pid: int) -> int | None:
    value = _field(pid, 1)
    return None if value is None else int(value)


def _field(pid: int, index: int) -> str | None:
    """Return a field of /proc/PID/stat counted from behind the name; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[index]
    except (FileNotFoundError, ProcessLookupError):
        return None
