"""Tensors of which each rank holds a part of a sum, made whole together: one collective for many small ones.

The gradients of parameters that are whole on every rank are such sums; a collective for each took a fifth of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

BUCKET_BYTES = 25 << 20
"""So much is summed at a time: it is copied there and back."""


def end_sums(tensors: Sequence[DTensor]) -> None:
    """Have each rank hold values of the tensors themselves where it holds a part of a sum, say."""
    if sums := [tensor for tensor in tensors if any(each.is_partial() for each in tensor.placements)]:
        lay_all_out([(t, [Replicate() if each.is_partial() else each for each in t.placements]) for t in sums])


def lay_all_out(wanted: Sequence[tuple[DTensor, Sequence[Placement]]]) -> None:
    """Have the ranks hold tensors in other ways, as each is wanted; the same on all ranks."""
    together: dict[tuple[tuple[int, ...], torch.dtype], list[DTensor]] = {}
    for tensor, placements in wanted:
        if axes := _summed_axes(tensor.placements, placements):
            together.setdefault((axes, tensor.dtype), []).append(tensor)
    for (axes, _), tensors in together.items():
        if len(tensors) > 1:
            for bucket in _buckets(list({id(tensor): tensor for tensor in tensors}.values())):
                _sum(bucket, axes)
    for tensor, placements in wanted:
        lay_out(tensor, placements)


def lay_out(tensor: Any, placements: Sequence[Placement]) -> None:
    """Have the ranks hold a tensor in another way."""
    if tuple(placements) != tensor.placements:
        _replace(tensor, tensor.redistribute(placements=placements))


def _replace(tensor: Any, by: Any) -> None:
    tensor._local_tensor, tensor._spec = by._local_tensor, by._spec


def _summed_axes(held: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...]:
    """The axes along which ranks hold parts of a sum that is wanted whole, if nothing else differs."""
    axes = []
    for axis, (now, then) in enumerate(zip(held, wanted, strict=True)):
        if type(now) is Partial and now.reduce_op == "sum" and then.is_replicate():
            axes.append(axis)
        elif now != then:
            return ()
    return tuple(axes)


def _buckets(tensors: Sequence[DTensor]) -> Iterator[list[DTensor]]:
    bucket: list[DTensor] = []
    size_bytes = 0
    for tensor in tensors:
        its_bytes = tensor.to_local().nbytes
        if bucket and size_bytes + its_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(tensor)
        size_bytes += its_bytes
    yield bucket


def _sum(tensors: Sequence[DTensor], axes: Sequence[int]) -> None:
    """Not in the tensors' own memory: an alias of one still has its part of the sum."""
    mesh, parts = tensors[0].device_mesh, [tensor.to_local() for tensor in tensors]
    flat = torch.cat([part.reshape(-1) for part in parts])
    for axis in axes:
        dist.all_reduce(flat, group=mesh.get_group(axis))
    pieces = torch.split(flat, [part.numel() for part in parts])
    for tensor, part, summed in zip(tensors, parts, pieces, strict=True):
        local = torch.empty_like(part).copy_(summed.view(part.shape))
        placements = [Replicate() if axis in axes else each for axis, each in enumerate(tensor.placements)]
        told: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        _replace(tensor, DTensor.from_local(local, mesh, placements, **told))
