"""The two ends of a connection, over Unix sockets on one machine and over ZeroMQ between machines.

    ControllerSocket   listens; all hosts dial in to it     `HostLink` uses it
    Dialer             dials the endpoint of a ticket       `Uplink` uses it

Either may lose messages that are under way when a connection breaks; `meshbook.wire.connection` replays them.

The socket of a controller is used under its turn, and closed by its I/O thread; others belong to one thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import select
from collections.abc import Callable, Sequence

import zmq

from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import open_end
from meshbook.wire.frames import Buffer
from meshbook.wire.tcp import ConnectionFilter
from meshbook.wire.ticket import Ticket
from meshbook.wire.unix_transport import SCHEME, OnVisit, UnixDialer, UnixServer
from meshbook.wire.zmq_transport import ZmqDialer, ZmqServer, host_with


def new_keys() -> tuple[str, str]:
    """Return a CURVE key pair: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class ControllerSocket:
    """The controller's end of the connections of all hosts."""

    def __init__(self, keys: tuple[str, str] | None = None) -> None:
        """keys: the public and the secret CURVE key of a session that exists; new ones by default."""
        self.public_key, self._secret = keys or new_keys()
        self._keys: dict[str, str] = {}  # the public keys of the hosts that are let in, by host id
        self._epoll = select.epoll()
        self._wake_fd = -1
        self._unix: UnixServer | None = None
        # takes visits (`meshbook.wire.visits`); until it is set they get no answer
        self.on_visit: OnVisit = lambda asked, answer: None
        self._looks: dict[int, Callable[[], object]] = {}
        self._ready: list[Callable[[], object]] = []
        self._servers: list[ZmqServer] = []  # a server for each address of this machine by which hosts reach it
        self._server_of: dict[str, int] = {}  # the index of a host's server, by host id, once it was heard of
        # descriptors of processes whose end `poll` waits for (`meshbook.system.exits`)
        self._ends: set[int] = set()

    def bind(self, address: str) -> str:
        """Listen at ``unix:PATH``, once, and at ``tcp://IP:PORT``, ``*`` for any port; return the endpoint to dial.
        Raises: OSError if the system has no sockets for it, and for other addresses."""
        if address.startswith(SCHEME):
            self._unix = UnixServer(
                address.removeprefix(SCHEME),
                self._epoll,
                self._identify,
                lambda asked, answer: self.on_visit(asked, answer),
            )
            return address
        if not address.startswith("tcp://"):  # as earlier versions have saved it
            raise OSError(errno.EPROTONOSUPPORT, "no address that this version listens at")
        expected = functools.partial(self._far_hosts, len(self._servers))
        server = ZmqServer(address, (self.public_key, self._secret), self._keys, expected)
        self._servers.append(server)
        for fd in server.descriptors:
            self._epoll.register(fd, select.EPOLLIN)
        self.watch_door()
        return server.endpoint

    @property
    def door(self) -> ConnectionFilter | None:
        """Return the filter of the first TCP port, if there is one."""
        return self._servers[0].door if self._servers else None

    @property
    def rejected(self) -> int:
        """Return how many connections, messages and keys were not let in."""
        return sum(server.rejected for server in (self._unix, *self._servers) if server is not None)

    def watch_door(self) -> None:
        """Open each TCP port while hosts are expected there, and shut it while none is; once a second."""
        if self._unix is not None:
            self._unix.look_again()
        for server in self._servers:
            server.watch_door()

    def accept(self, host_id: str) -> tuple[str, str]:
        """Return a new key pair (public, secret) that lets in ``host_id`` only."""
        public, secret = new_keys()
        self.readmit(host_id, public)
        return public, secret

    def readmit(self, host_id: str, public_key: str) -> None:
        """Let ``host_id`` in with its existing key pair."""
        self._keys[host_id] = public_key
        self.watch_door()

    def revoke(self, host_id: str) -> None:
        """Let ``host_id`` in no more."""
        self._keys.pop(host_id, None)
        self._server_of.pop(host_id, None)
        if self._unix is not None:
            self._unix.revoke(host_id)
        self.watch_door()

    def _identify(self, frames: list[bytes]) -> str:
        """Return the host of a Unix connection by its first message; empty for a stranger."""
        try:
            key, secret = frames
            is_theirs = zmq.curve_public(secret) == key
        except (ValueError, zmq.ZMQError):
            return ""
        return host_with(self._keys, key.decode()) if is_theirs else ""

    def _far_hosts(self, server: int) -> list[str]:
        """Return the hosts that are not connected by a Unix socket, or to another server than that with this index."""
        return [
            id
            for id in self._keys
            if self._server_of.get(id, server) == server and (self._unix is None or not self._unix.has(id))
        ]

    def poll(self, wake_fd: int, timeout_s: float | None) -> bool:
        """Wait until a message, a wake-up by the eventfd ``wake_fd`` or the timeout is there; let hosts in meanwhile.
        Returns: whether a process of `watch_end` has ended since the last time."""
        ended = False
        if wake_fd != self._wake_fd:
            self._wake_fd = wake_fd
            self._epoll.register(wake_fd, select.EPOLLIN)
        if self._servers and timeout_s != 0 and any(server.is_there for server in self._servers):
            timeout_s = 0  # its descriptors tell edges only
        for fd, events in self._epoll.poll(timeout_s):
            if (look := self._looks.get(fd)) is not None:
                self._ready.append(look)
                continue
            if self._unix is not None and self._unix.serve(fd, events):
                continue
            if fd == wake_fd:
                os.eventfd_read(fd)
            elif fd in self._ends:
                self._forget_end(fd)
                ended = True
            else:
                for server in self._servers:
                    server.tell(fd)
        return ended

    @property
    def fd(self) -> int:
        """Return a descriptor for another event loop; it tells edges: `look` and `receive` before a sleep."""
        return self._epoll.fileno()

    def look(self) -> None:
        """Let hosts in, without waiting."""
        self.poll(self._wake_fd, 0)

    def answered(self, host_id: str, before: float) -> float:
        """Return when the machine of a host was last known to be there, at least ``before``."""
        server = self._server_of.get(host_id)
        return before if server is None else self._servers[server].answered(host_id, before)

    def key_of(self, host_id: str) -> str:
        """Return the public key of a host that is let in; empty for any other."""
        return self._keys.get(host_id, "")

    def watch_end(self, pid: int) -> None:
        """Have `poll` return when the process ends, and report it, once."""
        try:
            fd = open_end(pid)
        except OSError:  # no descriptor is left, or it is gone already: who looks at it regularly finds out
            return
        self._ends.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def _forget_end(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._ends.discard(fd)
        os.close(fd)

    def receive(self, most: int | None = None) -> list[tuple[str, list[bytes]]]:
        """Take (host id, frames) of each message that is there; of other machines' at most so many."""
        received: list[tuple[str, list[bytes]]] = []
        if self._unix is not None:
            received, self._unix.received = self._unix.received, received
        for index, server in enumerate(self._servers):
            for message in itertools.islice(server.receive(), most):
                self._server_of[message[0]] = index
                received.append(message)
        return received

    def watch(self, fd: int, look: Callable[[], object]) -> None:
        """Have `take_ready` return ``look`` when the descriptor can be read."""
        self._looks[fd] = look
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Watch a descriptor no more; call it before that is closed."""
        del self._looks[fd]
        with contextlib.suppress(OSError):  # user code has closed it
            self._epoll.unregister(fd)

    def take_ready(self) -> Sequence[Callable[[], object]]:
        """Return the functions of `watch` whose descriptors could be read at the last `poll`."""
        if not self._ready:
            return ()
        ready, self._ready = self._ready, []
        return ready

    def send(self, host_id: str, frames: Sequence[Buffer]) -> None:
        """Hand frames to a host; for a host that is not connected they are left to the replay."""
        if self._unix is not None and self._unix.send(host_id, frames):
            return
        if (server := self._server_of.get(host_id)) is not None and (key := self._keys.get(host_id)) is not None:
            self._servers[server].send(key, frames)

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; messages that cannot be sent within ``linger_ms`` are dropped."""
        for fd in tuple(self._ends):
            self._forget_end(fd)
        if self._unix is not None:
            self._unix.close(linger_ms / 1000)
        for server in self._servers:
            server.close(linger_ms)
        self._epoll.close()


class Dialer:
    """The dialler of an agent. All connections that need ZeroMQ share its I/O thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def dial(self, ticket: Ticket, loop: EventLoop, on_connected: Callable[[], None]) -> UnixDialer | ZmqDialer:
        """Connect to the endpoint of ``ticket``, now or as soon as it can be. on_connected: called when a connection
        has come in the place of another. Raises: OSError, for the address or descriptors."""
        if ticket.endpoint.startswith(SCHEME):
            return UnixDialer(ticket, loop, on_connected)
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
        return ZmqDialer(self._context, ticket, loop, on_connected)
