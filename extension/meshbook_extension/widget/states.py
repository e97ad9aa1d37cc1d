"""The states of a rank as the widget shows them: a letter each. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import RankStatus

STARTING, IDLE, BUSY, COLLECTIVE, INTERRUPTED, PDB, STOPPED, SILENT, DEAD = "SIBCXPTUD"

NAMES = {
    STARTING: "starting",
    IDLE: "idle",
    BUSY: "busy",
    COLLECTIVE: "in a collective",
    INTERRUPTED: "interrupted, still busy",
    PDB: "stopped in pdb",
    STOPPED: "stopped",
    SILENT: "silent",
    DEAD: "dead",
}

_COLLECTIVES = re.compile(
    r"in (?:\w+\.)*(?:all_reduce|reduce|broadcast|barrier|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|"
    r"scatter|gather|all_gather|all_to_all|reduce_scatter|wait_tensor|all_reduce_coalesced|all_gather_coalesced|"
    r"all_gather_into_tensor|reduce_scatter_tensor|all_to_all_single|all_gather_tensor|"
    r"(?:all_gather|broadcast|gather|scatter|send|recv|broadcast)_object(?:_list)?)(?: \(|$)"
)
"""What `meshbook.source.location` says of a thread inside of torch.distributed."""

_NAMED = {"idle": IDLE, "stopped": STOPPED, "pdb": PDB, "silent": SILENT}


def letter_of(status: RankStatus, *, interrupted: bool = False) -> str:
    """The letter for a rank; ``interrupted``: the call that it runs was interrupted, and it has not ended it."""
    if status.state == "dead":
        return DEAD
    if not status.pid or status.state == "starting":
        return STARTING
    if status.state in _NAMED:
        return _NAMED[status.state]
    if interrupted:
        return INTERRUPTED
    if status.state == "busy":
        return COLLECTIVE if _COLLECTIVES.match(status.where) else BUSY
    return SILENT
