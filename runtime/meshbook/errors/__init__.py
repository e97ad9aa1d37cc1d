"""Every error of the runtime, in one tree.

    MeshError                   also called DeviceMeshError
    ├── ShapeError              an axis, rank or layout that the mesh does not have
    │   ├── UnknownAxisError
    │   ├── RankError
    │   └── LayoutError         a view that no (offset, sizes, strides) can describe
    ├── UsageError              a command or an argument that makes no sense as given; a ValueError too
    │   ├── NotOwnerError       a reference to hosts, which only their owner shuts down; a RuntimeError too
    │   └── PeekRefused         a peek into a busy rank would wait there; raised on the rank
    ├── PromptRefused           a question of a rank that no person can answer; an EOFError too; raised on the rank
    ├── SaveFailed              a save that was not written; the folder has the saves that it had
    ├── ScriptExit              a program ended with an exit code; a RuntimeError too; raised on the rank
    ├── SpawnError              hosts or workers that did not come up
    │   ├── HostsEndedError     hosts that were shut down; a RuntimeError too
    │   ├── DeviceError         fewer devices than ranks
    │   └── CrashLoopError      a rank that ends again and again
    ├── MeshStoppedError        a call on a mesh that was stopped
    │   └── MeshDetachedError   a call on a mesh that lives on without this process
    ├── AttachError             a session that cannot be attached
    │   └── SessionInUse        another process drives it
    ├── CallError               a call that has no complete answer; carries ``partial``
    │   ├── CallFailed          ranks raised
    │   │   └── ItemFailed      a function failed on an item of a map
    │   ├── CallTimeout         ranks were silent at the deadline
    │   ├── CallInterrupted     the person pressed interrupt
    │   └── WorkerLost          workers ended while the call was open
    ├── MailboxClosed           a message to an actor or a port that is not there (any more)
    ├── GroupAborted            a collective of groups that the controller has aborted; raised on the ranks
    ├── RanksDisagree           ranks that entered different operations; the error of their call
    ├── HostLost                a host agent went silent or ended
    ├── SerializationError      a value that cannot travel; names the attribute path
    ├── MessageTooLarge         a message of which a part is larger than any link carries
    ├── LoadError               a value that arrived and cannot be built there; names the missing module
    └── ProtocolError           two processes disagree about the wire
        ├── LocalProtocolError  our own side asked for something impossible
        └── PeerProtocolError   the other side sent something impossible

The arguments of an error are its fields, so that each survives pickling. They are known by the name of this package:
in which of its modules they stand nobody else need know.
"""

from __future__ import annotations

from meshbook.errors.base import (
    AttachError,
    CrashLoopError,
    DebugError,
    DeviceError,
    DeviceMeshError,
    HostLost,
    HostsEndedError,
    LayoutError,
    LoadError,
    LocalProtocolError,
    MeshDetachedError,
    MeshError,
    MeshStoppedError,
    MessageTooLarge,
    NegativeIndexError,
    NotOwnerError,
    PeekRefused,
    PeerProtocolError,
    PromptRefused,
    ProtocolError,
    RankError,
    RanksLeft,
    SaveFailed,
    ScriptExit,
    SerializationError,
    SessionInUse,
    ShapeError,
    SpawnError,
    UnknownAxisError,
    UsageError,
    failure_of,
    kind_of,
)
from meshbook.errors.calls import (
    GRADIENTS,
    CallError,
    CallFailed,
    CallInterrupted,
    CallTimeout,
    GroupAborted,
    ItemFailed,
    LeftStopped,
    MailboxClosed,
    Partial,
    RanksDisagree,
    WorkerLost,
    disagreeing,
)
from meshbook.errors.failures import (
    Failure,
    FailureKind,
    RankDeath,
    RemoteTraceback,
    describe_deaths,
    group_failures,
    next_steps,
    without_colours,
)
from meshbook.formatting import format_ranks

for _error in (value for value in tuple(globals().values()) if isinstance(value, type)):
    if issubclass(_error, BaseException):
        _error.__module__ = __name__  # by which tracebacks name it, and pickles find it
