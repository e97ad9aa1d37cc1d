"""Who is let in to the controller's socket, and as whom."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import zmq

from meshbook.transport import ControllerSocket


@pytest.fixture
def controller() -> Iterator[ControllerSocket]:
    sock = ControllerSocket()
    yield sock
    sock.close()


@pytest.fixture
def wake() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def _dial(
    context: Context, endpoint: str, routing_id: str, server_key: str, keys: tuple[str, str] | None
) -> zmq.Socket[bytes]:
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    sock.routing_id = routing_id.encode()
    if keys is not None:
        sock.curve_serverkey = server_key.encode()
        sock.curve_publickey, sock.curve_secretkey = (key.encode() for key in keys)
    sock.connect(endpoint)
    sock.send(b"hello")
    return sock


def _received(controller: ControllerSocket, wake: int, seconds: float = 1.0) -> list[tuple[str, str, list[bytes]]]:
    messages: list[tuple[str, str, list[bytes]]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not messages:
        controller.poll(wake, 0.05)
        messages += controller.receive()
    return messages


def test_a_host_with_its_key_is_heard(controller: ControllerSocket, context: Context, wake: int) -> None:
    endpoint = controller.bind("tcp://127.0.0.1:*")
    _dial(context, endpoint, "host-1/calls", controller.public_key, controller.accept("host-1"))
    assert _received(controller, wake, 10) == [("host-1", "calls", [b"hello"])]


@pytest.mark.parametrize("keys", ["none", "unknown", "revoked"])
def test_nobody_else_is_let_in(controller: ControllerSocket, context: Context, wake: int, keys: str) -> None:
    endpoint = controller.bind("tcp://127.0.0.1:*")
    pair = controller.accept("host-1")
    if keys == "revoked":
        controller.revoke("host-1")
    public, secret = zmq.curve_keypair()
    chosen = {"none": None, "unknown": (public.decode(), secret.decode()), "revoked": pair}[keys]
    peer = _dial(context, endpoint, "host-1/calls", controller.public_key, chosen)
    assert _received(controller, wake) == []
    assert not peer.poll(0)  # and is told nothing


def test_a_host_cannot_speak_for_another(controller: ControllerSocket, context: Context, wake: int) -> None:
    endpoint = controller.bind("tcp://127.0.0.1:*")
    controller.accept("host-2")
    _dial(context, endpoint, "host-2/calls", controller.public_key, controller.accept("host-1"))
    assert _received(controller, wake) == []
    assert controller.rejected == 1
