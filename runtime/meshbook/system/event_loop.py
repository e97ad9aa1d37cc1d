"""The host agent's event loop: epoll with generations, and timers.

A descriptor number can be reused within one batch of events, so an event is delivered only to the registration that it
was polled for. Everything runs on one thread; callbacks never block.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

from meshbook.concurrency.background import attempt, tell

REST_S = 0.1
"""The time for which a descriptor rests whose callback has met a fault of ours."""


class Watch:
    """A descriptor that the loop watches."""

    __slots__ = ("active", "fd", "mask", "on_readable", "on_writable", "resting")

    def __init__(
        self, fd: int, mask: int, on_readable: Callable[[], object], on_writable: Callable[[], None] | None
    ) -> None:
        self.fd, self.mask, self.on_readable, self.on_writable = fd, mask, on_readable, on_writable
        self.active = True
        self.resting = False


class EventLoop:
    """Level-triggered readiness and monotonic timers."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, Watch] = {}
        self.unwritten: set[Watch] = set()
        """The watches that want to be told when their descriptors can be written."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watch(
        self,
        fd: int,
        on_readable: Callable[[], object],
        on_writable: Callable[[], None] | None = None,
        *,
        edges: bool = False,
    ) -> Watch:
        """Call ``on_readable`` whenever ``fd`` can be read or has reached its end.

        edges: only when something has come since, even if bytes were left unread.
        """
        watch = Watch(fd, select.EPOLLIN | (select.EPOLLET if edges else 0), on_readable, on_writable)
        self._watches[fd] = watch
        self._epoll.register(fd, watch.mask)
        return watch

    def want_writable(self, watch: Watch, wanted: bool) -> None:
        """Start or stop calling the watch's ``on_writable``."""
        if wanted:
            watch.mask |= select.EPOLLOUT
            self.unwritten.add(watch)
        else:
            watch.mask &= ~select.EPOLLOUT
            self.unwritten.discard(watch)
        if watch.active and not watch.resting:
            self._epoll.modify(watch.fd, watch.mask)

    def forget(self, watch: Watch) -> None:
        """Stop watching; call this before closing the descriptor."""
        if watch.active:
            watch.active = False
            del self._watches[watch.fd]
            self.unwritten.discard(watch)
            if not watch.resting:
                self._epoll.unregister(watch.fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` once, ``delay_s`` from now."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def run_once(self) -> None:
        """Wait for the next event or timer and serve those that are due. Errors of callbacks are faults of ours."""
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        ready: list[tuple[Watch, int]] = []  # all of them first: a descriptor may be another's before its turn
        for fd, mask in self._epoll.poll(timeout):
            if (found := self._watches.get(fd)) is not None:
                ready.append((found, mask))
        for watch, mask in ready:
            try:
                if watch.active and mask & ~select.EPOLLOUT:
                    watch.on_readable()
                if watch.active and mask & select.EPOLLOUT and watch.on_writable is not None:
                    watch.on_writable()
            except Exception as error:
                tell(error, f"what file {watch.fd} has to say")
                self.rest(watch, REST_S)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            attempt(heapq.heappop(self._timers)[2], "a timer")

    def rest(self, watch: Watch, delay_s: float) -> None:
        """Look away for a moment: bytes that were not read are there still, and would be served again at once."""
        if watch.active and not watch.resting:
            self._epoll.unregister(watch.fd)
            watch.resting = True
            self.call_later(delay_s, lambda: self._look_again(watch))

    def _look_again(self, watch: Watch) -> None:
        if watch.active and watch.resting:
            watch.resting = False
            self._epoll.register(watch.fd, watch.mask)
