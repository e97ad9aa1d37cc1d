"""The public handles: hosts, meshes of processes, and the functions that start, attach, repair and resize them."""

from __future__ import annotations

from meshbook.mesh.attach import Attachment
from meshbook.mesh.driven import (
    attach,
    detach,
    heal_mesh,
    prewarm,
    recall,
    remember,
    set_output_source,
    set_prompt_handler,
    shutdown,
    start_hosts,
    this_host,
)
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.sessions.listing import SavedSession, sessions

__all__ = [
    "Attachment",
    "HostMesh",
    "ProcMesh",
    "SavedSession",
    "attach",
    "detach",
    "heal_mesh",
    "prewarm",
    "recall",
    "remember",
    "sessions",
    "set_output_source",
    "set_prompt_handler",
    "shutdown",
    "start_hosts",
    "this_host",
]
