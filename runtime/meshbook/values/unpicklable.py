"""The part of a value that cannot travel, by the path that a person would write: ``config.callbacks[2].lock``.

The search takes the same ways as pickle itself (items, the state and arguments that a reduction returns, and
for functions and classes that go by value their closures, globals and attributes) and asks of each child
whether it can be pickled alone. A value that fails though none of its children does is the culprit. A child
that refers back to a value above it proves nothing, so the search then goes on beside it.
"""

from __future__ import annotations

import copyreg
import pickle
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from meshbook.errors import SerializationError

MAX_DEPTH = 40
MAX_PROBES = 5000

Probe: TypeAlias = Callable[[object], "Exception | None"]
"""Returns the error with which a value fails to be pickled, or None."""

_Child: TypeAlias = "tuple[str, object]"
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_ATTRIBUTE_TYPES = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MODULE_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


class Refusal(Exception):
    """A value that we do not pickle, though a pickler might."""

    def __init__(self, value: object, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.value, self.reason, self.advice = value, reason, advice


def find_culprit(value: object, path: str, error: Exception, probe: Probe, deadline: float) -> SerializationError:
    """Return the error to raise for ``value``, which failed with ``error``.

    deadline: on time.monotonic(); at it the innermost failing part found so far is named.
    """
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return SerializationError(path, name_type(type(value)), "it is nested too deeply, or refers to itself")
    search = _Search(probe, deadline, (path, value, error))
    try:
        culprit = search.visit(path, value, error, 0) or (path, value, error)
    except TimeoutError:
        culprit = search.deepest
    return _describe(*culprit)


class _Search:
    def __init__(self, probe: Probe, deadline: float, start: tuple[str, object, Exception]) -> None:
        self.deepest = start
        self._probe, self._deadline = probe, deadline
        self._depth, self._probes = 0, 0
        self._fails: dict[int, bool] = {id(start[1]): True}
        self._alive: list[object] = []
        """The probed objects, kept so that no id is used twice."""

    def visit(self, path: str, value: object, error: Exception, depth: int) -> tuple[str, object, Exception] | None:
        """The culprit at or below ``value``, which fails; None if that lies in a value above it."""
        if depth > self._depth:
            self._depth, self.deepest = depth, (path, value, error)
        if depth >= MAX_DEPTH or (isinstance(error, Refusal) and error.value is value):
            return path, value, error
        proven = True
        for child_path, child in _children(path, value):
            if type(child) in _ATOMS:
                continue
            if (known := self._fails.get(id(child))) is not None:
                proven = proven and not known
                continue
            child_error = self._ask(child)
            if child_error is not None:
                if found := self.visit(child_path, child, child_error, depth + 1):
                    return found
                proven = False
        return (path, value, error) if proven else None

    def _ask(self, child: object) -> Exception | None:
        self._probes += 1
        if self._probes > MAX_PROBES or time.monotonic() > self._deadline:
            raise TimeoutError
        error = self._probe(child)
        if isinstance(error, TimeoutError):
            raise error
        self._alive.append(child)
        self._fails[id(child)] = error is not None
        return error


def _describe(path: str, value: object, error: Exception) -> SerializationError:
    path = _MODULE_TABLE.sub(r".\1", path)
    if isinstance(error, Refusal):
        return SerializationError(path, name_type(type(value)), error.reason, error.advice)
    reason = str(error)
    if re.match(r"(cannot pickle|can't pickle) ", reason):  # which repeats the type and says no more
        reason = "it exists only inside this process"
    elif type(error) not in (pickle.PicklingError, TypeError):
        reason = f"{type(error).__name__}: {reason}"
    return SerializationError(path, name_type(type(value)), reason.rstrip("."))


def name_type(kind: type) -> str:
    """``lock`` types by their module too; builtins and the notebook's own definitions by the bare name."""
    bare = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if bare else f"{kind.__module__}.{kind.__qualname__}"


# ---- what a value is made of -------------------------------------------------------------------------------


def _children(path: str, value: object) -> Iterator[_Child]:
    kind = type(value)
    if isinstance(value, dict) and kind is dict:
        yield from _pairs(path, value.items())
    elif isinstance(value, list | tuple) and kind in (list, tuple):
        yield from _items(path, value)
    elif isinstance(value, set | frozenset) and kind in (set, frozenset):
        yield from ((f"an item of {path}", item) for item in value)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(path, value)
    elif isinstance(value, type):
        yield from _class_parts(path, value)
    else:
        if isinstance(value, tuple):
            yield from _items(path, value)
        elif isinstance(value, BaseException):
            yield from _items(f"{path}.args", value.args)
        yield from _reduced_parts(path, value)


def _items(path: str, items: Iterable[object]) -> Iterator[_Child]:
    return ((f"{path}[{index}]", item) for index, item in enumerate(items))


def _pairs(path: str, pairs: Iterable[tuple[object, object]]) -> Iterator[_Child]:
    for key, value in pairs:
        name = _short(key)
        yield f"{path}[{name}]", value
        yield f"the key {name} of {path}", key


def _reduced_parts(path: str, value: object) -> Iterator[_Child]:
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        reduced = reducer(value) if reducer else value.__reduce_ex__(5)
    except Exception:  # then the value itself is what cannot travel
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    yield from _state_parts(path, value, state)
    yield from _items(path, items or ())
    yield from _pairs(path, pairs or ())
    for index, argument in enumerate(arguments):
        if argument is type(value):
            yield f"type({path})", argument
        else:
            yield _attribute_path(path, value, argument, f"its constructor's argument {index}"), argument


def _state_parts(path: str, value: object, state: object) -> Iterator[_Child]:
    """Yield the parts of a state: of attributes, or of (attributes, slots); other states are those of C types."""
    if isinstance(state, tuple) and len(state) != 2:
        yield from ((_attribute_path(path, value, part, "its state"), part) for part in state)
        return
    for part in state if isinstance(state, tuple) else (state,):
        if type(part) is dict:
            yield from ((f"{path}.{name}", child) for name, child in part.items())
        else:
            yield _attribute_path(path, value, part, "its state"), part


def _attribute_path(path: str, owner: object, child: object, otherwise: str) -> str:
    """``path.name`` if an attribute of ``owner`` is ``child``; runs no code of the user's."""
    names = [
        name for kind in type(owner).__mro__ for name, item in vars(kind).items() if type(item) in _ATTRIBUTE_TYPES
    ]
    for name in (*getattr(owner, "__dict__", ()), *names):
        try:
            if getattr(owner, name) is child:
                return f"{path}.{name}"
        except Exception:  # a slot that is not set, or what a tensor is too small for
            continue
    return f"{path} ({otherwise})"


def _function_parts(path: str, function: types.FunctionType) -> Iterator[_Child]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}'s closure variable {name}", cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        yield f"{path}'s global {name}", function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"{path}'s default {index}", value
    for attributes, kind in ((function.__kwdefaults__, "'s default "), (function.__dict__, ".")):
        yield from ((f"{path}{kind}{name}", value) for name, value in (attributes or {}).items())


def _global_names(code: types.CodeType) -> set[str]:
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def _class_parts(path: str, kind: type) -> Iterator[_Child]:
    attributes: Mapping[str, object] = vars(kind)
    for name, value in attributes.items():
        if name in ("__dict__", "__weakref__") or type(value) in _ATTRIBUTE_TYPES:
            continue
        if isinstance(value, property):
            yield from ((f"{path}.{name}", part) for part in (value.fget, value.fset, value.fdel))
        else:
            yield f"{path}.{name}", getattr(value, "__func__", value)
    yield from ((f"a base of {path}", base) for base in kind.__bases__)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 40 else f"{text[:37]}..."
