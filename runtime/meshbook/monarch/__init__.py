"""Monarch's names: a program that was written for Monarch changes its imports to these, and nothing else.

    from monarch.actor import Actor, endpoint, this_host      -> from meshbook.monarch import Actor, endpoint, this_host
    from monarch.job import SlurmJob                          -> from meshbook.monarch.job import SlurmJob

The submodules are ``job``, ``rdma``, ``spmd`` and ``config``; ``exceptions`` has the failures of meshes and tensors.
Names of tensors (``monarch.Stream``) are in `meshbook` itself. docs/monarch.md lists every name of Monarch's.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, NoReturn

from meshbook import this_proc
from meshbook.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Context,
    Endpoint,
    MeshFailure,
    Port,
    PortReceiver,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    send,
    unhandled_fault_hook,
)
from meshbook.actor.router import is_rank
from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.errors.advice import advice
from meshbook.shape.members import Extent, Point
from meshbook.shape.ndslice import NDSlice, Shape, Slice
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.buffers.rdma import RDMABuffer
    from meshbook.mesh.actor_hosts import HostRef, get_or_spawn_controller, shutdown_context
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.spawn_options import BootstrapCommand, default_bootstrap_cmd

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "NDSlice",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "RDMABuffer",
    "Shape",
    "Slice",
    "SupervisionError",
    "ValueMesh",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "endpoint",
    "get_or_spawn_controller",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]

_LATER = {
    "BootstrapCommand": "meshbook.mesh.spawn_options",
    "HostMesh": "meshbook.mesh.host_mesh",
    "ProcMesh": "meshbook.mesh.proc_mesh",
    "RDMABuffer": "meshbook.actor.buffers.rdma",
    "default_bootstrap_cmd": "meshbook.mesh.spawn_options",
    "get_or_spawn_controller": "meshbook.mesh.actor_hosts",
    "shutdown_context": "meshbook.mesh.actor_hosts",
}
"""Names that are fetched when they are asked for: ranks import this package, too, and need none of `meshbook.mesh`."""

_WORKER_LOOPS = (
    "attach", "attach_to_workers", "run_worker_loop_forever", "run_worker_loop_until_shutdown",
    "start_worker_loop_forever",
)  # fmt: skip
"""Monarch's names for machines that become hosts by themselves; here such a machine is invited."""


_SUBMODULES = ("config", "exceptions", "job", "rdma", "spmd")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _WORKER_LOOPS:
        return functools.partial(refuse_worker_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def refuse_worker_loop(name: str, *args: object, **kwargs: object) -> NoReturn:
    """Raises: UsageError that shows the way there is."""
    raise UsageError(
        f"{name} is not here: a machine becomes a host by one line with a ticket, python3 -m meshbook.join <<< TICKET. "
        f"It is shown by {advice().invite}; see docs/clusters.md."
    )


def this_host() -> HostMesh | HostRef:
    """Return the machine this runs on: that of the notebook, whose `spawn_procs` does not wait, or that of the rank."""
    import meshbook

    hosts = meshbook.this_host()
    return hosts if is_rank() else hosts.without_waiting()
