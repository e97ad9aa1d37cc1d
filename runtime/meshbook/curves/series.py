"""The series of logged scalars: by name, by run of a cell, by rank. Bounded, and safe for any thread.

A series that is full halves its resolution: of each stretch it keeps the lowest and the highest point, so that spikes
stay, and from then on it takes in stretches of twice the length. A value that is not finite stands in for the lowest.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

SERIES_POINTS = 2000
"""The most points of one series."""
TOTAL_POINTS = 4_000_000
"""The most points of all series together, roughly: they take 24 bytes each."""
LEAST_POINTS = 64
"""The least points of one series, however many there are."""
STEP_MAX = 1 << 53
"""The furthest step from 0."""
ODD_KEPT = 1000
"""The number of points that are not finite which are kept for the alarm."""
RUNS_KEPT = 16
"""The number of runs of one name that are kept: those that were logged to last."""


class Points(NamedTuple):
    """Points in the order in which they were logged; three arrays of the same length."""

    steps: array[float]
    times: array[float]
    """The seconds since the epoch."""
    values: array[float]

    @classmethod
    def none(cls) -> Points:
        return cls(array("d"), array("d"), array("d"))

    @classmethod
    def of_bytes(cls, *columns: bytes) -> Points:
        """Return the points of columns of float64. Raises: ValueError where they do not fit each other."""
        points = cls(*(array("d", column) for column in columns))
        if not points.values or len({len(column) for column in points}) > 1:
            raise ValueError("columns of different lengths, or none")
        if not all(
            abs(step) <= STEP_MAX and math.isfinite(at) for step, at in zip(points.steps, points.times, strict=True)
        ):
            raise ValueError("steps or times that cannot be")
        return points

    def extend(self, other: Points) -> None:
        for mine, more in zip(self, other, strict=True):
            mine.extend(more)

    def part(self, begin: int, end: int | None = None) -> Points:
        return Points(self.steps[begin:end], self.times[begin:end], self.values[begin:end])

    def choose(self, kept: Sequence[int]) -> Points:
        """Return the points with these indices."""
        return Points(*(array("d", [column[at] for at in kept]) for column in self))


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Return the indices of the lowest and the highest value of a stretch, in order; of a value not finite, if any."""
    part = values[begin:end]
    if math.isfinite(sum(part)):
        return sorted({begin + part.index(min(part)), begin + part.index(max(part))})
    finite = [at for at, value in enumerate(part, begin) if math.isfinite(value)]
    odd = next((at for at, value in enumerate(part, begin) if not math.isfinite(value)), begin)
    return sorted({odd, max(finite, key=values.__getitem__, default=odd)})


class LoggedPoints(NamedTuple):
    """The points of one name that were logged since the batch before."""

    name: str
    logged: int
    """The number of points that were logged, of which some may have been left out."""
    points: Points


class Series:
    """The points of one name on one rank in one run."""

    def __init__(self) -> None:
        self.logged = 0
        """The number of points that were logged, also of those left out."""
        self.low, self.high, self.last = math.inf, -math.inf, math.nan
        """The lowest and the highest finite value, and the last one."""
        self.last_step = self.last_time = 0.0
        self._points, self._rest = Points.none(), Points.none()
        self._stretch = 2
        """The number of points of which two are kept."""
        self._filled = 0
        """The number of points that `_rest` stands for."""

    def add(self, logged: int, points: Points, limit: int) -> None:
        """Take in points, and keep at most some ``limit`` of all. logged: the number that was logged."""
        self.logged += logged
        self.last_step, self.last_time, self.last = (column[-1] for column in points)
        for value in points.values:
            if value < self.low and value != -math.inf:
                self.low = value
            if value > self.high and value != math.inf:
                self.high = value
        if self._stretch == 2:
            self._points.extend(points)
        else:
            self._take_in(points)
        while len(self._points.values) > limit:
            self._halve()

    def _take_in(self, points: Points) -> None:
        begin, size = 0, len(points.values)
        while begin < size:
            end = min(size, begin + max(0, self._stretch - self._filled))
            self._rest.extend(points.part(begin, end))
            self._filled += end - begin
            begin = end
            if self._filled >= self._stretch or len(self._rest.values) > LEAST_POINTS:
                self._rest = self._rest.choose(extremes(self._rest.values, 0, len(self._rest.values)))
            if self._filled >= self._stretch:
                self._points.extend(self._rest)
                self._rest, self._filled = Points.none(), 0

    def _halve(self) -> None:
        """Keep two of each four points; the next stretch is twice as long."""
        size = len(self._points.values)
        whole = size - size % 4
        kept = [at for begin in range(0, whole, 4) for at in extremes(self._points.values, begin, begin + 4)]
        left = self._points.part(whole)
        self._points = self._points.choose(kept)
        self._stretch *= 2
        self._rest, rest = left, self._rest
        self._rest.extend(rest)
        self._filled += len(left.values) * self._stretch // 4

    def points(self) -> Points:
        """Return a copy of the points, the last one included."""
        copy = self._points.part(0)
        copy.extend(self._rest)
        if self.logged and (copy.steps[-1], copy.times[-1]) != (self.last_step, self.last_time):
            copy.extend(Points(array("d", [self.last_step]), array("d", [self.last_time]), array("d", [self.last])))
        return copy


