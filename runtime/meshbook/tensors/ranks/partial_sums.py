"""Tensors of which each rank holds a part of a sum, made whole together: one collective for many small ones.

The gradients of parameters that are whole on every rank are such sums; a collective for each took a fifth of a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshbook.torch_internals import make_spec

if TYPE_CHECKING:
    from meshbook.torch_internals import DTensorSpec

BUCKET_BYTES = 25 << 20
"""So much is summed at a time: it is copied there and back."""


def end_sums(tensors: Sequence[DTensor]) -> None:
    """Have each rank hold values of the tensors themselves where it holds a part of a sum, say."""
    if sums := [tensor for tensor in tensors if any(each.is_partial() for each in tensor.placements)]:
        lay_all_out([(tensor, _ended(tensor)) for tensor in sums])


class SumHolder(Protocol):
    """Who has a tensor."""

    tensor: DTensor
    sum: SharedSum | None


class SharedSum(NamedTuple):
    """A sum of which ranks hold parts, and of which there are views."""

    whole: DTensor
    """All of the memory."""
    holders: list[weakref.ref[SumHolder]]
    """Who has it, and its views."""


def share_sum(view: SumHolder, base: SumHolder) -> None:
    """Know of a view that shares the memory of its base; where that is no sum nothing needs to be known."""
    if not any(each.is_partial() for each in view.tensor.placements):
        return
    if base.sum is None:
        base.sum = SharedSum(_said_to_lie(base.tensor, base.tensor.placements), [weakref.ref(base)])
    base.sum.holders.append(weakref.ref(view))
    view.sum = base.sum


def is_shared(holder: SumHolder) -> bool:
    """Whether others have a sum as well."""
    return holder.sum is not None and sum(each() is not None for each in holder.sum.holders) > 1


def end_shared_sums(operands: Sequence[SumHolder]) -> bool:
    """As `end_sums`. Where views share memory the values are put there, so that they go on to do so.

    Returns: whether there was one.
    """
    alone: list[DTensor] = []
    found = False
    for operand in operands:
        if not any(each.is_partial() for each in operand.tensor.placements):
            continue
        found = True
        shared, operand.sum = operand.sum, None
        alive = [holder for each in shared.holders if (holder := each()) is not None] if shared else []
        if shared is None or len(alive) == 1:
            alone.append(operand.tensor)
            continue
        memory, laid = shared.whole.to_local(), shared.whole.redistribute(placements=_ended(shared.whole))
        memory.copy_(laid.to_local())
        for holder in alive:
            if holder.tensor.to_local().untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                holder.tensor._spec = _said_to_lie(holder.tensor, _ended(holder.tensor))._spec
                holder.sum = None
    end_sums(alone)
    return found


def _ended(tensor: DTensor) -> list[Placement]:
    return [Replicate() if each.is_partial() else each for each in tensor.placements]


def _said_to_lie(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A tensor of the same parts."""
    told: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(tensor.to_local(), tensor.device_mesh, placements, **told)


def lay_all_out(wanted: Sequence[tuple[DTensor, Sequence[Placement]]]) -> set[int]:
    """Have the ranks hold tensors in other ways, as each is wanted; the same on all ranks.

    Returns: axes along which this rank, and all others, have waited for those that they are in one group with.
    """
    waited: set[int] = set()
    together: dict[tuple[tuple[int, ...], torch.dtype], list[DTensor]] = {}
    for tensor, placements in wanted:
        if axes := _summed_axes(tensor.placements, placements):
            together.setdefault((axes, tensor.dtype), []).append(tensor)
    for (axes, _), tensors in together.items():
        if len(tensors) > 1:
            for bucket in _buckets(list({id(tensor): tensor for tensor in tensors}.values())):
                _sum(bucket, axes)
                if any(_is_somewhere(tensor) for tensor in bucket):
                    waited.update(axes)
    for tensor, placements in wanted:
        lay_out(tensor, placements)
    return waited


def _is_somewhere(tensor: DTensor) -> bool:
    """Whether every rank has something of it: nobody waits in a collective of nothing."""
    return bool(tensor.numel()) and not any(each.is_shard() for each in tensor.placements)


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
    mesh, parts = tensors[0].device_mesh, [_in_memory_order(tensor) for tensor in tensors]
    flat = torch.cat([part.reshape(-1) for part, _ in parts])
    for axis in axes:
        dist.all_reduce(flat, group=mesh.get_group(axis))
    pieces = torch.split(flat, [part.numel() for part, _ in parts])
    for tensor, (part, back), summed in zip(tensors, parts, pieces, strict=True):
        local = torch.empty_like(tensor._local_tensor).copy_(summed.view(part.shape).permute(back))
        tensor._local_tensor, tensor._spec = local, _summed(tensor._spec, tuple(axes))


@functools.lru_cache(maxsize=10_000)
def _summed(spec: DTensorSpec, axes: tuple[int, ...]) -> DTensorSpec:
    """That of the sum; a `DTensor.from_local` for each took longer than the copies."""
    placements = [Replicate() if axis in axes else each for axis, each in enumerate(spec.placements)]
    return make_spec(spec, placements)


def _in_memory_order(tensor: DTensor) -> tuple[torch.Tensor, list[int]]:
    """This rank's part with its dims as those of the whole are in memory, alike on all ranks; and how to turn it back.

    Gradients of weights are transposed, and copied in a third of the time in this order.
    """
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor._local_tensor.permute(dims), sorted(range(len(dims)), key=dims.__getitem__)
