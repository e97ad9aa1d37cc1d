"""What the controller does for the ranks of one mesh that wait in vain, and for its process groups after.

    calls ──> CallQueue ──> ranks      what may not be sent yet queues (`meshbook.controller.call_queue`)
    CellRecovery, ActorRecovery        ask the ranks how far they are, and prove who is stuck: for calls to main
                                       threads and for those to mailboxes, who differ in who counts as idle
    GroupFormer                        aborts the groups, which frees the ranks, and forms them again

All states are those of `meshbook.lifecycle.GroupPhase` and `meshbook.lifecycle.GroupDoubt`, which the former keeps.
After each event the queue is looked through: any of them may have been what a call waited for. A dead rank aborts the
groups at once; they come back when it has been replaced (`GroupRecovery.form`).

Nothing here waits or locks: all of it runs under the turn of `meshbook.controller.io_turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshbook.calls.call import OpenCall
from meshbook.calls.table import CallTable
from meshbook.controller.actor_recovery import BACK_S, SETTLE_S, ActorRecovery
from meshbook.controller.call_queue import CallQueue, Unsent
from meshbook.controller.cell_recovery import DEADLINE_S, CellRecovery
from meshbook.controller.group_former import GroupFormer
from meshbook.controller.mesh_state import MeshState
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Agreements, Told
from meshbook.lifecycle import DoubtEvent, GroupPhase
from meshbook.shape.members import Members


class GroupRecovery:
    """Of one mesh."""

    def __init__(
        self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int], drop_prefix: Callable[[str], None]
    ) -> None:
        self._mesh, self._calls = mesh, calls
        self.agreements = Agreements()
        self._queue = CallQueue(self._must_wait, (SETTLE_S, SETTLE_S + BACK_S))
        self._former = GroupFormer(mesh, calls, self._queue, next_id, drop_prefix, self)
        self._cells = CellRecovery(self._former, self.agreements)
        self._actors = ActorRecovery(self._former, self.agreements)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send a new call, or a message that nobody answers, now or when it meets no failed one."""
        self._queue.send(mailbox, members, transmit, call)

    def _must_wait(self, new: Unsent) -> bool:
        if new.mailbox:
            return self._actors.must_wait(new)
        drains = self._former.phase is GroupPhase.DRAINING
        return drains or self._cells.must_wait(new) or self._actors.is_unsettled(new.ranks)

    def cancel(self, call: OpenCall) -> bool:
        """Somebody asked for the end of a call. True: it still queued here, and has ended now."""
        call.cancel()
        if not call.mailbox:
            self._former.cancel_forming(older_than_s=DEADLINE_S)  # what was cancelled waits behind it
        if dropped := self._queue.drop(call):
            self._calls.settle_if_done(call)
        elif call.waiting and not self._former.is_own(call):
            self._watch(call)
            self._queue.release()
        return dropped

    def on_told(self, call: OpenCall, rank: int, told: Told) -> None:
        """Take in what came with an answer of ``rank`` about its groups."""
        self.agreements.compare(rank, told)
        if told.broken:
            self._former.note(DoubtEvent.TOLD)
            if call.mailbox:
                self._actors.note_uneven()
        for each in self._cells.ended_on(call):
            copied = () if each.mailbox and not self._mesh.lost else told.copied
            each.tear(rank, (*told.torn, *copied), told.restored)

    def watch(self, call: OpenCall) -> bool:
        """A rank has answered, or was lost; True when a call that has ended everywhere completes later."""
        if self._former.is_own(call):
            self._former.watch(call)
            return False
        later = self._watch(call) if not (call.waiting and self._queue.holds(call)) else False
        self._queue.release()
        return later

    def _watch(self, call: OpenCall) -> bool:
        return self._actors.watch(call) if call.mailbox else self._cells.watch(call)

    # ---- the clock ------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        return min(self._cells.due, self._actors.due, self._former.due, self._queue.due)

    def expire(self, now: float) -> None:
        """Do what is due."""
        self._cells.expire(now)
        self._actors.expire(now)
        self._former.expire(now)
        self._queue.release()

    # ---- groups ---------------------------------------------------------------------------------------------------

    def abort(self, reason: str, ranks: Collection[int] | None = None) -> None:
        """Abort the groups of all ranks; they are formed again when the calls that run have ended.

        ranks: other ones that run calls keep theirs until then.
        """
        self._former.reset(reason, spare=() if ranks is None else self._former.current().keys() - set(ranks))

    def form(self, call: OpenCall) -> None:
        """Form the groups, in place where there are some; ``call`` is what the caller waits for."""
        self._former.form(call)
        self._queue.release()

    def on_lost(self) -> None:
        """A rank ended: nothing that includes it can be served any more. `MeshState.lost` has it already."""
        lost = self._mesh.lost
        self._cells.on_lost()
        current = self._former.current().items()
        innocent = {rank for rank, call in current if not any(call.members.has(each) for each in lost)}
        ways_out = f"repair: {advice().heal_call}    without it: {advice().shrink}"
        self._former.reset(f"{name_ranks(lost)} ended\n  {ways_out}", spare=innocent)
        self._queue.release()

    def stop(self) -> None:
        """The mesh is being stopped, or left."""
        self._queue.clear()
        self._cells.stop()
        self._actors.stop()

    # ---- what the former tells (`meshbook.controller.group_former.GroupOwner`) ------------------------------------

    def on_aborted(self) -> None:
        """Groups are being aborted."""
        self._cells.poll.forget_suspects()
        self._actors.poll.forget_suspects()

    def on_formed(self) -> None:
        """Groups are formed, or will not come back by themselves."""
        self._cells.on_formed()
        self._queue.release()

    def look_in(self, pause_s: float) -> None:
        """Have ranks asked after ``pause_s``."""
        self._cells.poll.look_in(pause_s)
