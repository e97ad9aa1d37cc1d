"""Python values as bytes: a small head, and large buffers beside it that nobody has copied yet.

A value is pickled by the quick C pickler first. Values that it cannot pickle, and those that belong to ``__main__``, go
by value through cloudpickle: by reference, a function of the notebook would "arrive" as an older definition of the
other process. How values travel:

    NumPy arrays, buffers        out of band from `out_of_band.MIN_BYTES` on
    dense CPU tensors            the same; strides, requires_grad and attributes are kept; non-leaves arrive as
                                 leaves
    views of tensors             send only the bytes that they span. In one message, a view shares memory on
                                 arrival with a tensor that spans these bytes too and comes before it
    tensors of other devices     as CPU tensors: the other process may have no such device
    DTensor                      refused: it lives on all ranks of its mesh
    sparse, meta, subclasses     as torch pickles them

An instance of a class that was redefined since keeps its old class, as in Python itself. Long `str` and
`bytes` stay in the head; a head above `HEAD_MAX_BYTES` travels as the first of the buffers. A tensor that was
mapped from shared memory cannot be resized in place; ``clone()`` it first.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from meshbook.errors import LoadError, MeshError, SerializationError
from meshbook.values.main_names import ATOMS, Sending
from meshbook.values.tensors import NO_LIMIT, OutOfBand, TooLargeError
from meshbook.values.unpicklable import Refusal, find_culprit
from meshbook.wire.frames import Buffer

if TYPE_CHECKING:
    from typing_extensions import Buffer as ReadableBuffer

HEAD_MAX_BYTES = 3 << 16
"""Heads travel as one frame; larger ones go where the large buffers go. It is copied once there, not at each hop,
and a Unix socket holds 208 KiB: for more, writer and reader wait for each other in turns."""

SEARCH_MAX_S = 2.0
"""The time that a failed `dumps` looks for the part that cannot travel."""

_MODULE_IN_ERROR = re.compile(r"^Can't get attribute .* on <module '([\w.]+)'")
_PLAIN_PARTS = 16
_SIZED, _SMALL_BYTES = frozenset({str, bytes}), 1 << 14
_NAMED = frozenset({FunctionType, type})
"""The types that go by their name where they have one."""


class Pickled(msgspec.Struct, frozen=True, gc=False):
    """A value as bytes. ``buffers`` are views of the live value: copy or send them before it changes."""

    head: bytes
    buffers: Sequence[memoryview]


def dumps(
    obj: object, *, what: str, roots: Mapping[str, object] | None = None, sending: Sending | None = None
) -> Pickled:
    """Pickle ``obj``; functions and classes of ``__main__`` by value, in the definition that they have now.

    what: the user's name of the value; the path in an error starts with it.
    roots: names of parts of ``obj`` to start that path from instead, such as the arguments of a call.
    sending: which names functions are to read there.
    Raises: SerializationError naming the part that cannot travel.
    """
    if (plain := _pickle_plain(obj)) is not None:
        pickled = Pickled(plain, ())
    else:
        try:
            pickled = _pickle(obj, NO_LIMIT, sending)
        except MemoryError:
            raise
        except Exception as error:
            raise _explain(obj, what, roots or {}, error) from error
    return pickled if len(pickled.head) <= HEAD_MAX_BYTES else _without_head(pickled)


def _without_head(pickled: Pickled) -> Pickled:
    """A large head is the first of the buffers."""
    return Pickled(b"", [memoryview(pickled.head), *pickled.buffers])


class PreparedArguments:
    """Positional arguments of a call that is made many times: all but the last are the same, and pickled once."""

    def __init__(self, *same: object) -> None:
        """same: plain values, and functions that the other process can import."""
        self._same = b"\x80\x05(" + b"".join(map(_opcodes_without_memo, same))

    def dumps(self, last: object) -> Pickled:
        """``((*same, last), {})`` as `dumps` pickles it. last: plain values."""
        head = self._same + pickle.dumps(last, _UNFRAMED)[2:-1] + b"t}\x86."  # the tuple, no names, both, the end
        pickled = Pickled(head, ())
        return pickled if len(head) <= HEAD_MAX_BYTES else _without_head(pickled)


_UNFRAMED = 3
"""The last protocol whose pickles are opcodes alone, between two bytes that name it and one that ends them."""


def _opcodes_without_memo(value: object) -> bytes:
    """Return the opcodes that put a value on the stack: others may follow, which count their memo from zero."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, _UNFRAMED)
    pickler.fast = True
    pickler.dump(value)
    return sink.getvalue()[2:-1]


