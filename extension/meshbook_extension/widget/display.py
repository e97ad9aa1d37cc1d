"""Shows the widget in the output of a cell, and keeps what a saved notebook shows of it up to date."""

from __future__ import annotations

import importlib.util
import uuid
from collections import deque
from typing import TYPE_CHECKING

from meshbook_extension.output.publisher import KernelSink, kernel_of, sink_for
from meshbook_extension.widget.snapshot import Snapshot
from meshbook_extension.widget.text import as_html

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.notebook.session import Session

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLACES = 4
"""Outputs of one widget that are kept up to date."""


class HealthDisplays:
    """The widgets of a session."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, tuple[int, ...]], ShownWidget] = {}

    def show(self, session: Session, procs: ProcMesh) -> bool:
        """Show the widget for ``procs`` if the output goes to a front end; else False, and the caller shows text.

        The same ranks get the same widget again, in one more output.
        """
        sink = sink_for(session.shell)
        if not isinstance(sink, KernelSink) or importlib.util.find_spec("anywidget") is None:
            return False
        key = (procs.name, procs.ranks)
        shown = self._shown.get(key)
        if shown is None or not shown.follows(procs):
            if shown is not None:
                shown.close()
            shown = self._shown[key] = ShownWidget(session, procs)
        shown.add_place(sink)
        return True


class ShownWidget:
    """One widget, and the outputs that show it."""

    def __init__(self, session: Session, procs: ProcMesh) -> None:
        from meshbook_extension.widget.busy_comms import BusyComms
        from meshbook_extension.widget.health import HealthWidget
        from meshbook_extension.widget.mesh_source import MeshSource

        self._session = session
        self._source = MeshSource(session, procs)
        self.widget = HealthWidget(self._source, self._on_rest)
        self._places: deque[tuple[KernelSink, str]] = deque(maxlen=PLACES)
        self._saved_states = ""
        self._comm_id = self.widget.model_id
        kernel = kernel_of(session.shell)
        assert kernel is not None  # its sink is a kernel's
        self._comms = BusyComms.of(kernel)
        self._comms.listen(self._comm_id, self.widget.on_message)

    def close(self) -> None:
        """It is not shown any more; what it showed last stays."""
        self._comms.forget(self._comm_id)
        self._places.clear()

    def follows(self, procs: ProcMesh) -> bool:
        """Whether it can show ``procs`` again: not after a front end closed it, or another mesh took the name."""
        return self.widget.comm is not None and self._source.procs.sizes == procs.sizes and self._source.procs.alive

    def add_place(self, sink: KernelSink) -> None:
        """Show it in one more output."""
        snapshot = self._source.snapshot()
        self.widget.refresh(snapshot)
        self._saved_states = snapshot.states
        display_id = f"meshbook.{uuid.uuid4().hex}"
        self._places.append((sink, display_id))
        sink.display(self._bundle(snapshot), {}, display_id)

    def _on_rest(self, snapshot: Snapshot) -> None:
        """Nobody looks, so nobody sees the output being made anew."""
        if snapshot.states == self._saved_states:
            return
        self._saved_states = snapshot.states
        for sink, display_id in tuple(self._places):
            sink.display(self._bundle(snapshot), {}, display_id, update=True)

    def _bundle(self, snapshot: Snapshot) -> dict[str, object]:
        from meshbook_extension.widget.text import status_text

        return {
            WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id},
            "text/html": as_html(snapshot),
            "text/plain": status_text(self._session, self._source.procs, snapshot.statuses),
        }
