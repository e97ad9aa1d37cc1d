"""Parts of a tensor and the whole of it: each made of the other, and how either lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def block_placements(tensor: DTensor) -> list[Placement]:
    """How one can be laid out that lies in blocks, else as this one."""
    return [each if type(each) is Shard else Replicate() for each in tensor.placements]


_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor; a collective."""
    if tensor.dtype in _UNKNOWN_TO_GLOO:
        tensor, dtype = tensor.to(torch.int64), tensor.dtype
        return cast("torch.Tensor", tensor.full_tensor().to(dtype))
    return cast("torch.Tensor", tensor.full_tensor())


def shares_memory(view: DTensor, base: DTensor) -> bool:
    """Whether they lie in the same memory. A rank whose part is empty has none; what it would write is nothing, too."""
    mine, its = view.to_local(), base.to_local()
    return not mine.numel() or mine.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()


def whole_of(value: Any, *, own: bool = False) -> Any:
    """own: in memory of its own, in order."""
    if isinstance(value, DTensor):
        return full(value).clone(memory_format=torch.contiguous_format) if own else full(value)
    if isinstance(value, (list, tuple)):
        return [whole_of(each, own=own) for each in value]
    return value


def parts_like(arguments: Any, like: Sequence[DTensor]) -> Any:
    """The arguments of an optimizer's fused step as this rank's parts, laid out as the parameters, ``like``."""
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
    """What the controller counts, the step of each parameter, is wanted where the parameters are."""
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def strides_as(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a whole tensor whose parts lie in memory as one of them does."""
    strides, stride = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: local.stride(dim)):
        strides[dim], stride = stride, stride * max(shape[dim], 1)
    return tuple(strides)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
