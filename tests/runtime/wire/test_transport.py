"""The ends of connections: who is let in, and messages larger than what the kernel keeps."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq

from meshbook.system.event_loop import EventLoop
from meshbook.wire.connection import Connection
from meshbook.wire.frames import READ_BYTES, MessageSocket, pack
from meshbook.wire.link import Uplink
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import ControllerSocket, Dialer, new_keys
from meshbook.wire.unix_transport import SCHEME

PATIENCE_S = 20.0


class Side:
    """A controller's socket, served by hand."""

    def __init__(self, path: Path) -> None:
        self.sock = ControllerSocket()
        self.path = path
        self.endpoint = self.sock.bind(f"{SCHEME}{path}")
        self.received: list[tuple[str, list[bytes]]] = []
        self._wake = os.eventfd(0)

    def serve(self, until: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
        """Serve until something is so; whether it came to that."""
        deadline = time.monotonic() + timeout_s
        while not until() and time.monotonic() < deadline:
            self.sock.poll(self._wake, 0.02)
            self.received += self.sock.receive()
        return until()

    def ticket(self, host_id: str = "host") -> Ticket:
        public, secret = self.sock.accept(host_id)
        return Ticket(host_id, self.endpoint, self.sock.public_key, public, secret, "", 1, 5.0)

    def close(self) -> None:
        self.sock.close()
        os.close(self._wake)


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path / "control")
    yield side
    side.close()


Messages: TypeAlias = list[tuple[bytes, list[bytes]]]


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


@pytest.fixture
def got() -> Messages:
    """The messages that the host's end has taken."""
    return []


@pytest.fixture
def uplink(side: Side, loop: EventLoop, got: Messages) -> Iterator[Uplink]:
    """The end of a host that the controller has heard."""
    uplink = Uplink(Dialer(), side.ticket(), loop, lambda header, payload: got.append((header, payload)))
    uplink.beat()
    assert side.serve(lambda: bool(side.received))
    side.received.clear()
    yield uplink
    uplink.close()


def send(side: Side, connection: Connection, header: bytes, *payload: bytes) -> None:
    """Send a message of the controller to the host."""
    connection.send(header, payload)
    for frames in connection.frames_to_send():
        side.sock.send("host", frames)