class Run:
    """The series of one name by rank, in one run of a cell, and in further ones that went on counting.

    The series of a process that is no rank stands under None.
    """

    def __init__(self, output: int) -> None:
        self.outputs = {output}
        self.series: dict[int | None, Series] = {}
        self.last_step = -math.inf
        self.first_time, self.last_time = math.inf, -math.inf

    def note(self, points: Points) -> None:
        """Note how far the steps and times go."""
        self.last_step = max(self.last_step, max(points.steps))
        self.first_time = min(self.first_time, points.times[0])
        self.last_time = max(self.last_time, points.times[-1])


def points_of(series: Mapping[int | None, Series]) -> dict[int | None, Points]:
    """Return a copy of the points by rank, in the order of ranks."""
    return {rank: series[rank].points() for rank in sorted(series, key=lambda rank: rank or 0)}


class MetricRow(NamedTuple):
    """A logged point."""

    name: str
    rank: int | None
    """The rank; None for a process that is no rank."""
    run: int
    """The number of the run of cells that logged it: 1 for the first one that is kept."""
    step: float
    time: float
    """The seconds since the epoch."""
    value: float


class Metrics:
    """The scalars that the ranks of one mesh have logged, or this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.odd: deque[MetricRow] = deque(maxlen=ODD_KEPT)
        """The last points that are not finite, the first of each batch; their run counts as 0."""
        self.odd_count = 0
        """The number of such points so far."""
        self._runs: dict[str, list[Run]] = {}
        self._series = 0

    def add(self, output: int, rank: int | None, batches: Iterable[LoggedPoints]) -> None:
        """Take in the batches of one rank, and one output."""
        with self._lock:
            for name, logged, points in batches:
                odd = (at for at, value in enumerate(points.values) if not math.isfinite(value))
                if not math.isfinite(sum(points.values)) and (first := next(odd, None)) is not None:
                    self.odd.append(MetricRow(name, rank, 0, *(column[first] for column in points)))
                    self.odd_count += 1
                run = self._run_for(name, output, points.steps[0])
                if (series := run.series.get(rank)) is None:
                    series = run.series[rank] = Series()
                    self._series += 1
                limit = max(LEAST_POINTS, min(SERIES_POINTS, TOTAL_POINTS // self._series))
                series.add(logged, points, limit)
                run.note(points)

    def _run_for(self, name: str, output: int, first_step: float) -> Run:
        """Return the run that an output belongs to: a new one, unless its steps go on where the last one ended."""
        runs = self._runs.setdefault(name, [])
        for run in reversed(runs):
            if output in run.outputs:
                return run
        if runs and first_step > runs[-1].last_step:
            runs[-1].outputs.add(output)
            return runs[-1]
        if len(runs) == RUNS_KEPT:
            oldest = min(runs, key=lambda run: run.last_time)
            self._series -= len(oldest.series)
            runs.remove(oldest)
        runs.append(Run(output))
        return runs[-1]

    def names(self) -> tuple[str, ...]:
        """Return the names, in the order in which they were first logged."""
        with self._lock:
            return tuple(self._runs)

    def latest(self, name: str, ranks: Collection[int] | None = None) -> dict[int | None, Points]:
        """Return the points of `series`."""
        series = self.series(name, ranks)
        with self._lock:
            return points_of(series)

    def series(self, name: str, ranks: Collection[int] | None = None) -> dict[int | None, Series]:
        """Return the series of the last run by rank, and of the runs beside it; none for a name that was never logged.

        Jobs on several slices have a run each. Those that still logged when the last one began are beside it.
        ranks: of these alone.
        """
        found: dict[int | None, Series] = {}
        with self._lock:
            runs = self._runs.get(name, [])
            for run in runs:
                if run.last_time >= runs[-1].first_time:
                    found.update(run.series)
        return found if ranks is None else {rank: each for rank, each in found.items() if rank in ranks}

    def rows(self) -> Iterator[MetricRow]:
        """Yield the points of all names, runs and ranks."""
        for name in self.names():
            with self._lock:
                runs = [points_of(run.series) for run in self._runs[name]]
            for number, ranks in enumerate(runs, 1):
                for rank, points in ranks.items():
                    for step, at, value in zip(*points, strict=True):
                        yield MetricRow(name, rank, number, step, at, value)
