"""What calls print, as `ProcMesh.logging_option` has it shown: not at all, at once, or equal lines once per window."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import TYPE_CHECKING

from meshbook.calls.output import ConsoleOutput, DisplayData, OutputDropped, OutputEvent, OutputTarget, StreamText
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.errors import UsageError
from meshbook.formatting import format_ranks

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh

LEVEL_MAX = 255


def set_logging(procs: ProcMesh, stream: bool, window_s: float | None, level: int) -> Future[None]:
    """See `ProcMesh.logging_option`."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= LEVEL_MAX:
        raise UsageError(f"level is one of logging's, as in level=logging.INFO, from 0 to {LEVEL_MAX}; got {level!r}.")
    if window_s is not None and not stream:
        raise UsageError("aggregate_window_sec says how lines are shown, but with stream_to_client=False none are.")
    if window_s is not None and not window_s > 0:
        raise UsageError(f"aggregate_window_sec is a number of seconds above 0, or None; got {window_s!r}.")
    return LogStreaming(procs, stream, window_s, level).begin()


def hide_calls(procs: ProcMesh) -> None:
    """Leave what calls print to the logs, until `ProcMesh.logging_option` says otherwise."""
    procs.show_calls_by(LogStreaming(procs, False, None, logging.WARNING))


class LogStreaming:
    """Of one mesh, until the next one takes its place. Ranks that are started again get the same level."""

    def __init__(self, procs: ProcMesh, stream: bool, window_s: float | None, level: int) -> None:
        self._procs, self._level = procs.base(), level
        listener = Quiet() if not stream else None if window_s is None else EqualLines(window_s)
        self._listener = listener
        self._target = None if listener is None else OutputTarget(procs.new_output_id(), listener)

    def begin(self) -> Future[None]:
        """Done when all ranks log at the level. What waits for the end of a former window is shown now."""
        self._procs.show_calls_by(self)
        self._procs.call_after_repairs(self._set_levels_again)
        return self.set_levels()

    def _set_levels_again(self) -> None:
        """Wait until new ranks log at the level: their actors do not wait for the calls to their processes."""
        if (repaired := self._procs.last_repair) is not None and repaired.ranks:
            self.set_levels().get()

    def end(self) -> None:
        """Another one takes its place: show what waits for the end of a window; what comes later waits no more."""
        if isinstance(self._listener, EqualLines):
            self._listener.end()

    def target(self) -> OutputTarget | None:
        """Where what a call prints goes; None: where it went without us."""
        return self._target

    def set_levels(self) -> Future[None]:
        """Have the ranks' root logger write to stderr from the level on, unless the program has given it handlers."""
        what, root = "logging_option", logging.getLogger()
        done = [
            self._procs.execute_as(what, _add_handler),
            self._procs.execute_as(what, root.setLevel, self._level),
        ]
        return MappedFuture(join_futures(done), lambda _: None)


_add_handler = logging.basicConfig
"""It adds one for stderr where there is none. By reference, so that ranks need no module of ours for it."""


class Quiet:
    """A listener that leaves what is printed to the logs."""

    def __init__(self) -> None:
        self._console = ConsoleOutput()

    def __call__(self, event: OutputEvent) -> None:
        if not isinstance(event, (StreamText, DisplayData, OutputDropped)):
            self._console(event)


class EqualLines:
    """A listener that prints the lines of a window together, equal ones once, with the ranks that wrote them."""

    def __init__(self, window_s: float) -> None:
        self._window_s, self._is_over = window_s, False
        self._console = ConsoleOutput()
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, str], str] = {}
        self._lines: dict[tuple[str, str], list[int]] = {}
        """(stream, line) to ranks, as often as each wrote it; in the order in which lines came first."""
        self._timer: threading.Timer | None = None

    def __call__(self, event: OutputEvent) -> None:
        if not isinstance(event, StreamText):
            self._console(event)
            return
        with self._lock:
            key = (event.rank, event.stream)
            *lines, self._begun[key] = (self._begun.get(key, "") + event.text).split("\n")
            for line in lines:
                self._lines.setdefault((event.stream, line), []).append(event.rank)
            if lines and self._timer is None and not self._is_over:
                self._timer = threading.Timer(self._window_s, self.flush)
                self._timer.daemon = True
                self._timer.start()
                atexit.register(self.flush)
        if self._is_over:
            self.flush()

    def end(self) -> None:
        """Print what has come so far, and from now on each line as it comes."""
        self._is_over = True
        self.flush()

    def flush(self) -> None:
        """Print what has come so far."""
        with self._lock:
            lines, self._lines = self._lines, {}
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            atexit.unregister(self.flush)
        for (stream, line), ranks in lines.items():
            similar = f"[{len(ranks)} similar log lines] " if len(ranks) > 1 else ""
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write(f"{similar}[{format_ranks(ranks)}] {line}\n")
            file.flush()
