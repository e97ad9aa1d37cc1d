"""The thread that serves the controller's sockets, and the turns that it takes with the main thread.

A wake-up of a thread costs tens of microseconds, as much as all our work for a call. So the main thread, while it waits
for an answer, takes the turn and reads the sockets itself; the I/O thread stays away until the main thread has stopped
coming back for a moment. The turn is a lock: only its holder uses the sockets and the state behind them.

SIGINT would raise in the midst of our bookkeeping. During its turn the main thread therefore only notes it, and raises
when the turn is over. An exception of another signal's handler, or one that a thread raises in this one, ends the wait.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from meshbook.concurrency import forks
from meshbook.concurrency.background import attempt, hidden_thread, is_from_outside, pass_on, serving, tell
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import SigintScope
from meshbook.controller.dispatcher import Dispatcher
from meshbook.wire.link import HEARTBEAT_S
from meshbook.wire.transport import ControllerSocket

T = TypeVar("T")
REST_S = 0.003  # the I/O thread takes over again when the main thread has not come back for so long
_LOOK_S = 0.005  # how often the resting I/O thread looks
ASK_TIMEOUT_S = 10.0  # how long `TurnQueue.ask` waits for a result


class TurnQueue:
    """The actions that other threads want done under the turn. Any thread may call any method. Raises: OSError."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Callable[[], object], Callable[[Exception], object] | None]] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_asleep = False  # whether the serving thread waits for ``wake_fd``
        self.is_closed = False
        self._generation = forks.generation

    def submit(self, action: Callable[[], object], fail: Callable[[Exception], object] | None = None) -> None:
        """Have the I/O thread run ``action``; actions run in the order of submission.

        fail: takes the exception that the action raises; without it the exception is printed as a fault of ours.
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
        """Wake the serving thread to look at the actions."""
        if self.is_asleep and not self.is_closed:
            os.eventfd_write(self.wake_fd, 1)


class SocketTurn:
    """The turn. ``serve(timeout_s)`` waits for events and handles them; ``wake()`` makes a waiting ``serve`` return."""

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
        """Serve on the main thread until ``done()``, the timeout, or an interrupt, which is raised afterwards.

        On any other thread, or when the main thread has the turn already, nothing happens: wait as usual.
        Raises: the errors of other signal handlers, and those that another thread raises in this one.
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
        """Print a fault of ours and rest: it costs the events that were being served, not the thread."""
        tell(error, "the thread of the hosts")
        time.sleep(_LOOK_S)  # it may be met again at once

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._wake()


ACK_IDLE_S = 0.02  # messages are acknowledged when nothing has come for so long
LINGER_MS = 500  # at the end, the time for messages to go out: an agent that misses its goodbye waits for its lease


class IoThread:
    """The I/O thread of one controller. It owns ``sock``, and closes it."""

    def __init__(self, inbox: TurnQueue, sock: ControllerSocket, dispatcher: Dispatcher) -> None:
        self._inbox, self._socket, self._dispatcher = inbox, sock, dispatcher
        self._tick_at = 0.0
        self._heard: set[str] = set()  # hosts to which we may owe acknowledgements
        self._ack_at = math.inf
        self.turn = SocketTurn(self._serve, inbox.wake)
        self._thread = hidden_thread(self._run, "meshbook.io")
        self._thread.start()

    def close(self) -> None:
        """End the thread, once."""
        self._inbox.is_closed = True
        os.eventfd_write(self._inbox.wake_fd, 1)
        self._thread.join(timeout=5)
        os.close(self._inbox.wake_fd)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        try:
            self.turn.serve_until(lambda: self._inbox.is_closed)
        finally:
            self._dispatcher.direct.close()
            self._socket.close(LINGER_MS)

    def _serve(self, timeout_s: float | None) -> None:
        """Run the actions, then wait for messages, at most ``timeout_s``. Only the holder of the turn calls it."""
        while self._inbox.asked:
            action, fail = self._inbox.asked.popleft()
            try:  # `attempt` in its own words: this is on the path of every call
                action()
            except Exception as error:
                pass_on(error, "something that was asked of the thread of the hosts", fail)
        self._dispatcher.flush()
        payloads = self._dispatcher.payloads
        if payloads.freed or payloads.gone:
            payloads.tell_freed()
        if self._inbox.is_closed:
            return
        self._sleep(timeout_s)
        heard = self._heard
        for look in self._socket.take_ready():
            attempt(look, "what a rank has sent by its link")
            heard.add("")  # no host's id: there is something to acknowledge, soon, though no pause may come
        messages = self._socket.receive()
        for host_id, frames in messages:
            self._dispatcher.on_frames(host_id, frames)
            heard.add(host_id)
            self._ack_at = math.inf
        if heard and self._ack_at == math.inf:
            self._ack_at = time.monotonic() + ACK_IDLE_S
        elif heard and time.monotonic() >= self._ack_at:
            self._dispatcher.acknowledge(heard)
            heard.clear()
            self._ack_at = math.inf
        now = time.monotonic()
        if now >= self._dispatcher.due_at:
            self._dispatcher.expire(now)
        if now >= self._tick_at:
            self._tick_at = now + HEARTBEAT_S
            self._dispatcher.tick()
            self._socket.watch_door()

    def _sleep(self, timeout_s: float | None) -> None:
        inbox = self._inbox
        inbox.is_asleep = True  # from here on `submit` wakes us
        next_at = min(self._tick_at, self._ack_at, self._dispatcher.plan())
        left = max(0.0, next_at - time.monotonic())
        wait_s = 0 if inbox.asked else left if timeout_s is None else min(left, timeout_s)
        if self._socket.poll(inbox.wake_fd, wait_s):
            self._tick_at = 0.0  # a host's process has ended: the heartbeat finds out which
        inbox.is_asleep = False
