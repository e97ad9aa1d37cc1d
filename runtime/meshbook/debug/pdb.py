"""pdb as it runs on a rank: its terminal is a `Console`, whose other end is a person at some notebook.

It stops where it is told to, not at the next line; it never touches SIGINT; KeyboardInterrupt at its prompt is raised
in the user's code, rather than swallowed. Stepping does not enter the runtime or IPython.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import bdb
import builtins
import contextlib
import ctypes
import pdb
import re
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, cast

from meshbook.source.location import cell_label, is_runtimes_code, is_users_code, name_place

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from meshbook.debug.rank_debugger import RankDebugger

PROMPT = "(Pdb) "
COMPLETIONS_MAX = 100
TEXT_MAX_CHARS = 100_000
"""The size from which on one command's output is cut."""

_SKIPPED = ("meshbook", "meshbook.*", "IPython", "IPython.*", "asyncio", "asyncio.*")
_LAST_NAME = re.compile(r"[\w.]*$")


class Console:
    """The terminal: pdb writes to it, and reads a line whenever ``ask(text, prompt)`` returns one."""

    encoding = "utf-8"

    def __init__(self, ask: Callable[[str, str], str]) -> None:
        self._ask = ask
        self._written: list[str] = []

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the text is taken with the next prompt."""

    def isatty(self) -> bool:
        return False

    def take(self) -> str:
        """Return the text that was written since the last time."""
        text, self._written = "".join(self._written), []
        return text if len(text) <= TEXT_MAX_CHARS else f"{text[:TEXT_MAX_CHARS]}\n... ({len(text):,} characters)\n"

    def readline(self) -> str:
        body, end, prompt = self.take().rpartition("\n")
        return f"{self._ask(body + end, prompt)}\n"


class RankPdb(pdb.Pdb):
    """The debugger of one thread that stops. ``host`` gets each stay at the prompt, and each of its questions."""

    def __init__(self, host: RankDebugger) -> None:
        self.console = Console(lambda text, prompt: host.ask(self, text, prompt))
        terminal = cast(IO[str], self.console)
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, skip=_SKIPPED, readrc=False)
        self.prompt = PROMPT
        self._is_outside = False
        """Whether the runtime's code surrounds the user's where it steps now."""
        self.why = ""
        """The exception of a post-mortem."""
        self.stays = 0
        """The number of its prompts that are open: one in a statement that was typed at another."""
        self._host = host

    def stop_at(self, frame: FrameType) -> TraceFunction | None:
        """Open the prompt at ``frame``, now; returns the trace function with which to go on, None for none.

        Raises: BdbQuit if the person quits, KeyboardInterrupt.
        """
        sys.settrace(None)
        self.reset()
        self._is_outside = False
        each: FrameType | None = frame
        while each is not None and not is_runtimes_code(each.f_code):
            each.f_trace = self.trace_dispatch
            self.botframe: FrameType | None = each
            each = each.f_back
        self.interaction(frame, None)
        if self.quitting:
            raise bdb.BdbQuit
        if self.stoplineno == -1 and not self.breaks:
            return None
        sys.settrace(self.trace_dispatch)
        return self.trace_dispatch

    def setup(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        """A post-mortem begins at the innermost line of the user's own code, not in the depths of a library."""
        super().setup(frame, traceback)
        own = [index for index, (each, _) in enumerate(self.stack) if is_users_code(each.f_code)]
        if traceback is not None and own:
            self.curindex = own[-1]
            self.curframe = self.stack[self.curindex][0]
            with contextlib.suppress(AttributeError):  # a property, in later versions
                self.curframe_locals = self.curframe.f_locals

    def interaction(self, frame: FrameType | None, tb: TracebackType | None) -> None:
        place = _place_of(frame) if tb is None else _place_of_error(tb)
        with self._host.stay(self, place, frame):
            self.stays += 1
            try:
                super().interaction(frame, tb)
            finally:
                self.stays -= 1
                self.forget()

    # ---- stepping: IPython runs each statement of a cell as a module of its own ----------------------------------

    def stop_here(self, frame: FrameType) -> bool:
        if self._is_outside and not is_users_code(frame.f_code):
            return False
        return bool(super().stop_here(frame))

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if _is_statement(frame):
            self.botframe, self._is_outside = frame, False  # its first line follows
        else:
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: object) -> None:
        if _is_statement(frame):
            self._is_outside = True
            self.set_step()
        else:
            self._is_outside = frame is self.botframe
            super().user_return(frame, return_value)

    def _cmdloop(self) -> None:
        self.cmdloop()

    def default(self, line: str) -> None:
        """Run a statement; assignments to a function's variables hold at once."""
        super().default(line)
        frame = self.curframe
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))  # until Python 3.12

    def complete_names(self, text: str) -> list[str]:
        """Return the names that complete the last word of ``text``: in the current frame, attributes, commands."""
        last = _LAST_NAME.search(text)
        word = last[0] if last else ""
        owner, dot, start = word.rpartition(".")
        if not dot:
            assert self.curframe is not None
            names = {*self.curframe_locals, *self.curframe.f_globals, *vars(builtins)}
            if word == text.strip():
                names |= {name[3:] for name in dir(self) if name.startswith("do_")}
            return sorted(name for name in names if name.startswith(word))
        try:
            value = eval(owner, self.curframe.f_globals, self.curframe_locals)  # type: ignore[union-attr]
            return sorted(f"{owner}.{name}" for name in dir(value) if name.startswith(start))
        except Exception:
            return []

    def do_clear(self, arg: str) -> bool | None:
        """Clear all breakpoints without a question, which pdb would ask at the process's own stdin."""
        if arg:
            return super().do_clear(arg)
        self.clear_all_breaks()
        return None

    do_cl = do_clear

    # ---- commands that cannot work here -------------------------------------------------------------------------

    def do_run(self, arg: str) -> None:
        """The rank's input: it runs the lines that the notebook sends."""
        self.error("not available on a rank: run the cell again in the notebook")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """It would read from the process's own stdin."""
        self.error("not available on a rank: type statements at this prompt, after ! where needed")

    do_debug = do_interact


def _is_statement(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and cell_label(frame.f_code.co_filename) is not None


def _place_of(frame: FrameType | None) -> str:
    return "" if frame is None else name_place(frame.f_code.co_filename, frame.f_lineno)


def _place_of_error(tb: TracebackType | None) -> str:
    tb = getattr(tb, "__traceback__", tb)  # from Python 3.13 on it may be the exception
    entries = []
    while tb is not None:
        entries.append((tb.tb_frame.f_code, tb.tb_lineno))
        tb = tb.tb_next
    code, line = ([entry for entry in entries if is_users_code(entry[0])] or entries)[-1]
    return name_place(code.co_filename, line)
