"""Replies of several ranks as one message: shared out, put together, and made in the name of ranks that have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from meshbook.errors import Failure, FailureKind, MeshError, failure_of
from meshbook.wire import messages as wire

TFrame = TypeVar("TFrame")


def split_replies(message: wire.Replies, frames: Sequence[TFrame]) -> list[tuple[wire.RankReply, Sequence[TFrame]]]:
    """Return each reply with the frames that are its own."""
    parts = []
    at = 0
    for reply in message.replies:
        parts.append((reply, frames[at : at + reply.frames]))
        at += reply.frames
    return parts


def place_head(head: bytes) -> tuple[bytes, list[bytes]]:
    """Return where the head of a pickle travels: inside its message where it is small, else in a frame of its own."""
    return (head, []) if len(head) <= wire.INLINE_MAX_BYTES else (b"", [head])


_decode_failure = msgspec.msgpack.Decoder(tuple[int, str, str, str, tuple[str, ...], str, FailureKind, bool]).decode


def encode_failure(failure: Failure) -> bytes:
    """Return a failure as it travels, without its exception. Raises: what the text of a user's class makes it raise."""
    return wire.encode(failure[:8])


def decode_failure(frames: Sequence[bytes]) -> Failure:
    """Return the failure in the frames of a reply: its text, and the pickled exception where that could travel.

    Raises: the errors of `wire.MALFORMED`; IndexError.
    """
    return Failure(*_decode_failure(frames[0]), frames[1] if len(frames) > 1 else None)


def explain_failure(rank: int, host: str, error: MeshError) -> bytes:
    """Return the payload of a reply that says why there is no other."""
    return encode_failure(failure_of(error, rank, host))


def failed_reply(reply: wire.RankReply, host: str, error: MeshError) -> tuple[wire.RankReply, list[bytes]]:
    """Return a failure in the place of a reply whose payload cannot be had."""
    failed = reply._replace(status=wire.RAISED, frames=1, segment=None, bulk=None, inline=b"")
    return failed, [explain_failure(reply.rank, host, error)]


def failed_replies(
    call: wire.Call, ranks: Iterable[int], host: str, error: MeshError
) -> tuple[wire.Replies, list[bytes]]:
    """Return the replies of ``ranks`` to a call that an agent cannot pass on."""
    ranks = sorted(ranks)
    replies = tuple(wire.RankReply(rank, wire.RAISED, 1, 0.0, None) for rank in ranks)
    return wire.Replies(call.id, replies, call.origin), [explain_failure(rank, host, error) for rank in ranks]


def agents_answer(question: int, answers: Mapping[int, object]) -> wire.Replies:
    """Return an agent's answer to a question: plain data by rank."""
    values = tuple(
        wire.RankReply(rank, wire.OK, 0, 0.0, None, inline=wire.encode(value)) for rank, value in answers.items()
    )
    return wire.Replies(question, values)


def dropped_replies(call: int, ranks: Iterable[int], origin: wire.Origin | None = None) -> wire.Replies:
    """Return the replies of ranks that will never begin ``call``."""
    dropped = tuple(wire.RankReply(rank, wire.DROPPED, 0, 0.0, None) for rank in sorted(ranks))
    return wire.Replies(call, dropped, origin)


def lost_reply(rank: int, death: wire.DeathCause) -> wire.RankReply:
    """Return the answer in the name of a rank that has ended."""
    return wire.RankReply(rank, wire.LOST, 0, 0.0, None, inline=wire.encode(death))


def lost_replies(call: int, lost: Iterable[tuple[int, wire.DeathCause]], origin: wire.Origin | None) -> wire.Replies:
    """Return the answers in the name of ranks that have ended."""
    return wire.Replies(call, tuple(lost_reply(rank, death) for rank, death in lost), origin)
