"""The states of meshes, workers, process groups and calls, and the only ways between them.

Each table maps (state, event) to the next state; anything else is a fault of ours and raises `LocalProtocolError`. The
diagrams in docs/protocol.md are made from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from meshbook.errors import LocalProtocolError


class MeshPhase(enum.Enum):
    """A mesh of processes, seen from its controller."""

    STARTING = "starting"  # hosts have been asked for workers
    READY = "ready"  # every worker has answered
    REPAIRING = "repairing"  # workers are started again, join or leave; the others can be called
    STOPPING = "stopping"  # workers have been told to end
    STOPPED = "stopped"  # no process is left


class MeshEvent(enum.Enum):
    STARTED = "all workers answered"
    REPAIR = "repair"
    REPAIRED = "repair ended"  # well or not: who is dead is told apart
    STOP = "stop"
    ENDED = "all workers ended"


MESH_NEXT: Mapping[tuple[MeshPhase, MeshEvent], MeshPhase] = {
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


class WorkerPhase(enum.Enum):
    """A worker, seen from its host agent."""

    FORKING = "forking"  # the template has been asked
    STARTING = "starting"  # it has a pid, and was told who it is
    READY = "ready"  # it has answered; from here on it is idle or busy
    LEAVING = "leaving"  # it was told to end: nothing reaches it, its rank may be another's
    DEAD = "dead"  # its pidfd says so, and it was reaped


class WorkerEvent(enum.Enum):
    FORKED = "forked"
    BEGUN = "said who it is"
    DISMISSED = "told to leave"
    EXITED = "exited"


WORKER_NEXT: Mapping[tuple[WorkerPhase, WorkerEvent], WorkerPhase] = {
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


class GroupPhase(enum.Enum):
    """The process groups of a mesh, seen from its controller."""

    NONE = "none"  # the controller has formed none; cells may have made their own
    FORMING = "forming"  # the ranks have been asked to form them, under a new epoch
    FORMED = "formed"  # all ranks have counted each other
    ABORTED = "aborted"  # every wait and every operation on the ranks raises GroupAborted


class GroupEvent(enum.Enum):
    FOUND = "ranks have some"
    FORM = "form"
    FORMED = "all ranks counted each other"
    FAILED = "a rank could not"
    ABORT = "abort"


GROUP_NEXT: Mapping[tuple[GroupPhase, GroupEvent], GroupPhase] = {
    (GroupPhase.NONE, GroupEvent.FORM): GroupPhase.FORMING,
    (GroupPhase.NONE, GroupEvent.ABORT): GroupPhase.NONE,  # there is nothing to abort
    (GroupPhase.NONE, GroupEvent.FOUND): GroupPhase.FORMED,  # cells, or an earlier controller, have made them
    (GroupPhase.FORMING, GroupEvent.FORM): GroupPhase.FORMING,  # under a newer epoch still
    (GroupPhase.FORMING, GroupEvent.FORMED): GroupPhase.FORMED,
    (GroupPhase.FORMING, GroupEvent.FAILED): GroupPhase.ABORTED,
    (GroupPhase.FORMING, GroupEvent.ABORT): GroupPhase.ABORTED,  # a rank ended meanwhile
    (GroupPhase.FORMED, GroupEvent.FORM): GroupPhase.FORMING,
    (GroupPhase.FORMED, GroupEvent.ABORT): GroupPhase.ABORTED,
    (GroupPhase.ABORTED, GroupEvent.FORM): GroupPhase.FORMING,
    (GroupPhase.ABORTED, GroupEvent.ABORT): GroupPhase.ABORTED,
}


class CallPhase(enum.Enum):
    """A call, seen from who made it."""

    OPEN = "open"  # some rank has not answered
    ENDED = "ended"  # all have; its outcome may wait for process groups to come back
    CLOSED = "closed"  # its outcome is told: nothing that comes for it is of use


class CallEvent(enum.Enum):
    ANSWERED = "all answered"
    SETTLED = "outcome told"
    GIVEN_UP = "given up"  # the mesh ends, or the call cannot be sent


CALL_NEXT: Mapping[tuple[CallPhase, CallEvent], CallPhase] = {
    (CallPhase.OPEN, CallEvent.ANSWERED): CallPhase.ENDED,
    (CallPhase.ENDED, CallEvent.SETTLED): CallPhase.CLOSED,
    (CallPhase.OPEN, CallEvent.GIVEN_UP): CallPhase.CLOSED,
    (CallPhase.ENDED, CallEvent.GIVEN_UP): CallPhase.CLOSED,
    (CallPhase.CLOSED, CallEvent.GIVEN_UP): CallPhase.CLOSED,
}


_Phase = TypeVar("_Phase", bound=enum.Enum)
_Event = TypeVar("_Event", bound=enum.Enum)


def advance(table: Mapping[tuple[_Phase, _Event], _Phase], phase: _Phase, event: _Event) -> _Phase:
    """Return the state after ``event``. Raises: LocalProtocolError where the table has no such way."""
    try:
        return table[phase, event]
    except KeyError:
        raise LocalProtocolError(f"{event.value!r} cannot happen while {phase.value}") from None
