"""Actors: classes whose methods other processes call, with Monarch's names and meanings.

from meshbook import this_host
from meshbook.actor import Actor, endpoint

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

import importlib
import warnings

from meshbook.actor.actor_mesh import ActorMesh
from meshbook.actor.classes import Actor, Endpoint, concurrent_endpoint, endpoint
from meshbook.actor.context import Context, context, current_actor_name, current_rank, current_size
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
from meshbook.actor.ports import Channel, Port, PortReceiver
from meshbook.actor.supervision import MeshFailure, unhandled_fault_hook

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
    "BufferDroppedError",
    "BufferKindError",
    "BufferSizeError",
    "Channel",
    "Context",
    "Endpoint",
    "MeshFailure",
    "NoEndpointError",
    "Port",
    "PortReceiver",
    "ProcsNotStartedError",
    "ProcsStoppedError",
    "ReloadError",
    "SupervisionError",
    "UnhandledFault",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "send",
    "unhandled_fault_hook",
]

_MOVED = {
    **dict.fromkeys(
        ("Extent", "Future", "HostMesh", "NDSlice", "Point", "ProcMesh", "Shape", "Slice", "ValueMesh"), "meshbook"
    ),
    **dict.fromkeys(
        (
            "BootstrapCommand", "RDMABuffer", "attach", "attach_to_workers",
            "default_bootstrap_cmd", "get_or_spawn_controller", "run_worker_loop_forever",
            "run_worker_loop_until_shutdown", "shutdown_context", "start_worker_loop_forever", "this_host", "this_proc",
        ),
        "meshbook.monarch",
    ),
}  # fmt: skip
"""The names that were here before 0.2, and the packages above or below this one that have them now."""


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _MOVED[name]
    warnings.warn(
        f"import {name} from {place}: meshbook.actor has only what it defines, and the other names for one release",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(place), name)
