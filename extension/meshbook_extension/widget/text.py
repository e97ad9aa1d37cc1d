"""The health of a mesh as text, for places without widgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshbook.formatting import format_bytes, format_ranks, format_sizes
from meshbook_extension.cells.jobs import Jobs
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import count, format_seconds

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh, RankStatus


ROWS = 64
"""A larger mesh gets a row per host and state."""


WORTH_BYTES = 1_000_000
"""Less is not worth a word."""


def status_text(session: Session, procs: ProcMesh, statuses: Sequence[RankStatus]) -> str:
    """What a terminal shows."""
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
    table = [[row[index] for index in kept] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(kept))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
