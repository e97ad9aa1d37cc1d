"""The table of logged scalars, as `meshbook.metrics` gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from meshbook.curves.series import MetricRow, Metrics, Series
from meshbook.errors import UsageError
from meshbook.formatting import Table, did_you_mean, format_ranks
from meshbook.shape.value_tables import to_frame

HEAD = ("name", "ranks", "step", "last", "of ranks", "min", "max", "logged")


def number(value: float) -> str:
    """Write a value with four digits: ``0.01234``, ``1.2e-07``, ``nan``."""
    return f"{value:.4g}"


def spread(values: Sequence[float]) -> str:
    """Write the range of values, as in ``1.2..1.27``; a single text where they are alike. Values not finite count."""
    finite = [value for value in values if math.isfinite(value)]
    odd = sorted({number(value) for value in values if not math.isfinite(value)})
    ends = dict.fromkeys([number(min(finite)), number(max(finite))]) if finite else {}
    return ", ".join([*(["..".join(ends)] if ends else []), *odd])


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, NaN where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


class Summary(NamedTuple):
    """The last run of one name."""

    name: str
    ranks: tuple[int, ...]
    """The ranks that logged it; none for a process that is no rank."""
    step: float
    """The last step of all ranks."""
    last: tuple[float, ...]
    """The last value of each rank."""
    low: float
    high: float
    """The lowest and the highest finite value."""
    logged: int
    """The number of values that were logged, of all ranks together."""

    @classmethod
    def of(cls, name: str, series: dict[int | None, Series]) -> Summary:
        known = [series[rank] for rank in sorted(series, key=lambda rank: rank or 0)]
        return cls(
            name,
            tuple(sorted(rank for rank in series if rank is not None)),
            max(each.last_step for each in known),
            tuple(each.last for each in known),
            min(each.low for each in known),
            max(each.high for each in known),
            sum(each.logged for each in known),
        )

    def line(self) -> str:
        """Write it on a line: ``loss 1.234 (0-3: 1.20..1.27) at step 120``."""
        of = f" ({format_ranks(self.ranks)}: {spread(self.last)})" if len(self.ranks) > 1 else ""
        return f"{self.name} {number(mean(self.last))}{of} at step {self.step:.10g}"

    def cells(self) -> tuple[str, ...]:
        """Write the columns of `HEAD`."""
        ends = (number(value) if math.isfinite(value) else "" for value in (self.low, self.high))
        of_ranks = spread(self.last) if len(self.ranks) > 1 else ""
        last = number(mean(self.last))
        return self.name, format_ranks(self.ranks), f"{self.step:.10g}", last, of_ranks, *ends, str(self.logged)


class MetricsTable:
    """The scalars that were logged, with a line for each name; iterating gives every kept point as a `MetricRow`."""

    def __init__(self, sources: Sequence[Metrics], names: Sequence[str] = ()) -> None:
        """names: those to show; all if there are none. Raises: UsageError for a name that was never logged."""
        self._sources = sources
        known = list(dict.fromkeys(name for source in sources for name in source.names()))
        for name in names:
            if name not in known:
                have = f"logged so far: {', '.join(known)}" if known else "nothing was logged yet"
                raise UsageError(f'"{name}" was never logged.{did_you_mean(name, known)} {have.capitalize()}')
        self.names = tuple(names) or tuple(known)

    def summaries(self) -> list[Summary]:
        """Return a summary of the last run of each name."""
        return [
            Summary.of(name, series)
            for name in self.names
            for source in self._sources
            if (series := source.series(name))
        ]

    def __iter__(self) -> Iterator[MetricRow]:
        for source in self._sources:
            for row in source.rows():
                if row.name in self.names:
                    yield row

    def frame(self) -> Any:
        """Return the points as a data frame of pandas or Polars; its columns are those of `MetricRow`.

        Raises: UsageError where neither is installed.
        """
        columns = zip(*self, strict=True) if self.names else ([] for _ in MetricRow._fields)
        return to_frame(dict(zip(MetricRow._fields, map(list, columns), strict=True)))

    def table(self) -> Table:
        """Return the table of the last runs, or the line that says that there are none."""
        rows = [summary.cells() for summary in self.summaries()]
        if not rows:
            return Table((), (), title="nothing was logged yet: meshbook.log(loss=loss) in a mesh cell")
        return Table(HEAD, rows, "<>>>>>>>")

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
