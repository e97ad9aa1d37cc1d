"""The listening end of a connection: its lanes, their waiting messages, payloads in pieces.

The other end is a `meshbook.wire.uplink.Uplink` of an agent: to the controller all agents are hosts that dial in, to an
agent those of other hosts are.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

from meshbook.wire import messages as wire
from meshbook.wire.bulk import BulkReceiver, BulkSender, NamesPayload, Sent, Spans
from meshbook.wire.frames import Batch, Buffer
from meshbook.wire.lanes import LANES, LaneName
from meshbook.wire.link import Link, check_message, epoch_of
from meshbook.wire.transport import ControllerSocket


class HostLink:
    """The connection of a host that dialled in. One thread uses it, but for the plain fields."""

    def __init__(
        self, id: str, epoch: int, sock: ControllerSocket, on_whole: Callable[[NamesPayload, list[bytes]], None]
    ) -> None:
        self.id = id
        self.heard = time.monotonic()
        self.lost = ""  # why it is lost; empty while it lives
        self.must_answer = False  # whether the last frames of `receive` ask for `acknowledge`
        self.newer_epoch = 0  # the epoch of a controller that has taken the host from us
        self.shares_memory = False  # whether the other end can map the shared memory of this host
        self.bulk_in = BulkReceiver(on_whole)
        self._sock = sock
        self._links: dict[LaneName, Link] = {lane: Link(epoch) for lane in LANES}
        self._outbox = Batch(self._send_or_wait)
        self.flush = self._outbox.flush  # sends the messages that `send` has collected
        self.backlog: deque[Sent] = deque()  # messages that wait for the host to acknowledge earlier ones
        self._bulk_out = BulkSender(lambda: self._links["bulk"], functools.partial(self._transmit, "bulk"))

    def send(self, message: wire.ToHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane of calls, at the next `flush`; the message waits here while the host is slow."""
        self._outbox.add(wire.encode(message), payload)

    def send_urgent(self, message: wire.ToHost) -> None:
        """Send on the lane that never waits behind payloads."""
        self._transmit("urgent", wire.encode(message), ())

    def send_bulk(self, buffers: Sequence[Buffer]) -> tuple[int, Spans]:
        """Send a payload, as fast as the host takes it; see `meshbook.wire.bulk.BulkSender.send`."""
        named = self._bulk_out.send(buffers)
        self._bulk_out.pump()
        return named

    def lose(self, reason: str) -> None:
        """Count the host as lost: nothing is sent to it any more, and only urgent messages are kept."""
        self.lost = reason
        self.backlog.clear()
        self._bulk_out.clear()
        self._links = {lane: link if lane == "urgent" else Link(link.epoch) for lane, link in self._links.items()}

    @property
    def has_farewell(self) -> bool:
        """Whether a lost host has got the last urgent message before its loss."""
        return self._links["urgent"].unacked_bytes == 0

    def repeat_farewell(self, lane: LaneName, frames: list[bytes]) -> None:
        """Send again the urgent messages that a lost host lacks, since it has spoken. Raises: PeerProtocolError."""
        if lane == "urgent":
            self._links[lane].receive(frames)
            for messages in self._links[lane].pending():
                self._sock.send(self.id, lane, messages)

    def shut_out(self) -> None:
        """Let the host in no more."""
        self._sock.revoke(self.id)

    def receive(self, lane: LaneName, frames: list[bytes]) -> tuple[bytes, list[bytes]] | None:
        """Take frames from the wire; return the message they carry, if it is new and next in order."""
        self.heard = time.monotonic()
        link = self._links[lane]
        message = link.receive(frames)
        self.must_answer = link.due or lane == "bulk" or bool(self.backlog)
        if message is None and (epoch := epoch_of(frames)) > link.epoch:
            self.newer_epoch = epoch
        return message

    def acknowledge(self, lane: LaneName) -> None:
        """Send the acknowledgements that are due, and messages for which the peer's have made room."""
        link = self._links[lane]
        for frames in link.pending() if link.due else ():
            self._sock.send(self.id, lane, frames)
        if lane == "bulk":
            self._bulk_out.pump()
        while lane == "calls" and self.backlog and not link.full:
            self._transmit(lane, *self.backlog.popleft())

    def acknowledge_rest(self) -> None:
        """Send the acknowledgements that could wait: if we end now, the next controller shall not get it all again."""
        for lane, link in self._links.items():
            if link.owed:
                self._sock.send(self.id, lane, link.acknowledgement())

    def beat(self) -> None:
        """Send a heartbeat, and the state of each lane."""
        self.send_urgent(wire.Heartbeat())
        self.knock()

    def knock(self) -> None:
        """Say on every lane how far we are."""
        for lane, link in self._links.items():
            self._sock.send(self.id, lane, link.heartbeat())

    @property
    def has_all(self) -> bool:
        """Whether the host has acknowledged all that we have sent."""
        waits = self.backlog or self._bulk_out.waiting_bytes
        return not waits and all(link.unacked_bytes == 0 for link in self._links.values())

    def _send_or_wait(self, header: bytes, payload: Sequence[Buffer]) -> None:
        link = self._links["calls"]
        if self.backlog or link.unacked_bytes >= link.max_unacked_bytes:  # `Link.full`, on the path of every call
            check_message(header, payload)
            self.backlog.append((header, payload))
        elif not self.lost:
            self._sock.send(self.id, "calls", link.send(header, payload))

    def _transmit(self, lane: LaneName, header: bytes, payload: Sequence[Buffer]) -> None:
        if not self.lost:
            self._sock.send(self.id, lane, self._links[lane].send(header, payload))
