"""The layouts of tensors on a mesh: sharding specs and placements, the part of each rank, parts of different sizes.

A sharding spec has an entry for each dim of the tensor, placements have one for each axis of the mesh. Where a tensor
is laid out anew, ranks send each other pieces of their parts:

parts of the source   |   0   |   1   |     each part of the target is cut where the source's parts end, and each
parts of the target   | 2 | 3   | 1 | 0 |   piece comes from one of its holders, from the rank itself if it is one
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshbook.errors import UnknownAxisError, UsageError
from meshbook.system.memory_files import expect_huge_pages
from meshbook.tensors.messages.operations import Box

ShardingSpec: TypeAlias = Sequence[str | tuple[str, ...] | None]
"""The axis, or axes, of the mesh that cut each dim of a tensor; None for a dim that is whole."""


class _HasAxes(Protocol):
    @property
    def axes(self) -> Mapping[str, int]:
        """Return the names and sizes of the axes, in order."""


def to_placements(
    mesh: _HasAxes, shape: Sequence[int], spec: ShardingSpec | None, placements: Sequence[Placement] | None
) -> tuple[Placement, ...]:
    """Return a placement for each axis of the mesh; replicated on all by default.

    Raises: UnknownAxisError; UsageError if both are given, or the layout does not fit.
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


def are_in_blocks(placements: Sequence[Placement]) -> bool:
    """Whether each rank holds a block of the values: no sums, and no parts that are interleaved."""
    return all(type(each) in (Shard, Replicate) for each in placements)


def strides_as(local_strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a whole tensor whose dims are in the order in which a part has them in memory."""
    strides, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local_strides[dim], -dim)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def from_part(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    strides: Sequence[int],
) -> DTensor:
    """Return a tensor of this shape and these strides by this rank's part; the ranks compare nothing."""
    return DTensor.from_local(
        local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


class MeshEnd(NamedTuple):
    """A mesh that a tensor comes from, or goes to."""

    name: str
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def boxes(self, shape: Sequence[int], placements: Sequence[Placement]) -> dict[int, Box]:
        """Return the part of each rank: each axis cuts the part that the axes before it left, as `torch.chunk` does."""
        found = {}
        for position, rank in enumerate(self.ranks):
            box, inner = [(0, size) for size in shape], len(self.ranks)
            for placement, size in zip(placements, self.sizes, strict=True):
                inner //= size
                at = position // inner % size
                if isinstance(placement, Shard):
                    begin, end = box[placement.dim]
                    step = -(-(end - begin) // size)
                    box[placement.dim] = min(begin + at * step, end), min(begin + (at + 1) * step, end)
            found[rank] = tuple(box)
        return found


class TensorPiece(NamedTuple):
    """A piece of a tensor that one rank sends another, or itself."""

    source: int
    target: int
    box: Box


def pieces(given: Mapping[int, Box], wanted: Mapping[int, Box]) -> Iterator[TensorPiece]:
    """Yield the pieces that make the wanted parts, one for each pair of ranks."""
    holders: dict[Box, list[int]] = {}
    for rank, box in given.items():
        holders.setdefault(box, []).append(rank)
    for index, (target, part) in enumerate(wanted.items()):
        for box, ranks in holders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True))
            if all(begin < end for begin, end in common):
                yield TensorPiece(target if target in ranks else ranks[index % len(ranks)], target, common)


def within(local: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """Return the elements in a box of a tensor, out of a part of it."""
    return local[tuple(slice(a - origin, b - origin) for (origin, _), (a, b) in zip(part, box, strict=True))]


def own_copy(part: torch.Tensor) -> torch.Tensor:
    """Return a copy of a part in memory of its own, in C order."""
    return new_memory(part.shape, part.dtype, part.device).copy_(part)


def new_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a part that is filled at once."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if made.device.type == "cpu":
        expect_huge_pages(made.data_ptr(), made.nbytes)
    return made


aten = torch.ops.aten


def is_unequal(tensor: DTensor) -> bool:
    """Whether parts of different sizes make a tensor, or none: DTensor 2.13 divides no elements endlessly."""
    if not tensor.numel():
        return True
    sizes = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] *= tensor.device_mesh.size(axis)
    return any(size % parts for size, parts in zip(tensor.shape, sizes, strict=True))


def has_empty_part(tensor: DTensor) -> bool:
    """Whether a rank has nothing of a tensor, since it is cut into more parts than it has rows, say."""
    if not tensor.numel():
        return True
    if all(type(placement) is not Shard for placement in tensor.placements):
        return False
    return _has_empty_part(tensor.shape, tensor.placements, tensor.device_mesh.shape)


@functools.lru_cache(maxsize=10_000)
def _has_empty_part(shape: Sequence[int], placements: Sequence[Placement], axes: Sequence[int]) -> bool:
    sizes = [{size} for size in shape]
    for placement, parts in zip(placements, axes, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = {part for size in sizes[placement.dim] for part in _chunks(size, parts)}
    return any(0 in each for each in sizes)


def _chunks(size: int, parts: int) -> set[int]:
    """Return the sizes of the chunks of `torch.chunk`, with 0 for parts for which nothing is left."""
    step = max(1, -(-size // parts))
    return {max(0, min(step, size - at * step)) for at in range(parts)}


def is_mean_of_unequal(made: DTensor, tensors: Sequence[DTensor]) -> bool:
    """Whether a mean would be that of the means of unequal parts: DTensor 2.13 does so for losses."""
    return any(getattr(each, "reduce_op", "") == "avg" for each in made.placements) and any(map(is_unequal, tensors))


def splits_unequally(tensor: DTensor, shape: Sequence[int]) -> bool:
    """Whether a view splits a dim that is cut so that the first of the new dims makes no equal parts."""
    known = math.prod(size for size in shape if size != -1)
    shape = [tensor.numel() // max(known, 1) if size == -1 else size for size in shape]
    for dim in {placement.dim for placement in tensor.placements if isinstance(placement, Shard)}:
        axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(dim)]
        parts = math.prod(map(tensor.device_mesh.size, axes))
        before = math.prod(tensor.shape[:dim])
        place = next((at for at, size in enumerate(shape) if size != 1 and math.prod(shape[:at]) == before), None)
        if place is not None and shape[place] % parts:
            return True
    return False


def is_cut_along_batch(operator: object, args: Sequence[Any]) -> bool:
    """Whether only images and their results are sharded, along their first dim, into equal parts."""
    images = (0, 1) if operator is aten.convolution_backward.default else (0,)
    for index, value in enumerate(args):
        if isinstance(value, DTensor) and index in images and not value.shape[0] % value.device_mesh.size():
            if not all(each.is_replicate() or each.is_shard(0) for each in value.placements):
                return False
        elif isinstance(value, DTensor) and not all(each.is_replicate() for each in value.placements):
            return False
    return True
