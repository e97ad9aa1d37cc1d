"""Connections that go on at others: all bytes in their order, ends told on, slow readers waited for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from meshbook.wire.spliced import Splices


@pytest.fixture
def splices() -> Iterator[Splices]:
    made = Splices()
    yield made
    made.close()


def joined(splices: Splices) -> tuple[socket.socket, socket.socket]:
    """The two far ends of a pair."""
    (left, near), (far, right) = socket.socketpair(), socket.socketpair()
    splices.join(near, far)
    for sock in (left, right):
        sock.settimeout(60)
    return left, right


def read_all(sock: socket.socket) -> bytes:
    read = b""
    while piece := sock.recv(1 << 20):
        read += piece
    return read


def test_bytes_go_both_ways_and_ends_are_told(splices: Splices) -> None:
    left, right = joined(splices)
    data = os.urandom(3 << 20)
    writer = threading.Thread(target=lambda: (left.sendall(data), left.shutdown(socket.SHUT_WR)))
    writer.start()
    assert read_all(right) == data
    writer.join()
    right.sendall(b"an answer behind the end of the question")
    right.close()
    assert read_all(left) == b"an answer behind the end of the question"
    left.close()


def test_no_piece_waits_until_the_one_before_was_acknowledged(splices: Splices) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left, right = (socket.create_connection(listener.getsockname()) for _ in range(2))
        near, far = listener.accept()[0], listener.accept()[0]
    splices.join(near, far)
    left.sendall(b"a word")
    right.settimeout(60)
    assert right.recv(100) == b"a word"
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in (near, far))
    left.close()
    right.close()


def test_a_slow_reader_slows_the_writer_down_and_no_other_pair(splices: Splices) -> None:
    left, right = joined(splices)
    left.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 1 << 30:
            sent += left.send(bytes(1 << 16))
    other, its_end = joined(splices)
    other.sendall(b"meanwhile")
    assert its_end.recv(100) == b"meanwhile"
    left.shutdown(socket.SHUT_WR)
    assert len(read_all(right)) == sent
    for sock in (left, right, other, its_end):
        sock.close()


def test_a_pair_goes_when_one_side_breaks_and_all_go_at_the_end(splices: Splices) -> None:
    left, right = joined(splices)
    other, its_end = joined(splices)
    left.close()
    assert right.recv(1) == b""
    right.close()
    splices.close()
    splices.close()
    assert other.recv(1) == its_end.recv(1) == b""
    other.close()
    its_end.close()
