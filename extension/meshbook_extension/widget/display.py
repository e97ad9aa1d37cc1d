"""The widget in the output of a cell; and where there are no widgets, the same as text or as an HTML table."""

from __future__ import annotations

import importlib.util
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshbook.formatting import Table, columns, format_bytes, format_ranks, format_sizes
from meshbook.mesh import states
from meshbook_extension.cells.output import OwnDisplay
from meshbook_extension.cells.running import Jobs
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count, format_seconds
from meshbook_extension.output.publisher import KernelSink, is_attended, kernel_of, parent_of, sink_for
from meshbook_extension.widget.busy_comms import BusyComms
from meshbook_extension.widget.mesh_source import MeshSource
from meshbook_extension.widget.snapshot import IDLE, NAMES, Snapshot

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.states import RankStatus
    from meshbook_extension.cells.hang_watch import Draw
    from meshbook_extension.cells.running import RunningCell

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


def rank_table(statuses: Sequence[RankStatus]) -> Table:
    """Return a row per rank, or of many a row per host and state."""
    if len(statuses) > ROWS:
        rows = _summaries(statuses, [one.state for one in statuses])
        return _table(["ranks", "host", "state", "memory"], rows)
    rows = [
        [
            str(one.rank),
            ", ".join(f"{axis}={index}" for axis, index in one.point.items()),
            one.host,
            str(one.pid),
            one.device,
            one.state if one.state != "busy" else f"busy {format_seconds(one.busy_s)}",
            format_bytes(one.rss_bytes) if one.rss_bytes else "",
            str(one.gpu or ""),
            format_bytes(one.kept_bytes) if one.kept_bytes >= WORTH_BYTES else "",
            one.where if one.where != one.state else "",
        ]
        for one in statuses
    ]
    heads = ["rank", "point", "host", "pid", "device", "state", "memory", "GPU", "held by its last error", "at"]
    return _table(heads, rows)


def _summaries(statuses: Sequence[RankStatus], states: Sequence[str]) -> list[list[str]]:
    """Return ranks, host, state and memory of each host and state, since the ranks are many."""
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for one, state in zip(statuses, states, strict=True):
        groups.setdefault((one.host, state), []).append(one)
    return [
        [format_ranks(one.rank for one in group), host, state, format_bytes(sum(one.rss_bytes for one in group))]
        for (host, state), group in groups.items()
    ]


NUMBERS = frozenset({"rank", "pid", "memory"})


def _table(heads: list[str], rows: list[list[str]], title: str = "") -> Table:
    sides = "".join(">" if head in NUMBERS else "<" for head in heads)
    return Table(heads, rows, sides, title).without_empty()


def as_html(snapshot: Snapshot) -> str:
    """Draw a table of the ranks without style sheet and script: viewers of saved notebooks drop both."""
    rows = _rows(snapshot)
    heads = ["rank" if len(rows) == len(snapshot.statuses) else "ranks", "host", "state", "memory", "at"]
    counts = Counter(snapshot.states)
    summary = ", ".join(f"{count} {NAMES[letter]}" for letter, count in counts.most_common())
    title = f"{snapshot.name}: {format_sizes(snapshot.sizes)}, {snapshot.device}; {summary}"
    return _table(heads, rows, title)._repr_html_()


def _rows(snapshot: Snapshot) -> list[list[str]]:
    states = snapshot.states
    if len(states) <= ROWS:
        return [
            [
                str(one.rank),
                one.host,
                NAMES[letter] + (f" {format_seconds(one.busy_s)}" if one.busy_s and letter != IDLE else ""),
                (format_bytes(one.rss_bytes) if one.rss_bytes else "") + (f"; GPU {one.gpu}" if one.gpu else ""),
                one.where if one.where != one.state else "",
            ]
            for one, letter in zip(snapshot.statuses, states, strict=True)
        ]
    return [[*row, ""] for row in _summaries(snapshot.statuses, [NAMES[letter] for letter in states])]


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