def dial(side: Side, *first: bytes) -> MessageSocket:
    """Dial in with this first message."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(side.path))
    sock.sendall(pack(first))
    return MessageSocket(sock)


def is_shut(connection: MessageSocket) -> bool:
    try:
        return bool(list(connection.receive()))
    except (EOFError, ConnectionError):
        return True


def test_a_host_with_its_key_is_heard_and_answered(side: Side) -> None:
    ticket = side.ticket()
    connection = dial(side, ticket.public_key.encode(), ticket.secret_key.encode())
    connection.send(pack([b"hello", b"payload"]))
    assert side.serve(lambda: bool(side.received))
    assert side.received == [("host", [b"hello", b"payload"])]
    side.sock.send("host", [b"answer"])
    assert list(connection.receive()) == [[b"answer"]]
    connection.close()


@pytest.mark.parametrize("lie", ["another's key", "unknown key", "revoked", "nonsense", "no frames"])
def test_nobody_else_is_let_in(side: Side, lie: str) -> None:
    ticket, other = side.ticket(), side.ticket("other")
    first = [ticket.public_key.encode(), ticket.secret_key.encode()]
    if lie == "another's key":
        first[1] = other.secret_key.encode()
    elif lie == "unknown key":
        public, secret = new_keys()
        first = [public.encode(), secret.encode()]
    elif lie == "revoked":
        side.sock.revoke("host")
    elif lie == "nonsense":
        first = [b"\xff\xfe", b"\x00" * 40]
    else:
        first = []
    connection = dial(side, *first)
    assert side.serve(lambda: is_shut(connection))
    assert side.sock.rejected == 1
    assert side.received == []
    connection.close()


@pytest.mark.parametrize("keys", ["its own", "none", "unknown", "revoked"])
def test_who_comes_from_elsewhere_is_let_in_by_its_key_or_told_nothing(side: Side, keys: str) -> None:
    endpoint, pair = side.sock.bind("tcp://127.0.0.1:*"), side.sock.accept("host")
    if keys == "revoked":
        side.sock.revoke("host")
    chosen = {"none": None, "unknown": new_keys()}.get(keys, pair)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger, sock.routing_id = 0, pair[0].encode()
        if chosen is not None:
            sock.curve_serverkey = side.sock.public_key.encode()
            sock.curve_publickey, sock.curve_secretkey = (key.encode() for key in chosen)
        sock.connect(endpoint)
        sock.send(b"hello")
        is_heard = side.serve(lambda: bool(side.received), PATIENCE_S if keys == "its own" else 1.0)
        assert is_heard == (keys == "its own")
        assert side.received == [("host", [b"hello"])] * is_heard
        assert not sock.poll(0)


def test_an_address_of_an_earlier_version_is_refused(side: Side) -> None:
    with pytest.raises(OSError, match="no address that this version listens at"):
        side.sock.bind("ipc:///tmp/control")


def test_without_descriptors_a_host_waits_and_nobody_spins(side: Side) -> None:
    ticket = side.ticket()
    sock = socket.socket(socket.AF_UNIX)
    free, (soft, hard) = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        sock.connect(str(side.path))
        sock.sendall(pack([ticket.public_key.encode(), ticket.secret_key.encode()]) + pack([b"hello"]))
        began = time.process_time()
        assert not side.serve(lambda: bool(side.received), 1.0)
        assert time.process_time() - began < 0.5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    side.sock.watch_door()
    assert side.serve(lambda: bool(side.received))
    sock.close()


def test_a_host_that_dials_again_takes_its_own_place(side: Side) -> None:
    ticket = side.ticket()
    first = [ticket.public_key.encode(), ticket.secret_key.encode()]
    former = dial(side, *first)
    former.send(pack([b"1"]))
    assert side.serve(lambda: len(side.received) == 1)
    latter = dial(side, *first)
    latter.send(pack([b"2"]))
    assert side.serve(lambda: len(side.received) == 2)
    side.sock.send("host", [b"answer"])
    assert list(latter.receive()) == [[b"answer"]]
    assert is_shut(former)
    former.close()
    latter.close()


def test_a_broken_stream_costs_its_connection_only(side: Side) -> None:
    ticket = side.ticket()
    first = [ticket.public_key.encode(), ticket.secret_key.encode()]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(side.path))
    sock.sendall(pack(first) + b"\xff" * 64)
    broken = MessageSocket(sock)
    assert side.serve(lambda: is_shut(broken))
    good = dial(side, *first)
    good.send(pack([b"hello"]))
    assert side.serve(lambda: bool(side.received))
    broken.close()
    good.close()


def test_large_messages_cross_both_ways_while_nobody_waits(
    side: Side, loop: EventLoop, uplink: Uplink, got: Messages
) -> None:
    """More than the kernel keeps: the rest waits with its sender, in order, and blocks nobody."""
    ours, big = Connection(1), bytes(range(256)) * (40 << 10)
    ours.window_bytes = uplink.connection.window_bytes = 64 << 20
    for number in range(3):
        send(side, ours, b"%d" % number, big)
        uplink.connection.send(b"%d" % number, [big])

    def is_done() -> bool:
        loop.call_later(0.0, lambda: None)
        loop.run_once()
        uplink.serve()
        return len(got) == 3 and len(side.received) >= 3

    assert side.serve(is_done)
    assert got == [(b"%d" % number, [big]) for number in range(3)]
    heard = [message for _, frames in side.received for message in ours.receive(frames) or ()]
    assert heard == got


def test_a_message_that_takes_several_reads_is_read_at_one_edge(
    side: Side, loop: EventLoop, uplink: Uplink, got: Messages
) -> None:
    """Nothing else comes that would tell of the rest."""
    big = bytes(3 * READ_BYTES)
    send(side, Connection(1), b"head", big)
    while not uplink.end.may_read:
        loop.run_once()
    uplink.serve()
    assert got == [(b"head", [big])]
    assert not uplink.end.may_read


def test_the_last_words_of_an_end_that_has_closed_are_heard_by_who_was_speaking(
    side: Side, uplink: Uplink, got: Messages
) -> None:
    """A goodbye, say: the other end sends it, closes, and has us among those to whom nobody listens."""
    send(side, Connection(1), b"goodbye")
    side.sock.revoke("host")
    uplink.beat()
    uplink.serve()
    assert got == [(b"goodbye", [])]


def test_the_last_words_of_a_host_are_heard_though_it_reads_no_more(side: Side) -> None:
    ticket = side.ticket()
    connection = dial(side, ticket.public_key.encode(), ticket.secret_key.encode())
    connection.send(pack([b"hello"]))
    assert side.serve(lambda: bool(side.received))
    connection.send(pack([b"last words"]))
    connection.close()
    side.sock.send("host", [b"a heartbeat"])
    assert side.serve(lambda: len(side.received) == 2)
    assert side.received[1] == ("host", [b"last words"])


def test_a_host_finds_a_controller_that_listens_later(tmp_path: Path) -> None:
    public, secret = new_keys()
    ticket = Ticket("host", f"{SCHEME}{tmp_path / 'control'}", "", public, secret, "", 1, 5.0)
    loop = EventLoop()
    uplink = Uplink(Dialer(), ticket, loop, lambda header, payload: None)
    uplink.connection.send(b"early")
    uplink.flush()
    side = Side(tmp_path / "control")
    side.sock.readmit("host", public)
    ours = Connection(1)
    heard: Messages = []

    def is_heard() -> bool:
        loop.call_later(0.0, lambda: None)
        loop.run_once()
        uplink.serve()
        received, side.received = side.received, []
        for _, frames in received:  # a heartbeat tells that a message is missing
            heard.extend(ours.receive(frames) or ())
            for answer in ours.frames_to_send():
                side.sock.send("host", answer)
        return bool(heard)

    assert side.serve(is_heard)
    assert heard == [(b"early", [])]
    uplink.close()
    side.close()
