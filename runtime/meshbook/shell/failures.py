"""Failures of user code: an exception becomes a `Failure`, its traceback drawn by IPython without our own frames.

Frames are dropped from the exception itself too, so that post-mortem debugging and the notebook see the same ones.

IPython draws a traceback in a third of its usual time here (`QuickTracebacks`). A rank that failed is silent while it
draws, and eight draw on the cores of one machine, so that their failures come apart. For each frame stack_data makes a
class of lexers, whose expressions are compiled; and ``inspect`` walks all modules to find out that the file of a cell
is none of theirs.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import builtins
import gc
import inspect
import os
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import pygments
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.ultratb import AutoFormattedTB
from pygments.lexers.python import PythonLexer

from meshbook.errors import Failure, FailureKind, kind_of
from meshbook.errors.advice import advice
from meshbook.source.location import drop_own_frames, name_line, traceback_entries

QUIT = "ended by q at its prompt"
EVALUE_MAX_CHARS = 4096
NAME_MAX_CHARS = 200
"""The longest name of an exception's class."""
TRACEBACK_MAX_PARTS = 60
"""IPython gives one part per frame; the middle of longer tracebacks is left out."""

_COLOUR_RESET = "\x1b[0m"
_ExceptionGroup: type[BaseException] | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


def describe_error(shell: InteractiveShell, error: BaseException, *, rank: int, host: str, ran: bool) -> Failure:
    """Build the failure; never raises, even if the exception's class is broken.

    ran: False for an error in the cell itself (its syntax), which has no frames to show.
    """
    try:
        return _describe(shell, error, rank, host, ran)
    except BaseException as problem:
        why = f"(it cannot be shown: {type(problem).__name__} in its own code)"
        return Failure(rank, host, "Exception", why, (f"Exception: {why}",), "")


def _describe(shell: InteractiveShell, error: BaseException, rank: int, host: str, ran: bool) -> Failure:
    drop_own_frames(error)
    if not ran:
        error.__traceback__ = None
    shown, kind = error, kind_of(error)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        text = f"sys.exit({code}) ended the cell, not the rank. End the ranks with: {advice().stop}"
        # an early end that was meant needs no frames; a code of failure, as of argparse, does
        if error.code in (None, 0) or isinstance(error.code, str):
            shown, kind = SystemExit(text), FailureKind.EXITED
        else:
            shown = SystemExit(text).with_traceback(error.__traceback__)
    elif isinstance(error, BdbQuit):  # without its frames, since the person has quit the debugger
        error.args = error.args or (QUIT,)
        shown = type(error)(*error.args)
    # the place that Python puts into the text of a syntax error is `Failure.where`
    value = error.msg if isinstance(error, SyntaxError) and isinstance(error.msg, str) else text_of(shown)
    return Failure(
        rank=rank,
        host=host,
        ename=str(type(error).__name__)[:NAME_MAX_CHARS],
        evalue=cut_text(value, EVALUE_MAX_CHARS),
        traceback=_limit(format_error(shell, shown)),
        where=_where(error),
        exception=error,
        kind=kind,
    )


def format_error(shell: InteractiveShell, error: BaseException) -> list[str]:
    """Return the parts of the traceback, as IPython draws it; never raises."""
    kind, frames = type(error), error.__traceback__
    try:
        if hasattr(error, "_render_traceback_"):
            return list(error._render_traceback_())
        if isinstance(error, IPythonUsageError):
            return [f"UsageError: {error}"]
        if isinstance(error, SyntaxError):
            entries: Any = traceback.extract_tb(frames)
            return list(shell.SyntaxTB.structured_traceback(kind, error, entries, tb_offset=0))
        # an interrupt is seldom looked at, and IPython's drawing takes up to a second
        if isinstance(error, KeyboardInterrupt) or _holds_group(error):
            return [part.rstrip("\n") for part in traceback.format_exception(kind, error, frames)]
        know_modules(frames)
        if frames is None:
            return list(shell.InteractiveTB.get_exception_only(kind, error))
        return list(shell.InteractiveTB.structured_traceback(kind, error, frames, tb_offset=0))
    except Exception:  # a class whose str() or repr() raises, a frame that cannot be inspected
        try:
            return [part.rstrip("\n") for part in traceback.format_exception(kind, error, frames)]
        except Exception:
            return [f"{kind.__name__}: {text_of(error)}"]


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a substitute where that raises."""
    try:
        return str(error)
    except BaseException as problem:
        return f"(its text cannot be had: str() raised {type(problem).__name__})"


def describe_briefly(error: BaseException) -> str:
    """Return ``ValueError: bad shard``, the first line of it."""
    return f"{type(error).__name__}: {text_of(error)}".rstrip(": \n").splitlines()[0][:200]


def cut_text(text: str, limit: int) -> str:
    """Keep the first ``limit`` characters, and say how many there were."""
    return text if len(text) <= limit else f"{text[:limit]}{_COLOUR_RESET} ... (cut; {len(text):,} characters in all)"


def keep_for_postmortem(error: BaseException) -> None:
    """Make the exception the last one, which debuggers look at."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def let_go_of_last_error(shell: InteractiveShell) -> bool:
    """Drop the references to the last exception's frames; the collector frees them. Returns: whether there were any."""
    kept = [vars(sys).pop(name, None) for name in ("last_value", "last_type", "last_traceback", "last_exc")]
    vars(shell.InteractiveTB).pop("tb", None)
    shell.SyntaxTB.last_syntax_error = None
    shell.last_execution_result = None
    return kept[0] is not None


