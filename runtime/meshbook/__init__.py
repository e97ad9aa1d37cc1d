"""Meshbook: a persistent mesh of PyTorch processes, driven from a notebook or a script.

from meshbook import this_host

mesh = this_host().spawn_procs({"gpus": 4})
mesh.run("x = torch.ones(3) * rank; dist.all_reduce(x)").get()
mesh.slice(gpus=0).pull("x").get()
"""

from __future__ import annotations

from typing import Any

from meshbook import errors
from meshbook._version import __version__
from meshbook.concurrency.future import Future
from meshbook.errors import MeshError
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.attach import Attachment
from meshbook.mesh.driven import attach, detach, heal_mesh, recall, remember, shutdown, start_hosts, this_host
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.sessions.listing import SavedSession, sessions
from meshbook.shape.members import Extent, Point
from meshbook.shape.ndslice import NDSlice, Shape, Slice
from meshbook.shape.value_mesh import ValueMesh

__all__ = [
    "Attachment",
    "Extent",
    "Future",
    "HostMesh",
    "Launcher",
    "LocalLauncher",
    "MeshError",
    "NDSlice",
    "Point",
    "ProcMesh",
    "SavedSession",
    "Shape",
    "Slice",
    "ValueMesh",
    "__version__",
    "attach",
    "detach",
    "errors",
    "heal_mesh",
    "recall",
    "remember",
    "sessions",
    "shutdown",
    "start_hosts",
    "this_host",
]


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext meshbook``: hand over to the notebook extension, which is found by its entry point."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="meshbook.extensions", name="notebook"):
        entry.load()(ipython)
        return
    raise ImportError("the notebook extension of meshbook is not installed: pip install 'meshbook[notebook]'")
