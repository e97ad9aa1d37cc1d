"""ZeroMQ between the controller and its host agents: one ROUTER that agents dial in to, three lanes per agent.

    controller ROUTER  <── "KEY/urgent" ── DEALER   cancel, queries, heartbeats, the store; small frames only
                       <── "KEY/calls"  ── DEALER   calls, replies, output, in order
                       <── "KEY/bulk"   ── DEALER   pieces of payloads that cross hosts

Each lane is a connection of its own, so that an interrupt never waits behind a payload. CURVE encrypts all of them; a
ZAP handler (RFC 27) accepts the keys of expected hosts only, and ties each key to its host's lanes. KEY is the host's
public key, which no other host knows: a ROUTER gives a routing id that is taken to the newcomer, before anybody can ask
who that is, so nobody must be able to guess one. The socket of a controller is made with it, used under its turn, and
closed by its I/O thread; others belong to one thread.

ROUTER sockets lose messages silently when a peer reconnects; `meshbook.wire.link` numbers and replays them.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.os_errors import check_descriptors
from meshbook.system.process_ends import open_end
from meshbook.system.processes import family_of
from meshbook.wire.admission import BACKLOG, ConnectionFilter
from meshbook.wire.answering import borrow, last_answer
from meshbook.wire.frames import Buffer
from meshbook.wire.link import Link, epoch_of
from meshbook.wire.ticket import Ticket

LaneName = Literal["urgent", "calls", "bulk"]
LANES: tuple[LaneName, ...] = ("urgent", "calls", "bulk")

HEARTBEAT_S = 1.0
"""How often each side says that it lives."""
ANSWER_S = 10.0
"""A machine that has acknowledged nothing for so long is out of reach, or gone."""

_READABLE, _NOBLOCK, _NOBLOCK_MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: on the path of every message, and flags of an enumeration take ten times as long."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"meshbook"
_MAX_FRAME_BYTES = 64 << 20
_CONNECTION_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_NEEDED_FILES = 64
"""libzmq aborts the process where it gets no descriptors for its threads. Hosts will need some too."""
_COPY_BELOW_BYTES = 1 << 16


def _configure(sock: zmq.Socket[bytes]) -> None:
    sock.linger = 0
    sock.maxmsgsize = _MAX_FRAME_BYTES
    sock.sndhwm = sock.rcvhwm = 0  # the link layer bounds what is under way, in bytes
    sock.handshake_ivl = 5000
    sock.reconnect_ivl = 100
    sock.reconnect_ivl_max = 500
    sock.tcp_keepalive, sock.tcp_keepalive_idle, sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 1, 5, 1, 5
    sock.copy_threshold = _COPY_BELOW_BYTES


def new_keys() -> tuple[str, str]:
    """A CURVE key pair: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class ControllerSocket:
    """The controller's end of all lanes of all hosts. Raises: OSError if the system has no sockets for it."""

    def __init__(self, keys: tuple[str, str] | None = None) -> None:
        """keys: the public and the secret CURVE key of a session that exists; new ones by default."""
        check_descriptors(_NEEDED_FILES)
        self.public_key, self._secret = keys or new_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._accepted: dict[bytes, str] = {}
        self._keys: dict[str, str] = {}
        self.rejected = 0
        """Messages and keys that were not let in."""
        self.door: ConnectionFilter | None = None
        """Watches the TCP port, if there is one."""
        self._monitor: zmq.Socket[bytes] | None = None
        self._ends: set[int] = set()
        """Of processes whose end `poll` waits for (`meshbook.system.process_ends`)."""
        self._ended = False
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error

    def _open(self) -> None:
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router)
        self._router.router_mandatory = True
        self._router.router_handover = True
        self._router.curve_server = True
        self._router.curve_publickey = self.public_key.encode()
        self._router.curve_secretkey = self._secret.encode()
        self._router.zap_domain = _ZAP_DOMAIN
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._poller = zmq.Poller()
        self._poller.register(self._zap, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)

    def bind(self, address: str) -> str:
        """Listen at ``ipc://PATH`` or, once, ``tcp://IP:PORT`` as well, ``*`` for any port; return what to dial."""
        if address.startswith("tcp://"):
            return self._bind_tcp(address)
        self._router.bind(address)
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _bind_tcp(self, address: str) -> str:
        """Listen at a socket of our own, so that a doorkeeper can stand before it."""
        assert self.door is None, "one TCP port is enough"
        ip, _, port = address.removeprefix("tcp://").rpartition(":")
        bare = ip.strip("[]")
        listener = socket.create_server((bare, int(port.replace("*", "0"))), family=family_of(bare), backlog=BACKLOG)
        self._router.ipv6 = bare != ip
        self.door = ConnectionFilter(listener)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)
        endpoint = f"tcp://{ip}:{listener.getsockname()[1]}"
        self._router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
        self._router.bind(endpoint)
        self._router.setsockopt(zmq.USE_FD, -1)
        self.watch_door()
        return endpoint

    def watch_door(self) -> None:
        """Open the TCP port while hosts are expected there, and shut it while none is; once a second is enough."""
        if self.door is not None:
            self.door.settle({f"{host_id}/{lane}" for host_id in self._accepted.values() for lane in LANES})

    def accept(self, host_id: str) -> tuple[str, str]:
        """Make a key pair (public, secret) that lets ``host_id`` in, and nobody else."""
        public, secret = new_keys()
        self.readmit(host_id, public)
        return public, secret

    def readmit(self, host_id: str, public_key: str) -> None:
        """Let ``host_id`` in with the key pair that it has."""
        self._accepted[z85.decode(public_key.encode())] = host_id
        self._keys[host_id] = public_key
        self.watch_door()

    def revoke(self, host_id: str) -> None:
        """Let ``host_id`` in no more."""
        self._accepted = {key: host for key, host in self._accepted.items() if host != host_id}
        self._keys.pop(host_id, None)
        self.watch_door()

    def poll(self, wake_fd: int, timeout_s: float | None) -> None:
        """Wait until a message, a byte at ``wake_fd`` or the timeout is there; let hosts in meanwhile."""
        if wake_fd not in self._poller:
            self._poller.register(wake_fd, zmq.POLLIN)
        events = self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        for source, _ in events:
            if source is self._zap:
                self._answer_handshakes()
            elif source is self._monitor:
                self._watch_connections()
            elif isinstance(source, int) and source in self._ends:
                self._forget_end(source)
                self._ended = True

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For an event loop other than `poll`: each tells edges only, so `look` and `receive` before every sleep."""
        socks = [self._router, self._zap, *([self._monitor] if self._monitor is not None else [])]
        return tuple(int(sock.fd) for sock in socks)

    def look(self) -> None:
        """Let hosts in, without waiting."""
        self._answer_handshakes()
        if self._monitor is not None:
            self._watch_connections()

    def answered(self, host_id: str, before: float) -> float:
        """When the machine of a host was last known to be there (`meshbook.wire.answering`), at least ``before``."""
        if self.door is None:
            return before
        return max(self.door.answered(f"{host_id}/{lane}", before) for lane in LANES)

    def key_of(self, host_id: str) -> str:
        """The public key of a host that is let in; empty for any other."""
        return self._keys.get(host_id, "")

    def watch_end(self, pid: int) -> None:
        """Have `poll` return when the process ends, which `has_ended` then tells, once."""
        try:
            fd = open_end(pid)
        except OSError:  # no descriptor is left, or it is gone already: who looks at it regularly finds out
            return
        self._ends.add(fd)
        self._poller.register(fd, zmq.POLLIN)

    def has_ended(self) -> bool:
        """Whether one of the processes has ended since this was last asked."""
        ended, self._ended = self._ended, False
        return ended

    def _forget_end(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._ends.discard(fd)
        os.close(fd)

    def receive(self) -> Iterator[tuple[str, LaneName, list[bytes]]]:
        """Yield (host id, lane, link frames) for each message that is there."""
        while int(self._router.getsockopt(zmq.EVENTS)) & _READABLE:
            identity = self._router.recv(_NOBLOCK)
            first = self._router.recv(_NOBLOCK, copy=False)  # libzmq 4.3.4 tells the sender of this frame only
            frames = [first.bytes, *(_receive(self._router) if first.more else ())]
            key, _, lane = identity.decode(errors="replace").rpartition("/")
            host_id = _user_id(first)
            if lane not in LANES or self._keys.get(host_id) != key:
                self.rejected += 1
                continue
            if self.door is not None:
                self.door.heard(f"{host_id}/{lane}", int(first.get(zmq.SRCFD)))
            yield host_id, lane, frames

    def send(self, host_id: str, lane: LaneName, frames: Sequence[Buffer]) -> None:
        """Hand frames to a host's lane; frames for a host that is not connected are left to the link's replay."""
        if (key := self._keys.get(host_id)) is None:
            return
        try:
            _send(self._router, [routing_id(key, lane), *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; what cannot be sent within ``linger_ms`` is dropped."""
        if self.door is not None:
            self._router.disable_monitor()
            self.door.close()
        for fd in tuple(self._ends):
            self._forget_end(fd)
        self._context.destroy(linger=linger_ms)

    def _watch_connections(self) -> None:
        assert self._monitor is not None
        assert self.door is not None
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.door.accepted(int(event["value"]))
            else:
                self.door.closed(int(event["value"]))
        self.watch_door()

    def _answer_handshakes(self) -> None:
        while self._zap.poll(0):
            *envelope, version, request, domain, _, _, mechanism, key = self._zap.recv_multipart()[:9]
            host_id = self._accepted.get(key) if mechanism == b"CURVE" and domain == _ZAP_DOMAIN else None
            if host_id is None:
                self.rejected += 1
            status = (b"200", b"OK", host_id.encode()) if host_id else (b"400", b"unknown key", b"")
            self._zap.send_multipart([*envelope, version, request, *status, b""])