def forget_last_error(shell: InteractiveShell) -> None:
    """Free the last exception's frames, and the tensors in them."""
    if let_go_of_last_error(shell):
        gc.collect()  # what drew the traceback left cycles around the frames


def _where(error: BaseException) -> str:
    """Return the innermost line of a cell in the traceback, or the line that the parser complains about."""
    for entry in reversed(list(traceback_entries(error.__traceback__))):
        if place := name_line(entry.tb_frame.f_code.co_filename, entry.tb_lineno):
            return place
    if isinstance(error, SyntaxError) and error.filename:
        return name_line(error.filename, error.lineno)
    return ""


def _holds_group(error: BaseException | None) -> bool:
    """Whether there is an exception group in the chain, which IPython cannot draw and Python can."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _ExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _limit(parts: list[str]) -> tuple[str, ...]:
    half = TRACEBACK_MAX_PARTS // 2
    if len(parts) > TRACEBACK_MAX_PARTS:
        parts = [*parts[:half], f"   ... {len(parts) - 2 * half} frames left out ...", *parts[-half:]]
    return tuple(cut_text(part, EVALUE_MAX_CHARS) for part in parts)


class _Lexer(PythonLexer):  # type: ignore[misc]
    """A lexer that marks the code being executed, by its spans in the text."""

    executing: Sequence[tuple[int, int]] = ()

    def get_tokens_unprocessed(self, text: str, *args: Any) -> Iterator[tuple[int, Any, str]]:
        for at, kind, value in super().get_tokens_unprocessed(text, *args):
            marked = any(start <= at < end for start, end in self.executing)
            yield at, kind.ExecutingNode if marked else kind, value


class QuickTracebacks(AutoFormattedTB):
    """IPython's tracebacks, whose lines of code are coloured here."""

    def get_records(self, *args: Any) -> Any:
        """Return the frames; stack_data looks for the colours of one only where it has none yet."""
        records = super().get_records(*args)
        for record in records:
            frame = getattr(record, "_sd", record)  # from IPython 9 on a record is around stack_data's
            formatter = getattr(getattr(frame, "options", None), "pygments_formatter", None)
            if formatter is not None and frame.scope:
                vars(frame)["_pygmented_scope_lines"] = _colour(frame, formatter)
        return records


def quicken_tracebacks(shell: InteractiveShell) -> None:
    """Have a shell draw its tracebacks faster; IPython 7, which has no stack_data, draws as before."""
    shell.InteractiveTB.__class__ = QuickTracebacks  # to make one takes other arguments in each version of IPython


def know_modules(entry: TracebackType | None) -> None:
    """Have ``inspect`` find the modules of frames without a search, which is in vain for code of cells."""
    known = vars(inspect)["modulesbyfile"]
    while entry is not None:
        name, module = entry.tb_frame.f_code.co_filename, entry.tb_frame.f_globals.get("__name__")
        if module in sys.modules:
            known.setdefault(name, module)
            known.setdefault(os.path.abspath(name), module)
        entry = entry.tb_next


def _colour(frame: Any, formatter: Any) -> tuple[int, list[str]]:
    """Return the number of the first line of a frame's function, and its lines in colours."""
    text, lexer = frame.source.asttext(), _Lexer(stripnl=False)
    code = text.get_text(frame.scope)
    if frame.executing.node and getattr(formatter.style, "for_executing_node", False):
        begin = text.get_text_range(frame.scope)[0]
        start, end = text.get_text_range(frame.executing.node)
        lexer.executing = [(start - begin, end - begin)]
    try:
        lines = str(pygments.highlight(code, lexer, formatter)).splitlines()
    except Exception:  # code that pygments cannot take is shown plain
        lines = code.splitlines()
    return frame.source.line_range(frame.scope)[0], lines
