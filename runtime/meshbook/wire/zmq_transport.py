"""ZeroMQ between the controller, or an agent that listens, and the agents of other machines, which dial in.

    ROUTER  <── KEY ── DEALER of one host
            <── KEY ── DEALER of another

CURVE encrypts all of it; a ZAP handler (RFC 27) accepts the keys of expected hosts only, and ties each key to its host.
The routing id KEY is the host's public key, which no other host knows: a ROUTER gives a routing id that is taken to the
newcomer, before its identity can be asked, so it must not be possible to guess one.

ROUTER sockets lose messages silently when a peer reconnects; `meshbook.wire.connection` numbers and replays them.

Strangers who may become hosts ask at a `Gate` (`ask_gate`), encrypted by CURVE as well. Anybody may ask, but only so
many at a time (`meshbook.wire.tcp`); the question itself proves who asks, and only the owner of the gate's key
can read it. Its meaning is its owner's affair (`meshbook.launchers.manual`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import zmq
from zmq.utils import z85

from meshbook.concurrency.background import attempt, hidden_thread
from meshbook.errors import ProtocolError
from meshbook.system.event_loop import EventLoop
from meshbook.system.interfaces import connect_to, family_of
from meshbook.system.os_errors import check_descriptors
from meshbook.wire.frames import Buffer
from meshbook.wire.tcp import BACKLOG, ConnectionFilter, borrow, last_answer
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
    sock.sndhwm = sock.rcvhwm = 0  # connections bound the bytes that are under way
    sock.handshake_ivl = 5000
    sock.reconnect_ivl = 100
    sock.reconnect_ivl_max = 500
    sock.tcp_keepalive, sock.tcp_keepalive_idle, sock.tcp_keepalive_intvl, sock.tcp_keepalive_cnt = 1, 5, 1, 5
    sock.copy_threshold = _COPY_BELOW_BYTES


class ZmqServer:
    """The listening end for the hosts of other machines, at one TCP port. Its owner polls `descriptors` for us.
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
        self.door.settle(set(self._expected()))

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

    def receive(self) -> Iterator[tuple[str, list[bytes]]]:
        """Yield (host id, frames) for each message that is there."""
        while int(self._router.getsockopt(zmq.EVENTS)) & _READABLE:
            identity = self._router.recv(_NOBLOCK)
            first = self._router.recv(_NOBLOCK, copy=False)  # libzmq 4.3.4 tells the sender of this frame only
            frames = [first.bytes, *(_receive(self._router) if first.more else ())]
            host_id = _user_id(first)
            if self._keys.get(host_id, "").encode() != identity:  # else it is the host's whose key it has shown
                self.rejected += 1
                continue
            self.door.heard(host_id, int(first.get(zmq.SRCFD)))
            yield host_id, frames

    def send(self, key: str, frames: Sequence[Buffer]) -> None:
        """Hand frames to the host with this key; for a host that is not connected they are left to the replay."""
        try:
            _send(self._router, [key.encode(), *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def answered(self, host_id: str, before: float) -> float:
        """Return when the machine of a host was last known to be there, at least ``before``."""
        return self.door.answered(host_id, before)

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


def host_with(keys: Mapping[str, str], key: str) -> str:
    """Return the host that has this public key; empty if none has."""
    return next((id for id, its in keys.items() if its == key), "")


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


class ZmqDialer:
    """An agent's end of a connection between machines, which dials again whenever that breaks. Raises: OSError."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ticket: Ticket,
        loop: EventLoop,
        on_connected: Callable[[], None],
    ) -> None:
        self.has_arrived = False  # whether, at the last look, there had ever been a machine to connect to
        self.answered = -math.inf  # when the machine of the other end was last known to be there, as `look` has found
        # data may have come that was not taken; look before every sleep, since descriptors tell edges only
        self.may_read = True
        self._loop, self._on_connected = loop, on_connected
        self._endpoint, self._by_tunnel = ticket.endpoint, ticket.by_tunnel
        self._fd = -1
        self._is_connected = False
        self._sock = context.socket(zmq.DEALER)
        try:
            _configure(self._sock)
            self._sock.routing_id = ticket.public_key.encode()
            self._sock.curve_serverkey = ticket.controller_key.encode()
            self._sock.curve_publickey = ticket.public_key.encode()
            self._sock.curve_secretkey = ticket.secret_key.encode()
            self._sock.ipv6 = "[" in ticket.endpoint
            self._sock.connect_timeout = _DIAL_MS
            self._monitor = self._sock.get_monitor_socket(_CONNECTION_EVENTS)
            self._sock.connect(ticket.endpoint)
        except zmq.ZMQError as error:
            self._sock.disable_monitor()
            self._sock.close(linger=0)
            raise OSError(error.errno, str(error)) from error
        self._watch = loop.watch(int(self._sock.fd), self._on_edge)  # ZeroMQ, slow to ask, is asked only after an event

    def _on_edge(self) -> None:
        self.may_read = True

    def look(self) -> None:
        """Look whether the machine of a silent peer is there; once a second is enough."""
        while self._monitor.poll(0):
            event, value = _told_by(self._monitor)
            if event == zmq.EVENT_CONNECTED:
                self._fd, self.has_arrived = value, True
            else:
                self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if self._is_connected:
                    self._on_connected()
        if self._is_connected and self._by_tunnel:
            self.answered = time.monotonic()  # its other end is here, and goes with the machine that it leads to
        elif self._is_connected and (connection := borrow(self._fd)) is not None:
            with connection:
                self.answered = last_answer(connection, self.answered)

    @property
    def is_answered(self) -> bool:
        """Whether, at the last look, a connection stood by which the machine of the other end has answered lately."""
        return self._is_connected and time.monotonic() - self.answered < ANSWER_S

    def dial_again(self) -> None:
        """Give up a connection whose other end does not answer; messages under way on it are lost, and replayed."""
        self._is_connected = False
        self._sock.disconnect(self._endpoint)
        self._sock.connect(self._endpoint)
        self.may_read = True

    def take(self) -> list[bytes] | None:
        """Return the next message as it came; None if there is none."""
        self.may_read = bool(int(self._sock.getsockopt(zmq.EVENTS)) & _READABLE)
        return _receive(self._sock) if self.may_read else None

    def transmit(self, frames: Sequence[Buffer]) -> None:
        """Send a message, without waiting; where there is no connection it is left to the replay."""
        self.may_read = True
        with contextlib.suppress(zmq.Again):
            _send(self._sock, frames)

    def close(self) -> None:
        """Close the connection, for good; unsent messages are dropped."""
        self._loop.forget(self._watch)
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
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
