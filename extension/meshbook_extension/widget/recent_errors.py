"""The last failures of a session, as text: cells and their values may be forgotten meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from meshbook.errors import Failure, group_failures
from meshbook.wording import format_ranks
from meshbook_extension.failure_view import INTERRUPT, LOST

KEPT = 20
LONGEST = 300


class RecentError(NamedTuple):
    """Equal failures of some ranks in one cell."""

    mesh: str
    what: str
    """``cell 7``"""
    ranks: str
    text: str
    """``ValueError: bad shard``"""
    where: str
    at: float
    """Seconds since the epoch; 0 where it is not known."""


class RecentErrors:
    """Newest last. Appending and reading are safe from any thread."""

    def __init__(self) -> None:
        self._errors: deque[RecentError] = deque(maxlen=KEPT)

    def note(self, mesh: str, what: str, failures: Iterable[Failure]) -> None:
        """Keep the failures of a cell that has ended."""
        self._errors.extend(describe(mesh, what, failures))

    def of(self, mesh: str) -> list[RecentError]:
        """Those of one mesh."""
        return [error for error in tuple(self._errors) if error.mesh == mesh]


def describe(mesh: str, what: str, failures: Iterable[Failure]) -> list[RecentError]:
    """Equal ones once; left out are ranks that were interrupted, and those that ended, which their state tells."""
    now = time.time()
    return [
        RecentError(mesh, what, format_ranks(failure.rank for failure in group), _headline(first), first.where, now)
        for group in group_failures([failure for failure in failures if failure.ename not in (INTERRUPT, LOST)])
        for first in group[:1]
    ]


def _headline(failure: Failure) -> str:
    first_line = failure.evalue.splitlines()[0] if failure.evalue else ""
    return (f"{failure.ename}: {first_line}" if first_line else failure.ename)[:LONGEST]
