"""Parts of a tensor and the whole of it, each made of the other; and sums of which each rank holds a part.

The gradients of parameters that are whole on every rank are such sums: many small ones are made whole by one
collective, since a collective for each took a fifth of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshbook.tensors.messages.layouts import from_part
from meshbook.torch_internals import make_spec

if TYPE_CHECKING:
    from meshbook.torch_internals import DTensorSpec


def block_placements(tensor: DTensor) -> list[Placement]:
    """Return the placements of a tensor in blocks that is nearest to this one."""
    return [each if type(each) is Shard else Replicate() for each in tensor.placements]


_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def full(tensor: Any) -> torch.Tensor:
    """Return the whole tensor; a collective."""
    if tensor.dtype in _UNKNOWN_TO_GLOO:
        tensor, dtype = tensor.to(torch.int64), tensor.dtype
        return cast("torch.Tensor", tensor.full_tensor().to(dtype))
    return cast("torch.Tensor", tensor.full_tensor())


def shares_memory(view: DTensor, base: DTensor) -> bool:
    """Whether both lie in the same memory. A rank whose part is empty has none, and cannot write to it."""
    mine, its = view.to_local(), base.to_local()
    return not mine.numel() or mine.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()


def whole_of(value: Any, *, own: bool = False) -> Any:
    """Return the whole tensors of a structure; a collective. own: in memory of its own, in order."""
    if isinstance(value, DTensor):
        return full(value).clone(memory_format=torch.contiguous_format) if own else full(value)
    if isinstance(value, (list, tuple)):
        return [whole_of(each, own=own) for each in value]
    return value


def parts_like(arguments: Any, like: Sequence[DTensor]) -> Any:
    """Return the arguments of an optimizer's fused step as this rank's parts, laid out as the parameters, ``like``."""
    if isinstance(arguments, dict):
        return {name: parts_like([value], like)[0] for name, value in arguments.items()}
    found: list[Any] = []
    device = like[0].to_local().device
    for argument in arguments:
        if isinstance(argument, list) and len(argument) == len(like) and isinstance(argument[0], DTensor):
            laid = [
                each if each.placements == to.placements else each.redistribute(placements=to.placements)
                for each, to in zip(argument, like, strict=True)
            ]
            found.append([each.to_local() for each in laid])
        else:
            found.append(_moved(whole_of(argument), device) if device.type != "cpu" else whole_of(argument))
    return found


def _moved(value: Any, device: torch.device) -> Any:
    """Return the tensors on the device of the parameters: the controller counts their steps on the CPU."""
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


BUCKET_BYTES = 25 << 20
"""The bytes that are summed at a time: they are copied there and back."""


def end_sums(tensors: Sequence[DTensor]) -> None:
    """Reduce the parts of sums, so that each rank holds values of the tensors themselves."""
    if sums := [tensor for tensor in tensors if any(each.is_partial() for each in tensor.placements)]:
        lay_all_out([(tensor, ended(tensor)) for tensor in sums])


def ended(tensor: DTensor) -> list[Placement]:
    return [Replicate() if each.is_partial() else each for each in tensor.placements]


def said_to_lie(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return a tensor with the same parts and other placements."""
    return from_part(tensor.to_local(), tensor.device_mesh, placements, tensor.shape, tensor.stride())


def lay_all_out(wanted: Sequence[tuple[DTensor, Sequence[Placement]]]) -> set[int]:
    """Lay tensors out in other ways, each as it is wanted; the same on all ranks.

    Returns: the axes along which this rank, and all others, have waited for the ranks of their group.
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
        if tuple(placements) != tensor.placements:
            laid = tensor.redistribute(placements=placements)
            tensor._local_tensor, tensor._spec = laid._local_tensor, laid._spec
    return waited


def _is_somewhere(tensor: DTensor) -> bool:
    """Whether every rank has an element of it: in a collective of nothing no rank waits."""
    return bool(tensor.numel()) and not any(each.is_shard() for each in tensor.placements)


def _summed_axes(held: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...]:
    """Return the axes along which ranks hold parts of a sum that is wanted whole, if nothing else differs."""
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
    """Sum tensors in one collective, in new memory: an alias of a tensor still has its part of the sum."""
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
    """Return the spec of the sum; a `DTensor.from_local` for each took longer than the copies."""
    placements = [Replicate() if axis in axes else each for axis, each in enumerate(spec.placements)]
    return make_spec(spec, placements)


def _in_memory_order(tensor: DTensor) -> tuple[torch.Tensor, list[int]]:
    """Return this rank's part with its dims as the whole has them in memory, and the permutation that turns it back.

    The order is the same on all ranks. Gradients of weights are transposed, and copied in a third of the time so.
    """
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor._local_tensor.permute(dims), sorted(range(len(dims)), key=dims.__getitem__)
