"""The recovery of one mesh: help for ranks that wait in vain, and for its process groups afterwards. Pure.

`Recovery` has no socket, clock or thread: its events, with their times, are method calls, and it leaves instructions in
`Recovery.todo`, which `meshbook.controller.recovery_driver` carries out at once. The states are in tables of
`meshbook.lifecycle`: `GroupPhase`, `GroupDoubt` and `ActorDoubt` of the groups, `WatchPhase` of each call. It is one
class, in one module, since each step looks at the failed, the ended and the long calls together.

While a call has a failed or lost rank, or was interrupted, all ranks are asked how far their groups are. When
`meshbook.groups.deadlock` proves that some can never be served, the groups are aborted: those ranks come back with
GroupAborted, which is not their failure. When the call has ended everywhere, groups that were aborted, or that are not
equally far on all members, are formed again: the same groups under a new epoch, so that all handles stay good. A cell
completes after that, or at `DEADLINE_S` with a word on why the groups are not back.

    a call fails on a rank ──> poll, poll, ... ──proof──> abort ──> all ranks ended ──> form ──> the call completes
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

While nothing failed, ranks are asked for calls that take long alone, less and less often: they may be uneven, which is
said once, or disagree (`meshbook.groups.agreements`), from which they are freed. Calls of actors, and
messages without an answer, are not seen here: there an interrupt helps.

*The next call* must not meet the failed one: a rank that has failed a call would begin the next at once, and its
collectives would meet older ones that other ranks still wait in. So calls queue here, not on the ranks:

    to the same ranks, or actors    until they have ended the failed call, behind which they would queue anyway
    to other actors, and cells      after an actor failed for a moment (`SETTLE_S`): until it is known that the groups
                                    are sound, or they are back
    that share ranks and mailbox    behind one that queues: each rank gets its calls in the order of sending
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from meshbook import lifecycle
from meshbook.calls.call import OpenCall
from meshbook.concurrency.future import Future
from meshbook.controller.watched_calls import FailingCall, Poll, Unsent, WatchedCall, describe_stuck, describe_uneven
from meshbook.errors import FailureKind, WorkerLost
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups import deadlock
from meshbook.groups.agreements import Agreements, Disagreement, Told, find_disagreements
from meshbook.groups.deadlock import Odd, Stuck, find_deadlocked, only_where_shared
from meshbook.groups.progress import Collectives
from meshbook.lifecycle import (
    ActorDoubt,
    ActorEvent,
    DoubtEvent,
    GroupDoubt,
    GroupEvent,
    GroupPhase,
    WatchEvent,
    WatchPhase,
)
from meshbook.shape.members import Extent, Members, Region
from meshbook.wire import messages as wire

DEADLINE_S = 2.0  # a failed call waits so long for its groups to come back
FIRST_POLL_S = 0.025  # the ranks are asked so long after one failed; most failures have ended everywhere by then
SELDOM_POLL_S = 0.25  # they are asked again less and less often, in the end once in so many seconds
UNEVEN_POLL_S = 2.0  # the same while others are at work in groups that a call may have left uneven
ANSWER_S = 0.25  # time for ranks to answer; native code may hold the GIL
PATIENCE_S = 2.0  # the same on a machine that is slow to answer: the time doubles while answers are missing
DRAIN_POLL_S = 0.01  # pause between questions to actors that were freed, until they have all come back
DRAIN_S = 1.0  # the forming of groups waits so long for that
SETTLE_S = 0.5  # a failure of an actor keeps calls to other actors, and cells, waiting at most so long
BACK_S = 10.0  # calls to actors queue so much longer while the groups are being formed again
LATE_S = 1.0  # the ranks are asked which have not come when forming takes longer than this
TELL_S = 2.0  # a call may take so long before the ranks are asked
SELDOM_S = 30.0  # they are asked again less and less often, in the end once in so many seconds
FORM_S = 10.0  # time for ranks to form groups again; then they are asked to give up

# operations of each group that ranks tell of; all that they remember, where they are known to disagree
RECENT, ALL = 16, 1024

ABORTED = (GroupPhase.ABORTED, GroupPhase.DRAINING)  # they are to be formed again, and are not being formed yet
UNSOUND = (*ABORTED, GroupPhase.FORMING)  # the groups cannot be used
HELD = (WatchPhase.ENDED, WatchPhase.HELD_OVER)  # all ranks have ended the call, and it has not completed


class OwnCall(NamedTuple):
    call: OpenCall
    endpoint: str
    args: tuple[Any, ...]


class ShowNotice(NamedTuple):
    call: OpenCall
    text: str


class TellFailure(NamedTuple):
    call: OpenCall


class Complete(NamedTuple):
    call: OpenCall
    groups: str = ""  # why process groups are missing, if they are


Instruction: TypeAlias = (
    wire.AbortGroups | wire.Cancel  # send it to all hosts, on the urgent lane
    | wire.DropKeys  # send it to the host of the store
    | Poll  # ask the ranks; `Recovery.on_poll` takes the answers that come in time
    | FailingCall  # ask the agents for the states of ranks, for `FailingCall.on_states`
    | OwnCall  # send it to all ranks; `Recovery.on_formed` takes its outcome
    | Unsent  # transmit it
    | ShowNotice  # show the text where the prints of the call are shown
    | TellFailure  # complete the future of the call, which goes on
    | Complete  # complete the future of the call, and forget the call
)  # fmt: skip


class MeshFacts(Protocol):
    """The facts about a mesh that its recovery reads."""

    id: int
    extent: Extent
    axes: dict[str, int]  # those that the person chose
    lost: dict[int, WorkerLost]


class Forming(msgspec.Struct, eq=False):
    """An attempt to form the groups."""

    call: OpenCall
    epoch: int
    began_at: float
    give_up_at: float
    late: Collection[int]  # ranks that have not come
    why: str = ""  # why the attempt was given up

    def describe_failure(self) -> str:
        """Return why a rank could not form them; empty where none says."""
        told = next((each for each in self.call.failures if each.kind is FailureKind.NOT_FORMED), None)
        return told.evalue.splitlines()[0] if told is not None else ""

    def name_late(self) -> str:
        return name_ranks(self.late or self.call.waiting)


def forming_call(id: int, mesh: MeshFacts, future: Future[Any]) -> OpenCall:
    """Return a call for `Recovery.form`."""
    return OpenCall(id, mesh.id, "the process groups", Region.of(mesh.extent), future, fail_fast=False)


class Recovery:
    """The machine. Its owner carries out `todo` after each event, and calls `on_time` at the time of `plan`."""

    def __init__(self, mesh: MeshFacts, next_id: Callable[[], int]) -> None:
        """next_id: returns an unused number."""
        self._mesh, self._next_id = mesh, next_id
        self.todo: deque[Instruction] = deque()
        self._now = 0.0  # the time of the event that is being handled
        # the groups
        self.phase = GroupPhase.NONE
        self.doubt = GroupDoubt.NONE
        self.actor_doubt = ActorDoubt.NONE
        self.agreements = Agreements()
        self._why = ""  # why the groups are missing, kept until they are formed, or are not known to be sound
        self._only: set[str] = set()  # names of the groups that were aborted; all of them where it is empty
        self._forming: Forming | None = None
        self._epochs: set[int] = set()  # epochs that may have left keys in the store
        self._drained: set[int] = set()  # mailboxes of the actors that were freed, while the groups are draining
        self._drain_by = 0.0
        # operations that ranks disagree in or were freed of: ranks remember them until the groups are formed again
        self._judged: set[tuple[str, int]] = set()
        # the calls
        self._calls: dict[int, WatchedCall] = {}  # by id, in the order of sending; our own are not among them
        self._troubled: dict[int, WatchedCall] = {}  # the failing and ended ones, oldest first
        self._telling: dict[int, FailingCall] = {}  # calls of which the first failure is about to be told
        # a cell that failed when ranks had begun with others behind it, which say nothing about it
        self._failed_before: OpenCall | None = None
        self._queue: list[Unsent] = []
        self._settle_by = 0.0  # after a failure of an actor others queue until then, as long as the groups are unknown
        # the times of the next steps
        self._poll: Poll | None = None  # the question that is open
        self._poll_at = math.inf  # when to ask the next one
        self._pause_s = FIRST_POLL_S  # before it, where something has failed; then less and less often
        self._answer_s = ANSWER_S
        self._odd: list[Odd] = []  # groups that were odd when the ranks were asked last, which may have been chance
        self.ask_at = math.inf  # when calls have taken long, as `WatchedCall.ask_at`; it may be too early

    # ---- events: calls ----------------------------------------------------------------------------------------------

    def on_call(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None, now: float
    ) -> bool:
        """Take in a new call, or a message without an answer. Return whether to send it now, or it queues."""
        if call is not None:
            self._calls[call.id] = WatchedCall(call, now + TELL_S, TELL_S)
            self.ask_at = min(self.ask_at, now + TELL_S)
        if not (self._troubled or self._queue or self.actor_doubt is ActorDoubt.UNEVEN or self.phase in UNSOUND):
            return True  # the path of nearly all calls
        self._now = now
        new = Unsent(mailbox, members, transmit, call, now)
        if not self._is_blocked(new):
            return True
        self._queue.append(new)
        if call is not None:
            self._move(self._calls[call.id], WatchEvent.QUEUED)
        return False

    def on_answered(self, call: OpenCall, now: float) -> bool:
        """Take in that ranks have answered a call, or were lost. Return whether nothing else is to be done about it."""
        if not (
            call.failures or call.lost or call.freed or call.cancelled or self._troubled or self._queue
            or self.agreements.doubted or self.doubt is not GroupDoubt.NONE or self.actor_doubt is ActorDoubt.UNEVEN
            or self.phase in UNSOUND
        ):  # fmt: skip  # the path of nearly all answers
            if not call.waiting:
                self._calls.pop(call.id, None)
            return True
        self._now = now
        if (watched := self._calls.get(call.id)) is None:
            self._on_own_call(call)
        elif call.waiting and watched.phase is not WatchPhase.QUEUED:
            self._on_going_on(watched)
        elif not call.waiting and watched.phase not in HELD:
            self._on_ended(watched)
        if call.waiting and call.fail_fast and call.failed and call.id not in self._telling and not call.is_told:
            self._telling[call.id] = FailingCall(call, now)
        self._release()
        return False

    def adopt(self, calls: Iterable[OpenCall], now: float) -> None:
        """Watch calls of a former controller."""
        for call in calls:
            self._calls.setdefault(call.id, WatchedCall(call, now + TELL_S, TELL_S))
            self.ask_at = min(self.ask_at, now + TELL_S)

    def on_told(self, call: OpenCall, rank: int, told: Told, now: float) -> None:
        """Take in the report on a rank's groups that came with its answer, before `on_answered`."""
        self._now = now
        self.agreements.compare(rank, told)
        if told.broken:
            self._note(DoubtEvent.TOLD)
            if call.mailbox:
                self._note_uneven()
        # the answer to an attempt to form groups reports tensors of other calls
        is_forming = self._forming is not None and call is self._forming.call
        for each in self._ended() if is_forming else [call]:
            copied = () if each.mailbox and not self._mesh.lost else told.copied
            each.tear(rank, (*told.torn, *copied), told.restored)

    def on_cancel(self, call: OpenCall, now: float) -> bool:
        """Take in that the end of a call was asked for. Return whether it queued: then it is to be dropped."""
        self._now = now
        call.cancel()
        if not call.mailbox:
            self._cancel_forming(older_than_s=DEADLINE_S)  # what was cancelled waits behind it
        watched = self._calls.get(call.id)
        if watched is not None and watched.phase is WatchPhase.QUEUED:
            self._queue = [unsent for unsent in self._queue if unsent.call is not call]
            return True
        if watched is not None and call.waiting:
            self._on_going_on(watched)
            self._release()
        return False

    def forget(self, call: OpenCall) -> None:
        """Forget a call that was given up."""
        for calls in (self._calls, self._troubled, self._telling):
            calls.pop(call.id, None)
        self._queue = [unsent for unsent in self._queue if unsent.call is not call]

    # ---- events: ranks, groups and time -----------------------------------------------------------------------------

    def on_lost(self, now: float) -> None:
        """Abort the groups of a rank that ended, as the mesh's facts tell: nothing that includes it can be served."""
        self._now = now
        lost = self._mesh.lost
        self._give_up_waiting()
        innocent = {rank for rank, call in self._current().items() if not any(map(call.members.has, lost))}
        ways_out = f"repair: {advice().heal_call}    without it: {advice().shrink}"
        self._abort(f"{name_ranks(lost)} ended\n  {ways_out}", innocent)
        self._form_soon()
        self._release()

    def abort(self, reason: str, ranks: Collection[int] | None, now: float) -> None:
        """Abort the groups of all ranks; they are formed again when the calls that run have ended. ranks: if given,
        other ranks that run calls keep their groups until then."""
        self._now = now
        self._abort(reason, () if ranks is None else self._current().keys() - set(ranks))
        self._form_soon()

    def form(self, call: OpenCall, now: float) -> None:
        """Form the groups, in place where there are some, by ``call``."""
        self._now = now
        self._form(call, math.inf)
        self._release()

    def on_formed(self, call: OpenCall, error: BaseException | None, now: float) -> None:
        """Take in the outcome of an attempt to form groups; complete the calls that waited for it."""
        forming = self._forming
        if forming is None or call is not forming.call:
            return  # there is a newer attempt
        self._now, self._forming = now, None
        if self.phase is not GroupPhase.FORMING:  # aborted meanwhile
            self._form_if_free()
            return
        self._step(GroupEvent.FAILED if error else GroupEvent.FORMED)
        if error is None:
            self._note(DoubtEvent.FORMED)
            if not self._only:
                self._drop_keys({old for old in self._epochs if old < forming.epoch})
        else:
            why = forming.why or forming.describe_failure() or self._why or error
            self._why = f"forming them again failed: {why}\n  try again: {advice().rebuild}"
        self._only = set()
        self._judged.clear()
        if self.actor_doubt is ActorDoubt.NONE and not self._failing():
            self._poll_at = math.inf
        why_not = self._why_not_back()
        for watched in list(self._troubled.values()):
            if watched.phase is WatchPhase.ENDED:
                self._complete(watched.call, why_not)
            elif watched.phase is WatchPhase.HELD_OVER:
                self._move(watched, WatchEvent.FORMED)
        if self._ended() and self._poll is None:  # not all of their ranks had told how they ended: they may be uneven
            self._ask()
        self._release()

    def plan(self) -> float:
        """Return when `on_time` is due."""
        calls = [watched.deadline for watched in self._troubled.values()]
        failing = [failing.due for failing in self._telling.values()]
        asking = [self._poll_at, self.ask_at] if self._poll is None else []
        forming = [self._forming.give_up_at] if self._forming is not None else []
        waits = [each.since + wait_s for each in self._queue for wait_s in (SETTLE_S, SETTLE_S + BACK_S)]
        queue = [at for at in (*waits, self._settle_by) if at > self._now and self._queue]
        return min([*calls, *failing, *asking, *forming, *queue], default=math.inf)

    def is_late(self, now: float) -> bool:
        """Return whether to end the open question, since calls complete now, and name who did not answer."""
        return self._poll is not None and any(watched.deadline <= now for watched in self._troubled.values())

    def on_time(self, now: float) -> None:
        """Take the steps that are due."""
        self._now = now
        for late in [watched.call for watched in self._troubled.values() if watched.deadline <= now]:
            why = self._why_not_back()
            if self.phase not in UNSOUND and not late.mailbox:
                self._note(DoubtEvent.UNANSWERED)
            self._complete(late, why)
        self.ask_at = min((watched.ask_at for watched in self._calls.values()), default=math.inf)
        if self._poll is None and min(self._poll_at, self.ask_at) <= now:
            self._ask()
        if self.doubt is GroupDoubt.UNANSWERED and self._poll is None:
            self._poll_in(SELDOM_POLL_S)
        if self._forming is not None and self._forming.give_up_at <= now:
            self._cancel_forming()
        for failing in list(self._telling.values()):
            if failing.is_ripe(now):
                del self._telling[failing.call.id]
                self.todo.append(TellFailure(failing.call))
            elif failing.must_ask(now):
                self.todo.append(failing)
        self._release()

    def stop(self, now: float) -> None:
        """Stop, since the mesh is being stopped, or left: complete the calls that wait for groups."""
        self._now = now
        self._queue.clear()
        self._give_up_waiting()
        for calls in (self._calls, self._troubled, self._telling):
            calls.clear()
        self._poll, self._poll_at, self.ask_at, self._forming = None, math.inf, math.inf, None
        self._note_of_actors(ActorEvent.RENEWED)

    # ---- calls in trouble -------------------------------------------------------------------------------------------

    def _move(self, watched: WatchedCall, event: WatchEvent) -> None:
        """Take a call to the next phase of its table."""
        before, watched.phase = watched.phase, lifecycle.WATCH_NEXT[watched.phase, event]
        if watched.phase is not before:
            watched.stuck = frozenset()
            self._troubled.pop(watched.call.id, None)
            if watched.phase is WatchPhase.FAILING or watched.phase in HELD:
                self._troubled[watched.call.id] = watched

    def _failing(self) -> list[OpenCall]:
        return [watched.call for watched in self._troubled.values() if watched.phase is WatchPhase.FAILING]

    def _ended(self) -> list[OpenCall]:
        return [watched.call for watched in self._troubled.values() if watched.phase in HELD]

    def _on_going_on(self, watched: WatchedCall) -> None:
        """Poll at a call that ranks have not answered."""
        call = watched.call
        if not (call.failed or call.cancelled) or (call.mailbox and self._mesh.lost):
            return  # of the dead all actors are freed at once
        if call.mailbox:
            self._note_uneven(FIRST_POLL_S)
        elif watched.phase is not WatchPhase.FAILING:
            self._pause_s = FIRST_POLL_S
            self._poll_in(FIRST_POLL_S)
        self._move(watched, WatchEvent.FAILED)

    def _on_ended(self, watched: WatchedCall) -> None:
        """Complete a call that all ranks have answered, or keep it until the groups are compared or back."""
        call, watched.ask_at = watched.call, math.inf
        self._move(watched, WatchEvent.FREED)
        is_forming, is_doubtful = self.phase is GroupPhase.FORMING, self.agreements.doubted
        has_failed = bool(call.failed or call.freed or call.cancelled)
        if call.mailbox:
            is_doubtful = is_doubtful and (self.phase not in UNSOUND or self.phase is GroupPhase.DRAINING)
            if has_failed and not self._mesh.lost:
                self._note_uneven(FIRST_POLL_S if any(each.mailbox for each in self._failing()) else 0.0)
        else:
            is_doubtful = is_doubtful or has_failed or self.doubt is GroupDoubt.TOLD
            is_doubtful = is_doubtful or (self.doubt is GroupDoubt.PARTIAL and not self._running())
        if is_doubtful and not self._mesh.lost:
            watched.deadline = self._now + DEADLINE_S
            self._move(watched, WatchEvent.ENDED_AS_FORMED if is_forming else WatchEvent.ENDED)
            if call.mailbox:
                self._poll_in(0.0)
        else:
            self._complete(call)
        if not call.mailbox and not is_forming:
            self._form_if_free()
            if self.phase not in UNSOUND and call.id in self._troubled and self._poll is None:
                self._ask()

    def _complete(self, call: OpenCall, groups: str = "") -> None:
        self.forget(call)
        self.todo.append(Complete(call, groups))

    def _give_up_waiting(self) -> None:
        """Complete the calls that wait for groups, which do not come back."""
        for watched in list(self._troubled.values()):
            if watched.phase in HELD:
                self._complete(watched.call)
            elif watched.call.mailbox:
                self._move(watched, WatchEvent.FREED)

    def _note_uneven(self, pause_s: float = 0.0) -> None:
        """Ask the ranks in a moment: actors may have left groups that are of no use."""
        self._note_of_actors(ActorEvent.SPOILT)
        self._settle_by, self._pause_s = self._now + SETTLE_S, FIRST_POLL_S
        self._poll_in(pause_s)

    def _running(self) -> list[OpenCall]:
        """Return the calls that main threads run, or will run next, in the order of sending."""
        sent = [watched.call for watched in self._calls.values() if watched.phase is not WatchPhase.QUEUED]
        return [call for call in sent if call.waiting and not call.mailbox]

    def _current(self) -> dict[int, OpenCall]:
        """Return the call that each busy rank runs now."""
        return {rank: call for call in reversed(self._running()) for rank in call.waiting}

    # ---- what may not be sent yet -----------------------------------------------------------------------------------

    def _release(self) -> None:
        """Send the calls that need not queue any more."""
        queued, self._queue = self._queue, []
        for each in queued:  # in the order of sending
            if self._is_blocked(each):
                self._queue.append(each)
            elif each.ranks:
                self.todo.append(each)
                if each.call is not None:
                    self._move(self._calls[each.call.id], WatchEvent.SENT)

    def _is_blocked(self, new: Unsent) -> bool:
        """Whether a call or message may not be sent yet, in itself or for one that queues before it."""
        ranks, failing, is_sound = set(new.ranks), self._failing(), self.phase not in UNSOUND
        if any(other.mailbox == new.mailbox and not ranks.isdisjoint(other.ranks) for other in self._queue):
            return True
        rivals = [call for call in failing if call.mailbox == new.mailbox and not call.beside]
        if any(not ranks.isdisjoint(call.waiting) for call in rivals):
            return True
        actors = [call for call in failing if call.mailbox]  # which collectives on these ranks might meet
        is_unsettled = self.actor_doubt is ActorDoubt.UNEVEN or any(call.members.rank_set & ranks for call in actors)
        is_unsettled = is_unsettled and self._now < self._settle_by
        if not new.mailbox:
            is_compared = is_sound and any(not call.mailbox for call in self._ended())
            return is_compared or is_unsettled or self.phase is GroupPhase.DRAINING
        until, lost = new.since + SETTLE_S, self._mesh.lost
        if self.phase is GroupPhase.FORMING or (self.phase in ABORTED and not lost and not self._running()):
            return self._now < until + BACK_S  # the groups are coming back
        return self._now < until and not lost and (is_unsettled or not is_sound)

    # ---- the groups are aborted -------------------------------------------------------------------------------------

    def _step(self, event: GroupEvent) -> None:
        self.phase = lifecycle.GROUP_NEXT[self.phase, event]

    def _note(self, event: DoubtEvent) -> None:
        """Take in an event about whether the groups are sound."""
        self.doubt = lifecycle.DOUBT_NEXT[self.doubt, event]
        if event in (DoubtEvent.COMPARED, DoubtEvent.COMPARED_PARTLY, DoubtEvent.FORMED):
            self._why = ""

    def _note_of_actors(self, event: ActorEvent) -> None:
        self.actor_doubt = lifecycle.ACTOR_DOUBT_NEXT[self.actor_doubt, event]

    def _abort(
        self, reason: str, spare: Collection[int] = (), groups: Collection[str] = (),
        places: Mapping[int, str] | None = None, event: GroupEvent = GroupEvent.ABORT,
    ) -> None:  # fmt: skip
        """Abort the groups of all ranks, or of as many as can be, which frees those that wait in operations.

        spare: ranks that keep theirs for now, for the sake of the calls that they run. groups: only these, if any are
        given. places: where ranks are stuck.
        """
        self._only = {*self._only, *groups} if groups and (self._only or self.phase not in UNSOUND) else set()
        self._step(event)  # before messages go: decisions find the groups aborted already
        self._why = reason
        if self.phase not in ABORTED:
            return  # it is not known whether there are any: the ranks are asked
        self._odd = []  # the next ones count from the start
        self._note(DoubtEvent.ABORTED)
        # a GroupAborted that comes back is no failure of its rank, if the call knows of the abort before
        for call in self._running():
            call.abort(places or {})
        if self._forming is not None:
            self._forming.call.abort()
        self._tell_to_abort(reason, spare, groups)
        if not spare and not groups:
            self._drop_keys(self._epochs)  # at last: a rank that waits in the store, still forming, comes back too

    def _tell_to_abort(self, why: str, spare: Collection[int] = (), groups: Collection[str] = ()) -> None:
        mesh = self._mesh
        target = [rank for rank in range(mesh.extent.nelements) if rank not in mesh.lost and rank not in spare]
        if target:
            encoded = Region.of(mesh.extent).select(target).encoded
            self.todo.append(wire.AbortGroups(mesh.id, encoded, self._next_id(), why, tuple(groups)))

    def _drop_keys(self, epochs: Collection[int]) -> None:
        """Drop the keys of epochs from the store; ranks that wait there are answered with an error."""
        self.todo.extend(wire.DropKeys(self._mesh.id, f"epoch{epoch}/") for epoch in sorted(epochs))
        self._epochs = self._epochs.difference(epochs)

    def _form_soon(self) -> None:
        self._form_if_free()
        if self.phase is GroupPhase.SOUGHT or self.phase in ABORTED:
            self._poll_in(0.0 if self.phase is GroupPhase.SOUGHT else FIRST_POLL_S)

    def _drain(self, poll: Poll, reason: str, names: set[str], mailboxes: set[int]) -> None:
        """Abort groups; they are formed again when none of these actors is at work."""
        if self.phase is not GroupPhase.DRAINING:
            self._drained.clear()
        self._abort(reason, groups=only_where_shared(poll.answers, names, mailboxes), event=GroupEvent.DRAIN)
        self._drained, self._drain_by = self._drained | mailboxes, self._now + DRAIN_S
        self._poll_in(DRAIN_POLL_S)

    # ---- the groups are formed --------------------------------------------------------------------------------------

    def _form_if_free(self, poll: Poll | None = None) -> None:
        """Form the groups again, once no rank runs anything that was begun before. poll: taken now. If only some groups
        were aborted there must be one: more of them may be of no use by now."""
        if self.phase is not GroupPhase.ABORTED or self._forming is not None or self._mesh.lost or self._running():
            return
        if self._only:
            if poll is None or any(told.call for told in poll.answers.values()):
                self._poll_in(0.0)
                return
            self._only.update(odd.name for odd in deadlock.differing_groups(poll.answers) if odd.is_certain)
        self._form(forming_call(self._next_id(), self._mesh, Future()), self._now + FORM_S, self._only)

    def _form(self, call: OpenCall, give_up_at: float, groups: Collection[str] = ()) -> None:
        """Form the groups, or only ``groups``, under a new epoch."""
        mesh, epoch = self._mesh, self._next_id()
        self._step(GroupEvent.FORM)
        self._epochs.add(epoch)
        self._only = set(groups)
        self._forming = Forming(call, epoch, self._now, give_up_at, call.waiting)
        self._poll_in(LATE_S)
        self.todo.append(OwnCall(call, "form_group", (epoch, tuple(groups))))
        if mesh.axes != dict(mesh.extent) and math.prod(mesh.axes.values()) == mesh.extent.nelements:
            # forming binds `mesh` and `point` to the mesh's own axes: back to those that the person chose
            axes = tuple(mesh.axes), tuple(mesh.axes.values())
            self.todo.append(OwnCall(forming_call(self._next_id(), mesh, Future()), "set_axes", axes))

    def _on_own_call(self, call: OpenCall) -> None:
        """Abort the attempt to form groups if a rank has failed it: the others wait for that rank."""
        forming = self._forming
        if not call.waiting:
            self._complete(call)
        elif forming is not None and call is forming.call and call.failed and not call.aborted:
            call.abort()
            self._tell_to_abort(forming.describe_failure() or call.cause)
            self._drop_keys(self._epochs)

    def _cancel_forming(self, older_than_s: float = 0.0) -> None:
        """Have ranks give up forming, if the attempt has a limit and has lasted so long."""
        forming = self._forming
        if forming is None or forming.give_up_at == math.inf or self._now < forming.began_at + older_than_s:
            return
        forming.give_up_at = math.inf
        self._why = forming.why = f"{forming.name_late()} did not come"
        self.todo.append(wire.Cancel(self._mesh.id, forming.call.id, forming.call.members.encoded))

    def _why_not_back(self) -> str:
        """Return why the process groups are not back, for `OpenCall.settle`; empty where they are."""
        why = self._why
        if self._forming is not None and (late := self._forming.name_late()):
            why = f"{late} did not come within {DEADLINE_S:g} s"
        elif running := self._running():
            ranks = set().union(*(call.waiting for call in running))
            have_ended = f"{'has' if len(ranks) == 1 else 'have'} ended {running[0].what}"
            why = f"they are formed again when {name_ranks(ranks)} {have_ended}"
        are = "are not back yet" if self.phase in UNSOUND else "could not be compared"
        return f"the process groups {are}: {why}" if why else ""

    # ---- the ranks are asked ----------------------------------------------------------------------------------------

    def _poll_in(self, pause_s: float) -> None:
        self._poll_at = min(self._poll_at, self._now + pause_s)

    def _ask(self) -> None:
        long = [watched for watched in self._calls.values() if watched.ask_at <= self._now]
        for watched in long:
            watched.pause_s = min(2 * watched.pause_s, SELDOM_S)
            watched.ask_at = self._now + watched.pause_s
        self.ask_at = min((watched.ask_at for watched in self._calls.values()), default=math.inf)
        calls = [*self._running(), *self._ended()]
        alive = frozenset(range(self._mesh.extent.nelements)) - self._mesh.lost.keys()
        self._poll = Poll(
            self._next_id(), self._answer_s, ALL if self.agreements.doubted or long else RECENT, alive,
            idle=alive.difference(*(call.waiting for call in calls if not call.mailbox)),
            ended={call.id: call.members.rank_set - call.waiting for call in calls},
            about=[watched.call for watched in long], answers={},
        )  # fmt: skip
        self._poll_at = math.inf
        self.todo.append(self._poll)

    def on_poll(self, poll: Poll, answers: Mapping[int, Collectives], now: float) -> None:
        """Free ranks that are stuck, then ranks that disagree; compare the sound groups; form the aborted ones."""
        if poll is not self._poll:
            return  # asked again meanwhile
        self._now, self._poll = now, None
        poll.answers.update(answers)
        self._answer_s = min(2 * self._answer_s, PATIENCE_S) if poll.missing(self._mesh.lost) else ANSWER_S
        self._learn_of_groups(poll)
        about = [call for call in poll.about if call.waiting]
        if self.phase is not GroupPhase.FORMING and self.phase is not GroupPhase.NONE:
            self._free_stuck(poll, about)
            self._judge(poll, about)
        seen = [call for call in self._ended() if poll.ended.get(call.id, frozenset()) >= call.members.rank_set]
        is_told_of_actors = self.phase not in UNSOUND or self.phase is GroupPhase.DRAINING
        for call in [call for call in self._ended() if call.mailbox and (call in seen or not is_told_of_actors)]:
            self._complete(call)  # its ranks have reported by now, or cannot
        self._compare(poll, [call for call in seen if call.id in self._troubled])
        for call in about if self.phase not in ABORTED else ():
            is_well = not call.mailbox and call.id in self._calls.keys() - self._troubled.keys()
            if is_well and (text := describe_uneven(call, poll, self._mesh.lost, self._mesh.axes)):
                self._calls[call.id].ask_at = math.inf  # it is said once
                self.todo.append(ShowNotice(call, text))
        if self.phase is GroupPhase.DRAINING:
            self._end_draining(poll)
        self._form_if_free(poll)
        self._plan_next_poll()
        self._release()

    def _learn_of_groups(self, poll: Poll) -> None:
        """Note which epochs there are, who has not come to form groups, and whether there are any."""
        self._epochs.update(told.epoch for told in poll.answers.values() if told.epoch >= 0)
        if (forming := self._forming) is not None:
            come = {rank for rank, told in poll.answers.items() if told.call == forming.call.id}
            forming.late = forming.call.waiting - come
            if (left_s := forming.began_at + LATE_S - self._now) > 0:
                self._poll_in(left_s)
        if self.phase in (GroupPhase.NONE, GroupPhase.SOUGHT):
            self._step(GroupEvent.FOUND if any(told.groups for told in poll.answers.values()) else GroupEvent.MISSED)
            if self.phase in ABORTED:  # as was wanted before it was known whether there are any
                self._abort(self._why)
            else:
                self._why = ""

    def _end_draining(self, poll: Poll) -> None:
        """Have the groups formed again if no actor that was freed is at work, or they had their time."""
        is_busy = poll.missing(self._mesh.lost) or any(
            told.call or not self._drained.isdisjoint(told.handling.values()) for told in poll.answers.values()
        )
        if is_busy and self._now < self._drain_by:
            self._poll_in(DRAIN_POLL_S)
        else:
            self._note_of_actors(ActorEvent.SPOILT if self._only else ActorEvent.RENEWED)
            self._step(GroupEvent.DRAINED)

    def _plan_next_poll(self) -> None:
        """Have the ranks asked again, if anything is still open."""
        if self._odd or any(watched.stuck for watched in self._troubled.values()):
            self._poll_in(FIRST_POLL_S)
        elif self._ended() and self.phase not in UNSOUND:
            self._poll_in(0.0)
        is_waiting = self._failing() or (self.phase in ABORTED and self._running())
        if is_waiting or self.actor_doubt is ActorDoubt.UNEVEN:
            self._poll_in(self._pause_s)
            self._pause_s = min(2 * self._pause_s, SELDOM_POLL_S if is_waiting else UNEVEN_POLL_S)
        if self.doubt is GroupDoubt.UNANSWERED:
            self._poll_in(SELDOM_POLL_S)

    # ---- who is stuck -----------------------------------------------------------------------------------------------

    def _free_stuck(self, poll: Poll, about: Collection[OpenCall]) -> None:
        lost, was_aborted = self._mesh.lost, self.phase in ABORTED
        answers = self._up_to_failures(poll)
        for call in self._failing():
            if call.mailbox:
                self._free_actors(poll, self._calls[call.id])
            elif stuck := find_deadlocked(answers, poll.ended.get(call.id, ()), lost):
                self._free(poll, call.cause, stuck)
        if self.doubt is GroupDoubt.PARTIAL and self._failed_before is not None:
            for call in about:  # its operations may have met some of the one that failed
                if not call.mailbox and (stuck := find_deadlocked(poll.answers, poll.ended.get(call.id, ()), lost)):
                    self._free(poll, self._failed_before.cause, stuck)
        if was_aborted and (stuck := find_deadlocked(poll.answers, (), lost)):
            self._free(poll, self._why, stuck)  # ranks that were spared may wait for those that were not

    def _up_to_failures(self, poll: Poll) -> Mapping[int, Collectives]:
        """Return the reports without operations that ranks have begun behind a failed cell that is not settled."""
        unsettled, answers = {call.id for call in self._failed_cells()}, poll.answers.items()
        return {rank: told.up_to_failure() if told.failed_call in unsettled else told for rank, told in answers}

    def _free(self, poll: Poll, reason: str, stuck: dict[int, Stuck]) -> None:
        names = only_where_shared(poll.answers, {each.waiting.group for each in stuck.values()})
        answers = self._up_to_failures(poll)
        for each in stuck.values():
            operation = each.waiting.group, each.waiting.number
            absent = [answers[rank] for rank in each.absent if rank in answers]
            entered = {(group.name, last.number) for told in absent for group in told.groups for last in group.recent}
            if operation not in entered:  # nobody, not even one that failed there
                self._judged.add(operation)
        self._abort(reason, self._at_no_failed() - stuck.keys(), names, deadlock.where_stuck(stuck.items()))

    def _free_actors(self, poll: Poll, watched: WatchedCall) -> None:
        """Free the actors that were stuck when ranks were asked before, and still are."""
        call, before, watched.stuck = watched.call, watched.stuck, frozenset()
        if self.phase is not GroupPhase.FORMED or not poll.is_certain(self._mesh.lost):
            return
        idle = [rank for rank, told in poll.answers.items() if not told.call]
        found = find_deadlocked(poll.answers, idle, mailbox=call.mailbox)
        stuck = {rank: each for rank, each in found.items() if rank in call.waiting}
        if not stuck or before != stuck.keys():
            watched.stuck = frozenset(stuck)
            return
        call.abort(deadlock.where_stuck(stuck.items()))
        for line in describe_stuck(stuck):
            self.todo.append(ShowNotice(call, f"{call.what}: {call.cause}; {line}; freed"))
        self._drain(poll, call.cause, {each.waiting.group for each in stuck.values()}, {call.mailbox})
        self._move(watched, WatchEvent.FREED)

    def _at_no_failed(self) -> set[int]:
        """Return the ranks that run calls which have not failed."""
        return {rank for rank, call in self._current().items() if call.id not in self._troubled}

    def _failed_cells(self) -> list[OpenCall]:
        """Return the failed cells, as long as it is not known whether the groups are equally far."""
        calls = [*self._failing(), *(call for call in self._ended() if call.failed)]
        if self._failed_before is not None and self.doubt is GroupDoubt.PARTIAL:
            calls.append(self._failed_before)
        return [call for call in calls if not call.mailbox]

    # ---- who disagrees, and which groups are uneven -----------------------------------------------------------------

    def _judge(self, poll: Poll, about: Collection[OpenCall]) -> None:
        """Fail the calls in which ranks disagree, and free the ranks that wait there."""
        found = [each for each in find_disagreements(poll.answers) if (each.group, each.number) not in self._judged]
        found = [each for each in found if not self._free_behind_failed(each, poll)]
        ended, still_open = self._ended(), [*self._failing(), *about]
        concerns_cells = any(not call.mailbox for call in (*ended, *still_open))
        at = {call.id: call for call in self._current().values()}  # what waits behind these is not to blame
        calls = [*ended, *(at.values() if concerns_cells else ())]
        if self.phase is GroupPhase.FORMED and poll.is_certain(self._mesh.lost):
            calls += [call for call in still_open if call.mailbox]
        failed = [call for group in found for call in calls if self._fail_in(group, call, poll)]
        if found and self.phase is GroupPhase.FORMED:
            names = {each.group for each in found}
            if concerns_cells:
                innocent = {rank for rank, call in self._current().items() if not call.disagrees}
                self._abort(found[0].text, innocent, only_where_shared(poll.answers, names))
            elif mailboxes := {call.mailbox for call in (*ended, *failed)}:
                self._drain(poll, found[0].text, names, mailboxes)
        if self.phase is not GroupPhase.FORMED:
            self._judged |= {(each.group, each.number) for each in found}
        if any(call.mailbox for call in ended) or (poll.recent == ALL and not poll.missing(self._mesh.lost)):
            self.agreements.clear()

    def _free_behind_failed(self, group: Disagreement, poll: Poll) -> bool:
        """Free ranks that differ since one is at a call behind a failed cell; return whether it is so."""
        told = [poll.answers[rank] for rank in group.ranks]
        behind = {each.failed_call for each in told if group.number > each.failed_at.get(group.group, group.number)}
        if (call := next((each for each in self._failed_cells() if each.id in behind), None)) is None:
            return False
        self._judged.add((group.group, group.number))
        spare = self._at_no_failed() - set(group.ranks)
        self._abort(call.cause, spare, only_where_shared(poll.answers, {group.group}), poll.places())
        return True

    def _fail_in(self, group: Disagreement, call: OpenCall, poll: Poll) -> bool:
        """Fail the call if it is one in which ranks disagree; return whether it is."""
        if not any(call.members.has(rank) for rank in group.ranks):
            return False
        if not call.mailbox:
            call.wait_at(poll.places())
        elif call.waiting and call.mailbox not in deadlock.mailboxes_of(poll.answers, group.group):
            return False
        if call.disagree(group.ranks, group.text, self._now) and call.waiting:
            what = f"{call.what}: " if call.mailbox else ""
            self.todo.append(ShowNotice(call, f"{what}{group.text}\n  freed"))
        return True

    def _compare(self, poll: Poll, compared: Collection[OpenCall]) -> None:
        """Abort groups that are not equally far; where all are, complete the calls that waited for this."""
        missing = poll.missing(self._mesh.lost)
        of_cells = bool(compared) or self.doubt is GroupDoubt.UNANSWERED
        of_actors = self.actor_doubt is ActorDoubt.UNEVEN and poll.is_certain(self._mesh.lost)
        if self.phase in UNSOUND or not (of_cells or of_actors):
            return
        found = deadlock.differing_groups(poll.answers, of_cells=of_cells) if self.phase is GroupPhase.FORMED else []
        odd = [each for each in found if each.is_certain or each in self._odd]  # or was so, equally far, before
        self._odd = [] if odd else found
        late = self.doubt is GroupDoubt.UNANSWERED  # who came since uses broken groups
        if of_cells and (odd or not (found or missing)):
            partly = any(told.call for told in poll.answers.values())
            if partly and (failed := self._failed_cells()):
                self._failed_before = failed[-1]
            self._note(DoubtEvent.COMPARED_PARTLY if partly else DoubtEvent.COMPARED)
        if odd:
            names = only_where_shared(poll.answers, {each.name for each in odd})
            if not names:
                self._note_of_actors(ActorEvent.RENEWED)
            self._abort(odd[0].reason, () if late else self._at_no_failed(), names)
        elif of_cells and found:
            self._why = "they are not equally far"
        elif of_cells and missing:
            self._why = f"{name_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
        elif not found:
            for call in compared:
                self._complete(call)
            are_failing = any(call.mailbox for call in self._failing())
            if of_actors and not are_failing:
                self._settle_by = 0.0
                if not deadlock.are_in_use(poll.answers):
                    self._note_of_actors(ActorEvent.COMPARED)
