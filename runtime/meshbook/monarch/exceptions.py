"""Every failure of a mesh under the name by which programs with tensors catch it.

A module of its own because it is the name that programs import.

try:
    loss = train_step(mesh, batch)
except DeviceMeshError:
    mesh = heal_mesh(mesh)
    loss = train_step(mesh, batch)
"""

from __future__ import annotations

from meshbook.errors import DeviceMeshError, HostLost, WorkerLost
from meshbook.tensors.sending.op_failures import TensorError
from meshbook.tensors.sending.recovery import TensorLost, TensorTorn, ViewLost

__all__ = ["DeviceMeshError", "HostLost", "TensorError", "TensorLost", "TensorTorn", "ViewLost", "WorkerLost"]
