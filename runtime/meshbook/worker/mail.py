"""The mail of a worker: calls that it makes itself, the same `OpenCall` as on the controller, and a thread of its own
that hands the calls of others to mailboxes (`meshbook.calls.mailboxes`). The reader completes futures.

The thread starts with the first message; before that a process has no such thread. It never runs user code and never
waits for anything but its socket. An actor that is idle reads in its place (`meshbook.worker.mail_turn`).
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from meshbook.calls.call import CallRequest, OpenCall
from meshbook.calls.call_future import SENT, RequestFuture
from meshbook.calls.mailboxes import IncomingCall, IncomingCalls, Outcome, Unavailable, pack
from meshbook.calls.table import CallTable
from meshbook.concurrency import forks
from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import STEP_S, gate_of_this_thread
from meshbook.errors import MeshError
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.replies import place_head
from meshbook.worker.channel import AgentChannel, RankPayloads
from meshbook.worker.direct_calls import CalleeLink, CalleeLinks, RankLinks
from meshbook.worker.mail_turn import MailTurn

T = TypeVar("T")
LOOK_S = 0.1  # a caller that waits for room looks so often for interrupts


class MailFuture(RequestFuture[T], Generic[T]):
    """The future of a call that a worker has made: an actor's thread that waits for it reads the mail meanwhile."""

    def __init__(
        self, turn: MailTurn, cancel: Callable[[int], object], open_call: Callable[[Future[T]], OpenCall]
    ) -> None:
        super().__init__(cancel, open_call)
        self._turn = turn

    def wait(self, timeout: float | None = None) -> bool:
        if (gate := gate_of_this_thread()) is None:
            return super().wait(timeout)
        until = None if timeout is None else time.monotonic() + timeout

        def waits() -> bool:
            return not (self.done() or gate.has_held_back or (until is not None and time.monotonic() >= until))

        with gate:  # so an interrupt comes when the turn is over
            self._turn.read_while(waits, STEP_S if timeout is None else min(STEP_S, max(timeout, 0.0)))
        return super().wait(None if until is None else max(0.0, until - time.monotonic()))

    def __await__(self) -> Generator[object, None, T]:
        if threading.get_ident() not in self._turn.loops:
            self._turn.hand_back()
        return super().__await__()

    def _is_served_by(self, thread: int) -> bool:
        return thread == self._turn.reader == threading.get_ident()


