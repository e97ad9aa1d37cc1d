"""The bytes behind tensors and buffers: where they lie, and whether they may be written."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from meshbook.actor.errors import BufferKindError

if TYPE_CHECKING:
    import torch


ByteArray: TypeAlias = "npt.NDArray[np.uint8]"
"""The bytes of a buffer, or of a piece of one."""


class Memory(NamedTuple):
    """A run of bytes of this process, for as long as ``keep`` is kept."""

    address: int
    size_bytes: int
    writable: bool
    keep: object

    def view(self, offset: int = 0, size_bytes: int | None = None) -> ByteArray:
        """An array of bytes over it, which does not keep it."""
        size_bytes = self.size_bytes - offset if size_bytes is None else size_bytes
        run = (ctypes.c_ubyte * size_bytes).from_address(self.address + offset)
        array = np.frombuffer(memoryview(run), np.uint8)
        array.flags.writeable = self.writable
        return array


def memory_of(value: object, what: str) -> Memory:
    """The bytes of a tensor, an array, a memoryview or a bytearray: one dim, without gaps, in this process's memory.

    what: how an error names the value. Raises: BufferKindError.
    """
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        return _memory_of_tensor(value, what)
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        raise BufferKindError(
            f"{what} is of type {type(value).__name__}; give a tensor, an array, a memoryview or a bytearray."
        ) from error
    if view.ndim != 1 or not view.c_contiguous:
        raise BufferKindError(_shape_error(what, "memory", view.shape, "array.reshape(-1) has one dim, a copy no gaps"))
    if view.nbytes == 0:
        return Memory(0, 0, not view.readonly, view)
    array = np.frombuffer(view, np.uint8)
    return Memory(array.ctypes.data, view.nbytes, not view.readonly, view)


def _memory_of_tensor(tensor: torch.Tensor, what: str) -> Memory:
    if tensor.device.type != "cpu":
        raise BufferKindError(
            f"{what} lies on {tensor.device}, where other processes cannot reach it: give a copy in host memory "
            "(tensor.cpu()), and copy_() it back where it was read into."
        )
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise BufferKindError(f"{what} is no plain dense tensor ({tensor.layout}); give a dense copy of it.")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        hint = "tensor.view(-1) has one dim, tensor.contiguous() no gaps"
        raise BufferKindError(_shape_error(what, "tensor", tensor.shape, hint))
    size_bytes = tensor.numel() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # some kinds refuse, others say 0
        address = 0
    if size_bytes and not address:
        raise BufferKindError(f"{what} is a {type(tensor).__name__} without memory of its own.")
    return Memory(address, size_bytes, True, tensor.detach())


def _shape_error(what: str, kind: str, shape: Iterable[int] | None, hint: str) -> str:
    return f"{what} is {kind} of shape {tuple(shape or ())}; give one dim without gaps: {hint}."
