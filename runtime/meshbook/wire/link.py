"""A link to another process: its `Connection`, and the socket that carries it.

    HostLink   the listening end   a controller has one to each agent, an agent one to each agent that calls its workers
    Uplink     the dialling end    of an agent, to its controller and to the agents of other hosts

Both send alike. The listening end outlives hosts that are lost and may come back; the dialling end outlives controllers
that go and are followed by others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from meshbook.system.event_loop import EventLoop
from meshbook.wire import messages as wire
from meshbook.wire.connection import Connection, PayloadPiece, Sent, WaitingPayload
from meshbook.wire.frames import Buffer
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import ControllerSocket, Dialer

HEARTBEAT_S = 1.0  # how often each side says that it lives
STALLED_S = 3.0  # a process that did nothing for so long was stopped itself
FULL_BYTES = 8 << 20  # senders wait with so much on its way in messages
FULL_PAYLOAD_BYTES = 256 << 20  # the same in payloads, which lie in the senders' shared memory until their turn comes
# a machine that has not answered for so long has given us up, or will: another connection finds out sooner than the
# system's repetitions on the old one, which come ever more rarely
DIAL_AGAIN_S = 15.0
_IN_ORDER = (wire.Call, wire.Replies, wire.Cancel)  # messages that never overtake each other


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


class Link:
    """The common part of both ends, used by one thread. transmit: hands frames to the socket, without waiting."""

    def __init__(self, epoch: int, transmit: Callable[[Sequence[Buffer]], object]) -> None:
        self.connection = Connection(epoch)
        # give and take payloads
        self.send_payload, self.take_payload = self.connection.send_payload, self.connection.take_payload
        self.silence = PeerSilence()
        self.shares_memory = False  # whether the other end can map the shared memory of this host
        self.backlog = 0  # how many calls the last `flush` has left, until the peer has earlier ones and their payloads
        self._transmit = transmit

    def send(self, message: wire.FromHost | wire.ToHost, payload: Sequence[Buffer] = ()) -> None:
        """Send a message at the next `flush`, in order, and as far as the peer keeps up."""
        self.connection.send(wire.encode(message), payload, in_order=isinstance(message, _IN_ORDER))

    def send_urgent(self, message: wire.FromHost | wire.ToHost) -> None:
        """Send a message now, before all that waits."""
        self.connection.send(wire.encode(message), urgent=True)
        self.flush()

    def flush(self) -> bool:
        """Send all that may be sent now; return whether there was anything."""
        found = self.connection.frames_to_send()
        for frames in found:
            self._transmit(frames)
        self.backlog = len(self.connection.calls) + len(self.connection.behind)
        return bool(found)

    def beat(self) -> None:
        """Say how far we are: the peer sees that we live, and which messages it lacks, and asks for them."""
        self._transmit(self.connection.beat())


class HostLink(Link):
    """The link to a host that dialled in."""

    def __init__(self, id: str, epoch: int, sock: ControllerSocket) -> None:
        super().__init__(epoch, functools.partial(sock.send, id))
        self.id = id
        self.lost = ""  # why it is lost; empty while it lives
        self._sock = sock

    def receive(self, frames: list[bytes]) -> Sequence[tuple[bytes, list[bytes]]]:
        """Take frames from the socket; return (header, payload) of each message. Raises: PeerProtocolError."""
        self.silence.heard = time.monotonic()
        return self.connection.receive(frames) or ()

    def withdraw(self, call: int) -> bool:
        """Take back a call that waits behind its payload, or another's; return whether there was one."""
        for waiting in self.connection.behind:
            if isinstance(waiting, WaitingPayload):
                continue
            message = wire.decode_to_host(waiting[0])
            if isinstance(message, wire.Call) and message.id == call:
                self.connection.withdraw(waiting, message.bulk[0] if message.bulk is not None else None)
                return True
        return False

    def lose(self, reason: str) -> None:
        """Count the host as lost: nothing is sent to it any more, and only urgent messages are kept."""
        self.lost = reason
        self.backlog = 0
        self.connection.give_up()

    @property
    def has_farewell(self) -> bool:
        """Whether a lost host has got the last urgent message before its loss."""
        return self.connection.has_all

    def repeat_farewell(self, frames: list[bytes]) -> None:
        """Send again the urgent messages that a lost host lacks, since it has spoken. Raises: PeerProtocolError."""
        self.connection.receive(frames)
        self.flush()

    def shut_out(self) -> None:
        """Let the host in no more."""
        self._sock.revoke(self.id)


