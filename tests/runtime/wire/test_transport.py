"""Who is let in to the controller's socket, and as whom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import zmq

from meshbook.wire.lanes import routing_id
from meshbook.wire.transport import ControllerSocket

Keys: TypeAlias = "tuple[str, str] | None"
Dial: TypeAlias = "Callable[[Keys, str], zmq.Socket[bytes]]"


@pytest.fixture
def controller() -> Iterator[ControllerSocket]:
    sock = ControllerSocket()
    yield sock
    sock.close()


@pytest.fixture
def dial(controller: ControllerSocket) -> Iterator[Dial]:
    """Dial in with a key pair, in the name of a public key, and say hello."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = controller.bind("tcp://127.0.0.1:*")
    peers = []

    def dial(keys: Keys, claimed: str) -> zmq.Socket[bytes]:
        sock = context.socket(zmq.DEALER)
        peers.append(sock)
        sock.linger = 0
        sock.routing_id = routing_id(claimed, "calls")
        if keys is not None:
            sock.curve_serverkey = controller.public_key.encode()
            sock.curve_publickey, sock.curve_secretkey = (key.encode() for key in keys)
        sock.connect(endpoint)
        sock.send(b"hello")
        return sock

    yield dial
    for sock in peers:
        sock.close()
    context.term()


def _received(controller: ControllerSocket, seconds: float = 1.0) -> list[tuple[str, str, list[bytes]]]:
    messages: list[tuple[str, str, list[bytes]]] = []
    wake = os.eventfd(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not messages:
        controller.poll(wake, 0.05)
        messages += controller.receive()
    os.close(wake)
    return messages


def test_a_host_with_its_key_is_heard(controller: ControllerSocket, dial: Dial) -> None:
    pair = controller.accept("host-1")
    dial(pair, pair[0])
    assert _received(controller, 10) == [("host-1", "calls", [b"hello"])]


@pytest.mark.parametrize("keys", ["none", "unknown", "revoked"])
def test_nobody_else_is_let_in(controller: ControllerSocket, dial: Dial, keys: str) -> None:
    pair = controller.accept("host-1")
    if keys == "revoked":
        controller.revoke("host-1")
    public, secret = zmq.curve_keypair()
    chosen: dict[str, Keys] = {"none": None, "unknown": (public.decode(), secret.decode()), "revoked": pair}
    peer = dial(chosen[keys], pair[0])
    assert _received(controller) == []
    assert not peer.poll(0)  # and is told nothing


def test_an_address_of_an_earlier_version_is_refused(controller: ControllerSocket) -> None:
    with pytest.raises(OSError, match="no address that this version listens at"):
        controller.bind("ipc:///tmp/control")
