"""How a tensor lies on a mesh: a sharding spec, an entry per dim of the tensor, as placements, one per axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook.errors import UnknownAxisError, UsageError

ShardingSpec: TypeAlias = Sequence[str | tuple[str, ...] | None]
"""For each dim of a tensor the axis, or axes, of the mesh that it is cut along; None for a dim that is whole."""


class _HasAxes(Protocol):
    @property
    def axes(self) -> Mapping[str, int]:
        """Names and sizes, in order."""


def to_placements(
    mesh: _HasAxes, shape: Sequence[int], spec: ShardingSpec | None, placements: Sequence[Placement] | None
) -> tuple[Placement, ...]:
    """One placement for each axis of the mesh; replicated on all by default.

    Raises: UnknownAxisError; UsageError if both are given, or what is given does not fit.
    """
    axes = list(mesh.axes)
    if placements is not None:
        if spec is not None:
            raise UsageError("a tensor is laid out by a sharding_spec or by placements, not by both")
        return _checked(placements, axes, shape)
    found: list[Placement] = [Replicate()] * len(axes)
    if spec is not None and len(spec) > len(shape):
        raise UsageError(f"the sharding_spec {list(spec)} has {len(spec)} entries, and the tensor {len(shape)} dims")
    taken: dict[str, int] = {}
    for dim, entry in enumerate(spec or ()):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis not in mesh.axes:
                raise UnknownAxisError(axis, mesh.axes)
            if axis in taken:
                raise UsageError(f'the axis "{axis}" cannot cut two dims of a tensor, {taken[axis]} and {dim}')
            taken[axis] = dim
            found[axes.index(axis)] = Shard(dim)
    return tuple(found)


def _checked(placements: Sequence[Placement], axes: Sequence[str], shape: Sequence[int]) -> tuple[Placement, ...]:
    if len(placements) != len(axes):
        raise UsageError(f"{len(placements)} placements for a mesh of {len(axes)} axes ({', '.join(axes)})")
    for each in placements:
        if not isinstance(each, Placement):
            raise UsageError(f"{each!r} is no placement: Shard(dim) or Replicate(), of torch.distributed.tensor")
        if isinstance(each, Shard) and not -len(shape) <= each.dim < len(shape):
            raise UsageError(f"{each} of a tensor with {len(shape)} dims")
    return tuple(Shard(each.dim % len(shape)) if isinstance(each, Shard) else each for each in placements)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
