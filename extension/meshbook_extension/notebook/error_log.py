"""The last failures of a session's ranks, as text: cells and their values may be forgotten meanwhile."""

from __future__ import annotations

import linecache
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshbook.actor import MeshFailure
from meshbook.errors import CallFailed, Failure, FailureKind, RankDeath, UsageError, WorkerLost, group_failures
from meshbook.formatting import group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.source.location import number_of_input

KEPT = 50
TRACEBACK_CHARS = 60_000
SAVED, SAVED_CHARS = 20, 4_000
"""The number of last errors that go to the notebook's next kernel, and the characters of each traceback."""
EARLIER = " (earlier kernel)"


class LoggedError(NamedTuple):
    """The equal failures of some ranks in one cell."""

    number: int
    """The error's number for the person; newer ones have higher numbers."""
    mesh: str
    what: str
    """The place ``cell 7``; empty for a rank that ended while it was idle."""
    ranks: tuple[int, ...]
    ename: str
    """The exception's class."""
    evalue: str
    """The exception's text; of ranks that ended, the cause."""
    where: str
    traceback: str
    """The traceback with ANSI colours; of ranks that ended, the last lines of their log."""
    at: float
    """The time in seconds since the epoch."""
    kind: FailureKind = FailureKind.RAISED

    @classmethod
    def of(cls, mesh: str, what: str, equal: Sequence[Failure], number: int = 0) -> LoggedError:
        """Return the error of failures with an equal cause, as of now."""
        first, ranks, traceback = (
            equal[0],
            tuple(failure.rank for failure in equal),
            _cut("\n".join(equal[0].traceback)),
        )
        failed = first.ename, first.evalue, first.where, traceback
        return cls(number, mesh, what, ranks, *failed, time.time(), first.kind)

    @property
    def headline(self) -> str:
        """The text ``ValueError: bad shard``, on one line."""
        first_line = self.evalue.splitlines()[0] if self.evalue else ""
        if self.kind is FailureKind.LOST:
            return f"ended: {first_line}"
        if self.kind is FailureKind.INTERRUPTED:
            return f"interrupted {first_line}".rstrip()
        return f"{self.ename}: {first_line}" if first_line else self.ename


