"""Stacks of threads as plain data, whoever has read them: the process itself, faulthandler, py-spy. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_FRAMES = 100
"""Frames of a thread that are kept: the innermost ones, and the outermost."""
MAX_THREADS = 64

USER, LIBRARY, RUNTIME = "user", "library", "runtime"
"""Whose code stands in a file."""
NATIVE = "native"
"""The kind of code that is no Python."""


class Frame(NamedTuple):
    """One call of a stack."""

    function: str
    file: str
    """For native code the library that it is in."""
    line: int
    place: str
    """``cell 7, line 5``, ``train.py:41``."""
    kind: str
    """Whose code: ``user``, ``library`` or ``runtime``; ``native`` for code that is no Python."""
    source: str = ""
    """The line's text, where it is known."""


class ThreadStack(NamedTuple):
    """The stack of one thread."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def users(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, innermost first."""
        return tuple(frame for frame in self.frames if frame.kind == USER)


def cut_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """At most `MAX_FRAMES` of them; endless recursion has more."""
    frames = tuple(frames)
    half = MAX_FRAMES // 2
    return frames if len(frames) <= MAX_FRAMES else frames[:half] + frames[-half:]
