"""The places of code in words a person knows: the names of cells and files, frames, and the doing of a thread.

The code of a cell that reaches a rank stood below the line of a magic in the notebook. Its lines keep the numbers that
they have there, and its source is known to `linecache`, so that tracebacks, warnings, `inspect.getsource` and debuggers
find it. Functions that a notebook defines travel with theirs: no file on the rank has it.

A thread's doing reads ``in all_reduce (cell 7, line 5)``. Its frames are read from outside while it runs on, so a line
may be one step old. No torch here.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import NamedTuple

_labels: dict[str, str] = {}
_NAME = re.compile(r"<cell (?:(\d{1,7})(?: [0-9a-f]{8})?|[0-9a-f]{8})>")


def cell_file_name(source: str, cell_number: int | None) -> str:
    """Return the name to compile ``source`` under: ``<cell 7>``, or a longer one when another cell 7 has that name.

    source: the cell's text, blank lines in place of the lines above it. Equal on all ranks that run the same cells.
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


class Program(ModuleType):
    """The main module of a program that runs on a rank, where else a rank's cells have theirs."""


def add_script(path: str, source: bytes, label: str) -> None:
    """Make the source of a program known to Python under its path, wherever it was read; ``label`` names it."""
    lines = importlib.util.decode_source(source).splitlines(keepends=True)
    linecache.cache[path] = (len(source), None, lines, path)
    _labels[path] = label


def cell_label(file_name: str) -> str | None:
    """Return ``cell 7`` or ``a cell`` for the name of a cell's file, None for any other file."""
    return _labels.get(file_name)


def name_line(file_name: str, line: int | None) -> str:
    """Return ``cell 7, line 3``; empty when the file is no cell.

    Names that other processes gave are understood, and those that this process's kernel gives its own cells.
    """
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
    """Return the number of the last cell of this notebook with this text, by IPython's list of inputs."""
    inputs = vars(sys.modules["__main__"]).get("In")
    if not isinstance(inputs, list):
        return None
    for number in range(len(inputs) - 1, 0, -1):
        if isinstance(inputs[number], str) and inputs[number].strip() == source.strip():
            return number
    return None


def _lines(source: str) -> list[str]:
    return [f"{line}\n" for line in source.splitlines()]


class CellSource(NamedTuple):
    """A cell. file_name: under which its code was compiled. number: None where it is not known."""

    file_name: str
    text: str
    number: int | None


def sources_of(*values: object) -> list[CellSource]:
    """Return the cells that define functions, and the methods of classes and instances, with those of their callees."""
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
    return [source for source in map(source_of, sorted(names)) if source.text]


def source_of(file_name: str) -> CellSource:
    """Return the cell that was compiled under this name; without text for a file, which ranks may read themselves."""
    text = "" if Path(file_name).exists() else "".join(linecache.getlines(file_name))
    return CellSource(file_name, text, number_of_input(text) if text else None)


MAX_FRAMES = 100
"""Frames of a thread that are kept: the innermost ones, and the outermost."""
MAX_THREADS = 64

USER, LIBRARY, RUNTIME = "user", "library", "runtime"
"""The owners of the code in a file."""
NATIVE = "native"
"""The kind of code that is no Python."""


class Frame(NamedTuple):
    """A call of a stack."""

    function: str
    file: str
    """The file; for native code the library that it is in."""
    line: int
    place: str
    """``cell 7, line 5``, ``train.py:41``."""
    kind: str
    """The owner of the code: ``user``, ``library`` or ``runtime``; ``native`` for code that is no Python."""
    source: str = ""
    """The line's text, where it is known."""


class ThreadStack(NamedTuple):
    """The stack of one thread."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def users(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, innermost first."""
        return tuple(frame for frame in self.frames if frame.kind == USER)


def cut_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames, `MAX_FRAMES` of them at most; endless recursion has more."""
    frames = tuple(frames)
    half = MAX_FRAMES // 2
    return frames if len(frames) <= MAX_FRAMES else frames[:half] + frames[-half:]


SOURCE_CHARS = 160
"""The most that is shown of a line."""

PACKAGE = f"{Path(str(sys.modules['meshbook'].__file__)).parent}/"
"""The folder of our own modules: their frames are not the user's."""
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {PACKAGE}
)
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")
_CALLING = ("_call_impl", "_wrapped_call_impl", "decorate_context")
_CALLERS = ("/torch/nn/modules/module.py", "/torch/utils/_contextlib.py")
"""The functions of torch between a call of a module and its ``forward``, and their files."""
_COLLECTIVES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")


