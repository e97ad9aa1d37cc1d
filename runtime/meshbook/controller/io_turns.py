"""Whose turn it is to serve the controller's sockets: the I/O thread's, or the main thread's while it waits.

A wake-up of a thread costs tens of microseconds, as much as all our work for a call. So the main thread, while it waits
for an answer, takes the turn and reads the sockets itself; the I/O thread stays away until the main thread has stopped
coming back for a moment. The turn is a lock: whoever holds it uses the sockets and the state behind them, nobody else.

SIGINT would raise in the midst of our bookkeeping. During its turn the main thread therefore only notes it, and raises
when the turn is over. What other handlers raise, and what a thread raises in this one, ends the wait as it would end
any other.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from meshbook.concurrency import forks
from meshbook.concurrency.future import Future
from meshbook.concurrency.own_faults import is_from_outside, serving, tell
from meshbook.concurrency.sigint import SigintScope

T = TypeVar("T")

REST_S = 0.003
"""The I/O thread takes over again when the main thread has not come back for so long."""

_LOOK_S = 0.005
"""How often the resting I/O thread looks."""

ASK_TIMEOUT_S = 10.0
"""How long whoever asks for something under the turn waits for it."""


class TurnQueue:
    """What other threads want done under the turn. Any thread may call any method. Raises: OSError."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Callable[[], object], Callable[[Exception], object] | None]] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_asleep = False
        """Whether somebody waits for ``wake_fd``."""
        self.is_closed = False
        self._generation = forks.generation

    def submit(self, action: Callable[[], object], fail: Callable[[Exception], object] | None = None) -> None:
        """Have the I/O thread run ``action``; actions run in the order of submission.

        fail: takes what it raises, for whoever waits for it. Without one that is told as a fault of ours.
        Raises: UsageError in a process that was forked from ours: it has no such thread.
        """
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        self.asked.append((action, fail))
        if self.is_asleep:
            self.wake()

    def ask(self, action: Callable[[], T]) -> T:
        """Have the I/O thread run ``action`` and return its result."""
        future: Future[T] = Future()
        self.submit(lambda: future.set_result(action()), future.set_exception)
        return future.get(ASK_TIMEOUT_S)

    def wake(self) -> None:
        """Have whoever serves look at what is asked."""
        if self.is_asleep and not self.is_closed:
            os.eventfd_write(self.wake_fd, 1)


class SocketTurn:
    """``serve(timeout_s)`` waits for events and handles them; ``wake()`` makes a waiting ``serve`` return."""

    def __init__(self, serve: Callable[[float | None], None], wake: Callable[[], None]) -> None:
        self._serve, self._wake = serve, wake
        self._turn = threading.Lock()
        self._driving = False
        self._rest_until = 0.0
        self._rest = threading.Event()
        self._interrupted = False
        self._scope = SigintScope(self._note)

    def serve_until(self, ended: Callable[[], bool]) -> None:
        """Serve as the I/O thread until ``ended()``."""
        me = threading.get_ident()
        serving.add(me)
        while not ended():
            if self._driving or time.monotonic() < self._rest_until:
                self._rest.wait(_LOOK_S)
                continue
            with self._turn:
                try:
                    self._serve(None)
                except Exception as error:
                    self._rest_from(error)
        serving.discard(me)

    def drive(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """On the main thread: serve until ``done()``, the timeout, or an interrupt, which is raised afterwards.

        On any other thread, or when the main thread has the turn already, nothing happens: wait as usual.
        Raises: what the handler of another signal raises meanwhile, or another thread in this one.
        """
        me = threading.get_ident()
        if self._driving or me != forks.main_thread:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._interrupted = False
        is_open = self._scope.open()
        self._driving = True
        try:
            if not self._turn.acquire(blocking=False):
                self._wake()
                self._turn.acquire()
            serving.add(me)
            try:
                while not done() and not self._interrupted:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        break
                    try:
                        self._serve(left)
                    except Exception as error:
                        if is_from_outside(error):
                            raise
                        self._rest_from(error)
            finally:
                serving.discard(me)
                self._turn.release()
        finally:
            self._rest_until = time.monotonic() + REST_S
            self._driving = False
            if is_open:
                self._scope.close()
            if self._interrupted and self._scope.before is not None:
                self._interrupted = False
                self._scope.before(signal.SIGINT, None)

    @staticmethod
    def _rest_from(error: Exception) -> None:
        """A fault of ours costs what was served just then, not the thread."""
        tell(error, "the thread of the hosts")
        time.sleep(_LOOK_S)  # it may be met again at once

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._wake()
