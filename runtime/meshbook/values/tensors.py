"""The content that a pickle leaves beside its stream, uncopied: large arrays and buffers, and tensors of any size.

Pickle knows how to do this for NumPy; torch's own reduction would copy a tensor into the stream. Ours
describes it by its bytes, which may be shared by several tensors of a message, and how it looks at them.
torch is not imported here: while nobody has imported it, there are no tensors.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from meshbook.values.unpicklable import Refusal

if TYPE_CHECKING:
    import torch

MIN_BYTES = 1 << 16
"""Buffers below this stay in the stream: a segment of shared memory costs more than copying them."""

NO_LIMIT = sys.maxsize


class TooLargeError(Exception):
    """The pickle passed its limit."""


class OutOfBand(msgspec.Struct, eq=False):
    """The content that one message leaves out of its stream: buffers, tensors, and the room that is left for them."""

    room: int
    buffers: list[memoryview] = []
    _spans: dict[int, list[_Span]] | None = None
    """The spans by the address of their storage. None until the first `reduce`, which small messages rarely call."""
    _tensor_type: type[torch.Tensor] | tuple[()] = ()
    _array_type: object = None
    _storage_types: tuple[object, ...] = ()

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's buffer_callback: true keeps ``buffer`` in the stream."""
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: the pickler says so itself
            return True
        if raw.nbytes < MIN_BYTES:
            return True
        self.spend(raw.nbytes)
        self.buffers.append(raw)
        return False

    def spend(self, size_bytes: int) -> None:
        """Raises: TooLargeError if the message has no room for ``size_bytes`` more."""
        self.room -= size_bytes
        if self.room < 0:
            raise TooLargeError

    def need(self, size_bytes: int) -> None:
        """Check that there is room (`spend`) for a copy that is about to be made."""
        if size_bytes > self.room:
            raise TooLargeError

    def reduce(self, obj: Any) -> object:
        """The picklers' reducer_override; they call it for all but plain containers, strings and numbers."""
        if self._spans is None:
            loaded = sys.modules.get("torch")
            self._tensor_type = getattr(loaded, "Tensor", ())
            self._array_type = getattr(sys.modules.get("numpy"), "ndarray", None)
            self._storage_types = (getattr(loaded, "UntypedStorage", None), getattr(loaded, "TypedStorage", None))
            self._spans = {}
        if isinstance(obj, self._tensor_type):
            return self._reduce_tensor(obj)
        if type(obj) is self._array_type:
            self.need(obj.nbytes)
            if obj.nbytes >= MIN_BYTES and not obj.flags.forc and not obj.dtype.hasobject:
                return obj.copy(order="C").__reduce_ex__(5)
        elif self.room != NO_LIMIT and type(obj) in self._storage_types:
            self.need(obj.nbytes())
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> object:
        torch = sys.modules["torch"]
        if type(tensor) is not torch.Tensor:
            return self._reduce_subclass(tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return NotImplemented
        self.need(tensor.numel() * tensor.element_size())
        values = tensor.detach()
        if values.device.type != "cpu":
            values = values.cpu()
        if values.is_conj() or values.is_neg():
            values = values.resolve_conj().resolve_neg()
        span, offset, strides = self._span_of(values)
        rebuild = (span, values.dtype, offset, tuple(values.shape), strides, tensor.requires_grad)
        if not tensor.__dict__:
            return _build_tensor, rebuild
        return _build_tensor, rebuild, tensor.__dict__, None, None, _set_attributes

    def _reduce_subclass(self, tensor: torch.Tensor) -> object:
        if (reduce := getattr(tensor, "_reduce_to_ranks", None)) is not None:
            return reduce()
        names = [kind.__name__ for kind in type(tensor).__mro__]  # by name: importing the classes takes seconds
        if "DTensor" in names:
            raise Refusal(
                tensor,
                "it lives on all ranks of its mesh",
                "Send x.to_local(), this rank's part, or x.full_tensor(), the whole (called on every rank).",
            )
        if "AsyncCollectiveTensor" in names:
            return _identity, (tensor.wait(),)  # type: ignore[attr-defined]
        return NotImplemented

    def _span_of(self, values: torch.Tensor) -> tuple[_Span | None, int, tuple[int, ...]]:
        """Return the memory that ``values`` needs, its offset there in elements, and its strides."""
        item = values.element_size()
        if values.numel() == 0:
            return None, 0, values.stride()
        reach = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
        if reach > 2 * values.numel():  # mostly holes
            values = values.contiguous()
            reach = values.numel()
        start = int(values.storage_offset()) * item
        stop = start + reach * item
        storage = values.untyped_storage()
        assert self._spans is not None
        spans = self._spans.setdefault(storage.data_ptr(), [])
        for span in spans:
            if span.start <= start and stop <= span.stop and (start - span.start) % item == 0:
                break
        else:
            span = _Span(storage, start, stop)
            spans.append(span)
        return span, (start - span.start) // item, values.stride()


# ---- what the stream refers to -----------------------------------------------------------------------------


class _Span:
    """The bytes ``start`` to ``stop`` of a storage, pickled once a message for all that look at them."""

    __slots__ = ("start", "stop", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, stop: int) -> None:
        self.storage, self.start, self.stop = storage, start, stop

    def __reduce__(self) -> tuple[object, ...]:
        torch = sys.modules["torch"]
        raw = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the user's default device is
        raw.set_(self.storage, self.start, (self.stop - self.start,), (1,))
        return _build_storage, (pickle.PickleBuffer(raw.numpy()),)


def _build_storage(buffer: pickle.PickleBuffer) -> torch.UntypedStorage:
    import torch

    view = memoryview(buffer)
    if view.readonly:
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).untyped_storage()
    raw = torch.frombuffer(view, dtype=torch.uint8)
    if view.nbytes < MIN_BYTES:
        raw = raw.clone()  # an ordinary tensor, that can be resized
    return raw.untyped_storage()


def _build_tensor(
    storage: torch.UntypedStorage | None,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    if storage is None:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(storage, offset, shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: Mapping[str, object]) -> None:
    tensor.__dict__.update(attributes)


def _identity(value: object) -> object:
    return value
