"""Where coroutines stand that a rank's event loop will go on with: they are on no thread's stack."""

from __future__ import annotations

import asyncio
from types import FrameType

from meshbook.source.location import is_users_code


def cell_frames(loop: asyncio.AbstractEventLoop) -> list[FrameType]:
    """The frames of the cell that runs on the loop, innermost first; empty where none awaits. From any thread."""
    for _, frames in task_frames(loop):
        if any(frame.f_code.co_name == "<module>" and is_users_code(frame.f_code) for frame in frames):
            return frames
    return []


def task_frames(loop: asyncio.AbstractEventLoop) -> list[tuple[str, list[FrameType]]]:
    """All tasks that have not ended: their names and frames, innermost first."""
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
