"""Batches of data as their source gives them, and the layout of each tensor in them.

A batch is a tensor, an array, Arrow data, or a tuple, list, mapping or dataclass of such. Its structure stays, as do
the plain values in it. A layout is one sharding_spec for all tensors, or a structure of specs like the batch's:

    ["data", None]                              all of them
    {"tokens": ["data"], "image": ["data", None, "model"]}      by key, field of a dataclass, or column
    (["data", None], ["data"])                  by position
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook.errors import UsageError
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.factories import as_values
from meshbook.tensors.messages.layouts import ShardingSpec, to_placements

SpecStructure: TypeAlias = "ShardingSpec | Mapping[str, SpecStructure] | Sequence[SpecStructure] | None"
"""A structure of specs. None, and keys that a mapping lacks, mean a cut along the mesh's first axis."""

LaidOut: TypeAlias = "Callable[[torch.Tensor, tuple[Placement, ...]], torch.Tensor]"

ArrowValues: TypeAlias = "dict[str, npt.NDArray[Any]] | npt.NDArray[Any]"
"""The columns of a table by name, or a single column."""

_MOST_DIMS = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Layouts:
    """The layouts of the tensors of batches on a mesh."""

    def __init__(self, mesh: Mesh, spec: SpecStructure, placements: Sequence[Placement] | None) -> None:
        """Check the layouts. Raises: UnknownAxisError; UsageError if they make no sense on this mesh."""
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
        """Return the batch with the result of ``lay`` for each tensor. Raises: UsageError naming the part."""
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
        """Return the placements of a tensor; entries for dims that it lacks are left out."""
        if self._placements is None:
            spec = self._default if spec is None else spec
            return to_placements(self._mesh, (1,) * dims, list(spec)[:dims], None)
        return tuple(
            Replicate() if isinstance(each, Shard) and not -dims <= each.dim < dims
            else Shard(each.dim % dims) if isinstance(each, Shard)
            else each
            for each in self._placements
        )  # fmt: skip


def _is_structure(spec: SpecStructure) -> bool:
    """Whether specs are in a structure: in one spec entries are axes, tuples of axes and None."""
    return isinstance(spec, Mapping) or any(isinstance(each, (list, Mapping)) for each in spec or ())


def _specs_of(spec: SpecStructure, keys: Sequence[Any], path: str) -> dict[Any, SpecStructure]:
    """Return the spec of each part of a batch."""
    if spec is None or not _is_structure(spec):
        return dict.fromkeys(keys, spec)
    given = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
    unknown = [key for key in given if key not in keys]
    if unknown or (not isinstance(spec, Mapping) and len(given) != len(keys)):
        named, there = (", ".join(map(repr, each)) for each in (given, keys))
        raise UsageError(f"the sharding_spec has entries for {named}, and {path} has {there}")
    return {key: given.get(key) for key in keys}


