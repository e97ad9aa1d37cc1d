"""The widget where there are no widgets: a text, and an HTML table that a saved notebook shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from meshbook.formatting import format_bytes, format_ranks, format_sizes
from meshbook_extension.output.labels import format_seconds
from meshbook_extension.widget.snapshot import IDLE, MB, NAMES, Snapshot

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import RankStatus

ROWS = 64
"""Larger meshes get a row per host and state."""

_TABLE = "border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums"
_CELL = "text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid rgba(128,128,128,.25)"


class _HealthRow(NamedTuple):
    ranks: str
    host: str
    state: str
    memory: str
    at: str


def as_html(snapshot: Snapshot) -> str:
    """A table of the ranks. No style sheet and no script: viewers of saved notebooks drop both."""
    rows = _rows(snapshot)
    heads = _HealthRow("rank" if len(rows) == len(snapshot.statuses) else "ranks", "host", "state", "memory", "at")
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


def _rows(snapshot: Snapshot) -> list[_HealthRow]:
    states = snapshot.states
    if len(states) <= ROWS:
        return [
            _HealthRow(
                str(one.rank),
                one.host,
                NAMES[letter] + (f" {format_seconds(one.busy_s)}" if one.busy_s and letter != IDLE else ""),
                _memory_of(one),
                one.where if one.where != one.state else "",
            )
            for one, letter in zip(snapshot.statuses, states, strict=True)
        ]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (one, letter) in enumerate(zip(snapshot.statuses, states, strict=True)):
        groups.setdefault((one.host, letter), []).append(index)
    memory = snapshot.memory_mb
    return [
        _HealthRow(
            format_ranks(snapshot.statuses[index].rank for index in indices),
            host,
            NAMES[letter],
            format_bytes(MB * sum(memory[index] for index in indices)),
            "",
        )
        for (host, letter), indices in groups.items()
    ]
