"""Functions and classes of a notebook's ``__main__`` on the ranks: which names they read there, and which are set
again.

    push        a function reads the names of the rank's ``__main__``. A helper or a constant that comes with it is
                bound there where nothing has that name, and again by the next push, until something else binds it
    execute     a function brings all that it reads; names that the notebook does not have are the rank's
    instances   a class that the rank knows already keeps the attributes that were set there, unless the notebook has
                changed them since it sent them last, or the class itself is pushed

The sending side replaces the parts of cloudpickle's reductions that make a function and set a class's state.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Collection
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import cloudpickle
from cloudpickle import cloudpickle as internals

Reduced: TypeAlias = "tuple[Any, ...]"

SAID_CHARS = 60
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values have no parts, and no code of the user's."""
_ALWAYS_SET = frozenset({"__module__", "__doc__", "__annotations__", "__qualname__", "__firstlineno__", "_abc_impl"})
_NOTHING: Final = object()
_MISSING = "no such name"


class Sending:
    """The way in which functions and classes of one message are sent, for `meshbook.values.pickling`."""

    def __init__(self, reads: str = "", named: Collection[object] = ()) -> None:
        """reads: "rank", the names of the rank's ``__main__``; "missing", these for names that the sender lacks.

        named: the objects that are sent by name; of classes among them all attributes are set.
        """
        self.reads = reads
        self._named = {id(each) for each in named if isinstance(each, type)}

    def function(self, function: FunctionType, reduced: Reduced) -> Reduced:
        """reduced: the result of cloudpickle for one that goes by value."""
        if not self.reads or function.__globals__ is not vars(sys.modules["__main__"]):
            return reduced
        _, (code, _, *others), (attributes, more), *rest, _ = reduced
        if self.reads == "rank":
            return _make_of_rank, (code, *others), (attributes, more), *rest, _set_function_of_rank
        reads = internals._extract_code_globals(function.__code__)
        missing = [name for name in reads if name not in function.__globals__ and not hasattr(builtins, name)]
        if not missing:
            return reduced
        return (*reduced[:2], (attributes, {**more, "__missing__": missing}), *rest, _set_function_with_missing)

    def kind(self, kind: type, reduced: Reduced) -> Reduced:
        """reduced: the result of cloudpickle for a class that goes by value."""
        *made, (attributes, more), items, pairs, _ = reduced
        about = _digests_of(kind, attributes), self.reads == "rank", id(kind) in self._named
        return *made, (attributes, {**more, "about": about}), items, pairs, _set_class


# ---- on the rank: names -------------------------------------------------------------------------------------


class _Brought:
    """The names that arrived functions have brought into ``__main__``, and their values."""

    def __init__(self) -> None:
        self._values: dict[str, Callable[[], object]] = {}
        self._hidden: dict[str, tuple[object, object]] = {}
        """The names that mean something else on the rank, with the value there, and the value that was brought."""
        self._told: set[str] = set()

    def bring(self, name: str, value: object) -> None:
        namespace = vars(sys.modules["__main__"])
        ours = self._values[name]() if name in self._values else _NOTHING
        theirs = namespace.get(name, _NOTHING)
        if theirs is _NOTHING or theirs is ours:
            namespace[name] = value
            self._values[name] = _reference(value)
        elif theirs is not value:
            self._values.pop(name, None)
            if not _is_same(theirs, value):
                self._hidden[name] = (theirs, value)

    def release(self, names: Collection[str]) -> list[str]:
        """Note that these were bound by name. Returns: a text, once for each name, on others that are hidden."""
        for name in names:
            self._values.pop(name, None)
        hidden, self._hidden = self._hidden, {}
        fresh = hidden.keys() - self._told - set(names)
        self._told |= fresh
        return [_describe_hidden(name, *hidden[name]) for name in sorted(fresh)]


brought = _Brought()