def _parts_of(item: Any) -> dict[Any, Any] | None:
    """Return the parts of an item by key, position or name; None for one without parts."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (list, tuple)):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def _like(item: Any, parts: Mapping[Any, Any]) -> Any:
    """Return the same structure with other parts."""
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


# ---- Arrow data: numbers without nulls stay in the memory that they are in -------------------------------------------


def is_arrow(value: object) -> bool:
    """Whether an object gives Arrow data by the PyCapsule protocol, as tables, data frames and relations do."""
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def read_values(data: Any) -> ArrowValues:
    """Return all of some Arrow data; a single chunk is not copied. Raises: UsageError as `read_batches`."""
    found = list(_read(data))
    found = [each for each in found if _length(each)] or found[:1]
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], dict):
        return {name: np.concatenate([table[name] for table in found]) for name in found[0]}
    return np.concatenate(found)  # type: ignore[arg-type]


def read_batches(data: Any) -> Iterator[ArrowValues]:
    """Return the batches of Arrow data that have rows, one after the other.

    Raises: UsageError naming a column that no tensor can hold, or where no library that reads Arrow data is installed.
    """
    return filter(_length, _read(data))


def _length(values: ArrowValues) -> int:
    return max(map(len, values.values()), default=0) if isinstance(values, dict) else len(values)


def _read(data: Any) -> Iterator[ArrowValues]:
    """Return the batches of Arrow data, or a batch without rows where there is none."""
    if find_spec("nanoarrow") is not None:
        return _told_as_ours(_by_nanoarrow(data))
    if find_spec("pyarrow") is not None:
        return _told_as_ours(_by_pyarrow(data))
    raise UsageError(
        f"a {type(data).__name__} holds Arrow data, and neither nanoarrow nor pyarrow is installed to read it: "
        "pip install nanoarrow"
    )


def _told_as_ours(values: Iterator[ArrowValues]) -> Iterator[ArrowValues]:
    try:
        yield from values
    except UsageError:
        raise
    except Exception as error:  # each library has errors of its own
        raise UsageError(f"the Arrow data cannot be read: {error}") from error


def _by_nanoarrow(data: Any) -> Iterator[ArrowValues]:
    import nanoarrow  # type: ignore[import-untyped,unused-ignore]

    stream = nanoarrow.c_array_stream(data)
    schema = nanoarrow.Schema(stream.get_schema())
    fields = list(schema.fields) if schema.type.name == "STRUCT" else []
    names = _checked([field.name for field in fields])
    for array in itertools.chain([next(stream, None) or nanoarrow.c_array([], schema)], stream):
        if not fields:
            yield _nanoarrow_column(schema.name or "", schema, array)
            continue
        _refuse_nulls(schema.name or "", array.view().null_count)
        children = [array.child(index)[array.offset : array.offset + array.length] for index in range(len(fields))]
        yield {name: _nanoarrow_column(name, *each) for name, *each in zip(names, fields, children, strict=True)}


def _nanoarrow_column(name: str, schema: Any, array: Any) -> npt.NDArray[Any]:
    """Return the values of a column. schema: a ``nanoarrow.Schema``. array: a ``CArray``."""
    kind, view = schema.type.name.lower(), array.view()
    _refuse_unlike(name, kind)
    _refuse_nulls(name, view.null_count)
    begin, end = array.offset, array.offset + array.length
    if kind == "fixed_size_list":
        width = schema.list_size
        inner = _nanoarrow_column(name, schema.value_type, array.child(0)[begin * width : end * width])
        return inner.reshape(array.length, width, *inner.shape[1:])
    if kind == "bool":
        return np.asarray(view.buffer(1).unpack_bits(begin, array.length)).view(np.bool_)
    return _writable(np.asarray(view.buffer(1)))[begin:end]


def _by_pyarrow(data: Any) -> Iterator[ArrowValues]:
    import pyarrow  # type: ignore[import-untyped,unused-ignore]

    chunks: Iterator[Any]
    if not hasattr(data, "__arrow_c_stream__"):
        whole = pyarrow.array(data)
        chunks, kind = iter([whole]), whole.type
    else:
        try:
            reader = pyarrow.RecordBatchReader.from_stream(data)
            chunks, kind = map(pyarrow.RecordBatch.to_struct_array, reader), pyarrow.struct(list(reader.schema))
        except pyarrow.ArrowInvalid:  # a stream of a single column
            column = pyarrow.chunked_array(data)
            chunks, kind = iter(column.chunks), column.type
    first = next(chunks, None)
    is_table = pyarrow.types.is_struct(kind)
    names = _checked([kind.field(index).name for index in range(kind.num_fields)]) if is_table else []
    for array in itertools.chain([pyarrow.array([], kind) if first is None else first], chunks):
        if not is_table:
            yield _pyarrow_column("", array)
            continue
        _refuse_nulls("", array.null_count)
        yield {name: _pyarrow_column(name, child) for name, child in zip(names, array.flatten(), strict=True)}


def _pyarrow_column(name: str, array: Any) -> npt.NDArray[Any]:
    kind = str(array.type).partition("<")[0].partition("[")[0]
    _refuse_unlike(name, kind)
    _refuse_nulls(name, array.null_count)
    if kind == "fixed_size_list":
        inner = _pyarrow_column(name, array.flatten())
        return inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    return _writable(array.to_numpy(zero_copy_only=kind != "bool"))


class _ReadOnly:
    """The memory of an array that cannot be written to, for an array that could."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        about = array.__array_interface__
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}
        self._owner = array


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array in the same memory of which torch makes a tensor without a warning; nobody writes to it."""
    return np.asarray(_ReadOnly(array)) if array.size else array


_HELD = re.compile(r"u?int\d+|half_?float|float|double|bool|fixed_size_list")
"""The types of columns that tensors can hold, as nanoarrow and pyarrow call them."""

_ADVICE = {
    "dictionary": "categories: take their codes", "string": "text: encode it as numbers",
    "binary": "bytes: decode them to numbers", "interval|date|time|duration": "dates or times: cast them to integers",
    "decimal": "decimals: cast them to float64", "null": "nothing but nulls: fill it",
    "struct": "structs: take their fields apart",
    "list|map": "lists of any length: pad them to arrays of one length, which their type states",
}  # fmt: skip
"""The content of a column of another type, and advice on it, by a word in the name of the type."""


def _refuse_unlike(name: str, kind: str) -> None:
    if not _HELD.fullmatch(kind):
        found = (advice for words, advice in _ADVICE.items() if re.search(words, kind))
        held = next(found, f"values of Arrow's type {kind}")
        raise UsageError(f'the column "{name}" holds {held}, or leave it out')


def _refuse_nulls(name: str, nulls: int) -> None:
    if nulls:
        raise UsageError(
            f'the column "{name}" has {nulls} nulls, which a tensor cannot hold: fill them, or drop their rows'
        )


def _checked(names: list[str]) -> list[str]:
    if len(names) > len(set(names)):
        raise UsageError(f"two columns have one name, among {names}: rename one")
    return names
