"""What a program and a worker that is its way to others say to each other, and how each shows that it has the ticket.

    program  ── "meshbook", nonce ──────────────────────────> server
             <── nonce, proof of both nonces ───────────────
             ── question, proof of both nonces and of it ──>
             <── answer ────────────────────────────────────      what follows is bytes of somebody else

A proof is a keyed hash, by a key that is made of the ticket (`meshbook.launchers.invitations.worker_ticket`), so
neither side gives anything to one that has another ticket. What is carried then is encrypted from end to end by whom it
is between.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from typing import TypeAlias

import msgspec

from meshbook.errors import ProtocolError
from meshbook.launchers.invitations.invitation import TurnedAway

GREETING = b"meshbook"
"""Begins otherwise than any message of ZeroMQ, which has the same port."""
HANDSHAKE_S = 10.0
_NONCE_BYTES, _PROOF_BYTES, _MAX_BYTES = 16, 32, 1 << 16
_LENGTH, _NUMBER = struct.Struct("!I"), struct.Struct("!Q")


class SeesServer(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Whether it is there, and fits. What the program has."""

    protocol: int
    python: str


class Reaches(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Connect me to a worker, named as people name it."""

    worker: str


class Listens(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Listen for me as long as this connection lasts, and tell the number of each connection that comes."""

    towards: tuple[str, ...]
    """The machines that will connect."""
    before: str
    """The endpoint where it listened for me before, which agents know; empty for any."""


class Takes(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Give me the connection of this number, which has come where you listen."""

    number: int


class Reached(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """So be it. endpoint: where it listens, for who asked for that."""

    endpoint: str = ""


ServerQuestion: TypeAlias = SeesServer | Reaches | Listens | Takes
ServerAnswer: TypeAlias = Reached | TurnedAway

_encode = msgspec.msgpack.encode
_decode_question = msgspec.msgpack.Decoder(ServerQuestion).decode
_decode_answer = msgspec.msgpack.Decoder(ServerAnswer).decode


class OtherTicket(ProtocolError):
    """The other side has another ticket, or is no worker at all."""


def ask_server(sock: socket.socket, key: bytes, question: ServerQuestion) -> ServerAnswer:
    """The program's side. Raises: OtherTicket; OSError, also where the server says no more."""
    mine = os.urandom(_NONCE_BYTES)
    sock.sendall(GREETING + mine)
    try:
        until = time.monotonic() + HANDSHAKE_S
        theirs, proof = _read(sock, _NONCE_BYTES, until), _read(sock, _PROOF_BYTES, until)
        if not hmac.compare_digest(proof, _proof(key, b"server", mine, theirs)):
            raise OtherTicket("its proof is another one")
        asked = _encode(question)
        sock.sendall(_proof(key, b"program", mine, theirs, asked) + _LENGTH.pack(len(asked)) + asked)
        answer: ServerAnswer = _decode_answer(_read_message(sock, time.monotonic() + 2 * HANDSHAKE_S))
        return answer
    except EOFError:
        raise OSError("it ended the connection") from None
    except msgspec.MsgspecError as error:
        raise OtherTicket("its answer is none") from error


def hear_question(sock: socket.socket, key: bytes) -> ServerQuestion:
    """The server's side, from the first byte on; what is asked is answered by `answer_question`.

    Raises: OtherTicket, OSError, EOFError, MsgspecError.
    """
    until = time.monotonic() + HANDSHAKE_S
    greeting, theirs = _read(sock, len(GREETING), until), _read(sock, _NONCE_BYTES, until)
    if greeting != GREETING:
        raise OtherTicket("it greets otherwise")
    mine = os.urandom(_NONCE_BYTES)
    sock.sendall(mine + _proof(key, b"server", theirs, mine))
    proof, asked = _read(sock, _PROOF_BYTES, until), _read_message(sock, until)
    if not hmac.compare_digest(proof, _proof(key, b"program", theirs, mine, asked)):
        raise OtherTicket("its proof is another one")
    question: ServerQuestion = _decode_question(asked)
    return question


def answer_question(sock: socket.socket, answer: ServerAnswer) -> None:
    """Raises: OSError."""
    said = _encode(answer)
    sock.sendall(_LENGTH.pack(len(said)) + said)


def tell_number(sock: socket.socket, number: int) -> None:
    """A connection has come. Raises: OSError."""
    sock.sendall(_NUMBER.pack(number))


def hear_number(sock: socket.socket) -> int:
    """Wait for the next one. Raises: OSError, EOFError."""
    number: int = _NUMBER.unpack(_read(sock, _NUMBER.size, None))[0]
    return number


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(_LENGTH.pack(len(part)) + part for part in parts), "sha256")


def _read_message(sock: socket.socket, until: float) -> bytes:
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size, until))
    if size > _MAX_BYTES:
        raise EOFError
    return _read(sock, size, until)


def _read(sock: socket.socket, size: int, until: float | None) -> bytes:
    """until: by the monotonic clock; who says a byte at a time has no longer. Raises: EOFError, OSError."""
    read = bytearray()
    while len(read) < size:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        if not (piece := sock.recv(size - len(read))):
            raise EOFError
        read += piece
    return bytes(read)