def describe_frame(frame: FrameType | None) -> str:
    """Describe the activity of the thread with innermost frame ``frame`` by the innermost line of the user's own code.

    Returns: ``in all_reduce (cell 7, line 5)``, ``in time.sleep (train.py:41)``, ``at train.py:41`` where no call can
    be named, ``in the runtime (form)`` where no code of the user's runs, ``idle`` for no frame at all.
    """
    frame, called = _users_frame(frame)
    collective = _name_collective(called)
    if frame is None:
        ours = [each.f_code.co_name for each in called if is_runtimes_code(each.f_code)]
        return f"in {collective}" if collective else f"in the runtime ({ours[0]})" if ours else "idle"
    place = name_place(frame.f_code.co_filename, frame.f_lineno)
    operation = collective or name_running_call(frame)
    return f"in {operation} ({place})" if operation else f"at {place}"


def _users_frame(frame: FrameType | None) -> tuple[FrameType | None, list[FrameType]]:
    """Return the innermost frame of the user's own code, and the frames that it has called, innermost first."""
    called: list[FrameType] = []
    while frame is not None and not is_users_code(frame.f_code):
        called.append(frame)
        frame = frame.f_back
    return frame, called


class Activity(enum.Enum):
    """The kind of code that a thread runs."""

    IDLE = enum.auto()
    CODE = enum.auto()
    """Return the user's frame, or one that it has called."""
    COLLECTIVE = enum.auto()
    """A function of torch.distributed."""
    RUNTIME = enum.auto()
    """Ours alone."""
    PAUSED = enum.auto()
    """No code, since a debugger holds the thread."""


def frame_activity(frame: FrameType | None) -> Activity:
    """Return the kind of code that `describe_frame` describes."""
    frame, called = _users_frame(frame)
    if _name_collective(called):
        return Activity.COLLECTIVE
    return Activity.RUNTIME if frame is None else Activity.CODE


def users_place(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own code: ``cell 7, line 5``; nothing where none runs."""
    frame, _ = _users_frame(frame)
    return "" if frame is None else name_place(frame.f_code.co_filename, frame.f_lineno)


def name_place(filename: str, line: int) -> str:
    """Return ``cell 7, line 5`` for a cell, ``train.py:41`` for a file."""
    return name_line(filename, line) or f"{Path(filename).name}:{line}"


def make_frame(function: str, file: str, line: int, source: str = "") -> Frame:
    """Return a frame of Python code."""
    return Frame(function, file, line, name_place(file, line), kind_of_file(file), source.strip()[:SOURCE_CHARS])


def is_users_code(code: CodeType) -> bool:
    """Whether the code stands in a cell or in a file of the user's: not in Python's, ours, or an installed package."""
    return kind_of_file(code.co_filename) == USER


def kind_of_file(filename: str) -> str:
    """Return the owner of a file's code: `USER`, `LIBRARY` or `RUNTIME`; by its path, so for other hosts' files too."""
    if filename in _labels or _NAME.fullmatch(filename) is not None:  # a cell, of this process or of another
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
    """Return the torch.distributed function among library frames, innermost first, or nothing."""
    for frame in called:
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            return code.co_name
    return ""


def name_running_call(frame: FrameType) -> str:
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
    """Return ``time.sleep`` for ``time.sleep(60)``, ``fit`` for ``build(x).fit(y)``, nothing for other expressions."""
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
    """Take the frames of this package out of the exception's traceback, and those in which torch calls modules."""
    kept: TracebackType | None = None
    for entry in reversed(list(traceback_entries(error.__traceback__))):
        if not (is_runtimes_code(entry.tb_frame.f_code) or _calls_modules(entry.tb_frame.f_code)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept


def _calls_modules(code: CodeType) -> bool:
    return code.co_name in _CALLING and code.co_filename.endswith(_CALLERS)


def show_without_own_frames(error: BaseException) -> None:
    """Have IPython draw the traceback of ``error``, when it is shown, as `drop_own_frames` leaves it."""

    def render() -> list[str]:
        names = (entry.tb_frame.f_globals for entry in traceback_entries(error.__traceback__))
        shell = next(each["get_ipython"] for each in names if "get_ipython" in each)()
        drop_own_frames(error)
        return list(shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__))

    vars(error)["_render_traceback_"] = render


def traceback_entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the frames of a traceback, the outermost first."""
    while entry is not None:
        yield entry
        entry = entry.tb_next
