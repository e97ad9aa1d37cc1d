"""The widget in the output of a cell; and where there are no widgets, the same as text or as an HTML table."""

from __future__ import annotations

import importlib.util
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from meshbook.formatting import Table, columns, format_bytes, format_ranks, format_sizes
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.states import RankStatus
from meshbook_extension.cells.hang_watch import Draw
from meshbook_extension.cells.output import OwnDisplay
from meshbook_extension.cells.running import Jobs, RunningCell
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count, format_seconds
from meshbook_extension.output.publisher import KernelSink, is_attended, kernel_of, parent_of, sink_for
from meshbook_extension.widget.busy_comms import BusyComms
from meshbook_extension.widget.mesh_source import MeshSource
from meshbook_extension.widget.snapshot import NAMES, Snapshot

ROWS = 64
"""The most rows of ranks; a larger mesh gets a row per host and state."""
WORTH_BYTES = 1_000_000
"""The least memory that is worth a word."""


def status_table(session: Session, procs: ProcMesh, statuses: Sequence[RankStatus]) -> Table:
    """Return the mesh as a table of its ranks."""
    hosts = len(procs.hosts if len(procs) == len(procs.base()) else {one.host for one in statuses})
    return replace(rank_table(statuses), title=describe_mesh(session, procs, hosts))


def status_text(table: Table) -> str:
    """Return the table of `status_table` as a terminal shows it."""
    return "\n".join([table.title, *columns([table.heads, *table.rows])])


def describe_mesh(session: Session, procs: ProcMesh, hosts: int) -> str:
    """Write ``mesh "main": gpus=4, cpu; 4 ranks on 1 host; slices: left; 1 job running``."""
    parts = [
        f'mesh "{procs.name}": {format_sizes(procs.sizes)}, {states.device_of(procs)}',
        f"{count(len(procs), 'rank')} on {count(hosts, 'host')}",
    ]
    slices = [name for name, named in session.slices.items() if named.mesh == procs.name]
    running = [job for job in session.part(Jobs).running() if job.mesh == procs.name]
    if slices:
        parts.append(f"slices: {', '.join(slices)}")
    if running:
        parts.append(f"{count(len(running), 'job')} running")
    return "; ".join(parts)


def rank_table(statuses: Sequence[RankStatus], names: Sequence[str] = ()) -> Table:
    """Return a row per rank, or of many a row per host and state. names: other words for the states."""
    named = list(zip(statuses, names or [one.state for one in statuses], strict=True))
    if len(named) <= ROWS:
        heads = ["rank", "point", "host", "pid", "device", "state", "memory", "held by its last error", "at"]
        rows = [_rank_row(one, name) for one, name in named]
    else:
        heads = ["ranks", "host", "state", "memory"]
        groups: dict[tuple[str, str], list[RankStatus]] = {}
        for one, name in named:
            groups.setdefault((one.host, name), []).append(one)
        rows = [
            [format_ranks(one.rank for one in group), host, name, format_bytes(sum(one.rss_bytes for one in group))]
            for (host, name), group in groups.items()
        ]
    sides = "".join(">" if head in ("rank", "pid", "memory") else "<" for head in heads)
    return Table(heads, rows, sides).without_empty()


def _rank_row(one: RankStatus, name: str) -> list[str]:
    gpu = f"; GPU {one.gpu}" if one.gpu else ""
    return [
        str(one.rank),
        ", ".join(f"{axis}={index}" for axis, index in one.point.items()),
        one.host,
        str(one.pid),
        one.device,
        f"{name} {format_seconds(one.busy_s)}" if one.state == "busy" else name,
        f"{format_bytes(one.rss_bytes)}{gpu}" if one.rss_bytes else "",
        format_bytes(one.kept_bytes) if one.kept_bytes >= WORTH_BYTES else "",
        one.where if one.where != one.state else "",
    ]


def as_html(snapshot: Snapshot) -> str:
    """Draw a table of the ranks without style sheet and script: viewers of saved notebooks drop both."""
    names = [NAMES[letter] for letter in snapshot.states]
    summary = ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
    title = f"{snapshot.name}: {format_sizes(snapshot.sizes)}, {snapshot.device}; {summary}"
    return replace(rank_table(snapshot.statuses, names), title=title)._repr_html_()


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
OURS = {"meshbook": {"widget": "health"}}
"""The metadata by which the panel knows our widgets in a notebook that was opened again."""
PLACES = 4
"""The outputs of one widget that are kept up to date."""


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
    """A widget, and the outputs that show it."""

    def __init__(self, session: Session, procs: ProcMesh) -> None:
        from meshbook_extension.widget.health import HealthWidget

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
        """Stop updating the widget; its last state stays."""
        self._comms.forget(self._comm_id)
        self._places.clear()

    def follows(self, procs: ProcMesh) -> bool:
        """Whether the widget can show ``procs`` again: not if a front end closed it, or another mesh took the name."""
        return self.widget.comm is not None and self._source.procs.sizes == procs.sizes and self._source.procs.alive

    def add_place(self, sink: KernelSink) -> None:
        """Show the widget in one more output."""
        snapshot = self._source.snapshot()
        self.widget.refresh(snapshot)
        self._saved_states = snapshot.states
        display_id = f"meshbook.{uuid.uuid4().hex}"
        self._places.append((sink, display_id))
        sink.display(self._bundle(snapshot), OURS, display_id)

    def _on_rest(self, snapshot: Snapshot) -> None:
        """Replace the outputs of a widget that is not looked at, for the saved notebook."""
        if snapshot.states == self._saved_states:
            return
        self._saved_states = snapshot.states
        for sink, display_id in tuple(self._places):
            sink.display(self._bundle(snapshot), OURS, display_id, update=True)

    def _bundle(self, snapshot: Snapshot) -> dict[str, object]:
        return _view_of(self.widget.model_id) | {
            "text/html": as_html(snapshot),
            "text/plain": status_text(status_table(self._session, self._source.procs, snapshot.statuses)),
        }


def hang_notices(session: Session, cell: RunningCell) -> Draw:
    """Return the function that makes the notices of a cell, with buttons.

    It makes None where no person could press them. Called on the thread that runs the cell; what it returns, on any.
    """
    sink, kernel = sink_for(session.shell), kernel_of(session.shell)
    has_buttons = isinstance(sink, KernelSink) and is_attended(parent_of(session.shell))
    if kernel is None or not has_buttons or importlib.util.find_spec("anywidget") is None:
        return lambda words, text, ranks: None
    comms = BusyComms.of(kernel)

    def draw(words: str, text: str, ranks: Sequence[int]) -> OwnDisplay:
        from meshbook_extension.widget.health import NoticeWidget

        notice = NoticeWidget(MeshSource(session, cell.procs.base()), words, text, ranks)
        comm_id, display_id = notice.model_id, f"meshbook.{uuid.uuid4().hex}"
        comms.listen(comm_id, notice.on_message)

        def on_end(_future: object) -> None:
            notice.is_open = False
            comms.forget(comm_id)
            sink.display(notice.content(), {}, display_id, update=True)  # the saved notebook has no use for a widget

        cell.run.future.add_done_callback(on_end)
        return OwnDisplay(_view_of(comm_id) | notice.content(), OURS, display_id)

    return draw


def _view_of(model_id: str) -> dict[str, object]:
    return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": model_id}}
