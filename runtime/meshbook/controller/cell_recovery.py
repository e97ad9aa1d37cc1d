"""Calls to main threads, cells above all, whose ranks wait for each other in vain: freed, and the groups compared.

While a call has a failed or lost rank, or was interrupted, the ranks are asked how far their groups are. When
`meshbook.groups.deadlock` proves that some can never be served, the groups are aborted: those ranks come back with
GroupAborted, which is not their failure. When the call has ended everywhere, groups that were aborted, or that are not
equally far on all members, are formed again. The call completes after that, or at `DEADLINE_S` with a word on why the
groups are not back. Who counts as idle: a rank that had ended the call when it was asked. One proof is enough, since
what a main thread has begun after that is no matter of the call.

    a call fails on a rank ──> look, look, ... ──proof──> abort ──> all ranks ended ──> form ──> the call completes
                                      └── all ended ──> compare ──equal──> the call completes
                                                           └──not equal──> abort ──> form ──> ...

Ranks that run other calls, and are not stuck themselves, keep the old groups until those calls have ended. Nothing is
asked while nothing failed, but for calls that are uneven though nobody failed (`meshbook.controller.uneven_calls`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.controller.call_queue import Unsent
from meshbook.controller.group_former import GroupFormer, cause_of
from meshbook.controller.progress_poll import ALL, FIRST_LOOK_S, RECENT, SELDOM_LOOK_S, ProgressPoll, ProgressSnapshot
from meshbook.controller.uneven_calls import UnevenCalls
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Agreements, find_disagreements
from meshbook.groups.deadlock import differing_groups, find_deadlocked, only_where_shared, place_of, where_stuck
from meshbook.lifecycle import DoubtEvent, GroupDoubt, GroupPhase

DEADLINE_S = 2.0
"""A failed call waits so long for its groups to come back."""


class _Ended:
    """A call that all ranks have ended, and that has not completed. in_new: its groups were being formed then."""

    def __init__(self, call: OpenCall, in_new: bool) -> None:
        self.call, self.in_new = call, in_new
        self.deadline = time.monotonic() + DEADLINE_S
        """Then it completes, whatever has come of the groups."""


class CellRecovery:
    """Of one mesh."""

    def __init__(self, former: GroupFormer, agreements: Agreements) -> None:
        self._mesh, self._calls, self._queue = former.mesh, former.calls, former.queue
        self._former, self._agreements = former, agreements
        self._failing: dict[int, OpenCall] = {}
        self._ended: dict[int, _Ended] = {}
        self._uneven = UnevenCalls()
        self.poll = ProgressPoll(former.mesh, former.calls, former.next_id, self._on_look)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def must_wait(self, new: Unsent) -> bool:
        """Whether a call may not be sent yet: its ranks are at a failed one, or the groups are being compared."""
        if self._ended and self._former.is_sound:
            return True
        return any(not call.waiting.isdisjoint(new.ranks) for call in self._failing.values())

    def ended_on(self, call: OpenCall) -> list[OpenCall]:
        """The calls to which it matters what came with an answer to ``call``: forming tells what others have torn."""
        return [ended.call for ended in self._ended.values()] if self._former.is_forming(call) else [call]

    def watch(self, call: OpenCall) -> bool:
        """A call is opened, a rank has answered it or was lost, or somebody wants its end.

        Returns: whether a call that has ended everywhere completes later.
        """
        if not call.waiting:
            return self._watch_ended(call)
        if not (call.failed or call.cancelled):
            self._uneven.suspect(call)
        elif call.id not in self._failing:
            self._failing[call.id] = call
            self._uneven.forget(call)
            self.poll.look_soon()
        return False

    def _watch_ended(self, call: OpenCall) -> bool:
        former = self._former
        self._failing.pop(call.id, None)
        self._uneven.forget(call)
        trouble = call.failed or call.freed or call.cancelled or self._agreements.doubted
        trouble = trouble or former.doubt is GroupDoubt.TOLD
        trouble = trouble or (former.doubt is GroupDoubt.PARTIAL and not former.running())
        if trouble and not self._mesh.lost:
            self._ended[call.id] = _Ended(call, in_new=former.phase is GroupPhase.FORMING)
        if former.phase is GroupPhase.FORMING:  # failures are told before the ends of what went well
            return call.id in self._ended
        former.form_if_free()
        if former.is_sound and call.id in self._ended and not self.poll.busy:
            self.ask()
        return call.id in self._ended

    def on_lost(self) -> None:
        """A rank ended: the groups will not come back, so nobody waits for them."""
        for id in list(self._ended):
            self._calls.complete(self._ended.pop(id).call)

    def on_formed(self) -> None:
        """The groups are back, or will not come: complete what waited for that."""
        if not self._failing:
            self.poll.rest()
        for id in [id for id, ended in self._ended.items() if not ended.in_new]:
            self._calls.complete(self._ended.pop(id).call, self._not_back())
        for ended in self._ended.values():  # not all of their ranks had told how they ended: the groups may be uneven
            ended.in_new = False
        if self._ended and not self.poll.busy:
            self.ask()

    def _current_but(self, spared: Callable[[OpenCall], bool]) -> set[int]:
        """The ranks that run calls for which ``spared`` is true."""
        return {rank for rank, call in self._former.current().items() if spared(call)}

    def stop(self) -> None:
        """The mesh is being stopped."""
        self.on_lost()
        self._failing.clear()
        self.poll.give_up()
        self._uneven = UnevenCalls()

    # ---- asking ---------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        return min((self.poll.due_with(self._uneven.due), *(ended.deadline for ended in self._ended.values())))

    def expire(self, now: float) -> None:
        """Do what is due."""
        self.poll.expire(now)
        if not self.poll.busy and (self.poll.is_due(now) or self._uneven.is_due(now)):
            self.ask()
        for id in [id for id, ended in self._ended.items() if ended.deadline <= now]:
            self.poll.expire(math.inf)  # for the names of those that hold it up
            if id in self._ended:
                self._complete_late(self._ended.pop(id).call)
        if self._former.doubt is GroupDoubt.UNANSWERED and not self.poll.busy:
            self.poll.look_in(SELDOM_LOOK_S)

    def _complete_late(self, call: OpenCall) -> None:
        why = self._not_back()
        if self._former.is_sound:
            self._former.note(DoubtEvent.UNANSWERED)
        self._calls.complete(call, why)

    def ask(self) -> None:
        """Ask the ranks now, or again if they are being asked."""
        doubted = self._agreements.doubted or self._uneven.is_due(time.monotonic())
        calls = [*self._former.running(), *(ended.call for ended in self._ended.values())]
        self.poll.ask(calls, ALL if doubted else RECENT)

    def _on_look(self, look: ProgressSnapshot) -> None:
        """Free ranks that are stuck, then those that disagree; compare what is sound still; form what was aborted."""
        former = self._former
        former.on_look(look)
        if former.phase is not GroupPhase.FORMING and former.phase is not GroupPhase.NONE:
            self._free_stuck(look)
            self._judge(look)
        compared = [id for id, ended in self._ended.items() if look.has_seen_end(id, ended.call.members)]
        if (compared or former.doubt is GroupDoubt.UNANSWERED) and former.is_sound:
            self._compare(look, compared)
        for call, text in self._uneven.find(look, self._mesh.lost, time.monotonic()):
            self._calls.tell(call.output, Notice(text))
        former.form_if_free(look)
        self.plan_next_look()
        self._queue.release()

    def plan_next_look(self) -> None:
        """Have the ranks asked again, if anything is still open."""
        former = self._former
        is_unanswered = former.doubt is GroupDoubt.UNANSWERED
        if self._failing or (former.is_aborted and former.running()):
            self.poll.look_again()
        elif self.poll.suspects:
            self.poll.look_in(FIRST_LOOK_S)
        elif is_unanswered or (self._ended and former.is_sound):
            self.poll.look_in(SELDOM_LOOK_S if is_unanswered else 0.0)

    def _free_stuck(self, look: ProgressSnapshot) -> None:
        causes = [(cause_of(call), look.ended.get(call.id, ())) for call in self._failing.values()]
        if self._former.is_aborted:
            causes.append((self._former.why, ()))  # ranks that were spared may wait for those that were not
        for reason, ended in causes:
            if stuck := find_deadlocked(look.answers, ended, self._mesh.lost):
                spare = self._current_but(lambda call: call.id not in self._failing) - stuck.keys()
                names = only_where_shared(look.answers, {each.waiting.group for each in stuck.values()})
                self._former.abort(reason, places=where_stuck(stuck.items()), spare=spare, groups=names)

    def _judge(self, look: ProgressSnapshot) -> None:
        """Fail the calls in which ranks disagree, and free those that wait there: they are never served rightly."""
        found = find_disagreements(look.answers)
        calls = [ended.call for ended in self._ended.values()] + self._former.running()
        waits = {rank: place_of(told.waiting[0]) for rank, told in look.answers.items() if told.waiting}
        for group, call in itertools.product(found, calls):
            if not any(call.members.has(rank) for rank in group.ranks):
                continue
            call.wait_at(waits)
            if call.disagree(group.ranks, group.text) and call.waiting:
                self._calls.tell(call.output, Notice(f"{group.text}\n  freed"))
        if found and self._former.phase is GroupPhase.FORMED:
            innocent = self._current_but(lambda call: not call.disagrees)
            names = only_where_shared(look.answers, {each.group for each in found})
            self._former.abort(found[0].text, spare=innocent, groups=names)
        if look.recent == ALL and not look.missing(self._mesh.lost):
            self._agreements.clear()

    def _compare(self, look: ProgressSnapshot, compared: Collection[int]) -> None:
        """Abort groups that are not equally far; where all are, complete the calls that waited for this."""
        former, missing = self._former, look.missing(self._mesh.lost)
        partly = any(told.call for told in look.answers.values())
        found = differing_groups(look.answers) if former.phase is GroupPhase.FORMED else []
        if odd := self.poll.confirm(found):
            late = former.doubt is GroupDoubt.UNANSWERED  # who came since uses broken groups
            innocent = set() if late else self._current_but(lambda call: call.id not in self._failing)
            names = only_where_shared(look.answers, {each.name for each in odd})
            former.note(DoubtEvent.COMPARED_PARTLY if partly else DoubtEvent.COMPARED)
            former.abort(odd[0].reason, spare=innocent, groups=names)
        elif found:
            former.not_compared("they are not equally far")
        elif missing:
            former.not_compared(f"{name_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer")
        else:
            former.note(DoubtEvent.COMPARED_PARTLY if partly else DoubtEvent.COMPARED)
            for id in compared:
                self._calls.complete(self._ended.pop(id).call)

    def _not_back(self) -> str:
        """Why the process groups are not back, as `OpenCall.settle` wants it; empty where they are."""
        former = self._former
        why = former.why
        if late := former.name_late():
            why = f"{late} did not come within {DEADLINE_S:g} s"
        elif running := former.running():
            ranks = set().union(*(call.waiting for call in running))
            has = "has" if len(ranks) == 1 else "have"
            why = f"they are formed again when {name_ranks(ranks)} {has} ended {running[0].what}"
        if not why:
            return ""
        return f"the process groups {'could not be compared' if former.is_sound else 'are not back yet'}: {why}"
