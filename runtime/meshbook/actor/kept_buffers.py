"""The buffers of this process: memory that others may read and write, kept alive until they are dropped.

Most accesses need nothing of this process (`meshbook.actor.direct_copy`). The others come by mail, piece by piece, to a
mailbox of the buffer's own, and are served on side threads.
"""

from __future__ import annotations

import os
import socket
import threading

from meshbook import wire
from meshbook.actor.direct_copy import Guard, Spot
from meshbook.actor.errors import BufferSizeError
from meshbook.actor.memory import Memory
from meshbook.actor.roads import Road
from meshbook.actor.stream_copy import Door, Silence, StreamError, connect, receive_all, send_all
from meshbook.answers import Answer
from meshbook.letters import refusal
from meshbook.mailboxes import LoadArgs, Reply
from meshbook.side_threads import Lane, run_aside

READ, WRITE, DROP = "read", "write", "drop"
STREAM = "stream "
"""Followed by READ or WRITE: over a connection of its own (`meshbook.actor.stream_copy`)."""

DROPPED = "the buffer was dropped"
"""Why its mailbox is closed."""


class KeptBuffer:
    """One of them; ``spot`` and ``mailbox`` say how others reach it."""

    def __init__(self, kept: KeptBuffers, road: Road, memory: Memory, spot: Spot) -> None:
        self._kept, self._road, self.spot = kept, road, spot
        self.memory: Memory | None = memory
        """None once it was dropped."""
        self._lane = Lane()
        self.mailbox = road.new_mailbox()
        road.mailboxes.open(self.mailbox, self._handle)

    def _handle(self, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        """On the thread of the mail: somebody reaches us in no other way."""
        if call.endpoint.startswith(STREAM):
            run_aside(lambda: self._serve(call, load_args, reply))  # they wait for each other's networks
        else:
            self._lane.add(lambda: self._serve(call, load_args, reply))

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        try:
            reply(Answer(wire.OK, self._do(call, load_args), has_value=True, what="a piece of the buffer"))
        except Exception as error:
            reply(refusal(error, self._road.place.rank, socket.gethostname()))

    def _do(self, call: wire.Call, load_args: LoadArgs) -> object:
        if call.endpoint == DROP:
            self.drop()
            return None
        args, _ = load_args()
        if (memory := self.memory) is None:  # dropped since the call came
            self._road.mailboxes.find(self.mailbox, self._road.place.rank)
            raise AssertionError("its mailbox is closed before its memory goes")
        streamed = call.endpoint.startswith(STREAM)
        offset = 0 if streamed else args[0]
        size_bytes = len(args[1]) if call.endpoint == WRITE else args[1]
        if not 0 <= offset <= offset + size_bytes <= memory.size_bytes:
            raise BufferSizeError(f"bytes {offset} to {offset + size_bytes} of a buffer of {memory.size_bytes}")
        view = memory.view(offset, size_bytes)
        if streamed:
            self._stream(memoryview(view), call.endpoint.removeprefix(STREAM), Door(*args[0]))
            return None
        if call.endpoint == READ:
            return view.copy()  # what is packed into the reply may be dropped meanwhile
        view[:] = args[1]
        return None

    def _stream(self, view: memoryview, kind: str, door: Door) -> None:
        try:
            with connect(door) as connection:
                (send_all if kind == READ else receive_all)(connection, view, Silence())
        except OSError as error:
            raise StreamError(f"the connection to {door.address} broke: {error}") from error

    def drop(self) -> None:
        """Let go of the memory once nobody is at it any more. Any thread; idempotent."""
        self._road.mailboxes.close(self.mailbox, DROPPED)
        if self._kept.forget(self):
            if self._kept.guard.drop(self.spot.slot):
                self._end()
            else:
                run_aside(self._end_later)

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
        """By mailbox."""
        self._unsettled = 0
        """Those whose memory is not free yet."""
        self._guard: Guard | None = None

    @property
    def guard(self) -> Guard:
        assert self._guard is not None, "it is there while there are buffers"
        return self._guard

    def add(self, memory: Memory, road: Road) -> KeptBuffer:
        """Keep memory from now on."""
        with self._lock:
            if self._guard is None:
                self._guard = Guard()
            self._unsettled += 1
            buffer = KeptBuffer(self, road, memory, self._guard.add(memory.address))
            self._live[buffer.mailbox] = buffer
        return buffer

    def find(self, mailbox: int) -> KeptBuffer | None:
        """The buffer of this process that has this mailbox, if it was not dropped."""
        return self._live.get(mailbox)

    def forget(self, buffer: KeptBuffer) -> bool:
        """It is being dropped; False if it was before."""
        return self._live.pop(buffer.mailbox, None) is not None

    def settle(self, buffer: KeptBuffer) -> None:
        """Its memory is free."""
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
