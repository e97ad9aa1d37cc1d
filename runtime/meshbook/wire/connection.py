"""A connection of two processes: messages become frames, and frames become messages, once and in order.

A `Connection` is the memory of one end. It has no socket and no clock: its owner sends what `frames_to_send` returns,
and hands `receive` what has come. The pipe between two ends keeps order, but frames that were under way when it broke,
or that were sent while there was none, are gone without a word.

    priority   messages                                     under way at most
    URGENT     cancels, questions, the store; small ones    any number
    CALLS      calls, answers, output                       `WINDOW_BYTES`
    PIECES     payloads that cross hosts, cut into pieces   `WINDOW_BYTES`

A message gets its number when it leaves its queue, so urgent ones pass all that wait; behind them are two windows at
most. All priorities share one sequence of numbers: the pipe has one order anyway, one number says how far a side is,
and one replay repairs a loss. A message that names a payload travels behind its pieces, and messages that must not
overtake it follow there, so whoever gets it has the payload.

    first frame   u8 kind | u8 holds | 2 zero bytes | u32 epoch | u64 number | u64 ack | content
                  MESSAGE     the header of a message; its payload follows in further frames
                  BATCH       the headers of small messages, packed as `meshbook.wire.frames` packs frames
                  PIECE       u64 payload | u64 size | u64 offset; the data follows in one frame
                  BLANK       a message that was given up; its number is kept
                  ACK, BEAT   the number is the highest sent so far; no content
                  REPLAY      as ACK, and: send again all that comes after ack

    sender                                   receiver
      1, 2 ------------------------------------> delivered
      3 ----------- lost
      4 ---------------------------------------> a gap: dropped, and asked once for a replay
      <----------------------------- REPLAY ack=2
      3, 4 ------------------------------------> delivered
      5 ----------- lost
      BEAT 5 ----------------------------------> 5 is missing: asked again; a lost tail takes one heartbeat

Every first frame carries ``ack``, the number up to which its sender has all, and ``holds``, whether its sender wants no
more calls and pieces for now. Frames are kept until they are acknowledged; without traffic the other way an ACK is due
after `ACK_AFTER_BYTES`. ``epoch`` tells incarnations of a peer apart. Frames of an older one are answered by a BEAT of
ours; an owner that learns of a newer one makes the connection `restart`.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from meshbook.errors import PeerProtocolError
from meshbook.wire.frames import MAX_FRAME_BYTES, Buffer, FrameReader, check_sizes, pack

WINDOW_BYTES = 2 << 20
ACK_AFTER_BYTES = 256 << 10
PIECE_BYTES = 512 << 10
MESSAGE_COST_BYTES = 256  # cost of keeping a message besides its frames
MAX_BATCH_BYTES = 32 << 10
MAX_PAYLOAD_BYTES = 1 << 36

URGENT, CALLS, PIECES = range(3)
MESSAGE, BATCH, PIECE, BLANK, ACK, BEAT, REPLAY = range(1, 8)
_HEAD = struct.Struct("<BBxxIQQ")
_SIZE = _HEAD.size
_pack, _unpack = _HEAD.pack, _HEAD.unpack_from
_PIECE = struct.Struct("<QQQ")

Spans: TypeAlias = tuple[tuple[int, int], ...]  # (offset, length) of each buffer of a payload
Sent: TypeAlias = tuple[bytes, Sequence[Buffer]]  # (header, payload) of a message


class PayloadPiece(NamedTuple):
    """A piece of a payload."""

    payload: int
    size_bytes: int  # of the whole payload
    offset: int  # beyond its size: the payload was given up
    data: Buffer


class WaitingPayload(NamedTuple):
    """A payload that waits."""

    id: int
    pieces: Iterator[PayloadPiece]


Outgoing: TypeAlias = tuple[bytes, Sequence[Buffer], int]  # (header, payload, cost)


class Connection:
    """The memory of one end. Not thread-safe: it belongs to the thread that owns the socket."""

    def __init__(self, epoch: int) -> None:
        self.window_bytes = WINDOW_BYTES
        self._payload_ids = itertools.count(1)  # not used twice, also across epochs
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.newer_epoch = 0  # the highest epoch of a frame that was newer than ours
        self.paused = False  # messages are kept, not sent: the peer does not listen
        self.holds = False  # we want no more calls and pieces for now
        self.must_send = False  # messages have come since `frames_to_send`
        self.must_answer = False  # the peer waits for something that `frames_to_send` has
        self.calls_bytes = 0  # the cost of calls that wait or are under way
        self.waiting_payload_bytes = 0  # the size of the pieces that were not sent yet
        self._urgent: deque[Outgoing] = deque()
        self.calls: deque[Outgoing] = deque()  # the calls that wait
        self.behind: deque[Outgoing | WaitingPayload] = deque()  # payloads that wait, and the messages behind them
        self._unacked: deque[tuple[int, list[Buffer], int]] = deque()  # (priority, frames, cost) of _acked + 1 .. _sent
        self._under_way = [0, 0, 0]  # the cost of these, by priority
        self._sent = 0
        self._acked = 0
        self._received = 0  # all up to here were delivered
        self._owed_bytes = 0  # the cost of messages received since we last said how far we are
        self._asked = -1  # the value of _received when we last asked for a replay
        self._status_due = 0  # the most urgent of ACK, BEAT and REPLAY that is to be sent
        self._replay_due = False
        self._is_held = False  # the peer wants no more calls and pieces for now
        self._is_given_up = False
        self._parts: dict[int, bytearray] = {}
        self._whole: dict[int, bytearray] = {}

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(
        self, header: bytes, payload: Sequence[Buffer] = (), *, urgent: bool = False, in_order: bool = True
    ) -> None:
        """Give a message, whose buffers must not change from now on. It waits here for as long as it must.

        in_order: behind payloads that wait, and their messages. Raises: MessageTooLarge, and nothing is kept: no frame
        could bring it over.
        """
        if self._is_given_up:
            return
        cost = MESSAGE_COST_BYTES + len(header)
        if payload or cost > MAX_FRAME_BYTES:
            sizes = [buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in payload]
            check_sizes([len(header), *sizes])
            cost += sum(sizes)
        self.must_send = True
        if urgent:
            self._urgent.append((header, tuple(payload), cost))
            return
        self.calls_bytes += cost
        (self.behind if self.behind and in_order else self.calls).append((header, tuple(payload), cost))

    def send_payload(self, buffers: Sequence[Buffer]) -> tuple[int, Spans]:
        """Give a payload; return its id and spans, for the message that names it, which must be the next. The buffers
        must not change until the last view of them has died: the peer has them then, or never will."""
        id = next(self._payload_ids)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        ends = list(itertools.accumulate(map(len, views), initial=0))
        self._add(WaitingPayload(id, _cut(id, ends[-1], views)), ends[-1])
        return id, tuple(zip(ends, map(len, views), strict=False))

    def send_again(self, pieces: Sequence[PayloadPiece]) -> None:
        """Give pieces that a former peer has not got; the messages that name their payloads must be the next."""
        self._add(WaitingPayload(0, iter(pieces)), sum(len(piece.data) for piece in pieces))

    def _add(self, payload: WaitingPayload, size_bytes: int) -> None:
        if self._is_given_up:
            return
        self.behind.append(payload)
        self.waiting_payload_bytes += size_bytes
        self.must_send = True

    def withdraw(self, message: Outgoing, payload: int | None) -> None:
        """Take back one of the messages that are `behind`, and the payload that it names."""
        self.behind.remove(message)
        for at, waiting in enumerate(self.behind):
            if isinstance(waiting, WaitingPayload) and waiting.id == payload:
                self.waiting_payload_bytes -= sum(len(piece.data) for piece in waiting.pieces)
                self.behind[at] = WaitingPayload(payload, iter([PayloadPiece(payload, 0, 1, b"")]))
        self.calls_bytes -= message[2]
        self.must_send = True

    @property
    def has_all(self) -> bool:
        """Whether the peer has acknowledged all messages."""
        return not (self._unacked or self._urgent or self.calls or self.behind)

    def frames_to_send(self) -> list[list[Buffer]]:
        """Return the frames of each message to be sent now, in this order, once."""
        self.must_send = self.must_answer = False
        found: list[list[Buffer]] = []
        if self._replay_due:
            found += [frames for _, frames, _ in self._unacked]
            self._replay_due = False
            self._status_due = self._status_due or ACK  # what their first frames say besides is old
        if self._status_due:
            found.append(self._status(self._status_due))
        if self.paused:
            return found
        while self._urgent:
            found.append(self._number(URGENT, MESSAGE, *self._urgent.popleft()))
        under_way = self._under_way
        while not self._is_held and under_way[CALLS] < self.window_bytes:
            if self.calls:
                found.append(self._next_calls())
            elif self.behind and under_way[PIECES] < self.window_bytes:
                found += self._next_piece()
            else:
                break
        return found

    def _next_calls(self) -> list[Buffer]:
        """Return the frames of the next call, or of a batch of small ones: each costs as much as a batch does."""
        calls = self.calls
        header, payload, cost = calls.popleft()
        if payload or not calls:
            return self._number(CALLS, MESSAGE, header, payload, cost)
        headers, size = [header], len(header)
        while calls and not calls[0][1] and size + len(calls[0][0]) <= MAX_BATCH_BYTES:
            header, _, more = calls.popleft()
            headers.append(header)
            size += len(header)
            cost += more
        if len(headers) == 1:
            return self._number(CALLS, MESSAGE, headers[0], (), cost)
        return self._number(CALLS, BATCH, pack(headers), (), cost)

    def _next_piece(self) -> list[list[Buffer]]:
        """Return the frames of the next piece. If there is none before the next messages, these are calls from now."""
        waiting = self.behind[0]
        if isinstance(waiting, WaitingPayload) and (piece := next(waiting.pieces, None)) is not None:
            id, size_bytes, offset, data = piece
            self.waiting_payload_bytes -= len(data)
            cost = MESSAGE_COST_BYTES + len(data)
            return [self._number(PIECES, PIECE, _PIECE.pack(id, size_bytes, offset), (data,), cost)]
        self.behind.popleft()
        if not isinstance(waiting, WaitingPayload):
            self.calls.append(waiting)
        return []

    def _number(self, priority: int, kind: int, content: bytes, payload: Sequence[Buffer], cost: int) -> list[Buffer]:
        self._sent = number = self._sent + 1
        frames: list[Buffer] = [_pack(kind, self.holds, self.epoch, number, self._received) + content, *payload]
        self._owed_bytes = 0
        self._unacked.append((priority, frames, cost))
        self._under_way[priority] += cost
        return frames

    def _status(self, kind: int) -> list[Buffer]:
        self._owed_bytes = self._status_due = 0
        return [_pack(kind, self.holds, self.epoch, self._sent, self._received)]

    def beat(self) -> list[Buffer]:
        """Return frames that say how far we are in both directions; to be sent at regular times."""
        return self._status(BEAT)

    def acknowledge(self) -> None:
        """Acknowledge messages for which no acknowledgement is due, since there is nothing else to do."""
        if self._owed_bytes:
            self._answer(ACK)

    def hold(self, wanted: bool) -> None:
        """Ask the peer for no more calls and pieces, or for them again. Those under way still come."""
        if wanted != self.holds:
            self.holds = wanted
            self._answer(ACK)

    def _answer(self, kind: int) -> None:
        self._status_due = max(self._status_due, kind)
        self.must_answer = True

    # ---- receiving ----------------------------------------------------------------------------------------------

    def receive(self, frames: list[bytes]) -> Sequence[tuple[bytes, list[bytes]]] | None:
        """Take frames of the peer; return (header, payload) of each message that they bring, or None if they are of
        another epoch. Raises: PeerProtocolError for frames that no `Connection` makes."""
        if not frames or len(frames[0]) < _SIZE:
            raise PeerProtocolError(f"a message without a head of {_SIZE} bytes")
        kind, holds, epoch, number, ack = _unpack(frames[0])
        if epoch < self.epoch:
            self._answer(BEAT)
            return None
        if epoch > self.epoch:
            self.newer_epoch = max(epoch, self.newer_epoch)
            return None
        if kind != MESSAGE or not number:
            _check(kind, number, frames)
        if ack > self._sent:
            raise PeerProtocolError(f"message {ack} is acknowledged, but only {self._sent} were sent")
        if ack > self._acked:  # drop the messages that the peer has
            for _ in range(ack - self._acked):
                priority, _, cost = self._unacked.popleft()
                self._under_way[priority] -= cost
                if priority == CALLS:
                    self.calls_bytes -= cost
            self._acked = ack
            if self.calls or self.behind:
                self.must_answer = True  # there is room now
        if holds != self._is_held:
            self._is_held = holds != 0
            self.must_answer = True
        if kind >= ACK:
            if kind == REPLAY and self._unacked:
                self._replay_due = self.must_answer = True
            if number > self._received and (kind == BEAT or self._asked != self._received):
                self._ask()
            return ()
        if number != self._received + 1:
            self._skip(number)
            return ()
        self._received = number
        found: Sequence[tuple[bytes, list[bytes]]] = ()
        if kind == MESSAGE:
            found = ((frames[0][_SIZE:], frames[1:]),)
        elif kind == BATCH:
            found = [(header, []) for header in _unbatch(frames[0][_SIZE:])]
        elif kind == PIECE and not self._is_given_up:
            self._put_together(_piece_of(frames))
        cost = MESSAGE_COST_BYTES * (len(found) or 1)  # no less than for the sender, who may wait for our word
        for frame in frames:
            cost += len(frame)
        self._owed_bytes += cost
        if self._owed_bytes >= ACK_AFTER_BYTES:
            self._answer(ACK)
        return () if self._is_given_up else found

    def _skip(self, number: int) -> None:
        """Drop a message that is not the next one; the first after a gap causes a question."""
        if number <= self._received:
            self._answer(ACK)  # the peer may not know that we have it
        elif self._asked != self._received:
            self._ask()

    def _ask(self) -> None:
        self._asked = self._received
        self._answer(REPLAY)

    def _put_together(self, piece: PayloadPiece) -> None:
        id, size_bytes, offset, data = piece
        if offset > size_bytes:
            self._parts.pop(id, None)
            self._whole.pop(id, None)
            return
        whole = self._parts.setdefault(id, bytearray())
        if size_bytes > MAX_PAYLOAD_BYTES or offset + len(data) > size_bytes or len(whole) != offset:
            raise PeerProtocolError(f"a piece at {offset} follows {len(whole)} bytes of {size_bytes}")
        whole += data
        if len(whole) == size_bytes:
            self._whole[id] = self._parts.pop(id)

    def take_payload(self, payload: int, spans: Spans) -> list[memoryview]:
        """Return the buffers of a payload that a message has named, and forget it. Raises: PeerProtocolError if it has
        not come before the message."""
        if payload not in self._whole:
            raise PeerProtocolError(f"a message names payload {payload}, which was not sent")
        view = memoryview(self._whole.pop(payload))
        return [view[offset : offset + length] for offset, length in spans]

    # ---- peers that come and go ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Send only the urgent messages that the peer lacks; the others under way travel blank. Later messages are
        dropped, ours and the peer's."""
        self._is_given_up = True
        self.calls.clear()
        self.behind.clear()
        self._parts.clear()
        self._whole.clear()
        self.calls_bytes = self._under_way[CALLS]
        self.waiting_payload_bytes = 0
        unacked, self._unacked = self._unacked, deque()
        for number, (priority, frames, cost) in enumerate(unacked, self._acked + 1):
            blank: list[Buffer] = [_pack(BLANK, False, self.epoch, number, 0)]
            self._unacked.append((priority, frames if priority == URGENT else blank, cost))

    def restart(self, epoch: int) -> tuple[list[Sent], list[PayloadPiece]]:
        """Speak with the peer of ``epoch`` from now on. Return the calls, and the pieces of payloads, that the former
        peer has not acknowledged, in order."""
        calls: list[Sent] = []
        pieces: list[PayloadPiece] = []
        for priority, frames, _ in self._unacked:
            first = bytes(frames[0])
            if priority == PIECES:
                pieces.append(_piece_of(frames))
            elif priority == CALLS and first[0] == BATCH:
                calls += [(header, ()) for header in _unbatch(first[_SIZE:])]
            elif priority == CALLS:
                calls.append((first[_SIZE:], frames[1:]))
        for waiting in (*self.calls, *self.behind):
            if isinstance(waiting, WaitingPayload):
                pieces += waiting.pieces
            else:
                calls.append(waiting[:2])
        self._begin(epoch)
        return calls, pieces


