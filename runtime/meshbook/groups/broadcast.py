"""A variable from one rank to all others over the process group: the data plane, not the controller.

    1. header     broadcast_object_list: the kind of content, or why none comes
    2. content    one broadcast per piece: the tensor itself, or a pickle and its out-of-band buffers
    3. verdict    for pickles by reference: could all ranks build it? If not, it comes again, by value

Ranks have run the same cells, so a class of the notebook exists on each of them, and an instance has to arrive as an
instance of that very class: it is pickled by reference. By value, as a second try, it reaches ranks without the class.
A source that cannot send says so in the header, so that all ranks raise and none waits.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from meshbook.errors import LoadError, MeshError, SerializationError, UsageError
from meshbook.formatting import did_you_mean
from meshbook.values.pickling import dumps, loads
from meshbook.values.tensors import NO_LIMIT, OutOfBand

if TYPE_CHECKING:
    from meshbook.groups.rank_groups import RankGroups

Namespace: TypeAlias = MutableMapping[str, object]


class _TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    is_parameter: bool


class _PickleHeader(NamedTuple):
    sizes: tuple[int, ...]
    """Bytes of the pickle's head and of each of its buffers."""
    by_reference: bool


class _Refusal(NamedTuple):
    error: MeshError


_Header: TypeAlias = _TensorHeader | _PickleHeader | _Refusal


class _Parcel(NamedTuple):
    """The header and pieces that the source sends, and the value that stays with it."""

    header: _Header
    pieces: list[torch.Tensor]
    value: object = None


def broadcast_value(name: str, namespace: Namespace, src: int, groups: RankGroups) -> None:
    """Bind ``name`` on every rank to its value on rank ``src``; to be called on all ranks.

    A dense tensor keeps its dtype and kind of device, and arrives as a new leaf; other values are pickled, large arrays
    and tensors inside them without a copy. On ``src`` nothing changes.
    Raises: UsageError on all ranks if ``src`` has no such name or there is no group; SerializationError on all ranks;
        LoadError where a value cannot be built.
    """
    groups.require()
    if not 0 <= src < dist.get_world_size():
        raise UsageError(f"there is no rank {src} to broadcast from; ranks run from 0 to {dist.get_world_size() - 1}.")
    is_source = dist.get_rank() == src
    header, value, error = _exchange(_pack(name, namespace, src) if is_source else None, src)
    if isinstance(header, _PickleHeader) and header.by_reference and not _all_have(error is None):
        _, value, error = _exchange(_pack_by_value(name, value) if is_source else None, src)
    if error is not None:
        raise error
    namespace[name] = value


def _exchange(parcel: _Parcel | None, src: int) -> tuple[_Header, object, LoadError | None]:
    """Send ``parcel``, or receive it where it is None; the value, or why it could not be built here."""
    box: list[_Header | None] = [parcel.header if parcel else None]
    dist.broadcast_object_list(box, src=src)
    header = box[0]
    assert header is not None
    if isinstance(header, _Refusal):
        raise header.error
    if parcel is not None:
        for piece in parcel.pieces:
            _broadcast_bytes(piece, src)
        return header, parcel.value, None
    if isinstance(header, _TensorHeader):
        return header, _receive_tensor(header, src), None
    pieces = [_broadcast_bytes(torch.empty(size, dtype=torch.uint8, device="cpu"), src) for size in header.sizes]
    head, *buffers = (memoryview(piece.numpy()) for piece in pieces)  # type: ignore[arg-type]
    try:
        return header, loads(head, buffers, where=f"rank {dist.get_rank()}"), None
    except LoadError as error:
        return header, None, error


def _broadcast_bytes(piece: torch.Tensor, src: int) -> torch.Tensor:
    if piece.numel():
        dist.broadcast(piece, src=src)
    return piece


def _all_have(it: bool) -> bool:
    verdict = torch.tensor([it], dtype=torch.uint8, device="cpu")
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


# ---- packing ---------------------------------------------------------------------------------------------------------


def _pack(name: str, namespace: Namespace, src: int) -> _Parcel:
    if name not in namespace:
        near = did_you_mean(name, (known for known in namespace if not known.startswith("_")))
        return _Parcel(_Refusal(UsageError(f'there is no "{name}" on rank {src}.{near}')), [])
    value = namespace[name]
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and _is_dense(value):
        return _pack_tensor(value)
    out_of_band, head = OutOfBand(NO_LIMIT), io.BytesIO()
    try:
        _ByReference(head, out_of_band).dump(value)
    except Exception:  # lambdas, locks: the other pickler can do more, and explains what nobody can do
        return _pack_by_value(name, value)
    return _pack_pickle(head.getbuffer(), out_of_band.buffers, value, by_reference=True)


def _pack_by_value(name: str, value: object) -> _Parcel:
    try:
        pickled = dumps(value, what=name)
    except MeshError as error:
        return _Parcel(_Refusal(error), [])
    except Exception as error:  # no memory, for one: the others wait for a header, whatever happens here
        return _Parcel(_Refusal(SerializationError(name, type(value).__name__, repr(error))), [])
    return _pack_pickle(memoryview(pickled.head), pickled.buffers, value, by_reference=False)


def _pack_pickle(head: memoryview, buffers: Sequence[memoryview], value: object, *, by_reference: bool) -> _Parcel:
    pieces = [_as_tensor(buffer) for buffer in (head, *buffers)]
    return _Parcel(_PickleHeader(tuple(piece.numel() for piece in pieces), by_reference), pieces, value)


class _ByReference(pickle.Pickler):
    def __init__(self, sink: io.BytesIO, out_of_band: OutOfBand) -> None:
        super().__init__(sink, 5, buffer_callback=out_of_band.take)
        self._out_of_band = out_of_band

    def reducer_override(self, obj: object) -> Any:
        return self._out_of_band.reduce(obj)


def _as_tensor(buffer: memoryview) -> torch.Tensor:
    flat = buffer.cast("B")
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(flat) if flat.readonly else flat, dtype=torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _pack_tensor(tensor: torch.Tensor) -> _Parcel:
    header = _TensorHeader(
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device.type,
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _Parcel(header, [plain.view(-1).view(torch.uint8)], tensor)  # bytes: gloo does not know every dtype


def _receive_tensor(header: _TensorHeader, src: int) -> torch.Tensor:
    flat = torch.empty(header.shape, dtype=header.dtype, device=header.device_type)
    _broadcast_bytes(flat.view(-1).view(torch.uint8), src)
    if header.is_parameter:
        return torch.nn.Parameter(flat, requires_grad=header.requires_grad)
    return flat.requires_grad_(header.requires_grad)
