"""A host as the controller knows it: its links, what it said of itself, and the payloads lent to it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from meshbook import wire
from meshbook.batches import Batch
from meshbook.bulk import BulkReceiver, BulkSender, Sent, Spans
from meshbook.errors import HostLost, SpawnError
from meshbook.frames import Buffer
from meshbook.future import Future
from meshbook.launcher import LaunchedHost
from meshbook.link import Link, check_message, epoch_of
from meshbook.transport import LANES, ControllerSocket, LaneName

Parked: TypeAlias = wire.Replies | wire.Call | wire.Cancel

SUSPECT_S = 3.0
"""A host that was not heard of for so long is suspect."""
MAX_SILENCE_S = 10.0
"""It is lost when its machine has not answered for so long either (`meshbook.answering`), or no connection came back;
on our own machine when its process has ended, which we see."""


class KnownHost:
    """Used by the I/O thread only, but for the plain fields."""

    def __init__(self, id: str, epoch: int, launched: LaunchedHost, sock: ControllerSocket) -> None:
        self.id, self.name = id, id
        self.launched = launched
        self.shares_environment = True
        self.launch_another: Callable[[], KnownHost] | None = None
        """Start one more host of the same kind."""
        self._successor: KnownHost | None = None
        self.ready: Future[KnownHost] = Future()
        self.hello: wire.Hello | None = None
        self.shares_memory = False
        self.heard = time.monotonic()
        self.answered = self.heard
        """When its machine was last known to be there, while it is silent."""
        self.lost = ""
        """Why it is lost; empty while it lives."""
        self.is_found = False
        """It was started by a former controller."""
        self.usurper = 0
        """The epoch of a controller that has taken the host from us."""
        self.bulk_in = BulkReceiver(self._serve_parked)
        self.parked: deque[tuple[Parked, list[bytes]]] = deque()
        self.on_whole: Callable[[Parked, list[bytes]], None] = lambda message, frames: None
        """Called with what was parked, once its payload is whole."""
        self._sock = sock
        self._links: dict[LaneName, Link] = {lane: Link(epoch) for lane in LANES}
        self._outbox = Batch(self._send_or_wait)
        self._backlog: deque[Sent] = deque()
        self._bulk_out = BulkSender(lambda: self._links["bulk"], functools.partial(self._transmit, "bulk"))

    def present(self) -> KnownHost:
        """This host, or the one that has taken its place."""
        return self if self._successor is None else self._successor.present()

    def replace(self) -> KnownHost:
        """The host in the place of this one, started if there is none that lives; it may not have dialled in yet.

        Raises: SpawnError.
        """
        last = self.present()
        if not last.lost:
            return last
        if last.launch_another is None:
            raise SpawnError(f"host {last.name} is lost ({last.lost}), and nobody here knows how to start it again.")
        last._successor = last.launch_another()
        return last._successor

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it has dialled in. Raises: SpawnError."""
        try:
            self.ready.get(timeout_s)
        except HostLost as error:
            raise SpawnError(f"host {error.host} did not start: {error.cause}") from None
        except TimeoutError:
            raise SpawnError(f"host {self.name} did not dial in within {timeout_s:g} s.") from None

    def send(self, message: wire.ToHost, payload: Sequence[Buffer] = ()) -> None:
        """Send on the lane of calls, when `flush` is called; waits in our backlog while the host is slow."""
        self._outbox.add(wire.encode(message), payload)

    def flush(self) -> None:
        """Let go what `send` has collected."""
        self._outbox.flush()

    def send_urgent(self, message: wire.ToHost) -> None:
        """Send on the lane that never waits behind payloads."""
        self._transmit("urgent", wire.encode(message), ())

    def send_bulk(self, buffers: Sequence[Buffer]) -> tuple[int, Spans]:
        """Send a payload, as fast as the host takes it; returns what names it. See `meshbook.bulk.BulkSender.send`."""
        named = self._bulk_out.send(buffers)
        self._bulk_out.pump()
        return named

    @property
    def suspicion(self) -> str:
        """What makes it suspect, as in ``silent for 7 s: ...``; empty while it is heard of, and once it is lost."""
        now = time.monotonic()
        if not self.is_up or now - self.heard <= SUSPECT_S:
            return ""
        is_there = self._is_watched or now - self.answered <= SUSPECT_S
        why = "its agent is stopped or its machine is busy" if is_there else "its connection has broken"
        return f"silent for {now - self.heard:.0f} s: {why}"

    @property
    def is_up(self) -> bool:
        """Whether it has dialled in and is not lost."""
        return self.hello is not None and not self.lost

    @property
    def is_overdue(self) -> bool:
        """Whether its silence is as good as its end."""
        return not self._is_watched and time.monotonic() - max(self.heard, self.answered) > MAX_SILENCE_S

    @property
    def _is_watched(self) -> bool:
        """Whether we see its process."""
        return self.shares_memory and self.launched.pid != 0

    def look(self) -> None:
        """Once per heartbeat: if it is silent, look whether its machine is there."""
        if time.monotonic() - self.heard > SUSPECT_S / 2:
            self.answered = self._sock.answered(self.id, max(self.heard, self.answered))

    def lose(self, reason: str) -> None:
        """It is lost: nothing is sent to it any more, and nothing kept for it."""
        self.lost = reason
        self._backlog.clear()
        self._bulk_out.clear()
        self._links = {lane: Link(link.epoch) for lane, link in self._links.items()}

    @property
    def backlog(self) -> int:
        """Messages that wait for the host to acknowledge earlier ones."""
        return len(self._backlog)

    def receive(self, lane: LaneName, frames: list[bytes]) -> tuple[bytes, list[bytes]] | None:
        """Take frames from the wire: the message they carry, if it is new and next in order."""
        self.heard = time.monotonic()
        link = self._links[lane]
        if (epoch := epoch_of(frames)) > link.epoch:
            self.usurper = epoch
        return link.receive(frames)

    def acknowledge(self, lane: LaneName) -> None:
        """Send what the link owes the peer, and what its acknowledgements have made room for."""
        link = self._links[lane]
        for frames in link.pending():
            self._sock.send(self.id, lane, frames)
        if lane == "bulk":
            self._bulk_out.pump()
        while lane == "calls" and self._backlog and not link.full:
            self._transmit(lane, *self._backlog.popleft())

    def acknowledge_rest(self) -> None:
        """Send the acknowledgements that could wait: if we end now, the next controller shall not hear it all again."""
        for lane, link in self._links.items():
            if link.owes:
                self._sock.send(self.id, lane, link.acknowledgement())

    def beat(self) -> None:
        """Once per heartbeat: how far each lane is."""
        self.send_urgent(wire.Heartbeat())
        self.knock()

    def knock(self) -> None:
        """Say on every lane that we are there and how far we are."""
        for lane, link in self._links.items():
            self._sock.send(self.id, lane, link.heartbeat())

    @property
    def has_all(self) -> bool:
        """Whether the host has acknowledged all that we have sent."""
        waits = self._backlog or self._bulk_out.waiting_bytes
        return not waits and all(link.unacked_bytes == 0 for link in self._links.values())

    def park(self, message: Parked, frames: list[bytes]) -> bool:
        """Keep a message back while its payload, or that of an earlier one, is still on its way; True when kept."""
        if isinstance(message, wire.Cancel):
            incomplete = False
        else:
            parts = message.replies if isinstance(message, wire.Replies) else (message,)
            incomplete = any(part.bulk is not None and not self.bulk_in.has(part.bulk[0]) for part in parts)
        if incomplete or self.parked:
            self.parked.append((message, frames))
            return True
        return False

    def _serve_parked(self) -> None:
        parked, self.parked = self.parked, deque()
        for message, frames in parked:
            if not self.park(message, frames):
                self.on_whole(message, frames)

    def _send_or_wait(self, header: bytes, payload: Sequence[Buffer]) -> None:
        if self._backlog or self._links["calls"].full:
            check_message(header, payload)
            self._backlog.append((header, payload))
        else:
            self._transmit("calls", header, payload)

    def _transmit(self, lane: LaneName, header: bytes, payload: Sequence[Buffer]) -> None:
        if not self.lost:
            self._sock.send(self.id, lane, self._links[lane].send(header, list(payload)))
