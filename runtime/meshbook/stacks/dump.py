"""Python stacks of a process whose GIL is held: written by faulthandler's C handler when a signal comes.

The signal goes to the control thread alone, which loses nothing by it: a signal to the process would arrive on the main
thread and end its sleep or system call early. The dump goes to a memory file that the host agent opens through /proc.
A process that is stopped writes nothing until it is continued; py-spy can read those (`meshbook.agent.stack_dumps`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import re
import signal

import msgspec

from meshbook.source.location import MAX_THREADS, NATIVE, Frame, ThreadStack, cut_frames, make_frame
from meshbook.system.memory_files import create_memory_file, is_memory_file

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else 0
"""A signal that is free for this; macOS, where this is only imported, has none."""

_FILE = "meshbook-stacks"

_tgkill = getattr(ctypes.CDLL(None), "tgkill", None)


def accept_dumps() -> int:
    """Write the stacks of all threads of this worker whenever `SIGNAL` comes; returns the file's descriptor."""
    fd = create_memory_file(_FILE)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


class DumpRequest:
    """A dump of another process of this host."""

    def __init__(self, pid: int, thread: int, fd: int) -> None:
        """thread: the kernel's number of its control thread; fd: the descriptor that `accept_dumps` returned there.

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


_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)(?: \[(.*?)\])?.*most recent call first")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MAIN = "serve_calls"
"""The method of `meshbook.worker.worker.Worker` in which a main thread stands."""


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """The threads of a dump, the main thread first."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            threads.append((found[2] or f"thread {found[1]}", []))
        elif threads and (found := _FRAME.fullmatch(line)):
            threads[-1][1].append(make_frame(found[3], found[1], int(found[2]) if found[2].isdigit() else 0))
    return _main_first(
        [
            ThreadStack(name, any(frame.function.endswith(_MAIN) for frame in frames), cut_frames(frames))
            for name, frames in threads
        ]
    )


class _SpyFrame(msgspec.Struct):
    name: str | None = None
    filename: str | None = None
    module: str | None = None
    """The library, of native code."""
    line: int | None = None

    def read(self) -> Frame:
        function, line = self.name or "?", self.line or 0
        if self.module:
            return Frame(function, self.module, line, self.module.rpartition("/")[2], NATIVE)
        return make_frame(function, self.filename or "", line)


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    os_thread_id: int | None = None
    thread_name: str | None = None


_decode_spied = msgspec.json.Decoder(list[_SpyThread]).decode


def parse_py_spy(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """The threads of ``py-spy dump --json``. Raises: msgspec.DecodeError if it is something else."""
    return _main_first(
        [
            ThreadStack(
                thread.thread_name or f"thread {thread.os_thread_id}",
                thread.os_thread_id == pid,
                cut_frames(frame.read() for frame in thread.frames),
            )
            for thread in _decode_spied(text)
        ]
    )


def _main_first(threads: list[ThreadStack]) -> tuple[ThreadStack, ...]:
    return tuple(sorted(threads, key=lambda thread: not thread.is_main)[:MAX_THREADS])
