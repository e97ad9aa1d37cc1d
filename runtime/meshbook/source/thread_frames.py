"""The frames and exceptions of all threads, and the frames of coroutines, which are on no thread's stack.

Python's own functions for threads hold a lock of the interpreter while they allocate, and an allocation may set the
collector off (until 3.11.8 and 3.12.2). If an object that it frees releases the GIL, as tensors do, a thread that wants
that lock meanwhile has the GIL and never gives it back: the process stands still for good. So the collector is off
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from meshbook.source.location import is_users_code

_lock = threading.RLock()
"""Held by who has turned the collector off."""


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread but the calling one.

    Its own frame would hold the frame that keeps the answer, and so itself: a circle in which all variables of all
    threads would live on until the collector came by.
    """
    with _lock, without_collector():
        found = sys._current_frames()
    del found[threading.get_ident()]
    return found


def frame_of(thread: int | None) -> FrameType | None:
    """Return the innermost frame of ``thread``, if it runs Python."""
    return sys._getframe(1) if thread == threading.get_ident() else frames().get(thread or 0)


def exception_of(thread: int) -> object:
    """Return the exception that ``thread`` handles, as the running Python has it."""
    with _lock, without_collector():
        return sys._current_exceptions().get(thread)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector off inside the block."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


def cell_frames(loop: asyncio.AbstractEventLoop) -> list[FrameType]:
    """Return the frames of the cell that awaits on the loop, innermost first; empty without one. From any thread."""
    for _, frames in task_frames(loop):
        if any(frame.f_code.co_name == "<module>" and is_users_code(frame.f_code) for frame in frames):
            return frames
    return []


def task_frames(loop: asyncio.AbstractEventLoop) -> list[tuple[str, list[FrameType]]]:
    """Return the names and frames, innermost first, of all tasks that have not ended."""
    try:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    except RuntimeError:  # it changed under our eyes, again and again
        return []
    return [(task.get_name(), _frames_of(task.get_coro())) for task in tasks]


def _frames_of(awaitable: object) -> list[FrameType]:
    frames: list[FrameType] = []
    while awaitable is not None and len(frames) < 100:
        frame, awaitable = next(
            (
                (getattr(awaitable, f"{kind}_frame"), getattr(awaitable, inner, None))
                for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await"))
                if hasattr(awaitable, f"{kind}_frame")
            ),
            (None, None),
        )
        if frame is not None:
            frames.insert(0, frame)
    return frames
