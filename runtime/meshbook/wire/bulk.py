"""Payloads that cross hosts, in pieces on a lane of their own, so that they never delay a call or an interrupt.

Waiting payloads lie in shared memory, once, however many hosts are to get them. Only the pieces under way are
copied, by ZeroMQ, so these are few; the peer's acknowledgements bring the next ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, TypeAlias

from meshbook.errors import PeerProtocolError
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.link import ACK_AFTER_BYTES, Link

Spans = tuple[tuple[int, int], ...]

Sent: TypeAlias = tuple[bytes, Sequence[Buffer]]  # (header, payload) of a message as it is given to a link

# messages that may name a payload, and those that must not overtake them
NamesPayload: TypeAlias = wire.Replies | wire.Call | wire.Cancel

MAX_PAYLOAD_BYTES = 1 << 36
# of all payloads that this process sends, together; as far as `LEAST_BYTES` for each peer allows
UNDER_WAY_BYTES = 64 << 20
MOST_BYTES, LEAST_BYTES = 8 << 20, 2 * ACK_AFTER_BYTES  # to one peer


class BulkSender:
    """The payloads sent to one peer, in their order, as `wire.Bulk` messages; ids are unique per sender. Its owner
    calls `pump` after `send`, and when the peer has acknowledged messages."""

    # the senders of this process, which share `UNDER_WAY_BYTES`
    _at_work: ClassVar[weakref.WeakSet[BulkSender]] = weakref.WeakSet()

    def __init__(self, link: Callable[[], Link], transmit: Callable[[bytes, Sequence[Buffer]], None]) -> None:
        """link: the lane's present link. transmit: sends a message on it."""
        self._link, self._transmit = link, transmit
        self._ids = itertools.count(1)
        self.queue: deque[Iterator[Sent]] = deque()  # the payloads that are being sent
        self.waiting_bytes = 0  # the size of the pieces that were not sent yet

    def send(self, buffers: Sequence[Buffer]) -> tuple[int, Spans]:
        """Send a payload, soon; return its id and spans for its call or reply. The buffers must not change until the
        last view of them has died: the peer has them then, or never will."""
        payload = next(self._ids)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        spans, offset = [], 0
        for view in views:
            spans.append((offset, len(view)))
            offset += len(view)
        self._add(_cut(payload, offset, views), offset)
        return payload, tuple(spans)

    def send_again(self, pieces: Sequence[Sent]) -> None:
        """Send pieces that a former peer has not got."""
        self._add(iter(pieces), sum(_size(payload) for _, payload in pieces))

    def _add(self, pieces: Iterator[Sent], size_bytes: int) -> None:
        self.queue.append(pieces)
        self.waiting_bytes += size_bytes
        self._at_work.add(self)

    def pump(self) -> bool:
        """Send as much as may be under way now; return whether there was any."""
        if not self.queue:
            return False
        window = max(LEAST_BYTES, min(MOST_BYTES, UNDER_WAY_BYTES // len(self._at_work)))
        sent = False
        while self.queue and self._link().unacked_bytes < window:
            if (piece := next(self.queue[0], None)) is None:
                self.queue.popleft()
                continue
            self.waiting_bytes -= _size(piece[1])
            self._transmit(*piece)
            sent = True
        if not self.queue:
            self._at_work.discard(self)
        return sent

    def take_unsent(self) -> list[Sent]:
        """Give up the unsent pieces, and return them."""
        unsent = [piece for pieces in self.queue for piece in pieces]
        self.clear()
        return unsent

    def clear(self) -> None:
        """Give up the unsent pieces."""
        self.queue.clear()
        self.waiting_bytes = 0
        self._at_work.discard(self)


def _cut(payload: int, size_bytes: int, views: list[memoryview]) -> Iterator[Sent]:
    if not size_bytes:
        yield wire.encode(wire.Bulk(payload, 0, 0, True)), [b""]
    offset = 0
    for view in views:
        for start in range(0, len(view), wire.CHUNK_BYTES):
            piece = view[start : start + wire.CHUNK_BYTES]
            last = offset + len(piece) == size_bytes
            yield wire.encode(wire.Bulk(payload, size_bytes, offset, last)), [piece]
            offset += len(piece)


def _size(payload: Iterable[Buffer]) -> int:
    return sum(len(buffer) for buffer in payload)


class BulkReceiver:
    """The pieces of one sender, put together again; its messages are held back until their payloads are whole."""

    def __init__(self, on_whole: Callable[[NamesPayload, list[bytes]], None]) -> None:
        """on_whole: called with each message that was held back, in their order, once its payload is whole."""
        self._on_whole = on_whole
        self.queue: deque[tuple[NamesPayload, list[bytes]]] = deque()  # the messages that are held back
        self._parts: dict[int, bytearray] = {}
        self._whole: dict[int, bytearray] = {}
        self._unwanted: set[int] = set()

    def receive(self, piece: wire.Bulk, data: Buffer) -> None:
        """Add a piece; the last one passes on the messages that wait for it. Raises: PeerProtocolError."""
        if piece.payload in self._unwanted:
            if piece.last:
                self._unwanted.discard(piece.payload)
            return
        end = piece.offset + len(data)
        if piece.size_bytes > MAX_PAYLOAD_BYTES or end > piece.size_bytes or piece.last != (end == piece.size_bytes):
            raise PeerProtocolError(f"a piece at {piece.offset} does not fit a payload of {piece.size_bytes} bytes")
        whole = self._parts.setdefault(piece.payload, bytearray())
        if len(whole) != piece.offset:
            raise PeerProtocolError(f"a piece at {piece.offset} follows {len(whole)} bytes")
        whole += data
        if piece.last:
            self._whole[piece.payload] = self._parts.pop(piece.payload)
            self._pass_on()

    def park(self, message: NamesPayload, frames: list[bytes]) -> bool:
        """Keep a message while its payload, or that of an earlier one, is still on its way; return True when kept."""
        if not self.queue:  # it is on the path of every call, so no function takes part
            if isinstance(message, wire.Call):
                is_whole = message.bulk is None or message.bulk[0] in self._whole
            elif isinstance(message, wire.Replies):
                is_whole = True
                for reply in message.replies:
                    is_whole = is_whole and (reply.bulk is None or reply.bulk[0] in self._whole)
            else:
                is_whole = True
            if is_whole:
                return False
        self.queue.append((message, frames))
        return True

    def drop(self, call: wire.Call) -> None:
        """Forget a call that is held back, and its payload; pass on the messages that waited only for that."""
        self.queue = deque(each for each in self.queue if each[0] is not call)
        if call.bulk is not None:
            self.discard(call.bulk[0])
        self._pass_on()

    def _pass_on(self) -> None:
        held, self.queue = self.queue, deque()
        for message, frames in held:
            if not self.park(message, frames):
                self._on_whole(message, frames)

    def has(self, payload: int) -> bool:
        return payload in self._whole

    def discard(self, payload: int) -> None:
        """Forget a payload that is not wanted, and its pieces that are still to come."""
        if self._whole.pop(payload, None) is None:
            self._parts.pop(payload, None)
            self._unwanted.add(payload)

    def take(self, payload: int, spans: Spans) -> list[memoryview]:
        """Return the buffers of a whole payload, and forget it."""
        view = memoryview(self._whole.pop(payload))
        return [view[offset : offset + length] for offset, length in spans]

    def clear(self) -> None:
        """Forget all pieces and messages, since another sender begins."""
        self.queue.clear()
        self._parts.clear()
        self._whole.clear()
        self._unwanted.clear()
