"""Actors that wait in collectives for one that has failed: freed, as `meshbook.controller.group_recovery` frees cells.

A call to a mailbox has failed on some ranks, and others have not ended it. The ranks are asked how far their groups
are, and asked again after a while, so that what was on its way has come. If both times it was certain
(`meshbook.groups.deadlock`) that those who wait are never served, the groups are aborted and formed again. This goes on
for as long as such a call is open.

    sound, since    on a rank that will not come the main thread is idle, and so are the actors that use the group
                    of those that wait, only the actors that were called are looked at

Actors that wait for each other in operations in which they disagree are freed though nobody failed: of calls that take
long the ranks are asked, less and less often.

Calls that actors make, and messages that nobody waits for, are not seen here: there an interrupt, or
`ProcMesh.abort_groups`, helps. When calls that failed or were interrupted have ended, groups that are not equally far
on all members are formed again. Under the turn of `meshbook.controller.io_turns`, as `GroupRecovery`.

*The next call* must not meet the failed one: a rank that has ended that would begin the next at once, and its
collectives would be taken for those that others still wait in. So calls queue here

    to the same actors    until they have ended the failed call, behind which they would queue on those ranks anyway
    to any others         for a moment (`SETTLE_S`): until it is known that the groups are sound, or they are back
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.calls.table import CallTable
from meshbook.controller.group_recovery import FIRST_LOOK_S, SELDOM_LOOK_S, GroupRecovery, cause_of
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.progress_poll import ALL, RECENT, ProgressPoll, ProgressSnapshot
from meshbook.controller.uneven_calls import UnevenCalls, place_and_absent
from meshbook.groups.agreements import find_disagreements
from meshbook.groups.deadlock import (
    Odd,
    Stuck,
    are_in_use,
    differing_groups,
    find_deadlocked,
    only_where_shared,
    where_stuck,
)
from meshbook.lifecycle import GroupPhase
from meshbook.shape.members import Members

FORM_LOOK_S = 0.01
"""How often it is asked, after actors were freed, whether they have all come back."""

FORM_S = 1.0
"""So long the forming of groups waits for that."""

BACK_S = 10.0
"""So much longer while the groups are being formed again."""

UNEVEN_LOOK_S = 2.0
"""The pause between questions while others are at work in groups that a call may have left uneven."""

SETTLE_S = 0.5
"""So long at most a failure keeps calls to other actors, and cells, waiting."""


_SOUND = (GroupPhase.NONE, GroupPhase.FORMED)


class _Held(NamedTuple):
    """A call, or a message without an answer, that queues."""

    mailbox: int
    members: Members
    transmit: Callable[[], object]
    until: float
    """Then it is sent, unless its own actors are still at a failed call."""
    call: OpenCall | None

    @property
    def ranks(self) -> Collection[int]:
        """Who has not answered it."""
        return self.call.waiting if self.call is not None else frozenset(self.members.ranks())


class ActorRecovery:
    """Of the calls to the mailboxes of one mesh. groups: what is aborted and formed again."""

    def __init__(self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int], groups: GroupRecovery) -> None:
        self._mesh, self._calls, self._groups = mesh, calls, groups
        self._failing: dict[int, OpenCall] = {}
        self._suspects: dict[int, frozenset[int]] = {}
        """Call to the ranks that the last look found stuck."""
        self._poll = ProgressPoll(mesh, calls, next_id, self._on_look)
        self._doubtful: dict[int, OpenCall] = {}
        """Calls that have ended, and complete when the ranks have told in what they disagree."""
        self._judged: dict[int, OpenCall] = {}
        """Those of them for which ranks were asked."""
        self._long = UnevenCalls()
        """Those that are open, with the time at which ranks are asked in what they disagree."""
        self._asked: list[OpenCall] = []
        """Those of them for which they were asked."""
        self._uneven = False
        """Calls have failed, and nobody has compared the groups since."""
        self._suspected: list[Odd] = []
        """Groups that the last look found uneven, though that may have been chance."""
        self._held: list[_Held] = []
        self._settle_by = 0.0
        """Until then other calls queue: calls have failed, and it is not known what has become of the groups."""
        self._formed_later = False
        """The groups were aborted, and are formed again when no actor is at work: none may meet the forming."""
        self._freed: set[int] = set()
        """The mailboxes of the actors that were freed, until then."""
        self._look_at = self._form_by = self._release_at = math.inf
        self._pause_s = FIRST_LOOK_S
        groups.is_unsettled, groups.on_formed = self.is_unsettled, self._release

    # ---- calls ----------------------------------------------------------------------------------------------------

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Send a new call, or a message that nobody answers, to the ranks now or when it meets no failed one there."""
        if call is not None:
            self._long.suspect(call, time.monotonic())
        if not (self._failing or self._uneven or self._held) and self._groups.phase in _SOUND:
            transmit()
            return
        held = _Held(mailbox, members, transmit, time.monotonic() + SETTLE_S, call)
        if self._must_queue(held, self._held):
            self._held.append(held)
            self._release_at = min(self._release_at, held.until)
        else:
            transmit()

    def cancel(self, call: OpenCall) -> bool:
        """Somebody asked for the end of a call. True: it still queued here, and has ended now."""
        call.cancel()
        left = [held for held in self._held if held.call is not call]
        if len(left) == len(self._held):
            self.watch(call)
            return False
        self._held = left
        call.drop()
        self._long.forget(call)
        self._calls.settle_if_done(call)
        return True

    def _must_queue(self, new: _Held, before: Sequence[_Held]) -> bool:
        if any(held.mailbox == new.mailbox and not set(new.ranks).isdisjoint(held.ranks) for held in before):
            return True
        failing = [call for call in self._failing.values() if call.mailbox == new.mailbox and not call.beside]
        if any(not call.waiting.isdisjoint(new.ranks) for call in failing):
            return True
        now = time.monotonic()
        if self._groups.is_coming_back:
            return now < new.until + BACK_S
        if now >= new.until or self._mesh.lost:
            return False
        not_back = self._groups.phase in (GroupPhase.ABORTED, GroupPhase.FORMING)
        return not_back or self.is_unsettled(new.ranks)

    def is_unsettled(self, ranks: Collection[int]) -> bool:
        """Whether collectives on ``ranks`` might meet those of a call that has failed a moment ago."""
        if time.monotonic() >= self._settle_by:
            return False
        return self._uneven or any(not set(ranks).isdisjoint(call.members.ranks()) for call in self._failing.values())

    def _release(self) -> None:
        """Send what need not queue any more."""
        held, self._held = self._held, []
        now = time.monotonic()
        times = [at for each in held for at in (each.until, each.until + BACK_S) if at > now]
        self._release_at = min(times, default=math.inf)
        if now < self._settle_by:
            self._release_at = min(self._release_at, self._settle_by)
        self._groups.release()
        for each in held:
            if self._must_queue(each, self._held):
                self._held.append(each)
            elif each.ranks:
                each.transmit()

    # ---- looking --------------------------------------------------------------------------------------------------

    def watch(self, call: OpenCall) -> None:
        """A rank has answered ``call``, or was lost, or somebody wants its end."""
        if not (call.failed or call.cancelled) or self._mesh.lost:
            self._failing.pop(call.id, None)  # of the dead everybody is freed at once
        else:
            self._note_failed(call)
        if self._held:
            self._release()

    def _note_failed(self, call: OpenCall) -> None:
        if not call.waiting:
            self._failing.pop(call.id, None)
            self._suspects.pop(call.id, None)
        else:
            self._failing[call.id] = call
        self.note_uneven(FIRST_LOOK_S if self._failing else 0.0)

    def note_uneven(self, pause_s: float = 0.0) -> None:
        """Actors may have left groups of no use: ask the ranks in a moment."""
        now = time.monotonic()
        self._uneven, self._pause_s = True, FIRST_LOOK_S
        self._settle_by = self._release_at = now + SETTLE_S
        self._look_at = min(self._look_at, now + pause_s)

    def holds(self, call: OpenCall) -> bool:
        """Whether a call that all have ended completes later: ranks may have disagreed, and are asked."""
        self._long.forget(call)
        if not self._groups.agreements.doubted or self._mesh.lost:
            return False
        self._doubtful[call.id] = call
        self._look_at = time.monotonic()
        return True

    def _judge(self, look: ProgressSnapshot) -> None:
        """Complete these calls; where their ranks disagree, as failed, and with the groups formed again."""
        found = find_disagreements(look.answers)
        self._groups.agreements.clear()
        for group in found:
            for call in self._judged.values():
                if any(call.members.has(rank) for rank in group.ranks):
                    call.disagree(group.ranks, group.text)
        if found and self._groups.phase is GroupPhase.FORMED:
            mailboxes = {call.mailbox for call in self._judged.values()}
            self._abort(look, found[0].text, {group.group for group in found}, mailboxes)
        self._complete(self._judged)

    def _judge_open(self, look: ProgressSnapshot) -> None:
        """Free the actors that disagree and wait for each other: they are never served rightly."""
        calls = {call.id: call for call in self._asked} | self._failing
        self._asked = []
        if not calls or self._groups.phase is not GroupPhase.FORMED or not self._is_certain(look):
            return
        for group in find_disagreements(look.answers):
            users = {box for told in look.answers.values() for each in told.groups if each.name == group.group
                     for box in each.mailboxes}  # fmt: skip
            theirs = [call for call in calls.values() if call.mailbox in users]
            theirs = [call for call in theirs if any(call.members.has(rank) for rank in group.ranks)]
            for call in theirs:
                if call.disagree(group.ranks, group.text) and call.waiting:
                    self._calls.tell(call.output, Notice(f"{call.what}: {group.text}\n  freed", call.output))
            if theirs:
                self._abort(look, group.text, {group.group}, {call.mailbox for call in theirs})

    def _complete(self, calls: dict[int, OpenCall]) -> None:
        while calls:
            self._calls.complete(calls.popitem()[1])

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        return min(self._poll.due if self._poll.busy else min(self._look_at, self._long.due), self._release_at)

    def expire(self, now: float) -> None:
        """Do what is due."""
        self._poll.expire(now)
        if not self._poll.busy and (self._look_at <= now or self._long.is_due(now)):
            self._look_at, self._asked = math.inf, self._long.postpone(now)
            if self._groups.phase is not GroupPhase.ABORTED or self._mesh.lost:
                self._formed_later = False  # whoever came first has formed them
            phases = (GroupPhase.FORMED, GroupPhase.NONE, *([GroupPhase.ABORTED] if self._formed_later else []))
            if self._groups.phase in phases and not self._mesh.lost:
                calls = [*self._failing.values(), *self._calls.running(self._mesh.id)]
                self._judged, self._doubtful = self._doubtful, {}
                self._poll.ask(calls, ALL if self._judged else RECENT)
            elif not self._mesh.lost and (self._failing or self._uneven):
                self._look_at = now + SELDOM_LOOK_S  # the groups are being formed, or will be
            self._complete(self._doubtful)  # asked or not: of groups that are no more nothing can be said
        if self._release_at <= now:
            self._release()

    def stop(self) -> None:
        """The mesh is being stopped."""
        self._failing.clear()
        self._held.clear()
        self._long = UnevenCalls()
        self._poll.give_up()
        self._uneven, self._look_at, self._release_at, self._settle_by = False, math.inf, math.inf, 0.0

    def _on_look(self, look: ProgressSnapshot) -> None:
        if self._judged:
            self._judge(look)
        else:
            self._judge_open(look)
        if self._formed_later:
            self._form(look)
        elif not self._free_stuck(look):
            self._compare(look)
            if self._failing or self._uneven:
                pause_s = FIRST_LOOK_S if self._suspects or self._suspected else self._pause_s
                self._look_at = time.monotonic() + pause_s
                self._pause_s = min(2 * self._pause_s, SELDOM_LOOK_S if self._failing else UNEVEN_LOOK_S)
        self._release()

    def _free_stuck(self, look: ProgressSnapshot) -> bool:
        """Free those that were stuck when ranks were asked before, and still are; whether there were any."""
        before, self._suspects = self._suspects, {}
        for call in list(self._failing.values()) if self._is_certain(look) else ():
            stuck = self._find(look, call)
            if stuck and before.get(call.id) == stuck.keys():
                self._free(look, call, stuck)
                return True
            if stuck:
                self._suspects[call.id] = frozenset(stuck)
        return False

    def _is_certain(self, look: ProgressSnapshot) -> bool:
        return not look.missing(self._mesh.lost) and not any(told.aborted for told in look.answers.values())

    def _compare(self, look: ProgressSnapshot) -> None:
        """Have groups formed again that calls have left uneven. While actors are at work in them, nobody can tell."""
        if not self._uneven or not self._is_certain(look):
            return
        found = differing_groups(look.answers, of_cells=False)
        odd = [each for each in found if each.is_certain or each in self._suspected]
        self._suspected = found
        if odd:
            self._uneven, self._suspected = False, []
            names = only_where_shared(look.answers, {each.name for each in odd})
            self._groups.abort(odd[0].reason, groups=names)
        elif not found:
            self._settle_by = self._settle_by if self._failing else 0.0
            self._uneven = bool(self._failing) or are_in_use(look.answers)

    def _form(self, look: ProgressSnapshot) -> None:
        """Once none of the actors that were freed is at work."""
        now = time.monotonic()
        busy = look.missing(self._mesh.lost) or any(
            told.call or not self._freed.isdisjoint(told.handling.values()) for told in look.answers.values()
        )
        if busy and now < self._form_by:
            self._look_at = now + FORM_LOOK_S
        else:
            self._formed_later = False
            self._uneven = self._groups.is_partial  # else all groups are new
            self._freed.clear()
            if self._groups.phase is GroupPhase.ABORTED:
                self._groups.form_if_free()
            if self._failing or self._uneven:
                self._look_at = now + SELDOM_LOOK_S

    def _find(self, look: ProgressSnapshot, call: OpenCall) -> dict[int, Stuck]:
        """Who waits for ever, if no message for the actors of ``call`` is on its way."""
        idle = [rank for rank, told in look.answers.items() if not told.call]
        stuck = find_deadlocked(look.answers, idle, mailbox=call.mailbox)
        return {rank: each for rank, each in stuck.items() if rank in call.waiting}

    def _free(self, look: ProgressSnapshot, call: OpenCall, stuck: dict[int, Stuck]) -> None:
        call.abort(where_stuck(stuck.items()))
        cause = cause_of(call)
        for line in place_and_absent(stuck):
            self._calls.tell(call.output, Notice(f"{call.what}: {cause}; {line}; freed", call.output))
        self._abort(look, cause, {each.waiting.group for each in stuck.values()}, {call.mailbox})
        self._failing.pop(call.id, None)

    def _abort(self, look: ProgressSnapshot, reason: str, names: set[str], mailboxes: set[int]) -> None:
        """Abort groups; they are formed again when none of these actors is at work."""
        self._groups.abort(reason, form=False, groups=only_where_shared(look.answers, names, mailboxes))
        self._freed |= mailboxes
        self._formed_later = True
        now = time.monotonic()
        self._look_at, self._form_by = now + FORM_LOOK_S, now + FORM_S
