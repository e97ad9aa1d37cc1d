"""Tensors across a mesh: the names that a program with tensors needs beside those of `meshbook` itself.

A module of its own because it is the name that programs import.

import meshbook
from meshbook.distributed import Mesh

mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
x = meshbook.distribute(torch.randn(64, 32), mesh, sharding_spec=["data_parallel", None])
(x @ x.T).sum().item()
"""

from __future__ import annotations

from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.modules import show_plan
from meshbook.tensors.handles.monarch_names import fetch_shard, inspect, remote
from meshbook.tensors.sending.op_failures import TensorError
from meshbook.tensors.sending.recovery import TensorLost, TensorTorn, ViewLost

__all__ = [
    "Mesh",
    "TensorError",
    "TensorLost",
    "TensorTorn",
    "ViewLost",
    "fetch_shard",
    "inspect",
    "remote",
    "show_plan",
]
