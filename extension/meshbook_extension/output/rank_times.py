"""The times of a cell's ranks, which show a slow rank also where all end together since they wait for each other.

    [0-7] 0.98 s (slowest rank 3: 0.97 s of own work, median 0.33 s; up to 0.65 s waiting in collectives)
      rank 2  0.98 s  █████████░░░░░░░░░░░░░░░░░░░
      rank 3  0.98 s  ███████████████████████████░  slowest

A rank's time is its own work and its waits in collectives. Many ranks are grouped: the slowest, the
median, a histogram. As HTML the bars keep their scale in any font; there is no style sheet and no script, since viewers
of saved notebooks drop both. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from meshbook.calls.call_future import CellRun
from meshbook.formatting import Table, format_some_ranks
from meshbook_extension.output.labels import format_seconds, label

ROWS = 16
"""The most ranks that are shown one by one; more are grouped."""
WIDTH = 32
BINS = 8
SLOWEST = 3
"""The number of slowest ranks that are shown one by one where there are many."""
SLOW_FACTOR, SLOW_S = 1.25, 0.02
"""A straggler works this many times as long as the median, and this much longer."""
WAITED_SHARE, WAITED_S = 0.02, 0.002
"""The shortest waits that are shown: a part of the cell's time, seconds."""
WORK, WAIT = "█", "░"
_WORKS, _SLOW = "#1e88e5", "#ef6c00"
_WAITS = "repeating-linear-gradient(135deg,rgba(128,128,128,.55) 0 2px,rgba(128,128,128,.15) 2px 5px)"


class RankTime(NamedTuple):
    """The times of one rank."""

    rank: int
    total_s: float
    waited_s: float

    @property
    def own_s(self) -> float:
        """The time without the rank's waits in collectives."""
        return max(0.0, self.total_s - self.waited_s)


class Bin(NamedTuple):
    """The ranks that worked about equally long."""

    low_s: float
    high_s: float
    ranks: tuple[int, ...]


def times_of(run: CellRun) -> list[RankTime]:
    """Return the times of the ranks that have ended, by rank."""
    return [RankTime(rank, run.durations_s[rank], run.waited_s.get(rank, 0.0)) for rank in sorted(run.durations_s)]


def has_waits(times: Sequence[RankTime]) -> bool:
    """Whether ranks waited for each other so long that it matters."""
    longest_s = max(time.total_s for time in times)
    return max(time.waited_s for time in times) > max(WAITED_S, WAITED_SHARE * longest_s)


def slowest_of(times: Sequence[RankTime]) -> RankTime:
    """Return the rank that worked longest."""
    return max(times, key=lambda time: (time.own_s, time.total_s))


def stragglers(times: Sequence[RankTime]) -> frozenset[int]:
    """Return the ranks that work much longer than most."""
    median_s = statistics.median(time.own_s for time in times)
    limit_s = max(SLOW_FACTOR * median_s, median_s + SLOW_S)
    return frozenset(time.rank for time in times if time.own_s > limit_s)


def headline(times: Sequence[RankTime]) -> str:
    """Write ``[0-7] 0.98 s (slowest rank 3: 0.98 s, median 0.41 s)``, in terms of own work where ranks waited."""
    text = f"{label(time.rank for time in times)} {format_seconds(max(time.total_s for time in times))}"
    waited = has_waits(times)
    waited_s = format_seconds(max(time.waited_s for time in times))
    if len(times) == 1:
        return f"{text} ({waited_s} of it waiting in collectives)" if waited else text
    slowest = slowest_of(times)
    median = format_seconds(statistics.median(time.own_s for time in times))
    own = f"{format_seconds(slowest.own_s)}{' of own work' if waited else ''}"
    rest = f"; up to {waited_s} waiting in collectives" if waited else ""
    return f"{text} (slowest rank {slowest.rank}: {own}, median {median}{rest})"


