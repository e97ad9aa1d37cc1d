"""Actors that wait in collectives for one that has failed: freed, as `meshbook.rescue` frees cells.

A call to a mailbox has failed on some ranks, and others have not ended it. Once nothing else goes on in the mesh, the
ranks are asked how far their groups are, and asked again after a while, so that what was on its way has come. If both
times it was certain (`meshbook.stuck`) that those who wait are never served, the groups are aborted and formed again.

    sound, since    a rank that has ended the call has no cell and no busy actor: nobody there will do its part
                    a rank that waits has no other busy actor

Calls that actors make, and messages that nobody waits for, are not seen here: there an interrupt, or
`ProcMesh.abort_groups`, helps. When calls that failed or were interrupted have ended, groups that are not equally far
on all members are formed again. Under the turn of `meshbook.turns`, as `GroupRescue`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from meshbook.agreements import find_disagreements
from meshbook.call_table import CallTable
from meshbook.calls import OpenCall
from meshbook.known_mesh import KnownMesh
from meshbook.lifecycle import GroupPhase
from meshbook.looks import ALL, RECENT, Look, Looks
from meshbook.mismatches import place_and_absent
from meshbook.output_events import Notice
from meshbook.rescue import FIRST_LOOK_S, SELDOM_LOOK_S, GroupRescue, cause_of
from meshbook.stuck import Stuck, differing_groups, find_stuck, where_stuck

FORM_LOOK_S = 0.01
"""How often it is asked, after actors were freed, whether they have all come back."""

FORM_S = 1.0
"""So long the forming of groups waits for that."""

MAX_LOOKS = 40
"""Without a failure in between; with ever longer pauses, up to `SELDOM_LOOK_S`."""


class MailRescue:
    """Of the calls to the mailboxes of one mesh. groups: what is aborted and formed again."""

    def __init__(self, mesh: KnownMesh, calls: CallTable, next_id: Callable[[], int], groups: GroupRescue) -> None:
        self._mesh, self._calls, self._groups = mesh, calls, groups
        self._failing: dict[int, OpenCall] = {}
        self._suspects: dict[int, frozenset[int]] = {}
        """Call to the ranks that the last look found stuck."""
        self._looks = Looks(mesh, calls, next_id, self._on_look)
        self._doubtful: dict[int, OpenCall] = {}
        """Calls that have ended, and complete when the ranks have told in what they disagree."""
        self._judged: dict[int, OpenCall] = {}
        """Those of them for which ranks were asked."""
        self._uneven = False
        """Calls have failed, and nobody has compared the groups since."""
        self._formed_later = False
        """The groups were aborted, and are formed again when no actor is at work: none may meet the forming."""
        self._look_at = self._form_by = math.inf
        self._pause_s = FIRST_LOOK_S
        self._looked = 0

    def watch(self, call: OpenCall) -> None:
        """A rank has answered ``call``, or was lost, or somebody wants its end."""
        if not (call.failed or call.cancelled) or self._mesh.lost:
            self._failing.pop(call.id, None)  # of the dead everybody is freed at once
            return
        if not call.waiting:
            self._failing.pop(call.id, None)
            self._suspects.pop(call.id, None)
        elif call.id not in self._failing:
            self._failing[call.id] = call
        self._uneven = True
        self._pause_s, self._looked = FIRST_LOOK_S, 0
        self._look_at = min(self._look_at, time.monotonic() + FIRST_LOOK_S)

    def holds(self, call: OpenCall) -> bool:
        """Whether a call that all have ended completes later: ranks may have disagreed, and are asked."""
        if not self._groups.agreements.doubted or self._mesh.lost:
            return False
        self._doubtful[call.id] = call
        self._look_at = time.monotonic()
        return True

    def _judge(self, look: Look) -> None:
        """Complete these calls; where their ranks disagree, as failed, and with the groups formed again."""
        found = find_disagreements(look.answers)
        self._groups.agreements.clear()
        for group in found:
            for call in self._judged.values():
                if any(call.members.has(rank) for rank in group.ranks):
                    call.disagree(group.ranks, group.text)
        if found and self._groups.phase is GroupPhase.FORMED:
            self._abort(found[0].text)
        self._complete(self._judged)

    def _complete(self, calls: dict[int, OpenCall]) -> None:
        while calls:
            self._calls.complete(calls.popitem()[1])

    @property
    def due(self) -> float:
        """When `expire` wants to be called."""
        return self._looks.due if self._looks.busy else self._look_at

    def expire(self, now: float) -> None:
        """Do what is due."""
        self._looks.expire(now)
        if not self._looks.busy and self._look_at <= now:
            self._look_at = math.inf
            self._formed_later = self._formed_later and not self._mesh.lost
            phases = (GroupPhase.FORMED, GroupPhase.NONE, *([GroupPhase.ABORTED] if self._formed_later else []))
            if self._groups.phase in phases and not self._mesh.lost:
                calls = [*self._failing.values(), *self._calls.running(self._mesh.id)]
                self._judged, self._doubtful = self._doubtful, {}
                self._looks.ask(calls, ALL if self._judged else RECENT)
            elif not self._mesh.lost and (self._failing or self._uneven or self._formed_later):
                self._look_at = now + SELDOM_LOOK_S  # the groups are being formed, or will be
            self._complete(self._doubtful)  # asked or not: of groups that are no more nothing can be said

    def stop(self) -> None:
        """The mesh is being stopped."""
        self._failing.clear()
        self._looks.give_up()
        self._uneven, self._look_at = False, math.inf

    def _on_look(self, look: Look) -> None:
        before, self._suspects = self._suspects, {}
        if self._judged:
            self._judge(look)
        if self._formed_later:
            self._form(look)
            return
        certain = not look.missing(self._mesh.lost) and not any(told.aborted for told in look.answers.values())
        for call in list(self._failing.values()) if certain else ():
            stuck = self._find(look, call)
            if stuck and before.get(call.id) == stuck.keys():
                self._free(call, stuck)
                return
            if stuck:
                self._suspects[call.id] = frozenset(stuck)
        at_rest = certain and not any(told.call or told.actors or told.waiting for told in look.answers.values())
        if at_rest and self._uneven:
            self._uneven = False
            if reasons := differing_groups(look.answers):
                self._groups.abort(reasons[0])
        self._looked += 1
        if (self._failing or self._uneven) and self._looked < MAX_LOOKS:
            self._look_at = time.monotonic() + (FIRST_LOOK_S if self._suspects else self._pause_s)
            self._pause_s = min(2 * self._pause_s, SELDOM_LOOK_S)

    def _form(self, look: Look) -> None:
        """Once no actor is at work."""
        now = time.monotonic()
        busy = look.missing(self._mesh.lost) or any(told.call or told.actors for told in look.answers.values())
        if busy and now < self._form_by:
            self._look_at = now + FORM_LOOK_S
        else:
            self._formed_later = self._uneven = False
            if self._groups.phase is GroupPhase.ABORTED:
                self._groups.form_if_free()

    def _find(self, look: Look, call: OpenCall) -> dict[int, Stuck]:
        """Who waits for ever, if nothing but ``call`` goes on and all who have ended it are idle."""
        waiting = {rank for rank in call.members.ranks() if rank not in look.ended.get(call.id, ())}
        for rank, told in look.answers.items():
            if told.call or told.actors != (1 if rank in waiting else 0):
                return {}
        stuck = find_stuck(look.answers, look.answers.keys() - waiting)
        return stuck if stuck.keys() <= waiting else {}

    def _free(self, call: OpenCall, stuck: dict[int, Stuck]) -> None:
        call.aborted = True
        call.places.update(where_stuck(stuck.items()))
        cause = cause_of(call)
        for line in place_and_absent(stuck):
            self._calls.tell(call.output, Notice(f"{call.what}: {cause}; {line}; freed", call.output))
        self._abort(cause)
        self._failing.pop(call.id, None)

    def _abort(self, reason: str) -> None:
        """Abort the groups; they are formed again when no actor is at work."""
        self._groups.abort(reason, form=False)
        self._formed_later = True
        now = time.monotonic()
        self._look_at, self._form_by = now + FORM_LOOK_S, now + FORM_S