class WorkerMail:
    """The mail of a worker. Any thread may use it, but for methods of the reader.

    identity: the worker's present identity. on_call: called with each call before its mailbox. tell_groups: the report
    on process groups for answers to the controller.
    """

    def __init__(
        self,
        channel: AgentChannel,
        payloads: RankPayloads,
        identity: Callable[[], wire.Identity],
        on_call: Callable[[wire.Call], None],
        tell_groups: Callable[[], bytes],
    ) -> None:
        self._channel, self._payloads, self._identity = channel, payloads, identity
        self._on_call, self._tell_groups = on_call, tell_groups
        self._incoming = IncomingCalls()
        self.boxes, self.give_up = self._incoming.boxes, self._incoming.give_up
        self._table = CallTable({})  # the calls of this worker that are not answered
        self._ids = itertools.count((os.getpid() << 32) + 1)  # never those of a process that had our rank
        # ids of calls that other code than an actor's thread, or its event loop, may wait for
        self._others: set[int] = set()
        self._room = threading.Condition()
        self._held: frozenset[tuple[int, int]] = frozenset()  # (mesh, rank) for which too much waits
        ids = self._table.ids
        self.turn = MailTurn(channel, self._read, self._expire, self.boxes.numbers, ids, self._others)
        watch, forget = self.turn.watch, self.turn.forget
        self.direct = CalleeLinks(identity, channel.send, self._on_direct, watch, forget, is_mail=True)
        self._links = RankLinks(channel.send, self._on_replies, identity, watch, forget)
        self._said = 0  # how many messages were sent on this lane that the agent is to pass on before later answers
        self._starting = threading.Lock()
        self._started = False
        self._generation = forks.generation

    def call(self, request: CallRequest, *, output: int = 0, chain: tuple[int, ...] = ()) -> RequestFuture[Any]:
        """Call a mailbox (not 0) of any mesh of the session. output, chain: see `wire.Call`."""
        assert request.mailbox, "the endpoints of a process are for its controller"
        if request.reply:
            self.start()
        self._wait_for_room(request)
        if not request.reply:
            self._send(next(self._ids), request, output, chain)
            return SENT
        future: MailFuture[Any] = MailFuture(self.turn, self._cancel, partial(
            OpenCall, next(self._ids), request.mesh, request.what, request.members,
            fail_fast=request.fail_fast, on_reply=request.on_reply, mailbox=request.mailbox,
        ))  # fmt: skip
        call = future.call
        self._table.open(call, None)
        if request.on_reply is not None or gate_of_this_thread() is None:  # it may wait otherwise than `MailFuture`
            self._others.add(call.id)
            self.turn.hand_back()
        try:
            self._send(call.id, request, output, chain)
        except BaseException:
            self._table.disown(call)
            raise
        return future

    def _send(self, id: int, request: CallRequest, output: int, chain: tuple[int, ...]) -> None:
        inline, payload = place_head(request.pickled.head)
        buffers = request.pickled.buffers
        message = wire.Call(
            id, request.mesh, request.endpoint, request.members.encoded, output, inline=inline,
            label=request.what if request.reply else "", mailbox=request.mailbox, reply=request.reply,
            segment=self._payloads.pool.write(buffers) if buffers else None, chain=chain,
            generation=request.generation, origin=self._links.origin,
        )  # fmt: skip
        self._payloads.tell_freed()
        with self._channel.shield:
            self._links.send(message, payload, request.members)

    def _wait_for_room(self, request: CallRequest) -> None:
        """Wait while too much waits for one of the members. In short steps, in which the thread can be interrupted."""
        if not self._held or threading.get_ident() == self.turn.reader:
            return
        with self._room:
            while any((request.mesh, rank) in self._held for rank in request.members.ranks()):
                self._room.wait(LOOK_S)

    def hold(self, hold: wire.MailHold) -> None:
        """Take in that some ranks read too slowly, or are ready for more."""
        named = {(hold.mesh, rank) for rank in hold.ranks}
        with self._room:
            self._held = self._held | named if hold.held else self._held - named
            self._room.notify_all()

    def _cancel(self, id: int) -> None:
        """Ask for the end of a call on all of its members that have not answered."""
        if (call := self._table.find(id)) is not None:
            cancel = wire.Cancel(call.mesh, id, call.members.encoded, False, is_mail=True)
            if not self._links.cancel(cancel):
                self._channel.send(cancel)

    def start(self) -> None:
        """Start to read the mail. Any thread may call it, any number of times."""
        if self._started:
            return
        with self._starting:
            if self._started:
                return
            self._started = True
        hidden_thread(self._serve, "meshbook.mail").start()

    def open_direct(self, folder: str, *, controller_is_here: bool) -> None:
        """Let direct links be made from now on. folder, controller_is_here: see `wire.Begin`."""
        self.direct.open(folder, controller_is_here=controller_is_here)
        self._links.open(folder)

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it must wake the main thread
        self.turn.serve()

    def _read(self) -> bool:
        """Take the next message; return False at the end."""
        if (received := self._channel.receive(is_there=True)) is None:
            return False
        message, frames = received
        try:
            match message:
                case wire.Call():
                    self.direct.serve_all()  # what has come by links was sent before
                    self.direct.note(message)
                    if not message.direct or self.direct.is_news(message):
                        self._deliver(message, frames)
                case wire.Replies():
                    if (call := self._table.find(message.id)) is not None:
                        self._links.hear(call, message)
                    self._on_replies(message, frames)
                case wire.Cancel():
                    self.direct.serve_all()
                    self._incoming.cancel(message)
                case other:
                    raise AssertionError(f"{other!r} does not belong on the mail socket")
        except BrokenPipeError:
            return False  # the agent is gone: the control thread sees to the rest
        except Exception:
            traceback.print_exc()  # a fault of ours, or of a hook: it costs this message, not the mail
        return True

    def _on_direct(self, link: CalleeLink, message: wire.Call | wire.Cancel, frames: list[bytes]) -> None:
        try:
            if isinstance(message, wire.Call):
                self._deliver(message, frames, link)
            else:
                self._incoming.cancel(message)
        except Exception:
            traceback.print_exc()  # as in `_read`

    def _deliver(self, call: wire.Call, frames: list[bytes], link: CalleeLink | None = None) -> None:
        here = self._identity()
        incoming = IncomingCall(
            call,
            partial(self._payloads.load, call, frames, here),
            partial(self._payloads.discard, call),
            partial(self._reply, call, link, self._said),
        )
        self._on_call(call)
        self._incoming.deliver(incoming, here.rank, here.host)

    def _on_replies(self, message: wire.Replies, frames: Sequence[bytes]) -> None:
        """Take answers to calls of this worker."""
        buffers = [self._buffers(reply) for reply in message.replies]  # also where nobody waits: that gives them back
        if (call := self._table.find(message.id)) is not None:
            self._table.answer(call, message, frames, buffers)

    def _buffers(self, reply: wire.RankReply) -> Sequence[object]:
        try:
            return self._payloads.map(reply.segment)
        except MeshError as error:
            return Unavailable(error)

    def _expire(self) -> float | None:
        """Fail calls that are overdue; return in how many seconds to come again, None for never."""
        if not self._table.ids:
            return None
        if (due := self._table.next_deadline()) == float("inf"):
            return None
        if (left := due - time.monotonic()) > 0:
            return left
        self._table.expire()
        return self._expire()

    def send(self, message: wire.FromWorker, payload: Sequence[Buffer] = ()) -> None:
        """Send a message on this lane, in order with the replies of the calling thread. Any thread."""
        self._said += 1
        self._channel.send(message, payload)

    def close(self) -> None:
        """Let go of the socket, which is the parent's, in a forked child."""
        self._channel.close()
        self.direct.abandon()
        self._links.abandon()

    def _reply(self, call: wire.Call, link: CalleeLink | None, said: int, answer: Outcome, duration_s: float) -> None:
        """Send an answer; any thread. link: the direct link by which the call came. said: `_said` at that time."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        self._incoming.open.pop((call.origin, call.id), None)
        groups = self._tell_groups() if call.origin is None else b""  # those who call from ranks do not compare
        status, payload, inline, segment = pack(answer, self._payloads.pool.write, self._payloads.describe)
        is_first = link is not None and segment is None and said == self._said
        freed = () if is_first else self._payloads.take_freed()
        reply = wire.Reply(call.id, status, duration_s, segment, inline, 0.0, call.origin, groups, freed)
        if link is None:
            self._channel.send(reply, payload)
        else:
            with self._channel.shield:
                self.direct.answer(link, reply, payload, may_pass=is_first)
