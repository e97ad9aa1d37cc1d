"""Many lines in a row that the main thread prints on one stream: C code writes them, without a call of Python.

    print ──> RankStream.write      in Python: whose text it is, marks, a stdout that is closed or leads elsewhere
    print ──> TextIOWrapper.write   in C: the same pipe, and each line is in it when print returns, as before

The second way costs half as much. It is taken where nothing can come up that only the first one knows how to do, and
left before that begins: another stream is printed on, a thread starts, an event loop runs (it may have tasks of other
cells), somebody's text is to be dropped, stdout is led elsewhere, the process forks, another call begins. It has the
pipe by a file description of its own, which no child makes non-blocking and no user code closes.

``write = sys.stdout.write`` made within a run is that of the running cell wherever it is called, and so is what a C
library leads elsewhere by itself (``libc.dup2``) shown until the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

from meshbook.concurrency import forks
from meshbook.concurrency.background import is_hidden
from meshbook.concurrency.patches import patch

P = ParamSpec("P")
T = TypeVar("T")

BEGIN_AFTER = 32
"""So many lines in a row make a run."""


class RunStream(Protocol):
    """A stream that may have runs."""

    def begin_run(self) -> bool:
        """Have C code write from now on; False where that cannot be."""

    def end_run(self) -> None:
        """Write in Python again; what C code has begun is written out."""


class LineRuns:
    """The runs of a process; one stream at a time has one. Any thread may end it."""

    def __init__(self) -> None:
        self.stream: RunStream | None = None
        self._held_off: set[int] = set()
        self._generation = forks.generation

    def begin(self, stream: RunStream) -> None:
        """The caller has printed many lines on ``stream``: from now on C code writes them, if nobody else can print."""
        is_alone = (
            threading.get_ident() == forks.main_thread
            and forks.generation == self._generation
            and asyncio._get_running_loop() is None
            and all(thread is threading.main_thread() or is_hidden(thread) for thread in threading.enumerate())
        )
        if is_alone and not self._held_off:
            self.stream = stream  # first: an interrupt may come in the midst of it
            if not stream.begin_run():
                self.stream = None

    def end(self) -> None:
        """Something begins that C code knows nothing of."""
        if (stream := self.stream) is not None:
            stream.end_run()
            self.stream = None  # last: after an interrupt the next end writes what is left

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Inside the block the text of the calling thread is not the running cell's, so there is no run."""
        self._held_off.add(thread := threading.get_ident())
        try:
            self.end()
            yield
        finally:
            self._held_off.discard(thread)

    def end_before_strangers(self) -> None:
        """From now on runs end before an event loop runs, and before user code leads a descriptor elsewhere."""
        patch(asyncio.BaseEventLoop, "run_forever", self._ends_before(asyncio.BaseEventLoop.run_forever))
        patch(os, "dup2", self._ends_before(os.dup2))

    def _ends_before(self, original: Callable[P, T]) -> Callable[P, T]:
        @wraps(original)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self.end()
            return original(*args, **kwargs)

        return call
