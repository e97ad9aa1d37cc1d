"""What a rank tells of itself when the person asks who hangs: its stacks, its state, how far its groups are.

Answered on a side thread, since reading source files may take long; the threads that run for us are left out.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from meshbook.source.frames import MAX_THREADS, Frame, ThreadStack, cut_frames
from meshbook.source.location import is_users_code, make_frame, users_place
from meshbook.source.tasks import cell_frames, task_frames
from meshbook.source.thread_frames import frame_of, frames

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker

_OURS = "meshbook."
"""What our threads' names begin with."""


def read_threads(worker: Worker, all_threads: bool) -> tuple[ThreadStack, ...]:
    """The threads of this process, the main thread first; of an idle rank only what else there is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: list[ThreadStack] = []
    for ident, frame in frames().items():
        name = names.get(ident, f"thread {ident}")
        is_main = ident == worker.main_thread
        if is_main and worker.claims.running is not None:
            awaiting = cell_frames(worker.shell.loop) if worker.shell.loop.is_running() else []
            running = awaiting and users_place(frame)  # a coroutine is on the stack already
            threads.insert(0, ThreadStack("main", True, _read([*([] if running else awaiting), *_callers(frame)])))
        elif all_threads and not is_main and len(threads) < MAX_THREADS:
            thread = ThreadStack(name, False, _read(_callers(frame)))
            if thread.users or not name.startswith(_OURS):  # ours may run the user's code: an actor's
                threads.append(thread)
    if all_threads and worker.shell.loop.is_running():
        tasks = task_frames(worker.shell.loop)[: MAX_THREADS - len(threads)]
        threads += [ThreadStack(name, False, _read(frames)) for name, frames in tasks if frames]
    return tuple(threads)


def place_in_debugger(worker: Worker) -> str:
    """Where an editor's debugger has stopped the main thread; empty when it has not."""
    for frame in _callers(frame_of(worker.main_thread)):
        if "pydevd" in frame.f_code.co_filename and "wait_suspend" in frame.f_code.co_name:
            return users_place(frame)
        if is_users_code(frame.f_code):
            break
    return ""


def lines_of(places: Sequence[tuple[str, int]]) -> list[Frame]:
    """Frames for (file, line) pairs of another rank's stack, with what is known of them here."""
    return [make_frame("", file, line, linecache.getline(file, line)) for file, line in places]


def _read(frames: Iterable[FrameType]) -> tuple[Frame, ...]:
    return cut_frames(_describe(frame) for frame in frames)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that wait for it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> Frame:
    code, line = frame.f_code, frame.f_lineno or 0
    source = linecache.getline(code.co_filename, line) if is_users_code(code) else ""
    return make_frame(getattr(code, "co_qualname", code.co_name), code.co_filename, line, source)
