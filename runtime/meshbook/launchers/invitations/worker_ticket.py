"""What a worker that was started by itself and a program that wants it as a host say to each other, and their secret.

    worker   listens at its address, with a gate (`meshbook.wire.gate`) whose key is made of the ticket
    program  knows the ticket too, so it finds that gate and no other; summons the worker, which starts an agent

Monarch's functions have no argument for a ticket, so both read it from a file: the one that MESHBOOK_TICKET_FILE names,
else one in the folder of this user, which is made by who needs it first. So programs of one user on one machine, or of
one home, need nothing; all others need a copy of that file. Nobody is let in without.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from meshbook.errors import SpawnError, UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.invitations.invitation import TurnedAway
from meshbook.system.connections import unix_connection
from meshbook.system.user_folders import create_private, read_private, runtime_base, state_base
from meshbook.wire.ticket import Ticket

FILE_VARIABLE = "MESHBOOK_TICKET_FILE"
WITHIN_S = 60.0
"""How long a worker may take to listen: it may have been started just now."""
_MIN_CHARS = 32
_NO_TLS = (
    "keys and certificates of TLS are not used here: the connection is encrypted by keys that are made of the ticket, "
    f'a file of this user or the one that {FILE_VARIABLE} names. Pass ca="trust_all_connections", no private_key.'
)


class Summons(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A program wants the worker as a host."""

    token: str
    ticket: Ticket
    protocol: int
    python: str


class Farewell(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A program needs its agent no more; asked again until that has ended."""

    token: str
    host_id: str
    for_good: bool
    """Whether nobody else needs the worker either."""


class Serves(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The worker's machine, and whether the agent is there (still)."""

    name: str
    is_there: bool


WorkerQuestion: TypeAlias = Summons | Farewell
WorkerAnswer: TypeAlias = Serves | TurnedAway

decode_question = msgspec.msgpack.Decoder(WorkerQuestion).decode
decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode


class WorkerSecret(NamedTuple):
    """What is made of a ticket."""

    key: bytes
    """Of the gate, secret."""
    token: str
    """Shows that who asks has the ticket."""
    proof: bytes
    """Key of the proofs of who has a worker as its way to others (`meshbook.launchers.invitations.server_messages`)."""
    origin: str
    """Where the ticket was read."""

    def accepts(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


def worker_secret() -> WorkerSecret:
    """The secret of this user's workers. Raises: UsageError where the file that was named is none."""
    named = os.environ.get(FILE_VARIABLE, "")
    path = Path(named).expanduser() if named else state_base() / "worker-ticket"
    if not named:
        create_private(path, secrets.token_urlsafe(_MIN_CHARS).encode() + b"\n")
    ticket = (read_private(path) or b"").strip()
    if len(ticket) < _MIN_CHARS:
        what = "must be there, belong to this user, have mode 0600" if not ticket else "is too short: it must be random"
        raise UsageError(
            f"the ticket of workers, {path}, {what} and at least {_MIN_CHARS} characters. Copy that of the machine "
            f"where the others run (there ~/.local/state/meshbook/worker-ticket, or what {FILE_VARIABLE} names)."
        )
    return WorkerSecret(
        _made_of(ticket, b"gate"), _made_of(ticket, b"token").hex(), _made_of(ticket, b"proof"), str(path)
    )


def _made_of(ticket: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(ticket, digest_size=32, person=b"meshbook" + purpose).digest()


class WorkerAddress(NamedTuple):
    """Where a worker is."""

    dial: str
    bind: str
    named: str
    """As people name it: what an ``ipc`` name means is the affair of the machine on which it is dialled."""

    @property
    def host(self) -> str:
        """The machine, empty where it is this one."""
        return self.dial.removeprefix("tcp://").rpartition(":")[0].strip("[]") if self.dial.startswith("tcp") else ""


def read_address(text: str) -> WorkerAddress:
    """Read Monarch's ``tcp://HOST:PORT``, ``ipc://NAME``, ``DIAL@BIND``, or one of these behind ``NAME@``.

    Raises: UsageError.
    """
    urls = [each for each in str(text).split("@") if "://" in each]
    if not 1 <= len(urls) <= 2:
        raise UsageError(f'a worker is named as in "tcp://nodeA:4444" or "ipc://worker-1", not by {text!r}.')
    dial, bind = (_checked(url, text) for url in (urls[0], urls[-1]))
    return WorkerAddress(dial, bind, str(text))


def _checked(url: str, text: str) -> str:
    scheme, _, where = url.partition("://")
    if scheme == "ipc" and where:
        name = hashlib.sha256(where.encode()).hexdigest()[:16]
        return f"ipc://{runtime_base()}/worker-{name}"
    host, _, port = where.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        hint = did_you_mean(scheme, ["tcp", "ipc"]) if scheme not in ("tcp", "ipc") else ""
        raise UsageError(
            f'a worker is named as in "tcp://nodeA:4444" or "ipc://worker-1"; {text!r} has {url!r}.{hint} All '
            "connections are encrypted, so there are no other kinds."
        )
    return url


def connect_to_worker(address: WorkerAddress, timeout_s: float) -> socket.socket:
    """A connection to where a worker listens. Raises: OSError."""
    if not address.host:
        return unix_connection(address.dial.removeprefix("ipc://"), timeout_s)
    host = "127.0.0.1" if address.host == "*" else address.host
    return socket.create_connection((host, int(address.dial.rpartition(":")[2])), timeout_s)


def is_loopback(host: str) -> bool:
    """Whether it is a loopback address, or a name of one."""
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(host if host != "*" else "127.0.0.1", None)]
    except OSError:
        return False
    return bool(found) and all(each.startswith("127.") or each == "::1" for each in found)


def refuse_tls(ca: object, private_key: object) -> None:
    """Raises: UsageError for what TLS would need."""
    if private_key is not None or ca != "trust_all_connections":
        raise UsageError(_NO_TLS)


def other_ticket(address: str, origin: str) -> SpawnError:
    """For who has another ticket than the worker."""
    return SpawnError(
        f"the worker at {address} has another ticket than this program, which has that in {origin}. Give both "
        f"the same: copy the file, mode 0600, and name it by {FILE_VARIABLE} where it lies elsewhere."
    )
