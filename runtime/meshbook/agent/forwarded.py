"""Calls of workers that have left their host by one road, until they are answered or the road ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import msgspec

from meshbook.agent.worker import AgentWorker
from meshbook.errors import MeshError
from meshbook.values.segments import SegmentPool
from meshbook.wire import messages as wire
from meshbook.wire.bulk import BulkReceiver, Spans
from meshbook.wire.frames import Buffer

ForwardedKey: TypeAlias = tuple[wire.Origin | None, int]


class ForwardingRoute(Protocol):
    """Where calls go: the controller's process, or the agent of another host."""

    @property
    def bulk_in(self) -> BulkReceiver: ...
    @property
    def is_full(self) -> bool:
        """Whether so much is under way that senders should wait."""

    def send(self, message: wire.FromHost, payload: Sequence[Buffer] = ()) -> None: ...
    def export(self, segment: wire.SegmentRef) -> tuple[wire.SegmentRef | None, tuple[int, Spans] | None]:
        """Make a worker's payload reachable there, as it is or in pieces."""


class _Away:
    __slots__ = ("ranks", "sender")

    def __init__(self, sender: AgentWorker, ranks: set[int]) -> None:
        self.sender, self.ranks = sender, ranks


class ForwardedCalls:
    """Of one road.

    answer: hands answers to the worker that has called. discard: lets go of a payload that nobody wants.
    explain: the payload of a failed reply.
    """

    def __init__(
        self,
        router: ForwardingRoute,
        pool: SegmentPool,
        answer: Callable[[AgentWorker, wire.Replies, Sequence[Buffer]], None],
        discard: Callable[[wire.SegmentRef], None],
        explain: Callable[[int, MeshError], bytes],
    ) -> None:
        self.router = router
        self._pool, self._answer, self._discard, self._explain = pool, answer, discard, explain
        self._open: dict[ForwardedKey, _Away] = {}
        self._parked: deque[tuple[wire.Replies, list[bytes]]] = deque()
        """Answers whose payload is on its way, and those behind them."""

    def send(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer], ranks: Collection[int]) -> None:
        """Send a call that is for ``ranks`` over there."""
        segment = bulk = None
        if call.segment is not None:
            try:
                segment, bulk = self.router.export(call.segment)
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
        self.router.send(msgspec.structs.replace(call, segment=segment, bulk=bulk), payload)

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass on a cancel of a call that is not answered."""
        if (cancel.origin, cancel.call) in self._open:
            self.router.send(cancel)

    def on_replies(self, replies: wire.Replies, frames: list[bytes]) -> None:
        """Answers have come; they wait for their payloads."""
        bulk_in = self.router.bulk_in
        if self._parked or any(reply.bulk and not bulk_in.has(reply.bulk[0]) for reply in replies.replies):
            self._parked.append((replies, frames))
        else:
            self._take(replies, frames)

    def serve_parked(self) -> None:
        """A payload is whole."""
        parked, self._parked = self._parked, deque()
        for replies, frames in parked:
            self.on_replies(replies, frames)

    def lose(self, death: wire.DeathCause) -> None:
        """Nothing comes from there any more."""
        self._parked.clear()
        opened, self._open = self._open, {}
        for (origin, id), away in opened.items():
            lost = tuple(lost_reply(rank, death) for rank in sorted(away.ranks))
            self._answer(away.sender, wire.Replies(id, lost, origin), ())

    def _take(self, replies: wire.Replies, frames: Sequence[bytes]) -> None:
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
            segment = self._pool.write(self.router.bulk_in.take(*reply.bulk))
        except MeshError as error:
            failed = reply._replace(status=wire.RAISED, frames=1, bulk=None, inline=b"")
            return failed, [self._explain(reply.rank, error)]
        return reply._replace(segment=segment, bulk=None), frames


def lost_reply(rank: int, death: wire.DeathCause) -> wire.RankReply:
    """The answer in the name of a rank that has ended."""
    return wire.RankReply(rank, wire.LOST, 0, 0.0, None, inline=wire.encode(death))
