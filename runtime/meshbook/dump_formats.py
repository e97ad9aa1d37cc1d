"""What faulthandler and py-spy write about the threads of a process, as data. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from meshbook.wire import DumpedFrame, DumpedThread

MAX_THREADS, MAX_FRAMES = 64, 100
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)(?: \[(.*?)\])?.*most recent call first")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MAIN = "serve_calls"
"""The method of `meshbook.worker.Worker` in which a main thread stands."""


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
