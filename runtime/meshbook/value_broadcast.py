"""A variable from one rank to all others over the process group: the data plane, not the controller.

    1. header     broadcast_object_list: what comes, or why nothing comes
    2. content    one broadcast per piece: the tensor itself, or pickle head and out-of-band buffers

A source that cannot send says so in the header, so that all ranks raise and none waits.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from meshbook.errors import MeshError, UsageError
from meshbook.pickling import dumps, loads
from meshbook.wording import did_you_mean

if TYPE_CHECKING:
    from meshbook.process_group import RankGroups


class _TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    is_parameter: bool


class _PickleHeader(NamedTuple):
    sizes: tuple[int, ...]
    """Bytes of the pickle's head and of each of its buffers."""


class _Refusal(NamedTuple):
    error: MeshError


def broadcast_value(name: str, namespace: MutableMapping[str, object], src: int, groups: RankGroups) -> None:
    """Bind ``name`` on every rank to its value on rank ``src``; to be called on all ranks.

    A dense tensor keeps its dtype and kind of device, and arrives as a new leaf; other values are pickled, large arrays
    and tensors inside them without a copy. On ``src`` nothing changes.
    Raises on all ranks: UsageError if ``src`` has no such name or there is no group; SerializationError.
    """
    groups.require()
    if not 0 <= src < dist.get_world_size():
        raise UsageError(f"there is no rank {src} to broadcast from; ranks run from 0 to {dist.get_world_size() - 1}.")
    if dist.get_rank() == src:
        header, pieces = _pack(name, namespace, src)
        dist.broadcast_object_list([header], src=src)
        for piece in pieces:
            if piece.numel():
                dist.broadcast(piece, src=src)
        if isinstance(header, _Refusal):
            raise header.error
        return
    received: list[_TensorHeader | _PickleHeader | _Refusal | None] = [None]
    dist.broadcast_object_list(received, src=src)
    match received[0]:
        case _Refusal(error):
            raise error
        case _TensorHeader() as header:
            namespace[name] = _receive_tensor(header, src)
        case _PickleHeader(sizes):
            pieces = [_receive_bytes(size, src) for size in sizes]
            head, *buffers = (memoryview(piece.numpy()) for piece in pieces)  # type: ignore[arg-type]
            namespace[name] = loads(head, buffers)


def _pack(
    name: str, namespace: MutableMapping[str, object], src: int
) -> tuple[_TensorHeader | _PickleHeader | _Refusal, list[torch.Tensor]]:
    if name not in namespace:
        near = did_you_mean(name, (known for known in namespace if not known.startswith("_")))
        return _Refusal(UsageError(f'there is no "{name}" on rank {src}.{near}')), []
    value = namespace[name]
    if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_dense(value):  # type: ignore[arg-type]
        return _pack_tensor(value)  # type: ignore[arg-type]
    try:
        head, buffers = dumps(value, what=name)
    except MeshError as error:
        return _Refusal(error), []
    pieces = [_as_tensor(memoryview(head)), *map(_as_tensor, buffers)]
    return _PickleHeader(tuple(piece.numel() for piece in pieces)), pieces


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _pack_tensor(tensor: torch.Tensor) -> tuple[_TensorHeader, list[torch.Tensor]]:
    header = _TensorHeader(
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device.type,
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return header, [plain.view(-1).view(torch.uint8)]  # bytes: gloo does not know every dtype


def _receive_tensor(header: _TensorHeader, src: int) -> torch.Tensor:
    flat = torch.empty(header.shape, dtype=header.dtype, device=header.device_type)
    if flat.numel():
        dist.broadcast(flat.view(-1).view(torch.uint8), src=src)
    if header.is_parameter:
        return torch.nn.Parameter(flat, requires_grad=header.requires_grad)
    return flat.requires_grad_(header.requires_grad)


def _receive_bytes(size: int, src: int) -> torch.Tensor:
    piece = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(piece, src=src)
    return piece


def _as_tensor(buffer: memoryview) -> torch.Tensor:
    flat = buffer.cast("B")
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(flat) if flat.readonly else flat, dtype=torch.uint8)
