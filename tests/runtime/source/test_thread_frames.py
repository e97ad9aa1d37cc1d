"""Looking at the frames of all threads leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

from meshbook.source.thread_frames import frame_of, frames


class Thing:
    """Something that a weak reference can watch."""


def test_looking_at_frames_keeps_no_variable_alive() -> None:
    """Else every look at a rank's progress would keep its tensors until the collector came by."""
    began, go_on = threading.Event(), threading.Event()
    watched: list[weakref.ref[Thing]] = []

    def hold() -> None:
        thing = Thing()
        watched.append(weakref.ref(thing))
        began.set()
        go_on.wait(20)

    def look() -> set[int]:
        found = frames()
        return set(found)

    holder = threading.Thread(target=hold)
    gc.collect()
    gc.disable()
    try:
        holder.start()
        assert began.wait(20)
        assert holder.ident in look()
        go_on.set()
        holder.join()
        assert watched[0]() is None
    finally:
        gc.enable()


def test_a_thread_finds_its_own_frame_and_that_of_another() -> None:
    frame = frame_of(threading.get_ident())
    assert frame is sys._getframe()
    del frame
    assert frame_of(None) is None
    assert threading.get_ident() not in frames()
