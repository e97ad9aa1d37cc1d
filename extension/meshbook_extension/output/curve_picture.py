"""Pictures of logged scalars: SVG that front ends show as it is, without a library and without a script.

A panel for each name. Ranks log at the same steps, or at times of their own: so the axis is cut into columns, and in
each a rank has the mean of its values. The line is the mean over ranks, the band goes from the lowest rank to the
highest one; or each rank has a line of its own. A value that is not finite, or not positive on a logarithmic axis,
leaves a gap, and a mark at the bottom.

Colours are of a middle lightness and text has that of the page, so that both stand on a light and on a dark ground.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from meshbook.curves.series import Points
from meshbook.curves.table import Summary, mean, number
from meshbook.formatting import format_ranks

WIDTH, HEIGHT = 360, 190
"""The size of a panel in pixels, where the page has the room."""
LEFT, RIGHT, TOP, BOTTOM = 50, 348, 26, 162
"""The edges of the ground on which it draws."""
COLUMNS, POINTS_DRAWN = 160, 4000
"""The most columns of a line, and the most points of all lines of a panel."""
LARGEST = 1e300
"""The values from here on are not drawn, as infinity is not."""
DOTS = 40
"""The most points that are drawn as dots, each with its values as a tooltip."""
PANELS = 12
"""The most panels of one picture."""
COLOURS = ("#3b8eea", "#e8833a", "#3fae6a", "#c65fd3", "#d9534f", "#8a8f98", "#b59a2e", "#2aa6b8")
TEXT = "font-family='system-ui,sans-serif' font-size='10' fill='currentColor'"

Ranks: TypeAlias = Mapping[int | None, Points]
Column: TypeAlias = dict[int | None, list[float]]


@dataclass(frozen=True)
class Look:
    """The choices of how curves are drawn."""

    by_rank: bool = False
    smooth: float = 0.0
    """The weight of the values before in a running mean, from 0 to below 1."""
    log: bool = False
    by_time: bool = False


DEFAULT_LOOK = Look()


@dataclass(frozen=True)
class Curve:
    """The points of one name by rank, and the summary of them."""

    summary: Summary
    ranks: Ranks


def bundle(curves: Sequence[Curve], look: Look) -> dict[str, object]:
    """Return the picture as HTML with SVG in it, as SVG alone, and as a line of text for each name.

    The SVG alone is for front ends that show it as an image: that has no colour of the page, so its text is grey.
    """
    lines = [curve.summary.line() for curve in curves]
    drawn = [_panel(curve, look) for curve in curves[:PANELS]]
    more = f"{len(curves) - PANELS} more: %mesh watch NAME, or %mesh metrics" if len(curves) > PANELS else ""
    across = min(len(drawn), 3)
    size = f"{across * WIDTH} {math.ceil(len(drawn) / across) * HEIGHT}"
    placed = "".join(
        f"<g transform='translate({n % across * WIDTH} {n // across * HEIGHT})'>{panel}</g>"
        for n, panel in enumerate(drawn)
    )
    style = f"width:{WIDTH}px;max-width:100%;height:auto"
    panels = "".join(
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' style='{style}' role='img'"
        f" aria-label='{escape(line)}'>{panel}</svg>"
        for line, panel in zip(lines, drawn, strict=False)
    )
    return {
        "text/html": f"<div style='display:flex;flex-wrap:wrap;gap:4px'>{panels}</div>{escape(more)}",
        "image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size}' width='{across * WIDTH}'"
        f" color='#808080'>{placed}</svg>",
        "text/plain": "\n".join([*lines, *([more] if more else [])]),
    }


@dataclass(frozen=True)
class _Ground:
    """The ground of a panel: the values at its edges, as they stand on the axes."""

    first: float
    last: float
    low: float
    high: float
    is_log: bool

    def x(self, value: float) -> float:
        return round(LEFT + (value - self.first) / (self.last - self.first) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        return round(BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP), 1)

    def text(self, scaled: float) -> str:
        """Write the value at a place on the axis."""
        if not self.is_log:
            return number(scaled)
        return number(10**scaled) if abs(scaled) < 307 else f"1e{scaled:.0f}"


def _panel(curve: Curve, look: Look) -> str:
    """Draw one name into a panel."""
    scale = _log10 if look.log else _finite
    at, unit = _positions(curve.ranks, look)
    columns = _columns(curve.ranks, at, 1 if not look.by_rank else len(curve.ranks))
    xs = list(columns)
    shown = [scale(value) for column in columns.values() for value in map(mean, column.values())]
    known = [value for value in shown if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low <= abs(high) * 1e-9:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    first, last = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    ground = _Ground(first, last, low, high, look.log)
    parts = [_axes(ground, unit), _title(curve, look)]
    if look.by_rank:
        for n, rank in enumerate(curve.ranks):
            label = "this process" if rank is None else f"rank {rank}"
            values = [scale(mean(column[rank])) if rank in column else None for column in columns.values()]
            parts.append(_line(xs, values, COLOURS[n % len(COLOURS)], ground, label, look.smooth))
    else:
        means = [[mean(values) for values in column.values()] for column in columns.values()]
        parts.append(_band(xs, [[y for y in map(scale, each) if y is not None] for each in means], ground))
        label = curve.summary.name if len(curve.ranks) == 1 else "mean"
        parts.append(_line(xs, [scale(mean(each)) for each in means], COLOURS[0], ground, label, look.smooth))
    return "".join([*parts, _gaps(columns, scale, ground)])


def _positions(ranks: Ranks, look: Look) -> tuple[dict[int | None, Sequence[float]], str]:
    """Return the place of each point on the axis, by rank, and the axis's unit."""
    if not look.by_time:
        return {rank: points.steps for rank, points in ranks.items()}, "step"
    began = min(points.times[0] for points in ranks.values())
    lasted = max(points.times[-1] for points in ranks.values()) - began
    unit, seconds = ("s", 1) if lasted < 180 else ("min", 60) if lasted < 7200 else ("h", 3600)
    return {rank: [(time - began) / seconds for time in points.times] for rank, points in ranks.items()}, unit


