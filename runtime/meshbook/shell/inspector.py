"""The text of Shift-Tab on a rank: an object in the form of IPython's ``name?``, at a cost that does not grow with it.

IPython's own inspector writes ``str(obj)`` first and cuts it then. A list of ten million numbers holds the GIL for a
second that way, and with it the rank; a tensor on a GPU waits for the kernels that run there.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import inspect
import os
import reprlib
import sys
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from IPython.core import oinspect
from IPython.utils.tokenutil import token_at_cursor

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

DOC_MAX_CHARS = 100_000
"""The most characters of a docstring or of source text that are shown."""

_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, bytearray, int)
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = _short.maxdict = 12
_short.maxstring = _short.maxother = 200
_short.maxlong = 80


def describe(shell: InteractiveShell, code: str, cursor: int, detail: int) -> str:
    """Return the text about the name at ``cursor``, as of ``name?``, with ``detail`` as of ``name??``.

    The text is empty where there is no such name.
    """
    name = token_at_cursor(code, cursor)
    if not name:
        return ""
    info = shell._ofind(name)
    found = info if isinstance(info, dict) else info.__dict__
    if not found["found"]:
        return ""
    thing = found["obj"]
    source = oinspect.getsource(thing, name) if detail else None
    doc = oinspect.getdoc(thing)
    is_class = inspect.isclass(thing)
    fields = [("Init signature" if is_class else "Signature", _definition(thing, shell.inspector, name))]
    if not (is_class or callable(thing)) or inspect.ismodule(thing):
        fields += [("String form", _brief(thing)), ("Length", _length(thing))]
    if doc and not (source and doc in inspect.cleandoc(source)):
        fields.append(("Docstring", doc[:DOC_MAX_CHARS]))
    if source:
        fields.append(("Source", source.rstrip()[:DOC_MAX_CHARS]))
    if is_class:
        init = inspect.getdoc(vars(thing)["__init__"]) if "__init__" in vars(thing) else None
        fields.append(("Init docstring", init if init and init != doc else ""))
    fields += [("File", _file(thing)), ("Type", type(thing).__name__)]
    return "\n".join(_line(title, text) for title, text in fields if text) + "\n"


def _line(title: str, text: str) -> str:
    apart = "\n" if "\n" in text or title in ("Docstring", "Source", "Init docstring") else " "
    return f"\x1b[31m{title}:\x1b[39m{apart}{text}"


def _definition(thing: Any, inspector: oinspect.Inspector, name: str) -> str:
    """Return ``f(a, b=1)``; nothing for an object that cannot be called."""
    if not callable(thing):
        return ""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):  # ``__call__`` takes whatever ``forward`` takes
        thing = thing.forward
    return str(inspector._getdef(thing, name) or "")


def _brief(thing: object) -> str:
    """Return the object's repr if that is short and cheap; of an array its shape and dtype."""
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
    """Return the file that defines the object; nothing for a cell, whose file is not on the disk."""
    try:
        path = inspect.getfile(thing)
    except (TypeError, OSError):
        return ""
    return path if os.path.exists(path) else ""
