"""The last failures as the widget shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from meshbook.errors import Failure, group_failures
from meshbook.formatting import format_ranks
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.output.failures import INTERRUPT, LOST

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


def shown(errors: Iterable[LoggedError]) -> list[RecentError]:
    """Without ranks that were interrupted, and those that ended, which their state tells."""
    return [
        RecentError(error.mesh, error.what, format_ranks(error.ranks), error.headline[:LONGEST], error.where, error.at)
        for error in errors
        if error.ename not in (INTERRUPT, LOST)
    ]


def describe(mesh: str, what: str, failures: Iterable[Failure]) -> list[RecentError]:
    """The same for failures of a cell that runs on; equal ones once."""
    now = time.time()
    logged = [
        LoggedError(0, mesh, what, tuple(f.rank for f in group), first.ename, first.evalue, first.where, "", now)
        for group in group_failures(failures)
        for first in group[:1]
    ]
    return shown(logged)
