"""Direct links: connections between two processes of one machine, by which small messages go past their agent.

    caller   the controller, or a rank that calls others; it listens (`DirectListener`)
    callee   a rank that was called some times by the agent; it dials, and says who it is (`wire.DirectHello`)

A link is a Unix SOCK_SEQPACKET connection: messages stay whole and in order, and the end of the other process is seen
at once. Each packet begins with the number of messages that its sender has received and settled, which acknowledges
them:

    u64 settled | u8 count of frames | u32 length of each | header of the message | frames      without a header:
                                                                                                an acknowledgement

A send never waits: what finds no room, or is too large, goes by the agent. A rank keeps its answers until they are
acknowledged. When a link breaks while both processes live, as when user code closes descriptors that it has not opened,
the caller sends its unanswered calls by the agent as well: the rank runs each once, and answers once more.

The sockets lie in a folder that is their owner's alone, and both ends check the user at the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from meshbook.errors import PeerProtocolError
from meshbook.system.descriptors import open_above
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.unix_transport import SCHEME, peer_user

MAX_BYTES = 1 << 16  # of a packet; larger messages go by the agent
BACKLOG = 128
_HEAD = struct.Struct("<QB")
_SIZE, _unpack = _HEAD.size, _HEAD.unpack_from
_MAX_FRAMES = 255


def direct_folder(endpoint: str) -> str:
    """Return the folder of the sockets of direct links, where agents dial ``endpoint``; empty if that is no path."""
    return str(Path(endpoint.removeprefix(SCHEME)).parent) if endpoint.startswith(SCHEME) else ""


def direct_path(folder: str, pid: int = 0) -> str:
    """Return the path of a caller's listener. pid: a rank's process; 0 for the controller."""
    return f"{folder}/direct-{pid}" if pid else f"{folder}/direct"


def remove_listener(folder: str, pid: int) -> None:
    """Remove the listener that a rank has left."""
    if folder:
        with contextlib.suppress(OSError):
            os.unlink(direct_path(folder, pid))


class DirectLink:
    """An end of a link. A single thread receives at a time; any thread may send."""

    settles_at_once = True
    """Whether the other end may forget each message when it has come, rather than when `settled` says so."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self.fd = sock.fileno()
        self.received = 0
        """The number of messages that have come."""
        self.settled = 0
        """The number of those that the other end may forget."""
        self.acked = 0
        """The number of our messages that the other end has settled, as far as it has said."""
        self.unacked: deque[tuple[wire.PastAgent | None, Sequence[Buffer]]] = deque()
        """Our messages beyond ``acked``."""
        self.kept: dict[int, wire.Call] = {}
        """The calls that have come, and whose answers the caller may not have."""
        self._told = 0
        self.is_open = True
        """Whether messages may still come."""
        self._takes = True

    def send(self, header: bytes, message: wire.PastAgent | None, payload: Sequence[Buffer] = ()) -> bool:
        """Send a message now; return False if it must go by the agent. header: the message, encoded; without a message
        an acknowledgement goes, as far as that is news."""
        if payload:
            lengths = [memoryview(part).nbytes for part in payload]
            if sum(lengths) > MAX_BYTES or len(lengths) > _MAX_FRAMES:
                return False
            header = b"".join((struct.pack(f"<{len(lengths)}I", *lengths), *payload, header))
        if len(header) > MAX_BYTES - _HEAD.size:
            return False
        with self._lock:
            if not self._takes or (message is None and self._told == self.settled):
                return False
            try:
                self._sock.send(_HEAD.pack(self.settled, len(payload)) + header)
            except BlockingIOError:
                return False
            except OSError:
                self._takes = False  # what has come from there is still to be read
                return False
            self._told = self.settled
            if message is not None:
                self.unacked.append((message, payload))
            return True

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return header and payload of the next message; None if none is there. Raises: PeerProtocolError."""
        with self._lock:
            while self.is_open:
                try:
                    data = self._sock.recv(MAX_BYTES)
                except BlockingIOError:
                    return None
                except ConnectionResetError:
                    continue  # the other end has ended without reading all of ours; its last messages still come
                except OSError as error:
                    self._lose(error)
                    return None
                if not data:
                    self._lose()
                    return None
                if len(data) < _SIZE:
                    raise PeerProtocolError("a packet that is cut short")
                settled, count = _unpack(data)
                if settled > self.acked:
                    self._note_acked(settled)
                if len(data) == _SIZE:
                    continue
                self.received += 1
                if self.settles_at_once:
                    self.settled = self.received
                return _cut(data, count) if count else (data[_SIZE:], [])
        return None

    def _note_acked(self, settled: int) -> None:
        while self.acked < settled:
            if not self.unacked:
                raise PeerProtocolError("a message is acknowledged that was not sent")
            self.acked += 1
            message = self.unacked.popleft()[0]
            if isinstance(message, wire.Replies):
                self.kept.pop(message.id, None)

    def _lose(self, error: OSError | None = None) -> None:
        self.is_open = self._takes = False
        if error is not None and error.errno in (errno.EBADF, errno.ENOTSOCK):
            self._sock.detach()  # user code has closed it, and the number may be another file's by now

    def close(self) -> None:
        """Close this end. Its descriptor must not be watched any more."""
        with self._lock:
            self._lose()
            self._sock.close()


def _cut(data: bytes, count: int) -> tuple[bytes, list[bytes]]:
    at, frames = _SIZE + 4 * count, []
    for length in struct.unpack_from(f"<{count}I", data, _SIZE):
        frames.append(data[at : at + length])
        at += length
    return data[at:], frames


class DirectListener:
    """The listener of a caller. Raises: OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = open_above(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            self._sock.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of the controller before us, or of a process that had our number
            self._sock.bind(path)
            self._sock.listen(BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self.fd = self._sock.fileno()

    def accept(self) -> socket.socket | None:
        """Return the next connection of a process of our user, if there is one."""
        while True:
            try:
                sock = open_above(lambda: self._sock.accept()[0])
            except OSError:  # there is none, or no descriptor for it: whoever dials is called by the agent
                return None
            if peer_user(sock) == os.geteuid():
                return sock
            sock.close()

    def close(self) -> None:
        self._sock.close()


def dial(path: str) -> socket.socket:
    """Return a connection to a caller. Raises: OSError."""
    sock = open_above(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        sock.setblocking(False)
        sock.connect(path)
        if peer_user(sock) != os.geteuid():
            raise PermissionError(f"{path} is served by another user")
    except OSError:
        sock.close()
        raise
    return sock