def _columns(ranks: Ranks, at: Mapping[int | None, Sequence[float]], lines: int) -> dict[float, Column]:
    """Return the values of each rank by column, in the order of the axis."""
    xs = {x for places in at.values() for x in places}
    most = max(8, min(COLUMNS, POINTS_DRAWN // lines, max(map(len, at.values())) + 1))
    first, span = min(xs), max(xs) - min(xs)
    columns: dict[float, Column] = {}
    is_exact = len(xs) <= most
    for rank, points in ranks.items():
        for x, value in zip(at[rank], points.values, strict=True):
            place = x if is_exact else first + round((x - first) / span * (most - 1)) * span / (most - 1)
            columns.setdefault(place, {}).setdefault(rank, []).append(value)
    return {place: columns[place] for place in sorted(columns)}


def _finite(value: float) -> float | None:
    return value if abs(value) < LARGEST else None


def _log10(value: float) -> float | None:
    return math.log10(value) if 0 < value < math.inf else None


def _line(
    xs: Sequence[float], values: Sequence[float | None], colour: str, ground: _Ground, label: str, smooth: float
) -> str:
    """Draw a line, with its values behind it where it is smoothed, and with dots where there are few."""
    drawn = _smooth(values, smooth) if smooth else values
    parts = [_path(xs, values, ground, f"stroke='{colour}' opacity='.3'")] if smooth else []
    parts.append(_path(xs, drawn, ground, f"stroke='{colour}' stroke-width='1.6'", label))
    known = [(x, y) for x, y in zip(xs, drawn, strict=True) if y is not None]
    for x, y in known if len(known) <= DOTS else known[-1:]:
        title = f"<title>{escape(label)}: {ground.text(y)} at {x:.10g}</title>"
        parts.append(f"<circle cx='{ground.x(x)}' cy='{ground.y(y)}' r='2' fill='{colour}'>{title}</circle>")
    return "".join(parts)


def _path(xs: Sequence[float], values: Sequence[float | None], ground: _Ground, style: str, label: str = "") -> str:
    path, pen = [], "M"
    for x, y in zip(xs, values, strict=True):
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{ground.x(x)} {ground.y(y)}")
        pen = "L"
    title = f"<title>{escape(label)}</title>" if label else ""
    return f"<path d='{''.join(path)}' fill='none' {style}>{title}</path>"


def _band(xs: Sequence[float], spreads: Sequence[Sequence[float]], ground: _Ground) -> str:
    """Draw the range of ranks."""
    known = [
        (ground.x(x), ground.y(min(each)), ground.y(max(each))) for x, each in zip(xs, spreads, strict=True) if each
    ]
    if len(known) < 2 or all(low == high for _, low, high in known):
        return ""
    there = "L".join(f"{x} {low}" for x, low, _ in known)
    back = "L".join(f"{x} {high}" for x, _, high in reversed(known))
    title = "<title>from the lowest rank to the highest</title>"
    return f"<path d='M{there}L{back}Z' fill='{COLOURS[0]}' opacity='.22'>{title}</path>"


def _gaps(columns: Mapping[float, Column], scale: Callable[[float], float | None], ground: _Ground) -> str:
    """Mark the columns in which values cannot be drawn."""
    marks = []
    for x, column in columns.items():
        odd = {rank: value for rank, values in column.items() for value in values if scale(value) is None}
        if odd:
            ranks = [rank for rank in odd if rank is not None]
            who = f"{format_ranks(ranks)}: " if ranks else ""
            values = ", ".join(sorted({number(value) for value in odd.values()}))
            marks.append(
                f"<path d='M{ground.x(x)} {BOTTOM - 7}v7' stroke='#d9534f' stroke-width='2'>"
                f"<title>{who}{values} at {x:.10g}</title></path>"
            )
    return "".join(marks)


def _smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return the running mean, in which a value counts ``weight`` times less with each step."""
    total = norm = 0.0
    smoothed: list[float | None] = []
    for value in values:
        if value is not None:
            total, norm = total * weight + value, norm * weight + 1.0
        smoothed.append(None if value is None else total / norm)
    return smoothed


def _title(curve: Curve, look: Look) -> str:
    name = curve.summary.name if len(curve.summary.name) <= 28 else f"{curve.summary.name[:27]}…"
    known = [rank for rank in curve.ranks if rank is not None]
    how = (["log"] if look.log else []) + ([f"smooth {look.smooth:g}"] if look.smooth else [])
    if look.by_rank:
        how += [f"<tspan fill='{COLOURS[n % 8]}'>●</tspan>{rank}" for n, rank in enumerate(known[:10])]
        how += ["..."] if len(known) > 10 else []
    elif len(known) > 1:
        how.append(f"ranks {format_ranks(known)}: mean, range")
    value = number(mean(curve.summary.last))
    title = f"<title>{escape(curve.summary.line())}</title>"
    return (
        f"<text x='{LEFT}' y='16' {TEXT}><tspan font-size='12' font-weight='600'>{escape(name)}</tspan>"
        f"  <tspan font-size='12'>{value}</tspan>{title}</text>"
        f"<text x='{RIGHT}' y='16' text-anchor='end' opacity='.7' {TEXT}>{' '.join(how)}</text>"
    )


def _axes(ground: _Ground, unit: str) -> str:
    """Draw lines and numbers along both axes."""
    parts = []
    for y in _ticks(ground.low, ground.high, 4):
        parts.append(
            f"<path d='M{LEFT} {ground.y(y)}H{RIGHT}' stroke='currentColor' opacity='.15'/>"
            f"<text x='{LEFT - 4}' y='{ground.y(y) + 3}' text-anchor='end' {TEXT} opacity='.8'>{ground.text(y)}</text>"
        )
    for x in _ticks(ground.first, ground.last, 5):
        parts.append(
            f"<text x='{ground.x(x)}' y='{BOTTOM + 13}' text-anchor='middle' {TEXT} opacity='.8'>{x:.6g}</text>"
        )
    parts.append(f"<text x='{RIGHT}' y='{BOTTOM + 25}' text-anchor='end' {TEXT} opacity='.8'>{unit}</text>")
    parts.append(f"<path d='M{LEFT} {BOTTOM}H{RIGHT}' stroke='currentColor' opacity='.5'/>")
    return "".join(parts)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between two ends."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough or nice == 10)
    begin = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(begin, begin + most + 2) if n * step <= high + step * 1e-9]
