"""Actors that wait in collectives for one that has failed: freed, as `meshbook.controller.cell_recovery` frees cells.

A call to a mailbox has failed on some ranks, and others have not ended it. The ranks are asked how far their groups
are, and asked again after a while, so that what was on its way has come. If both times it was certain
(`meshbook.groups.deadlock`) that those who wait are never served, the groups are aborted and formed again. This goes on
for as long as such a call is open.

    idle            on a rank that will not come the main thread is idle, and so are the actors that use the group
                    of those that wait; only the actors that were called are looked at
    forming again   when none of the actors that were freed is at work (`GroupPhase.DRAINING`): none may meet it

Actors that wait for each other in operations in which they disagree are freed though nobody failed: of calls that take
long the ranks are asked, less and less often.

Calls that actors make, and messages that nobody waits for, are not seen here: there an interrupt, or
`ProcMesh.abort_groups`, helps. When calls that failed or were interrupted have ended, groups that are not equally far
on all members are formed again.

*The next call* must not meet the failed one. Calls queue (`meshbook.controller.call_queue`)

    to the same actors    until they have ended the failed call, behind which they would queue on those ranks anyway
    to any others         for a moment (`SETTLE_S`): until it is known that the groups are sound, or they are back
"""

from __future__ import annotations

import time
from collections.abc import Collection

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.controller.call_queue import Unsent
from meshbook.controller.group_former import GroupFormer, cause_of
from meshbook.controller.progress_poll import ALL, FIRST_LOOK_S, RECENT, SELDOM_LOOK_S, ProgressPoll, ProgressSnapshot
from meshbook.controller.uneven_calls import UnevenCalls, place_and_absent
from meshbook.groups.agreements import Agreements, find_disagreements
from meshbook.groups.deadlock import (
    Stuck,
    are_in_use,
    differing_groups,
    find_deadlocked,
    only_where_shared,
    where_stuck,
)
from meshbook.lifecycle import GroupPhase

DRAIN_LOOK_S = 0.01
"""How often it is asked, after actors were freed, whether they have all come back."""

DRAIN_S = 1.0
"""So long the forming of groups waits for that."""

BACK_S = 10.0
"""So much longer calls queue while the groups are being formed again."""

UNEVEN_LOOK_S = 2.0
"""The pause between questions while others are at work in groups that a call may have left uneven."""

SETTLE_S = 0.5
"""So long at most a failure keeps calls to other actors, and cells, waiting."""


