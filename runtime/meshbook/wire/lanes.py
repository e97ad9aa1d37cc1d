"""The lanes of a connection: their names, and the dialling end of one, over whichever transport.

    urgent    cancel, queries, heartbeats, the store; small frames only
    calls     calls, replies, output, in order
    bulk      pieces of payloads that cross hosts

Each lane is a stream of its own, so that an interrupt never waits behind a payload. Transports lose messages under way
when a connection breaks; `meshbook.wire.link` numbers and replays it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from meshbook.system.event_loop import EventLoop
from meshbook.wire.frames import Buffer
from meshbook.wire.link import Link, epoch_of

LaneName = Literal["urgent", "calls", "bulk"]
LANES: tuple[LaneName, ...] = ("urgent", "calls", "bulk")

HEARTBEAT_S = 1.0  # how often each side says that it lives


def routing_id(key: str, lane: LaneName) -> bytes:
    """Return the routing id of the lane of the host with this public key."""
    return f"{key}/{lane}".encode()


def host_with(keys: Mapping[str, str], key: str) -> str:
    """Return the host that has this public key; empty if none has."""
    return next((id for id, its in keys.items() if its == key), "")


class Lane(ABC):
    """The dialling end of one lane, which dials again whenever the connection breaks. Used by the agent's loop only.
    on_newer: called with the epoch of a controller that is newer than ours, before its first message is read."""

    def __init__(self, epoch: int, on_newer: Callable[[int], None]) -> None:
        self.link = Link(epoch)
        self.paused = False  # messages are kept, not sent: no controller listens
        # when the machine of the other end was last known to be there, as `look` has found it
        self.answered = -math.inf
        # data may have come that was not taken; look before every sleep, since descriptors tell edges only
        self.may_read = False
        self.has_arrived = True  # whether, at the last look, there had ever been a machine to connect to
        self._on_newer = on_newer

    @abstractmethod
    def watch(self, loop: EventLoop) -> None:
        """Have ``loop`` wake when data comes, and note that it `may_read`; until `close`."""

    @abstractmethod
    def take(self) -> list[bytes] | None:
        """Return the next message as it came; None if there is none."""

    @abstractmethod
    def transmit(self, frames: Sequence[Buffer]) -> bool:
        """Send a message; return False where there is no connection, whose successor will see to a replay."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the connection, for good; unsent messages are dropped."""

    def look(self) -> None:  # noqa: B027 - on one machine it is there
        """Look whether the machine of a silent peer is there; once a second is enough."""

    def dial_again(self) -> None:  # noqa: B027 - on one machine there is nothing to dial
        """Give up a connection whose other end does not answer; messages under way on it are lost, and replayed."""

    @property
    def is_answered(self) -> bool:
        """Whether, at the last look, a connection stood, by which the machine of the other end has answered lately."""
        return False

    def receive(self, deliver: Callable[[bytes, list[bytes]], None]) -> bool:
        """Hand over header and payload of each new message, in order, once; return whether anything has come."""
        found = False
        while self.may_read and (frames := self.take()) is not None:
            found = True
            message = self.link.receive(frames)
            if message is None and (epoch := epoch_of(frames)) < self.link.epoch:
                self.beat()  # so that the former controller learns that it is the former
            elif message is None and epoch > self.link.epoch:
                self._on_newer(epoch)
                message = self.link.receive(frames)
            if message is not None:
                deliver(*message)
        if self.link.due:
            for messages in self.link.pending():  # paused or not: whoever has spoken listens
                if not self.transmit(messages):
                    break
        return found

    def restart(self, epoch: int) -> list[tuple[bytes, list[Buffer]]]:
        """Speak with the controller of ``epoch``; return messages that the former one has not acknowledged."""
        kept, self.link = self.link.unacknowledged(), Link(epoch)
        self.paused = False
        return kept

    def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message; it is kept until acknowledged."""
        frames = self.link.send(header, list(payload))
        if not self.paused:
            self.transmit(frames)

    def beat(self) -> None:
        """Say how far we are, so that a lost tail is noticed."""
        if not self.paused:
            self.transmit(self.link.heartbeat())

    def close(self) -> None:
        """Close the connection; unsent messages are dropped."""
        self.disconnect()
        self.link = Link(self.link.epoch)  # the old one holds views of payloads
