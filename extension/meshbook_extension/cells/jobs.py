"""Cells that run on while the notebook goes on: ``%%mesh --async``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshbook.errors import MeshDetachedError, UsageError
from meshbook.formatting import name_ranks
from meshbook_extension.output.failures import INTERRUPT
from meshbook_extension.output.labels import format_seconds

if TYPE_CHECKING:
    from meshbook_extension.cells.running import RunningCell

KEPT = 50
"""Jobs that have ended and can still be asked for."""


@dataclass
class Job:
    """A job is one cell that was started with ``--async``."""

    number: int
    cell: RunningCell
    mesh: str
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def state(self) -> str:
        """``running``, ``done``, ``failed``, ``cancelled``, or ``left running`` on a mesh that was detached."""
        if not self.cell.run.future.done():
            return "running"
        if self.cell.run.future.exception(0) is None:
            return "done"
        if isinstance(self.cell.run.future.exception(0), MeshDetachedError):
            return "left running"
        failures = [done.failure for done in self.cell.output.done.values() if done.failure is not None]
        stopped = bool(failures) and all(failure.ename == INTERRUPT for failure in failures)
        return "cancelled" if stopped else "failed"

    @property
    def duration_s(self) -> float:
        """From its start to its end, or to now."""
        return (self.ended or time.monotonic()) - self.started

    def describe(self) -> str:
        """One line for ``%mesh jobs``."""
        left = self.cell.waiting
        on = f", {name_ranks(left)} still at it" if left and len(left) < len(self.cell.ranks) else ""
        return (
            f"job {self.number}: {self.state}, {format_seconds(self.duration_s)}, {self.cell.what} on "
            f'{name_ranks(self.cell.ranks)} of "{self.mesh}"{on}'
        )


class Jobs:
    """The jobs of a session, by number, and the cells that are waited for."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._next = 1
        self.foreground: list[RunningCell] = []
        """Cells that a magic waits for; one, unless subshells run some too."""

    @property
    def next_number(self) -> int:
        """What the next job will be called."""
        return self._next

    def add(self, cell: RunningCell, mesh: str, number: int | None = None) -> Job:
        """Give a running cell a number: the next one, or the one that it had in an earlier kernel."""
        job = Job(self._next if number is None else number, cell, mesh)
        self.count_from(job.number + 1)
        self._jobs[job.number] = job
        ended = [number for number, old in self._jobs.items() if old.ended is not None]
        for number in ended[:-KEPT]:
            del self._jobs[number]
        return job

    def count_from(self, number: int) -> None:
        """Numbers below ``number`` are taken."""
        self._next = max(self._next, number)

    def all(self) -> list[Job]:
        """Every job, oldest first."""
        return list(self._jobs.values())

    def running(self) -> list[Job]:
        """Those that have not ended."""
        return [job for job in self._jobs.values() if job.state == "running"]

    def find(self, word: str) -> Job:
        """The job with this number.

        Raises: UsageError naming those that there are.
        """
        if not self._jobs:
            raise UsageError("no job yet. Start one: %%mesh --async above a cell")
        if not word.isdigit() or int(word) not in self._jobs:
            known = ", ".join(str(number) for number in self._jobs)
            raise UsageError(f'there is no job "{word}"; jobs: {known}. See them: %mesh jobs')
        return self._jobs[int(word)]
