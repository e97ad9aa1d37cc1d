"""Python stacks of a process whose GIL is held: written by faulthandler's C handler when a signal comes.

The signal goes to the control thread alone, which loses nothing by it: a signal to the process would arrive on the main
thread and end its sleep or system call early. The dump goes to a memory file that the host agent opens through /proc.
A process that is stopped writes nothing until it is continued; py-spy can read those (`meshbook.agent.stack_dumps`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
from typing import Any

from meshbook.system.memory_files import create_memory_file, is_memory_file
from meshbook.wire.messages import DumpedFrame, DumpedThread

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


MAX_THREADS, MAX_FRAMES = 64, 100
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)(?: \[(.*?)\])?.*most recent call first")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MAIN = "serve_calls"
"""The method of `meshbook.worker.worker.Worker` in which a main thread stands."""


def parse_faulthandler(text: str) -> tuple[DumpedThread, ...]:
    """The threads of a dump, the main thread first."""
    threads: list[tuple[str, list[DumpedFrame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            threads.append((found[2] or f"thread {found[1]}", []))
        elif threads and (found := _FRAME.fullmatch(line)):
            number = int(found[2]) if found[2].isdigit() else 0
            threads[-1][1].append(DumpedFrame(found[3], found[1], number))
    return _main_first([DumpedThread(name, _is_main(frames), tuple(frames[:MAX_FRAMES])) for name, frames in threads])


def parse_py_spy(text: str, pid: int) -> tuple[DumpedThread, ...]:
    """The threads of ``py-spy dump --json``. Raises: ValueError if it is something else."""
    told: Any = json.loads(text)
    if not isinstance(told, list):
        raise ValueError("not a list of threads")
    threads = []
    for thread in told:
        frames = tuple(_py_spy_frame(frame) for frame in thread["frames"][:MAX_FRAMES])
        name = str(thread.get("thread_name") or f"thread {thread.get('os_thread_id')}")
        threads.append(DumpedThread(name, thread.get("os_thread_id") == pid, frames, bool(thread.get("owns_gil"))))
    return _main_first(threads)


def _py_spy_frame(frame: Any) -> DumpedFrame:
    native = bool(frame.get("module"))
    file = str(frame.get("module") or frame.get("filename") or "")
    return DumpedFrame(str(frame.get("name") or "?"), file, int(frame.get("line") or 0), native)


def _is_main(frames: list[DumpedFrame]) -> bool:
    return any(frame.function.endswith(_MAIN) for frame in frames)


def _main_first(threads: list[DumpedThread]) -> tuple[DumpedThread, ...]:
    return tuple(sorted(threads, key=lambda thread: not thread.is_main)[:MAX_THREADS])