def charts(times: Sequence[RankTime]) -> list[Table]:
    """Return a bar per rank, or of many the slowest, the median, the fastest and a histogram; nothing for one rank."""
    if len(times) < 2:
        return []
    slow, rows, longest_s = stragglers(times), rows_of(times), max(time.total_s for time in times)
    digits = max(len(str(time.rank)) for time, _ in rows)
    cells = [(f"rank {time.rank:{digits}}", format_seconds(time.total_s), _bar(time, longest_s), n) for time, n in rows]
    bars = {
        (at, 2): [(time.own_s / longest_s, _SLOW if time.rank in slow else _WORKS), (time.waited_s / longest_s, _WAITS)]
        for at, (time, _) in enumerate(rows)
        if longest_s
    }
    titles = {
        (at, 2): f"{format_seconds(time.own_s)} own work, {format_seconds(time.waited_s)} waiting"
        for at, (time, _) in enumerate(rows)
    }
    legend = [f"{WORK} own work  {WAIT} waiting in collectives"] if has_waits(times) else []
    is_grouped = len(times) > ROWS
    tables = [Table((), cells, "<>", bars=bars, titles=titles, notes=[] if is_grouped else legend)]
    if is_grouped:
        found, title = bins(times), f"\nranks by {'own work' if legend else 'time'}"
        most = max(len(each.ranks) for each in found)
        drawn = [WORK * max(1, round(WIDTH * len(each.ranks) / most)) if each.ranks else "" for each in found]
        counted = zip(found, drawn, strict=True)
        cells = [(_span(each), str(len(each.ranks)), bar, few_ranks(each)) for each, bar in counted]
        bars = {(at, 2): [(len(each.ranks) / most, _WORKS)] for at, each in enumerate(found)}
        tables.append(Table((), cells, ">>", title, legend, bars=bars))
    return tables


def chart(times: Sequence[RankTime]) -> str:
    """Return the charts as text."""
    return "\n".join(f"  {line}".rstrip() for table in charts(times) for line in str(table).splitlines())


def rows_of(times: Sequence[RankTime]) -> list[tuple[RankTime, str]]:
    """Return the ranks to show, each with its note: all in their order, or of many the slowest, median and fastest."""
    slow, slowest = stragglers(times), slowest_of(times)
    if len(times) <= ROWS:
        return [(time, "slowest" if slow and time is slowest else "") for time in times]
    ordered = sorted(times, key=lambda time: time.own_s, reverse=True)
    middle = ordered[len(ordered) // 2]
    first = [(time, "slowest" if slow and time is slowest else "") for time in ordered[:SLOWEST]]
    return [*first, (middle, "median"), (ordered[-1], "fastest")]


def _bar(time: RankTime, longest_s: float) -> str:
    whole = _cells(time.total_s, longest_s)
    own = min(whole, _cells(time.own_s, longest_s))
    return WORK * own + WAIT * (whole - own)


def _cells(seconds: float, longest_s: float) -> int:
    return round(WIDTH * seconds / longest_s) if longest_s else 0


def bins(times: Sequence[RankTime]) -> list[Bin]:
    """Return equal spans of own work from fastest to slowest, with the ranks in each; one span where all are alike."""
    low_s, high_s = min(time.own_s for time in times), max(time.own_s for time in times)
    if high_s - low_s <= max(0.001, 0.01 * high_s):
        return [Bin(low_s, high_s, tuple(time.rank for time in times))]
    step_s = (high_s - low_s) / BINS
    found: list[list[int]] = [[] for _ in range(BINS)]
    for time in times:
        found[min(BINS - 1, int((time.own_s - low_s) / step_s))].append(time.rank)
    return [
        Bin(low_s + step_s * index, low_s + step_s * (index + 1), tuple(ranks)) for index, ranks in enumerate(found)
    ]


def _span(each: Bin) -> str:
    return f"{format_seconds(each.low_s).rpartition(' ')[0]}-{format_seconds(each.high_s)}"


def few_ranks(each: Bin) -> str:
    """Name the ranks where they are few: ``rank 17``, ``ranks 3,9``."""
    if not 0 < len(each.ranks) <= ROWS:
        return ""
    return f"rank{'' if len(each.ranks) == 1 else 's'} {format_some_ranks(each.ranks, 30)}"
