"""Every failure of a mesh under the name by which programs with tensors catch it.

A module of its own because it is the name that programs import.

try:
    loss = train_step(mesh, batch)
except DeviceMeshError:
    heal_mesh(mesh)
"""

from __future__ import annotations

from meshbook.errors import HostLost, MeshError, WorkerLost
from meshbook.tensors.sending.op_failures import TensorError
from meshbook.tensors.sending.recovery import TensorLost, TensorTorn, ViewLost

DeviceMeshError = MeshError
"""A rank ended, an operation on the ranks failed, a mesh was stopped: all of them are this."""

__all__ = ["DeviceMeshError", "HostLost", "TensorError", "TensorLost", "TensorTorn", "ViewLost", "WorkerLost"]