class ActorRecovery:
    """Of the calls to the mailboxes of one mesh."""

    def __init__(self, former: GroupFormer, agreements: Agreements) -> None:
        self._mesh, self._calls, self._queue = former.mesh, former.calls, former.queue
        self._former, self._agreements = former, agreements
        self._failing: dict[int, OpenCall] = {}
        self._stuck: dict[int, frozenset[int]] = {}
        """Call to the ranks that were stuck when the ranks were asked last."""
        self._long = UnevenCalls()
        """Those that are open, with the time at which ranks are asked in what they disagree."""
        self._doubtful: dict[int, OpenCall] = {}
        """Calls that have ended, and complete when the ranks have told in what they disagree."""
        self._judged: dict[int, OpenCall] = {}
        """Those of them for which the ranks are being asked."""
        self._asked: list[OpenCall] = []
        """Those that are open for long for which they are being asked."""
        self._uneven = False
        """Calls have failed, and nobody has compared the groups since."""
        self._settle_by = 0.0
        """Until then other calls queue: calls have failed, and it is not known what has become of the groups."""
        self._freed: set[int] = set()
        """The mailboxes of the actors that were freed, while the groups are draining."""
        self._drain_by = 0.0
        self.poll = ProgressPoll(former.mesh, former.calls, former.next_id, self._on_look)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def must_wait(self, new: Unsent) -> bool:
        """Whether a call or message may not be sent yet."""
        if not (self._failing or self._uneven) and self._former.is_sound:
            return False
        failing = [call for call in self._failing.values() if call.mailbox == new.mailbox and not call.beside]
        if any(not call.waiting.isdisjoint(new.ranks) for call in failing):
            return True
        now, until = time.monotonic(), new.since + SETTLE_S
        if self._former.is_coming_back:
            return now < until + BACK_S
        if now >= until or self._mesh.lost:
            return False
        return not self._former.is_sound or self.is_unsettled(new.ranks)

    def is_unsettled(self, ranks: Collection[int]) -> bool:
        """Whether collectives on ``ranks`` might meet those of a call that has failed a moment ago."""
        if time.monotonic() >= self._settle_by:
            return False
        return self._uneven or any(not set(ranks).isdisjoint(call.members.ranks()) for call in self._failing.values())

    def watch(self, call: OpenCall) -> bool:
        """A call is opened, a rank has answered it or was lost, or somebody wants its end.

        Returns: whether a call that has ended everywhere completes later: ranks may have disagreed, and are asked.
        """
        if call.failed or call.cancelled:
            self._watch_failing(call)
        if call.waiting:
            self._long.suspect(call)
            return False
        self._long.forget(call)
        if not self._agreements.doubted or self._mesh.lost:
            return False
        self._doubtful[call.id] = call
        self.poll.look_in(0.0)
        return True

    def _watch_failing(self, call: OpenCall) -> None:
        if call.waiting and not self._mesh.lost:
            self._failing[call.id] = call
        else:
            self._failing.pop(call.id, None)
            self._stuck.pop(call.id, None)
        if not self._mesh.lost:  # of the dead everybody is freed at once
            self.note_uneven(FIRST_LOOK_S if self._failing else 0.0)

    def note_uneven(self, pause_s: float = 0.0) -> None:
        """Actors may have left groups of no use: ask the ranks in a moment."""
        self._uneven = True
        self._settle_by = time.monotonic() + SETTLE_S
        self._queue.wake(self._settle_by)
        self.poll.look_soon(pause_s)

    def stop(self) -> None:
        """The mesh is being stopped."""
        self._failing.clear()
        self._long = UnevenCalls()
        self.poll.give_up()
        self._uneven, self._settle_by = False, 0.0

    # ---- asking ---------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        return self.poll.due_with(self._long.due)

    def expire(self, now: float) -> None:
        """Do what is due."""
        self.poll.expire(now)
        if not self.poll.busy and (self.poll.is_due(now) or self._long.is_due(now)):
            self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask the ranks, unless the groups are aborted or being formed: then nothing can be said of them."""
        self.poll.rest()
        self._asked = self._long.postpone(now)
        ended, self._doubtful = self._doubtful, {}
        if not self._mesh.lost and (self._former.is_sound or self._former.phase is GroupPhase.DRAINING):
            self._judged = ended
            self.poll.ask([*self._failing.values(), *self._former.running()], ALL if ended else RECENT)
            return
        if not self._mesh.lost and (self._failing or self._uneven):
            self.poll.look_in(SELDOM_LOOK_S)
        self._complete(ended)

    def _on_look(self, look: ProgressSnapshot) -> None:
        """Judge, free or form, compare: one at a time, each on the ground that the one before leaves."""
        self._former.on_look(look)
        if self._judged:
            self._judge(look)
        else:
            self._judge_open(look)
        if self._former.phase is GroupPhase.DRAINING:
            self._end_draining(look)
        elif not self._free_stuck(look):
            self._compare(look)
            if self._failing or self._uneven:
                if self._stuck or self.poll.suspects:
                    self.poll.look_in(FIRST_LOOK_S)
                self.poll.look_again(SELDOM_LOOK_S if self._failing else UNEVEN_LOOK_S)
        self._queue.release()

    def _judge(self, look: ProgressSnapshot) -> None:
        """Complete calls that have ended; where their ranks disagree, as failed, and with the groups formed again."""
        found = find_disagreements(look.answers)
        self._agreements.clear()
        for group in found:
            for call in self._judged.values():
                if any(call.members.has(rank) for rank in group.ranks):
                    call.disagree(group.ranks, group.text)
        if found and self._former.phase is GroupPhase.FORMED:
            mailboxes = {call.mailbox for call in self._judged.values()}
            self._abort(look, found[0].text, {group.group for group in found}, mailboxes)
        self._complete(self._judged)

    def _judge_open(self, look: ProgressSnapshot) -> None:
        """Free the actors that disagree and wait for each other: they are never served rightly."""
        calls = {call.id: call for call in self._asked} | self._failing
        self._asked = []
        if not calls or self._former.phase is not GroupPhase.FORMED or not self._is_certain(look):
            return
        for group in find_disagreements(look.answers):
            users = {box for told in look.answers.values() for each in told.groups if each.name == group.group
                     for box in each.mailboxes}  # fmt: skip
            theirs = [call for call in calls.values() if call.mailbox in users]
            theirs = [call for call in theirs if any(call.members.has(rank) for rank in group.ranks)]
            for call in theirs:
                if call.disagree(group.ranks, group.text) and call.waiting:
                    self._calls.tell(call.output, Notice(f"{call.what}: {group.text}\n  freed"))
            if theirs:
                self._abort(look, group.text, {group.group}, {call.mailbox for call in theirs})

    def _complete(self, calls: dict[int, OpenCall]) -> None:
        while calls:
            self._calls.complete(calls.popitem()[1])

    def _free_stuck(self, look: ProgressSnapshot) -> bool:
        """Free those that were stuck when ranks were asked before, and still are; whether there were any."""
        before, self._stuck = self._stuck, {}
        idle = [rank for rank, told in look.answers.items() if not told.call]
        for call in list(self._failing.values()) if self._is_certain(look) else ():
            found = find_deadlocked(look.answers, idle, mailbox=call.mailbox)
            stuck = {rank: each for rank, each in found.items() if rank in call.waiting}
            if stuck and before.get(call.id) == stuck.keys():
                self._free(look, call, stuck)
                return True
            if stuck:
                self._stuck[call.id] = frozenset(stuck)
        return False

    def _free(self, look: ProgressSnapshot, call: OpenCall, stuck: dict[int, Stuck]) -> None:
        call.abort(where_stuck(stuck.items()))
        cause = cause_of(call)
        for line in place_and_absent(stuck):
            self._calls.tell(call.output, Notice(f"{call.what}: {cause}; {line}; freed"))
        self._abort(look, cause, {each.waiting.group for each in stuck.values()}, {call.mailbox})
        self._failing.pop(call.id, None)

    def _is_certain(self, look: ProgressSnapshot) -> bool:
        return not look.missing(self._mesh.lost) and not any(told.aborted for told in look.answers.values())

    def _compare(self, look: ProgressSnapshot) -> None:
        """Have groups formed again that calls have left uneven. While actors are at work in them, that is unknown."""
        if not self._uneven or not self._is_certain(look):
            return
        found = differing_groups(look.answers, of_cells=False)
        if odd := self.poll.confirm(found):
            self._uneven = False
            self._former.reset(odd[0].reason, groups=only_where_shared(look.answers, {each.name for each in odd}))
        elif not found:
            self._settle_by = self._settle_by if self._failing else 0.0
            self._uneven = bool(self._failing) or are_in_use(look.answers)

    # ---- draining ---------------------------------------------------------------------------------------------------

    def _abort(self, look: ProgressSnapshot, reason: str, names: set[str], mailboxes: set[int]) -> None:
        """Abort groups; they are formed again when none of these actors is at work."""
        if self._former.phase is not GroupPhase.DRAINING:
            self._freed.clear()
        self._former.abort(reason, groups=only_where_shared(look.answers, names, mailboxes), drain=True)
        self._freed |= mailboxes
        self._drain_by = time.monotonic() + DRAIN_S
        self.poll.look_in(DRAIN_LOOK_S)

    def _end_draining(self, look: ProgressSnapshot) -> None:
        """Have the groups formed, once none of the actors that were freed is at work."""
        busy = look.missing(self._mesh.lost) or any(
            told.call or not self._freed.isdisjoint(told.handling.values()) for told in look.answers.values()
        )
        if busy and time.monotonic() < self._drain_by:
            self.poll.look_in(DRAIN_LOOK_S)
            return
        self._uneven = self._former.is_partial  # else all groups are new
        self._former.end_draining()
        self._former.form_if_free()
        if self._failing or self._uneven:
            self.poll.look_in(SELDOM_LOOK_S)
