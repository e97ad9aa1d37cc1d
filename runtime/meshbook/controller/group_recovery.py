"""The controller's help for ranks of one mesh that wait in vain, and for the mesh's process groups afterwards.

    calls ──> CallQueue ──> ranks      calls that may not be sent yet queue (`meshbook.controller.call_queue`)
    StuckWatch                         asks the ranks how far they are, and proves who is stuck
    GroupFormer                        aborts the groups, which frees the ranks, and forms them again

All states are those of `meshbook.lifecycle.GroupPhase` and `meshbook.lifecycle.GroupDoubt`, which the former keeps.
After each event the queue is looked through: any of them may have been the one that a call waited for. A dead rank
aborts the groups at once; they come back when it has been replaced (`GroupRecovery.form`).

Nothing here waits or locks: all of it runs under the turn of `meshbook.controller.io_turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshbook.calls.call import OpenCall
from meshbook.calls.table import CallTable, OnStates, OpenQuestion
from meshbook.controller.call_queue import CallQueue
from meshbook.controller.group_former import UNSOUND
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import put
from meshbook.controller.stuck_watch import BACK_S, DEADLINE_S, SETTLE_S, StuckWatch
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Agreements, decode_told
from meshbook.lifecycle import DoubtEvent
from meshbook.shape.members import Members
from meshbook.wire import messages as wire


class GroupRecovery:
    """The queue, the watch and the former of one mesh."""

    def __init__(
        self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int], drop_prefix: Callable[[str], None]
    ) -> None:
        self._mesh, self._calls, self._next_id = mesh, calls, next_id
        self.agreements = Agreements()
        self._queue = CallQueue(lambda new: self._watch.must_wait(new), (SETTLE_S, SETTLE_S + BACK_S))
        self._watch = StuckWatch(mesh, calls, self._queue, self.agreements, next_id, drop_prefix)
        self._former = self._watch.former

    # ---- calls ----------------------------------------------------------------------------------------------------

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send a new call, or a message without an answer, now or when it meets no failed one."""
        if self._watch.begin(call) and not self._queue.queued:  # the path of nearly all calls
            transmit()
        else:
            self._queue.send(mailbox, members, transmit, call)

    def cancel(self, call: OpenCall) -> bool:
        """Cancel a call. Return True if it still queued here, and has ended now."""
        call.cancel()
        if not call.mailbox:
            self._former.cancel_forming(older_than_s=DEADLINE_S)  # what was cancelled waits behind it
        if dropped := self._queue.drop(call):
            self._calls.settle_if_done(call)
        elif call.waiting and call.id not in self._former.own:
            self._watch.watch(call)
            self._queue.release()
        return dropped

    def on_told(self, call: OpenCall, rank: int, encoded: bytes) -> None:
        """Take in the report on a rank's groups that came with its answer."""
        told = decode_told(encoded)
        self.agreements.compare(rank, told)
        if told.broken:
            self._former.note(DoubtEvent.TOLD)
            if call.mailbox:
                self._watch.note_uneven()
        for each in self._watch.ended_on(call):
            copied = () if each.mailbox and not self._mesh.lost else told.copied
            each.tear(rank, (*told.torn, *copied), told.restored)

    def watch(self, call: OpenCall) -> bool:
        """Take in that a rank has answered or was lost; return True if a call that has ended everywhere completes
        later."""
        is_own = call.id in self._former.own
        if not self._queue.queued:  # the path of nearly all answers
            if call.waiting and not (is_own or call.failures or call.lost or call.cancelled):
                self._watch.suspect(call)
                return False
            if not call.waiting and self._watch.has_ended_well(call):
                return False
        if is_own:
            self._former.watch(call)
            return False
        later = self._watch.watch(call) if not (call.waiting and self._queue.holds(call)) else False
        self._queue.release()
        return later

    def ask_states(self, ranks: Collection[int], timeout_s: float, on_done: OnStates) -> None:
        """Ask for states as `StateSource`, behind the calls, so that ranks which have not got theirs yet run then."""
        question = OpenQuestion(
            self._next_id(), self._mesh.id, wire.ProcessState, timeout_s, lambda done: on_done(done.told)
        )
        asked = wire.AskProcesses(in_order=True)
        put(self._calls, question, self._mesh, self._mesh.by_host(ranks), asked, in_order=True)

    # ---- the clock ------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """Return when `expire` is due."""
        due = self._watch.due
        if self._queue.queued or self._former.phase in UNSOUND:
            due = min(due, self._former.due, self._queue.due)
        return due

    def expire(self, now: float) -> None:
        """Take the steps that are due."""
        self._watch.expire(now)
        self._former.expire(now)
        self._queue.release()

    # ---- groups ---------------------------------------------------------------------------------------------------

    def abort(self, reason: str, ranks: Collection[int] | None = None) -> None:
        """Abort the groups of all ranks; they are formed again when the calls that run have ended. ranks: if given,
        other ranks that run calls keep their groups until then."""
        self._former.reset(reason, spare=() if ranks is None else self._former.current().keys() - set(ranks))

    def form(self, call: OpenCall) -> None:
        """Form the groups, in place where there are some; the caller waits for ``call``."""
        self._former.form(call)
        self._queue.release()

    def on_lost(self) -> None:
        """Abort the groups of a rank that ended: nothing that includes it can be served. `MeshState.lost` has it
        already."""
        lost = self._mesh.lost
        self._watch.on_lost()
        current = self._former.current().items()
        innocent = {rank for rank, call in current if not any(call.members.has(each) for each in lost)}
        ways_out = f"repair: {advice().heal_call}    without it: {advice().shrink}"
        self._former.reset(f"{name_ranks(lost)} ended\n  {ways_out}", spare=innocent)
        self._queue.release()

    def stop(self) -> None:
        """Stop, since the mesh is being stopped, or left."""
        self._queue.clear()
        self._watch.stop()
