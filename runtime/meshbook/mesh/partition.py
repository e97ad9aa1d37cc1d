"""Cutting values into pieces and joining them again: tensors and arrays along a dim, sequences by items."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from meshbook.errors import LayoutError
from meshbook.system.memory_files import join_mapped


def split(value: object, count: int, dim: int = 0) -> list[object]:
    """Cut ``value`` into ``count`` pieces whose lengths differ by one at most, the longer first (``tensor_split``).

    Raises: LayoutError for a value that has no such dim or cannot be cut.
    """
    library = _library_of(value)
    if library is not None:
        _check_dim(value, dim)
        if library.__name__ == "torch":
            if value.layout is not library.strided:  # type: ignore[attr-defined]
                raise LayoutError(f"a tensor of layout {value.layout} cannot be scattered: give x.to_dense().")  # type: ignore[attr-defined]
            return [piece.contiguous() for piece in library.tensor_split(value, count, dim)]
        return list(library.array_split(value, count, dim))
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise LayoutError(f"a {type(value).__name__} cannot be scattered: give a tensor, an array, a list or a tuple.")
    length, extra = divmod(len(value), count)
    bounds = [index * length + min(index, extra) for index in range(count + 1)]
    return [value[low:high] for low, high in itertools.pairwise(bounds)]


def join(pieces: Sequence[Any], dim: int = 0) -> Any:
    """Put pieces together again: tensors and arrays along ``dim``, lists and tuples end to end.

    Raises: LayoutError for values that cannot be joined, or pieces of different kinds.
    """
    library = _library_of(pieces[0])
    if library is not None:
        if any(_library_of(piece) is not library for piece in pieces):
            raise LayoutError("the ranks hold different kinds of values; pull the name to see them.")
        if pieces[0].ndim == 0:
            return library.stack(list(pieces))
        _check_dim(pieces[0], dim)
        if len({_shape_beside(piece, dim) for piece in pieces}) > 1:
            shapes = ", ".join(dict.fromkeys(str(tuple(piece.shape)) for piece in pieces))
            raise LayoutError(f"the pieces do not fit together: their shapes {shapes} differ beside dim={dim}.")
        if dim in (0, -pieces[0].ndim) and (joined := _join_mapped(pieces)) is not None:
            return joined
        return library.cat(list(pieces), dim) if library.__name__ == "torch" else library.concatenate(list(pieces), dim)
    if all(isinstance(piece, list) for piece in pieces):
        return [item for piece in pieces for item in piece]
    if all(isinstance(piece, tuple) for piece in pieces):
        return tuple(item for piece in pieces for item in piece)
    raise LayoutError(f"values of type {type(pieces[0]).__name__} cannot be joined; bring them one by one with pull.")


def _shape_beside(piece: Any, dim: int) -> tuple[int, ...]:
    """Its sizes but that along ``dim``; of one with other dims all of them, which fit nothing."""
    shape = [*piece.shape]
    if -len(shape) <= dim < len(shape):
        shape[dim] = -1
    return tuple(shape)


def _join_mapped(pieces: Sequence[Any]) -> Any:
    """Return the pieces joined along the first dim without a copy; None where that is impossible."""
    first = pieces[0]
    if any(piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:] for piece in pieces):
        return None
    raw = [_bytes_of(piece) for piece in pieces]
    if any(each is None for each in raw) or (joined := join_mapped(raw)) is None:
        return None
    shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
    if isinstance(first, sys.modules["numpy"].ndarray):
        return joined.view(first.dtype).reshape(shape)
    return sys.modules["torch"].from_numpy(joined).view(first.dtype).reshape(shape)


def _bytes_of(piece: Any) -> Any:
    """Its memory as an array of bytes; None for one with gaps, not in this memory, or that torch knows more of."""
    numpy, torch = sys.modules["numpy"], sys.modules.get("torch")
    if type(piece) is numpy.ndarray:
        usable = piece.flags.c_contiguous and not piece.dtype.hasobject
        return piece.reshape(-1).view(numpy.uint8) if usable else None
    if torch is None or type(piece) is not torch.Tensor or piece.layout is not torch.strided or piece.is_quantized:
        return None
    if piece.device.type != "cpu" or piece.requires_grad or piece.is_conj() or piece.is_neg():
        return None
    return piece.reshape(-1).view(torch.uint8).numpy() if piece.is_contiguous() and piece.numel() else None


def _library_of(value: object) -> ModuleType | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return torch
    if numpy is not None and isinstance(value, numpy.ndarray):
        return numpy
    return None


def _check_dim(value: Any, dim: int) -> None:
    if not -value.ndim <= dim < value.ndim:
        raise LayoutError(f"dim={dim} does not exist: the value has shape {tuple(value.shape)}.")
