"""Copies between processes that share no memory: over a connection that exists for one copy.

    caller                                           owner
      listens, on a port of the moment
      ──── mail, encrypted: "stream", port, secret ──> side thread
      <─────────────────── TCP: proof of the secret ──   connects
      ── proof ─────────────────────────────────────>
      <════════════ the bytes, or the other way ════>
      <──────────────────────────────── mail: done ──

The secret is random and for one copy; it travels by mail alone, and who does not prove it gets nothing. The bytes
themselves are not encrypted, as those of process groups are not. The answer by mail comes also when the owner dies.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from meshbook.errors import MeshError
from meshbook.system.descriptors import above_standard, open_above
from meshbook.system.interfaces import connect_to, family_of, own_address

PIECE_BYTES = 1 << 20
LOOK_S = 0.01
"""The pause after which a wait for bytes looks whether they are still to come."""

SILENCE_S = 10.0
"""The time without progress after which the owner gives the copy up."""

CONNECT_S = 2.0
"""The time that each side has for its whole proof: a stranger may send it byte by byte."""
PROOF_BYTES = 32
_OWNER, _CALLER = b"meshbook buffer owner", b"meshbook buffer caller"


class StreamError(MeshError):
    """A connection between two processes could not be made, or broke."""


class UnreachableError(StreamError):
    """A connection that could not be made, and need not be tried again."""


class Rendezvous(NamedTuple):
    """The address at which the caller waits for the owner."""

    address: str
    port: int
    secret: bytes


class BufferListener:
    """The caller's side; to be closed. Raises: OSError if this host has no address that it can listen on."""

    def __init__(self) -> None:
        own = own_address()
        self._sock = open_above(lambda: socket.socket(family_of(own), socket.SOCK_STREAM))
        try:
            self._sock.bind((own, 0))
            self._sock.listen(2)
        except OSError:
            self._sock.close()
            raise
        self._sock.settimeout(LOOK_S)
        self._knocks = select.poll()
        self._knocks.register(self._sock, select.POLLIN)
        address, port = self._sock.getsockname()[:2]
        self.door = Rendezvous(address, port, secrets.token_bytes(32))

    def accept(self, look: Callable[[int], None]) -> socket.socket:
        """Wait for the owner. look: called again and again with the bytes done; an error of it ends the wait."""
        while True:
            look(0)
            if not self._knocks.poll(LOOK_S * 1000):
                continue
            with contextlib.suppress(TimeoutError):
                with above_standard():
                    connection, _ = self._sock.accept()
                if self._is_owner(connection):
                    connection.settimeout(LOOK_S)
                    return connection
                connection.close()

    def _is_owner(self, connection: socket.socket) -> bool:
        connection.settimeout(CONNECT_S)
        try:
            said = _receive_proof(connection)
            if not hmac.compare_digest(said, _proof(self.door.secret, _OWNER)):
                return False
            connection.sendall(_proof(self.door.secret, _CALLER))
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._sock.close()


def connect(door: Rendezvous) -> socket.socket:
    """Connect to the caller, as the owner. Raises: OSError, StreamError."""
    try:
        connection = connect_to((door.address, door.port), CONNECT_S)
    except OSError as error:
        raise UnreachableError(f"{door.address} cannot be reached: {error}") from error
    try:
        connection.sendall(_proof(door.secret, _OWNER))
        if not hmac.compare_digest(_receive_proof(connection), _proof(door.secret, _CALLER)):
            raise StreamError("somebody else listens where the reader of a buffer should")
        connection.settimeout(LOOK_S)
    except BaseException:
        connection.close()
        raise
    return connection


def send_all(connection: socket.socket, data: memoryview, look: Callable[[int], None]) -> None:
    """Send bytes. look: as in `BufferListener.accept`. Raises: OSError."""
    done = 0
    while done < len(data):
        look(done)
        with contextlib.suppress(TimeoutError):
            done += connection.send(data[done : done + PIECE_BYTES])


def receive_all(connection: socket.socket, into: memoryview, look: Callable[[int], None]) -> None:
    """Fill ``into``. look: as in `BufferListener.accept`. Raises: OSError, StreamError if the other side has gone."""
    done = 0
    while done < len(into):
        look(done)
        with contextlib.suppress(TimeoutError):
            count = connection.recv_into(into[done:], min(PIECE_BYTES, len(into) - done))
            if not count:
                raise StreamError("the other side has gone")
            done += count


class Silence:
    """A ``look`` for the owner, to whom nobody says that the caller has stopped: gives up after `SILENCE_S`."""

    def __init__(self) -> None:
        self._done, self._since = -1, 0.0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if done != self._done:
            self._done, self._since = done, now
        elif now - self._since > SILENCE_S:
            raise StreamError(f"no progress within {SILENCE_S:g} s")


def _proof(secret: bytes, role: bytes) -> bytes:
    return hmac.digest(secret, role, "sha256")


def _receive_proof(connection: socket.socket) -> bytes:
    said, deadline = b"", time.monotonic() + CONNECT_S
    while len(said) < PROOF_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := connection.recv(PROOF_BYTES - len(said))):
            break
        said += more
    return said
