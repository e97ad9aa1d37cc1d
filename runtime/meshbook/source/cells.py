"""What a cell is called where Python wants a file name, how its lines are numbered, and the source of what it defines.

The code that reaches a rank stood below the line of a magic in the notebook. Its lines keep the numbers that they have
there, and its source is known to `linecache`, so that tracebacks, warnings, `inspect.getsource` and debuggers find it.
Functions that a notebook defines travel with theirs: no file on the rank has it.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

_labels: dict[str, str] = {}
_NAME = re.compile(r"<cell (?:(\d{1,7})(?: [0-9a-f]{8})?|[0-9a-f]{8})>")


def cell_file_name(source: str, cell_number: int | None) -> str:
    """The name to compile ``source`` under: ``<cell 7>``, or a longer one when another cell 7 has that name.

    source: the cell's text, blank lines in place of what stood above it. Equal on all ranks that run the same cells.
    """
    digest = hashlib.sha1(source.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()[:8]
    if cell_number is None:
        return f"<cell {digest}>"
    name = f"<cell {cell_number}>"
    if name in linecache.cache and "".join(linecache.getlines(name)) != "".join(_lines(source)):
        name = f"<cell {cell_number} {digest}>"
    return name


def add_cell(source: str, cell_number: int | None, name: str = "") -> str:
    """Make the source known to Python; returns its file name, `cell_file_name` unless another is given."""
    name = name or cell_file_name(source, cell_number)
    lines = _lines(source)
    linecache.cache[name] = (len(source), None, lines, name)  # no modification time: it is never re-read from disk
    inspect.modulesbyfile[name] = "__main__"  # else it looks through all modules, 5 ms for each frame of a traceback
    _labels[name] = "a cell" if cell_number is None else f"cell {cell_number}"
    return name


def cell_label(file_name: str) -> str | None:
    """``cell 7`` or ``a cell`` for the name of a cell's file, None for any other file."""
    return _labels.get(file_name)


def is_cell_name(file_name: str) -> bool:
    """Whether a file name stands for a cell, of this process or of another."""
    return file_name in _labels or _NAME.fullmatch(file_name) is not None


def name_line(file_name: str, line: int | None) -> str:
    """``cell 7, line 3``; empty when the file is no cell. Understands the names that other processes gave, and those
    that the kernel of this process gives its own cells."""
    label = cell_label(file_name)
    if label is None and (found := _NAME.fullmatch(file_name)) is not None:
        label = f"cell {found[1]}" if found[1] else "a cell"
    if label is None and (known := linecache.cache.get(file_name)) is not None and len(known) == 4 and known[1] is None:
        number = number_of_input("".join(known[2]))  # without a time of modification it is of no file
        label = None if number is None else f"cell {number}"
    if label is None:
        return ""
    return label if line is None else f"{label}, line {line}"


def number_of_input(source: str) -> int | None:
    """The number of the last cell of this notebook with this text, as IPython's list of inputs tells it."""
    inputs = vars(sys.modules["__main__"]).get("In")
    if not isinstance(inputs, list):
        return None
    for number in range(len(inputs) - 1, 0, -1):
        if isinstance(inputs[number], str) and inputs[number].strip() == source.strip():
            return number
    return None


def _lines(source: str) -> list[str]:
    return [f"{line}\n" for line in source.splitlines()]


def text_only_here(name: str) -> str:
    """The text of what was compiled under ``name``, if only this process has it; else empty."""
    return "" if Path(name).exists() else "".join(linecache.getlines(name))


def learn_source(name: str, text: str) -> None:
    """On a rank: know the text."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


class CellSource(NamedTuple):
    """A cell. file_name: under which its code was compiled. number: None where it is not known."""

    file_name: str
    text: str
    number: int | None


def sources_of(*values: object) -> list[CellSource]:
    """The cells in which functions, and the methods of classes and of instances, were defined, and what these call."""
    names: set[str] = set()
    seen, left = set[int](), list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        function = inspect.getattr_static(value, "__wrapped__", value)  # without code of the user's
        if inspect.isfunction(function):
            if function.__module__ == "__main__":
                names.add(function.__code__.co_filename)
                found = (function.__globals__.get(name) for name in function.__code__.co_names)
                left += [each for each in found if inspect.isfunction(each) or isinstance(each, type)]
        else:
            kind = value if isinstance(value, type) else type(value)
            own = [base for base in kind.__mro__ if base.__module__ == "__main__"]
            members = [
                inspect.getattr_static(each, "__wrapped__", each) for base in own for each in vars(base).values()
            ]
            left += [each for each in members if inspect.isfunction(each)]
    texts = {name: "".join(linecache.getlines(name)) for name in sorted(names) if not os.path.exists(name)}
    return [CellSource(name, text, number_of_input(text)) for name, text in texts.items() if text]
