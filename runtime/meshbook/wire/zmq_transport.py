"""ZeroMQ between the controller, or an agent that listens, and the agents of other machines, which dial in.

    ROUTER  <── "KEY/urgent" ── DEALER
            <── "KEY/calls"  ── DEALER
            <── "KEY/bulk"   ── DEALER

CURVE encrypts all of them; a ZAP handler (RFC 27) accepts the keys of expected hosts only, and ties each key to its
host's lanes. KEY is the host's public key, which no other host knows: a ROUTER gives a routing id that is taken to the
newcomer, before its identity can be asked, so it must not be possible to guess one.

ROUTER sockets lose messages silently when a peer reconnects; `meshbook.wire.link` numbers and replays them.

Strangers who may become hosts ask at a `Gate` (`ask_gate`), encrypted by CURVE as well. Anybody may ask, but only so
many at a time (`meshbook.wire.connections`); the question itself proves who asks, and only the owner of the gate's key
can read it. Its meaning is its owner's affair (`meshbook.launchers.manual`).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import zmq
from zmq.utils import z85

from meshbook.concurrency.background import attempt, hidden_thread
from meshbook.errors import ProtocolError
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.interfaces import connect_to, family_of
from meshbook.system.os_errors import check_descriptors
from meshbook.wire.connections import BACKLOG, ConnectionFilter, borrow, last_answer
from meshbook.wire.frames import Buffer
from meshbook.wire.lanes import LANES, Lane, LaneName, host_with, routing_id
from meshbook.wire.ticket import Ticket

ANSWER_S = 10.0  # a machine that has acknowledged nothing for so long is out of reach, or gone
# plain numbers: on the path of every message, and flags of an enumeration take ten times as long
_READABLE, _NOBLOCK, _NOBLOCK_MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"meshbook"
_MAX_FRAME_BYTES = 64 << 20
_DIAL_MS = 3000  # a machine that is out of reach is dialled again so often: the system itself waits ever longer
_CONNECTION_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_NEEDED_FILES = 64  # libzmq aborts the process where it gets no descriptors for its threads; hosts will need some too
_SETTLE_S = 0.1  # connections that come and go open or shut the port at most so often: it is a look at all hosts
_COPY_BELOW_BYTES = 1 << 16
_MONITOR_EVENT = struct.Struct("=HI")


def _configure(sock: zmq.Socket[bytes]) -> None:
    sock.linger = 0
    sock.maxmsgsize = _MAX_FRAME_BYTES
    sock.sndhwm = sock.rcvhwm = 0  # the link layer bounds what is under way, in bytes
    sock.handshake_ivl = 5000
    sock.reconnect_ivl = 100
    sock.reconnect_ivl_max = 500
    sock.tcp_keepalive, sock.tcp_keepalive_idle, sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 1, 5, 1, 5
    sock.copy_threshold = _COPY_BELOW_BYTES


class ZmqServer:
    """The end of all lanes of the hosts of other machines, at one TCP port. Its owner polls `descriptors` for us.
    Raises: OSError if the system has no sockets for it."""

    def __init__(
        self, address: str, own_keys: tuple[str, str], keys: Mapping[str, str], expected: Callable[[], Iterable[str]]
    ) -> None:
        """address: ``tcp://IP:PORT``, ``*`` for any port. own_keys: the public and the secret CURVE key. keys: the
        public keys of the hosts that are let in, by host id. expected: the hosts that should be connected here."""
        check_descriptors(_NEEDED_FILES)
        self._keys, self._expected = keys, expected
        self.rejected = 0  # messages and keys that were not let in
        self._settle_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._open(*own_keys)
            self._bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        except OSError:
            self._context.destroy(linger=0)
            raise

    def _open(self, public: str, secret: str) -> None:
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router)
        self._router.router_mandatory = True
        self._router.router_handover = True
        self._router.curve_server = True
        self._router.curve_publickey = public.encode()
        self._router.curve_secretkey = secret.encode()
        self._router.zap_domain = _ZAP_DOMAIN
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _bind(self, address: str) -> None:
        self.door, self._monitor, self.endpoint = listen(self._router, address)  # the first watches the port
        # descriptors that tell edges only: `tell` of each, and look whether anything `is_there` before every sleep
        self.descriptors = (int(self._router.fd), int(self._zap.fd), int(self._monitor.fd))
        self._answer_handshakes()
        self._hear_monitor()  # a descriptor tells only of what comes after one has looked in vain

    def watch_door(self) -> None:
        """Open the port while hosts are expected there, and shut it while none is; once a second is enough."""
        self.door.settle({f"{host_id}/{lane}" for host_id in self._expected() for lane in LANES})

    def tell(self, fd: int) -> None:
        """Let in all hosts that wait, since one of our descriptors can be read."""
        _, zap, monitor = self.descriptors
        if fd == zap:
            self._answer_handshakes()
        elif fd == monitor:
            self._hear_monitor()

    @property
    def is_there(self) -> bool:
        """Whether `receive` would find something."""
        return bool(int(self._router.getsockopt(zmq.EVENTS)) & _READABLE)

    def _hear_monitor(self) -> None:
        has_heard = False
        while hear_monitor(self._monitor, self.door):
            has_heard = True
        if has_heard and time.monotonic() >= self._settle_at:  # else the next heartbeat does: many may dial in at once
            self.watch_door()
            self._settle_at = time.monotonic() + _SETTLE_S

    def receive(self) -> Iterator[tuple[str, LaneName, list[bytes]]]:
        """Yield (host id, lane, link frames) for each message that is there."""
        while int(self._router.getsockopt(zmq.EVENTS)) & _READABLE:
            identity = self._router.recv(_NOBLOCK)
            first = self._router.recv(_NOBLOCK, copy=False)  # libzmq 4.3.4 tells the sender of this frame only
            frames = [first.bytes, *(_receive(self._router) if first.more else ())]
            host_id = _user_id(first)
            key, _, lane = identity.decode(errors="replace").rpartition("/")
            if lane not in LANES or self._keys.get(host_id) != key:  # else it is the host's whose key it has shown
                self.rejected += 1
                continue
            self.door.heard(f"{host_id}/{lane}", int(first.get(zmq.SRCFD)))
            yield host_id, lane, frames

    def send(self, key: str, lane: LaneName, frames: Sequence[Buffer]) -> None:
        """Hand frames to a host's lane; frames for a host that is not connected are left to the link's replay."""
        try:
            _send(self._router, [routing_id(key, lane), *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def answered(self, host_id: str, before: float) -> float:
        """Return when the machine of a host was last known to be there, at least ``before``."""
        return max(self.door.answered(f"{host_id}/{lane}", before) for lane in LANES)

    def close(self, linger_ms: int) -> None:
        """Close everything; messages that cannot be sent within ``linger_ms`` are dropped."""
        self._router.disable_monitor()
        self.door.close()
        self._context.destroy(linger=linger_ms)

    def _answer_handshakes(self) -> None:
        while self._zap.poll(0):
            *envelope, version, request, domain, _, _, mechanism, key = self._zap.recv_multipart()[:9]
            is_ours = mechanism == b"CURVE" and domain == _ZAP_DOMAIN
            host_id = host_with(self._keys, z85.encode(key).decode()) if is_ours else ""
            if not host_id:
                self.rejected += 1
            status = (b"200", b"OK", host_id.encode()) if host_id else (b"400", b"unknown key", b"")
            self._zap.send_multipart([*envelope, version, request, *status, b""])


def _send(sock: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send frames like `send_multipart`, without its flags of an enumeration."""
    last = len(frames) - 1
    for at, frame in enumerate(frames):
        sock.send(frame, _NOBLOCK if at == last else _NOBLOCK_MORE)


