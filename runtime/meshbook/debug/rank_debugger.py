"""breakpoint() on a rank: the thread that reaches it stops at a prompt, whose lines come from the controller.

    stopped thread   pdb writes and asks ──> `AtPrompt`, told to the controller among the rank's output, in its order
    control thread   `RankDebugger.command(number, line)` ──> the thread takes it for a line that was typed

Each prompt has a number, and a line is for one number only: a line that was typed for an earlier prompt is never run at
a later one. A stopped rank waits for as long as it takes, also without a controller: the next one finds its prompt by
asking.

``input()`` and ``getpass()`` wait at such a prompt, too; its line is the answer.

Any thread of the rank may stop, one at a time; the others wait. To debug code outside of cells and calls (an actor's
endpoint) needs nothing but a thread and, while it runs, the right `refusal`.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import itertools
import os
import pdb
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from meshbook.concurrency.background import refuse_in_peek
from meshbook.concurrency.patches import patch
from meshbook.debug.pdb import COMPLETIONS_MAX, RankPdb
from meshbook.errors import PromptRefused, UsageError
from meshbook.source.location import is_runtimes_code, is_users_code, users_place
from meshbook.wire.messages import ASKS_LINE, ASKS_SECRET, END_OF_INPUT, AtPrompt

if TYPE_CHECKING:
    from _typeshed import TraceFunction


class _Stop:
    """A thread at its prompt, from one line of code until it goes on."""

    def __init__(self, place: str, frame: FrameType | None) -> None:
        self.place = place
        self.thread = threading.get_ident()
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.interrupted = False
        self.prompt: AtPrompt | None = None
        """The prompt at which it waits for a line, while it does."""


class RankDebugger:
    """The debugger of a rank. Without `begin`, and while there is a `refusal`, breakpoints raise instead."""

    def __init__(self) -> None:
        self.refusal = "nobody could type at its prompt"
        """The reason why no prompt can be opened now; empty while one can."""
        self._tell: Callable[[AtPrompt], None] = lambda prompt: None
        self._pid, self._main = os.getpid(), threading.get_ident()
        self._turn = threading.RLock()
        self._stop: _Stop | None = None
        self._numbers = itertools.count(1)
        self._own = threading.local()

    def begin(self, tell: Callable[[AtPrompt], None] | None = None) -> None:
        """Take over the hooks that open debuggers, on the rank's main thread. tell: gets each prompt, on its thread."""
        self._pid, self._main = os.getpid(), threading.get_ident()
        if tell is not None:
            self._tell, self.refusal = tell, ""
        sys.breakpointhook = self._on_breakpoint
        _take_over_prompts(self)

    # ---- the thread that stops ----------------------------------------------------------------------------------

    def stop(self, frame: FrameType) -> TraceFunction | None:
        """Open a prompt at ``frame`` and return when the person lets it go on: with the trace function, if any.

        Raises: UsageError where no prompt can be opened, BdbQuit, KeyboardInterrupt.
        """
        self._check("breakpoint()")
        return self._debugger("").stop_at(frame)

    def post_mortem(self, traceback: TracebackType | None, why: str = "an exception") -> None:
        """Open a prompt on the frames of a traceback. Raises: UsageError, KeyboardInterrupt."""
        self._check("a post-mortem")
        debugger = self._debugger(why)
        debugger.reset()
        debugger.interaction(None, traceback)

    def read_line(self, prompt: str = "", asks: str = ASKS_LINE) -> str:
        """Return the line that the person types at a question of the program.

        Raises: PromptRefused where nobody can, EOFError if the person gives no answer, KeyboardInterrupt, PeekRefused.
        """
        refuse_in_peek(asks)
        if os.getpid() != self._pid:
            raise PromptRefused(asks, "a process that the rank has forked asks nobody")
        if self.refusal:
            raise PromptRefused(asks, self.refusal)
        sys.stdout.flush()
        with self._turn:
            stop = _Stop(users_place(sys._getframe(1)) or "the rank", None)
            outer, self._stop = self._stop, stop
            stop.prompt = AtPrompt(next(self._numbers), stop.place, "", prompt, "", asks)
            try:
                self._tell(stop.prompt)
                line = stop.lines.get()
            finally:
                self._stop = outer
                self._tell(AtPrompt(next(self._numbers), "", "", "", ""))
        if line is None:
            raise KeyboardInterrupt
        if line == END_OF_INPUT:
            raise EOFError(f"no answer to {asks}")
        return line

    def end_call(self) -> None:
        """The call on this thread has ended: stepping ends with it."""
        if isinstance(getattr(sys.gettrace(), "__self__", None), (RankPdb, RankDebugger)):
            sys.settrace(None)

    def ask(self, debugger: RankPdb, text: str, prompt: str) -> str:
        """Show ``text`` and return the line that was typed, on the stopped thread. Raises: KeyboardInterrupt."""
        stop = self._stop
        assert stop is not None
        while True:
            if stop.interrupted:
                raise KeyboardInterrupt
            told = AtPrompt(next(self._numbers), stop.place, debugger.why, prompt, text)
            stop.prompt = told
            try:
                self._tell(told)
                line = stop.lines.get()
            finally:
                stop.prompt = None
            if line is None:
                raise KeyboardInterrupt
            if not line.startswith("?") or not (start := line.lstrip("? ")):
                return line
            found = debugger.complete_names(start)
            more = f"  ... {len(found) - COMPLETIONS_MAX} more\n" if len(found) > COMPLETIONS_MAX else ""
            text = "  ".join(found[:COMPLETIONS_MAX]) + "\n" + more if found else f"nothing begins with {start}\n"

    @contextlib.contextmanager
    def stay(self, debugger: RankPdb, place: str, frame: FrameType | None) -> Iterator[None]:
        """Around each stay at the prompt, on the stopped thread. frame: where; of a post-mortem none."""
        with self._turn:
            outer, self._stop = self._stop, _Stop(place, frame)
            try:
                yield
            finally:
                self._stop = outer
                self._tell(AtPrompt(next(self._numbers), "", debugger.why, "", debugger.console.take()))

    def _debugger(self, why: str) -> RankPdb:
        """The thread's own debugger, which remembers its displays; another one for a stop within a stop."""
        known: RankPdb | None = getattr(self._own, "pdb", None)
        if known is None or known.stays:
            debugger = RankPdb(self)
            if known is None:
                self._own.pdb = debugger
            known = debugger
        known.why = why
        return known

    def _check(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"{what} cannot open a prompt in a process that the rank has forked. "
                "Have the rank do the work itself (DataLoader(num_workers=0))."
            )
        if self.refusal:
            raise UsageError(
                f"{what} is not available on ranks here: {self.refusal}.\n"
                "  debug it: run the cell in JupyterLab or jupyter console    without a prompt: print() in the cell"
            )

    def _on_breakpoint(self, *args: object, **kwargs: object) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and is_runtimes_code(frame.f_code):  # a hook of ours in front of this one
                frame = frame.f_back
            self.stop(frame or sys._getframe(1))

    # ---- control thread -----------------------------------------------------------------------------------------

    @property
    def prompt(self) -> AtPrompt | None:
        """Return the prompt at which the rank waits for a line, if it is stopped."""
        stop = self._stop
        return stop.prompt if stop is not None else None

    @property
    def place(self) -> str:
        """Return the place where the rank is stopped; empty when it is not."""
        stop = self._stop
        return stop.place if stop is not None else ""

    def command(self, number: int, line: str) -> bool:
        """Type ``line`` at prompt ``number``; False, and nothing happens, if the rank does not wait there any more."""
        stop = self._stop
        if stop is None or stop.prompt is None or stop.prompt.number != number:
            return False
        stop.prompt = None
        stop.lines.put(line)
        return True

    def interrupt(self) -> None:
        """KeyboardInterrupt is about to be raised on the main thread: no prompt of it survives that."""
        stop = self._stop
        if stop is not None:
            stop.interrupted = True
            if stop.thread != self._main:
                stop.lines.put(None)

    # ---- breaking in --------------------------------------------------------------------------------------------

    def break_in(self, frame: FrameType | None) -> None:
        """Stop at the next line of the user's code; on the main thread, in a signal handler."""
        tracer = sys.gettrace()
        if self.place or (tracer is not None and not isinstance(getattr(tracer, "__self__", None), RankPdb)):
            return
        while frame is not None:
            if is_users_code(frame.f_code):
                frame.f_trace = self._on_line
            frame = frame.f_back
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        return self._on_line if is_users_code(frame.f_code) else None

    def _on_line(self, frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        return self.stop(frame) if event == "line" else self._on_line


def _take_over_prompts(debugger: RankDebugger) -> None:
    """Have everything that would read a terminal ask at the rank's prompt.

    Debuggers that are made of pdb's (IPython's, torch.distributed's) open ours in their place.
    """
    set_trace, interaction = pdb.Pdb.set_trace, pdb.Pdb.interaction

    def stop_here(self: pdb.Pdb, frame: FrameType | None = None, **options: object) -> object:
        if isinstance(self, RankPdb):
            return set_trace(self, frame, **options)
        return debugger.stop(frame or sys._getframe(1))

    def look_at(self: pdb.Pdb, frame: FrameType | None, traceback: TracebackType | None) -> None:
        if isinstance(self, RankPdb):
            interaction(self, frame, traceback)
        else:
            debugger.post_mortem(traceback)

    def ask(prompt: object = "", /) -> str:
        return debugger.read_line(str(prompt))

    def ask_secret(prompt: str = "Password: ", stream: object = None, **options: object) -> str:
        return debugger.read_line(prompt, ASKS_SECRET)

    patch(pdb.Pdb, "set_trace", stop_here)
    patch(pdb.Pdb, "interaction", look_at)
    patch(builtins, "input", ask)
    patch(getpass, "getpass", ask_secret)