class ErrorLog:
    """The errors of a session, oldest first. Noting and reading are safe from any thread."""

    def __init__(self) -> None:
        self._errors: deque[LoggedError] = deque(maxlen=KEPT)
        self._noted: deque[list[Failure]] = deque(maxlen=4 * KEPT)
        """The failures that were noted, so that one raised again, by ``%mesh wait`` say, is not noted twice."""
        self._dead: set[tuple[str, int]] = set()
        self._well_at: dict[tuple[str, int], float] = {}
        """The time at which a rank of a mesh last ended a cell well."""
        self._next = 1
        self._lock = threading.Lock()

    def note(self, mesh: str, what: str, failures: Iterable[Failure], succeeded: Iterable[int] = ()) -> None:
        """Keep the failures of a cell that has ended, equal ones once. succeeded: the ranks that ended it well."""
        with self._lock:
            self._well_at.update({(mesh, rank): time.time() for rank in succeeded})
            known = {id(old) for batch in self._noted for old in batch}  # alive, so their ids are theirs alone
            fresh = [failure for failure in failures if id(failure) not in known]
            if fresh:
                self._noted.append(fresh)
            for group in group_failures(_merge_interrupts(fresh)):
                error = LoggedError.of(mesh, what, group, self._next)
                if error.kind is FailureKind.LOST:
                    self._dead.update((mesh, rank) for rank in error.ranks)
                self._errors.append(error)
                self._next += 1

    def note_raised(self, mesh: str, what: str, error: BaseException | None) -> None:
        """Keep the failures in an error that a call of the notebook's own code raised."""
        if isinstance(error, CallFailed):
            self.note(mesh, what, error.failures)
        elif isinstance(error, WorkerLost):
            self._note_deaths(mesh, what, [d for d in error.deaths if (mesh, d.rank) not in self._dead])

    def note_unhandled(self, failure: MeshFailure) -> None:
        """Keep errors of actors for which no call waited and which no owner has handled."""
        raised = [one for one in failure.failures if one.kind is not FailureKind.LOST]  # `note_lost` knows of the ends
        self.note(failure.procs_name, failure.what, raised)

    def note_lost(self, meshes: Iterable[ProcMesh]) -> None:
        """Keep the ends of idle ranks, of which no cell has told."""
        deaths = {procs.name: states.deaths(procs) for procs in meshes}
        self._dead &= {(mesh, death.rank) for mesh, each in deaths.items() for death in each}
        for mesh, each in deaths.items():
            self._note_deaths(mesh, "", [death for death in each if (mesh, death.rank) not in self._dead])

    def _note_deaths(self, mesh: str, what: str, deaths: Sequence[RankDeath]) -> None:
        named = [death._replace(log_tail=name_notebook_cells(death.log_tail)) for death in deaths]
        self.note(mesh, what, [death.as_failure() for death in named])

    def all(self) -> list[LoggedError]:
        """Return the errors that are kept."""
        return list(self._errors)

    def of(self, mesh: str) -> list[LoggedError]:
        """Return the errors of one mesh."""
        return [error for error in self.all() if error.mesh == mesh]

    def settled(self, mesh: str) -> frozenset[int]:
        """Return the numbers of the errors of a mesh whose ranks have all ended a later cell well."""
        return frozenset(
            error.number
            for error in self.of(mesh)
            if all(self._well_at.get((mesh, rank), 0.0) > error.at for rank in error.ranks)
        )

    def saved(self, meshes: Collection[str]) -> tuple[LoggedError, ...]:
        """Return the last errors of ``meshes`` for the next kernel, whose cells have numbers of their own."""
        mine = [error for error in self.all() if error.mesh in meshes][-SAVED:]
        return tuple(
            error._replace(
                what=error.what if not error.what or error.what.endswith(EARLIER) else error.what + EARLIER,
                traceback=_cut(error.traceback, SAVED_CHARS),
            )
            for error in mine
        )

    def take_up(self, saved: Iterable[LoggedError]) -> None:
        """Add the errors of an earlier kernel."""
        with self._lock:
            for error in saved:
                self._errors.append(error._replace(number=self._next))
                self._next += 1

    def find(self, number: int) -> LoggedError:
        """Return the error of this number. Raises: UsageError."""
        kept = self.all()
        for error in kept:
            if error.number == number:
                return error
        known = f"{kept[0].number} to {kept[-1].number} are kept" if kept else "no rank has failed yet"
        raise UsageError(f"there is no error {number}: {known}. List them: %mesh errors")


def describe_interrupts(failures: Iterable[Failure]) -> str:
    """Write where interrupted ranks were: ``at cell 7, line 3``, or ``ranks 0,2 at cell 7, line 3; rank 1 at ...``."""
    interrupted = [failure for failure in failures if failure.kind is FailureKind.INTERRUPTED]
    places = group_ranks(
        sorted((one.rank, f"at {one.where}" if one.where else "before its first line") for one in interrupted)
    )
    told = [place if len(places) == 1 else f"{name_ranks(ranks)} {place}" for place, ranks in places.items()]
    return "; ".join(told)


def _merge_interrupts(failures: Sequence[Failure]) -> list[Failure]:
    """Merge the failures of interrupted ranks into one text, which says where each was."""
    interrupted = [failure for failure in failures if failure.kind is FailureKind.INTERRUPTED]
    text = describe_interrupts(interrupted)
    text = f"({text})" if ";" in text else text
    merged = [failure._replace(evalue=text, where="", traceback=()) for failure in interrupted]
    return [*(failure for failure in failures if failure.kind is not FailureKind.INTERRUPTED), *merged]


def _cut(text: str, chars: int = TRACEBACK_CHARS) -> str:
    """Cut the middle out of a text that is too long."""
    half = chars // 2
    return (
        text if len(text) <= 2 * half else f"{text[:half]}\n... {len(text) - 2 * half:,} characters ...\n{text[-half:]}"
    )


_NOTEBOOK_FILE = re.compile(r"(\S*/ipykernel_\d+/\d+\.py)(?=, line \d)")
"""The file name that ipykernel gives a cell, in the last words of a rank."""


def name_notebook_cells(text: str) -> str:
    """Write ``/tmp/ipykernel_8/19.py, line 3`` in ``text`` as ``cell 7, line 3``, in the process of that notebook."""

    def label(found: re.Match[str]) -> str:
        source = "".join(linecache.getlines(found[1]))
        if not source:
            return found[0]
        number = number_of_input(source)
        return "a cell" if number is None else f"cell {number}"

    return _NOTEBOOK_FILE.sub(label, text)
