"""The process groups of a mesh, as its controller looks after them: freed when ranks are stuck, formed again after.

A rank that raises leaves others waiting for it. While a call has a failed or lost rank, or was interrupted, the ranks
are asked how far their groups are (`meshbook.groups.progress`), first after `FIRST_LOOK_S`, then less and less often.
When `meshbook.groups.deadlock` proves that some can never be served, the groups are aborted: those ranks come back with
GroupAborted, which is not their failure. When the call has ended everywhere, groups that were aborted, or that are not
equally far on all members, are formed again under a new epoch, in place: all handles stay good. The call completes
after that, or at `DEADLINE_S` with a word on why the groups are not back.

    a call fails on a rank ──> look, look, ... ──proof──> abort ──> all ranks ended ──> form ──> the call completes
                                      └── all ended ──> compare ──equal──> the call completes
                                                           └──not equal──> abort ──> form ──> ...

While actors or threads are at work, only the groups in question are aborted and formed again: theirs go on.
Ranks that run other calls, and are not stuck themselves, keep the old groups until those calls have ended; the groups
are formed again after that. A call that is made meanwhile and shares ranks with the failed one queues here, not on the
ranks: one that has failed already would begin it, and its collectives would meet those of the others' old call.

A dead rank aborts the groups at once; they come back when it has been replaced (`GroupRecovery.form`).

Nothing here waits or locks: all of it runs under the turn of `meshbook.controller.io_turns`. Nothing is asked while
nothing failed, but for calls that are uneven though nobody failed (`meshbook.controller.uneven_calls`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.calls.table import CallTable
from meshbook.concurrency.future import Future
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.progress_poll import ALL, RECENT, ProgressPoll, ProgressSnapshot
from meshbook.controller.uneven_calls import UnevenCalls
from meshbook.errors import MeshStoppedError, RanksDisagree, WorkerLost
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Agreements, Told, find_disagreements
from meshbook.groups.deadlock import (
    Odd,
    Stuck,
    differing_groups,
    find_deadlocked,
    only_where_shared,
    place_of,
    where_stuck,
)
from meshbook.lifecycle import GROUP_NEXT, GroupEvent, GroupPhase, MeshPhase, advance
from meshbook.shape.members import Region
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire

FIRST_LOOK_S = 0.025
"""So long after a rank failed, the others are asked; most failures have ended everywhere by then."""

SELDOM_LOOK_S = 0.25
"""They are asked again less and less often, in the end once in so many seconds."""

DEADLINE_S = 2.0
"""A failed call waits so long for its groups to come back."""

LATE_S = 1.0
"""When forming takes longer than this, the ranks are asked who has not come."""

FORM_S = 10.0
"""Ranks have so long to form them again; then they are asked to give up."""


class GroupRecovery:
    """The groups of one mesh."""

    def __init__(
        self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int], drop_keys: Callable[[str], None]
    ) -> None:
        self._mesh, self._calls, self._next_id, self._drop_prefix = mesh, calls, next_id, drop_keys
        self.phase = GroupPhase.NONE
        self._why = ""
        """Why the groups are not there, while they are aborted."""
        self._wanted = ""
        """Why they are to be aborted, until it is known whether there are any."""
        self._is_broken = False
        """A rank has told that groups are of no use any more."""
        self._only: set[str] = set()
        """The groups that were aborted; all of them where it is empty."""
        self._unsure = False
        """Some could not be compared, since ranks ran other calls."""
        self._awaits_actors = False
        """They are formed when no actor is at work any more; calls queue until then."""
        self._unanswered = False
        """A call has completed though they could not be compared, since ranks did not answer."""
        self._failing: dict[int, OpenCall] = {}
        self._ended: dict[int, tuple[OpenCall, float]] = {}
        """Calls that all ranks have ended, with the time at which they complete whatever has come of the groups."""
        self._ended_in_new: set[int] = set()
        """Those of them that began after the forming, of which not all ranks have told yet: groups may be uneven."""
        self._held: dict[int, tuple[OpenCall, Callable[[], None]]] = {}
        self._forming: OpenCall | None = None
        self._naming: OpenCall | None = None
        self._give_up_at = math.inf
        self._late: set[int] = set()
        """Ranks that have not come, when forming takes long."""
        self._epochs: set[int] = set()
        """Those that may have left keys in the store."""
        self._suspected: list[Odd] = []
        """Groups that the last look found uneven, though that may have been chance."""
        self._poll = ProgressPoll(mesh, calls, next_id, self._on_look)
        self._uneven_calls = UnevenCalls()
        self.agreements = Agreements()
        self._look_at = math.inf
        self._pause_s = FIRST_LOOK_S
        self.is_unsettled: Callable[[Collection[int]], bool] = lambda ranks: False
        """Whether calls to actors of these ranks have just failed, so that others had better wait a moment."""
        self.on_formed: Callable[[], object] = lambda: None
        """Called when the groups are back, or will not come."""

    @property
    def is_partial(self) -> bool:
        """Whether only some groups were aborted."""
        return bool(self._only)

    @property
    def is_coming_back(self) -> bool:
        """Whether the groups are being formed, or will be at once: no call has to end first."""
        if self.phase is GroupPhase.FORMING:
            return True
        return self.phase is GroupPhase.ABORTED and not self._mesh.lost and not self._running()

    # ---- calls ----------------------------------------------------------------------------------------------------

    def send(self, call: OpenCall, transmit: Callable[[], None]) -> None:
        """Send a new call to the ranks now, or when those that it shares with a failed call are back."""
        self._uneven_calls.suspect(call, time.monotonic())
        if self._must_queue(call, self._held):
            self._held[call.id] = (call, transmit)
        else:
            transmit()

    def on_told(self, call: OpenCall, rank: int, told: Told) -> None:
        """What came with an answer of ``rank``."""
        self.agreements.compare(rank, told)
        self._is_broken = self._is_broken or told.broken
        calls = [ended for ended, _ in self._ended.values()] if call is self._forming else [call]
        for each in calls:
            copied = () if each.mailbox and not self._mesh.lost else told.copied
            each.tear(rank, (*told.torn, *copied), told.restored)

    def cancel(self, call: OpenCall) -> bool:
        """Somebody asked for the end of a call. True: it still queued here, and has ended now."""
        call.cancel()
        if self._forming is not None and self._give_up_at - FORM_S + DEADLINE_S < time.monotonic():
            self._cancel_forming()  # what was cancelled waits behind it
        if self._held.pop(call.id, None) is None:
            self._watch_running(call)
            return False
        call.drop()
        self._calls.settle_if_done(call)
        return True

    def watch(self, call: OpenCall) -> bool:
        """A rank has answered, or was lost; True when a call that has ended everywhere completes later."""
        if call is self._forming:
            self._watch_forming(call)
            return False
        if call is self._naming:
            return False
        later = False
        if not call.waiting:
            later = self._watch_ended(call)
        elif call.id not in self._held:
            self._watch_running(call)
        if self._held:
            self.release()
        return later

    def _watch_running(self, call: OpenCall) -> None:
        now = time.monotonic()
        if not call.waiting or call is self._forming:
            return
        if not (call.failed or call.cancelled):
            self._uneven_calls.suspect(call, now)
        elif call.id not in self._failing:
            self._failing[call.id] = call
            self._uneven_calls.forget(call)
            self._pause_s = FIRST_LOOK_S
            self._look_at = min(self._look_at, now + FIRST_LOOK_S)

    def _watch_ended(self, call: OpenCall) -> bool:
        self._failing.pop(call.id, None)
        self._uneven_calls.forget(call)
        trouble = call.failed or bool(call.freed) or call.cancelled or (self._unsure and not self._running())
        trouble = trouble or self.agreements.doubted or self._is_broken
        if trouble and not self._mesh.lost:
            self._ended[call.id] = (call, time.monotonic() + DEADLINE_S)
            if self.phase is GroupPhase.FORMING:  # failures are told before the ends of what went well
                self._ended_in_new.add(call.id)
                return True
        if self.phase is GroupPhase.ABORTED:
            self.form_if_free()
        elif call.id in self._ended and not self._poll.busy:
            self._ask()
        return call.id in self._ended

    def _must_queue(self, call: OpenCall, before: Mapping[int, tuple[OpenCall, Any]]) -> bool:
        if self._ended and self.phase in (GroupPhase.FORMED, GroupPhase.NONE):
            return True  # its groups are being compared
        if self._awaits_actors or self.is_unsettled(call.waiting):
            return True
        ahead = [*self._failing.values(), *(held for held, _ in before.values())]
        return any(call.waiting & other.waiting for other in ahead)

    def release(self) -> None:
        """Send the calls that need not queue any more."""
        held, self._held = self._held, {}
        for id, (call, transmit) in held.items():
            if self._must_queue(call, self._held):
                self._held[id] = (call, transmit)
            elif call.waiting:
                transmit()

    # ---- looking --------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        due = self._poll.due if self._poll.busy else min(self._look_at, self._uneven_calls.due)
        return min(due, self._give_up_at, *(deadline for _, deadline in self._ended.values()))

    def expire(self, now: float) -> None:
        """Do what is due."""
        self._poll.expire(now)
        if not self._poll.busy and (self._uneven_calls.is_due(now) or self._look_at <= now):
            self._ask()
        if self._give_up_at <= now:
            self._cancel_forming()
        for id in [id for id, (_, deadline) in self._ended.items() if deadline <= now]:
            self._poll.expire(math.inf)  # for the names of those that hold it up
            if id not in self._ended:
                continue
            call, _ = self._ended.pop(id)
            why = self._not_back()
            self._unanswered = self._unanswered or self.phase in (GroupPhase.FORMED, GroupPhase.NONE)
            self._calls.complete(call, why)
        if self._unanswered and not self._poll.busy:
            self._look_at = min(self._look_at, now + SELDOM_LOOK_S)
        if self._held:
            self.release()

    def _ask(self) -> None:
        self._look_at = math.inf
        doubted = self.agreements.doubted or self._uneven_calls.is_due(time.monotonic())
        calls = [*self._running(), *(call for call, _ in self._ended.values())]
        self._poll.ask(calls, ALL if doubted else RECENT)

    def _on_look(self, look: ProgressSnapshot) -> None:
        """All have answered, or had the time to."""
        self._epochs.update(told.epoch for told in look.answers.values() if told.epoch >= 0)
        if self.phase is GroupPhase.NONE and any(told.groups for told in look.answers.values()):
            self.phase = advance(GROUP_NEXT, self.phase, GroupEvent.FOUND)
        if self._wanted and self.phase is GroupPhase.FORMED:
            self._abort(self._wanted, {}, spare=set())
        self._wanted = ""
        if self.phase in (GroupPhase.FORMED, GroupPhase.ABORTED):
            self._free_stuck(look)
            self._judge(look)
        elif self._forming is not None:
            here = {rank for rank, told in look.answers.items() if told.call == self._forming.id}
            self._late = self._forming.waiting - here
        compared = [id for id, (call, _) in self._ended.items() if look.has_seen_end(id, call.members)]
        if (compared or self._unanswered) and self.phase in (GroupPhase.FORMED, GroupPhase.NONE):
            self._compare(look, compared)
        for call, text in self._uneven_calls.find(look, self._mesh.lost, time.monotonic()):
            self._calls.tell(call.output, Notice(text, call.output))
        if self.phase is GroupPhase.ABORTED:
            self.form_if_free(look)
        self._plan_next_look()
        self.release()

    def _plan_next_look(self) -> None:
        unsettled = self.phase is GroupPhase.ABORTED and self._running()
        if self._failing or unsettled:
            self._look_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, SELDOM_LOOK_S)
        elif self._suspected:
            self._look_at = time.monotonic() + FIRST_LOOK_S
        elif self._unanswered or (self._ended and self.phase in (GroupPhase.FORMED, GroupPhase.NONE)):
            self._look_at = time.monotonic() + (SELDOM_LOOK_S if self._unanswered else 0.0)

    def _free_stuck(self, look: ProgressSnapshot) -> None:
        causes = [(cause_of(call), look.ended.get(call.id, ())) for call in self._failing.values()]
        if self.phase is GroupPhase.ABORTED:
            causes.append((self._why, ()))  # ranks that were spared may wait for those that were not
        for reason, ended in causes:
            if stuck := find_deadlocked(look.answers, ended, self._mesh.lost):
                spare = {rank for rank, call in self._current().items() if call.id not in self._failing}
                names = {each.waiting.group for each in stuck.values()}
                self._abort(reason, stuck, spare - stuck.keys(), only_where_shared(look.answers, names))

    def _judge(self, look: ProgressSnapshot) -> None:
        """Fail the calls in which ranks disagree, and free those that wait there: they are never served rightly."""
        found = find_disagreements(look.answers)
        calls = [call for call, _ in self._ended.values()] + self._running()
        waits = {rank: place_of(told.waiting[0]) for rank, told in look.answers.items() if told.waiting}
        for group, call in itertools.product(found, calls):
            if not any(call.members.has(rank) for rank in group.ranks):
                continue
            call.wait_at(waits)
            if call.disagree(group.ranks, group.text) and call.waiting:
                self._calls.tell(call.output, Notice(f"{group.text}\n  freed", call.output))
        if found and self.phase is GroupPhase.FORMED:
            innocent = {rank for rank, call in self._current().items() if not call.disagrees}
            self._abort(found[0].text, {}, innocent, only_where_shared(look.answers, {each.group for each in found}))
        if look.recent == ALL and not look.missing(self._mesh.lost):
            self.agreements.clear()

    def _compare(self, look: ProgressSnapshot, compared: Collection[int]) -> None:
        self._unsure = any(told.call for told in look.answers.values())
        late, missing = self._unanswered, look.missing(self._mesh.lost)
        found = differing_groups(look.answers)
        odd = [each for each in found if each.is_certain or each in self._suspected]
        self._suspected = found
        if odd:
            innocent = {rank for rank, call in self._current().items() if call.id not in self._failing}
            names = only_where_shared(look.answers, {each.name for each in odd})
            self._abort(odd[0].reason, {}, () if late else innocent, names)  # late: who came since uses broken groups
        elif found:
            self._why = "they are not equally far"
        elif missing:
            self._why = f"{name_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
        else:
            self._unanswered, self._is_broken, self._why = False, False, ""
            for id in compared:
                self._calls.complete(self._ended.pop(id)[0])

    # ---- aborting -------------------------------------------------------------------------------------------------

    def abort(
        self, reason: str, ranks: Collection[int] | None = None, *, form: bool = True, groups: Collection[str] = ()
    ) -> None:
        """Abort the groups of all ranks; they are formed again when the calls that run have ended.

        ranks: other ones that run calls keep theirs until then. form: else that is for `form_if_free`. groups: only
        these, if any are given.
        """
        if self.phase is GroupPhase.NONE:
            self._wanted = reason
            if not self._poll.busy:
                self._ask()
            return
        self._abort(reason, {}, () if ranks is None else self._current().keys() - set(ranks), groups)
        self._awaits_actors = not form
        if form:
            self.form_if_free()
        self._plan_next_look()

    def on_lost(self, error: WorkerLost) -> None:
        """A rank ended: nothing that includes it can be served any more. `MeshState.lost` has it already."""
        lost, self._awaits_actors = self._mesh.lost, False
        self.release()
        reason = f"{name_ranks(lost)} ended\n  repair: {advice().heal_call}    without it: {advice().shrink}"
        for call, _ in list(self._ended.values()):
            self._calls.complete(call)
        self._ended.clear()
        if self.phase is GroupPhase.NONE:
            self.abort(reason)
            return
        innocent = {rank for rank, call in self._current().items() if not any(call.members.has(each) for each in lost)}
        self._abort(reason, {}, innocent)

    def _abort(
        self, reason: str, stuck: Mapping[int, Stuck], spare: Collection[int], groups: Collection[str] = ()
    ) -> None:
        """spare: ranks that keep their groups for now, for the sake of the calls that they run. groups: as `abort`."""
        was_partial = self._only or self.phase in (GroupPhase.FORMED, GroupPhase.NONE)
        self._only = {*self._only, *groups} if groups and was_partial else set()
        self.phase = advance(GROUP_NEXT, self.phase, GroupEvent.ABORT)
        if self.phase is GroupPhase.NONE:
            return
        self._why, self._unanswered, self._is_broken, self._suspected = reason, False, False, []
        places = where_stuck(stuck.items())
        for call in self._running():
            call.abort(places)
        if self._forming is not None:
            self._forming.abort()
        self._tell_to_abort(reason, spare, groups)
        if not spare and not groups:
            self._drop_keys(self._epochs)

    def _tell_to_abort(self, reason: str, spare: Collection[int], groups: Collection[str] = ()) -> None:
        mesh = self._mesh
        target = [rank for rank in range(mesh.extent.nelements) if rank not in mesh.lost and rank not in spare]
        if target:
            encoded = Region.of(mesh.extent).select(target).encode()
            self._send_urgent(wire.AbortGroups(mesh.id, encoded, self._next_id(), reason, tuple(groups)))

    # ---- forming --------------------------------------------------------------------------------------------------

    def form(self, call: OpenCall, give_up_at: float = math.inf, groups: Collection[str] = ()) -> None:
        """Form the groups under a new epoch, in place where there are some; ``call`` is what the caller waits for.

        groups: only these, if any are given.
        """
        mesh, self._awaits_actors = self._mesh, False
        if mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            call.give_up(MeshStoppedError(mesh.name))
            return
        if mesh.lost:
            call.give_up(WorkerLost.of(mesh.lost.values()))
            return
        self.phase = advance(GROUP_NEXT, self.phase, GroupEvent.FORM)
        epoch = self._next_id()
        self._epochs.add(epoch)
        self._only = set(groups)
        self._forming, self._give_up_at, self._late = call, give_up_at, set()
        self._look_at = time.monotonic() + LATE_S
        call.when_settled(lambda error: self._on_formed(call, epoch, error))
        self._transmit(call, "form_group", (epoch, len(mesh.hosts) == 1, tuple(groups)))
        if mesh.axes != dict(mesh.extent) and math.prod(mesh.axes.values()) == mesh.extent.nelements:
            self._name_axes()
        self.release()

    def form_if_free(self, look: ProgressSnapshot | None = None) -> None:
        """Form the groups again, once no rank runs anything that was begun before."""
        self._awaits_actors = False
        if self._forming is None and not self._mesh.lost and not self._running():
            if self._only and not self._find_others(look):
                self._look_at = time.monotonic()
                return
            call = forming_call(self._next_id(), self._mesh, Future())
            self.form(call, time.monotonic() + FORM_S, self._only)

    def _find_others(self, look: ProgressSnapshot | None) -> bool:
        """Find more groups that the calls have left uneven; whether they can be compared now."""
        if look is None or any(told.call for told in look.answers.values()):
            return False
        self._only.update(odd.name for odd in differing_groups(look.answers) if odd.is_certain)
        return True

    def _name_axes(self) -> None:
        """Forming binds ``mesh`` and ``point`` to the mesh's own axes: back to those that the person chose."""
        self._naming = call = forming_call(self._next_id(), self._mesh, Future())
        axes = self._mesh.axes
        self._transmit(call, "set_axes", (tuple(axes), tuple(axes.values())))

    def _transmit(self, call: OpenCall, endpoint: str, args: tuple[Any, ...]) -> None:
        self._calls.open(call, None)
        pickled, _ = dumps((args, {}), what=call.what)
        message = wire.Call(call.id, self._mesh.id, endpoint, call.members.encode(), inline=pickled, label=call.what)
        for host in self._mesh.hosts:
            host.send(message)

    def _watch_forming(self, call: OpenCall) -> None:
        if call.failed and call.waiting and not call.aborted:  # the others wait for it
            call.abort()
            self._tell_to_abort(cause_of(call), ())
            self._drop_keys(self._epochs)

    def _cancel_forming(self) -> None:
        if self._forming is not None:
            self._give_up_at = math.inf
            self._why = f"{name_ranks(self._late or self._forming.waiting)} did not come"
            self._send_urgent(wire.Cancel(self._mesh.id, self._forming.id, self._forming.members.encode()))

    def _on_formed(self, call: OpenCall, epoch: int, error: BaseException | None) -> None:
        if call is not self._forming:
            return  # there is a newer attempt
        self._forming, self._give_up_at = None, math.inf
        if not self._failing:
            self._look_at = math.inf
        if self.phase is not GroupPhase.FORMING:  # aborted meanwhile
            self.form_if_free()
            return
        if error is None:
            self.phase = advance(GROUP_NEXT, self.phase, GroupEvent.FORMED)
            self._why, self._unsure = "", False
            if not self._only:
                self._drop_keys({old for old in self._epochs if old < epoch})
            self._only = set()
        else:
            self.phase = advance(GROUP_NEXT, self.phase, GroupEvent.FAILED)
            self._only = set()
            again = f"try again: {advice().rebuild}"
            self._why = f"forming them again failed: {self._why or error}\n  {again}"
        for ended, _ in [self._ended.pop(id) for id in self._ended.keys() - self._ended_in_new]:
            self._calls.complete(ended, self._not_back())
        self._ended_in_new.clear()
        if self._ended and not self._poll.busy:
            self._ask()
        self.on_formed()

    def _drop_keys(self, epochs: Collection[int]) -> None:
        """Drop what the store keeps for these; ranks that wait there are answered with an error."""
        for epoch in sorted(epochs):
            self._drop_prefix(f"epoch{epoch}/")
        self._epochs = self._epochs.difference(epochs)

    # ---- end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The mesh is being stopped."""
        for call, _ in list(self._ended.values()):
            self._calls.complete(call)
        self._ended.clear()
        self._failing.clear()
        self._held.clear()
        self._poll.give_up()
        self._look_at = self._give_up_at = math.inf
        self._uneven_calls = UnevenCalls()

    # ---- within ---------------------------------------------------------------------------------------------------

    def _running(self) -> list[OpenCall]:
        """The calls that ranks are at, or will be next; in the order in which they were sent."""
        return [
            call
            for call in self._calls.running(self._mesh.id)
            if call.id not in self._held and call is not self._forming and call is not self._naming
        ]

    def _current(self) -> dict[int, OpenCall]:
        """What each rank that is not idle runs now."""
        return {rank: call for call in reversed(self._running()) for rank in call.waiting}

    def _send_urgent(self, message: wire.ToHost) -> None:
        for host in self._mesh.hosts:
            if not host.lost:
                host.send_urgent(message)

    def _not_back(self) -> str:
        why = self._why
        if self._forming is not None:
            why = f"{name_ranks(self._late or self._forming.waiting)} did not come within {DEADLINE_S:g} s"
        elif running := self._running():
            ranks = set().union(*(call.waiting for call in running))
            has = "has" if len(ranks) == 1 else "have"
            why = f"they are formed again when {name_ranks(ranks)} {has} ended {running[0].what}"
        if not why:
            return ""
        known = self.phase in (GroupPhase.FORMING, GroupPhase.ABORTED)
        return f"the process groups {'are not back yet' if known else 'could not be compared'}: {why}"


def forming_call(id: int, mesh: MeshState, future: Future[Any]) -> OpenCall:
    """The call of `GroupRecovery.form`."""
    return OpenCall(id, mesh.id, "the process groups", Region.of(mesh.extent), future, fail_fast=False)


def cause_of(call: OpenCall) -> str:
    """Why a call has failed: ``rank 1 raised ValueError``."""
    if call.lost:
        return f"{name_ranks(error.rank for error in call.lost)} ended"
    if not call.failures:
        return f"{call.what} was interrupted"
    first = call.failures[0]
    if first.ename == RanksDisagree.__name__:
        return first.evalue.splitlines()[0]
    if first.ename == "KeyboardInterrupt":
        return f"rank {first.rank} was interrupted"
    return f"rank {first.rank} raised {first.ename}"
