"""The buffers of this process: memory that others may read and write, kept alive until they are dropped.

Most accesses need nothing of this process (`meshbook.actor.buffers.memory`). The others come by mail, piece by
piece, to a mailbox of the buffer's own, and are served on side threads.
"""

from __future__ import annotations

import os
import socket
import threading

from meshbook.actor.buffers.atomics import AtomicChange
from meshbook.actor.buffers.memory import LiveTable, Memory, RemoteAddress
from meshbook.actor.buffers.tcp import Rendezvous, Silence, StreamError, connect, receive_all, send_all
from meshbook.actor.errors import BufferSizeError
from meshbook.actor.router import Router
from meshbook.calls.answer import Outcome
from meshbook.calls.incoming import refusal
from meshbook.calls.mailboxes import LoadArgs, ReplyTo
from meshbook.concurrency.background import SerialQueue, run_in_background
from meshbook.wire import messages as wire

READ, WRITE, DROP = "read", "write", "drop"
ATOMIC = "atomic change"
STREAM = "stream "
"""Followed by READ or WRITE: over a connection of its own (`meshbook.actor.buffers.tcp`)."""

DROPPED = "the buffer was dropped"
"""Why its mailbox is closed."""


class KeptBuffer:
    """One of them; ``spot`` and ``mailbox`` say how others reach it."""

    def __init__(self, kept: KeptBuffers, router: Router, memory: Memory, spot: RemoteAddress) -> None:
        self._kept, self._router, self.spot = kept, router, spot
        self.memory: Memory | None = memory
        """None once it was dropped."""
        self._lane = SerialQueue()
        self.mailbox = router.new_mailbox()
        router.mailboxes.open(self.mailbox, self._handle)

    def _handle(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """On the thread of the mail: somebody reaches us in no other way."""
        if call.endpoint.startswith(STREAM):
            run_in_background(lambda: self._serve(call, load_args, reply))  # they wait for each other's networks
        else:
            self._lane.add(lambda: self._serve(call, load_args, reply))

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        try:
            reply(Outcome(wire.OK, self._do(call, load_args), has_value=True, what="a piece of the buffer"))
        except Exception as error:
            reply(refusal(error, self._router.place.rank, socket.gethostname()))

    def _do(self, call: wire.Call, load_args: LoadArgs) -> object:
        if call.endpoint == DROP:
            self.drop()
            return None
        args, _ = load_args()
        if (memory := self.memory) is None:  # dropped since the call came
            self._router.mailboxes.find(self.mailbox, self._router.place.rank)
            raise AssertionError("its mailbox is closed before its memory goes")
        if call.endpoint == ATOMIC:
            return AtomicChange(*args).make(memory)
        streamed = call.endpoint.startswith(STREAM)
        offset = 0 if streamed else args[0]
        size_bytes = len(args[1]) if call.endpoint == WRITE else args[1]
        if not 0 <= offset <= offset + size_bytes <= memory.size_bytes:
            raise BufferSizeError(f"bytes {offset} to {offset + size_bytes} of a buffer of {memory.size_bytes}")
        view = memory.view(offset, size_bytes)
        if streamed:
            self._stream(view.data, call.endpoint.removeprefix(STREAM), Rendezvous(*args[0]))
            return None
        if call.endpoint == READ:
            return view.copy()  # what is packed into the reply may be dropped meanwhile
        view[:] = args[1]
        return None

    def _stream(self, view: memoryview, kind: str, door: Rendezvous) -> None:
        try:
            with connect(door) as connection:
                (send_all if kind == READ else receive_all)(connection, view, Silence())
        except OSError as error:
            raise StreamError(f"the connection to {door.address} broke: {error}") from error

    def drop(self) -> None:
        """Let go of the memory once nobody is at it any more. Any thread; idempotent."""
        self._router.mailboxes.close(self.mailbox, DROPPED)
        if self._kept.forget(self):
            if self._kept.guard.drop(self.spot.slot):
                self._end()
            else:
                run_in_background(self._end_later)

    def _end_later(self) -> None:
        self._kept.guard.drop(self.spot.slot, wait=True)
        self._end()

    def _end(self) -> None:
        self.memory = None
        self._kept.settle(self)


class KeptBuffers:
    """Of one process. The guard lives as long as there are any."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._live: dict[int, KeptBuffer] = {}
        """The buffers that others may use, by their mailboxes."""
        self._unsettled = 0
        """Those whose memory is not free yet."""
        self._guard: LiveTable | None = None

    @property
    def guard(self) -> LiveTable:
        assert self._guard is not None, "it is there while there are buffers"
        return self._guard

    def add(self, memory: Memory, router: Router) -> KeptBuffer:
        """Keep memory from now on."""
        with self._lock:
            if self._guard is None:
                self._guard = LiveTable()
            self._unsettled += 1
            buffer = KeptBuffer(self, router, memory, self._guard.add(memory.address))
            self._live[buffer.mailbox] = buffer
        return buffer

    def find(self, mailbox: int) -> KeptBuffer | None:
        """The buffer of this process that has this mailbox, if it was not dropped."""
        return self._live.get(mailbox)

    def forget(self, buffer: KeptBuffer) -> bool:
        """It is being dropped; False if it was before."""
        return self._live.pop(buffer.mailbox, None) is not None

    def settle(self, buffer: KeptBuffer) -> None:
        """Note that the memory of one buffer is free."""
        with self._lock:
            self._unsettled -= 1
            if not self._unsettled and self._guard is not None:
                self._guard.close()
                self._guard = None


_kept = KeptBuffers()


def kept_buffers() -> KeptBuffers:
    """Those of this process; a fork begins anew."""
    global _kept
    if _kept.pid != os.getpid():
        _kept = KeptBuffers()
    return _kept
