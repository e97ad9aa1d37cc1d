"""The process groups of one mesh, as its controller knows them: aborted, and formed again in place. Under the turn.

Aborting frees every rank that waits in operations; forming makes the same groups anew under a new epoch, so that all
handles stay good. `meshbook.controller.group_recovery` decides whether groups are to be aborted; here it is done, in an
order that matters:

    1  phase first     decisions while messages are under way must find the groups aborted already
    2  then the calls  a GroupAborted that comes back is no failure of its rank, if the call knows of the abort
    3  then the ranks  urgently, so before any call that is sent after
    4  then the store  a rank that waits there, still forming, is answered with an error and comes back too
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshbook.calls.call import OpenCall
from meshbook.calls.table import CallTable
from meshbook.concurrency.future import Future
from meshbook.controller.call_queue import CallQueue
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.progress_poll import FIRST_LOOK_S, ProgressPoll, ProgressSnapshot
from meshbook.errors import FailureKind, MeshStoppedError, WorkerLost
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.deadlock import differing_groups
from meshbook.lifecycle import (
    DOUBT_NEXT,
    GROUP_NEXT,
    DoubtEvent,
    GroupDoubt,
    GroupEvent,
    GroupPhase,
    MeshPhase,
)
from meshbook.shape.members import Region
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire

LATE_S = 1.0  # the ranks are asked which have not come when forming takes longer than this
FORM_S = 10.0  # time for ranks to form groups again; then they are asked to give up


class _Forming:
    """An attempt to form the groups."""

    def __init__(self, call: OpenCall, epoch: int, give_up_at: float) -> None:
        self.call, self.epoch, self.give_up_at = call, epoch, give_up_at
        self.began_at = time.monotonic()
        self.late: Collection[int] = call.waiting  # ranks that have not come
        self.why = ""  # why the attempt was given up

    def describe_failure(self) -> str:
        """Return the reason that a rank gives why it could not form them; empty where none does."""
        told = next((each for each in self.call.failures if each.kind is FailureKind.NOT_FORMED), None)
        return told.evalue.splitlines()[0] if told is not None else ""


UNSOUND = (GroupPhase.ABORTED, GroupPhase.DRAINING, GroupPhase.FORMING)  # phases in which the groups cannot be used


class GroupFormer:
    """The state of the groups, and the attempt to form them that is under way."""

    def __init__(
        self,
        mesh: MeshState,
        calls: CallTable,
        queue: CallQueue,
        poll: ProgressPoll,
        next_id: Callable[[], int],
        on_formed: Callable[[], None],
    ) -> None:
        """on_formed: called when they are formed, or will not come back by themselves."""
        self._mesh, self._calls, self._queue, self._next_id = mesh, calls, queue, next_id
        self._poll, self._tell_formed = poll, on_formed
        self.phase = GroupPhase.NONE
        self.doubt = GroupDoubt.NONE
        self.why = ""  # why the groups are missing, or not known to be sound; kept from the abort until they are formed
        self.only: set[str] = set()  # names of the groups that were aborted; all of them where it is empty
        self._forming: _Forming | None = None
        self.own: set[int] = set()  # ids of the open calls to main threads that were made here
        self._epochs: set[int] = set()  # epochs that may have left keys in the store

    # ---- what is known ------------------------------------------------------------------------------------------

    @property
    def is_aborted(self) -> bool:
        """Whether the groups are to be formed again, and are not being formed yet."""
        return self.phase in (GroupPhase.ABORTED, GroupPhase.DRAINING)

    @property
    def is_sound(self) -> bool:
        """Whether the groups can be used, or there are none."""
        return self.phase not in UNSOUND

    def running(self) -> list[OpenCall]:
        """Return the calls that main threads run, or will run next, in the order of sending."""
        calls = self._calls.running(self._mesh.id)
        return [call for call in calls if call.id not in self.own and not self._queue.holds(call)]

    def current(self) -> dict[int, OpenCall]:
        """Return the call that each busy rank runs now."""
        return {rank: call for call in reversed(self.running()) for rank in call.waiting}

    def note(self, event: DoubtEvent) -> None:
        """Take in an event about whether the groups are sound."""
        self.doubt = DOUBT_NEXT[self.doubt, event]
        if event in (DoubtEvent.COMPARED, DoubtEvent.COMPARED_PARTLY, DoubtEvent.FORMED):
            self.why = ""

    def on_look(self, look: ProgressSnapshot) -> None:
        """Take in the ranks' reports on their groups."""
        self._epochs.update(told.epoch for told in look.answers.values() if told.epoch >= 0)
        if self._forming is not None:
            id = self._forming.call.id
            self._forming.late = self._forming.call.waiting - {r for r, told in look.answers.items() if told.call == id}
            if (left_s := self._forming.began_at + LATE_S - time.monotonic()) > 0:
                self._poll.look_in(left_s)
        if self.phase in (GroupPhase.NONE, GroupPhase.SOUGHT):
            are_there = any(told.groups for told in look.answers.values())
            self.phase = GROUP_NEXT[self.phase, GroupEvent.FOUND if are_there else GroupEvent.MISSED]
            if self.is_aborted:  # as was wanted before it was known whether there are any
                self._carry_out({}, (), ())
            else:
                self.why = ""

    # ---- aborting -------------------------------------------------------------------------------------------------

    def abort(
        self,
        reason: str,
        *,
        places: Mapping[int, str] | None = None,
        spare: Collection[int] = (),
        groups: Collection[str] = (),
        drain: bool = False,
    ) -> None:
        """Abort the groups of all ranks, or of as many as can be.

        places: where ranks are stuck. spare: ranks that keep theirs for now, for the sake of the calls that they run.
        groups: only these, if any are given. drain: they are formed again by `end_draining`, not before.
        """
        self.only = {*self.only, *groups} if groups and (self.only or self.is_sound) else set()
        self.phase = GROUP_NEXT[self.phase, GroupEvent.DRAIN if drain else GroupEvent.ABORT]
        self.why = reason
        if self.is_aborted:
            self._carry_out(places or {}, spare, groups)

    def reset(self, reason: str, spare: Collection[int] = ()) -> None:
        """Abort groups, as `abort`, and form them again as soon as nothing runs that was begun before."""
        self.abort(reason, spare=spare)
        self.form_if_free()
        if self.phase is GroupPhase.SOUGHT:
            self._poll.look_in(0.0)
        elif self.is_aborted:
            self._poll.look_in(FIRST_LOOK_S)

    def _carry_out(self, places: Mapping[int, str], spare: Collection[int], groups: Collection[str]) -> None:
        self._poll.odd = []  # the next ones count from the start
        self.note(DoubtEvent.ABORTED)
        for call in self.running():
            call.abort(places)
        if self._forming is not None:
            self._forming.call.abort()
        self._tell_to_abort(spare, groups)
        if not spare and not groups:
            self._drop_keys(self._epochs)

    def _tell_to_abort(self, spare: Collection[int] = (), groups: Collection[str] = (), why: str = "") -> None:
        mesh = self._mesh
        target = [rank for rank in range(mesh.extent.nelements) if rank not in mesh.lost and rank not in spare]
        if target:
            encoded = Region.of(mesh.extent).select(target).encoded
            self._mesh.tell(wire.AbortGroups(mesh.id, encoded, self._next_id(), why or self.why, tuple(groups)))

    def end_draining(self) -> None:
        """End draining: the actors that were freed have come back, or had the time to."""
        if self.phase is GroupPhase.DRAINING:
            self.phase = GROUP_NEXT[self.phase, GroupEvent.DRAINED]

    # ---- forming --------------------------------------------------------------------------------------------------

    def form_if_free(self, look: ProgressSnapshot | None = None) -> None:
        """Form the groups again, once no rank runs anything that was begun before. look: taken now. If only some groups
        were aborted there must be one: more of them may be of no use by now."""
        if self.phase is not GroupPhase.ABORTED or self._forming is not None or self._mesh.lost or self.running():
            return
        if self.only:
            if look is None or any(told.call for told in look.answers.values()):
                self._poll.look_in(0.0)
                return
            self.only.update(odd.name for odd in differing_groups(look.answers) if odd.is_certain)
        self.form(forming_call(self._next_id(), self._mesh, Future()), time.monotonic() + FORM_S, self.only)

    def form(self, call: OpenCall, give_up_at: float = math.inf, groups: Collection[str] = ()) -> None:
        """Form the groups, or only ``groups``, under a new epoch, in place where there are some, by ``call``."""
        mesh = self._mesh
        if mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            call.give_up(MeshStoppedError(mesh.name))
            return
        if mesh.lost:
            call.give_up(WorkerLost.of(mesh.lost.values()))
            return
        self.phase = GROUP_NEXT[self.phase, GroupEvent.FORM]
        epoch = self._next_id()
        self._epochs.add(epoch)
        self.only = set(groups)
        forming = self._forming = _Forming(call, epoch, give_up_at)
        self._poll.look_in(LATE_S)
        call.when_settled(lambda error: self._on_formed(forming, error))
        self._transmit(call, "form_group", (epoch, tuple(groups)))
        if mesh.axes != dict(mesh.extent) and math.prod(mesh.axes.values()) == mesh.extent.nelements:
            # forming binds `mesh` and `point` to the mesh's own axes: back to those that the person chose
            naming = forming_call(self._next_id(), mesh, Future())
            self._transmit(naming, "set_axes", (tuple(mesh.axes), tuple(mesh.axes.values())))

    def _transmit(self, call: OpenCall, endpoint: str, args: tuple[Any, ...]) -> None:
        self.own.add(call.id)
        call.when_ended(lambda: self.own.discard(call.id))
        self._calls.open(call, None)
        pickled = dumps((args, {}), what=call.what).head
        message = wire.Call(call.id, self._mesh.id, endpoint, call.members.encoded, inline=pickled, label=call.what)
        for host in self._mesh.hosts:
            host.send(message)

    def watch(self, call: OpenCall) -> None:
        """Abort the attempt to form groups if a rank has failed it: the others wait for that rank."""
        forming = self._forming
        if forming is not None and call is forming.call and call.failed and call.waiting and not call.aborted:
            call.abort()
            self._tell_to_abort(why=forming.describe_failure() or cause_of(call))
            self._drop_keys(self._epochs)

    @property
    def due(self) -> float:
        """Return when `expire` is due."""
        return self._forming.give_up_at if self._forming is not None else math.inf

    def expire(self, now: float) -> None:
        """Have ranks give up forming when the time is over."""
        if self.due <= now:
            self.cancel_forming()

    def cancel_forming(self, older_than_s: float = 0.0) -> None:
        """Have ranks give up forming, if the attempt has a limit and has lasted so long."""
        forming = self._forming
        if forming is None or forming.give_up_at == math.inf or time.monotonic() < forming.began_at + older_than_s:
            return
        forming.give_up_at = math.inf
        self.why = forming.why = f"{self.name_late()} did not come"
        self._mesh.tell(wire.Cancel(self._mesh.id, forming.call.id, forming.call.members.encoded))

    def is_forming(self, call: OpenCall) -> bool:
        """Whether ``call`` is the attempt that is under way."""
        return self._forming is not None and call is self._forming.call

    def name_late(self) -> str:
        """Name the ranks that have not come to form groups; empty where none are being formed."""
        return name_ranks(self._forming.late or self._forming.call.waiting) if self._forming is not None else ""

    def _on_formed(self, forming: _Forming, error: BaseException | None) -> None:
        if forming is not self._forming:
            return  # there is a newer attempt
        self._forming = None
        if self.phase is not GroupPhase.FORMING:  # aborted meanwhile
            self.form_if_free()
            return
        self.phase = GROUP_NEXT[self.phase, GroupEvent.FAILED if error else GroupEvent.FORMED]
        if error is None:
            self.note(DoubtEvent.FORMED)
            if not self.only:
                self._drop_keys({old for old in self._epochs if old < forming.epoch})
        else:
            why = forming.why or forming.describe_failure() or self.why or error
            self.why = f"forming them again failed: {why}\n  try again: {advice().rebuild}"
        self.only = set()
        self._tell_formed()

    def _drop_keys(self, epochs: Collection[int]) -> None:
        """Drop the keys of these epochs from the store; ranks that wait there are answered with an error."""
        for epoch in sorted(epochs):
            self._mesh.store_host.send_urgent(wire.DropKeys(self._mesh.id, f"epoch{epoch}/"))
        self._epochs = self._epochs.difference(epochs)


def forming_call(id: int, mesh: MeshState, future: Future[Any]) -> OpenCall:
    """Return the call that `GroupFormer.form` takes."""
    return OpenCall(id, mesh.id, "the process groups", Region.of(mesh.extent), future, fail_fast=False)


def cause_of(call: OpenCall) -> str:
    """Return why a call has failed: ``rank 1 raised ValueError``."""
    if call.lost:
        return f"{name_ranks(error.rank for error in call.lost)} ended"
    if not call.failures:
        return f"{call.what} was interrupted"
    first = call.failures[0]
    if first.kind is FailureKind.DISAGREES:
        return first.evalue.splitlines()[0]
    if first.kind is FailureKind.INTERRUPTED:
        return f"rank {first.rank} was interrupted"
    return f"rank {first.rank} raised {first.ename}"
