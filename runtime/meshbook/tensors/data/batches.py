"""Batches of data as their source gives them, and where each tensor in them is to lie.

A batch is a tensor, an array, Arrow data, or a tuple, list, mapping or dataclass of such. Its structure stays, as do
the plain values in it. A layout is one sharding_spec for all tensors, or a structure of specs like the batch's:

    ["data", None]                              all of them
    {"tokens": ["data"], "image": ["data", None, "model"]}      by key, field of a dataclass, or column
    (["data", None], ["data"])                  by position
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook.errors import UsageError
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.factories import as_values
from meshbook.tensors.messages.layouts import ShardingSpec, to_placements

SpecStructure: TypeAlias = "ShardingSpec | Mapping[str, SpecStructure] | Sequence[SpecStructure] | None"
"""None, or what a mapping does not name: cut along the mesh's first axis."""

LaidOut: TypeAlias = "Callable[[torch.Tensor, tuple[Placement, ...]], torch.Tensor]"

_MOST_DIMS = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Layouts:
    """How the tensors of batches lie on a mesh."""

    def __init__(self, mesh: Mesh, spec: SpecStructure, placements: Sequence[Placement] | None) -> None:
        """Raises: UnknownAxisError; UsageError if what is given makes no sense on this mesh."""
        self._mesh, self._placements = mesh, placements
        self._default: ShardingSpec = (next(iter(mesh.axes)),)
        self._spec = spec
        if placements is not None and spec is not None:
            raise UsageError("batches are laid out by a sharding_spec or by placements, not by both")
        self._check(spec)

    def _check(self, spec: SpecStructure) -> None:
        if isinstance(spec, Mapping):
            for each in spec.values():
                self._check(each)
        elif spec is not None and _is_structure(spec):
            for each in spec:
                self._check(each)
        else:
            to_placements(self._mesh, (1,) * _MOST_DIMS, spec, self._placements)  # type: ignore[arg-type]

    def lay_out(self, batch: Any, lay: LaidOut) -> Any:
        """The batch with what ``lay`` makes of each tensor and its placements. Raises: UsageError naming the part."""
        return self._walk(batch, self._spec, lay, "the batch")

    def _walk(self, item: Any, spec: SpecStructure, lay: LaidOut, path: str) -> Any:
        if isinstance(item, (torch.Tensor, np.ndarray, np.generic)):
            if spec is not None and _is_structure(spec):
                raise UsageError(f"{path} is one tensor, and the sharding_spec has a structure there: {spec!r}")
            tensor = _as_tensor(item, path)
            return lay(tensor, self._placements_of(tensor.dim(), spec))  # type: ignore[arg-type]
        if isinstance(item, _PLAIN):
            return item
        if is_arrow(item):
            from meshbook.tensors.data.arrow_columns import read_values

            return self._walk(read_values(item), spec, lay, path)
        parts = _parts_of(item)
        if parts is None:
            raise UsageError(
                f"{path} is a {type(item).__name__}: batches are tensors, NumPy arrays, Arrow data, and tuples, lists, "
                "mappings and dataclasses of them"
            )
        specs = _specs_of(spec, list(parts), path)
        at = "{}[{!r}]" if isinstance(item, (Mapping, Sequence)) else "{}.{}"
        made = {key: self._walk(part, specs[key], lay, at.format(path, key)) for key, part in parts.items()}
        return _like(item, made)

    def _placements_of(self, dims: int, spec: ShardingSpec | None) -> tuple[Placement, ...]:
        """What is said of dims that the tensor has not is left out."""
        if self._placements is None:
            spec = self._default if spec is None else spec
            return to_placements(self._mesh, (1,) * dims, list(spec)[:dims], None)
        return tuple(
            Replicate() if isinstance(each, Shard) and not -dims <= each.dim < dims
            else Shard(each.dim % dims) if isinstance(each, Shard)
            else each
            for each in self._placements
        )  # fmt: skip


def is_arrow(value: object) -> bool:
    """Whether it gives Arrow data."""
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def _is_structure(spec: SpecStructure) -> bool:
    """Entries of one spec are axes, tuples of axes and None; those of a structure lists or mappings as well."""
    return isinstance(spec, Mapping) or any(isinstance(each, (list, Mapping)) for each in spec or ())


def _specs_of(spec: SpecStructure, keys: Sequence[Any], path: str) -> dict[Any, SpecStructure]:
    """For each part of a batch."""
    if spec is None or not _is_structure(spec):
        return dict.fromkeys(keys, spec)
    given = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
    unknown = [key for key in given if key not in keys]
    if unknown or (not isinstance(spec, Mapping) and len(given) != len(keys)):
        named, there = (", ".join(map(repr, each)) for each in (given, keys))
        raise UsageError(f"the sharding_spec has entries for {named}, and {path} has {there}")
    return {key: given.get(key) for key in keys}


def _parts_of(item: Any) -> dict[Any, Any] | None:
    """By key, position or name; None for what has no parts."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (list, tuple)):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def _like(item: Any, parts: Mapping[Any, Any]) -> Any:
    """The same structure with other parts."""
    if isinstance(item, (list, tuple)):
        return item._make(parts.values()) if hasattr(item, "_make") else type(item)(parts.values())
    if type(item) is dict or (isinstance(item, Mapping) and not isinstance(item, MutableMapping)):
        return dict(parts)
    made = copy.copy(item)
    for key, part in parts.items():
        if isinstance(item, Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key, part)  # of a frozen one, too
    return made


def _as_tensor(item: Any, path: str) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return as_values(item)
    if isinstance(item, np.ma.MaskedArray):
        raise UsageError(f"{path} is a masked array, and tensors have no masks: fill it")
    array = np.asarray(item)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch warns of the first, and knows no other
    try:
        return torch.from_numpy(array).contiguous()
    except TypeError as error:
        raise UsageError(
            f"{path} is an array of {array.dtype}, which no tensor can hold: make numbers of it"
        ) from error
