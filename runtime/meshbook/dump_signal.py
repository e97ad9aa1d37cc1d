"""Python stacks of a process whose GIL is held: written by faulthandler's C handler when a signal comes.

The signal goes to the control thread alone, which loses nothing by it: a signal to the process would arrive on the main
thread and end its sleep or system call early. The dump goes to a memory file that the host agent opens through /proc.
A process that is stopped writes nothing until it is continued; py-spy can read those (`meshbook.outside_stacks`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

from meshbook.memory_files import create_memory_file, is_memory_file

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else 0
"""One that nobody uses; 0 where there are no such signals."""

_FILE = "meshbook-stacks"

_tgkill = getattr(ctypes.CDLL(None), "tgkill", None)


def accept_dumps() -> int:
    """In the worker: write the stacks of all threads whenever `SIGNAL` comes; returns the file's descriptor, or -1."""
    if not SIGNAL:
        return -1
    import fcntl

    fd = create_memory_file(_FILE)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


class DumpRequest:
    """One dump of another process of this host."""

    def __init__(self, pid: int, thread: int, fd: int) -> None:
        """thread: the kernel's number of its control thread; fd: what `accept_dumps` returned there.

        Raises: OSError if it cannot be asked.
        """
        if thread <= 0 or fd < 0 or _tgkill is None:
            raise OSError("it takes no such signal")
        self._path = f"/proc/{pid}/fd/{fd}"
        if not is_memory_file(self._path, _FILE):
            raise OSError("code on the rank has closed its file for stacks")
        with open(self._path, "r+b") as file:
            file.truncate(0)
        self._seen = b""
        if _tgkill(pid, thread, SIGNAL) != 0:
            raise ProcessLookupError(pid)

    def poll(self) -> str:
        """The dump, once it has been the same in two calls; empty before. Raises: OSError when the process is gone."""
        with open(self._path, "rb") as file:
            text = file.read()
        complete = text.endswith(b"\n") and text == self._seen
        self._seen = text
        return text.decode(errors="replace") if complete else ""
