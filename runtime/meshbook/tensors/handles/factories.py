"""Tensors that begin on a mesh: from one of this process, or made by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement
from typing_extensions import Required, TypedDict, Unpack

from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh, mesh_of
from meshbook.tensors.handles.mesh_tensor import MeshTensor, make, new_seed
from meshbook.tensors.handles.placing import lay_out
from meshbook.tensors.messages.operations import Factory
from meshbook.tensors.messages.spec import ShardingSpec, to_placements


def distribute(
    tensor: torch.Tensor,
    mesh: Mesh | ProcMesh,
    sharding_spec: ShardingSpec | None = None,
    *,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """Lay a tensor of this process out over a mesh; it is whole on every rank by default, else each keeps its part.

    sharding_spec: for each dim of the tensor the axis, or axes, that it is cut along, or None. placements: the same in
    torch's words, one for each axis of the mesh. Sizes need not be divisible.
    Raises: UnknownAxisError; UsageError if what is given does not fit the tensor.
    """
    mesh = mesh_of(mesh)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"a tensor is laid out over a mesh, not a {type(tensor).__name__}: use torch.as_tensor")
    made = lay_out(tensor, mesh, to_placements(mesh, tensor.shape, sharding_spec, placements))
    return made.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


class Layout(TypedDict, total=False):
    """Where a new tensor is, of what type, and how it is laid out: as for `distribute`."""

    mesh: Required[Mesh | ProcMesh]
    dtype: torch.dtype | None
    sharding_spec: ShardingSpec | None
    placements: Sequence[Placement] | None
    requires_grad: bool


def _make(
    function: str, shape: Sequence[int], args: tuple[Any, ...], layout: Layout, *, draws: bool = False
) -> MeshTensor:
    """Raises: UsageError for sizes below zero, or without a mesh; TypeError for an argument that is not known."""
    known = Layout.__required_keys__ | Layout.__optional_keys__
    if unknown := set(layout) - known:
        named = ", ".join(map(repr, sorted(unknown)))
        raise TypeError(f"{function}() on a mesh knows no argument {named}; it knows {', '.join(sorted(known))}")
    if "mesh" not in layout:
        raise UsageError(f"{function} makes a tensor on a mesh: say on which, by {function}(..., mesh=mesh)")
    if any(size < 0 for size in shape):
        raise UsageError(f"{function} with a size below zero: {tuple(shape)}")
    mesh = mesh_of(layout["mesh"])
    placements = to_placements(mesh, shape, layout.get("sharding_spec"), layout.get("placements"))
    dtype = layout.get("dtype") or torch.get_default_dtype()
    made = make(Factory(function, args, dtype, new_seed() if draws else 0), shape, mesh, placements)
    return made.requires_grad_(layout.get("requires_grad", False))  # type: ignore[return-value]


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def zeros(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.zeros`, on a mesh; laid out as by `distribute`."""
    return _make("zeros", _sizes(size), (_sizes(size),), layout)


empty = zeros
"""As `torch.empty`, on a mesh: the values are zeros."""


def ones(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.ones`, on a mesh."""
    return _make("ones", _sizes(size), (_sizes(size),), layout)


def full(size: Sequence[int], fill_value: float, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.full`, on a mesh."""
    layout["dtype"] = layout.get("dtype") or torch.full((), fill_value, device="cpu").dtype
    return _make("full", size, (tuple(size), fill_value), layout)


def arange(*bounds: float, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.arange`, on a mesh."""
    like = torch.arange(*bounds, dtype=layout.get("dtype"), device="meta")
    layout["dtype"] = like.dtype
    return _make("arange", like.shape, bounds, layout)


def rand(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.rand`, on a mesh: the values depend on this process's seed, not on the mesh or the layout."""
    return _make("rand", _sizes(size), (_sizes(size),), layout, draws=True)


def randn(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.randn`, on a mesh; see `rand`."""
    return _make("randn", _sizes(size), (_sizes(size),), layout, draws=True)


def randint(low: int, high: int, size: Sequence[int], **layout: Unpack[Layout]) -> MeshTensor:
    """As `torch.randint`, on a mesh; see `rand`."""
    layout["dtype"] = layout.get("dtype") or torch.int64
    return _make("randint", size, (low, high, tuple(size)), layout, draws=True)
