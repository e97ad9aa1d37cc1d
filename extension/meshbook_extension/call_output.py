"""Prints of `ProcMesh.execute` and its like go to the notebook cell that made the call, as those of ``%%mesh`` do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from meshbook.output_events import DisplayData, OutputEvent, OutputTarget
from meshbook_extension.cell_output import CellOutput
from meshbook_extension.collapse import grouping_for
from meshbook_extension.publish import parent_of, sink_for

if TYPE_CHECKING:
    from meshbook.proc_mesh import ProcMesh
    from meshbook_extension.session import Session

_NEVER_DONE = frozenset({-1})
"""Calls come and go within a cell, so no set of ranks tells that all is said."""


class CallOutput:
    """Finds the output target of the cell that runs now; one per cell and mesh."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._key: object = None
        self._target: OutputTarget | None = None
        self._output: CellOutput | None = None

    def finish(self, *_: object) -> None:
        """The cell ends: show what its calls have printed so far, so that it is there before the cell is done."""
        output, self._output = self._output, None
        if output is not None:
            output.finish()

    def target(self, procs: ProcMesh) -> OutputTarget | None:
        """Where the prints of a call belong that is made now; None outside the thread of cells."""
        if threading.current_thread() is not threading.main_thread():
            return None
        shell = self._session.shell
        header = parent_of(shell).get("header", {})
        key = (procs.name, header.get("msg_id", shell.execution_count))
        if key != self._key:
            self.finish()
            self._key, self._target = key, self._make_target(procs)
        return self._target

    def output(self, procs: ProcMesh) -> CellOutput:
        """That of the cell that runs now, on the thread of cells."""
        self.target(procs)
        if self._output is None:  # the cell has shown all, and begins anew
            self._target = self._make_target(procs)
        assert self._output is not None
        return self._output

    def _make_target(self, procs: ProcMesh) -> OutputTarget:
        whole = procs.base()
        output = CellOutput(
            _NEVER_DONE,
            sink_for(self._session.shell),
            grouping_for("equal", whole.ranks),
            self._session.publisher,
            whole.log_paths,
            whole.name,
        )

        self._output = output

        def receive(event: OutputEvent) -> None:
            if not (isinstance(event, DisplayData) and event.is_result):  # the call returns it
                output.receive(event)

        return OutputTarget(procs.new_output_id(), receive)
