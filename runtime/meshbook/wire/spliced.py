"""Pairs of connections whose bytes go on at the other one of the pair, for as long as both last.

    ours ── read ──> [at most `PIECE_BYTES`] ── written ──> theirs         and the same the other way

What one side has not taken keeps the other from being read, so a slow reader slows the writer down, as if there were
one connection. Who says no more is told on as such; the pair goes when both have, or when either breaks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque

from meshbook.concurrency.background import hidden_thread
from meshbook.system.connections import end_connection, send_at_once

PIECE_BYTES = 256 << 10


class _Way:
    """One direction of a pair: what was read from ``source`` and not yet written to ``sink``."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.held = memoryview(b"")
        self.is_at_end = False
        """Nothing more comes from the source, and the sink knows."""
        self._source_ended = False

    @property
    def reads(self) -> bool:
        return not self.held and not self._source_ended

    def carry(self) -> None:
        """Read and write as far as both go without waiting. Raises: OSError."""
        with contextlib.suppress(BlockingIOError):
            if self.reads:
                self.held = memoryview(self.source.recv(PIECE_BYTES))
                self._source_ended = not self.held
            while self.held:
                self.held = self.held[self.sink.send(self.held) :]
        if self._source_ended and not self.held and not self.is_at_end:
            self.is_at_end = True
            self.sink.shutdown(socket.SHUT_WR)


class Splices:
    """The pairs of one process, on a thread of their own, until `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ways: dict[socket.socket, tuple[_Way, _Way]] = {}
        """By either socket of a pair: what is read from it, and what is written to it."""
        self._new: deque[tuple[socket.socket, socket.socket]] = deque()
        self._wake, self._owner, self._is_closed = os.eventfd(0, os.EFD_CLOEXEC), os.getpid(), False
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = hidden_thread(self._serve, "meshbook.spliced")
        self._thread.start()

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Carry bytes between two connections from now on; both are ours to close. Any thread."""
        self._new.append((one, other))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Break all pairs. Idempotent; in a fork it does nothing."""
        if not self._is_closed and self._owner == os.getpid():
            self._is_closed = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select():
                    if key.fileobj == self._wake:
                        os.eventfd_read(self._wake)
                    elif (sock := key.fileobj) in self._ways:  # else its pair has just gone
                        assert isinstance(sock, socket.socket)
                        self._carry(sock)
                while self._new:
                    self._begin(*self._new.popleft())
        finally:
            for sock in [*self._ways, *(each for pair in self._new for each in pair)]:
                end_connection(sock)
            self._selector.close()
            os.close(self._wake)

    def _begin(self, one: socket.socket, other: socket.socket) -> None:
        there, back = _Way(one, other), _Way(other, one)
        for sock, ways in ((one, (there, back)), (other, (back, there))):
            sock.setblocking(False)
            send_at_once(sock)
            self._ways[sock] = ways
            self._selector.register(sock, selectors.EVENT_READ)

    def _carry(self, sock: socket.socket) -> None:
        out, into = self._ways[sock]
        try:
            out.carry()
            into.carry()
        except OSError:
            self._drop(out)
            return
        if out.is_at_end and into.is_at_end:
            self._drop(out)
            return
        for each in (out.source, out.sink):
            self._watch(each)

    def _watch(self, sock: socket.socket) -> None:
        """Look for what its two ways wait for; for nothing where both wait for the other socket."""
        out, into = self._ways[sock]
        wanted = (selectors.EVENT_READ if out.reads else 0) | (selectors.EVENT_WRITE if into.held else 0)
        known = self._selector.get_map().get(sock)
        if not wanted:
            if known is not None:
                self._selector.unregister(sock)
        elif known is None:
            self._selector.register(sock, wanted)
        elif known.events != wanted:
            self._selector.modify(sock, wanted)

    def _drop(self, way: _Way) -> None:
        for sock in (way.source, way.sink):
            del self._ways[sock]
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            end_connection(sock)
