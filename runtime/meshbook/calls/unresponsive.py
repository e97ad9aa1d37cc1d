"""Why a rank does not answer, by the state of its process; and how to put it."""

from __future__ import annotations

from meshbook.errors import WorkerLost

STOPPED = "it stopped just now"
"""A rank that has left the user's code and is about to answer."""

_CAUSES = {
    "T": "stopped by SIGSTOP",
    "t": "stopped by a debugger",
    "D": "in uninterruptible I/O (state D): a disk or a network file system does not answer",
    "Z": "ended",
    "": "ended",
}


def describe_silence(state: str | None, lost: WorkerLost | None = None, suspicion: str = "") -> str:
    """What keeps the control thread of a rank from answering.

    state: see `meshbook.wire.messages.Processes`; None: not known.
    suspicion: as `meshbook.controller.host_state.HostState` has it.
    """
    if lost is not None:
        return f"ended: {lost.cause}"
    if state is None:
        return f"its host is {suspicion}" if suspicion else "its host does not answer"
    return _CAUSES.get(state, "native code holds the GIL")
