"""Unix sockets between the controller and the agents of its own machine: one stream per lane.

A message between threads of ZeroMQ wakes four threads on its way; here it wakes the process that waits for it. Nothing
is encrypted: the socket lies in the session's folder, which is its owner's alone, the kernel names the user at the
other end, and the first message of a connection gives the secret key of the host, by whose public key it is known.

    first message    routing id "KEY/lane" | secret key
    the others       frames of `meshbook.wire.link`

A process that is no host may pay a visit instead (`meshbook.wire.visits`): one question, one answer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from meshbook.errors import PeerProtocolError
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.wire.frames import Buffer, MessageSocket, pack
from meshbook.wire.lanes import Lane, LaneName, routing_id
from meshbook.wire.ticket import Ticket

SCHEME = "unix:"
BACKLOG = 1024
_RETRY_S, _MAX_RETRY_S = 0.1, 0.5
_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # pid, user, group; unix(7)

HostLane: TypeAlias = "tuple[str, LaneName]"  # a host's id, and a lane of it
# takes the question of a visit, and a function that sends the answer under the turn
OnVisit: TypeAlias = Callable[[bytes, Callable[[bytes], None]], None]

VISIT = b"visit"  # the first frame of a visit; no routing id is so short


def control_endpoint(session: Path) -> str:
    """Return the Unix endpoint of a session's controller. session: its folder."""
    return f"{SCHEME}{session}/control"


