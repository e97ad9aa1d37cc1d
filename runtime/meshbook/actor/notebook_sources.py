"""The source of a class that was defined in a notebook, for the tracebacks of the ranks to which it travels."""

from __future__ import annotations

import inspect
import linecache
import os
from typing import NamedTuple

from meshbook.cell_files import number_of_input


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