def dumps_here(obj: object, *, what: str) -> Pickled:
    """Pickle ``obj`` for this very process: all that has a name, in ``__main__`` too, goes by reference.

    By value, loading would give classes of the notebook methods with globals of their own.
    """
    if cloudpickle.list_registry_pickle_by_value():
        return dumps(obj, what=what)
    try:
        return _pickle_with(_QuickPickler, obj, NO_LIMIT)
    except Exception:  # something that has no name
        return dumps(obj, what=what)


def dumps_bounded(obj: object, max_bytes: int) -> Pickled | None:
    """Pickle ``obj`` if all of it can travel within ``max_bytes``, buffers included; else return None.

    Gives up as soon as the limit is passed, before anything large is copied.
    """
    if isinstance(obj, str | bytes | bytearray) and len(obj) > max_bytes:
        return None
    try:
        return _pickle(obj, max_bytes)
    except MemoryError:
        raise
    except Exception:  # too large, or it cannot travel: the caller shows what it is instead
        return None


def loads(head: Buffer, buffers: Sequence[Any] = (), *, where: str = "this process") -> Any:
    """Build the value again. Arrays and tensors use ``buffers`` in place and are as writable as those are.

    where: this process as a person knows it, for the error: ``rank 3 on host b``.
    Raises: LoadError if a module is missing here, or something in it, or the value's own code fails.
    """
    if not head and buffers:
        head, *buffers = buffers
    try:
        return pickle.loads(head, buffers=buffers)
    except (MeshError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise LoadError(where, error.name or str(error), "") from error
    except Exception as error:
        module = _MODULE_IN_ERROR.search(str(error)) if isinstance(error, AttributeError) else None
        raise LoadError(where, module[1] if module else "", f"{type(error).__name__}: {error}") from error


# ---- the two picklers --------------------------------------------------------------------------------------


class _QuickPickler(pickle.Pickler):
    out_of_band: OutOfBand


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    out_of_band: OutOfBand
    sending = Sending()

    def reducer_override(self, obj: object) -> object:
        reduced = self.out_of_band.reduce(obj)
        if reduced is not NotImplemented:
            return reduced
        if type(obj) in _KEEPERS and (own := _without_what_it_keeps(obj)) is not None:
            return own
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != _BY_VALUE_PARTS:
            return reduced
        if isinstance(obj, FunctionType):
            return self.sending.function(obj, reduced)
        return self.sending.kind(obj, _with_slots(obj, reduced)) if isinstance(obj, type) else reduced


_BY_VALUE_PARTS = 6
"""The number of parts to which cloudpickle reduces a function or class by value; the last part sets its state."""
_KEEPERS = (type(functools.lru_cache(id)), functools.cached_property)
"""The types that ``@cache``, ``@lru_cache`` and ``@cached_property`` make, which keep results of a function."""


def _without_what_it_keeps(keeper: Any) -> tuple[Any, ...] | None:
    """Reduce one of `_KEEPERS` to a new one, that keeps nothing yet; None where its function goes by reference."""
    function = keeper.func if isinstance(keeper, functools.cached_property) else keeper.__wrapped__
    if not isinstance(function, FunctionType) or cloudpickle.cloudpickle._should_pickle_by_reference(function):
        return None
    if isinstance(keeper, functools.cached_property):
        return _new_cached_property, (function, keeper.attrname)
    return _new_cache, (function, keeper.cache_parameters())


def _new_cache(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _new_cached_property(function: Callable[[Any], object], name: str | None) -> object:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have a class that goes by value made with its slots.

    cloudpickle makes it without, and sets ``__slots__`` afterwards, so instances have a dict there and their state does
    not fit the class here.
    """
    if "__slots__" not in vars(kind) or reduced[0] is not cloudpickle.cloudpickle._make_skeleton_class:
        return reduced
    make, (metaclass, name, bases, options, tracked, extra), (attributes, rest), *others = reduced
    slots = vars(kind)["__slots__"]
    names = [slots] if isinstance(slots, str) else list(slots)
    private = {f"_{name.lstrip('_')}{each}" for each in names if each.startswith("__") and not each.endswith("__")}
    kept = {each: value for each, value in attributes.items() if each != "__slots__" and each not in private}
    made_with = (metaclass, name, bases, {**options, "__slots__": slots}, tracked, extra)
    return (make, made_with, (kept, rest), *others)


class _BoundedSink(io.BytesIO):
    def __init__(self, out_of_band: OutOfBand) -> None:
        self._out_of_band = out_of_band

    def write(self, data: ReadableBuffer, /) -> int:
        self._out_of_band.spend(memoryview(data).nbytes)
        return super().write(data)


class _DeadlineSink:
    """Keeps nothing, and ends a probe that takes too long."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def write(self, data: ReadableBuffer, /) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError


def _pickle_plain(obj: object) -> bytes | None:
    """Pickle a value so small and simple that any pickler does it alike, or a call of a named function.

    Looks at a few items only. Returns None for any other value.
    """
    parts: list[Any] = [obj]  # grows as it is walked
    has_names = is_large = False
    for part in parts:
        kind = type(part)
        if kind in ATOMS:
            is_large = is_large or (kind in _SIZED and len(part) > _SMALL_BYTES)
            continue
        if kind in _NAMED or (kind is BuiltinFunctionType and type(part.__self__) is ModuleType):
            has_names = True
            continue
        if kind not in (tuple, list, dict) or len(parts) + len(part) > _PLAIN_PARTS:
            return None
        parts += part
        if kind is dict:
            parts += part.values()
    if not has_names:
        return pickle.dumps(obj, 5)
    if is_large:
        return None  # a large text would be looked through, and copied as its pickle grows
    try:
        head = pickle.dumps(obj, 5)
    except Exception:  # one is not found by its name
        return None
    return None if _goes_by_value(head) else head


def _goes_by_value(head: bytes) -> bool:
    """Whether a module whose functions and classes go by value is named in a pickle that has them by reference."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return b"__main__" in head or (bool(registered) and any(name.encode() in head for name in registered))


def _pickle(obj: object, room: int, sending: Sending | None = None) -> Pickled:
    try:
        pickled = _pickle_with(_QuickPickler, obj, room)
    except (TooLargeError, Refusal, MemoryError):
        raise
    except Exception:
        pass  # the other pickler can do more; if it fails too, its error is the one that counts
    else:
        if not _goes_by_value(pickled.head):
            return pickled
    return _pickle_with(_ByValuePickler, obj, room, sending)


def _pickle_with(
    kind: type[_QuickPickler] | type[_ByValuePickler], obj: object, room: int, sending: Sending | None = None
) -> Pickled:
    out_of_band = OutOfBand(room)
    sink = io.BytesIO() if room == NO_LIMIT else _BoundedSink(out_of_band)
    pickler = kind(sink, 5, buffer_callback=out_of_band.take)
    pickler.out_of_band = out_of_band
    if isinstance(pickler, _QuickPickler):
        vars(pickler)["reducer_override"] = out_of_band.reduce  # without a method of ours in between
    elif sending is not None:
        pickler.sending = sending
    pickler.dump(obj)
    return Pickled(sink.getvalue(), out_of_band.buffers)


def _explain(obj: object, what: str, roots: Mapping[str, object], error: Exception) -> SerializationError:
    deadline = time.monotonic() + SEARCH_MAX_S

    def probe(value: object) -> Exception | None:
        try:
            out_of_band = OutOfBand(NO_LIMIT)
            pickler = _ByValuePickler(_DeadlineSink(deadline), 5, buffer_callback=out_of_band.take)
            pickler.out_of_band = out_of_band
            pickler.dump(value)
        except Exception as error:
            return error
        return None

    for name, root in roots.items():
        if (failure := probe(root)) is not None:
            return find_culprit(root, name, failure, probe, deadline)
    return find_culprit(obj, what, error, probe, deadline)
