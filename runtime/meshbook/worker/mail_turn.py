"""The turn to read a worker's mail: the mail's own thread has it, or an actor's thread while that has nothing to do.

A wake-up of a thread takes as long as all our work for a message. So an actor that is alone in its process reads the
mail itself while it waits, for a message or for an answer, in an event loop (`IdleSelector`) or not; the mail's thread
stays away until the actor has been busy for a moment. The turn is a lock: its holder reads, and hands out the messages,
in order.

    idle actor      read_while ──> reads, until there is something for it ──> handles that
    mail's thread   rests ............................................ reads, once that takes longer than REST_S

Mail never waits for an actor's code: with other mailboxes in the process, or other threads that wait for answers, the
mail's thread reads, as it does where there is a debugger that may stop the threads of actors.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Collection

from meshbook.worker.channel import AgentChannel

REST_S = 0.003  # the mail's thread takes over when the actor has not come back for so long
_LOOK_S = 0.005  # how often it looks meanwhile
SOLE = 2  # the mailboxes of a process with one actor: that of the actor, and the one in which actors are spawned
_LOOKS = 10  # the thread sleeps after so many looks at an idle actor, until that has something to do


class MailTurn:
    """The turn to read the mail of one process.

    handle: takes the next message; returns False at the end. expire: fails overdue calls; returns in how many seconds
    to come again. mailboxes: the numbers of the open ones. calls: ids of the unanswered ones. others: those among them
    that the actor may not be waiting for.
    """

    def __init__(
        self,
        channel: AgentChannel,
        handle: Callable[[], bool],
        expire: Callable[[], float | None],
        mailboxes: Collection[int],
        calls: Collection[int],
        others: set[int],
    ) -> None:
        self._channel, self._handle, self._expire = channel, handle, expire
        self._mailboxes, self._calls, self._calls_of_others = mailboxes, calls, others
        self.reader = 0  # the thread whose turn it is; it must not wait
        self._turn, self._claim = threading.Lock(), threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel_fd = channel.frames.fileno()
        self._arrivals = select.epoll()
        self._arrivals.register(self._channel_fd, select.EPOLLIN)
        self._arrivals.register(self._wake_fd, select.EPOLLIN)
        self._others: dict[int, Callable[[], object]] = {}  # functions to call when other descriptors can be read
        self.loops: set[int] = set()  # the threads whose event loops read (`IdleSelector`)
        self._is_asleep = False  # whether the reader waits for a message
        self._bell = threading.Event()  # ends a rest of the mail's thread
        self._rest_until = 0.0
        self._rests_long = False
        self._leads = self._seen = self._looks = 0
        self._is_over = self._is_private = False

    def arrivals_or(self, beside: int) -> select.poll:
        """Return a poll for a reader that waits for another descriptor as well."""
        arrivals = select.poll()
        for fd in (self._arrivals.fileno(), beside):
            arrivals.register(fd, select.POLLIN)
        return arrivals

    # ---- the thread of the mail -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read when no actor does, until the end of the stream."""
        while not self._is_over:
            if self._is_led():
                self._rest()
            else:
                with self._turn:
                    self._read(lambda: not self._claim.locked(), None, None)

    def _is_led(self) -> bool:
        return self._claim.locked() or time.monotonic() < self._rest_until

    def _rest(self) -> None:
        self._looks = self._looks + 1 if self._leads == self._seen else 0
        self._seen = self._leads
        self._bell.clear()
        self._rests_long = self._looks > _LOOKS
        if self._is_led():  # looked at once more: what ends it rings after that
            self._bell.wait(None if self._rests_long and self._claim.locked() else _LOOK_S)
        self._rests_long = False

    # ---- an actor's thread ----------------------------------------------------------------------------------------

    def read_while(
        self, waits: Callable[[], bool], step_s: float | None = None, arrivals: select.poll | None = None
    ) -> bool:
        """Read while the actor ``waits()``, which is asked after each message and `wake`, and every ``step_s``. Returns
        False, at once, where the mail's thread is to read. arrivals: see `arrivals_or`."""
        if self._is_private or self._is_over or len(self._mailboxes) > SOLE:
            self.hand_back()
            return False
        if not self._claim.acquire(blocking=False):
            return False
        try:
            if not self._turn.acquire(blocking=False):
                self.wake()
                self._turn.acquire()
            try:
                self._read(waits, step_s, arrivals, leads=True)
            finally:
                self._turn.release()
        finally:
            self._leads += 1
            self._calls_of_others.intersection_update(self._calls)
            stays = len(self._mailboxes) <= SOLE and not (self._calls_of_others or self._is_private or self._is_over)
            self._rest_until = time.monotonic() + REST_S if stays else 0.0
            self._claim.release()
            if self._rests_long or not stays:
                self._bell.set()
        return True

    # ---- any thread -----------------------------------------------------------------------------------------------

    def hand_back(self) -> None:
        """End the rest of the mail's thread: a caller waits for mail, though an actor may be busy."""
        if self._rest_until:
            self._rest_until = 0.0
            self._bell.set()

    def keep_private(self) -> None:
        """Let only the mail's thread read from now on; return when no other thread does."""
        self._is_private = True
        self.wake()
        with self._claim:
            self.hand_back()

    def wake(self) -> None:
        """Have the reader look whether it is to end."""
        if self._is_asleep:
            os.eventfd_write(self._wake_fd, 1)

    # ---- whoever has the turn -------------------------------------------------------------------------------------

    def watch(self, fd: int, look: Callable[[], object]) -> None:
        """Call ``look`` when a descriptor can be read, or has ended."""
        self._others[fd] = look
        self._arrivals.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Watch a descriptor no more; call it before that is closed."""
        self._others.pop(fd, None)
        with contextlib.suppress(OSError):  # user code has closed it
            self._arrivals.unregister(fd)

    def _read(
        self, waits: Callable[[], bool], step_s: float | None, arrivals: select.poll | None, *, leads: bool = False
    ) -> None:
        self.reader = threading.get_ident()
        try:
            while not self._is_over:
                self._is_asleep = True  # before we look: what comes after that wakes us
                if not waits() or (leads and self._is_private):
                    return
                if self._wait(step_s, arrivals):
                    self._is_asleep = False
                    self._is_over = not self._handle()
                    while not self._is_over and self._channel.frames.has_message:  # they have come together
                        self._is_over = not self._handle()
        finally:
            self._is_asleep = False
            self.reader = 0

    def _wait(self, step_s: float | None, arrivals: select.poll | None) -> bool:
        """Return whether a message is there, now or within ``step_s``."""
        due_s = self._expire()
        if due_s is not None:
            step_s = due_s if step_s is None else min(step_s, due_s)
        is_there = False
        if arrivals is not None:
            arrivals.poll(None if step_s is None else step_s * 1000)
            step_s = 0
        for fd, _ in self._arrivals.poll(step_s):
            if fd == self._channel_fd:
                is_there = True
            elif fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            elif (look := self._others.get(fd)) is not None:
                look()
        return is_there


class IdleSelector(selectors.DefaultSelector):
    """The selector of an actor's event loop, which reads the mail while the loop is idle. Made on the loop's thread."""

    def __init__(self, turn: MailTurn) -> None:
        super().__init__()
        self._turn, self._arrivals = turn, turn.arrivals_or(self.fileno())
        turn.loops.add(threading.get_ident())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (timeout is None or timeout > 0) and self._turn.read_while(
            iter((True, False)).__next__, timeout, self._arrivals
        ):
            timeout = 0  # what has come may have made something ready in the loop
        return super().select(timeout)

    def close(self) -> None:
        self._turn.loops.discard(threading.get_ident())
        super().close()
