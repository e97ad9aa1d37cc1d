"""What a thread is doing, in a few words a person can place: ``in all_reduce (cell 7, line 5)``.

Frames are read from outside while the thread runs on, so a line may be one step old. No torch here.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

_LIBRARIES = tuple(
    {
        *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        f"{Path(__file__).parent}/",
    }
)
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_CELL_FILE = re.compile(r"<(?:ipython-input-|cell[ -]?)(\d+)[^>]*>")
_WRAPPERS = frozenset({"wrapper", "inner", "__call__", "_call_impl", "_wrapped_call_impl"})


def describe_frame(frame: FrameType | None) -> str:
    """Say what the thread with innermost frame ``frame`` does, by the innermost line of the user's own code.

    Returns: ``in all_reduce (cell 7, line 5)``, ``in time.sleep (train.py:41)``, ``at train.py:41`` where no call can be
    named, or ``idle`` when no code of the user's runs.
    """
    called: list[FrameType] = []
    while frame is not None and not _is_users(frame.f_code):
        called.append(frame)
        frame = frame.f_back
    if frame is None:
        return "idle"
    place = name_place(frame.f_code.co_filename, frame.f_lineno)
    operation = _name_operation(called) or _called_from_c(frame)
    return f"in {operation} ({place})" if operation else f"at {place}"


def name_place(filename: str, line: int) -> str:
    """``cell 7, line 5`` for a cell, ``train.py:41`` for a file."""
    if cell := _CELL_FILE.match(filename):
        return f"cell {cell[1]}, line {line}"
    return f"{Path(filename).name}:{line}"


def _is_users(code: CodeType) -> bool:
    filename = code.co_filename
    if _CELL_FILE.match(filename):
        return True
    return not filename.startswith(("<", *_LIBRARIES)) and "/site-packages/" not in filename


def _name_operation(called: list[FrameType]) -> str:
    """Name what the user's line called, from library frames ordered innermost first: the collective if there is one."""
    for frame in called:
        if frame.f_code.co_filename.endswith(_COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
    for frame in reversed(called):
        if frame.f_code.co_name not in _WRAPPERS:
            return frame.f_code.co_name
    return ""


def _called_from_c(frame: FrameType) -> str:
    """Name the C function that the user's frame itself is in, by the source text of the running instruction."""
    positions = getattr(frame.f_code, "co_positions", None)  # Python 3.11+
    if positions is None or frame.f_lasti < 0:
        return ""
    line, end_line, column, end_column = next(islice(_as_tuples(positions()), frame.f_lasti // 2, None))
    if None in (line, end_line, column, end_column):
        return ""
    source = linecache.getline(frame.f_code.co_filename, line).encode()
    text = source[column : end_column if line == end_line else None].decode(errors="replace")
    call = re.match(r"(?:await\s+)?([A-Za-z_][\w.]*)\(", text)
    return call[1] if call else ""


def _as_tuples(positions: Iterator[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    return positions
