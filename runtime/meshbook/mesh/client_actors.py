"""Actors in the process that drives meshes: it is rank 0 of mesh 0 to all others, without axes.

    ranks ──> controller's mail ──┐
                                  ├──> mailboxes ──> `meshbook.worker.actors.ActorRegistry`, as on a rank
    this process ──call──---------┘

A call from the same process takes no socket. Arguments and answers are pickled all the same, so that an actor
shares nothing by accident; classes and functions of the program are its own, with its globals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshbook.actor.context import context
from meshbook.actor.router import Answers
from meshbook.calls.call import CallRequest, OpenCall
from meshbook.calls.call_future import SENT, RequestFuture
from meshbook.calls.mailboxes import CallArguments, IncomingCall, Mailboxes, Outcome, pack, refusal
from meshbook.errors import Failure, MeshError, failure_of
from meshbook.lifecycle import CallEvent
from meshbook.source.location import drop_own_frames, name_place, traceback_entries
from meshbook.values.pickling import Pickled, dumps_here, loads
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.worker.actor_inbox import Inbox
from meshbook.worker.actors import ActorRegistry

END_S = 3.0
"""The time that actors of this process have to clean up when the session ends."""


class ClientProcess:
    """The controller's own process as a place for actors (`meshbook.worker.actor_runner.ActorProcess`)."""

    def __init__(self, give_up: Callable[[Callable[[wire.Call], bool], Outcome], None]) -> None:
        host = socket.gethostname()
        self.identity = wire.Identity(0, "", host, "cpu", 0, 1, 0, 1, 0, 1, (), (), 0)
        self.give_up = give_up

    def describe(self, error: BaseException) -> Failure:
        drop_own_frames(error)
        lines = [line.rstrip("\n") for line in traceback.format_exception(error)]
        where = [
            name_place(entry.tb_frame.f_code.co_filename, entry.tb_lineno)
            for entry in traceback_entries(error.__traceback__)
        ]
        place = where[-1] if where else ""
        return failure_of(error, 0, self.identity.host, lines, place)

    def dumps(self, value: object, *, what: str) -> Pickled:
        return dumps_here(value, what=what)

    def output_beside(self, output: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # it prints where the program does

    def end_child(self, failure: Failure | None) -> None:
        """A process that an actor forks here is the program's own to end."""

    def new_inbox(self) -> Inbox:
        return Inbox()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()


class ClientActors:
    """The actors of this process in one session, and the calls that it makes to them itself. On any thread."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        next_id: Callable[[], int],
        give_up: Callable[[Callable[[wire.Call], bool], Outcome], None],
    ) -> None:
        """give_up: answers open calls of ranks, as `meshbook.calls.mailboxes.IncomingCalls.give_up`."""
        self._mailboxes, self._next_id = mailboxes, next_id
        self._open: dict[int, IncomingCall] = {}

        def give_up_all(is_meant: Callable[[wire.Call], bool], answer: Outcome) -> None:
            for incoming in list(self._open.values()):
                if is_meant(incoming.call):
                    incoming.reply(answer)
            give_up(is_meant, answer)

        self._process = ClientProcess(give_up_all)
        self._registry = ActorRegistry(self._process, mailboxes, keeps_early=False)

    def call(self, request: CallRequest) -> Answers:
        """Call a mailbox of this process."""
        id = self._next_id()
        future: RequestFuture[Any] = RequestFuture(self._cancel, partial(
            OpenCall, id, 0, request.what, request.members, fail_fast=request.fail_fast, on_reply=request.on_reply,
            mailbox=request.mailbox, beside=request.beside,
        ))  # fmt: skip
        chain: tuple[int, ...] = ()
        if request.reply:
            future.name_in_chain = random.getrandbits(62)
            chain = (*context().chain, future.name_in_chain)
        call = wire.Call(
            id, 0, request.endpoint, request.members.encoded, label=request.what, mailbox=request.mailbox,
            reply=request.reply, chain=chain,
        )  # fmt: skip
        head, buffers = request.pickled.head, [bytearray(buffer) for buffer in request.pickled.buffers]

        def load() -> CallArguments:
            args: CallArguments = loads(head, buffers)
            return args

        incoming = IncomingCall(call, load, lambda: None, partial(self._answer, future.call))
        if request.reply:
            self._open[id] = incoming
        try:
            incoming.deliver(self._mailboxes.find(request.mailbox, 0))
        except Exception as error:
            incoming.reply(refusal(error, 0, self._process.identity.host))
            if not request.reply and isinstance(error, MeshError):
                raise
        return future if request.reply else SENT

    def _answer(self, call: OpenCall, answer: Outcome, duration_s: float) -> None:
        """Complete a call of ours. On the thread of the actor."""
        self._open.pop(call.id, None)
        kept: list[bytearray] = []

        def keep(buffers: Sequence[Buffer]) -> wire.SegmentRef:
            kept.extend(bytearray(buffer) for buffer in buffers)
            return _IN_MEMORY

        if answer.has_value and answer.failure is None and answer.pickled is None:
            with contextlib.suppress(MeshError):  # `pack` finds it out again, and says so
                answer = answer._replace(pickled=dumps_here(answer.value, what=answer.what))
        status, frames, inline, _ = pack(answer, keep, self._process.describe)
        reply = wire.RankReply(0, status, len(frames), duration_s, None, None, inline)
        call.answer(reply, [bytes(frame) for frame in frames], kept)
        call.settle()
        call.close(CallEvent.SETTLED)

    def _cancel(self, id: int) -> None:
        if (incoming := self._open.get(id)) is not None:
            incoming.cancel(insist=False)

    def end(self) -> None:
        """End all of them, before the session does: ``__cleanup__`` runs, and may still call meshes."""
        self._registry.end_all(END_S)


_IN_MEMORY = wire.SegmentRef(0, 0, 0, 0, ())
"""The placeholder for a segment: the values do not leave this process."""
