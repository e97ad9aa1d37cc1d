"""Lanes over Unix sockets: who is let in, and messages larger than what the kernel keeps."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from meshbook.system.event_loop import EventLoop
from meshbook.wire.frames import READ_BYTES, MessageSocket, pack
from meshbook.wire.lanes import LaneName, routing_id
from meshbook.wire.link import Link
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import ControllerSocket, Dialer, Lane, new_keys
from meshbook.wire.unix_transport import SCHEME, UnixLane

PATIENCE_S = 20.0


class Side:
    """A controller's socket, served by hand."""

    def __init__(self, path: Path) -> None:
        self.sock = ControllerSocket()
        self.path = path
        self.endpoint = self.sock.bind(f"{SCHEME}{path}")
        self.received: list[tuple[str, str, list[bytes]]] = []
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


Lanes: TypeAlias = dict[LaneName, Lane]


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


@pytest.fixture
def lanes(side: Side, loop: EventLoop) -> Iterator[Lanes]:
    """The lanes of a host that the controller has heard."""
    lanes = Dialer().dial(side.ticket(), lambda epoch: None)
    for lane in lanes.values():
        lane.watch(loop)
    lanes["calls"].beat()
    assert side.serve(lambda: bool(side.received))
    yield lanes
    for lane in lanes.values():
        lane.close()


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
    connection = dial(side, routing_id(ticket.public_key, "calls"), ticket.secret_key.encode())
    connection.send(pack([b"hello", b"payload"]))
    assert side.serve(lambda: bool(side.received))
    assert side.received == [("host", "calls", [b"hello", b"payload"])]
    side.sock.send("host", "calls", [b"answer"])
    assert list(connection.receive()) == [[b"answer"]]
    connection.close()


@pytest.mark.parametrize("lie", ["another's key", "unknown key", "revoked", "unknown lane", "nonsense", "no frames"])
def test_nobody_else_is_let_in(side: Side, lie: str) -> None:
    ticket, other = side.ticket(), side.ticket("other")
    first = [routing_id(ticket.public_key, "calls"), ticket.secret_key.encode()]
    if lie == "another's key":
        first[1] = other.secret_key.encode()
    elif lie == "unknown key":
        public, secret = new_keys()
        first = [routing_id(public, "calls"), secret.encode()]
    elif lie == "revoked":
        side.sock.revoke("host")
    elif lie == "unknown lane":
        first[0] = first[0].replace(b"calls", b"other")
    elif lie == "nonsense":
        first = [b"\xff\xfe", b"\x00" * 40]
    else:
        first = []
    connection = dial(side, *first)
    assert side.serve(lambda: is_shut(connection))
    assert side.sock.rejected == 1
    assert side.received == []
    connection.close()


def test_without_descriptors_a_host_waits_and_nobody_spins(side: Side) -> None:
    ticket = side.ticket()
    sock = socket.socket(socket.AF_UNIX)
    free, (soft, hard) = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        sock.connect(str(side.path))
        sock.sendall(pack([routing_id(ticket.public_key, "calls"), ticket.secret_key.encode()]) + pack([b"hello"]))
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
    first = [routing_id(ticket.public_key, "calls"), ticket.secret_key.encode()]
    former = dial(side, *first)
    former.send(pack([b"1"]))
    assert side.serve(lambda: len(side.received) == 1)
    latter = dial(side, *first)
    latter.send(pack([b"2"]))
    assert side.serve(lambda: len(side.received) == 2)
    side.sock.send("host", "calls", [b"answer"])
    assert list(latter.receive()) == [[b"answer"]]
    assert is_shut(former)
    former.close()
    latter.close()


def test_a_broken_stream_costs_its_connection_only(side: Side) -> None:
    ticket = side.ticket()
    first = [routing_id(ticket.public_key, "calls"), ticket.secret_key.encode()]
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


def test_large_messages_cross_both_ways_while_nobody_waits(side: Side, loop: EventLoop, lanes: Lanes) -> None:
    """More than the kernel keeps: the rest waits with its sender, in order, and blocks nobody."""
    got = []
    ours, big = Link(1), bytes(range(256)) * (40 << 10)
    for number in range(3):
        side.sock.send("host", "calls", ours.send(b"%d" % number, [big]))
        lanes["calls"].send(b"%d" % number, [big])
    side.received.clear()

    def is_done() -> bool:
        loop.call_later(0.0, lambda: None)
        loop.run_once()
        lanes["calls"].receive(lambda header, payload: got.append((header, payload)))
        return len(got) == 3 and len(side.received) >= 3

    assert side.serve(is_done)
    assert got == [(b"%d" % number, [big]) for number in range(3)]
    heard = [ours.receive(frames) for _, _, frames in side.received]
    assert [message for message in heard if message is not None] == got


def test_a_message_that_takes_several_reads_is_read_at_one_edge(side: Side, loop: EventLoop, lanes: Lanes) -> None:
    """Nothing else comes that would tell of the rest."""
    big = bytes(3 * READ_BYTES)
    side.sock.send("host", "calls", Link(1).send(b"head", [big]))
    while not lanes["calls"].may_read:
        loop.run_once()
    got = []
    lanes["calls"].receive(lambda header, payload: got.append((header, payload)))
    assert got == [(b"head", [big])]
    assert not lanes["calls"].may_read


def test_the_last_words_of_an_end_that_has_closed_are_heard_by_who_was_speaking(side: Side, lanes: Lanes) -> None:
    """A goodbye, say: the other end sends it, closes, and has us among those to whom nobody listens."""
    side.sock.send("host", "calls", Link(1).send(b"goodbye"))
    side.sock.revoke("host")
    lanes["calls"].send(b"so long")
    got = []
    lanes["calls"].receive(lambda header, payload: got.append(header))
    assert got == [b"goodbye"]


def test_the_last_words_of_a_host_are_heard_though_it_reads_no_more(side: Side) -> None:
    ticket = side.ticket()
    connection = dial(side, routing_id(ticket.public_key, "calls"), ticket.secret_key.encode())
    connection.send(pack([b"hello"]))
    assert side.serve(lambda: bool(side.received))
    connection.send(pack([b"last words"]))
    connection.close()
    side.sock.send("host", "calls", [b"a heartbeat"])
    assert side.serve(lambda: len(side.received) == 2)
    assert side.received[1] == ("host", "calls", [b"last words"])


def test_a_lane_finds_a_controller_that_listens_later(tmp_path: Path) -> None:
    public, secret = new_keys()
    ticket = Ticket("host", f"{SCHEME}{tmp_path / 'control'}", "", public, secret, "", 1, 5.0)
    loop = EventLoop()
    lane = UnixLane(ticket, "urgent", lambda epoch: None)
    lane.watch(loop)
    lane.send(b"early")
    side = Side(tmp_path / "control")
    side.sock.readmit("host", public)

    def is_heard() -> bool:
        loop.call_later(0.0, lambda: None)
        loop.run_once()
        return bool(side.received)

    assert side.serve(is_heard)
    assert Link(1).receive(side.received[0][2]) is None  # a heartbeat: it tells that a message is missing
    lane.close()
    side.close()
