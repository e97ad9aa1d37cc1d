"""The dialling end of a connection: its lanes, their waiting messages, payloads in pieces, and the silence of the peer.

The other end is a `meshbook.wire.host_link.HostLink`. An agent dials its controller, and the agents of other hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from meshbook.system.event_loop import EventLoop
from meshbook.wire import messages as wire
from meshbook.wire.bulk import BulkReceiver, BulkSender, NamesPayload, Sent
from meshbook.wire.frames import BATCH_MARK, Batch, Buffer, unbatch
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import Dialer

FULL_BYTES = 8 << 20  # senders wait with so much on its way in messages
FULL_BULK_BYTES = 256 << 20  # the same in payloads, which lie in the senders' shared memory until their turn comes
# a machine that has not answered for so long has given us up, or will: another connection finds out sooner than the
# system's repetitions on the old one, which come ever more rarely
DIAL_AGAIN_S = 15.0
STALLED_S = 5.0  # a process that did nothing for so long was stopped itself


class PeerSilence:
    """The silence of a peer; the time in which we ourselves were stopped does not count."""

    def __init__(self) -> None:
        self.heard = self._looked = time.monotonic()

    def look(self) -> None:
        """Notice, once a second, that we were stopped."""
        now = time.monotonic()
        if now - self._looked > STALLED_S:
            self.heard = now
        self._looked = now

    @property
    def length_s(self) -> float:
        """Return how long it has lasted."""
        return time.monotonic() - self.heard


class Uplink:
    """The uplink, used by the agent's loop only."""

    def __init__(
        self,
        dialer: Dialer,
        ticket: Ticket,
        loop: EventLoop,
        on_message: Callable[[bytes, list[bytes]], None],
        on_whole: Callable[[NamesPayload, list[bytes]], None],
        on_newer: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        """on_whole: see `BulkReceiver`. on_newer: see `meshbook.wire.lanes.Lane`. Raises: OSError, as `Dialer`."""
        self.silence = PeerSilence()
        self.shares_memory = False  # whether the other end can map the shared memory of this host
        self.bulk_in = BulkReceiver(on_whole)
        self._loop, self._on_message = loop, on_message
        self._lanes = dialer.dial(ticket, on_newer)
        for lane in self._lanes.values():
            lane.watch(loop)
        self.urgent, self._calls, bulk = self._lanes["urgent"], self._lanes["calls"], self._lanes["bulk"]
        self._on_heard: Callable[[], None] | None = None
        self._dialled = time.monotonic()
        self._outbox = Batch(self._calls.send)
        self._bulk_out = BulkSender(lambda: bulk.link, bulk.send)
        self.send_bulk, self.send_again = self._bulk_out.send, self._bulk_out.send_again

    def send(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane of calls, in order, at the latest with the next `flush`."""
        self._outbox.add(wire.encode(message), payload)

    def send_urgent(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane that never waits behind payloads."""
        self.urgent.send(wire.encode(message), payload)

    def flush(self) -> bool:
        """Send waiting messages and pieces, as far as there is room; return whether there were any."""
        return self._outbox.flush() or self._bulk_out.pump()

    @property
    def unacked_bytes(self) -> int:
        """Return the size of messages on their way, on the lane of calls."""
        return self._calls.link.unacked_bytes

    @property
    def is_full(self) -> bool:
        """Whether so much is on its way that workers should send no more."""
        return self._calls.link.unacked_bytes > FULL_BYTES or self._bulk_out.waiting_bytes > FULL_BULK_BYTES

    def serve(self, choked: Callable[[], bool] = lambda: False) -> bool:
        """Hand over messages and send waiting ones, until there are neither; return whether there were any.

        Both go on together: sending may have swallowed the event that data has come. choked: whether to leave the lane
        of calls for later; asked while data of our loop waits to be written. Raises: PeerProtocolError for frames that
        no peer sends; later messages are kept.
        """
        busy = False
        while True:
            found = False
            for lane in self._lanes.values():
                if lane.may_read and not (lane is self._calls and self._loop.unwritten and choked()):
                    found = lane.receive(self._hear) or found
            if not found and (self._outbox.headers or self._bulk_out.queue):
                found = self.flush()
            if not found:
                return busy
            busy = True

    def _hear(self, header: bytes, payload: list[bytes]) -> None:
        self.silence.heard = time.monotonic()
        if self._on_heard is not None:
            resumed, self._on_heard = self._on_heard, None
            resumed()
        for each in unbatch(header) if header.startswith(BATCH_MARK) else (header,):
            self._on_message(each, payload)

    # ---- life ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look whether the peer, or its machine, is there; once a second."""
        self.silence.look()
        self.urgent.look()
        now = time.monotonic()
        if self.unanswered_s > DIAL_AGAIN_S and now - self._dialled > DIAL_AGAIN_S:
            self._dialled = now
            for lane in self._lanes.values():
                lane.dial_again()

    @property
    def unanswered_s(self) -> float:
        """Return how long neither the peer nor its machine has given a sign of life."""
        return time.monotonic() - max(self.silence.heard, self.urgent.answered)

    def beat(self) -> None:
        """Send a heartbeat, and the state of each lane."""
        self.send_urgent(wire.Heartbeat())
        self.knock()

    def knock(self) -> None:
        """Say on every lane how far we are: the peer sees which messages it lacks, and asks for them."""
        for lane in self._lanes.values():
            lane.beat()

    def pause(self, on_heard: Callable[[], None]) -> None:
        """Keep messages and send none, until the peer speaks again: then ``on_heard`` is called, to `resume`."""
        self._on_heard = on_heard
        self._outbox.flush()
        for lane in self._lanes.values():
            lane.paused = True

    def resume(self) -> None:
        """Send again: a controller listens."""
        for lane in self._lanes.values():
            lane.paused = False
        self.knock()

    def restart(self, epoch: int) -> tuple[list[Sent], list[Sent]]:
        """Speak with the peer of ``epoch`` from now on; return messages that the former peer has not acknowledged.
        Returns: messages of the lane of calls, and pieces of payloads."""
        self._outbox.flush()
        kept = {name: lane.restart(epoch) for name, lane in self._lanes.items()}
        self.bulk_in.clear()
        self._on_heard = None
        self.silence.heard = time.monotonic()
        return [*kept["calls"]], [*kept["bulk"], *self._bulk_out.take_unsent()]

    def close(self) -> None:
        """Close the lanes; unsent messages are dropped."""
        for lane in self._lanes.values():
            lane.close()
        self._bulk_out.clear()
        self.bulk_in.clear()
