"""The source of functions that a notebook defines, for the ranks to which they travel: no file there has it.

pdb and tracebacks look for it in `linecache`, under the name that the notebook's own compiler gave.
"""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshbook.source.cells import number_of_input


def source_of(function: Callable[..., object], known: set[str]) -> tuple[str, str] | None:
    """The name under which the function was compiled, and the text there, if only this process has it.

    known: names that were looked at before; grows.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename in known:
        return None
    known.add(code.co_filename)
    if Path(code.co_filename).exists():
        return None
    text = "".join(linecache.getlines(code.co_filename))
    return (code.co_filename, text) if text else None


def learn_source(name: str, text: str) -> None:
    """On a rank: know the text."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


class CellSource(NamedTuple):
    """A cell. file_name: under which its code was compiled. number: None where it is not known."""

    file_name: str
    text: str
    number: int | None


def sources_of(cls: type) -> list[CellSource]:
    """The cells in which the methods of a class, and of those that it derives from, were defined."""
    names = {
        getattr(member, "__wrapped__", member).__code__.co_filename
        for base in cls.__mro__
        if base.__module__ == "__main__"
        for member in vars(base).values()
        if inspect.isfunction(getattr(member, "__wrapped__", member))
    }
    texts = {name: "".join(linecache.getlines(name)) for name in sorted(names) if not os.path.exists(name)}
    return [CellSource(name, text, number_of_input(text)) for name, text in texts.items() if text]
