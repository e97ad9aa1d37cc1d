"""IPython's tracebacks as they are, in a quarter of the time: what is made for each frame and error is made once.

A rank that failed is silent while it draws, and eight draw on the cores of one machine, so that their failures come
apart. For each frame stack_data makes a class of lexers, whose expressions are compiled; for each error IPython makes
a style and looks for the terminal's colours closest to it; and ``inspect`` walks all modules to find out that the
file of a cell is none of theirs.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import pygments
from pygments.formatters.terminal256 import Terminal256Formatter
from pygments.lexers.python import PythonLexer

from meshbook.concurrency.patches import patch

_STYLES = 8
"""Kept, with their colours; a shell uses one."""


class _Lexer(PythonLexer):  # type: ignore[misc]
    """Marks what is being executed, by the spans of it in the text."""

    executing: Sequence[tuple[int, int]] = ()

    def get_tokens_unprocessed(self, text: str, *args: Any) -> Iterator[tuple[int, Any, str]]:
        """As of any lexer."""
        for at, kind, value in super().get_tokens_unprocessed(text, *args):
            marked = any(start <= at < end for start, end in self.executing)
            yield at, kind.ExecutingNode if marked else kind, value


def quicken_tracebacks() -> None:
    """From now on IPython draws so in this process. IPython 7 does without stack_data, and stays as it is."""
    try:
        import stack_data
        from stack_data import core
    except ImportError:
        return
    patch(stack_data, "style_with_executing_node", functools.lru_cache(_STYLES)(core.style_with_executing_node))
    patch(core, "_pygmented_with_ranges", _highlight)
    patch(Terminal256Formatter, "_setup_styles", _remember_colours(Terminal256Formatter._setup_styles))


def know_modules(entry: TracebackType | None) -> None:
    """Have ``inspect`` find the modules of frames without a search, which is in vain for what cells define."""
    known = vars(inspect)["modulesbyfile"]
    while entry is not None:
        name, module = entry.tb_frame.f_code.co_filename, entry.tb_frame.f_globals.get("__name__")
        if module in sys.modules:
            known.setdefault(name, module)
            known.setdefault(os.path.abspath(name), module)
        entry = entry.tb_next


def _highlight(formatter: Any, code: str, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """The lines of ``code`` with the colours of the formatter's style."""
    lexer = _Lexer(stripnl=False)
    lexer.executing = ranges
    try:
        return str(pygments.highlight(code, lexer, formatter)).splitlines()
    except Exception:  # code that pygments cannot take is shown plain
        return code.splitlines()


def _remember_colours(set_up: Any) -> Any:
    known: dict[tuple[object, ...], dict[str, tuple[str, str]]] = {}

    @functools.wraps(set_up)
    def remembered(formatter: Any) -> None:
        key = (formatter.style, formatter.usebold, formatter.useunderline, formatter.useitalic)
        if key not in known:
            set_up(formatter)
            if len(known) < _STYLES:
                known[key] = formatter.style_string
        formatter.style_string = known.get(key, formatter.style_string)

    return remembered
