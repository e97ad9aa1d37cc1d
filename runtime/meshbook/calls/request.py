"""A call to ranks before it is sent: what every layer between its caller and the sockets hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from meshbook.errors import Failure
from meshbook.shape.generations import AS_NOW
from meshbook.shape.members import Members
from meshbook.values.pickling import Pickled

OnReply: TypeAlias = Callable[[int, bool, float, Failure | None, float], None]
"""Told as each rank ends: rank, whether all is well, seconds in all, what went wrong, seconds waited in collectives."""


class CallRequest(msgspec.Struct, frozen=True):
    """Run ``endpoint`` on every member; ``pickled`` are its arguments, ``what`` is the call's name for people."""

    endpoint: str
    members: Members
    pickled: Pickled
    what: str
    mesh: int = 0
    """The mesh of the members, by its number in the session; 0 is the controller's process."""
    mailbox: int = 0
    """As in `meshbook.wire.messages.Call`."""
    generation: int = AS_NOW
    """In which the members' ranks are meant: if they get other numbers before the call arrives, it fails."""
    fail_fast: bool = True
    """Whether the call completes at the first failure, rather than when every rank has ended."""
    beside: bool = False
    """Whether other messages to the mailbox may be handled while this one is."""
    reply: bool = True
    """Without a reply the future is complete at once; a rank that ends before the message has come never gets it."""
    on_reply: OnReply | None = None
