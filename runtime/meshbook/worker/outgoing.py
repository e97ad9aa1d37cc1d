"""The calls that a worker has made to mailboxes: the same `OpenCall` and future as on the controller.

Any thread makes calls; answers come in on the thread of the mail, which alone completes futures.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from meshbook.calls.answer import Unavailable
from meshbook.calls.call import CallFuture, OpenCall
from meshbook.calls.rank_state import Reactions, SilenceCause, no_reactions
from meshbook.calls.table import CallTable
from meshbook.concurrency.future import Future
from meshbook.errors import Failure, MeshError
from meshbook.shape.generations import AS_NOW
from meshbook.shape.members import Members
from meshbook.values.pickling import Pickled
from meshbook.wire import messages as wire
from meshbook.worker.channel import AgentChannel
from meshbook.worker.payloads import RankPayloads

T = TypeVar("T")

LOOK_S = 0.1
"""Who waits for room looks so often for what else may want the thread."""


class MailFuture(CallFuture[T]):
    """The future of a worker's call. An interrupt while waiting cancels the call, and passes."""

    def get(self, timeout: float | None = None) -> T:
        """Wait for all ranks and return their values.

        timeout: seconds. Raises: CallFailed, WorkerLost, CallTimeout; KeyboardInterrupt, at once.
        """
        self._timeout_s = timeout
        try:
            return Future.get(self, timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        """Wait without blocking the running asyncio loop; cancelling the task ends the wait, not the work."""
        return (yield from Future.__await__(self))


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

    def call(
        self,
        mesh_id: int,
        members: Members,
        mailbox: int,
        endpoint: str,
        pickled: Pickled,
        *,
        what: str,
        output: int = 0,
        on_reply: Callable[[int, bool, float, Failure | None, float], None] | None = None,
        fail_fast: bool = True,
        chain: tuple[int, ...] = (),
        generation: int = AS_NOW,
    ) -> CallFuture[Any]:
        """Call a mailbox of ``members`` of any mesh; as `meshbook.controller.controller.Controller.call`."""
        future: MailFuture[Any] = MailFuture(self, partial(
            OpenCall, next(self._ids), mesh_id, what, members,
            fail_fast=fail_fast, on_reply=on_reply, mailbox=mailbox,
        ))  # fmt: skip
        call = future.call
        self._wait_for_room(mesh_id, members)
        self._table.open(call, None)
        try:
            self._send(
                call.id,
                mesh_id,
                members,
                mailbox,
                endpoint,
                pickled,
                what=what,
                output=output,
                chain=chain,
                generation=generation,
            )
        except BaseException:
            self._table.disown(call)
            raise
        return future

    def post(
        self,
        mesh_id: int,
        members: Members,
        mailbox: int,
        endpoint: str,
        pickled: Pickled,
        *,
        output: int = 0,
        generation: int = AS_NOW,
    ) -> None:
        """Send a message that nobody answers; whoever ends before it has come there does not get it."""
        self._wait_for_room(mesh_id, members)
        self._send(
            next(self._ids),
            mesh_id,
            members,
            mailbox,
            endpoint,
            pickled,
            output=output,
            reply=False,
            generation=generation,
        )

    def _send(
        self,
        id: int,
        mesh_id: int,
        members: Members,
        mailbox: int,
        endpoint: str,
        pickled: Pickled,
        *,
        what: str = "",
        output: int = 0,
        reply: bool = True,
        chain: tuple[int, ...] = (),
        generation: int = AS_NOW,
    ) -> None:
        assert mailbox, "the endpoints of a process are for its controller"
        head, buffers = pickled
        inline, payload = (head, []) if len(head) <= wire.INLINE_MAX_BYTES else (b"", [head])
        message = wire.Call(
            id, mesh_id, endpoint, members.encode(), output, inline=inline, label=what, mailbox=mailbox, reply=reply,
            segment=self._payloads.pool.write(buffers) if buffers else None, chain=chain, generation=generation,
        )  # fmt: skip
        self._payloads.tell_freed()
        self._channel.send(message, payload)

    def _wait_for_room(self, mesh_id: int, members: Members) -> None:
        """Wait while too much waits for one of ``members``. In short steps, in which the thread can be interrupted."""
        if not self._held or threading.get_ident() == self.reader:
            return
        with self._room:
            while any((mesh_id, rank) in self._held for rank in members.ranks()):
                self._room.wait(LOOK_S)

    def hold(self, hold: wire.MailHold) -> None:
        """Some ranks read too slowly, or are ready for more."""
        named = {(hold.mesh, rank) for rank in hold.ranks}
        with self._room:
            self._held = self._held | named if hold.held else self._held - named
            self._room.notify_all()

    # ---- what futures need (`meshbook.calls.call.CallControl`) -------------------------------------------------------

    def cancel(self, id: int, *, insist: bool = False, ranks: Collection[int] | None = None) -> None:
        """Ask for the end of a call on all of its members that have not answered."""
        if (call := self._table.find(id)) is not None:
            self._channel.send(wire.Cancel(call.mesh, id, call.members.encode(), insist))

    def drive(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Nothing: the mail has a thread of its own."""

    def wants_person(self, call: OpenCall) -> bool:
        """No person waits in a worker."""
        return False

    def attend(self, call: OpenCall) -> None:
        """Nothing."""

    def reactions(self, mesh_id: int, ranks: Iterable[int], timeout_s: float) -> Reactions:
        """Workers do not look at each other."""
        return no_reactions(ranks, SilenceCause.NOT_ASKED)

    def free_groups(self, mesh_id: int, ranks: Iterable[int]) -> None:
        """Process groups are the controller's to abort."""

    def open_calls(self, mesh_id: int) -> list[OpenCall]:
        """The calls that some rank has not answered, oldest first."""
        return [call for call in self._table.all() if call.mesh == mesh_id]

    # ---- the thread of the mail ---------------------------------------------------------------------------------

    def on_replies(self, message: wire.Replies, frames: Sequence[bytes]) -> None:
        """Answers have come."""
        self._table.answer(message, frames, [self._buffers(reply) for reply in message.replies])

    def _buffers(self, reply: wire.RankReply) -> Sequence[Any]:
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
