"""Peers that should get nowhere: they dial a controller's port without a key, and do their worst."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # how a ZMTP greeting begins (RFC 23)


def greeting(mechanism: bytes) -> bytes:
    """A whole ZMTP 3.1 greeting of a client."""
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def long_frame(size: int, *, command: bool = False) -> bytes:
    """The head of a frame that claims ``size`` bytes."""
    return bytes([0x06 if command else 0x02]) + struct.pack(">Q", size)


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def dial(port: int, timeout_s: float = 2.0) -> socket.socket | None:
    """A connection; None when the port does not answer."""
    with contextlib.suppress(OSError):
        return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    return None


def send(port: int, *pieces: bytes, wait_s: float = 0.2) -> bytes:
    """Dial, send, and return what came back within ``wait_s``."""
    answer = b""
    if (sock := dial(port)) is None:
        return answer
    with sock, contextlib.suppress(OSError):
        for piece in pieces:
            sock.sendall(piece)
        sock.settimeout(wait_s)
        while data := sock.recv(1 << 16):
            answer += data
    return answer


def send_garbage(port: int) -> None:
    send(port, os.urandom(4096), wait_s=0.02)


def scan(port: int) -> None:
    """Connect and leave, as a port scanner does."""
    if (sock := dial(port)) is not None:
        sock.close()


def ask_by_http(port: int) -> None:
    send(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", wait_s=0.02)


def claim_2_gb(port: int) -> None:
    """Frames that claim more than anybody may send, before and within a handshake."""
    for mechanism in (b"NULL", b"CURVE"):
        for command in (False, True):
            send(port, greeting(mechanism), long_frame(2 << 30, command=command) + b"x" * 4096, wait_s=0.02)


def dial_with_zmq(port: int, payload: bytes, server_key: str | None) -> None:
    """A ZeroMQ peer with no key (``server_key`` None) or a key of its own, that sends ``payload`` with all it has."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    if server_key is not None:
        sock.curve_serverkey = server_key.encode()
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.connect(f"tcp://127.0.0.1:{port}")
    sock.send_multipart([payload, payload, payload])
    sock.poll(100)
    context.destroy(linger=0)


def canary_pickle(path: Path) -> bytes:
    return pickle.dumps(Canary(path))


class Slow:
    """Connections that begin a handshake and never end it; counts what the port did with them."""

    def __init__(self, port: int, count: int) -> None:
        self.sockets = [sock for _ in range(count) if (sock := dial(port, 0.5)) is not None]
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.sendall(SIGNATURE)

    def alive(self) -> int:
        """How many are still open."""
        return sum(map(_is_open, self.sockets))

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def _is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def attacking(attack: Callable[[], object]) -> Iterator[list[int]]:
    """Repeat ``attack`` on a thread; yields a list whose first item counts the rounds."""
    rounds, ended = [0], threading.Event()

    def run() -> None:
        while not ended.is_set():
            attack()
            rounds[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=run, name="attacker")
    thread.start()
    try:
        yield rounds
    finally:
        ended.set()
        thread.join()
