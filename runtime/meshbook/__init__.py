"""Meshbook: a persistent mesh of PyTorch processes, driven from a notebook or a script.

from meshbook import this_host

mesh = this_host().spawn_procs({"gpus": 4})
mesh.run("x = torch.ones(3) * rank; dist.all_reduce(x)").get()
mesh.slice(gpus=0).pull("x").get()
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, cast

from meshbook._version import __version__

if TYPE_CHECKING:
    from meshbook import errors
    from meshbook.actor.actor_mesh import ProcRef
    from meshbook.concurrency.future import Future
    from meshbook.curves.recorder import log
    from meshbook.elasticity.loop import elastic
    from meshbook.elasticity.recovery import elastic_script
    from meshbook.errors import DeviceMeshError, MeshError
    from meshbook.launchers.base import Launcher
    from meshbook.launchers.local import LocalLauncher
    from meshbook.mesh.attach import Attachment
    from meshbook.mesh.driven import attach, detach, heal_mesh, metrics, recall, remember, shutdown, start_hosts
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.monarch.config import (
        clear_runtime_config,
        configure,
        configured,
        get_global_config,
        get_runtime_config,
    )
    from meshbook.sessions.listing import SavedSession
    from meshbook.shape.members import Extent, Point
    from meshbook.shape.ndslice import NDSlice, Shape, Slice
    from meshbook.shape.value_mesh import ValueMesh
    from meshbook.tensors.data.streams import stream
    from meshbook.tensors.handles.checkpoints import restore, save
    from meshbook.tensors.handles.distributed_mesh import Mesh, current_mesh, from_ranks
    from meshbook.tensors.handles.factories import (
        arange,
        distribute,
        empty,
        full,
        ones,
        rand,
        randint,
        randn,
        zeros,
    )
    from meshbook.tensors.handles.mesh_tensor import MeshTensor
    from meshbook.tensors.handles.modules import module_to_mesh
    from meshbook.tensors.handles.monarch_names import (
        Stream,
        Tensor,
        call_on_shard_and_fetch,
        coalescing,
        fetch_shard,
        get_active_mesh,
        get_active_stream,
        grad_function,
        grad_generator,
        inspect,
        no_mesh,
        reduce,
        reduce_,
        remote,
        show,
        slice_mesh,
        to_mesh,
    )
    from meshbook.tensors.messages.anomalies import detect_anomaly
    from meshbook.tensors.steps.recorded_steps import compile
    from meshbook.worker.once_per_host import once_per_host

__all__ = [
    "Attachment",
    "DeviceMeshError",
    "Extent",
    "Future",
    "HostMesh",
    "Launcher",
    "LocalLauncher",
    "Mesh",
    "MeshError",
    "MeshTensor",
    "NDSlice",
    "Point",
    "ProcMesh",
    "SavedSession",
    "Shape",
    "Slice",
    "Stream",
    "Tensor",
    "ValueMesh",
    "__version__",
    "arange",
    "attach",
    "call_on_shard_and_fetch",
    "clear_runtime_config",
    "coalescing",
    "compile",
    "configure",
    "configured",
    "current_mesh",
    "detach",
    "detect_anomaly",
    "distribute",
    "elastic",
    "elastic_script",
    "empty",
    "errors",
    "fetch_shard",
    "from_ranks",
    "full",
    "get_active_mesh",
    "get_active_stream",
    "get_global_config",
    "get_runtime_config",
    "grad_function",
    "grad_generator",
    "heal_mesh",
    "inspect",
    "log",
    "metrics",
    "module_to_mesh",
    "no_mesh",
    "once_per_host",
    "ones",
    "rand",
    "randint",
    "randn",
    "recall",
    "reduce",
    "reduce_",
    "remember",
    "remote",
    "restore",
    "save",
    "sessions",
    "show",
    "shutdown",
    "slice_mesh",
    "start_hosts",
    "stream",
    "this_host",
    "this_proc",
    "to_mesh",
    "zeros",
]


_FOUND_IN = {
    "concurrency.future": ("Future",),
    "curves.recorder": ("log",),
    "elasticity.loop": ("elastic",),
    "elasticity.recovery": ("elastic_script",),
    "errors": ("DeviceMeshError", "MeshError"),
    "launchers.base": ("Launcher",),
    "launchers.local": ("LocalLauncher",),
    "mesh.attach": ("Attachment",),
    "mesh.driven": (
        "attach", "detach", "heal_mesh", "metrics", "recall", "remember", "shutdown", "start_hosts",
    ),
    "mesh.host_mesh": ("HostMesh",),
    "mesh.proc_mesh": ("ProcMesh",),
    "monarch.config": ("clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"),
    "sessions.listing": ("SavedSession",),
    "shape.members": ("Extent", "Point"),
    "shape.ndslice": ("NDSlice", "Shape", "Slice"),
    "shape.value_mesh": ("ValueMesh",),
    "tensors.data.streams": ("stream",),
    "tensors.handles.checkpoints": ("restore", "save"),
    "tensors.handles.distributed_mesh": ("Mesh", "current_mesh", "from_ranks"),
    "tensors.handles.factories": ("arange", "distribute", "empty", "full", "ones", "rand", "randint", "randn", "zeros"),
    "tensors.handles.mesh_tensor": ("MeshTensor",),
    "tensors.handles.monarch_names": (
        "Stream", "Tensor", "call_on_shard_and_fetch", "coalescing", "fetch_shard", "get_active_mesh",
        "get_active_stream", "grad_function", "grad_generator", "inspect", "no_mesh", "reduce", "reduce_", "remote",
        "show", "slice_mesh", "to_mesh",
    ),
    "tensors.handles.modules": ("module_to_mesh",),
    "tensors.messages.anomalies": ("detect_anomaly",),
    "tensors.steps.recorded_steps": ("compile",),
    "worker.once_per_host": ("once_per_host",),
}  # fmt: skip
"""Fetched when asked for: agents and workers, which import this package first, need nothing that drives meshes."""

_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _FOUND_IN.items() for name in names}


_FACES = ("actor", "distributed", "errors", "monarch", "shape", "wire")
"""Packages that ``import meshbook`` is enough for."""


def __getattr__(name: str) -> object:
    if name in _FACES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FACES})


def this_host() -> HostMesh:
    """Return the machine this runs on, as a host without axes. Its agent is started once and serves all meshes.

    On a rank: the machine of the rank, as a `meshbook.mesh.actor_hosts.HostRef`.
    """
    if _is_rank():
        from meshbook.mesh.actor_hosts import HostRef

        return cast("HostMesh", HostRef())
    from meshbook.launchers.agent_start import head_start

    with contextlib.nullcontext() if f"{__name__}.mesh.driven" in sys.modules else head_start():
        from meshbook.mesh import driven

        return driven.this_host()


def this_proc() -> ProcRef:
    """Return the process in which this runs, as a mesh without axes: that of a rank, or that of the program."""
    if _is_rank():
        from meshbook.actor import actor_mesh

        return actor_mesh.this_proc()
    from meshbook.mesh.driven import client_proc

    return client_proc()


def _is_rank() -> bool:
    router = sys.modules.get(f"{__name__}.actor.router")  # a rank has it, and few programs need it
    return router is not None and bool(router.is_rank())


importlib.import_module(f"{__name__}.sessions")  # now: later it would take the place of the function of its name


def sessions() -> list[SavedSession]:
    """The sessions of this user on this machine that have meshes, the latest first; dead ones are left out."""
    from meshbook.sessions import listing

    return listing.sessions()


def load_ipython_extension(ipython: object) -> None:
    """``%load_ext meshbook``: hand over to the notebook extension, which is found by its entry point."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="meshbook.extensions", name="notebook"):
        entry.load()(ipython)
        return
    raise ImportError("the notebook extension of meshbook is not installed: pip install 'meshbook[notebook]'")
