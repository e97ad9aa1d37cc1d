"""How exceptions of ranks are shown while their cell goes on: at once, equal ones once, few in full. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from meshbook.errors import Failure, RankDeath, describe_deaths, group_failures
from meshbook.formatting import name_ranks
from meshbook_extension.output.publisher import CellSink

TOGETHER_S = 0.02
"""How long a first failure waits for equal ones of other ranks."""
FULL = 4
"""Different failures of one cell that are shown with their tracebacks."""
BRIEF = 20
"""Further ones that get a line."""
INTERRUPT = "KeyboardInterrupt"
DISAGREE = "RanksDisagree"
LOST = "WorkerLost"
"""Not raised by the rank, which has ended; in place of a traceback it has the last lines of the rank's log."""


class FailureView:
    """The failures of one cell, shown and not yet shown."""

    def __init__(self) -> None:
        self._waiting: list[Failure] = []
        self._shown: list[Failure] = []
        self._due_at: float | None = None

    def add(self, failure: Failure, now: float) -> None:
        """Take a failure, to be shown within `TOGETHER_S`."""
        self._waiting.append(failure)
        self._due_at = self._due_at or now + TOGETHER_S

    def due_at(self) -> float | None:
        """When `show` should be called; None when nothing waits."""
        return self._due_at

    def is_due(self, now: float) -> bool:
        """Whether it should be called by now."""
        return self._due_at is not None and self._due_at <= now

    def show(self, sink: CellSink) -> None:
        """Write the failures that wait, equal ones once."""
        groups = group_failures(self._waiting)
        self._waiting, self._due_at = [], None
        unnamed: list[int] = []
        for group in groups:
            first = group[0]
            ranks = [failure.rank for failure in group]
            known = any(first.same_cause(failure) for failure in self._shown)
            if not known:
                self._shown.append(first)
            if not known and len(self._shown) <= FULL and first.ename != INTERRUPT:
                if first.ename == LOST:
                    deaths = [RankDeath(f.rank, f.host, f.evalue, "\n".join(f.traceback)) for f in group]
                    sink.error(first.ename, first.evalue, describe_deaths(deaths))
                else:
                    sink.error(first.ename, first.evalue, [headline(first, ranks), *first.traceback])
            elif len(self._shown) <= FULL + BRIEF:
                sink.stream("stderr", f"{headline(first, ranks, brief=True)}\n")
            else:
                unnamed += ranks
        if unnamed:
            sink.stream("stderr", f"{name_ranks(unnamed)} raised too, each something else\n")


def headline(failure: Failure, ranks: Iterable[int], *, brief: bool = False) -> str:
    """``ranks 0-3 raised ValueError: bad shard``, in brief with its place and on one line."""
    where = f" ({failure.where})" if failure.where and brief else ""
    if failure.ename == INTERRUPT:
        return f"{name_ranks(ranks)} stopped at an interrupt{where}"
    if failure.ename == LOST:
        return f"{name_ranks(ranks)} ended: {failure.evalue}"
    if failure.ename == DISAGREE:
        return failure.evalue.replace("\n", ";") if brief else failure.evalue
    value = failure.evalue.splitlines()[0] if brief and failure.evalue else failure.evalue
    return f"{name_ranks(ranks)} raised {failure.ename}{': ' if value else ''}{value}{where}"