class Uplink(Link):
    """The link of an agent to a process that listens, used by the agent's loop only."""

    def __init__(
        self,
        dialer: Dialer,
        ticket: Ticket,
        loop: EventLoop,
        on_message: Callable[[bytes, list[bytes]], None],
        on_newer: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        """on_newer: called with the epoch of a controller that is newer than ours, before its first message is read, to
        `restart`. Raises: OSError, as `Dialer`."""
        self.end = dialer.dial(ticket, loop, self.beat)
        super().__init__(ticket.epoch, self.end.transmit)
        self._loop, self._on_message, self._on_newer = loop, on_message, on_newer
        self._on_heard: Callable[[], None] | None = None
        self._dialled = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether so much is on its way that workers should send no more."""
        connection = self.connection
        return connection.calls_bytes > FULL_BYTES or connection.waiting_payload_bytes > FULL_PAYLOAD_BYTES

    def serve(self, choked: Callable[[], bool] = lambda: False) -> bool:
        """Hand over messages and send waiting ones, until there are neither; return whether there were any.

        Both go on together: sending may have swallowed the event that data has come. choked: whether the peer should
        send no more calls for now; asked while data of our loop waits to be written. Raises: PeerProtocolError for
        frames that no peer sends; later messages are kept.
        """
        connection, busy = self.connection, False
        while True:
            found = False
            if self._loop.unwritten or connection.holds:
                connection.hold(choked())
            while self.end.may_read and (frames := self.end.take()) is not None:
                found = True
                self._receive(frames)
                if connection.must_answer:
                    self.flush()
            if connection.must_send or connection.must_answer:
                found = self.flush() or found
            if not found:
                return busy
            busy = True

    def _receive(self, frames: list[bytes]) -> None:
        messages = self.connection.receive(frames)
        if messages is None and self.connection.newer_epoch:
            self._on_newer(self.connection.newer_epoch)
            messages = self.connection.receive(frames)
        if messages is None:
            return
        self.silence.heard = time.monotonic()
        if self._on_heard is not None:
            resumed, self._on_heard = self._on_heard, None
            resumed()
        for header, payload in messages:
            self._on_message(header, payload)

    # ---- life ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look whether the peer, or its machine, is there; once a second."""
        self.silence.look()
        self.end.look()
        now = time.monotonic()
        if self.unanswered_s > DIAL_AGAIN_S and now - self._dialled > DIAL_AGAIN_S:
            self._dialled = now
            self.end.dial_again()

    @property
    def unanswered_s(self) -> float:
        """Return how long neither the peer nor its machine has given a sign of life."""
        return time.monotonic() - max(self.silence.heard, self.end.answered)

    def pause(self, on_heard: Callable[[], None]) -> None:
        """Keep messages and send none, until the peer speaks again: then ``on_heard`` is called, to `resume`."""
        self._on_heard = on_heard
        self.connection.paused = True

    def resume(self) -> None:
        """Send again: a controller listens."""
        self.connection.paused = False
        self.beat()
        self.flush()

    def restart(self, epoch: int) -> tuple[list[Sent], list[PayloadPiece]]:
        """Speak with the peer of ``epoch`` from now on; return as `Connection.restart`."""
        self._on_heard = None
        self.silence.heard = time.monotonic()
        return self.connection.restart(epoch)

    def close(self) -> None:
        """Close the connection; unsent messages are dropped."""
        self.end.close()
        self.connection.give_up()