class UnixServer:
    """The controller's end of all lanes of the hosts of this machine. Its owner polls ``epoll`` for us. identify: takes
    the first message of a connection; returns its lane, or None for a stranger's. Raises: OSError."""

    def __init__(
        self, path: str, epoll: select.epoll, identify: Callable[[list[bytes]], HostLane | None], on_visit: OnVisit
    ) -> None:
        self._epoll, self._identify, self._on_visit = epoll, identify, on_visit
        # (host id, lane, link frames) of each message that has come; its reader empties it
        self.received: list[tuple[str, LaneName, list[bytes]]] = []
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of the controller before us: the session's lock is ours
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(path)
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
            epoll.register(self._listener, select.EPOLLIN)
        except OSError:
            self._listener.close()
            raise
        # by descriptor; strangers that have not said who they are have no place
        self._connections: dict[int, tuple[MessageSocket, HostLane | None]] = {}
        self._lanes: dict[HostLane, MessageSocket] = {}
        self.rejected = 0  # connections that were not let in

    def serve(self, fd: int, events: int) -> bool:
        """Act on events of a descriptor; return whether it is one of ours."""
        if (known := self._connections.get(fd)) is None:
            if fd == self._listener.fileno():
                self._let_in()
                return True
            return False
        connection, place = known
        try:
            if events & ~select.EPOLLOUT:
                for frames in connection.receive():
                    if place is None:
                        place = self._greet(fd, connection, frames)
                    else:
                        self.received.append((*place, frames))
            if events & (select.EPOLLOUT | select.EPOLLHUP) == select.EPOLLOUT and connection.flush():
                self._epoll.modify(fd, select.EPOLLIN)
        except (OSError, EOFError, PeerProtocolError):
            self._drop(fd)
        return True

    def send(self, place: HostLane, frames: Sequence[Buffer]) -> bool:
        """Send frames to a lane, as soon as its host reads; return False if it is none of ours."""
        if (connection := self._lanes.get(place)) is None:
            return False
        try:
            if not connection.send(pack(frames)):
                self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            pass  # `serve` reads its last words and its end; its host dials again, and the link replays
        return True

    def has(self, host_id: str) -> bool:
        """Whether a host is connected."""
        return (host_id, "urgent") in self._lanes

    def look_again(self) -> None:
        """Let in hosts that could not be let in for want of descriptors; once a second."""
        self._epoll.modify(self._listener, select.EPOLLIN)

    def revoke(self, host_id: str) -> None:
        """Have no more to do with a host; messages that were sent to it before still go out."""
        for (id, lane), connection in list(self._lanes.items()):
            if id == host_id:
                del self._lanes[id, lane]
                if not connection.unsent_bytes:
                    self._drop(connection.fd)

    def close(self, linger_s: float) -> None:
        """Close everything; messages that cannot be sent within ``linger_s`` are dropped."""
        deadline = time.monotonic() + linger_s
        for fd, (connection, _) in list(self._connections.items()):
            with contextlib.suppress(OSError):
                connection.flush_until(deadline)
            self._drop(fd)
        self._epoll.unregister(self._listener)
        self._listener.close()

    def _let_in(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: whoever dials waits for `look_again`
                self._epoll.modify(self._listener, 0)
                return
            if peer_user(sock) != os.geteuid():
                self.rejected += 1
                sock.close()
                continue
            connection = open_connection(sock)
            self._connections[connection.fd] = connection, None
            self._epoll.register(connection.fd, select.EPOLLIN)

    def _greet(self, fd: int, connection: MessageSocket, frames: list[bytes]) -> HostLane | None:
        """Return the lane of a connection by its first message; None for a visit. Raises: PeerProtocolError for
        strangers."""
        if frames[:1] == [VISIT] and len(frames) == 2:
            self._on_visit(frames[1], functools.partial(self._answer, connection))
            return None
        place = self._identify(frames)
        if place is None:
            self.rejected += 1
            raise PeerProtocolError("a stranger")
        if (former := self._lanes.get(place)) is not None:
            self._drop(former.fd)  # its host has dialled again
        self._connections[fd] = connection, place
        self._lanes[place] = connection
        return place

    def _answer(self, connection: MessageSocket, answer: bytes) -> None:
        """Answer a visit, unless it has ended."""
        if self._connections.get(connection.fd) == (connection, None):
            with contextlib.suppress(OSError):
                if not connection.send(pack([answer])):
                    self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _drop(self, fd: int) -> None:
        connection, place = self._connections.pop(fd)
        if place is not None and self._lanes.get(place) is connection:
            del self._lanes[place]
        self._epoll.unregister(fd)
        connection.close()


class UnixLane(Lane):
    """An agent's end of one lane; see `meshbook.wire.lanes.Lane`."""

    def __init__(self, ticket: Ticket, lane: LaneName, on_newer: Callable[[int], None]) -> None:
        super().__init__(ticket.epoch, on_newer)
        self._path = ticket.endpoint.removeprefix(SCHEME)
        self._hello = [routing_id(ticket.public_key, lane), ticket.secret_key.encode()]
        self._loop: EventLoop | None = None
        self._watch: Watch | None = None
        self._connection: MessageSocket | None = None
        self._received: deque[list[bytes]] = deque()
        self._has_more = False  # whether the socket may have data that was not read
        self._is_closed = False
        self._retry_s = _RETRY_S
        self._dial()

    def watch(self, loop: EventLoop) -> None:
        self._loop = loop
        if self._connection is None:
            self._dial_later()
        else:
            self._watch_connection()

    def take(self) -> list[bytes] | None:
        """Read until a message is whole, or no data is left, of which no edge would tell again. See `Lane.take`."""
        received = self._received
        while not received and self._has_more:
            self._read()
        frames = received.popleft() if received else None
        self.may_read = self._has_more or bool(received)
        return frames

    def _read(self) -> None:
        """Take in the next data; begin to dial again at the end of the stream."""
        assert self._connection is not None
        try:
            self._received.extend(self._connection.receive())
            self._has_more = self._connection.has_more
        except (OSError, EOFError, PeerProtocolError):
            self._lose()

    def transmit(self, frames: Sequence[Buffer]) -> bool:
        if self._connection is None:
            return False
        try:
            if not self._connection.send(pack(frames)) and self._loop is not None and self._watch is not None:
                self._loop.want_writable(self._watch, True)
        except OSError:
            self._hear_out()
            return False
        return True

    def disconnect(self) -> None:
        self._is_closed = True
        self._drop()

    def _dial(self) -> None:
        if self._is_closed:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            if peer_user(sock) != os.geteuid():
                raise PermissionError(f"{self._path} is served by another user")
            self._connection = open_connection(sock)
            self._connection.send(pack(self._hello))
        except OSError:
            self._connection = None
            sock.close()
            self._dial_later()
            return
        self._retry_s = _RETRY_S
        if self._loop is not None:
            self._watch_connection()
            self.beat()  # the other end learns what was lost with the connection before

    def _watch_connection(self) -> None:
        assert self._connection is not None
        assert self._loop is not None
        self._watch = self._loop.watch(self._connection.fd, self._on_edge, self._on_writable, edges=True)

    def _dial_later(self) -> None:
        if self._loop is not None:
            self._loop.call_later(self._retry_s, self._dial)
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def _on_edge(self) -> None:
        self._has_more = self.may_read = True

    def _on_writable(self) -> None:
        assert self._connection is not None
        assert self._loop is not None
        assert self._watch is not None
        try:
            if self._connection.flush():
                self._loop.want_writable(self._watch, False)
        except OSError:
            self._hear_out()

    def _hear_out(self) -> None:
        """Take in the last messages of an end that reads no more, which may be a goodbye, and dial again."""
        self._has_more = self.may_read = True
        while self._has_more:
            self._read()
        if self._connection is not None:
            self._lose()

    def _lose(self) -> None:
        """Dial again, since the connection has broken."""
        self._drop()
        self._dial_later()

    def _drop(self) -> None:
        if self._watch is not None and self._loop is not None:
            self._loop.forget(self._watch)
        if self._connection is not None:
            self._connection.close()
        self._watch = self._connection = None
        self._has_more = False


def open_connection(sock: socket.socket) -> MessageSocket:
    """Return the socket as one of messages. Raises: OSError."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return MessageSocket(sock)


def peer_user(sock: socket.socket) -> int:
    """Return the user at the other end. Raises: OSError."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
