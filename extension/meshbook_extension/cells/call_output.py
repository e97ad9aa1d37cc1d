"""Prints of `ProcMesh.execute` and its like go to the notebook cell that made the call, as those of ``%%mesh`` do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from meshbook.calls.output import DisplayData, OutputEvent, OutputTarget
from meshbook_extension.cells.output import CellOutput, open_output
from meshbook_extension.output.publisher import parent_of

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.notebook.session import Session

_NEVER_DONE = frozenset({-1})
"""Calls come and go within a cell, so no set of ranks tells that all is said."""


class _MeshOutput(NamedTuple):
    """What the running cell shows of one mesh."""

    target: OutputTarget
    output: CellOutput


class CallOutput:
    """Finds the output target of the cell that runs now; one per cell and mesh."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._diverted: OutputTarget | None = None
        self._key: object = None
        self._of_mesh: dict[int, _MeshOutput] = {}
        """Of the running cell, by the mesh's id."""

    def finish(self, *_: object) -> None:
        """The cell ends: show what its calls have printed so far, so that it is there before the cell is done."""
        outputs, self._of_mesh = self._of_mesh, {}
        for _target, output in outputs.values():
            with contextlib.suppress(KeyboardInterrupt):  # the cell has ended, and what is left was counted
                output.finish()

    def target(self, procs: ProcMesh) -> OutputTarget | None:
        """Where the prints of a call belong that is made now; None outside the thread of cells."""
        if threading.current_thread() is not threading.main_thread():
            return None
        return self._diverted or self._here(procs).target

    @contextlib.contextmanager
    def diverted(self, target: OutputTarget) -> Iterator[None]:
        """What calls print that the thread of cells makes in the block is for ``target``."""
        self._diverted = target
        try:
            yield
        finally:
            self._diverted = None

    def output(self, procs: ProcMesh) -> CellOutput:
        """That of the cell that runs now, on the thread of cells."""
        return self._here(procs).output

    def _here(self, procs: ProcMesh) -> _MeshOutput:
        shell = self._session.shell
        key = parent_of(shell).get("header", {}).get("msg_id", shell.execution_count)
        if key != self._key:
            self.finish()
            self._key = key
        for id, (_target, output) in self._of_mesh.items():
            if id != procs.id and output.has_unshown:
                output.drain()  # what was printed there comes before what this call prints here
        if procs.id not in self._of_mesh:
            self._of_mesh[procs.id] = self._make(procs)
        return self._of_mesh[procs.id]

    def _make(self, procs: ProcMesh) -> _MeshOutput:
        output = open_output(self._session, procs.base(), ranks=_NEVER_DONE)

        def receive(event: OutputEvent) -> None:
            if not (isinstance(event, DisplayData) and event.is_result):  # the call returns it
                output.receive(event)

        return _MeshOutput(OutputTarget(procs.new_output_id(), receive), output)
