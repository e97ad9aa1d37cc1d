"""The chart of the ranks' times for notebooks: bars that keep their scale in any font. Pure.

No style sheet and no script: viewers of saved notebooks drop both. Colours are those of JupyterLab's theme where it has
one; the slowest is named too, and waiting is hatched.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshbook_extension.output.labels import format_seconds
from meshbook_extension.output.rank_times import ROWS, Bin, RankTime, bins, few_ranks, has_waits, rows_of, stragglers

_TABLE = "color:inherit;border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;margin:4px 0"
_CELL = "text-align:right;padding:1px 10px 1px 0;border:none"
_TRACK = "display:flex;width:320px;height:11px"
_WORK = "var(--jp-brand-color1,#1e88e5)"
_SLOW = "var(--jp-warn-color1,#ef6c00)"
_WAIT = "repeating-linear-gradient(135deg,rgba(128,128,128,.55) 0 2px,rgba(128,128,128,.15) 2px 5px)"


def chart_html(times: Sequence[RankTime]) -> str:
    """As `rank_times.chart`."""
    slow = stragglers(times)
    longest_s = max(time.total_s for time in times) or 1.0
    parts = [_table([_row(time, note, longest_s, slow) for time, note in rows_of(times)])]
    if len(times) > ROWS:
        found = bins(times)
        most = max(len(each.ranks) for each in found)
        title = "ranks by own work" if has_waits(times) else "ranks by time"
        parts += [
            f'<div style="font-size:12px;opacity:.75">{title}</div>',
            _table([_bin(each, most) for each in found]),
        ]
    if has_waits(times):
        parts.append(
            f'<div style="font-size:12px;opacity:.75">{_swatch(_WORK)} own work &nbsp; '
            f"{_swatch(_WAIT)} waiting in collectives</div>"
        )
    return f"<div>{''.join(parts)}</div>"


def _table(rows: Sequence[str]) -> str:
    return f'<table style="{_TABLE}">{"".join(rows)}</table>'


def _row(time: RankTime, note: str, longest_s: float, slow: frozenset[int]) -> str:
    own, waited = 100 * time.own_s / longest_s, 100 * time.waited_s / longest_s
    hint = f"rank {time.rank}: {format_seconds(time.own_s)} own work, {format_seconds(time.waited_s)} waiting"
    track = _bar(own, _SLOW if time.rank in slow else _WORK) + _bar(waited, _WAIT)
    return _cells(f"rank {time.rank}", format_seconds(time.total_s), track, note, hint)


def _bin(each: Bin, most: int) -> str:
    span = f"{format_seconds(each.low_s).rpartition(' ')[0]}-{format_seconds(each.high_s)}"
    return _cells(span, str(len(each.ranks)), _bar(100 * len(each.ranks) / most, _WORK), few_ranks(each), "")


def _cells(first: str, second: str, track: str, note: str, hint: str) -> str:
    return (
        f'<tr title="{hint}" style="background:none"><td style="{_CELL}">{first}</td><td style="{_CELL}">{second}</td>'
        f'<td style="{_CELL}"><div style="{_TRACK}">{track}</div></td>'
        f'<td style="{_CELL};text-align:left">{note}</td></tr>'
    )


def _bar(percent: float, background: str) -> str:
    return f'<div style="width:{percent:.1f}%;background:{background}"></div>'


def _swatch(background: str) -> str:
    return f'<span style="display:inline-block;width:12px;height:9px;background:{background}"></span>'
