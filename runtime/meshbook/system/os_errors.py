"""The limits of the operating system: the advice for each refusal, and the means that meshes need."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import sys

from meshbook.errors import SpawnError


def explain(error: OSError) -> str:
    """``no space left on device: /home/ann/x (free some space)``; one line, without a full stop at its end."""
    reason = error.strerror or str(error) or type(error).__name__
    named = isinstance(error.filename, str | bytes) and error.errno != errno.EMFILE
    place = f": {os.fsdecode(error.filename)}" if named else ""
    advice = _ADVICE.get(error.errno or 0, "")
    if error.errno == errno.EMFILE:
        advice = f"process {os.getpid()} may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise ulimit -n"
    return f"{reason[:1].lower()}{reason[1:]}{place}{f' ({advice})' if advice else ''}"


ENOUGH_FILES = 65_536
"""Enough for a controller of 20,000 hosts. Code that uses select(2) has trouble from the 1,024th open file on."""


def raise_file_limit() -> None:
    """Let this process open as many files as it may: most systems begin with 1,024 of half a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_descriptors(count: int) -> None:
    """Raise OSError if this process may not open ``count`` more: libraries abort where they get none."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


_ADVICE = {
    errno.EAGAIN: "the limit on processes was met: ulimit -u, or that of the container",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "the limit on the size of files was met: ulimit -f",
    errno.ENFILE: "the machine has no more open files to give: sysctl fs.file-max",
    errno.ENOMEM: "the machine or its container is out of memory",
    errno.ENOSPC: "free some space",
    errno.ETOOMANYREFS: "the limit on open files was met: raise ulimit -n",
}


def check_system() -> None:
    """Raises: SpawnError with one sentence where meshes cannot run, such as on macOS."""
    there = {
        "epoll": hasattr(select, "epoll"),
        "eventfd": hasattr(os, "eventfd"),
        "prctl": hasattr(ctypes.CDLL(None), "prctl"),
        "/proc": os.path.exists("/proc/self/fd"),
    }
    if sys.platform == "linux" and not there["epoll"]:
        raise SpawnError(
            "Something has taken select.epoll away, as gevent and eventlet do. Spawn the mesh before that, or leave "
            "select out: monkey.patch_all(select=False)."
        )
    if missing := ", ".join(name for name, is_there in there.items() if not is_there):
        raise SpawnError(
            f"Meshes run on Linux: this system ({sys.platform}) lacks {missing}. Run the notebook's kernel in a Linux "
            "container or virtual machine."
        )