def _receive(sock: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames of a message; `recv_multipart` asks for an option after each, which takes far longer."""
    frames = []
    while True:
        frame = sock.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
        if not frame.more:
            return frames


def listen(sock: zmq.Socket[bytes], address: str) -> tuple[ConnectionFilter, zmq.Socket[bytes], str]:
    """Listen at a socket of our own, so that a filter of connections can stand before it. address: ``tcp://IP:PORT``.
    Returns: the filter, the monitor of connections, and the endpoint. Raises: OSError."""
    ip, _, port = address.removeprefix("tcp://").rpartition(":")
    bare = ip.strip("[]")
    listener = socket.create_server((bare, int(port.replace("*", "0"))), family=family_of(bare), backlog=BACKLOG)
    sock.ipv6 = bare != ip
    door = ConnectionFilter(listener)
    monitor = sock.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    endpoint = f"tcp://{ip}:{listener.getsockname()[1]}"
    sock.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
    sock.bind(endpoint)
    sock.setsockopt(zmq.USE_FD, -1)
    return door, monitor, endpoint


def hear_monitor(monitor: zmq.Socket[bytes], door: ConnectionFilter) -> bool:
    """Pass a connection that came or went on to the filter; return whether there was one."""
    if not monitor.poll(0):
        return False
    event, value = _told_by(monitor)
    (door.accepted if event == zmq.EVENT_ACCEPTED else door.closed)(value)
    return True


def _told_by(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event and its value, as in zmq_socket_monitor(3); pyzmq's own reader of them imports asyncio."""
    event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(_NOBLOCK)[0])
    return event, value


