"""The ticket that a person carries to other machines, and the messages at the gate that it leads to.

It is one line, so that it can be pasted. It names the gate (`meshbook.wire.zmq_transport.Gate`), and holds a secret:
whoever shows that there is a host, as often as hosts are waited for. Only then an agent gets a `Ticket` of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TypeAlias

import msgspec

from meshbook.errors import UsageError
from meshbook.system.processes import python_version
from meshbook.wire.messages import PROTOCOL_VERSION
from meshbook.wire.ticket import Ticket

COMMAND = "-m meshbook.join"
_KIND, _CHECK_BYTES = "mb1-", 4


class Invitation(msgspec.Struct, array_like=True, frozen=True):
    """The content of the line."""

    endpoint: str
    key: str
    """The public key of the gate."""
    token: str

    def __str__(self) -> str:
        packed = msgspec.msgpack.encode(self)
        return _KIND + base64.urlsafe_b64encode(_check(packed) + packed).decode().rstrip("=")


def read_invitation(line: str) -> Invitation:
    """Raises: UsageError."""
    text = line.strip()
    try:
        if not text.startswith(_KIND):
            raise ValueError
        coded = text.removeprefix(_KIND)
        packed = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
        if packed[:_CHECK_BYTES] != _check(packed[_CHECK_BYTES:]):
            raise ValueError
        return msgspec.msgpack.decode(packed[_CHECK_BYTES:], type=Invitation)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        what = "nothing" if not text else f"{len(text)} characters that are no whole one"
        raise UsageError(
            f"a ticket is the whole line beginning with {_KIND} that the notebook shows, but there came {what}; "
            "copy it once more, from its beginning to its end."
        ) from None


class Arrival(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A machine asks to be a host."""

    token: str
    name: str
    """The name of the machine."""
    protocol: int
    python: str


class Departure(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A host has ended, or is about to."""

    token: str
    host_id: str
    why: str


class Admitted(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The machine is a host from now on."""

    ticket: Ticket
    home: str
    """The user and the machine that wait for hosts."""


class TurnedAway(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The machine is no host; also the answer to a departure."""

    reason: str


GateQuestion: TypeAlias = Arrival | Departure
GateAnswer: TypeAlias = Admitted | TurnedAway


def difference(protocol: int, python: str, theirs: str, ours: str) -> str:
    """Describe a difference between two sides, as in ``it`` and ``the notebook``; empty where they fit."""
    if protocol != PROTOCOL_VERSION:
        return f"{theirs} speaks protocol {protocol} of meshbook, {ours} {PROTOCOL_VERSION}"
    if python.split(".")[:2] != python_version().split(".")[:2]:
        return f"{theirs} has Python {python}, {ours} {python_version()}"
    return ""


encode = msgspec.msgpack.encode
decode_question = msgspec.msgpack.Decoder(GateQuestion).decode
decode_answer = msgspec.msgpack.Decoder(GateAnswer).decode


def _check(packed: bytes) -> bytes:
    """Return a check of the line, which tells one that was not copied whole."""
    return hashlib.sha256(packed).digest()[:_CHECK_BYTES]
