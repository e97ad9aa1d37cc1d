"""Payloads that cross hosts, in pieces on a lane of their own, so that they never delay a call or an interrupt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from meshbook import wire
from meshbook.errors import PeerProtocolError
from meshbook.frames import Buffer

Spans = tuple[tuple[int, int], ...]

MAX_PAYLOAD_BYTES = 1 << 36


class BulkSender:
    """Cuts payloads into `wire.Bulk` messages; ids are unique per sender."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def pieces(self, buffers: Sequence[Buffer]) -> tuple[tuple[int, Spans], Iterator[tuple[wire.Bulk, Buffer]]]:
        """Return what names the payload in its call or reply, and the messages that carry it."""
        payload = next(self._ids)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        spans, offset = [], 0
        for view in views:
            spans.append((offset, len(view)))
            offset += len(view)
        return (payload, tuple(spans)), self._cut(payload, offset, views)

    def _cut(self, payload: int, size_bytes: int, views: list[memoryview]) -> Iterator[tuple[wire.Bulk, Buffer]]:
        offset = 0
        for view in views:
            for start in range(0, len(view), wire.CHUNK_BYTES):
                piece = view[start : start + wire.CHUNK_BYTES]
                last = offset + len(piece) == size_bytes
                yield wire.Bulk(payload, size_bytes, offset, last), piece
                offset += len(piece)


class BulkReceiver:
    """Puts the pieces of one sender together again."""

    def __init__(self, on_whole: Callable[[], None]) -> None:
        self._on_whole = on_whole
        self._parts: dict[int, bytearray] = {}
        self._whole: dict[int, bytearray] = {}
        self._unwanted: set[int] = set()

    def receive(self, piece: wire.Bulk, data: Buffer) -> None:
        """Take a piece; tells ``on_whole`` when its payload is complete.

        Raises: PeerProtocolError for a size or an offset that cannot be.
        """
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
            self._on_whole()

    def has(self, payload: int) -> bool:
        return payload in self._whole

    def discard(self, payload: int) -> None:
        """Nobody will take this payload: forget it, and what is still to come of it."""
        if self._whole.pop(payload, None) is None:
            self._parts.pop(payload, None)
            self._unwanted.add(payload)

    def take(self, payload: int, spans: Spans) -> list[memoryview]:
        """Return the buffers of a whole payload, and forget it."""
        view = memoryview(self._whole.pop(payload))
        return [view[offset : offset + length] for offset, length in spans]
