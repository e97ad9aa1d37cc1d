"""Large payloads of the controller: written once into shared memory, lent to hosts, mapped when they come back.

Hosts on the controller's machine map the same segment; others get the bytes in pieces (`meshbook.bulk`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from meshbook import wire
from meshbook.errors import MeshError, PeerProtocolError
from meshbook.known_host import KnownHost
from meshbook.segments import SegmentPool, map_segment


class Unavailable(tuple[Any, ...]):
    """Stands for buffers that could not be had here; whoever iterates over them gets the reason."""

    def __new__(cls, error: MeshError) -> Unavailable:
        made = super().__new__(cls, (None,))
        made.error = error
        return made

    error: MeshError

    def __iter__(self) -> Iterator[Any]:
        raise self.error


class Payloads:
    """`write` may be called by any thread, the rest by the I/O thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = SegmentPool()
        self._lent: dict[int, int] = {}
        self._freed: deque[tuple[KnownHost, int, int]] = deque()

    def write(self, buffers: Sequence[Any]) -> wire.SegmentRef | None:
        """Copy buffers into a segment; None when there are none."""
        return self._pool.write(buffers) if buffers else None

    def send(
        self,
        hosts: Sequence[KnownHost],
        message: wire.Call,
        payload: Sequence[bytes],
        segment: wire.SegmentRef | None,
        buffers: Sequence[Any],
    ) -> None:
        """Send a call and its payload to every host in the way that the host can take it."""
        if segment is None:
            for host in hosts:
                host.send(message, payload)
            return
        sharing = [host for host in hosts if host.shares_memory]
        self._lent[segment.segment] = len(sharing)
        for host in sharing:
            host.send(msgspec.structs.replace(message, segment=segment), payload)
        for host in hosts:
            if not host.shares_memory:
                name, pieces = host.bulk_out.pieces(buffers)
                for piece, data in pieces:
                    host.send_bulk(piece, bytes(data))
                host.send(msgspec.structs.replace(message, bulk=name), payload)
        if not sharing:
            self.on_free(segment.segment)

    def on_free(self, segment: int) -> None:
        """A host has let go of one of our segments; the last one gives it back to the pool."""
        left = self._lent.get(segment, 0) - 1
        if left > 0:
            self._lent[segment] = left
        else:
            self._lent.pop(segment, None)
            self._pool.release(segment)

    def send_reply(
        self,
        host: KnownHost,
        call: int,
        origin: wire.Origin | None,
        reply: wire.RankReply,
        frames: Sequence[bytes],
        segment: wire.SegmentRef | None,
        buffers: Sequence[Any],
    ) -> None:
        """Answer a call of a worker of ``host``."""
        if segment is not None and host.shares_memory and not host.lost:
            self._lent[segment.segment] = 1
            reply = reply._replace(segment=segment)
        elif segment is not None:
            if not host.lost:
                name, pieces = host.bulk_out.pieces(buffers)
                for piece, data in pieces:
                    host.send_bulk(piece, bytes(data))
                reply = reply._replace(bulk=name)
            self.on_free(segment.segment)
        if not host.lost:
            host.send(wire.Replies(call, (reply,), origin), frames)

    def receive(self, host: KnownHost, reply: wire.RankReply | wire.Call) -> Sequence[Any]:
        """The large buffers of a reply or a call; its worker is told when the last view of them has died here."""
        if reply.bulk is not None:
            if not host.bulk_in.has(reply.bulk[0]):
                raise PeerProtocolError(f"a reply names payload {reply.bulk[0]}, which was not sent")
            return host.bulk_in.take(*reply.bulk)
        if reply.segment is None:
            return ()
        pid = reply.segment.pid

        def freed(segment: int) -> None:  # runs wherever the collector runs: it may only leave a note
            self._freed.append((host, pid, segment))
            self._wake()

        return map_segment(reply.segment, freed)

    def tell_freed(self) -> None:
        """Tell the workers whose segments have died here."""
        while self._freed:
            host, pid, segment = self._freed.popleft()
            if not host.lost:
                host.send_urgent(wire.SegmentFree(pid, segment))

    def close(self) -> None:
        self._pool.close()
