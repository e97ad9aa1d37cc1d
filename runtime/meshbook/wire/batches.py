"""Several small messages as one: most of what a message costs it costs once, however small it is.

A batch is a message whose header starts with a byte that msgpack never uses, followed by the headers of its messages,
framed as in `meshbook.wire.frames`. Only messages without payload frames are batched; order is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshbook.errors import PeerProtocolError
from meshbook.wire.frames import Buffer, FrameReader, pack

MAX_BATCH_BYTES = 1 << 15

BATCH_MARK = b"\xc1"
"""What the header of a batch begins with."""


class Batch:
    """Collects messages for ``send(header, payload)``; its owner calls `flush` before it waits for anything."""

    def __init__(self, send: Callable[[bytes, Sequence[Buffer]], None]) -> None:
        self._send = send
        self.headers: list[bytes] = []
        """What waits for `flush`."""
        self._size_bytes = 0

    def add(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message, soon; one with a payload, or a large one, at once, after those that wait.

        Raises: what ``send`` raises of this very message.
        """
        if payload or len(header) > MAX_BATCH_BYTES:
            self.flush()
            self._send(header, payload)
            return
        self.headers.append(header)
        self._size_bytes += len(header)
        if self._size_bytes > MAX_BATCH_BYTES:
            self.flush()

    def flush(self) -> bool:
        """Send what has been collected; whether that was anything."""
        if not self.headers:
            return False
        headers, self.headers, self._size_bytes = self.headers, [], 0
        self._send(headers[0] if len(headers) == 1 else BATCH_MARK + pack(headers), ())
        return True


def unbatch(header: bytes) -> Sequence[bytes]:
    """The headers of the messages that came as one.

    Raises: PeerProtocolError if a batch claims an impossible size.
    """
    if not header.startswith(BATCH_MARK):
        return (header,)
    batches = list(FrameReader().feed(header[1:]))
    if len(batches) != 1:
        raise PeerProtocolError("a batch that is cut short, or more than one")
    return batches[0]
