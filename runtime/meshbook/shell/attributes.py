"""The attributes of what stands before a dot, by looking at the living object.

IPython does it too, but otherwise in each version, and at a cost that grows with the number of names. What runs here of
the user's is ``__dir__``: properties on the way are not asked, nor ``__getattr__`` and ``__getitem__`` of classes that
are not known to be harmless.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from types import ModuleType

NAMES_MAX = 10_000
"""Names that an object may list before the rest is left out: completion must not take the GIL for long."""

_CHAIN = re.compile(r"(?<![\w.\])}\"'])([^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\\]*'|\"[^\"\\]*\")\])*)\.(\w*)$")
_ATTRIBUTES_TRUSTED = re.compile(r"(torch|numpy|pandas|builtins)(\.|$)")
"""Where properties and ``__getattr__`` do no more than they seem to."""

_ITEMS_TRUSTED = re.compile(r"(torch\.nn|numpy|pandas|collections|builtins)(\.|$)")
"""Where ``__getitem__`` does; one of torch.utils.data loads something."""

_OPERATIONS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes of tensors that compute; of a DTensor, together with other ranks."""

_PLAIN_LOOKUPS: tuple[object, ...] = (object.__getattribute__, type.__getattribute__, ModuleType.__getattribute__)
_MISSING = object()


class NotToBeLookedAt(Exception):
    """To go on would run code of the user, or there is nothing."""


def attribute_names(before: str, namespace: Mapping[str, object]) -> tuple[str, list[str]] | None:
    """What is typed of an attribute at the end of ``before``, and the names that begin so.

    Names with an underscore only where one is typed. None: it is no chain of names, or it cannot be followed.
    """
    found = _CHAIN.search(before)
    if found is None:
        return None
    try:
        thing = resolve(ast.parse(found[1], mode="eval").body, namespace)
    except (NotToBeLookedAt, SyntaxError):
        return None
    typed = found[2]
    names = {name for name in listed(thing) if isinstance(name, str) and name.startswith(typed)}
    if not typed.startswith("_"):
        names = {name for name in names if not name.startswith("_")}
    return typed, sorted(names)


def listed(thing: object) -> Sequence[object]:
    """``dir``, of so many names only; those of the type where ``__dir__`` fails."""
    for _ in range(2):  # the main thread may change what is being listed
        with contextlib.suppress(Exception):
            return [*islice(dir(thing), NAMES_MAX), *dir(type(thing))]
    return dir(type(thing))


def resolve(node: ast.expr, namespace: Mapping[str, object]) -> object:
    """The value of a chain of names, attributes and literal indices.

    Raises: NotToBeLookedAt.
    """
    if isinstance(node, ast.Name):
        value = namespace.get(node.id, vars(builtins).get(node.id, _MISSING))
    elif isinstance(node, ast.Attribute):
        value = _attribute(resolve(node.value, namespace), node.attr)
    elif isinstance(node, ast.Subscript):
        value = _item(resolve(node.value, namespace), ast.literal_eval(node.slice))
    else:
        raise NotToBeLookedAt
    if value is _MISSING:
        raise NotToBeLookedAt
    return value


def _attribute(thing: object, name: str) -> object:
    if type(thing).__getattribute__ not in _PLAIN_LOOKUPS and not _is_from(type(thing), _ATTRIBUTES_TRUSTED):
        raise NotToBeLookedAt
    if _is_tensor(thing) and name in _OPERATIONS:
        raise NotToBeLookedAt
    static = inspect.getattr_static(thing, name, _MISSING)
    if static is _MISSING:
        own_lookup = getattr(type(thing), "__getattr__", None)
        if own_lookup is not None and not _is_from(own_lookup, _ATTRIBUTES_TRUSTED):
            raise NotToBeLookedAt
    elif isinstance(static, property):
        if not _is_from(static.fget, _ATTRIBUTES_TRUSTED):
            raise NotToBeLookedAt
    elif isinstance(static, functools.cached_property) and not _is_from(static.func, _ATTRIBUTES_TRUSTED):
        raise NotToBeLookedAt
    try:
        return getattr(thing, name, _MISSING)
    except Exception:
        return _MISSING


def _item(thing: object, key: object) -> object:
    lookup = getattr(type(thing), "__getitem__", None)
    if lookup is None or _is_tensor(thing) or not _is_from(lookup, _ITEMS_TRUSTED):
        raise NotToBeLookedAt
    try:
        return lookup(thing, key)
    except Exception:
        return _MISSING


def _is_tensor(thing: object) -> bool:
    return hasattr(type(thing), "__torch_function__")


def _is_from(thing: object, packages: re.Pattern[str]) -> bool:
    """Whether a class, a function or a slot of a class in C comes from one of these packages."""
    module = getattr(getattr(thing, "__objclass__", thing), "__module__", None)
    return isinstance(module, str) and packages.match(module) is not None
