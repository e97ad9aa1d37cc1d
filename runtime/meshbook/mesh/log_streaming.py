"""What calls print, as `ProcMesh.logging_option` has it shown: at once, or not at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from meshbook.calls.output import ConsoleOutput, DisplayData, OutputDropped, OutputEvent, OutputTarget, StreamText
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.errors import UsageError

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh

LEVEL_MAX = 255


def set_logging(procs: ProcMesh, stream: bool, level: int) -> Future[None]:
    """See `ProcMesh.logging_option`."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= LEVEL_MAX:
        raise UsageError(f"level is one of logging's, as in level=logging.INFO, from 0 to {LEVEL_MAX}; got {level!r}.")
    return LogStreaming(procs, stream, level).begin()


def hide_calls(procs: ProcMesh) -> None:
    """Leave what calls print to the logs, until `ProcMesh.logging_option` says otherwise."""
    procs.show_calls_by(LogStreaming(procs, False, logging.WARNING))


class LogStreaming:
    """Of one mesh, until the next one takes its place. Ranks that are started again get the same level."""

    def __init__(self, procs: ProcMesh, stream: bool, level: int) -> None:
        self._procs, self._level = procs.base(), level
        self._target = None if stream else OutputTarget(procs.new_output_id(), Quiet())

    def begin(self) -> Future[None]:
        """Done when all ranks log at the level."""
        self._procs.show_calls_by(self)
        self._procs.call_after_repairs(self._set_levels_again)
        return self.set_levels()

    def _set_levels_again(self) -> None:
        """Wait until new ranks log at the level: their actors do not wait for the calls to their processes."""
        if (repaired := self._procs.last_repair) is not None and repaired.ranks:
            self.set_levels().get()

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
