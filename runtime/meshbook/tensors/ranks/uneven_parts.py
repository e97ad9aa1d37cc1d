"""Parts of different sizes, and empty ones: where a tensor has some, and where an operation would make them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

aten = torch.ops.aten


def is_unequal(tensor: DTensor) -> bool:
    """Whether parts of different sizes make it, or none: DTensor 2.13 divides no elements without end."""
    if not tensor.numel():
        return True
    sizes = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] *= tensor.device_mesh.size(axis)
    return any(size % parts for size, parts in zip(tensor.shape, sizes, strict=True))


def has_empty_part(tensor: DTensor) -> bool:
    """Whether a rank has nothing of it, since it is cut into more parts than it has rows, say."""
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
    """The sizes of what `torch.chunk` makes, and of those parts for which nothing is left."""
    step = max(1, -(-size // parts))
    return {max(0, min(step, size - at * step)) for at in range(parts)}


def is_mean_of_unequal(made: DTensor, tensors: Sequence[DTensor]) -> bool:
    """Whether a mean is to be the mean of those of parts of different sizes: DTensor 2.13 does that for losses."""
    return any(getattr(each, "reduce_op", "") == "avg" for each in made.placements) and any(map(is_unequal, tensors))


def splits_unequally(tensor: DTensor, shape: Sequence[int]) -> bool:
    """Whether a view has in the place of a dim that is cut a smaller one, which makes no equal parts."""
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
    """Whether what is sharded are the images, and what comes of them, along their first dim, into equal parts."""
    images = (0, 1) if operator is aten.convolution_backward.default else (0,)
    for index, value in enumerate(args):
        if isinstance(value, DTensor) and index in images and not value.shape[0] % value.device_mesh.size():
            if not all(each.is_replicate() or each.is_shard(0) for each in value.placements):
                return False
        elif isinstance(value, DTensor) and not all(each.is_replicate() for each in value.placements):
            return False
    return True
