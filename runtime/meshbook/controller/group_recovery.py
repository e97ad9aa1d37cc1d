"""The controller's help for ranks of one mesh that wait in vain, and for its process groups afterwards. Under the turn.

    calls ──> CallQueue ──> ranks      calls that may not be sent yet queue (`meshbook.controller.call_queue`)
    GroupRecovery                      asks the ranks how far they are, proves who is stuck, and compares the groups
    GroupFormer                        aborts the groups, which frees the ranks, and forms them again

All states are those of `meshbook.lifecycle.GroupPhase` and `meshbook.lifecycle.GroupDoubt`, which the former keeps.
After each event the queue is looked through: any of them may have been the one that a call waited for. This is one
class, since each step looks at the failed, the ended and the long calls together.

While a call has a failed or lost rank, or was interrupted, all ranks are asked how far their groups are. When
`meshbook.groups.deadlock` proves that some can never be served, the groups are aborted: those ranks come back with
GroupAborted, which is not their failure. When the call has ended everywhere, groups that were aborted, or that are not
equally far on all members, are formed again. A cell completes after that, or at `DEADLINE_S` with a word on why the
groups are not back.

    a call fails on a rank ──> look, look, ... ──proof──> abort ──> all ranks ended ──> form ──> the call completes
                                      └── all ended ──> compare ──equal──> the call completes
                                                           └──not equal──> abort ──> form ──> ...

Calls to main threads (cells above all) and to mailboxes (actors) differ in who counts as idle, and so in the rest:

                    main threads                                    a mailbox
    idle            a rank that had ended the call when asked       a rank with an idle main thread; of its actors only
                                                                    those that were called are looked at
    proof           one: what a main thread begins after that       two, with all ranks answering: what was on its way
                    is no matter of the call                        has come by the second
    formed again    when nothing runs that was begun before         when none of the actors that were freed is at work
                                                                    either (`GroupPhase.DRAINING`): none may meet it

Nothing is asked while nothing failed, but for calls that take long, less and less often: their ranks may be uneven
though nobody failed (`meshbook.controller.progress_poll`), or disagree, from which they are freed. Calls that actors
make, and messages that nobody waits for, are not seen here: there an interrupt helps.

*The next call* must not meet the failed one. Calls queue (`meshbook.controller.call_queue`)

    to the same ranks, or actors    until they have ended the failed call, behind which they would queue anyway
    to other actors, and cells      after an actor failed for a moment (`SETTLE_S`): until it is known that the groups
                                    are sound, or they are back
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from meshbook.calls.call import OpenCall
from meshbook.calls.output import Notice
from meshbook.calls.table import CallTable, OnStates, OpenQuestion
from meshbook.controller.call_queue import CallQueue, Unsent
from meshbook.controller.group_former import UNSOUND, GroupFormer, cause_of
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.progress_poll import (
    ALL,
    FIRST_LOOK_S,
    RECENT,
    SELDOM_LOOK_S,
    LongCalls,
    ProgressPoll,
    ProgressSnapshot,
    describe_uneven,
    place_and_absent,
)
from meshbook.controller.queries import put
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Agreements, Disagreement, decode_told, find_disagreements
from meshbook.groups.deadlock import (
    Stuck,
    are_in_use,
    differing_groups,
    find_deadlocked,
    mailboxes_of,
    only_where_shared,
    place_of,
    where_stuck,
)
from meshbook.groups.progress import Collectives
from meshbook.lifecycle import DoubtEvent, GroupDoubt, GroupPhase
from meshbook.shape.members import Members
from meshbook.wire import messages as wire

DEADLINE_S = 2.0  # a failed call waits so long for its groups to come back
DRAIN_LOOK_S = 0.01  # pause between questions to actors that were freed, until they have all come back
DRAIN_S = 1.0  # the forming of groups waits so long for that
BACK_S = 10.0  # calls to actors queue so much longer while the groups are being formed again
UNEVEN_LOOK_S = 2.0  # pause between questions while others are at work in groups that a call may have left uneven
SETTLE_S = 0.5  # a failure of an actor keeps calls to other actors, and cells, waiting at most so long


class _Ended(NamedTuple):
    """A call that all ranks have ended, and that has not completed."""

    call: OpenCall
    in_new: bool  # whether its groups were being formed then
    deadline: float  # it completes then, whatever the state of the groups


class GroupRecovery:
    """The failed, ended and long calls of one mesh, the ranks' reports on them, and the calls that queue meanwhile."""

    def __init__(self, mesh: MeshState, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._mesh, self._calls, self._next_id = mesh, calls, next_id
        self.agreements = Agreements()
        self._queue = CallQueue(self._must_wait, (SETTLE_S, SETTLE_S + BACK_S))
        self._poll = ProgressPoll(mesh, calls, next_id, self._on_look)
        self._former = GroupFormer(mesh, calls, self._queue, self._poll, next_id, self._on_formed)
        self._failing: dict[int, OpenCall] = {}
        # operations of groups that ranks disagree in or were freed of. Until the groups are formed again ranks remember
        # them, while they, and those who never came, go on to other calls
        self._judged: set[tuple[str, int]] = set()
        # a cell that failed when ranks had begun with others behind it: the progress of these says nothing about it
        self._failed_before: OpenCall | None = None
        self._ended: dict[int, _Ended] = {}
        self._long = LongCalls()
        self._asked: list[OpenCall] = []  # calls that are open for long, for which the ranks are being asked
        # call to a mailbox to the ranks that were stuck when the ranks were asked last
        self._stuck: dict[int, frozenset[int]] = {}
        self._uneven = False  # whether actors have failed, and the groups were not compared since
        # other calls queue until then: actors have failed, and the state of the groups is unknown
        self._settle_by = 0.0
        self._freed: set[int] = set()  # mailboxes of the actors that were freed, while the groups are draining
        self._drain_by = 0.0

    # ---- what may not be sent yet -----------------------------------------------------------------------------------

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send a new call, or a message without an answer, now or when it meets no failed one."""
        if call is not None:
            self._long.suspect(call)
        is_troubled = self._failing or self._ended or self._uneven or self._former.phase in UNSOUND
        if is_troubled or self._queue.queued:
            self._queue.send(mailbox, members, transmit, call)
        else:
            transmit()  # the path of nearly all calls

    def _must_wait(self, new: Unsent) -> bool:
        """Whether a call or message may not be sent yet."""
        if new.mailbox:
            return self._actor_must_wait(new)
        is_compared = self._former.is_sound and any(not ended.call.mailbox for ended in self._ended.values())
        if is_compared or self._former.phase is GroupPhase.DRAINING:
            return True
        return self._is_at_failed(new) or self._is_unsettled(new.ranks)

    def _actor_must_wait(self, new: Unsent) -> bool:
        if not (self._failing or self._uneven) and self._former.is_sound:
            return False
        if self._is_at_failed(new):
            return True
        now, until = time.monotonic(), new.since + SETTLE_S
        is_coming_back = self._former.is_aborted and not self._mesh.lost and not self._former.running()
        if is_coming_back or self._former.phase is GroupPhase.FORMING:
            return now < until + BACK_S
        if now >= until or self._mesh.lost:
            return False
        return not self._former.is_sound or self._is_unsettled(new.ranks)

    def _is_at_failed(self, new: Unsent) -> bool:
        """Whether some of its ranks have not ended a failed call of the same mailbox, or of main threads."""
        failing = [call for call in self._failing.values() if call.mailbox == new.mailbox and not call.beside]
        return any(not call.waiting.isdisjoint(new.ranks) for call in failing)

    def _is_unsettled(self, ranks: Collection[int]) -> bool:
        """Whether collectives on ``ranks`` might meet those of an actor that has failed a moment ago."""
        if time.monotonic() >= self._settle_by:
            return False
        actors = [call for call in self._failing.values() if call.mailbox]
        return self._uneven or any(not set(ranks).isdisjoint(call.members.ranks()) for call in actors)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def cancel(self, call: OpenCall) -> bool:
        """Cancel a call. Return True if it still queued here, and has ended now."""
        call.cancel()
        if not call.mailbox:
            self._former.cancel_forming(older_than_s=DEADLINE_S)  # what was cancelled waits behind it
        if dropped := self._queue.drop(call):
            self._calls.settle_if_done(call)
        elif call.waiting and call.id not in self._former.own:
            self._watch(call)
            self._queue.release()
        return dropped

    def on_told(self, call: OpenCall, rank: int, encoded: bytes) -> None:
        """Take in the report on a rank's groups that came with its answer."""
        told = decode_told(encoded)
        self.agreements.compare(rank, told)
        if told.broken:
            self._former.note(DoubtEvent.TOLD)
            if call.mailbox:
                self._note_uneven()
        is_forming = self._former.is_forming(call)  # which reports tensors of other calls
        for each in [ended.call for ended in self._ended.values()] if is_forming else [call]:
            copied = () if each.mailbox and not self._mesh.lost else told.copied
            each.tear(rank, (*told.torn, *copied), told.restored)

    def watch(self, call: OpenCall) -> bool:
        """Take in that a rank has answered or was lost; whether a call that has ended everywhere completes later."""
        is_own = call.id in self._former.own
        if not self._queue.queued:  # the path of nearly all answers
            if call.waiting and not (is_own or call.failures or call.lost or call.cancelled):
                self._long.suspect(call)
                return False
            if not call.waiting and self._has_ended_well(call):
                return False
        if is_own:
            self._former.watch(call)
            return False
        later = self._watch(call) if not (call.waiting and self._queue.holds(call)) else False
        self._queue.release()
        return later

    def _has_ended_well(self, call: OpenCall) -> bool:
        """Forget a call that has ended everywhere as most do; return False where it is to be looked at."""
        if self._failing or self._ended or self._uneven or self._stuck or self.agreements.doubted:
            return False
        if call.failures or call.lost or call.freed or call.cancelled:
            return False
        if self._former.phase in UNSOUND or self._former.doubt is not GroupDoubt.NONE:
            return False
        self._long.calls.pop(call.id, None)
        return True

    def _watch(self, call: OpenCall) -> bool:
        """Look at a call that does not go the way of most; returns as `watch`."""
        if call.waiting:
            if (call.failed or call.cancelled) and not call.mailbox and call.id not in self._failing:
                self._failing[call.id] = call
                self._poll.look_soon()
            elif (call.failed or call.cancelled) and call.mailbox and not self._mesh.lost:
                self._failing[call.id] = call  # of the dead everybody is freed at once
                self._note_uneven(FIRST_LOOK_S)
            self._long.suspect(call)
            return False
        self._failing.pop(call.id, None)
        self._stuck.pop(call.id, None)
        self._long.calls.pop(call.id, None)
        return self._watch_ended_actors(call) if call.mailbox else self._watch_ended_cell(call)

    def _watch_ended_actors(self, call: OpenCall) -> bool:
        """Ask the ranks if they may have disagreed, and return True: the call completes later then."""
        if self._mesh.lost:
            return False
        if call.failed or call.cancelled:
            self._note_uneven(FIRST_LOOK_S if any(each.mailbox for each in self._failing.values()) else 0.0)
        if not self.agreements.doubted or not self._is_told_of_actors:
            return False
        self._end(call)
        self._poll.look_in(0.0)
        return True

    def _watch_ended_cell(self, call: OpenCall) -> bool:
        former = self._former
        trouble = call.failed or call.freed or call.cancelled or self.agreements.doubted
        trouble = trouble or former.doubt is GroupDoubt.TOLD
        trouble = trouble or (former.doubt is GroupDoubt.PARTIAL and not former.running())
        if trouble and not self._mesh.lost:
            self._end(call)
        if former.phase is GroupPhase.FORMING:  # failures are told before the ends of what went well
            return call.id in self._ended
        former.form_if_free()
        if former.is_sound and call.id in self._ended and not self._poll.busy:
            self._ask()
        return call.id in self._ended

    def _end(self, call: OpenCall) -> None:
        in_new = self._former.phase is GroupPhase.FORMING
        self._ended[call.id] = _Ended(call, in_new, time.monotonic() + DEADLINE_S)

    def _note_uneven(self, pause_s: float = 0.0) -> None:
        """Ask the ranks in a moment: actors may have left groups that are of no use."""
        self._uneven = True
        self._settle_by = time.monotonic() + SETTLE_S
        self._queue.wake(self._settle_by)
        self._poll.look_soon(pause_s)

    def on_lost(self) -> None:
        """Abort the groups of a rank that ended, which `MeshState.lost` has: nothing that includes it can be served."""
        lost = self._mesh.lost
        self._give_up_waiting()
        current = self._former.current().items()
        innocent = {rank for rank, call in current if not any(call.members.has(each) for each in lost)}
        ways_out = f"repair: {advice().heal_call}    without it: {advice().shrink}"
        self._former.reset(f"{name_ranks(lost)} ended\n  {ways_out}", spare=innocent)
        self._queue.release()

    def _give_up_waiting(self) -> None:
        """Complete the calls that wait for groups, which do not come back; actors are freed at once."""
        self._failing = {id: call for id, call in self._failing.items() if not call.mailbox}
        for id in list(self._ended):
            self._calls.complete(self._ended.pop(id).call)

    def _on_formed(self) -> None:
        """Complete the calls that waited for groups: these are back, or will not come."""
        self._judged.clear()
        if not (self._failing or self._uneven):
            self._poll.rest()
        for id in [id for id, ended in self._ended.items() if not ended.in_new]:
            self._calls.complete(self._ended.pop(id).call, self._not_back())
        for id, ended in self._ended.items():  # not all of their ranks had told how they ended: they may be uneven
            self._ended[id] = ended._replace(in_new=False)
        if self._ended and not self._poll.busy:
            self._ask()
        self._queue.release()

    # ---- groups -----------------------------------------------------------------------------------------------------

    def abort(self, reason: str, ranks: Collection[int] | None = None) -> None:
        """Abort the groups of all ranks; they are formed again when the calls that run have ended. ranks: if given,
        other ranks that run calls keep their groups until then."""
        self._former.reset(reason, spare=() if ranks is None else self._former.current().keys() - set(ranks))

    def form(self, call: OpenCall) -> None:
        """Form the groups, in place where there are some; the caller waits for ``call``."""
        self._former.form(call)
        self._queue.release()

    def stop(self) -> None:
        """Stop, since the mesh is being stopped, or left."""
        self._queue.queued.clear()
        self._give_up_waiting()
        self._failing.clear()
        self._poll.give_up()
        self._long = LongCalls()
        self._uneven, self._settle_by = False, 0.0

    # ---- asking -----------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """Return when `expire` is due."""
        look = self._poll.look
        due = min(self._poll.look_at, self._long.due) if look is None else look.until
        for ended in self._ended.values():
            due = min(due, ended.deadline)
        if self._queue.queued or self._former.phase in UNSOUND:
            due = min(due, self._former.due, self._queue.due)
        return due

    def expire(self, now: float) -> None:
        """Take the steps that are due."""
        self._poll.expire(now)
        if not self._poll.busy and (self._poll.is_due(now) or self._long.is_due(now)):
            self._ask()
        for id in [id for id, ended in self._ended.items() if ended.deadline <= now]:
            self._poll.expire(math.inf)  # for the names of those that hold it up
            if (late := self._ended.pop(id, None)) is not None:
                why = self._not_back()
                if self._former.is_sound and not late.call.mailbox:
                    self._former.note(DoubtEvent.UNANSWERED)
                self._calls.complete(late.call, why)
        if self._former.doubt is GroupDoubt.UNANSWERED and not self._poll.busy:
            self._poll.look_in(SELDOM_LOOK_S)
        self._former.expire(now)
        self._queue.release()

    def ask_states(self, ranks: Collection[int], timeout_s: float, on_done: OnStates) -> None:
        """Ask for states as `CallWatcher`, behind the calls, so that ranks which have not got theirs yet run then."""
        question = OpenQuestion(
            self._next_id(), self._mesh.id, wire.ProcessState, timeout_s, lambda done: on_done(done.told)
        )
        asked = wire.AskProcesses(in_order=True)
        put(self._calls, question, self._mesh, self._mesh.by_host(ranks), asked, in_order=True)

    def _ask(self) -> None:
        self._asked = self._long.postpone(time.monotonic())
        calls = [*self._former.running(), *(ended.call for ended in self._ended.values())]
        self._poll.ask(calls, ALL if self.agreements.doubted or self._asked else RECENT)

    @property
    def _is_told_of_actors(self) -> bool:
        """Whether the ranks' reports cover actors: not while the groups are aborted or being formed."""
        return self._former.is_sound or self._former.phase is GroupPhase.DRAINING

    def _on_look(self, look: ProgressSnapshot) -> None:
        """Free ranks that are stuck, then ranks that disagree; compare the sound groups; form the aborted ones."""
        former = self._former
        former.on_look(look)
        asked, self._asked = [call for call in self._asked if call.waiting], []
        if former.phase is not GroupPhase.FORMING and former.phase is not GroupPhase.NONE:
            self._free_stuck(look, asked)
            self._judge(look, asked)
        seen = [
            id for id, ended in self._ended.items() if look.ended.get(id, frozenset()) >= {*ended.call.members.ranks()}
        ]
        for id, ended in list(self._ended.items()):  # of actors, whose ranks have reported by now, or cannot
            if ended.call.mailbox and (id in seen or not self._is_told_of_actors):
                self._calls.complete(self._ended.pop(id).call)
        self._compare(look, [id for id in seen if id in self._ended])
        for call in asked:
            if call.mailbox or call.id in self._failing or former.is_aborted:
                continue
            if text := describe_uneven(call, look, self._mesh.lost, self._mesh.axes):
                self._long.silence(call)
                self._calls.tell(call.output, Notice(text))
        if former.phase is GroupPhase.DRAINING:  # until none of the actors that were freed is at work
            is_busy = look.missing(self._mesh.lost) or any(
                told.call or not self._freed.isdisjoint(told.handling.values()) for told in look.answers.values()
            )
            if is_busy and time.monotonic() < self._drain_by:
                self._poll.look_in(DRAIN_LOOK_S)
            else:
                self._uneven = bool(former.only)  # else all groups are new
                former.end_draining()
        former.form_if_free(look)
        self._plan_next_look()
        self._queue.release()

    def _plan_next_look(self) -> None:
        """Have the ranks asked again, if anything is still open."""
        former, poll = self._former, self._poll
        if poll.odd or self._stuck:
            poll.look_in(FIRST_LOOK_S)
        elif self._ended and former.is_sound:
            poll.look_in(0.0)
        if self._failing or (former.is_aborted and former.running()):
            poll.look_again()
        elif self._uneven:
            poll.look_again(UNEVEN_LOOK_S)
        if former.doubt is GroupDoubt.UNANSWERED:
            poll.look_in(SELDOM_LOOK_S)

    # ---- who is stuck -----------------------------------------------------------------------------------------------

    def _free_stuck(self, look: ProgressSnapshot, asked: Collection[OpenCall]) -> None:
        former, lost, answers = self._former, self._mesh.lost, self._up_to_failures(look)
        before, self._stuck = self._stuck, {}
        was_aborted = former.is_aborted
        for call in list(self._failing.values()):
            if call.mailbox:
                self._free_actors(look, call, before.get(call.id))
            elif stuck := find_deadlocked(answers, look.ended.get(call.id, ()), lost):
                self._free(look, cause_of(call), stuck)
        if former.doubt is GroupDoubt.PARTIAL and self._failed_before is not None:
            for call in asked:  # its operations may have met some of the one that failed
                if not call.mailbox and (stuck := find_deadlocked(look.answers, look.ended.get(call.id, ()), lost)):
                    self._free(look, cause_of(self._failed_before), stuck)
        if was_aborted and (stuck := find_deadlocked(look.answers, (), lost)):
            self._free(look, former.why, stuck)  # ranks that were spared may wait for those that were not

    def _up_to_failures(self, look: ProgressSnapshot) -> Mapping[int, Collectives]:
        """Return the reports without operations that ranks have begun behind a failed cell that is not settled."""
        unsettled = {call.id for call in self._failed_cells()}
        return {
            rank: told.up_to_failure() if told.failed_call in unsettled else told for rank, told in look.answers.items()
        }

    def _free(self, look: ProgressSnapshot, reason: str, stuck: dict[int, Stuck]) -> None:
        names = only_where_shared(look.answers, {each.waiting.group for each in stuck.values()})
        spare, answers = self._at_no_failed() - stuck.keys(), self._up_to_failures(look)
        self._judged |= {
            (each.waiting.group, each.waiting.number)
            for each in stuck.values()
            if not any(_has_entered(answers, rank, each.waiting.group, each.waiting.number) for rank in each.absent)
        }
        self._former.abort(reason, places=where_stuck(stuck.items()), spare=spare, groups=names)

    def _free_actors(self, look: ProgressSnapshot, call: OpenCall, before: frozenset[int] | None) -> None:
        """Free the actors that were stuck when ranks were asked before, and still are."""
        if self._former.phase is not GroupPhase.FORMED or not self._is_certain(look):
            return
        idle = [rank for rank, told in look.answers.items() if not told.call]
        found = find_deadlocked(look.answers, idle, mailbox=call.mailbox)
        stuck = {rank: each for rank, each in found.items() if rank in call.waiting}
        if not stuck or before != stuck.keys():
            self._stuck.update({call.id: frozenset(stuck)} if stuck else {})
            return
        call.abort(where_stuck(stuck.items()))
        cause = cause_of(call)
        for line in place_and_absent(stuck):
            self._calls.tell(call.output, Notice(f"{call.what}: {cause}; {line}; freed"))
        self._drain(look, cause, {each.waiting.group for each in stuck.values()}, {call.mailbox})
        self._failing.pop(call.id, None)

    def _is_certain(self, look: ProgressSnapshot) -> bool:
        return not look.missing(self._mesh.lost) and not any(told.aborted for told in look.answers.values())

    def _at_no_failed(self) -> set[int]:
        """Return the ranks that run calls which have not failed."""
        return {rank for rank, call in self._former.current().items() if call.id not in self._failing}

    # ---- who disagrees, and which groups are uneven -----------------------------------------------------------------

    def _judge(self, look: ProgressSnapshot, asked: Collection[OpenCall]) -> None:
        """Fail the calls in which ranks disagree, and free the ranks that wait there: they are never served rightly."""
        former = self._former
        found = [each for each in find_disagreements(look.answers) if (each.group, each.number) not in self._judged]
        found = [each for each in found if not self._free_behind_failed(each, look)]
        ended, still_open = [each.call for each in self._ended.values()], [*self._failing.values(), *asked]
        concerns_cells = any(not call.mailbox for call in (*ended, *still_open))
        at = {call.id: call for call in former.current().values()}  # what waits behind these is not to blame
        calls = [*ended, *(at.values() if concerns_cells else ())]
        if former.phase is GroupPhase.FORMED and self._is_certain(look):
            calls += [call for call in still_open if call.mailbox]
        failed = [call for group in found for call in calls if self._fail_in(group, call, look)]
        if found and former.phase is GroupPhase.FORMED:
            names = {each.group for each in found}
            if concerns_cells:
                innocent = {rank for rank, call in former.current().items() if not call.disagrees}
                former.abort(found[0].text, spare=innocent, groups=only_where_shared(look.answers, names))
            elif mailboxes := {call.mailbox for call in (*ended, *failed)}:
                self._drain(look, found[0].text, names, mailboxes)
        if former.phase is not GroupPhase.FORMED:
            self._judged |= {(each.group, each.number) for each in found}
        if any(call.mailbox for call in ended) or (look.recent == ALL and not look.missing(self._mesh.lost)):
            self.agreements.clear()

    def _free_behind_failed(self, group: Disagreement, look: ProgressSnapshot) -> bool:
        """Free ranks that differ since one is at a call behind a cell that failed on it; return whether it is so."""
        behind = {
            look.answers[rank].failed_call
            for rank in group.ranks
            if group.number > look.answers[rank].failed_at.get(group.group, group.number)
        }
        if (call := next((each for each in self._failed_cells() if each.id in behind), None)) is None:
            return False
        self._judged.add((group.group, group.number))
        spare, names = self._at_no_failed() - set(group.ranks), only_where_shared(look.answers, {group.group})
        self._former.abort(cause_of(call), places=_places(look), spare=spare, groups=names)
        return True

    def _failed_cells(self) -> list[OpenCall]:
        """Return the failed cells, as long as it is not known whether the groups are equally far."""
        calls = [*self._failing.values(), *(ended.call for ended in self._ended.values() if ended.call.failed)]
        if self._failed_before is not None and self._former.doubt is GroupDoubt.PARTIAL:
            calls.append(self._failed_before)
        return [call for call in calls if not call.mailbox]

    def _fail_in(self, group: Disagreement, call: OpenCall, look: ProgressSnapshot) -> bool:
        """Fail the call if it is one in which ranks disagree; return whether it is."""
        if not any(call.members.has(rank) for rank in group.ranks):
            return False
        if not call.mailbox:
            call.wait_at(_places(look))
        elif call.waiting and call.mailbox not in mailboxes_of(look.answers, group.group):
            return False
        if call.disagree(group.ranks, group.text) and call.waiting:
            what = f"{call.what}: " if call.mailbox else ""
            self._calls.tell(call.output, Notice(f"{what}{group.text}\n  freed"))
        return True

    def _compare(self, look: ProgressSnapshot, compared: Collection[int]) -> None:
        """Abort groups that are not equally far; where all are, complete the calls that waited for this."""
        former, missing = self._former, look.missing(self._mesh.lost)
        of_cells = bool(compared) or former.doubt is GroupDoubt.UNANSWERED
        of_actors = self._uneven and self._is_certain(look)
        if not former.is_sound or not (of_cells or of_actors):
            return
        found = differing_groups(look.answers, of_cells=of_cells) if former.phase is GroupPhase.FORMED else []
        odd = self._poll.confirm(found)
        late = former.doubt is GroupDoubt.UNANSWERED  # who came since uses broken groups
        if of_cells and (odd or not (found or missing)):
            partly = any(told.call for told in look.answers.values())
            if partly and (failed := self._failed_cells()):
                self._failed_before = failed[-1]
            former.note(DoubtEvent.COMPARED_PARTLY if partly else DoubtEvent.COMPARED)
        if odd:
            names = only_where_shared(look.answers, {each.name for each in odd})
            self._uneven = self._uneven and bool(names)  # else all groups will be new
            former.abort(odd[0].reason, spare=() if late else self._at_no_failed(), groups=names)
        elif of_cells and found:
            former.why = "they are not equally far"
        elif of_cells and missing:
            former.why = f"{name_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
        elif not found:
            for id in compared:
                self._calls.complete(self._ended.pop(id).call)
            if of_actors:
                are_failing = any(call.mailbox for call in self._failing.values())
                self._settle_by = self._settle_by if are_failing else 0.0
                self._uneven = are_failing or are_in_use(look.answers)

    def _not_back(self) -> str:
        """Return why the process groups are not back, for `OpenCall.settle`; empty where they are."""
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

    # ---- draining ---------------------------------------------------------------------------------------------------

    def _drain(self, look: ProgressSnapshot, reason: str, names: set[str], mailboxes: set[int]) -> None:
        """Abort groups; they are formed again when none of these actors is at work."""
        if self._former.phase is not GroupPhase.DRAINING:
            self._freed.clear()
        self._former.abort(reason, groups=only_where_shared(look.answers, names, mailboxes), drain=True)
        self._freed |= mailboxes
        self._drain_by = time.monotonic() + DRAIN_S
        self._poll.look_in(DRAIN_LOOK_S)


def _has_entered(answers: Mapping[int, Collectives], rank: int, name: str, number: int) -> bool:
    """Whether a rank has begun an operation, even if it failed there."""
    groups = answers[rank].groups if rank in answers else ()
    return any(each.number == number for group in groups if group.name == name for each in group.recent)


def _places(look: ProgressSnapshot) -> dict[int, str]:
    """Return the place in which each rank waits, as in ``all_reduce (cell 7, line 5)``."""
    return {rank: place_of(told.waiting[0]) for rank, told in look.answers.items() if told.waiting}
