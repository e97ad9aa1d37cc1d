"""Columns of Arrow tables as NumPy arrays, in the memory that they are in: numbers without nulls are not copied.

Whoever has Arrow data (PyArrow, Polars, DuckDB, nanoarrow, pandas) gives it by the PyCapsule protocol: pointers to the
C structures that Arrow's C data interface defines. They are read here as they are, so no library is imported.

    __arrow_c_stream__   tables, data frames, relations, readers: batches, one after the other
    __arrow_c_array__    a record batch, or one column
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from meshbook.errors import UsageError

ArrowValues: TypeAlias = "dict[str, npt.NDArray[Any]] | npt.NDArray[Any]"
"""The columns of a table by name, or one column."""


@runtime_checkable
class ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


@runtime_checkable
class ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]: ...


def read_values(data: ArrowArray | ArrowStream) -> ArrowValues:
    """All of it; what is in one chunk is not copied. Raises: UsageError naming a column that no tensor can hold."""
    if isinstance(data, ArrowArray):
        capsules = data.__arrow_c_array__()
        field = _read_field(_at(_Schema, capsules[0], b"arrow_schema"))
        return _values_of(field, _at(_Array, capsules[1], b"arrow_array"), capsules)
    chunks = _Batches(data)
    found = [each for each in chunks if _length(each)] or [_empty(chunks.field)]
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], dict):
        tables = cast("list[dict[str, npt.NDArray[Any]]]", found)
        return {name: np.concatenate([table[name] for table in tables]) for name in found[0]}
    return np.concatenate(cast("list[npt.NDArray[Any]]", found))


def read_batches(data: ArrowArray | ArrowStream) -> Iterator[ArrowValues]:
    """The batches of a stream, one after the other. Raises: UsageError as `read_values`."""
    return iter(_Batches(data)) if isinstance(data, ArrowStream) else iter([read_values(data)])


def _length(values: ArrowValues) -> int:
    return max(map(len, values.values()), default=0) if isinstance(values, dict) else len(values)


# ---- the structures of the C data interface -----------------------------------------------------------------------


class _Schema(ctypes.Structure):
    """``struct ArrowSchema``."""

    format: bytes
    name: bytes | None
    n_children: int
    children: Any
    dictionary: Any
    release: int | None


_Schema._fields_ = [
    ("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_void_p), ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64), ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)), ("release", ctypes.c_void_p), ("private_data", ctypes.c_void_p),
]  # fmt: skip


class _Array(ctypes.Structure):
    """``struct ArrowArray``."""

    length: int
    null_count: int
    offset: int
    buffers: Any
    children: Any
    release: int | None


_Array._fields_ = [
    ("length", ctypes.c_int64), ("null_count", ctypes.c_int64), ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64), ("n_children", ctypes.c_int64), ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))), ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.c_void_p), ("private_data", ctypes.c_void_p),
]  # fmt: skip

_Fill = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ArrayStream(ctypes.Structure):
    """``struct ArrowArrayStream``."""

    get_schema: Any
    get_next: Any
    get_last_error: Any


_ArrayStream._fields_ = [
    ("get_schema", _Fill), ("get_next", _Fill), ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
    ("release", ctypes.c_void_p), ("private_data", ctypes.c_void_p),
]  # fmt: skip

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _at(kind: Any, capsule: object, name: bytes) -> Any:
    """The structure that a capsule points to, which lives as long as the capsule."""
    return kind.from_address(_pointer_of(capsule, name))


class _Filled:
    """A structure that a stream has filled for us; what it points to is released with it."""

    def __init__(self, kind: Any) -> None:
        self.structure = kind()

    def __del__(self) -> None:
        if self.structure.release:
            _Release(self.structure.release)(ctypes.addressof(self.structure))


class _Batches:
    """The batches of a stream, which is read once."""

    def __init__(self, data: ArrowStream) -> None:
        self._capsule = data.__arrow_c_stream__()
        self._stream = _at(_ArrayStream, self._capsule, b"arrow_array_stream")
        schema = self._fill(self._stream.get_schema, _Filled(_Schema))
        self.field = _read_field(schema.structure)

    def __iter__(self) -> Iterator[ArrowValues]:
        while (owned := self._fill(self._stream.get_next, _Filled(_Array))).structure.release:
            yield _values_of(self.field, owned.structure, owned)

    def _fill(self, function: Any, owned: _Filled) -> _Filled:
        address = ctypes.addressof(self._stream)
        if function(address, ctypes.addressof(owned.structure)):
            why = self._stream.get_last_error(address)
            raise UsageError(
                f"the Arrow data cannot be read: {(why or b'no reason is given').decode(errors='replace')}"
            )
        return owned


# ---- columns ------------------------------------------------------------------------------------------------------

_NUMBERS = {
    "c": "i1", "C": "u1", "s": "i2", "S": "u2", "i": "i4", "I": "u4", "l": "i8", "L": "u8", "e": "f2", "f": "f4",
    "g": "f8",
}  # fmt: skip

_ADVICE = {
    "u": "text: encode it as numbers", "U": "text: encode it as numbers", "vu": "text: encode it as numbers",
    "z": "bytes: decode them to numbers", "Z": "bytes: decode them to numbers", "vz": "bytes: decode them to numbers",
    "w": "bytes: decode them to numbers", "t": "dates or times: cast them to integers",
    "d": "decimals: cast them to float64", "n": "nothing but nulls: fill it", "+s": "structs: take their fields apart",
    "+": "lists of any length: pad them to arrays of one length, which their type states",
}  # fmt: skip
"""By how Arrow's format begins, the longest first that fits: what a column holds, and what to do about it."""


