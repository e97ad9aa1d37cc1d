"""Calls of workers that have left their host by one uplink, until they are answered or that ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import msgspec

from meshbook.agent.segment_refs import SegmentRefCounts
from meshbook.agent.worker import AgentWorker
from meshbook.errors import MeshError
from meshbook.values.segments import SegmentPool
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.uplink import Uplink

ForwardedKey: TypeAlias = tuple[wire.Origin | None, int]


class _Away:
    __slots__ = ("ranks", "sender")

    def __init__(self, sender: AgentWorker, ranks: set[int]) -> None:
        self.sender, self.ranks = sender, ranks


class ForwardedCalls:
    """Of one uplink: to the controller's process, or to the agent of another host.

    answer: hands answers to the worker that has called. discard: lets go of a payload that nobody wants.
    explain: the payload of a failed reply.
    """

    def __init__(
        self,
        uplink: Uplink,
        segment_refs: SegmentRefCounts,
        pool: SegmentPool,
        answer: Callable[[AgentWorker, wire.Replies, Sequence[Buffer]], None],
        discard: Callable[[wire.SegmentRef], None],
        explain: Callable[[int, MeshError], bytes],
    ) -> None:
        self.uplink = uplink
        self._segment_refs, self._pool = segment_refs, pool
        self._answer, self._discard, self._explain = answer, discard, explain
        self._open: dict[ForwardedKey, _Away] = {}

    def send(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer], ranks: Collection[int]) -> None:
        """Send a call that is for ``ranks`` over there."""
        segment = bulk = None
        if call.segment is not None:
            try:
                segment, bulk = self._segment_refs.export(call.segment, self.uplink)
            except MeshError as error:
                if call.reply:
                    failed = tuple(wire.RankReply(rank, wire.RAISED, 1, 0.0, None) for rank in sorted(ranks))
                    frames = [self._explain(reply.rank, error) for reply in failed]
                    self._answer(sender, wire.Replies(call.id, failed, call.origin), frames)
                return
        if segment is not None:
            sender.lent.add(segment.segment)
        if call.reply:
            self._open[call.origin, call.id] = _Away(sender, set(ranks))
        self.uplink.send(msgspec.structs.replace(call, segment=segment, bulk=bulk), payload)

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass on a cancel of a call that is not answered."""
        if (cancel.origin, cancel.call) in self._open:
            self.uplink.send(cancel)

    def lose(self, death: wire.DeathCause) -> None:
        """Nothing comes from there any more."""
        opened, self._open = self._open, {}
        for (origin, id), away in opened.items():
            lost = tuple(lost_reply(rank, death) for rank in sorted(away.ranks))
            self._answer(away.sender, wire.Replies(id, lost, origin), ())

    def on_replies(self, replies: wire.Replies, frames: Sequence[bytes]) -> None:
        """Answers have come, with all of their payloads."""
        away = self._open.get((replies.origin, replies.id))
        kept: list[wire.RankReply] = []
        mine: list[bytes] = []
        at = 0
        for reply in replies.replies:
            part, at = list(frames[at : at + reply.frames]), at + reply.frames
            if reply.bulk is not None:
                reply, part = self._bring(reply, part)
            if away is not None and reply.rank in away.ranks:  # else nobody there was asked
                away.ranks.discard(reply.rank)
                kept.append(reply)
                mine += part
            elif reply.segment is not None:
                self._discard(reply.segment)
        if away is not None and not away.ranks:
            del self._open[replies.origin, replies.id]
        if away is not None and kept:
            self._answer(away.sender, wire.Replies(replies.id, tuple(kept), replies.origin), mine)

    def _bring(self, reply: wire.RankReply, frames: list[bytes]) -> tuple[wire.RankReply, list[bytes]]:
        """Put a payload that came in pieces into our shared memory."""
        assert reply.bulk is not None
        try:
            segment = self._pool.write(self.uplink.bulk_in.take(*reply.bulk))
        except MeshError as error:
            failed = reply._replace(status=wire.RAISED, frames=1, bulk=None, inline=b"")
            return failed, [self._explain(reply.rank, error)]
        return reply._replace(segment=segment, bulk=None), frames


def lost_reply(rank: int, death: wire.DeathCause) -> wire.RankReply:
    """The answer in the name of a rank that has ended."""
    return wire.RankReply(rank, wire.LOST, 0, 0.0, None, inline=wire.encode(death))