def _user_id(frame: zmq.Frame) -> str:
    """Return the host whose key the connection has proved to hold, as the ZAP handler named it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class ZmqLane(Lane):
    """An agent's end of one lane; see `meshbook.wire.lanes.Lane`. Raises: OSError."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ticket: Ticket,
        lane: LaneName,
        on_newer: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        super().__init__(ticket.epoch, on_newer)
        self._sock = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: EventLoop | None = None
        self._watch: Watch | None = None
        self._fd = -1
        self._is_connected, self._by_tunnel, self._endpoint = False, ticket.by_tunnel, ticket.endpoint
        self.has_arrived = False
        self.may_read = True
        try:
            self._dial(ticket, lane)
        except zmq.ZMQError as error:
            self.disconnect()
            raise OSError(error.errno, str(error)) from error

    def _dial(self, ticket: Ticket, lane: LaneName) -> None:
        _configure(self._sock)
        self._sock.routing_id = routing_id(ticket.public_key, lane)
        self._sock.curve_serverkey = ticket.controller_key.encode()
        self._sock.curve_publickey = ticket.public_key.encode()
        self._sock.curve_secretkey = ticket.secret_key.encode()
        self._sock.ipv6 = "[" in ticket.endpoint
        self._sock.connect_timeout = _DIAL_MS
        if lane == "urgent":  # one lane tells for all
            self._monitor = self._sock.get_monitor_socket(_CONNECTION_EVENTS)
        self._sock.connect(ticket.endpoint)

    def watch(self, loop: EventLoop) -> None:
        """Watch for messages, see `Lane.watch`; ZeroMQ, which is slow to ask, is asked only after an event."""
        self._loop, self._watch = loop, loop.watch(int(self._sock.fd), self._on_edge)

    def _on_edge(self) -> None:
        self.may_read = True

    def look(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event, value = _told_by(self._monitor)
            if event == zmq.EVENT_CONNECTED:
                self._fd, self.has_arrived = value, True
            else:
                self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if self._is_connected and self.paused:  # a controller that is new answers only whom it has heard
                    self.transmit(self.link.heartbeat())
        if self._is_connected and self._by_tunnel:
            self.answered = time.monotonic()  # its other end is here, and goes with the machine that it leads to
        elif self._is_connected and (connection := borrow(self._fd)) is not None:
            with connection:
                self.answered = last_answer(connection, self.answered)

    @property
    def is_answered(self) -> bool:
        return self._is_connected and time.monotonic() - self.answered < ANSWER_S

    def dial_again(self) -> None:
        self._is_connected = False
        self._sock.disconnect(self._endpoint)
        self._sock.connect(self._endpoint)
        self.may_read = True

    def take(self) -> list[bytes] | None:
        is_readable = bool(int(self._sock.getsockopt(zmq.EVENTS)) & _READABLE)
        self.may_read = is_readable or self._watch is None
        return _receive(self._sock) if is_readable else None

    def transmit(self, frames: Sequence[Buffer]) -> bool:
        self.may_read = True
        try:
            _send(self._sock, frames)
        except zmq.Again:
            return False
        return True

    def disconnect(self) -> None:
        if self._watch is not None and self._loop is not None:
            self._loop.forget(self._watch)
        if self._monitor is not None:
            self._sock.disable_monitor()
            self._monitor = None
        self._sock.close(linger=0)


MAX_BYTES = 1 << 16
CONNECT_S = 10.0
HANDSHAKE_MS = 5000
_REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Gate:
    """A port of its own, on a thread of its own, that answers questions until it is closed."""

    def __init__(self, address: str, answer: Callable[[bytes], bytes]) -> None:
        """address: where to listen, as ``tcp://10.0.0.5:*``. answer: called on that thread. Raises: OSError."""
        public, secret = zmq.curve_keypair()
        self.key = public.decode()  # public; its owners know that we answer
        self._answer, self._owner = answer, os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 500
        self._socket.maxmsgsize = MAX_BYTES
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = secret, public
        try:
            self._door, self._monitor, self.endpoint = listen(self._socket, address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = hidden_thread(self._serve, "meshbook.gate")
        self._thread.start()

    def close(self) -> None:
        """Answer no more; return when the port is free. Idempotent; in a fork it does nothing."""
        if self._thread.is_alive() and self._owner == os.getpid():
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        poll = zmq.Poller()
        poll.register(self._socket, zmq.POLLIN)
        poll.register(self._wake, zmq.POLLIN)
        poll.register(self._monitor, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poll.poll())):
                while hear_monitor(self._monitor, self._door):
                    pass
                if self._socket in ready:
                    question = self._socket.recv()
                    answers: list[bytes] = []
                    attempt(lambda: answers.append(self._answer(question)), "a question at the gate")  # noqa: B023
                    self._socket.send(b"".join(answers))
        finally:
            os.close(self._wake)
            self._socket.disable_monitor()
            self._door.close()
            self._context.destroy(linger=500)


def ask_gate(endpoint: str, key: str, question: bytes, timeout_s: float) -> bytes:
    """Return the answer of the gate that has this key. Raises: OSError where no machine can be reached; ProtocolError
    where another process listens, or does not answer."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connect_to((host.strip("[]"), int(port)), CONNECT_S).close()  # the system's own words where nobody listens
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger = 0
        sock.maxmsgsize = MAX_BYTES
        sock.ipv6 = "[" in host
        sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = key.encode(), public, secret
        monitor = sock.get_monitor_socket(_REFUSED)
        try:
            sock.connect(endpoint)
            sock.send(question)
            poll = zmq.Poller()
            poll.register(sock, zmq.POLLIN)
            poll.register(monitor, zmq.POLLIN)
            ready = dict(poll.poll(round(timeout_s * 1000)))
            if sock in ready:
                return sock.recv()
        finally:
            sock.disable_monitor()
            monitor.close(linger=0)
    raise ProtocolError("another key is used there" if ready else "nothing was answered in time")
