"""An object in words, in the form of IPython's ``name?``, at a cost that does not grow with the object.

IPython's own inspector writes ``str(obj)`` first and cuts it then. A list of ten million numbers holds the GIL
for a second that way, and with it the rank; a tensor on a GPU waits for whatever runs there.
"""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Sized
from typing import Any

TEXT_MAX_CHARS = 100_000
"""Of a docstring or of source text."""

_FIELD = "\x1b[31m{}:\x1b[39m"
_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, bytearray, int)
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = _short.maxdict = 12
_short.maxstring = _short.maxother = 200
_short.maxlong = 80


def summarise(thing: object, *, definition: str, source: str | None, doc: str | None) -> str:
    """The text. definition: ``f(a, b=1)``; source: is shown in place of the docstring that it holds."""
    is_class = inspect.isclass(thing)
    fields = [("Init signature" if is_class else "Signature", definition)]
    if doc and not (source and doc in inspect.cleandoc(source)):
        fields.append(("Docstring", doc[:TEXT_MAX_CHARS]))
    if source:
        fields.append(("Source", source.rstrip()[:TEXT_MAX_CHARS]))
    if is_class:
        fields.append(("Init docstring", _init_doc(thing, doc)))
    fields.append(("File", _file(thing)))
    fields.append(("Type", type(thing).__name__))
    if not (is_class or callable(thing)) or inspect.ismodule(thing):
        fields.insert(1, ("String form", _brief(thing)))
        fields.insert(2, ("Length", _length(thing)))
    return "\n".join(_line(title, text) for title, text in fields if text) + "\n"


def _line(title: str, text: str) -> str:
    apart = "\n" if "\n" in text or title in ("Docstring", "Source", "Init docstring") else " "
    return f"{_FIELD.format(title)}{apart}{text}"


def _brief(thing: object) -> str:
    """Its repr, if that is short and cheap; of arrays what can be said without their values."""
    shape, dtype = getattr(thing, "shape", None), getattr(thing, "dtype", None)
    if shape is not None and dtype is not None:
        device = getattr(thing, "device", None)
        where = f", {device}" if device is not None and str(device) != "cpu" else ""
        return f"shape {tuple(shape)}, {dtype}{where}"
    try:
        text = _short.repr(thing) if isinstance(thing, _CONTAINERS) else str(thing)
    except Exception:
        return ""
    return text if len(text) <= 2000 else f"{text[:1000]} <...> {text[-200:]}"


def _length(thing: object) -> str:
    try:
        return str(len(thing)) if isinstance(thing, Sized) else ""
    except Exception:
        return ""


def _file(thing: Any) -> str:
    """Where it was defined; nothing for what a cell has defined, whose file is not on the disk."""
    try:
        path = inspect.getfile(thing)
    except (TypeError, OSError):
        return ""
    return path if os.path.exists(path) else ""


def _init_doc(thing: object, doc: str | None) -> str:
    text = inspect.getdoc(vars(thing)["__init__"]) if "__init__" in vars(thing) else None
    return text if text and text != doc else ""