def _check(kind: int, number: int, frames: list[bytes]) -> None:
    """Raise PeerProtocolError for frames that no connection makes."""
    content_bytes = len(frames[0]) - _SIZE
    is_possible = {
        MESSAGE: True,
        BATCH: len(frames) == 1,
        PIECE: len(frames) == 2 and content_bytes == _PIECE.size,
    }.get(kind, BLANK <= kind <= REPLAY and len(frames) == 1 and not content_bytes)
    if not is_possible or (kind < ACK and not number):
        raise PeerProtocolError(f"message {number} of kind {kind} has {len(frames)} frames, {content_bytes} bytes")


def _unbatch(content: bytes) -> list[bytes]:
    """Return the headers of a batch. Raises: PeerProtocolError for impossible sizes."""
    batches = list(FrameReader().feed(content))
    if len(batches) != 1:
        raise PeerProtocolError("a batch that is cut short, or more than one")
    return batches[0]


def _piece_of(frames: Sequence[Buffer]) -> PayloadPiece:
    payload, size_bytes, offset = _PIECE.unpack_from(frames[0], _SIZE)
    return PayloadPiece(payload, size_bytes, offset, frames[1])


def _cut(payload: int, size_bytes: int, views: list[memoryview]) -> Iterator[PayloadPiece]:
    if not size_bytes:
        yield PayloadPiece(payload, 0, 0, b"")
    offset = 0
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            data = view[start : start + PIECE_BYTES]
            yield PayloadPiece(payload, size_bytes, offset, data)
            offset += len(data)
