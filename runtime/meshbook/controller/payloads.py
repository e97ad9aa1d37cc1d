"""Large payloads of the controller: written once into shared memory, lent to hosts, mapped when they come back.

    write, on the thread of the caller ──> segment ──> send: hosts on this machine map it, until they say they are done
                                              │              others get views of it, in pieces (`meshbook.wire.link`)
                                              └──────> drop: the message will not be sent

A segment goes back to the pool when the last of its receivers is done with it, or is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

from meshbook.calls.mailboxes import Unavailable
from meshbook.controller.host_state import HostState
from meshbook.errors import MeshError, PeerProtocolError
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer

_PIECES: Literal["pieces"] = "pieces"

# a user of a segment of ours: a host on this machine, or our own views while pieces of it are under way
Holder: TypeAlias = HostState | Literal["pieces"]


class Payloads:
    """The controller's large payloads. Any thread may call `write` and `drop`, the I/O thread the rest."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = SegmentPool()
        self._unsent: set[int] = set()
        self._lent: dict[int, set[Holder]] = {}
        self.gone: deque[int] = deque()  # segments of which all pieces have arrived, or never will
        self.freed: deque[tuple[HostState, int, int]] = deque()

    def write(self, buffers: Sequence[Buffer]) -> wire.SegmentRef:
        """Copy buffers into a segment; the caller must `send` or `drop` it."""
        segment = self._pool.write(buffers)
        self._unsent.add(segment.segment)
        return segment

    def drop(self, segment: wire.SegmentRef) -> None:
        """Free a payload that was not sent, and will not be; a payload that was sent is left alone."""
        if segment.segment in self._unsent:
            self._unsent.discard(segment.segment)
            self._pool.release(segment.segment)

    def send(
        self,
        hosts: Sequence[HostState],
        message: wire.Call,
        payload: Sequence[bytes],
        segment: wire.SegmentRef,
    ) -> None:
        """Send a call, its payload and a segment to every host in the way that the host can take it."""
        hosts = [host for host in hosts if not host.lost]
        shared, views = self._lend(segment, hosts)
        for host in hosts:
            if host in shared:
                host.send(msgspec.structs.replace(message, segment=segment), payload)
            else:
                host.send(msgspec.structs.replace(message, bulk=host.send_payload(views)), payload)

    def _lend(
        self, segment: wire.SegmentRef, hosts: Sequence[HostState]
    ) -> tuple[Sequence[HostState], Sequence[memoryview]]:
        """Lend a segment to ``hosts``; return the hosts that map it, and the pieces for the others."""
        assert segment.segment in self._unsent, "a payload is sent once, and not after it was dropped"
        self._unsent.discard(segment.segment)
        shared = [host for host in hosts if host.shares_memory]
        holders = self._lent[segment.segment] = {*shared}
        views: Sequence[memoryview] = ()
        if len(shared) < len(hosts):
            holders.add(_PIECES)
            views = self._pool.look_at(segment, self._note_gone)
        if not holders:
            self.release(segment.segment, _PIECES)
        return shared, views

    def _note_gone(self, segment: int) -> None:
        """Note that the last view has died; runs on any thread."""
        self.gone.append(segment)
        self._wake()

    def release(self, segment: int, holder: Holder) -> None:
        """Take a holder off a segment; the last one gives it back to the pool."""
        if (holders := self._lent.get(segment)) is not None:
            holders.discard(holder)
            if not holders:
                del self._lent[segment]
                self._pool.release(segment)

    def settle_lost(self) -> None:
        """Take back segments lent to hosts whose processes are gone; call it now and then."""
        for segment, holders in list(self._lent.items()):
            for holder in tuple(holders):
                if isinstance(holder, HostState) and holder.lost and holder.launched.failure():
                    self.release(segment, holder)

    def send_reply(
        self,
        host: HostState,
        call: int,
        origin: wire.Origin | None,
        reply: wire.RankReply,
        frames: Sequence[Buffer],
        segment: wire.SegmentRef | None,
    ) -> None:
        """Answer a call of a worker of ``host``."""
        if host.lost:
            if segment is not None:
                self.drop(segment)
            return
        if segment is not None:
            shared, views = self._lend(segment, [host])
            reply = reply._replace(segment=segment) if shared else reply._replace(bulk=host.send_payload(views))
        host.send(wire.Replies(call, (reply,), origin), frames)

    def receive(self, host: HostState, reply: wire.RankReply | wire.Call) -> Sequence[object]:
        """Return the large buffers of a message; those that cannot be had raise why. Raises: PeerProtocolError."""
        try:
            return self._receive(host, reply)
        except PeerProtocolError:
            raise
        except MeshError as error:
            return Unavailable(error)

    def _receive(self, host: HostState, reply: wire.RankReply | wire.Call) -> Sequence[object]:
        """Return the large buffers of a message; its worker is told when the last view of them has died here."""
        if reply.bulk is not None:
            return host.take_payload(*reply.bulk)
        if reply.segment is None:
            return ()
        pid = reply.segment.pid

        def freed(segment: int) -> None:  # runs wherever the collector runs: it may only leave a note
            self.freed.append((host, pid, segment))
            self._wake()

        return map_segment(reply.segment, freed)

    def tell_freed(self) -> None:
        """Tell the workers whose segments have died here; take back those of ours that have arrived."""
        while self.gone:
            self.release(self.gone.popleft(), _PIECES)
        while self.freed:
            host, pid, segment = self.freed.popleft()
            if not host.lost:
                host.send_urgent(wire.SegmentFree(pid, segment))

    def close(self) -> None:
        self._pool.close()