class _Field(NamedTuple):
    """What a column holds."""

    name: str
    format: str
    children: tuple[_Field, ...]
    is_encoded: bool
    """Whether it refers to a dictionary of values."""

    @property
    def width(self) -> int:
        """How many values each row has, of arrays of one length."""
        return int(self.format[3:])

    def refuse(self) -> UsageError:
        begins = [self.format[:length] for length in (2, 1)]
        what = next((_ADVICE[each] for each in begins if each in _ADVICE), f"values of Arrow's format {self.format}")
        what = "categories: take their codes" if self.is_encoded else what
        return UsageError(f'the column "{self.name}" holds {what}, or leave it out')


def _read_field(schema: Any) -> _Field:
    children = tuple(_read_field(schema.children[index].contents) for index in range(schema.n_children))
    return _Field((schema.name or b"").decode(), schema.format.decode(), children, bool(schema.dictionary))


def _values_of(field: _Field, array: Any, owner: object) -> ArrowValues:
    """owner: what the memory lives as long as."""
    if field.format != "+s":
        return _column(field, array, 0, array.length, owner)
    _refuse_nulls(field, array, array.offset, array.length, owner)
    if len(field.children) > len({child.name for child in field.children}):
        raise UsageError(f"two columns have one name, among {[child.name for child in field.children]}: rename one")
    return {
        child.name: _column(child, array.children[index].contents, array.offset, array.length, owner)
        for index, child in enumerate(field.children)
    }


def _empty(field: _Field) -> ArrowValues:
    if field.format == "+s":
        return {child.name: np.empty(*_row(child)) for child in field.children}
    return np.empty(*_row(field))


def _row(field: _Field) -> tuple[tuple[int, ...], npt.DTypeLike]:
    """The shape of no rows, and the type of what is in them."""
    if field.format.startswith("+w:") and not field.is_encoded:
        shape, kind = _row(field.children[0]._replace(name=field.name))
        return (0, field.width, *shape[1:]), kind
    numbers = "?" if field.format == "b" else _NUMBERS.get(field.format)
    if field.is_encoded or numbers is None:
        raise field.refuse()
    return (0,), numbers


def _column(field: _Field, array: Any, begin: int, length: int, owner: object) -> npt.NDArray[Any]:
    """begin: behind the array's own offset."""
    shape, kind = _row(field)
    begin += array.offset
    _refuse_nulls(field, array, begin, length, owner)
    if field.format.startswith("+w:"):
        child = field.children[0]._replace(name=field.name)
        inner = _column(child, array.children[0].contents, begin * field.width, length * field.width, owner)
        return inner.reshape(length, *shape[1:])
    if field.format == "b":
        return _bits(array.buffers[1], begin, length, owner).view(np.bool_)
    size = np.dtype(kind).itemsize
    return _memory(array.buffers[1], begin * size, length * size, owner).view(kind)


def _refuse_nulls(field: _Field, array: Any, begin: int, length: int, owner: object) -> None:
    if array.null_count == 0 or not array.n_buffers or not array.buffers[0]:
        return
    if nulls := length - int(_bits(array.buffers[0], begin, length, owner).sum()):
        raise UsageError(
            f'the column "{field.name}" has {nulls} nulls, which a tensor cannot hold: fill them, or drop their rows'
        )


def _bits(address: int | None, begin: int, length: int, owner: object) -> npt.NDArray[np.uint8]:
    first, behind = begin // 8, -(-(begin + length) // 8)
    packed = _memory(address, first, behind - first, owner)
    return np.unpackbits(packed, bitorder="little")[begin - 8 * first :][:length]


class _ForeignMemory:
    """Bytes that belong to somebody else, as NumPy takes them."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self._owner = owner


def _memory(address: int | None, begin: int, size: int, owner: object) -> npt.NDArray[np.uint8]:
    return np.asarray(_ForeignMemory(address + begin, size, owner)) if size and address else np.empty(0, np.uint8)
