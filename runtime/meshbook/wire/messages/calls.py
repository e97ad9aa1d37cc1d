"""Calls: their header, their payloads, their answers, how they are cancelled, and how they come past the agent.

Payloads travel in shared memory of one host, in pieces between hosts, or within their message.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from meshbook.shape.members import Piece

PROTOCOL_VERSION = 11  # peers compare it in their first message and refuse each other, naming both numbers


class Header(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="t"):
    """The base of all messages: arrays in msgpack, of which the tag is the first element."""


Target: TypeAlias = tuple[Piece, ...]


def target_has(target: Target, rank: int) -> bool:
    """Whether base rank ``rank`` is a member of ``target``; O(axes)."""
    return any(part.has(rank) for part in target)


INLINE_MAX_BYTES = 1 << 14  # pickle heads up to this size travel inside their header


class SegmentRef(NamedTuple):
    """The place of a payload in shared memory: a memfd of a living process on this host."""

    pid: int
    fd: int
    segment: int  # never reused by its owner
    size_bytes: int
    spans: tuple[tuple[int, int], ...]  # (offset, length) of each buffer, in order


class SegmentFree(Header, frozen=True, tag="free"):
    """The sender's side has no view of the segment ``segment`` of process ``pid`` any more."""

    pid: int
    segment: int


class Origin(NamedTuple):
    """A worker that has made a call. Its agent says so, not the worker itself."""

    mesh: int
    rank: int  # its rank at that time
    pid: int


class Call(Header, frozen=True, tag="call"):
    """Run ``endpoint`` once on every member of ``target``; arguments are the payload."""

    id: int
    mesh: int
    endpoint: str
    target: Target
    output: int = 0  # id of the output that the call's prints belong to; 0: none in particular
    segment: SegmentRef | None = None  # large buffers of the payload, in shared memory of this host
    # (payload, spans) of large buffers that have come before, in pieces
    bulk: tuple[int, tuple[tuple[int, int], ...]] | None = None
    inline: bytes = b""  # the pickle head, where it is small: one frame costs half as much as two
    label: str = ""  # the call's name for people, for the next controller
    # 0: an endpoint of the process, on its main thread; else an actor or a port there, which waits for no other call
    mailbox: int = 0
    reply: bool = True  # whether the sender expects answers; calls to the main thread are always answered
    no_prompt: str = ""  # why a breakpoint in it cannot open a prompt; empty: it can
    origin: Origin | None = None  # the caller, where that is not the controller; ids are each origin's own
    # names, oldest first, of the calls between actors that have led to this one, its own last
    chain: tuple[int, ...] = ()
    generation: int = -1  # generation of the target's ranks (`meshbook.shape.members`); -1: the present one
    # number of a call that has gone by direct links (`meshbook.wire.direct`): those of one caller go up; others have 0
    direct: int = 0
    # the process that alone may run a call which has gone by a link that has broken; 0: any
    pid: int = 0


class Cancel(Header, frozen=True, tag="cancel"):
    """Drop call ``call`` where it has not started; raise KeyboardInterrupt in it where it runs. insist: continue
    stopped processes, and raise again for a while where it was caught."""

    mesh: int
    call: int
    target: Target
    insist: bool = False
    origin: Origin | None = None
    is_mail: bool = False  # whether the call is to mailboxes
    direct: bool = False  # whether ranks have got the call by direct links, so that the agent may not know it


# status of a reply: a value, an exception, stopped by `Cancel` while running, dropped by it before, a value that was
# not kept while there was no controller (``inline`` says why), a rank that has ended (``inline`` is its `DeathCause`;
# workers are told so, the controller knows)
OK, RAISED, INTERRUPTED, DROPPED, GONE, LOST = range(6)


class DeathCause(NamedTuple):
    """The cause why a rank does not answer."""

    host: str
    cause: str
    log_tail: str
    alone: bool = False  # see `WorkerExited`


class Reply(Header, frozen=True, tag="reply"):
    """A value (pickle head, then in-band buffers) or a failure (msgpack fields, then the pickled exception)."""

    id: int
    status: int
    duration_s: float
    segment: SegmentRef | None = None
    inline: bytes = b""
    # the part of ``duration_s`` that the main thread waited in collectives, as far as the process sees it
    waited_s: float = 0.0
    origin: Origin | None = None
    groups: bytes = b""  # news of the rank's process groups (`meshbook.groups.agreements.Told`), for the controller
    freed: tuple[tuple[int, int], ...] = ()  # payloads that it has let go of before, see `SegmentFree`


class RankReply(NamedTuple):
    """The answer of a rank inside `Replies`; its frames follow those of the ranks before it."""

    rank: int
    status: int
    frames: int
    duration_s: float
    segment: SegmentRef | None
    bulk: tuple[int, tuple[tuple[int, int], ...]] | None = None
    inline: bytes = b""
    waited_s: float = 0.0
    groups: bytes = b""  # this and ``waited_s``: see `Reply`


class Replies(Header, frozen=True, tag="replies"):
    """Answers to one call from ranks of one host, combined. Failures are never held back."""

    id: int
    replies: tuple[RankReply, ...]
    origin: Origin | None = None


class MailHold(Header, frozen=True, tag="hold"):
    """Too much waits for these ranks: send them no calls until they are named again with ``held`` false."""

    mesh: int
    ranks: tuple[int, ...]
    held: bool


class DirectHello(Header, frozen=True, tag="direct"):
    """A rank's first message on a direct link (`meshbook.wire.direct`): who it is, and whom it takes the caller for."""

    mesh: int
    generation: int
    rank: int
    pid: int
    is_mail: bool  # whether the link is to its mailboxes, or to its main thread
    caller: Origin | None = None  # the rank at the other end; None: the controller


class CameEarly(Header, frozen=True, tag="early"):
    """A call has come by a direct link, and the agent is to know it; our answer follows. When the controller has ended
    the agent passes it on to the other ranks, some of which may not have got it."""

    call: Call


class ControllerGone(Header, frozen=True, tag="gone"):
    """The controller has ended, or has left: calls past the agent that were not answered or heard are the agent's."""


class ToldAll(Header, frozen=True, tag="told"):
    """The answer to `ControllerGone`, on both lanes for calls: all calls that came past the agent were told before."""
