"""The states of meshes, workers, process groups and calls, and the only ways between them.

Each table maps (state, event) to the next state; anything else is a fault of ours and raises `LocalProtocolError`.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from meshbook.errors import LocalProtocolError


class _TableEnum(enum.Enum):
    """Members are found by identity: that of an enumeration is a hash of names, computed in Python."""

    __hash__ = object.__hash__


_Phase = TypeVar("_Phase", bound=_TableEnum)
_Event = TypeVar("_Event", bound=_TableEnum)


class _Transitions(dict[tuple[_Phase, _Event], _Phase]):
    """``table[state, event]`` is the next state. Raises: LocalProtocolError where there is no such way."""

    def __missing__(self, step: tuple[_Phase, _Event]) -> _Phase:
        phase, event = step
        raise LocalProtocolError(f"{event.value!r} cannot happen while {phase.value}")


class MeshPhase(_TableEnum):
    """A mesh of processes, seen from its controller."""

    STARTING = "starting"  # hosts have been asked for workers
    READY = "ready"  # every worker has answered
    REPAIRING = "repairing"  # workers are started again, join or leave; the others can be called
    STOPPING = "stopping"  # workers have been told to end
    STOPPED = "stopped"  # no process is left


class MeshEvent(_TableEnum):
    STARTED = "all workers answered"
    REPAIR = "repair"
    REPAIRED = "repair ended"  # well or not: who is dead is told apart
    STOP = "stop"
    ENDED = "all workers ended"


MESH_NEXT = _Transitions[MeshPhase, MeshEvent](
    {
        (MeshPhase.STARTING, MeshEvent.STARTED): MeshPhase.READY,
        (MeshPhase.STARTING, MeshEvent.STOP): MeshPhase.STOPPING,
        (MeshPhase.READY, MeshEvent.STOP): MeshPhase.STOPPING,
        (MeshPhase.READY, MeshEvent.REPAIR): MeshPhase.REPAIRING,
        (MeshPhase.REPAIRING, MeshEvent.REPAIRED): MeshPhase.READY,
        (MeshPhase.REPAIRING, MeshEvent.STOP): MeshPhase.STOPPING,
        (MeshPhase.STOPPING, MeshEvent.REPAIRED): MeshPhase.STOPPING,
        (MeshPhase.STOPPED, MeshEvent.REPAIRED): MeshPhase.STOPPED,
        (MeshPhase.STOPPING, MeshEvent.STOP): MeshPhase.STOPPING,
        (MeshPhase.STOPPING, MeshEvent.STARTED): MeshPhase.STOPPING,
        (MeshPhase.STOPPING, MeshEvent.ENDED): MeshPhase.STOPPED,
        (MeshPhase.STOPPED, MeshEvent.STOP): MeshPhase.STOPPED,
    }
)


class WorkerPhase(_TableEnum):
    """A worker, seen from its host agent."""

    FORKING = "forking"  # the template has been asked
    STARTING = "starting"  # it has a pid, and was told who it is
    READY = "ready"  # it has answered; from here on it is idle or busy
    LEAVING = "leaving"  # it was told to end: nothing reaches it, its rank may be another's
    DEAD = "dead"  # its pidfd says so, and it was reaped


class WorkerEvent(_TableEnum):
    FORKED = "forked"
    BEGUN = "said who it is"
    DISMISSED = "told to leave"
    EXITED = "exited"


WORKER_NEXT = _Transitions[WorkerPhase, WorkerEvent](
    {
        (WorkerPhase.FORKING, WorkerEvent.FORKED): WorkerPhase.STARTING,
        (WorkerPhase.FORKING, WorkerEvent.BEGUN): WorkerPhase.READY,  # its word may come before the template's
        (WorkerPhase.STARTING, WorkerEvent.BEGUN): WorkerPhase.READY,
        (WorkerPhase.READY, WorkerEvent.FORKED): WorkerPhase.READY,  # the late word
        (WorkerPhase.FORKING, WorkerEvent.DISMISSED): WorkerPhase.LEAVING,
        (WorkerPhase.STARTING, WorkerEvent.DISMISSED): WorkerPhase.LEAVING,
        (WorkerPhase.READY, WorkerEvent.DISMISSED): WorkerPhase.LEAVING,
        (WorkerPhase.LEAVING, WorkerEvent.FORKED): WorkerPhase.LEAVING,
        (WorkerPhase.LEAVING, WorkerEvent.BEGUN): WorkerPhase.LEAVING,
        (WorkerPhase.LEAVING, WorkerEvent.EXITED): WorkerPhase.DEAD,
        (WorkerPhase.STARTING, WorkerEvent.EXITED): WorkerPhase.DEAD,
        (WorkerPhase.READY, WorkerEvent.EXITED): WorkerPhase.DEAD,
    }
)


class GroupPhase(_TableEnum):
    """The process groups of a mesh, seen from its controller."""

    NONE = "none"  # the controller has formed none; cells may have made their own
    SOUGHT = "sought"  # the same, and if there are any they are to be aborted: the ranks are asked
    FORMING = "forming"  # the ranks have been asked to form them, under a new epoch
    FORMED = "formed"  # all ranks have counted each other
    ABORTED = "aborted"  # every wait and every operation on the ranks raises GroupAborted
    DRAINING = "draining"  # the same, and they are formed again when the actors that were freed have come back


class GroupEvent(_TableEnum):
    FOUND = "ranks have some"
    MISSED = "ranks have none"
    FORM = "form"
    FORMED = "all ranks counted each other"
    FAILED = "a rank could not"
    ABORT = "abort"
    DRAIN = "abort, for actors"
    DRAINED = "those are back"


GROUP_NEXT = _Transitions[GroupPhase, GroupEvent](
    {
        (GroupPhase.NONE, GroupEvent.FORM): GroupPhase.FORMING,
        (GroupPhase.NONE, GroupEvent.FOUND): GroupPhase.FORMED,  # cells, or an earlier controller, have made them
        (GroupPhase.NONE, GroupEvent.MISSED): GroupPhase.NONE,
        (GroupPhase.NONE, GroupEvent.ABORT): GroupPhase.SOUGHT,
        (GroupPhase.SOUGHT, GroupEvent.ABORT): GroupPhase.SOUGHT,
        (GroupPhase.SOUGHT, GroupEvent.FOUND): GroupPhase.ABORTED,
        (GroupPhase.SOUGHT, GroupEvent.MISSED): GroupPhase.NONE,
        (GroupPhase.SOUGHT, GroupEvent.FORM): GroupPhase.FORMING,
        (GroupPhase.FORMING, GroupEvent.FORM): GroupPhase.FORMING,  # under a newer epoch still
        (GroupPhase.FORMING, GroupEvent.FORMED): GroupPhase.FORMED,
        (GroupPhase.FORMING, GroupEvent.FAILED): GroupPhase.ABORTED,
        (GroupPhase.FORMING, GroupEvent.ABORT): GroupPhase.ABORTED,  # a rank ended meanwhile
        (GroupPhase.FORMED, GroupEvent.FORM): GroupPhase.FORMING,
        (GroupPhase.FORMING, GroupEvent.DRAIN): GroupPhase.DRAINING,
        (GroupPhase.FORMED, GroupEvent.ABORT): GroupPhase.ABORTED,
        (GroupPhase.FORMED, GroupEvent.DRAIN): GroupPhase.DRAINING,
        (GroupPhase.ABORTED, GroupEvent.FORM): GroupPhase.FORMING,
        (GroupPhase.ABORTED, GroupEvent.ABORT): GroupPhase.ABORTED,
        (GroupPhase.ABORTED, GroupEvent.DRAIN): GroupPhase.DRAINING,
        (GroupPhase.DRAINING, GroupEvent.DRAIN): GroupPhase.DRAINING,
        (GroupPhase.DRAINING, GroupEvent.DRAINED): GroupPhase.ABORTED,
        (GroupPhase.DRAINING, GroupEvent.ABORT): GroupPhase.ABORTED,  # a rank ended, or cells are stuck too
        (GroupPhase.DRAINING, GroupEvent.FORM): GroupPhase.FORMING,
    }
)


class GroupDoubt(_TableEnum):
    """The reason why process groups that are formed may be of no use, seen from their controller."""

    NONE = "none"  # as far as is known the members of each are equally far
    PARTIAL = "partial"  # some could not be compared, since their ranks ran other calls
    TOLD = "told"  # a rank has told that some are of no use
    UNANSWERED = "unanswered"  # a call has completed though ranks did not answer: they are asked on and on


class DoubtEvent(_TableEnum):
    TOLD = "a rank tells of it"
    UNANSWERED = "nobody knows in time"
    COMPARED = "compared"
    COMPARED_PARTLY = "compared where ranks were idle"
    ABORTED = "aborted"
    FORMED = "formed"


DOUBT_NEXT = _Transitions[GroupDoubt, DoubtEvent](
    {
        **{(doubt, DoubtEvent.TOLD): GroupDoubt.TOLD for doubt in GroupDoubt},
        **{(doubt, DoubtEvent.UNANSWERED): GroupDoubt.UNANSWERED for doubt in GroupDoubt},
        **{(doubt, DoubtEvent.COMPARED): GroupDoubt.NONE for doubt in GroupDoubt},
        **{(doubt, DoubtEvent.COMPARED_PARTLY): GroupDoubt.PARTIAL for doubt in GroupDoubt},
        **{(doubt, DoubtEvent.ABORTED): GroupDoubt.NONE for doubt in GroupDoubt},
        **{(doubt, DoubtEvent.FORMED): doubt for doubt in GroupDoubt},
        (GroupDoubt.UNANSWERED, DoubtEvent.TOLD): GroupDoubt.UNANSWERED,  # they are being asked already
        (GroupDoubt.PARTIAL, DoubtEvent.ABORTED): GroupDoubt.PARTIAL,  # who was spared has the old ones
        (GroupDoubt.PARTIAL, DoubtEvent.FORMED): GroupDoubt.NONE,
    }
)


class ActorDoubt(_TableEnum):
    """The same doubt, as far as actors have left it."""

    NONE = "none"  # no actor has failed since the groups were compared
    UNEVEN = "uneven"  # one has: they are compared as long as actors use them


class ActorEvent(_TableEnum):
    SPOILT = "an actor failed, or used groups of which some are new"
    COMPARED = "compared, and no longer in use"
    RENEWED = "all groups are new, or will be"


ACTOR_DOUBT_NEXT = _Transitions[ActorDoubt, ActorEvent](
    {
        **{(doubt, ActorEvent.SPOILT): ActorDoubt.UNEVEN for doubt in ActorDoubt},
        **{(doubt, ActorEvent.RENEWED): ActorDoubt.NONE for doubt in ActorDoubt},
        (ActorDoubt.UNEVEN, ActorEvent.COMPARED): ActorDoubt.NONE,
    }
)


class WatchPhase(_TableEnum):
    """A call, seen from the recovery of its mesh, until it completes."""

    OPEN = "open"  # ranks are at it, and nobody waits in vain
    QUEUED = "queued"  # it is not sent yet, since it would meet a failed one
    FAILING = "failing"  # a rank has failed it, or its end was asked for: others may wait in vain
    ENDED = "ended"  # all ranks have ended it; it completes when the groups are compared, or are back
    HELD_OVER = "held over"  # all ended it while groups were being formed: first these are formed


class WatchEvent(_TableEnum):
    QUEUED = "queued"
    SENT = "sent"
    FAILED = "failed"
    FREED = "freed"  # nobody waits in it any more
    ENDED = "all ended"
    ENDED_AS_FORMED = "all ended while groups were being formed"
    FORMED = "groups are back, or will not come"


WATCH_NEXT = _Transitions[WatchPhase, WatchEvent](
    {
        (WatchPhase.OPEN, WatchEvent.QUEUED): WatchPhase.QUEUED,
        (WatchPhase.QUEUED, WatchEvent.SENT): WatchPhase.OPEN,
        (WatchPhase.QUEUED, WatchEvent.FREED): WatchPhase.OPEN,  # dropped, or all of its ranks were lost
        (WatchPhase.OPEN, WatchEvent.FAILED): WatchPhase.FAILING,
        (WatchPhase.FAILING, WatchEvent.FAILED): WatchPhase.FAILING,
        (WatchPhase.OPEN, WatchEvent.FREED): WatchPhase.OPEN,
        (WatchPhase.FAILING, WatchEvent.FREED): WatchPhase.OPEN,
        (WatchPhase.OPEN, WatchEvent.ENDED): WatchPhase.ENDED,
        (WatchPhase.OPEN, WatchEvent.ENDED_AS_FORMED): WatchPhase.HELD_OVER,
        (WatchPhase.HELD_OVER, WatchEvent.FORMED): WatchPhase.ENDED,
    }
)


class CallPhase(_TableEnum):
    """A call, seen from who made it."""

    OPEN = "open"  # some rank has not answered
    ENDED = "ended"  # all have; its outcome may wait for process groups to come back
    CLOSED = "closed"  # its outcome is told: nothing that comes for it is of use


class CallEvent(_TableEnum):
    ANSWERED = "all answered"
    SETTLED = "outcome told"
    GIVEN_UP = "given up"  # the mesh ends, or the call cannot be sent


CALL_NEXT = _Transitions[CallPhase, CallEvent](
    {
        (CallPhase.OPEN, CallEvent.ANSWERED): CallPhase.ENDED,
        (CallPhase.ENDED, CallEvent.SETTLED): CallPhase.CLOSED,
        (CallPhase.OPEN, CallEvent.GIVEN_UP): CallPhase.CLOSED,
        (CallPhase.ENDED, CallEvent.GIVEN_UP): CallPhase.CLOSED,
        (CallPhase.CLOSED, CallEvent.GIVEN_UP): CallPhase.CLOSED,
    }
)
