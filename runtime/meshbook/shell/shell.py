"""The shell in which a rank runs cells.

A `RankShell` is made once, in the template process, where that is slow and harmless: it starts no thread and opens no
file. Each forked rank then calls `start_rank`, which takes a few milliseconds.

Text goes to fds 1 and 2, or to `OutputSink.late_text` when a thread or task of an earlier cell wrote it. Everything
rich goes to `OutputSink.display`. An error is part of the `CellOutcome`; nothing that user code does in a cell ends the
rank, short of killing the process.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib.util
import io
import os
import select
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from meshbook.calls.rank_state import Completions
from meshbook.curves.recorder import recorder
from meshbook.curves.series import LoggedPoints
from meshbook.debug.rank_debugger import RankDebugger
from meshbook.errors import Failure
from meshbook.groups.collectives_off import collectives_off
from meshbook.shell.attribution import Attribution
from meshbook.shell.completer import complete, prepare, user_names
from meshbook.shell.display import MimeBundle, plain_progress_bars, sendable
from meshbook.shell.failures import describe_error, forget_last_error, keep_for_postmortem, let_go_of_last_error
from meshbook.shell.inspector import describe
from meshbook.shell.interpreter_state import drop_values
from meshbook.shell.ipython import CellResult, create_shell
from meshbook.shell.postmortem_memory import is_out_of_memory, memory_advice
from meshbook.shell.scripts import Script, run_script
from meshbook.shell.streams import OutputBeside, flush_c_streams, flush_streams, install_streams
from meshbook.source.location import drop_own_frames
from meshbook.system.descriptors import FIRST, fill, open_above

T = TypeVar("T")

_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
_COLOURS_AND_PAGERS = {
    "TERM": "xterm-color",
    "CLICOLOR": "1",
    "FORCE_COLOR": "1",
    "CLICOLOR_FORCE": "1",
    "TTY_INTERACTIVE": "0",  # for rich, which would redraw several lines at once
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
"""The variables by which Jupyter kernels give commands colours and no pager; a rank has no cursor."""


class OutputSink(Protocol):
    """The receiver of everything that a rank shows; called from any thread."""

    def display(
        self,
        data: MimeBundle,
        metadata: MimeBundle,
        transient: MimeBundle,
        *,
        update: bool,
        is_result: bool,
        cell_id: int,
        is_late: bool,
    ) -> None:
        """Show a MIME bundle; binary data is in base64. Text printed before has been written to its pipe.

        is_late: whether text of the same thread or task is late text.
        """

    def mark_place(self) -> None:
        """Mark a place in the output: later text on fd 1 and 2 comes behind earlier text on either."""

    def scalars(self, output: int, batches: Sequence[LoggedPoints]) -> None:
        """Hand on scalars that were logged, 0 as output for no cell."""

    def late_text(self, stream: str, text: str, cell_id: int) -> None:
        """Show text that belongs to another cell than the running one. stream: ``stdout`` or ``stderr``."""


class CellOutcome(NamedTuple):
    """The outcome of a cell. ``failure`` is None exactly when ``ok``."""

    ok: bool
    value: object
    has_value: bool
    """Whether the last expression had a value other than None."""
    failure: Failure | None
    interrupted: bool
    duration_s: float


class KeptError(NamedTuple):
    """The exception that a post-mortem looks at."""

    error: BaseException
    at: float
    """The monotonic time at which it was kept."""
    call: int
    """The call that raised it."""
    names: dict[str, object]
    """The global names of the program that raised it; empty for a cell."""


class RankShell:
    """IPython for one rank; one per process."""

    def __init__(self) -> None:
        """Make everything that ranks can share, in the template."""
        self.debugger = RankDebugger()
        self.last_error: KeptError | None = None
        self.is_untidy = False
        """Whether there is something for `tidy` to free."""
        self._ipython = create_shell(self._run_on_loop, self.debugger)
        atexit.unregister(self._ipython.atexit_operations)  # ranks clear nothing as they end
        self._main_names: dict[str, object] = self._ipython.user_ns
        self._failed_program: dict[str, object] = {}
        self._interrupts = 0
        self._rank, self._host = -1, ""
        self._inline = importlib.util.find_spec("matplotlib_inline") is not None
        self._choose_matplotlib_backend()
        self._ipython.warm_up()
        prepare()
        complete(self._ipython, "warm.up", 7)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else each fork would write it again
        flush_c_streams()

    def start_rank(self, *, rank: int, host: str, sink: OutputSink, namespace: Mapping[str, object]) -> None:
        """Become the rank's shell, in the forked child with fds 1 and 2 in place.

        namespace: the names that cells find defined; cells may rebind them.
        """
        self._rank, self._host, self._sink = rank, host, sink
        os.environ.update(_COLOURS_AND_PAGERS)
        self._choose_matplotlib_backend()
        plain_progress_bars()
        self._attribution = Attribution(sink.late_text, sink.mark_place)
        self._attribution.mark_threads()
        self._streams = install_streams(self._attribution)
        recorder.begin(self._attribution.origin, sink.scalars)
        self._ends = select.poll()
        for fd in range(FIRST):
            self._ends.register(fd, 0)  # tells by itself of descriptors that are closed
        self._loop = asyncio.new_event_loop()
        self._ipython.enter_main(self._display, self._mark_place)
        self.define(namespace)
        sys.stdin = _PromptInput(self.debugger)
        self.debugger.begin()

    def become(self, rank: int) -> None:
        """Take another rank's number from now on."""
        self._rank = rank

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of cells that await."""
        return self._loop

    @property
    def namespace(self) -> dict[str, object]:
        """The rank's global names, which are the ``__dict__`` of its ``__main__``."""
        return self._main_names

    def define(self, names: Mapping[str, object]) -> None:
        """Bind more names as `start_rank` does: ``%who`` does not list them, and ``%reset`` brings them back."""
        self._ipython.define(names)

    def run_cell(
        self,
        code: str | Script,
        *,
        cell_id: int,
        cell_number: int | None,
        line_offset: int,
        forbid_collectives: bool = False,
        debug_name: str = "",
    ) -> CellOutcome:
        """Run an IPython cell, or a program, to its end. KeyboardInterrupt may be raised in it at any time; it becomes
        the outcome.

        cell_id: marks the displays of the cell. cell_number: the notebook's ``[7]``, for people.
        line_offset: lines above ``code`` in the notebook's cell, the line of its magic included.
        debug_name: the debugger's name of the cell's file.
        """
        started = time.perf_counter()
        self._interrupts = 0
        before: KeptError | None = None
        try:
            if self.last_error is not None and is_out_of_memory(self.last_error.error):
                self.forget_last_error()  # else its tensors would be in the way of the next try
            before = self.last_error
            asyncio.set_event_loop(self._loop)  # asyncio.run() in an earlier cell has taken it away
            with self.output_of(cell_id), collectives_off() if forbid_collectives else contextlib.nullcontext():
                if isinstance(code, str):
                    result = self._ipython.run_rank_cell(code, cell_number, line_offset, debug_name)
                else:
                    result = self._run_script(code)
                self.flush()
        except KeyboardInterrupt as interrupt:  # between the cell's own lines and ours
            result = CellResult(None, interrupt, ran=True)
        error, failure = result.error, None
        if error is not None:
            if self._interrupts and isinstance(error, asyncio.CancelledError):
                error = KeyboardInterrupt().with_traceback(error.__traceback__)
            failure = describe_error(self._ipython, error, rank=self._rank, host=self._host, ran=result.ran)
            if lines := memory_advice(error, before, self.namespace):
                failure = failure._replace(traceback=(*failure.traceback, *lines))
            del before
            self.keep_error(error, cell_id)
        return CellOutcome(
            ok=failure is None,
            value=None if failure else result.value,
            has_value=failure is None and result.value is not None,
            failure=failure,
            interrupted=isinstance(error, KeyboardInterrupt),
            duration_s=time.perf_counter() - started,
        )

    def evaluate(self, expr: str, names: dict[str, object] | None = None) -> object:
        """Return the value of an expression over the rank's names. Raises: the errors of the expression.

        names: a copy of them, in the midst of a cell, which IPython has prepared Python's own names for.
        """
        with self._ipython.builtin_trap if names is None else contextlib.nullcontext():
            return eval(compile(expr.strip(), "<expression>", "eval"), self.namespace if names is None else names)

    def run_coroutine(self, coroutine: Coroutine[object, None, object]) -> object:
        """Return the result of a coroutine; tasks that it has started go on when other code awaits."""
        asyncio.set_event_loop(self._loop)
        self._interrupts = 0
        try:
            return self._run_on_loop(coroutine)
        except asyncio.CancelledError as error:
            if self._interrupts:
                raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
            raise

    # ---- for whoever types in the notebook: on any thread, unheard and unseen by the cell that runs -----------------

    def complete(self, code: str, cursor: int) -> Completions:
        """Return the texts that may stand at ``cursor``, by the rank's living names. Raises: errors of user code."""
        with self._attribution.unheard():
            return complete(self._ipython, code, cursor)

    def inspect(self, code: str, cursor: int, detail: int) -> str:
        """Return the text about the name at ``cursor``; empty: no such name. Raises: as `complete`."""
        with self._attribution.unheard():
            return describe(self._ipython, code, cursor, detail)

    def names(self, prefix: str) -> list[str]:
        """Return the names that the user has bound."""
        return user_names(self._ipython, prefix)

    def describe(self, error: BaseException) -> Failure:
        """Return the failure for an exception that user code raised outside of `run_cell`."""
        return describe_error(self._ipython, error, rank=self._rank, host=self._host, ran=True)

    def output_of(self, cell_id: int) -> contextlib.AbstractContextManager[None]:
        """Make ``cell_id`` the running cell inside the block: its text goes to the pipes, that of others is late."""
        return self._attribution.cell(cell_id)

    def output_beside(self, cell_id: int) -> OutputBeside:
        """Give the text of the calling thread, or task, to ``cell_id`` inside the block."""
        return OutputBeside(self._streams, cell_id)

    def keep_error(self, error: BaseException, call: int) -> None:
        """Keep the exception, which ``call`` raised on this rank, for a post-mortem until the next one.

        The frames of the one before are freed, and their tensors with them.
        """
        if self.last_error is not None:
            let_go_of_last_error(self._ipython)
            drop_values(self.last_error.names)
            self.is_untidy = True
        keep_for_postmortem(error)
        self.last_error = KeptError(error, time.monotonic(), call, self._failed_program)
        self._failed_program = {}

    def tidy(self) -> None:
        """Free the frames that `keep_error` has dropped; called between calls."""
        self.is_untidy = False
        gc.collect()  # what drew the traceback left cycles around the frames

    @property
    def output_here(self) -> int:
        """The cell that the calling thread or task prints for, 0 for none."""
        return self._attribution.origin() or 0

    def forget_last_error(self) -> None:
        """Free the frames of the last exception."""
        kept, self.last_error = self.last_error, None
        forget_last_error(self._ipython)
        if kept is not None:
            drop_values(kept.names)

    def flush_text(self) -> None:
        """Write out the prints of Python and C code, partial lines included. May be called on any thread."""
        flush_streams(self._streams)

    def mark_text(self, mark: bytes) -> None:
        """Write ``mark`` into both pipes, behind the text that has been written."""
        for stream in self._streams:
            stream.mark(mark)

    def flush(self) -> None:
        """Show pending figures, then write out all text."""
        backend = sys.modules.get("matplotlib_inline.backend_inline")
        if backend is not None:
            backend.flush_figures()
        self.flush_text()

    def reopen(self) -> None:
        """Open stdin, stdout and stderr again if user code has closed them; called on the main thread."""
        if self._ends.poll(0):
            null = open_above(lambda: os.open(os.devnull, os.O_RDONLY))
            fill(0, null)
            os.close(null)
            for stream in self._streams:
                stream.reopen()

    # ---- private ------------------------------------------------------------------------------------------------

    def _run_script(self, script: Script) -> CellResult:
        self.is_untidy = True  # the functions of its main module are in cycles with it
        names = self._ipython.user_ns
        try:
            run_script(script, names, partial(setattr, self, "_main_names"))
        except BaseException as error:
            drop_own_frames(error)
            if self._main_names is not names and not script.keep:
                self._failed_program = self._main_names
            return CellResult(None, error, ran=True)
        finally:
            self._main_names = names
            self.flush_text()
            for stream in self._streams:
                stream.lead_back()
        return CellResult(None, None, ran=True)

    def _display(
        self,
        data: MimeBundle,
        metadata: MimeBundle | None,
        transient: MimeBundle | None,
        update: bool,
        is_result: bool,
    ) -> None:
        self.flush_text()
        data, cell = sendable(data), self._attribution.origin()
        if self._attribution.forked or cell is None:  # a child process has no sink
            print(data.get("text/plain", ""))
        else:
            is_late = self._attribution.late_cell() is not None
            others = dict(metadata or {}), dict(transient or {})
            self._sink.display(data, *others, update=update, is_result=is_result, cell_id=cell, is_late=is_late)

    def _mark_place(self) -> None:
        """Mark a place in the output before and after a command, so that its text on either stream stands between."""
        self.flush_text()
        if not self._attribution.forked:
            self._sink.mark_place()

    def _run_on_loop(self, cell: Coroutine[object, None, T]) -> T:
        """Run a cell that awaits, and tasks of earlier ones meanwhile. The loop survives an interrupt.

        An interrupt cancels the cell's task, which then cleans up; a second one cancels that; a third abandons it.
        """
        task = self._loop.create_task(cell)
        while True:
            try:
                return self._loop.run_until_complete(task)
            except SystemExit:  # of another task; who awaits that sees it too
                if task.done():
                    raise
            except KeyboardInterrupt:
                self._interrupts += 1
                if task.done() or self._interrupts == 3:
                    raise
                task.cancel()

    def _choose_matplotlib_backend(self) -> None:
        chosen = os.environ.get("MPLBACKEND")
        if self._inline and not chosen:
            os.environ["MPLBACKEND"] = _INLINE_BACKEND
        elif not self._inline and chosen == _INLINE_BACKEND:  # the notebook's choice, which this host cannot follow
            os.environ["MPLBACKEND"] = "agg"


class _PromptInput(io.TextIOWrapper):
    """A rank's stdin, which is empty; a program that reads a line of it asks at the rank's prompt."""

    def __init__(self, debugger: RankDebugger) -> None:
        super().__init__(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
        self._debugger = debugger

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return f"{self._debugger.read_line()}\n"

    def __next__(self) -> str:  # type: ignore[override]
        raise StopIteration