def _send(sock: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """As `send_multipart`, without its flags of an enumeration."""
    last = len(frames) - 1
    for at, frame in enumerate(frames):
        sock.send(frame, _NOBLOCK if at == last else _NOBLOCK_MORE)


def _receive(sock: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of a message that is there; `recv_multipart` asks for an option after each, which takes far longer."""
    frames = []
    while True:
        frame = sock.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
        if not frame.more:
            return frames


def routing_id(key: str, lane: LaneName) -> bytes:
    """What the lane of the host with this public key calls itself."""
    return f"{key}/{lane}".encode()


def _user_id(frame: zmq.Frame) -> str:
    """Whose key the connection has proved to hold, as the ZAP handler named it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Dialer:
    """Opens lanes to processes that listen. One per agent: all of them share ZeroMQ's I/O thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)

    def dial(self, ticket: Ticket, on_newer: Callable[[int], None]) -> dict[LaneName, AgentSocket]:
        """Open the lanes of ``ticket``; on_newer: see `AgentSocket`.

        Raises: OSError where an address cannot be used, or no descriptor is left.
        """
        lanes: dict[LaneName, AgentSocket] = {}
        try:
            for lane in LANES:
                lanes[lane] = AgentSocket(self._context, ticket, lane, on_newer)
        except zmq.ZMQError as error:
            for made in lanes.values():
                made.close()
            raise OSError(error.errno, str(error)) from error
        return lanes


class AgentSocket:
    """An agent's end of one lane.

    on_newer: called with the epoch of a controller that is newer than ours, before its first message is read.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ticket: Ticket,
        lane: LaneName,
        on_newer: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self._sock = context.socket(zmq.DEALER)
        _configure(self._sock)
        self._sock.routing_id = routing_id(ticket.public_key, lane)
        self._sock.curve_serverkey = ticket.controller_key.encode()
        self._sock.curve_publickey = ticket.public_key.encode()
        self._sock.curve_secretkey = ticket.secret_key.encode()
        self._sock.ipv6 = "[" in ticket.endpoint
        self._monitor: zmq.Socket[bytes] | None = None
        if lane == "urgent" and ticket.endpoint.startswith("tcp://"):  # one lane tells for all
            self._monitor = self._sock.get_monitor_socket(_CONNECTION_EVENTS)
        self._fd = -1
        self._is_connected = False
        self.answered = -math.inf
        """As `look` has found it: when the machine of the other end was last known to be there."""
        self._sock.connect(ticket.endpoint)
        self.link = Link(ticket.epoch)
        self._is_watched = False
        self._may_read = True
        """Something may have come: the descriptor has told of it, or the socket was used since the last look."""
        self.paused = False
        """Send nothing, but keep it: nobody listens."""
        self._on_newer = on_newer

    @property
    def fd(self) -> int:
        """Readable at edges only: after it was, or after any send, call `receive` until it yields nothing."""
        return int(self._sock.fd)

    def watch(self, loop: EventLoop) -> Watch:
        """Have ``loop`` wake when something comes; ZeroMQ is asked only then, which takes as long as all our work."""
        self._is_watched = True
        return loop.watch(self.fd, self._on_edge)

    def _on_edge(self) -> None:
        self._may_read = True

    def look(self) -> None:
        """Look whether a silent peer is still connected, and its machine there; once a second is enough."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_CONNECTED:
                self._fd = int(event["value"])
            else:
                self._is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_connected and (connection := borrow(self._fd)) is not None:
            with connection:
                self.answered = last_answer(connection, self.answered)

    @property
    def is_answered(self) -> bool:
        """Whether, at the last look, a connection stood, by which the machine of the other end has answered lately."""
        return self._is_connected and time.monotonic() - self.answered < ANSWER_S

    def readable(self) -> bool:
        if not self._may_read:
            return False
        is_readable = bool(int(self._sock.getsockopt(zmq.EVENTS)) & _READABLE)
        self._may_read = is_readable or not self._is_watched
        return is_readable

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (header, payload) of each new message, in order, once."""
        while self.readable():
            frames = _receive(self._sock)
            epoch = epoch_of(frames)
            if epoch > self.link.epoch:
                self._on_newer(epoch)
            elif 0 < epoch < self.link.epoch:
                self.beat()  # so that the former controller learns that it is the former
            if (message := self.link.receive(frames)) is not None:
                yield message
        self._send_all(self.link.pending())

    def restart(self, epoch: int) -> list[tuple[bytes, list[Buffer]]]:
        """Speak with the controller of ``epoch`` from now on; returns what the former one has not acknowledged."""
        kept, self.link = self.link.unacknowledged(), Link(epoch)
        self.paused = False
        return kept

    def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message; it is kept until acknowledged."""
        self._send_all([self.link.send(header, list(payload))])

    def close(self) -> None:
        """What was not sent is dropped."""
        if self._monitor is not None:
            self._sock.disable_monitor()
            self._monitor = None
        self._sock.close(linger=0)
        self.link = Link(self.link.epoch)  # the old one holds views of payloads

    def beat(self) -> None:
        """Say how far we are, so that a lost tail is noticed."""
        self._send_all([self.link.heartbeat()])

    def _send_all(self, messages: Sequence[Sequence[Buffer]]) -> None:
        for frames in () if self.paused else messages:
            self._may_read = True
            try:
                _send(self._sock, frames)
            except zmq.Again:
                return  # not connected: the link replays
