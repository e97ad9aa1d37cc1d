"""What an agent had sent and nobody has acknowledged, made ready for the next controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshbook.agent.journal import without_value
from meshbook.wire import messages as wire
from meshbook.wire.batches import unbatch
from meshbook.wire.bulk import Sent
from meshbook.wire.frames import Buffer
from meshbook.wire.replies import split_replies

_OF_THE_OLD = (
    wire.MeshReady, wire.SpawnFailed, wire.MeshStopped, wire.Hosted, wire.Call, wire.Cancel,
)  # fmt: skip
"""Answers to what the former controller asked, and its view of meshes: the next one gets a report instead. Calls to
mailboxes of its process: the next one has others."""


class UnackedMessages(NamedTuple):
    """Messages to send again, in order, and what they tell."""

    messages: list[tuple[wire.FromHost, Sequence[Buffer]]]
    pieces: list[Sent]
    """Of payloads that cross hosts; whole ones only."""
    replies: set[tuple[int, int]]
    """(call, rank) of the answers among the messages."""
    exits: set[int]
    """Pids of the workers whose end is among them."""
    segments: set[tuple[int, int]]
    """(pid, segment) of payloads in shared memory that they name."""


def unacked_messages(calls: Sequence[Sent], bulk: Sequence[Sent]) -> UnackedMessages:
    """Sort what the lanes of calls and of bulk still had."""
    pieces = [(wire.decode_from_host(header), header, payload) for header, payload in bulk]
    whole = {piece.payload for piece, _, _ in pieces if isinstance(piece, wire.Bulk) and piece.offset == 0}
    kept = [(h, payload) for piece, h, payload in pieces if isinstance(piece, wire.Bulk) and piece.payload in whole]
    found = UnackedMessages([], kept, set(), set(), set())
    for header, payload in calls:
        for each in unbatch(header):
            message = wire.decode_from_host(each)
            if isinstance(message, _OF_THE_OLD) or (isinstance(message, wire.Replies) and not message.replies):
                continue
            if isinstance(message, wire.Replies):
                message, payload = _checked(message, payload, whole)
                found.replies.update((message.id, reply.rank) for reply in message.replies)
                found.segments.update(
                    (reply.segment.pid, reply.segment.segment) for reply in message.replies if reply.segment
                )
            elif isinstance(message, wire.WorkerExited):
                found.exits.add(message.pid)
            found.messages.append((message, payload))
    return found


def _checked(message: wire.Replies, frames: Sequence[Buffer], whole: set[int]) -> tuple[wire.Replies, Sequence[Buffer]]:
    """Without the values of which a part has gone to the former controller."""
    replies: list[wire.RankReply] = []
    kept: list[Buffer] = []
    for reply, mine in split_replies(message, frames):
        if reply.bulk is not None and reply.bulk[0] not in whole:
            replies.append(without_value(reply, "its value was on its way to the controller that ended"))
        else:
            replies.append(reply)
            kept += mine
    return wire.Replies(message.id, tuple(replies)), kept
