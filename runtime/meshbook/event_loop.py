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


class Watch:
    """One registered descriptor."""

    __slots__ = ("active", "fd", "on_readable", "on_writable")

    def __init__(self, fd: int, on_readable: Callable[[], object], on_writable: Callable[[], None] | None) -> None:
        self.fd, self.on_readable, self.on_writable = fd, on_readable, on_writable
        self.active = True


class EventLoop:
    """Level-triggered readiness and monotonic timers."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, Watch] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watch(self, fd: int, on_readable: Callable[[], object], on_writable: Callable[[], None] | None = None) -> Watch:
        """Call ``on_readable`` whenever ``fd`` can be read or has reached its end."""
        watch = Watch(fd, on_readable, on_writable)
        self._watches[fd] = watch
        self._epoll.register(fd, select.EPOLLIN)
        return watch

    def want_writable(self, watch: Watch, wanted: bool) -> None:
        """Start or stop calling the watch's ``on_writable``."""
        if watch.active:
            self._epoll.modify(watch.fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def forget(self, watch: Watch) -> None:
        """Stop watching; call this before closing the descriptor."""
        if watch.active:
            watch.active = False
            del self._watches[watch.fd]
            self._epoll.unregister(watch.fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` once, ``delay_s`` from now."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def run_once(self) -> None:
        """Wait for the next event or timer and serve what is due."""
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        watches = self._watches
        for watch, mask in [(watches[fd], mask) for fd, mask in self._epoll.poll(timeout) if fd in watches]:
            if watch.active and mask & ~select.EPOLLOUT:
                watch.on_readable()
            if watch.active and mask & select.EPOLLOUT and watch.on_writable is not None:
                watch.on_writable()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
