"""The health of a mesh where there are no widgets: a text, and an HTML table that a saved notebook shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from meshbook.formatting import format_bytes, format_ranks, format_sizes
from meshbook_extension.cells.running import Jobs
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import columns, count, format_seconds
from meshbook_extension.widget.snapshot import IDLE, MB, NAMES, Snapshot

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.proc_states import RankStatus

ROWS = 64
"""A larger mesh gets a row per host and state."""


WORTH_BYTES = 1_000_000
"""Less is not worth a word."""


def status_text(session: Session, procs: ProcMesh, statuses: Sequence[RankStatus]) -> str:
    """Return what a terminal shows of the mesh."""
    hosts = len(procs.hosts if len(procs) == len(procs.base()) else {one.host for one in statuses})
    return f"{describe_mesh(session, procs, hosts)}\n{rank_table(statuses)}"


def describe_mesh(session: Session, procs: ProcMesh, hosts: int) -> str:
    """``mesh "main": gpus=4, cpu; 4 ranks on 1 host; slices: left; 1 job runs``"""
    parts = [
        f'mesh "{procs.name}": {format_sizes(procs.sizes)}, {procs.device}',
        f"{count(len(procs), 'rank')} on {count(hosts, 'host')}",
    ]
    slices = [name for name, named in session.slices.items() if named.mesh == procs.name]
    running = [job for job in session.part(Jobs).running() if job.mesh == procs.name]
    if slices:
        parts.append(f"slices: {', '.join(slices)}")
    if running:
        parts.append(f"{count(len(running), 'job')} running")
    return "; ".join(parts)


def rank_table(statuses: Sequence[RankStatus]) -> str:
    """A row per rank, or per host and state of many."""
    if len(statuses) > ROWS:
        return _table(["ranks", "host", "state", "memory"], _summaries(statuses))
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
    return _table(
        ["rank", "point", "host", "pid", "device", "state", "memory", "GPU", "held by its last error", "at"], rows
    )


def _summaries(statuses: Sequence[RankStatus]) -> list[list[str]]:
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for one in statuses:
        groups.setdefault((one.host, one.state), []).append(one)
    return [
        [format_ranks(one.rank for one in group), host, state, format_bytes(sum(one.rss_bytes for one in group))]
        for (host, state), group in groups.items()
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Columns of equal width; those without content are left out."""
    kept = [index for index in range(len(head)) if any(row[index] for row in rows)]
    return "\n".join(columns([[row[index] for index in kept] for row in [head, *rows]]))


_TABLE = "border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums"
_CELL = "text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.25)"


def as_html(snapshot: Snapshot) -> str:
    """A table of the ranks. No style sheet and no script: viewers of saved notebooks drop both."""
    rows = _rows(snapshot)
    heads = ["rank" if len(rows) == len(snapshot.statuses) else "ranks", "host", "state", "memory", "at"]
    counts = Counter(snapshot.states)
    summary = ", ".join(f"{count} {NAMES[letter]}" for letter, count in counts.most_common())
    title = f"{snapshot.name}: {format_sizes(snapshot.sizes)}, {snapshot.device}; {summary}"
    return (
        f'<div><div style="font-weight:600;margin-bottom:6px">{escape(title)}</div>'
        f'<table style="{_TABLE}">{_line("th", heads)}{"".join(_line("td", row) for row in rows)}</table></div>'
    )


def _line(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_CELL}">{escape(text)}</{tag}>' for text in row) + "</tr>"


def _memory_of(one: RankStatus) -> str:
    own = format_bytes(one.rss_bytes) if one.rss_bytes else ""
    return f"{own}; GPU {one.gpu}" if one.gpu is not None else own


def _rows(snapshot: Snapshot) -> list[list[str]]:
    states = snapshot.states
    if len(states) <= ROWS:
        return [
            [
                str(one.rank),
                one.host,
                NAMES[letter] + (f" {format_seconds(one.busy_s)}" if one.busy_s and letter != IDLE else ""),
                _memory_of(one),
                one.where if one.where != one.state else "",
            ]
            for one, letter in zip(snapshot.statuses, states, strict=True)
        ]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (one, letter) in enumerate(zip(snapshot.statuses, states, strict=True)):
        groups.setdefault((one.host, letter), []).append(index)
    memory = snapshot.memory_mb
    return [
        [
            format_ranks(snapshot.statuses[index].rank for index in indices),
            host,
            NAMES[letter],
            format_bytes(MB * sum(memory[index] for index in indices)),
            "",
        ]
        for (host, letter), indices in groups.items()
    ]
