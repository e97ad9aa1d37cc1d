"""Unix sockets between the controller and the agents of its own machine: one stream for each agent.

A message between threads of ZeroMQ wakes four threads on its way; here it wakes the process that waits for it. Nothing
is encrypted: the socket lies in the session's folder, which is its owner's alone, the kernel names the user at the
other end, and the first message of a connection gives the secret key of the host, by whose public key it is known.

    first message    public key | secret key
    the others       frames of `meshbook.wire.connection`

A process that is no host may pay a visit instead (`meshbook.wire.visits`): one question, one answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
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
from meshbook.wire.ticket import Ticket

SCHEME = "unix:"
BACKLOG = 1024
_RETRY_S, _MAX_RETRY_S = 0.1, 0.5
_BUFFER_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # pid, user, group; unix(7)

# takes the question of a visit, and a function that sends the answer under the turn
OnVisit: TypeAlias = Callable[[bytes, Callable[[bytes], None]], None]

VISIT = b"visit"  # the first frame of a visit; no public key is so short


def control_endpoint(session: Path) -> str:
    """Return the Unix endpoint of a session's controller. session: its folder."""
    return f"{SCHEME}{session}/control"


class UnixServer:
    """The controller's end of the connections of this machine's hosts. Its owner polls ``epoll`` for us. identify:
    takes the first message of a connection; returns its host, empty for a stranger. Raises: OSError."""

    def __init__(
        self, path: str, epoll: select.epoll, identify: Callable[[list[bytes]], str], on_visit: OnVisit
    ) -> None:
        self._epoll, self._identify, self._on_visit = epoll, identify, on_visit
        # (host id, frames) of each message that has come; its reader empties it
        self.received: list[tuple[str, list[bytes]]] = []
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
        # sockets and their hosts by descriptor; those that have not said who they are have none
        self._sockets: dict[int, tuple[MessageSocket, str]] = {}
        self._hosts: dict[str, MessageSocket] = {}
        self.rejected = 0  # connections that were not let in

    def serve(self, fd: int, events: int) -> bool:
        """Act on events of a descriptor; return whether it is one of ours."""
        if (known := self._sockets.get(fd)) is None:
            if fd == self._listener.fileno():
                self._let_in()
                return True
            return False
        sock, host = known
        try:
            if events & ~select.EPOLLOUT:
                for frames in sock.receive():
                    if host:
                        self.received.append((host, frames))
                    else:
                        host = self._greet(sock, frames)
            if events & (select.EPOLLOUT | select.EPOLLHUP) == select.EPOLLOUT and sock.flush():
                self._epoll.modify(fd, select.EPOLLIN)
        except (OSError, EOFError, PeerProtocolError):
            self._drop(fd)
        return True

    def send(self, host: str, frames: Sequence[Buffer]) -> bool:
        """Send frames to a host, as soon as it reads; return False if it is none of ours."""
        if (sock := self._hosts.get(host)) is None:
            return False
        try:
            if not sock.send(pack(frames)):
                self._epoll.modify(sock.fd, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            pass  # `serve` reads its last words and its end; it dials again, and gets a replay
        return True

    def has(self, host: str) -> bool:
        """Whether a host is connected."""
        return host in self._hosts

    def look_again(self) -> None:
        """Let in hosts that could not be let in for want of descriptors; once a second."""
        self._epoll.modify(self._listener, select.EPOLLIN)

    def revoke(self, host: str) -> None:
        """Have no more to do with a host; messages that were sent to it before still go out."""
        if (sock := self._hosts.pop(host, None)) is not None and not sock.unsent_bytes:
            self._drop(sock.fd)

    def close(self, linger_s: float) -> None:
        """Close everything; messages that cannot be sent within ``linger_s`` are dropped."""
        deadline = time.monotonic() + linger_s
        for fd, (sock, _) in list(self._sockets.items()):
            with contextlib.suppress(OSError):
                sock.flush_until(deadline)
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
            come = open_socket(sock)
            self._sockets[come.fd] = come, ""
            self._epoll.register(come.fd, select.EPOLLIN)

    def _greet(self, sock: MessageSocket, frames: list[bytes]) -> str:
        """Return the host of a socket by its first message; empty for a visit. Raises: PeerProtocolError for
        strangers."""
        if frames[:1] == [VISIT] and len(frames) == 2:
            self._on_visit(frames[1], functools.partial(self._answer, sock))
            return ""
        host = self._identify(frames)
        if not host:
            self.rejected += 1
            raise PeerProtocolError("a stranger")
        if (former := self._hosts.get(host)) is not None:
            self._drop(former.fd)  # it has dialled again
        self._sockets[sock.fd] = sock, host
        self._hosts[host] = sock
        return host

    def _answer(self, sock: MessageSocket, answer: bytes) -> None:
        """Answer a visit, unless it has ended."""
        if self._sockets.get(sock.fd) == (sock, ""):
            with contextlib.suppress(OSError):
                if not sock.send(pack([answer])):
                    self._epoll.modify(sock.fd, select.EPOLLIN | select.EPOLLOUT)

    def _drop(self, fd: int) -> None:
        sock, host = self._sockets.pop(fd)
        if self._hosts.get(host) is sock:
            del self._hosts[host]
        self._epoll.unregister(fd)
        sock.close()


class UnixDialer:
    """An agent's end of a connection on one machine, which dials again whenever that breaks; as `ZmqDialer`."""

    has_arrived, is_answered, answered = True, False, -math.inf

    def __init__(self, ticket: Ticket, loop: EventLoop, on_connected: Callable[[], None]) -> None:
        self.may_read = False
        self._path = ticket.endpoint.removeprefix(SCHEME)
        self._hello = pack([ticket.public_key.encode(), ticket.secret_key.encode()])
        self._loop, self._on_connected = loop, on_connected
        self._watch: Watch | None = None
        self._sock: MessageSocket | None = None
        self._received: deque[list[bytes]] = deque()
        self._has_more = False  # whether the socket may have data that was not read
        self._is_closed = False
        self._retry_s = _RETRY_S
        self._dial()

    def take(self) -> list[bytes] | None:
        """Read until a message is whole, or no data is left, of which no edge would tell again."""
        received = self._received
        while not received and self._has_more:
            self._read()
        frames = received.popleft() if received else None
        self.may_read = self._has_more or bool(received)
        return frames

    def _read(self) -> None:
        """Take in the next data; begin to dial again at the end of the stream."""
        assert self._sock is not None
        try:
            self._received.extend(self._sock.receive())
            self._has_more = self._sock.has_more
        except (OSError, EOFError, PeerProtocolError):
            self._lose()

    def transmit(self, frames: Sequence[Buffer]) -> None:
        if self._sock is None:
            return
        try:
            if not self._sock.send(pack(frames)) and self._watch is not None:
                self._loop.want_writable(self._watch, True)
        except OSError:
            self._hear_out()

    def look(self) -> None:
        """Do nothing: the socket tells all that is to be seen."""

    def dial_again(self) -> None:
        """Do nothing: the other end is on this machine."""

    def close(self) -> None:
        self._is_closed = True
        self._drop()

    def _dial(self) -> bool:
        """Connect, or try again later; return whether there is a connection."""
        if self._is_closed:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            if peer_user(sock) != os.geteuid():
                raise PermissionError(f"{self._path} is served by another user")
            self._sock = open_socket(sock)
            self._sock.send(self._hello)
        except OSError:
            self._sock = None
            sock.close()
            self._dial_later()
            return False
        self._retry_s = _RETRY_S
        self._watch = self._loop.watch(self._sock.fd, self._on_edge, self._on_writable, edges=True)
        return True

    def _redial(self) -> None:
        if self._dial():
            self._on_connected()  # the other end learns what was lost with the connection before

    def _dial_later(self) -> None:
        self._loop.call_later(self._retry_s, self._redial)
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def _on_edge(self) -> None:
        self._has_more = self.may_read = True

    def _on_writable(self) -> None:
        assert self._sock is not None
        assert self._watch is not None
        try:
            if self._sock.flush():
                self._loop.want_writable(self._watch, False)
        except OSError:
            self._hear_out()

    def _hear_out(self) -> None:
        """Take in the last messages of an end that reads no more, which may be a goodbye, and dial again."""
        self._has_more = self.may_read = True
        while self._has_more:
            self._read()
        if self._sock is not None:
            self._lose()

    def _lose(self) -> None:
        """Dial again, since the connection has broken."""
        self._drop()
        self._dial_later()

    def _drop(self) -> None:
        if self._watch is not None:
            self._loop.forget(self._watch)
        if self._sock is not None:
            self._sock.close()
        self._watch = self._sock = None
        self._has_more = False


def open_socket(sock: socket.socket) -> MessageSocket:
    """Return the socket as one of messages. Raises: OSError."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return MessageSocket(sock)


def peer_user(sock: socket.socket) -> int:
    """Return the user at the other end. Raises: OSError."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
