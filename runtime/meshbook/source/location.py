"""What a thread is doing, in a few words a person can place: ``in all_reduce (cell 7, line 5)``.

Frames are read from outside while the thread runs on, so a line may be one step old. No torch here.
"""

from __future__ import annotations

import enum
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from meshbook.source.cells import is_cell_name, name_line
from meshbook.source.frames import LIBRARY, RUNTIME, USER, Frame

SOURCE_CHARS = 160
"""Of a line that is shown."""

PACKAGE = f"{Path(str(sys.modules['meshbook'].__file__)).parent}/"
"""Where our own modules are: their frames are not the user's."""
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {PACKAGE}
)
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")
_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")


def describe_frame(frame: FrameType | None) -> str:
    """Say what the thread with innermost frame ``frame`` does, by the innermost line of the user's own code.

    Returns: ``in all_reduce (cell 7, line 5)``, ``in time.sleep (train.py:41)``, ``at train.py:41`` where no call can
    be named, ``in the runtime (form)`` where no code of the user's runs, ``idle`` for no frame at all.
    """
    called: list[FrameType] = []
    while frame is not None and not is_users_code(frame.f_code):
        called.append(frame)
        frame = frame.f_back
    collective = _name_collective(called)
    if frame is None:
        return f"in {collective}" if collective else _describe_runtime(called)
    place = name_place(frame.f_code.co_filename, frame.f_lineno)
    operation = collective or _name_running_call(frame)
    return f"in {operation} ({place})" if operation else f"at {place}"


class Activity(enum.Enum):
    """What kind of code a thread runs."""

    IDLE = enum.auto()
    CODE = enum.auto()
    """The user's, or what that has called."""
    COLLECTIVE = enum.auto()
    """A function of torch.distributed."""
    RUNTIME = enum.auto()
    """Ours alone."""
    PAUSED = enum.auto()
    """None, since a debugger holds it."""


def frame_activity(frame: FrameType | None) -> Activity:
    """The kind of code that `describe_frame` describes."""
    called: list[FrameType] = []
    while frame is not None and not is_users_code(frame.f_code):
        called.append(frame)
        frame = frame.f_back
    if _name_collective(called):
        return Activity.COLLECTIVE
    return Activity.RUNTIME if frame is None else Activity.CODE


def users_place(frame: FrameType | None) -> str:
    """The innermost line of the user's own code: ``cell 7, line 5``; nothing where none runs."""
    while frame is not None and not is_users_code(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else name_place(frame.f_code.co_filename, frame.f_lineno)


def name_place(filename: str, line: int) -> str:
    """``cell 7, line 5`` for a cell, ``train.py:41`` for a file."""
    return name_line(filename, line) or f"{Path(filename).name}:{line}"


def make_frame(function: str, file: str, line: int, source: str = "") -> Frame:
    """A frame of Python code."""
    return Frame(function, file, line, name_place(file, line), kind_of_file(file), source.strip()[:SOURCE_CHARS])


def is_users_code(code: CodeType) -> bool:
    """Whether the code stands in a cell or in a file of the user's: not in Python's, ours, or an installed package."""
    return kind_of_file(code.co_filename) == USER


def kind_of_file(filename: str) -> str:
    """Whose code stands in a file: `USER`, `LIBRARY` or `RUNTIME`; also for files of another host, by their paths."""
    if is_cell_name(filename):
        return USER
    if filename.startswith(PACKAGE) or ("/meshbook/" in filename and "/site-packages/" in filename):
        return RUNTIME
    if filename.startswith(("<", *_LIBRARIES)) or _FOREIGN.search(filename):
        return LIBRARY
    return USER


def is_runtimes_code(code: CodeType) -> bool:
    """Whether the code is ours."""
    return code.co_filename.startswith(PACKAGE)


def _name_collective(called: list[FrameType]) -> str:
    """The torch.distributed function among library frames ordered innermost first, or nothing."""
    for frame in called:
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            return code.co_name
    return ""


def _describe_runtime(called: list[FrameType]) -> str:
    ours = [frame.f_code.co_name for frame in called if frame.f_code.co_filename.startswith(PACKAGE)]
    return f"in the runtime ({ours[0]})" if ours else "idle"


def _name_running_call(frame: FrameType) -> str:
    """Name the function that the frame waits in, as the source text of the running instruction spells it."""
    if "." in frame.f_code.co_name:  # no name of a function: the frame stands for an operation
        return frame.f_code.co_name
    positions = getattr(frame.f_code, "co_positions", None)  # from Python 3.11 on
    if positions is None or frame.f_lasti < 0:
        return ""
    line, end_line, column, end_column = next(islice(positions(), frame.f_lasti // 2, None))
    if None in (line, column, end_column) or line != end_line:
        return ""
    source = linecache.getline(frame.f_code.co_filename, line).encode()[column:end_column]
    return name_call(source.decode(errors="replace"))


def name_call(expression: str) -> str:
    """``time.sleep`` for ``time.sleep(60)``, ``fit`` for ``build(x).fit(y)``, nothing for what is no call."""
    if not expression.endswith(")"):
        return ""
    depth = 0
    for index in range(len(expression) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(expression[index], 0)
        if depth == 0:
            name = re.search(r"[A-Za-z_][\w.]*$", expression[:index])
            return name[0] if name else ""
    return ""


def drop_own_frames(error: BaseException) -> None:
    """Take the frames of this package out of the exception's traceback."""
    kept: TracebackType | None = None
    for entry in reversed(list(traceback_entries(error.__traceback__))):
        if not entry.tb_frame.f_code.co_filename.startswith(PACKAGE):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept


def traceback_entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    """The frames of a traceback, the outermost first."""
    while entry is not None:
        yield entry
        entry = entry.tb_next
