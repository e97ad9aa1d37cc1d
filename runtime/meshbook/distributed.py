"""Tensors across a mesh: the names that a program with tensors needs.

A module of its own because it is the name that programs import.

import meshbook
from meshbook.distributed import Mesh, current_mesh, from_ranks

mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
x = meshbook.distribute(torch.randn(64, 32), mesh, sharding_spec=["data_parallel", None])
(x @ x.T).sum().item()
"""

from __future__ import annotations

from meshbook.mesh.driven import heal_mesh
from meshbook.tensors.distributed_mesh import Mesh, current_mesh, from_ranks
from meshbook.tensors.factories import arange, distribute, empty, full, ones, rand, randint, randn, zeros
from meshbook.tensors.mesh_tensor import MeshTensor
from meshbook.tensors.modules import module_to_mesh, show_plan

__all__ = [
    "Mesh",
    "MeshTensor",
    "arange",
    "current_mesh",
    "distribute",
    "empty",
    "from_ranks",
    "full",
    "heal_mesh",
    "module_to_mesh",
    "ones",
    "rand",
    "randint",
    "randn",
    "show_plan",
    "zeros",
]
