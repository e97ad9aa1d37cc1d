"""Numbered, acknowledged, replayed messages over a pipe that keeps order but may lose or repeat.

ZeroMQ is such a pipe: frames that were under way when a connection broke, or were sent while there was none, are gone
without a word. A `Link` is one side's memory of one lane. It has no socket and no clock: it turns messages into frames
and frames into messages, and its owner sends what `pending` and `heartbeat` give.

    first frame of each:   u8 kind | 3 zero bytes | u32 epoch | u64 seq | u64 ack | header of the message
                           MESSAGE     seq is its number, from 1; its payload follows in further frames
                           ACK, BEAT   seq is the highest number sent so far; no payload
                           REPLAY      as ACK, and: send again all that comes after ack

    sender                                   receiver
      1, 2 ------------------------------------> delivered
      3 ----------- lost
      4 ---------------------------------------> a gap: dropped, and asked once for a replay
      <----------------------------- REPLAY ack=2
      3, 4 ------------------------------------> delivered
      5 ----------- lost
      BEAT seq=5 ------------------------------> 5 is missing: asked again; a lost tail takes one heartbeat

Every first frame carries ``ack``, the number up to which its sender has all. A message is kept until it is
acknowledged; without traffic the other way an ACK is due after 64 messages or 1 MiB. A question that stays
without effect is asked again at the next heartbeat, or at the second one if the first may have crossed it.

``epoch`` tells incarnations of a peer apart. Frames of another epoch are ignored; an owner that learns of a restarted
peer (`epoch_of`) begins a new `Link`.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from meshbook.errors import PeerProtocolError
from meshbook.wire.frames import MAX_FRAME_BYTES, Buffer, check_sizes

MAX_UNACKED_BYTES = 64 << 20  # a link that keeps so much is `Link.full`
ACK_AFTER_MESSAGES = 64
ACK_AFTER_BYTES = 1 << 20
MESSAGE_COST_BYTES = 256  # cost of keeping a message besides its frames
MESSAGE, ACK, BEAT, REPLAY = range(1, 5)
_HEAD = struct.Struct("<BxxxIQQ")
_SIZE = _HEAD.size
_pack, _unpack = _HEAD.pack, _HEAD.unpack_from


def epoch_of(frames: Sequence[Buffer]) -> int:
    """Return the epoch of a message as it came; 0 if it is none."""
    return _unpack(frames[0])[1] if frames and len(frames[0]) >= _SIZE else 0


def check_message(header: bytes, payload: Sequence[Buffer]) -> None:
    """Refuse a message that no frame can carry. Raises: MessageTooLarge."""
    check_sizes([len(header), *(part.nbytes if isinstance(part, memoryview) else len(part) for part in payload)])


class Link:
    """The memory of one side of one lane. Not thread-safe: it belongs to the thread that owns the socket."""

    __slots__ = (
        "_acked", "_ask_due", "_asked", "_owed_bytes", "_patience", "_received", "_replay_due",
        "_sent", "_unacked", "due", "epoch", "ignored", "max_unacked_bytes", "owed", "unacked_bytes",
    )  # fmt: skip

    def __init__(self, epoch: int, max_unacked_bytes: int = MAX_UNACKED_BYTES) -> None:
        self.epoch = epoch
        self.max_unacked_bytes = max_unacked_bytes
        self.unacked_bytes = 0  # size of the messages kept for a replay, with `MESSAGE_COST_BYTES` for each
        self.ignored = 0  # frames of another epoch, repetitions, and messages after a gap
        self.due = False  # `pending` may have something to send
        self._unacked: deque[tuple[list[Buffer], int]] = deque()  # messages _acked + 1 .. _sent, with their cost
        self._sent = 0
        self._acked = 0
        self._received = 0  # all up to here were delivered
        self.owed = 0  # messages received since we last said how far we are
        self._owed_bytes = 0
        self._asked = -1  # the value of _received when we last asked for a replay
        self._patience = 0  # heartbeats to let pass before that question is taken for lost
        self._ask_due = False
        self._replay_due = False

    @property
    def full(self) -> bool:
        """Whether the sender should wait for acknowledgements before it sends more."""
        return self.unacked_bytes >= self.max_unacked_bytes

    def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> list[Buffer]:
        """Number a message; return its frames, to be sent now. They are kept, so buffers must not change.

        A message is taken even when the link is full: a sender of much looks at `full` first.
        Raises: MessageTooLarge, and nothing is kept: no replay could bring it over.
        """
        if payload or len(header) > MAX_FRAME_BYTES:
            check_message(header, payload)
        self._sent = seq = self._sent + 1
        first = _pack(MESSAGE, self.epoch, seq, self._received) + header
        self.owed = self._owed_bytes = 0
        cost = MESSAGE_COST_BYTES + len(first)
        for buffer in payload:
            cost += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        frames: list[Buffer] = [first, *payload]
        self._unacked.append((frames, cost))
        self.unacked_bytes += cost
        return frames

    def receive(self, frames: list[bytes]) -> tuple[bytes, list[bytes]] | None:
        """Take a message of the peer; return (header, payload) if it is the next one, else None. Afterwards something
        may be `due`. Raises: PeerProtocolError for frames that no `Link` makes."""
        if not frames or len(frames[0]) < _SIZE:
            raise PeerProtocolError(f"a message without a link header of {_SIZE} bytes")
        kind, epoch, seq, ack = _unpack(frames[0])
        if epoch != self.epoch:
            self.ignored += 1
            return None
        if ack > self._acked:  # drop what the peer has
            if ack > self._sent:
                raise PeerProtocolError(f"message {ack} is acknowledged, but only {self._sent} were sent")
            for _ in range(ack - self._acked):
                self.unacked_bytes -= self._unacked.popleft()[1]
            self._acked = ack
        if kind != MESSAGE:
            self._note(kind, seq, frames)
            return None
        if seq != self._received + 1:
            self._skip(seq)
            return None
        self._received = seq
        self.owed += 1
        payload = frames[1:]
        for frame in payload:
            self._owed_bytes += len(frame)
        if self.owed >= ACK_AFTER_MESSAGES or self._owed_bytes >= ACK_AFTER_BYTES:
            self.due = True
        return frames[0][_SIZE:], payload

    def pending(self) -> list[list[Buffer]]:
        """Return the messages to send now: a replay, a question for one, an acknowledgement; each once."""
        self.due = False
        if not (
            self._ask_due or self._replay_due or self.owed >= ACK_AFTER_MESSAGES or self._owed_bytes >= ACK_AFTER_BYTES
        ):
            return []
        messages = [frames for frames, _ in self._unacked] if self._replay_due else []
        if self._ask_due:
            messages.append(self._status(REPLAY))
        elif self.owed:
            messages.append(self._status(ACK))
        self._ask_due = self._replay_due = False
        return messages

    def unacknowledged(self) -> list[tuple[bytes, list[Buffer]]]:
        """Return (header, payload) of each message that the peer may not have, in order."""
        return [(bytes(frames[0])[_SIZE:], frames[1:]) for frames, _ in self._unacked]

    def acknowledgement(self) -> list[Buffer]:
        """Return frames that acknowledge our messages; to be sent when there is nothing else to do."""
        return self._status(ACK)

    def heartbeat(self) -> list[Buffer]:
        """Return frames that say how far we are in both directions; to be sent at regular times."""
        return self._status(BEAT)

    def _status(self, kind: int) -> list[Buffer]:
        self.owed = self._owed_bytes = 0
        return [_pack(kind, self.epoch, self._sent, self._received)]

    def _note(self, kind: int, seq: int, frames: list[bytes]) -> None:
        """Act on a message of the links themselves: the peer has sent ``seq`` messages."""
        if kind not in (ACK, BEAT, REPLAY) or len(frames) > 1 or len(frames[0]) > _SIZE:
            raise PeerProtocolError(f"a link message of unknown kind {kind} or with content that it cannot have")
        if kind == REPLAY and self._unacked:
            self._replay_due = self.due = True
        if seq <= self._received:
            return
        if self._asked != self._received:
            self._ask(patience=0 if kind == BEAT else 1)
        elif kind == BEAT:
            if self._patience:
                self._patience -= 1
            else:
                self._ask(patience=0)

    def _skip(self, seq: int) -> None:
        """Drop a message that is not the next one; the first after a gap causes a question."""
        self.ignored += 1
        if seq <= self._received:
            if seq == 0:
                raise PeerProtocolError("a message with number 0; they count from 1")
            self.owed += 1  # the peer may not know that we have it
            self.due = True
        elif self._asked != self._received:
            self._ask(patience=1)

    def _ask(self, patience: int) -> None:
        self._asked, self._patience = self._received, patience
        self._ask_due = self.due = True
