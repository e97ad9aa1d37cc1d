"""The calls that a worker has made to mailboxes: the same `OpenCall` as on the controller.

Any thread makes calls; answers come in on the thread of the mail, which alone completes futures.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from meshbook.calls.answer import Unavailable
from meshbook.calls.call import SENT, OpenCall, RequestFuture
from meshbook.calls.request import CallRequest
from meshbook.calls.table import CallTable
from meshbook.errors import MeshError
from meshbook.wire import messages as wire
from meshbook.wire.replies import place_head
from meshbook.worker.channel import AgentChannel, RankPayloads

LOOK_S = 0.1
"""Who waits for room looks so often for what else may want the thread."""


class MailCalls:
    """Of one worker. `meshbook.worker.mail` feeds it."""

    def __init__(self, channel: AgentChannel, payloads: RankPayloads) -> None:
        self._channel, self._payloads = channel, payloads
        self._table = CallTable()
        self._ids = itertools.count((os.getpid() << 32) + 1)  # never those of a process that had our rank
        self._room = threading.Condition()
        self._held: frozenset[tuple[int, int]] = frozenset()
        """(mesh, rank) for which too much waits."""
        self.reader = 0
        """The thread that reads the mail: it waits for nobody."""

    # ---- any thread ---------------------------------------------------------------------------------------------

    def call(self, request: CallRequest, *, output: int = 0, chain: tuple[int, ...] = ()) -> RequestFuture[Any]:
        """Send a request to a mailbox (not 0). output: what its members print goes there. chain: as in `wire.Call`."""
        assert request.mailbox, "the endpoints of a process are for its controller"
        self._wait_for_room(request)
        if not request.reply:
            self._send(next(self._ids), request, output, chain)
            return SENT
        future: RequestFuture[Any] = RequestFuture(self._cancel, partial(
            OpenCall, next(self._ids), request.mesh, request.what, request.members,
            fail_fast=request.fail_fast, on_reply=request.on_reply, mailbox=request.mailbox,
        ))  # fmt: skip
        call = future.call
        self._table.open(call, None)
        try:
            self._send(call.id, request, output, chain)
        except BaseException:
            self._table.disown(call)
            raise
        return future

    def _send(self, id: int, request: CallRequest, output: int, chain: tuple[int, ...]) -> None:
        head, buffers = request.pickled
        inline, payload = place_head(head)
        message = wire.Call(
            id, request.mesh, request.endpoint, request.members.encode(), output, inline=inline,
            label=request.what if request.reply else "", mailbox=request.mailbox, reply=request.reply,
            segment=self._payloads.pool.write(buffers) if buffers else None, chain=chain,
            generation=request.generation,
        )  # fmt: skip
        self._payloads.tell_freed()
        self._channel.send(message, payload)

    def _wait_for_room(self, request: CallRequest) -> None:
        """Wait while too much waits for one of the members. In short steps, in which the thread can be interrupted."""
        if not self._held or threading.get_ident() == self.reader:
            return
        with self._room:
            while any((request.mesh, rank) in self._held for rank in request.members.ranks()):
                self._room.wait(LOOK_S)

    def hold(self, hold: wire.MailHold) -> None:
        """Some ranks read too slowly, or are ready for more."""
        named = {(hold.mesh, rank) for rank in hold.ranks}
        with self._room:
            self._held = self._held | named if hold.held else self._held - named
            self._room.notify_all()

    def _cancel(self, id: int) -> None:
        """Ask for the end of a call on all of its members that have not answered."""
        if (call := self._table.find(id)) is not None:
            self._channel.send(wire.Cancel(call.mesh, id, call.members.encode(), False))

    # ---- the thread of the mail ---------------------------------------------------------------------------------

    def on_replies(self, message: wire.Replies, frames: Sequence[bytes]) -> None:
        """Answers have come."""
        self._table.answer(message, frames, [self._buffers(reply) for reply in message.replies])

    def _buffers(self, reply: wire.RankReply) -> Sequence[object]:
        try:
            return self._payloads.map(reply.segment)
        except MeshError as error:
            return Unavailable(error)

    def expire(self) -> float | None:
        """Do what is due; returns in how many seconds to come again, None when nothing is."""
        if (due := self._table.next_deadline()) == float("inf"):
            return None
        if (left := due - time.monotonic()) > 0:
            return left
        self._table.expire()
        return self.expire()
