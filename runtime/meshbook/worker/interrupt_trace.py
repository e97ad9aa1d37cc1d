"""Leaving code that catches KeyboardInterrupt and goes on, without skipping what it does to clean up.

While the exception is handled (``except``, ``finally``, ``__exit__``) nothing happens. At the first line of the user's
own code that runs when it is no longer handled, it was swallowed, and it is raised anew: there, behind the ``except``
block, the ``try`` that caught it does not reach. It is done with trace functions, as a debugger does it, so a rank that
is traced already (a debugger, coverage) is left alone. Python ends the tracing when a trace function raises: one layer
of ``try`` is left per interrupt.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import TYPE_CHECKING

from meshbook.source.location import is_users_code

if TYPE_CHECKING:
    from _typeshed import TraceFunction

_PUSH_EXC_INFO = dis.opmap.get("PUSH_EXC_INFO")
"""With this instruction each handler begins, from Python 3.11 on."""


class SwallowedInterrupts:
    """Watches the main thread from a KeyboardInterrupt on. All calls come on that thread."""

    def __init__(self) -> None:
        self.watching = False

    def begin(self, frame: FrameType | None) -> None:
        """Watch ``frame`` and its callers; a KeyboardInterrupt is raised there next."""
        if self.watching or sys.gettrace() is not None:
            return
        self.watching = True
        while frame is not None:
            if is_users_code(frame.f_code):
                frame.f_trace = self._on_event
            frame = frame.f_back
        self._handled = False
        sys.settrace(_trace_no_new_frames)

    def end(self) -> None:
        """Stop watching the main thread's frames."""
        if self.watching:
            self.watching = False
            if sys.gettrace() is _trace_no_new_frames:
                sys.settrace(None)

    def _on_event(self, frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        if not self.watching:
            return None
        if event == "line":
            handled, self._handled = self._handled, _handles_interrupt(frame)
            if handled and not self._handled:
                self.end()
                raise KeyboardInterrupt
        return self._on_event


def _handles_interrupt(frame: FrameType) -> bool:
    if isinstance(sys.exc_info()[1], KeyboardInterrupt):
        return True
    return _PUSH_EXC_INFO is not None and frame.f_code.co_code[frame.f_lasti] == _PUSH_EXC_INFO  # about to


def _trace_no_new_frames(frame: FrameType, event: str, arg: object) -> None:
    return None
