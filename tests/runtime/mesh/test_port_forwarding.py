"""Connections that go on in another process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from meshbook import ProcMesh
from meshbook.actor import Actor, ActorError, Point, current_rank, endpoint, this_proc
from meshbook.job import PortForwarder

pytestmark = pytest.mark.monarch

MANY = 3 << 20


class Echo(Actor):
    """Sends back what it is sent, in capitals, to the end."""

    @endpoint
    def serve(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(current_rank().rank,), daemon=True).start()
        port: int = self.listener.getsockname()[1]
        return port

    def _serve(self, rank: int) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"rank %d:" % rank)
                while data := connection.recv(1 << 16):
                    connection.sendall(data.upper())

    def __cleanup__(self, error: Exception | None) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def forwarder() -> Iterator[Any]:
    made: Any = this_proc().spawn("forwarder", PortForwarder)
    yield made
    made.stop().get(60)


def talk(address: tuple[str, int], said: bytes) -> bytes:
    """All that comes back, once we have said all."""
    with socket.create_connection(address, timeout=60) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(said), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        heard = b""
        while data := connection.recv(1 << 16):
            heard += data
        sender.join()
    return heard


def test_what_is_said_here_is_heard_there_and_answered(mesh2x2: ProcMesh, forwarder: Any) -> None:
    there = mesh2x2.slice(hosts=1, gpus=0)
    echo = there.spawn("echo", Echo)
    port = echo.serve.call_one().get(60)
    ((_, address),) = forwarder.forward.call_one(there, port, this_proc(), "127.0.0.1:0").get(60)
    assert talk(address, b"hello") == b"rank 0:HELLO" or talk(address, b"hello").endswith(b":HELLO")
    many = b"abc" * (MANY // 3)
    assert talk(address, many).endswith(many.upper()) and len(talk(address, b"")) == len(b"rank 0:")
    forwarder.stop().get(60)
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=5)
    echo.stop().get(60)


def test_each_process_listens_for_the_one_at_its_place(mesh4: ProcMesh, forwarder: Any) -> None:
    echo = mesh4.spawn("echo", Echo)
    ports = [port for _, port in echo.serve.call().get(60).items()]

    def port_of(point: Point) -> int:
        return int(ports[point["gpus"]])

    found = forwarder.forward.call_one(mesh4, port_of, mesh4, lambda point: "127.0.0.1:0").get(60)
    assert [talk(address, b"x") for address in found.values()] == [b"rank %d:X" % rank for rank in range(4)]
    echo.stop().get(60)


def test_a_port_where_nobody_listens_closes_the_connection(mesh2: ProcMesh, forwarder: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        one = mesh2.slice(gpus=0)
        ((_, address),) = forwarder.forward.call_one(one, unused.getsockname()[1], this_proc(), "127.0.0.1:0").get(60)
        try:
            assert talk(address, b"") == b""
        except ConnectionError:
            pass


def test_what_cannot_be_forwarded_is_refused(mesh2: ProcMesh, forwarder: Any) -> None:
    one = mesh2.slice(gpus=0)
    for port, to, address, why in (
        (0, this_proc(), "127.0.0.1:0", "dst_port is a port, a whole number from 1 to 65535, not 0"),
        (True, this_proc(), "127.0.0.1:0", "dst_port is a port"),
        (80, mesh2, "127.0.0.1:0", "both meshes have one shape"),
        (80, this_proc(), "8080", 'src_address is "host:port"'),
        (80, this_proc(), "h:99999", "src_address is a port, a whole number from 0"),
    ):
        with pytest.raises(ActorError, match=why):
            forwarder.forward.call_one(one, port, to, address).get(60)
