"""Calls of workers that have left their host by one uplink, until they are answered or that ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from meshbook.agent.resources import HostResources
from meshbook.agent.worker import AgentWorker
from meshbook.errors import MeshError
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.replies import failed_replies, failed_reply, lost_replies, split_replies
from meshbook.wire.uplink import Uplink

ForwardedKey: TypeAlias = tuple[wire.Origin | None, int]


class _Away(NamedTuple):
    sender: AgentWorker
    ranks: set[int]


class ForwardedCalls:
    """Of one uplink: to the controller's process, or to the agent of another host.

    answer: hands answers to the worker that has called. discard: lets go of a payload that nobody wants.
    """

    def __init__(
        self,
        uplink: Uplink,
        host: HostResources,
        answer: Callable[[AgentWorker, wire.Replies, Sequence[Buffer]], None],
        discard: Callable[[wire.SegmentRef], None],
    ) -> None:
        self.uplink = uplink
        self._host, self._answer, self._discard = host, answer, discard
        self._open: dict[ForwardedKey, _Away] = {}

    def send(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer], ranks: Collection[int]) -> None:
        """Send a call that is for ``ranks`` over there."""
        segment = bulk = None
        if call.segment is not None:
            try:
                segment, bulk = self._host.segment_refs.export(call.segment, self.uplink)
            except MeshError as error:
                if call.reply:
                    self._answer(sender, *failed_replies(call, ranks, self._host.name, error))
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
            self._answer(away.sender, lost_replies(id, [(rank, death) for rank in sorted(away.ranks)], origin), ())

    def on_replies(self, replies: wire.Replies, frames: Sequence[bytes]) -> None:
        """Answers have come, with all of their payloads."""
        away = self._open.get((replies.origin, replies.id))
        kept: list[wire.RankReply] = []
        mine: list[bytes] = []
        for reply, part in split_replies(replies, frames):
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

    def _bring(self, reply: wire.RankReply, frames: Sequence[bytes]) -> tuple[wire.RankReply, Sequence[bytes]]:
        """Put a payload that came in pieces into our shared memory."""
        assert reply.bulk is not None
        try:
            segment = self._host.pool.write(self.uplink.bulk_in.take(*reply.bulk))
        except MeshError as error:
            return failed_reply(reply, self._host.name, error)
        return reply._replace(segment=segment, bulk=None), frames