def _reference(value: object) -> Callable[[], object]:
    """Return a reference that keeps the value no longer than the rank does, where there can be one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ == other.__code__
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:  # of values that do not compare, or not as one
        return False


def _describe_hidden(name: str, theirs: object, value: object) -> str:
    there, here = (f" ({text})" if (text := _short(each)) else "" for each in (theirs, value))
    return (
        f"what was pushed reads {name} of this rank{there}, not of the notebook{here}; push {name} as well to send it"
    )


def _short(value: object) -> str:
    text = repr(value) if type(value) in ATOMS else ""
    return text if len(text) <= SAID_CHARS else ""


# ---- on the rank: functions ---------------------------------------------------------------------------------


def _make_of_rank(code: CodeType, name: None, defaults: None, closure: Any) -> FunctionType:
    return FunctionType(code, vars(sys.modules["__main__"]), name, defaults, closure)


def _set_function_of_rank(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, more = state
    for name, value in more["__globals__"].items():
        brought.bring(name, value)
    namespace = function.__globals__
    before = namespace.get("__builtins__", builtins)
    internals._function_setstate(function, (attributes, {**more, "__globals__": {}}))
    namespace["__builtins__"] = before


def _set_function_with_missing(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, more = state
    namespace = vars(sys.modules["__main__"])
    missing = {name: namespace[name] for name in more.pop("__missing__") if name in namespace}
    more["__globals__"] = {**missing, **more["__globals__"]}
    internals._function_setstate(function, (attributes, more))


# ---- classes ------------------------------------------------------------------------------------------------


_Digests: TypeAlias = tuple[bytes, bytes]
"""The digests of an attribute of a class as it was sent: alone, and with the names that it reads; equal for data."""
_own: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were made in this process, and sent."""
_arrived: weakref.WeakKeyDictionary[type, dict[str, _Digests]] = weakref.WeakKeyDictionary()
"""Classes that came from another process, with the attributes that were set last."""
_of_rank: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were pushed: their methods read the names of ``__main__``."""


def _digests_of(kind: type, attributes: dict[str, Any]) -> dict[str, _Digests]:
    """Return a value that tells a process which attributes have changed since it last got a class.

    A class that has arrived here has the digests that it came with. An attribute without one is set at each arrival.
    """
    if (came_with := _arrived.get(kind)) is not None:
        return came_with
    _own.add(kind)
    found = {}
    for name, value in attributes.items():
        if name not in _ALWAYS_SET:
            with contextlib.suppress(Exception):
                alone = _digest(value, with_globals=False)
                found[name] = alone, _digest(value, with_globals=True) if _is_code(value) else alone
    return found


def _is_code(value: object) -> bool:
    return hasattr(type(value), "__get__")


def _set_class(kind: type, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, more = state
    digests, pushed, named = more["about"]
    before = _arrived.get(kind, {})
    if pushed:
        _of_rank.add(kind)
        if kind.__module__ == "__main__" and kind.__qualname__.isidentifier():
            brought.bring(kind.__name__, kind)  # so that its instances can be pickled here
    if not named:
        if kind in _own:
            return
        part = 0 if kind in _of_rank and not pushed else 1
        same = {name for name in digests.keys() & before.keys() if digests[name][part] == before[name][part]}
        attributes = {
            name: value
            for name, value in attributes.items()
            if name not in same or (pushed and _is_code(value))  # which reads the names of the rank from now on
        }
    _arrived[kind] = {**before, **digests}
    internals._class_setstate(kind, (attributes, {}))


class _DigestPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions and classes that go by value stand for themselves; their own attributes are not looked at."""

    with_globals: bool

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, FunctionType) and not internals._should_pickle_by_reference(obj):
            state = [internals._get_cell_contents(cell) for cell in obj.__closure__ or ()]
            if self.with_globals:
                reads = internals._extract_code_globals(obj.__code__)
                state += [obj.__globals__.get(name, _MISSING) for name in reads]
            return _stand_in, (_code_digest(obj.__code__), obj.__defaults__, obj.__kwdefaults__), state
        if isinstance(obj, type) and not internals._should_pickle_by_reference(obj):
            return _stand_in, (internals._get_or_create_tracker_id(obj),)
        return super().reducer_override(obj)


def _stand_in(*parts: object) -> None:
    """Digests are never loaded."""


@functools.lru_cache(maxsize=4096)
def _code_digest(code: CodeType) -> str:
    return f"{code.co_name} {code.co_firstlineno} {hash(code)}"


def _digest(value: Any, *, with_globals: bool) -> bytes:
    """Raises: the errors of pickling."""
    kind = type(value)
    if kind in ATOMS:
        return pickle.dumps(value, 5) if kind not in (str, bytes) else _summed(pickle.dumps(value, 5))
    parts = (value.keys(), value.values()) if kind is dict else (value,)
    if kind in (list, tuple, dict) and all(type(each) in ATOMS for part in parts for each in part):
        return _summed(pickle.dumps(value, 5))
    if kind in (classmethod, staticmethod):
        return kind.__name__.encode() + _digest(value.__func__, with_globals=with_globals)
    if kind is property:
        return b" ".join(_digest(each, with_globals=with_globals) for each in (value.fget, value.fset, value.fdel))
    if kind is FunctionType and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        reads = internals._extract_code_globals(value.__code__) if with_globals else ()
        if not any(name in value.__globals__ for name in reads):
            return _code_digest(value.__code__).encode()
    sums = hashlib.blake2b(digest_size=16)
    sink = io.BytesIO()
    pickler = _DigestPickler(sink, 5, buffer_callback=lambda buffer: sums.update(buffer.raw()))
    pickler.with_globals = with_globals
    pickler.dump(value)
    sums.update(sink.getbuffer())
    return sums.digest()


def _summed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
