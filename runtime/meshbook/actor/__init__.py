"""Actors: classes whose methods other processes call, with Monarch's names and meanings.

from meshbook.actor import Actor, endpoint, this_host

class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, by: int) -> int:
        self.value += by
        return self.value

procs = this_host().spawn_procs(per_host={"gpus": 4})
counters = procs.spawn("counters", Counter, 0)
counters.add.call(2).get()                 # a ValueMesh
counters.slice(gpus=0).add.call_one(1).get()
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, NoReturn

import meshbook
from meshbook.actor.actor_mesh import ActorMesh
from meshbook.actor.context import Context, context, current_actor_name, current_rank, current_size
from meshbook.actor.decorators import Actor, Endpoint, concurrent_endpoint, endpoint
from meshbook.actor.endpoint import Accumulator, as_endpoint, send
from meshbook.actor.errors import (
    ActorError,
    ActorLostError,
    ActorNotMadeError,
    ActorStoppedError,
    ActorStuckError,
    ArgumentsError,
    BufferDroppedError,
    BufferKindError,
    BufferSizeError,
    NoEndpointError,
    ProcsNotStartedError,
    ProcsStoppedError,
    ReloadError,
    SupervisionError,
    UnhandledFault,
)
from meshbook.actor.ports import Channel, Port, PortReceiver, RankedPortReceiver
from meshbook.actor.router import is_rank
from meshbook.actor.supervision import MeshFailure, unhandled_fault_hook
from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.errors.advice import advice
from meshbook.shape.members import Extent, Point
from meshbook.shape.ndslice import MeshTrait, NDSlice, Shape, ShapeExt, Slice
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.buffers.rdma_buffer import RDMABuffer
    from meshbook.actor.proc_ref import ProcRef
    from meshbook.mesh.actor_hosts import HostRef, get_or_spawn_controller, shutdown_context
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.spawn_options import BootstrapCommand, default_bootstrap_cmd

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorLostError",
    "ActorMesh",
    "ActorNotMadeError",
    "ActorStoppedError",
    "ActorStuckError",
    "ArgumentsError",
    "BootstrapCommand",
    "BufferDroppedError",
    "BufferKindError",
    "BufferSizeError",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "MeshTrait",
    "NDSlice",
    "NoEndpointError",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "ProcsNotStartedError",
    "ProcsStoppedError",
    "RDMABuffer",
    "RankedPortReceiver",
    "ReloadError",
    "Shape",
    "ShapeExt",
    "Slice",
    "SupervisionError",
    "UnhandledFault",
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
    "HostMesh": "meshbook.mesh",
    "ProcMesh": "meshbook.mesh.proc_mesh",
    "RDMABuffer": "meshbook.actor.buffers.rdma_buffer",
    "default_bootstrap_cmd": "meshbook.mesh.spawn_options",
    "get_or_spawn_controller": "meshbook.mesh.actor_hosts",
    "shutdown_context": "meshbook.mesh.actor_hosts",
}
"""What stands above this package, which those modules import themselves; buffers, which import NumPy; what few use."""


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _WORKER_LOOPS:
        return functools.partial(refuse_worker_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_WORKER_LOOPS = (
    "attach", "attach_to_workers", "run_worker_loop_forever", "run_worker_loop_until_shutdown",
    "start_worker_loop_forever",
)  # fmt: skip
"""Monarch's names for machines that become hosts by themselves, for which there is one way here: an invitation."""


def refuse_worker_loop(name: str, *args: object, **kwargs: object) -> NoReturn:
    """Raises: UsageError that shows the way there is."""
    raise UsageError(
        f"{name} is not here: a machine becomes a host by one line with a ticket, python3 -m meshbook.join <<< TICKET. "
        f"It is shown by {advice().invite}; see docs/clusters.md."
    )


def this_host() -> HostMesh | HostRef:
    """The machine this runs on: that of the notebook, or that of the rank."""
    if is_rank():
        from meshbook.mesh.actor_hosts import HostRef

        return HostRef()
    return meshbook.this_host().without_waiting()


def this_proc() -> ProcRef:
    """The process in which this runs, as a mesh without axes: that of a rank, or that of the program."""
    from meshbook.actor import proc_ref

    if is_rank():
        return proc_ref.this_proc()
    from meshbook.mesh.driven import client_proc

    return client_proc()
