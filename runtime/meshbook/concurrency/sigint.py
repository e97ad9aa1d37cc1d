"""SIGINT while something of ours must not be torn: one scope, that others build on.

`SigintScope` puts a handler in the place of the one before it, and gives the place back. With it the main thread serves
sockets (`meshbook.controller.io_turns`) and awaits (`meshbook.concurrency.asyncio_interrupts`). In `held_back`
something short is finished, and in `noticed`, while we deal with one interrupt, further presses are counted and wake
whoever waits in `InterruptCounter.wait`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import TypeAlias

from meshbook.concurrency import forks
from meshbook.concurrency.future import Future

_plain_signals: ModuleType = vars(signal)["_signal"]
_SIGINT = int(signal.SIGINT)

SigintHandler: TypeAlias = Callable[[int, FrameType | None], object]


def _signals() -> ModuleType:
    """Where `signal` and `getsignal` are: those without enumerations, which take as long as a call's other work here.

    Where somebody has put functions in their place, as ranks have (`meshbook.worker.interrupt_gate`), these.
    """
    return _plain_signals if signal.signal.__module__ == "signal" else signal


class SigintScope:
    """While it is open, SIGINT calls ``on_press`` and not the handler before it."""

    def __init__(self, on_press: SigintHandler) -> None:
        self._on_press = on_press
        self.before: SigintHandler | None = None
        """The handler that was there when it was opened last."""
        self._signals = _plain_signals

    @property
    def is_in_place(self) -> bool:
        """Whether our handler is there: it was opened, and nobody has set another since."""
        return bool(_signals().getsignal(_SIGINT) == self._on_press)

    def open(self) -> bool:
        """Take the place; returns whether it could be taken.

        Only the main thread runs handlers. One that is no function of Python's could not be put back, and raises
        nothing in our midst.
        """
        if threading.get_ident() != forks.main_thread:
            return False
        signals = self._signals = _signals()
        handler = signals.getsignal(_SIGINT)
        if not callable(handler):
            return False
        self.before = handler
        signals.signal(_SIGINT, self._on_press)
        return True

    def close(self) -> None:
        """Give the place back, unless somebody else has taken it since."""
        signals = self._signals
        if signals.getsignal(_SIGINT) == self._on_press:
            signals.signal(_SIGINT, self.before)


class held_back(SigintScope):  # used as a function is, like `contextlib.suppress`
    """A press inside of the block is raised after it: what the block makes has an owner by then.

    Not on ranks: there SIGINT is a message, which whoever takes it must act on (`meshbook.worker.interrupt_gate`).
    """

    def __init__(self) -> None:
        pressed: list[int] = []
        super().__init__(lambda signum, frame: pressed.append(signum))
        self._pressed, self._is_open = pressed, False

    def __enter__(self) -> None:
        self._is_open = _signals() is _plain_signals and self.open()

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self.close()
            if self._pressed and self.before is not None:
                self.before(signal.SIGINT, None)


class InterruptCounter:
    """How often interrupt was pressed since the last look."""

    def __init__(self) -> None:
        self._count = 0
        self._wake: Future[None] = Future()

    def press(self, signum: int, frame: FrameType | None) -> None:
        """The handler. A future may be completed in the midst of anything."""
        self._count += 1
        self._wake.set_result(None)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        self._wake.set_result(None)

    def take(self) -> bool:
        """Whether there was a press; it is answered for now."""
        if not self._count:
            return False
        self._count = 0
        return True

    def wait(self, until: float) -> None:
        """Wait for `wake`, a press, or the moment ``until`` on the monotonic clock."""
        with contextlib.suppress(TimeoutError):
            self._wake.get(max(0.0, until - time.monotonic()))
        self._wake = Future()
        if self._count:
            self._wake.set_result(None)


@contextlib.contextmanager
def noticed() -> Iterator[InterruptCounter]:
    """Inside of the block presses are counted rather than raised."""
    interrupt_counter = InterruptCounter()
    scope = SigintScope(interrupt_counter.press)
    opened = scope.open()
    try:
        yield interrupt_counter
    finally:
        if opened:
            scope.close()
