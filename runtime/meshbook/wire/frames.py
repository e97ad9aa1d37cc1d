"""Messages on a byte stream (between the processes of one host).

    u32 count | u32 length 1 | .. | u32 length n | frame 1 | .. | frame n

Frame 1 is the header of `meshbook.wire`, the others are its payload. `FrameReader` is fed bytes, `pack` returns them;
below are the sockets that do so. Both ends live on one host and were started by us, so lengths are trusted up to a cap.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from meshbook.errors import MessageTooLarge, PeerProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

# of one frame, on socketpairs as on links, whose sockets take a little more: a worker's frame fits its agent's link
MAX_FRAME_BYTES = (64 << 20) - (1 << 10)
# read first: for more, malloc(3) maps memory, whose pages are new, and unmaps it, at each message
FIRST_READ_BYTES = 1 << 16
READ_BYTES = 1 << 18  # read at a time: all that a Unix socket of Linux holds, unless it was given more room
MAX_FRAMES = 4096
MAX_MESSAGE_BYTES = 1 << 31
_U32 = struct.Struct("<I")


def pack(frames: Sequence[Buffer]) -> bytes:
    """Return ``frames`` as one byte string; large payloads go through shared memory. Raises: MessageTooLarge."""
    sizes = list(map(len, frames))
    data = b"".join((struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes), *frames))
    if len(data) > MAX_FRAME_BYTES:  # together they may
        check_sizes(sizes)
    return data


def check_sizes(sizes: Iterable[int]) -> None:
    """Raise MessageTooLarge for a frame that the other side would refuse, however often it were sent."""
    if (largest := max(sizes, default=0)) > MAX_FRAME_BYTES:
        raise MessageTooLarge(largest, MAX_FRAME_BYTES)


class FrameReader:
    """A byte stream, turned back into messages from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> Iterable[list[bytes]]:
        """Return each message that ``data`` completes, in order. Raises: PeerProtocolError if the stream claims an
        impossible size, here or where that message would come."""
        if not self._buffer and (found := _cut(data)) is not None and found[1] == len(data):
            return (found[0],)  # most often it is one message
        self._buffer += data
        return self._take_all()

    def _take_all(self) -> Iterator[list[bytes]]:
        while (found := _cut(self._buffer)) is not None:
            frames, end = found
            del self._buffer[:end]
            yield frames


def _cut(data: Buffer) -> tuple[list[bytes], int] | None:
    """Return the frames of the first message, and where it ends; None while it is not whole."""
    if len(data) < 4:
        return None
    (count,) = _U32.unpack_from(data)
    if count > MAX_FRAMES:
        raise PeerProtocolError(f"a message claims {count} frames; at most {MAX_FRAMES} are allowed")
    head = 4 + 4 * count
    if len(data) < head:
        return None
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    end = head + sum(sizes)
    if end > MAX_MESSAGE_BYTES:
        raise PeerProtocolError(f"a message claims {end} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    if len(data) < end:
        return None
    frames = []
    with memoryview(data) as view:
        for size in sizes:
            frames.append(bytes(view[head : head + size]))
            head += size
    return frames, end


class FrameSocket:
    """A stream socket with blocking messages; one reader thread, writers serialised by their owner."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)
        self._reader = FrameReader()
        self._read_bytes = FIRST_READ_BYTES
        self._ready: list[list[bytes]] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_message(self) -> bool:
        """Whether a message waits here that came together with others."""
        return bool(self._ready)

    def wait(self, timeout_s: float) -> bool:
        """Whether a message, or the end, is there within ``timeout_s``."""
        if self._ready:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def receive(self, *, is_there: bool = False) -> list[bytes] | None:
        """Wait for the next message; return None when the other end has closed. is_there: some of it has come."""
        while not self._ready:
            if not is_there:
                self._arrivals.poll()  # `recv` would wake a second time, when the other end has read what we sent
            is_there = False
            data = self._sock.recv(self._read_bytes)
            if not data:
                return None
            self._read_bytes = READ_BYTES if len(data) >= FIRST_READ_BYTES else FIRST_READ_BYTES
            self._ready = list(self._reader.feed(data))
            self._ready.reverse()
        return self._ready.pop()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Write a whole message. Raises: BrokenPipeError when the other end is gone."""
        self._sock.sendall(pack(frames))

    def close(self) -> None:
        self._sock.close()


def only_frame(payload: Sequence[bytes]) -> bytes:
    """Return the payload frame. Raises: PeerProtocolError unless there is exactly one."""
    if len(payload) != 1:
        raise PeerProtocolError(f"a message that has one payload frame came with {len(payload)}")
    return payload[0]


class MessageSocket:
    """A stream socket with whole messages that never blocks; data that does not fit now waits here. Raises: OSError."""

    __slots__ = ("_reader", "_sock", "_unsent", "fd", "has_more", "unsent_bytes")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self.fd = sock, sock.fileno()
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()  # data that waits
        self.unsent_bytes = 0
        self.has_more = False  # whether the last `receive` may have left data

    def send(self, data: bytes) -> bool:
        """Send a message as `pack` makes it; return whether no data waits for the other end to read. If some does, call
        `flush` when there is room."""
        if self._unsent:
            sent = 0
        else:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return True
        self._unsent.append(memoryview(data)[sent:])
        self.unsent_bytes += len(data) - sent
        return False

    def flush(self) -> bool:
        """Send waiting data, as far as there is room; return whether that was all."""
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                return False
            self.unsent_bytes -= sent
            if sent < len(part):
                self._unsent[0] = part[sent:]
                return False
            self._unsent.popleft()
        return True

    def flush_until(self, deadline: float) -> None:
        """Send waiting data, until a moment of the monotonic clock."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while not self.flush() and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)

    def receive(self, size: int = READ_BYTES) -> Iterable[list[bytes]]:
        """Read at most ``size`` bytes; return each message that they complete. Raises: EOFError at the end of the
        stream; PeerProtocolError, see `FrameReader.feed`."""
        size = size if self.has_more else min(size, FIRST_READ_BYTES)
        try:
            data = self._sock.recv(size)
        except BlockingIOError:
            self.has_more = False
            return ()
        if not data:
            raise EOFError
        self.has_more = len(data) == size
        return self._reader.feed(data)

    def close(self) -> None:
        self._sock.close()
