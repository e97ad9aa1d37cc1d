"""Lines of code that asked for operations: noted as they are issued, named in errors, and seen in stacks of ranks.

On a rank an operation runs below a frame that bears the name of the operation and the place of that line. So an
interrupt, a stack, a note on a hang and a profiler show where a rank is by the line of the notebook.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from meshbook.source.location import PACKAGE, name_line

T = TypeVar("T")

CodeLine: TypeAlias = tuple[str, int] | None
"""A line: the name of its file, and its number there."""

LinesOfUses: TypeAlias = Sequence[tuple[int, CodeLine]]
"""The lines that have asked for the operations of a batch, each with the index of its first operation."""

_SKIPPED = (PACKAGE, f"{torch.__path__[0]}/", "<frozen ")

_skipped: dict[str, bool] = {}
"""Whether a file is ours or torch's, by its name."""


def line_of_caller() -> CodeLine:
    """Return the innermost line that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        skipped = _skipped.get(name)
        if skipped is None:
            skipped = _skipped[name] = name.startswith(_SKIPPED)
        if not skipped:
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def name_code_line(place: CodeLine) -> str:
    """Return a line as people call it, ``cell 4, line 2``; empty where it is not known."""
    return name_line(*place) or f"{place[0]}, line {place[1]}" if place else ""


class NamedLine(NamedTuple):
    """A line that asked for something."""

    name: str
    """The line as people call it."""
    place: CodeLine
    """The line as ranks are told of it."""


def as_named_line(place: CodeLine) -> NamedLine:
    return NamedLine(name_code_line(place), for_ranks([place])[0][1])


def for_ranks(places: Iterable[CodeLine]) -> LinesOfUses:
    """Return the lines of operations as ranks are told of them: cells by number, which ranks know to read."""
    names: dict[str, str] = {}
    found: list[tuple[int, CodeLine]] = []
    last: CodeLine | bool = True
    for index, place in enumerate(places):
        if place != last:
            last = place
            if place is not None and place[0] not in names:
                label = name_line(place[0], None)
                names[place[0]] = f"<{label}>" if label.startswith("cell ") else place[0]
            found.append((index, None if place is None else (names[place[0]], place[1])))
    return found


def each_line(lines: LinesOfUses, count: int) -> Iterator[CodeLine]:
    """Yield the line of each of ``count`` operations."""
    ends = [*(index for index, _ in lines[1:]), count]
    for (begin, place), end in zip(lines, ends, strict=False):  # without operations there is an end, and no line
        yield from itertools.repeat(place, end - begin)


@functools.lru_cache(maxsize=4096)
def frame_at(place: CodeLine, operation: str) -> Callable[..., Any]:
    """Return a function that calls another, ``f(function, *args)``, in a frame with this name and place."""
    if place is None:
        return _call
    code: CodeType = _call.__code__.replace(co_filename=place[0], co_firstlineno=place[1] - 1, co_name=operation)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=operation)
    return FunctionType(code, {})


def _call(function: Callable[..., T], *args: Any) -> T:
    return function(*args)  # one line below the first
