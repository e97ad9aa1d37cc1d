"""A cell on its ranks, from its start to its result or error; and jobs, cells that run beside the notebook."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from meshbook.calls.call_future import CellRun
from meshbook.concurrency.background import is_from_outside
from meshbook.errors import (
    GRADIENTS,
    CallError,
    CallFailed,
    CallInterrupted,
    CallTimeout,
    Failure,
    FailureKind,
    MeshDetachedError,
    MeshStoppedError,
    UsageError,
    WorkerLost,
    describe_deaths,
    group_failures,
    next_steps,
)
from meshbook.formatting import Table, format_ranks, group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.value_mesh import ValueMesh
from meshbook_extension.cells.names import push_hints
from meshbook_extension.cells.output import CellOutput
from meshbook_extension.cells.prompt import CellPrompt
from meshbook_extension.notebook.error_log import describe_interrupts
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.waiting import wait_until_done
from meshbook_extension.output.labels import FULL, format_seconds, headline, label

STILL_RUNNING_S = 2.0
"""The time after a rank's failure at which the output names the ranks that still run."""
WAITS_S = 1.5
"""The time after a cell was sent at which the output names the call that it waits behind."""


class CellTimeout(CallTimeout):
    """The cell took longer than ``--timeout`` and was interrupted."""

    def __init__(
        self,
        what: str,
        timeout_s: float,
        silent: tuple[int, ...],
        interrupted: CallInterrupted,
        partial: Mapping[int, object] | None = None,
    ) -> None:
        super().__init__(what, timeout_s, silent, partial=partial)
        self.args = (what, timeout_s, silent, interrupted)
        self.interrupted = interrupted

    def __str__(self) -> str:
        return f"{self.what} took more than {self.timeout_s:g} s on {name_ranks(self.silent)}; {self.interrupted}"


class RunningCell:
    """A cell that runs on ranks; a magic waits for it, or it is a job."""

    def __init__(self, session: Session, procs: ProcMesh, run: CellRun, output: CellOutput, what: str) -> None:
        self._session = session
        self.procs, self.run, self.output, self.what = procs, run, output, what
        self.ranks = procs.ranks
        output.await_outcome(lambda: not run.future.done())
        self._tell_failed_at: float | None = None
        """The time at which to name the ranks that still run beside failed ones; None until a rank has failed."""
        self._tell_ahead_at = math.inf
        self._awaits_return = False
        self._prompt: CellPrompt | None = None
        """The prompt of ranks that stop at breakpoints; None while the cell runs beside the notebook."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank in self.ranks if rank not in self.output.done)

    @property
    def failures(self) -> list[Failure]:
        """The failures of ranks so far."""
        return [done.failure for done in list(self.output.done.values()) if done.failure is not None]

    @property
    def succeeded(self) -> list[int]:
        """The ranks that have ended it well so far."""
        return [rank for rank, done in list(self.output.done.items()) if done.ok]

    def result(
        self, timeout_s: float | None, holding: contextlib.ExitStack, prompt: CellPrompt | None = None
    ) -> ValueMesh[object]:
        """Wait for all ranks, with their output shown, and return the values of their last expressions.

        holding: the block that holds interrupts back since the cell was sent, as in `start_cell`; closed here, where
        an interrupt is dealt with. prompt: opened where ranks stop at breakpoints meanwhile.
        Raises: CallFailed, WorkerLost, CellTimeout, and CallInterrupted if the person pressed interrupt or the cell was
        cancelled; their ``partial`` has the results of the ranks that succeeded. CellLeft if the person has left ranks
        at their prompts; an error of a signal handler, when the ranks were interrupted.
        """
        error: CallError
        self._prompt = prompt
        try:
            holding.close()
            self.output.summary_follows = True
            self._tell_ahead_at = time.monotonic() + WAITS_S
            clock = states.stopped_ranks(self.procs).clock
            if wait_until_done(self.run.future, timeout_s, look=self._look_after, wanted=self._is_wanted, clock=clock):
                return self.outcome()
            silent = self.waiting
            stopped = self.interrupt()
            error = CellTimeout(self.what, timeout_s or 0.0, silent, stopped, partial=stopped.partial)
            self._show_places(error)
        except KeyboardInterrupt:
            error = self.interrupt()
            self._show_places(error)
        except Exception as raised:
            if not self.run.future.done() and is_from_outside(raised):
                self.interrupt()
                self.output.finish()
            raise
        with contextlib.suppress(KeyboardInterrupt):  # of what is still shown: the error comes first
            self.output.finish()
        raise error from None

    def outcome(self) -> ValueMesh[object]:
        """Return or raise the outcome of `result`, once the future is done."""
        error = self.run.future.exception(0)
        self.conclude()
        try:
            self.output.finish()
        except KeyboardInterrupt:
            if error is None:
                raise
        if error is None:
            return self.run.future.result(0)
        raise self._presentable(error) from None

    def conclude(self) -> None:
        """Show the valid values, once the future is done."""
        self.output.conclude(_invalid(self.run.future.exception(0)))

    def interrupt(self) -> CallInterrupted:
        """Interrupt the ranks; returns the ranks that stopped within a moment, and the places of the others."""
        self.output.hide_interrupts = True
        pressed = time.monotonic()
        report = self.run.interrupt()
        if report.stuck and not self._awaits_return:
            self._awaits_return = True
            self.run.future.add_done_callback(lambda _future: self._tell_who_is_back(report.stuck, pressed))
        return report

    def _show_places(self, error: CallInterrupted | CellTimeout) -> None:
        """Have IPython show where the ranks stopped, behind the line that names them."""
        if places := describe_interrupts(self.failures):
            first, *further = f"{type(error).__name__}: {error}".splitlines()
            show_as(error, [f"{first}; {places}", *further])

    def _tell_who_is_back(self, stuck: Collection[int], since: float) -> None:
        """Report ranks that came back late, on the thread that completes the future."""
        if isinstance(self.run.future.exception(0), CallFailed):
            after = format_seconds(time.monotonic() - since)
            self.output.note(f"{name_ranks(stuck)} came back {after} after the interrupt; usable again", "stdout")

    def _is_wanted(self) -> bool:
        """Whether `_look_after` has something to do."""
        return self._has_news_of_failure() or (self._prompt is not None and self._prompt.is_wanted)

    def _has_news_of_failure(self) -> bool:
        return self._tell_failed_at is None and any(not done.ok for done in list(self.output.done.values()))

    def _look_after(self) -> float:
        """Open a prompt, report waits and failures to a person who waits; returns the seconds until the next look."""
        if self._prompt is not None and self._prompt.is_wanted:
            self._prompt.open()
        if self._has_news_of_failure():
            self._tell_failed_at = time.monotonic() + STILL_RUNNING_S
        now = time.monotonic()
        if now >= self._tell_ahead_at:
            self._tell_ahead_at = math.inf
            if ahead := self.run.describe_wait():
                self.output.note(f"{ahead}\n  {self.what} waits for that; an interrupt drops it")
        if self._tell_failed_at is not None and now >= self._tell_failed_at:
            self._tell_failed_at = math.inf
            if waiting := self.waiting:
                self.output.note(f"{self._describe(waiting)}\n  stop them: interrupt the cell")
        return min(self._tell_ahead_at, self._tell_failed_at or math.inf) - time.monotonic()

    def _describe(self, waiting: tuple[int, ...]) -> str:
        places = group_ranks(states.where(self.procs.select(waiting)).items())
        return "\n".join(
            f"{name_ranks(ranks)} still run{'s' if len(ranks) == 1 else ''}: {place}" for place, ranks in places.items()
        )

    def _presentable(self, error: BaseException) -> BaseException:
        """Return the error as the notebook raises it, without parts that were shown already."""
        if isinstance(error, CallFailed):
            if all(failure.kind is FailureKind.INTERRUPTED for failure in error.failures):
                dropped = self.run.dropped
                stopped = {*error.ranks, *error.freed} - dropped
                interrupted = CallInterrupted(stopped, {}, skipping=dict.fromkeys(dropped, ""), partial=error.partial)
                interrupted.groups, interrupted.torn = error.groups, error.torn
                self._show_places(interrupted)
                return interrupted
            invalid = [rank for rank in _invalid(error) if rank in self.output.done and self.output.done[rank].ok]
            unshown = (
                [f"  values of {name_ranks(invalid)} are not shown: they came of that operation"] if invalid else []
            )
            groups = group_failures(error.failures)[:FULL] if self.output.defers_tracebacks else []
            headed = ([headline(each[0], [one.rank for one in each]), *each[0].traceback] for each in groups)
            above = itertools.chain(*(lines for lines in headed if len(lines) > 2))  # others have no frames
            told = [*brief(error), *unshown, *filter(None, [_finished(error, "  ")])]
            show_as(error, [*above, *told, *verdict(error), *push_hints(self._session, error)])
        elif isinstance(error, WorkerLost):
            show_lost(self._session, error, self.procs)
        return error


def _invalid(error: BaseException | None) -> list[int]:
    """Return the ranks whose values mean nothing."""
    failures = error.failures if isinstance(error, CallFailed) else ()
    return [failure.rank for failure in failures if failure.kind is FailureKind.DISAGREES]


def brief(error: CallFailed) -> list[str]:
    """Write a line per cause; the tracebacks stand above."""
    lines = [
        headline(group[0], [failure.rank for failure in group], brief=True) for group in group_failures(error.failures)
    ]
    shown = lines[:4] + ([f"and {len(lines) - 4} more"] if len(lines) > 4 else [])
    return [f"{type(error).__name__}: {shown[0]}", *(f"  {line}" for line in shown[1:])]


def verdict(error: CallError, *, again: bool = True) -> list[str]:
    """Write lines on the ranks that were freed, and on process groups that were not formed again."""
    lines = [f"  {line}" for line in error.verdict()]
    if not again or not error.freed or error.groups:
        return lines
    first = ""
    if error.torn:
        gradients_only = all(torn.startswith(GRADIENTS) for torn in error.torn)
        first = "zero_grad(), then " if gradients_only else "set what is named right, then "
    return [*lines, f"  again: {first}run the cell again; what it changed before stays changed"]


def show_lost(session: Session, error: WorkerLost, procs: ProcMesh) -> None:
    """Have IPython show ``error`` with the ranks that are lost, and with advice for the mesh of ``procs``."""
    mesh = procs.base()
    steps = [next_steps(error.ranks, [rank for rank in mesh.ranks if rank not in mesh.lost])]
    if session.current != procs.name:
        steps.append(f"  it is not the current mesh; first: %mesh use {procs.name}")
    first, *further = describe_deaths(death._replace(log_tail="") for death in error.deaths)  # which stands above
    told = [f"{type(error).__name__}: {first}{_finished(error, '; ')}", *(f"  {line}" for line in further)]
    show_as(error, [*told, *verdict(error, again=False), *steps])


def _finished(error: CallError, before: str) -> str:
    return f"{before}{name_ranks(error.partial)} finished; results in _mesh" if error.partial else ""


def interrupted(text: str) -> CallInterrupted:
    """Return the error for an interrupt of a command that waits for no cell; ``text`` names the work that goes on."""
    error = CallInterrupted((), {})
    show_as(error, [f"KeyboardInterrupt: {text}"])
    return error


def show_as(error: BaseException, lines: list[str]) -> None:
    """Have IPython show these lines for ``error``: it asks an exception for its traceback."""
    vars(error)["_render_traceback_"] = lambda: lines


KEPT = 50
"""The number of ended jobs that are kept."""
TOLD_LIMIT_S = 10.0
"""The most time that a wait for a job waits for the note of its end, which is written as its last rank answers."""


@dataclass
class Job:
    """A cell that was started with ``--async``."""

    number: int
    cell: RunningCell
    mesh: str
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    told: threading.Event = field(default_factory=threading.Event)
    """An event that is set once the result is kept and the note of the end is on its way to the output."""
    waited_for: bool = False
    """Whether a ``%mesh wait`` has reported its end."""
    is_old_news: bool = False
    """Whether a later cell has reported its end."""

    def finish(self) -> None:
        """Wait until the end of a job is reported, so that the running cell has the note and the result.

        Raises: as `CellOutput.finish`.
        """
        self.told.wait(TOLD_LIMIT_S)
        self.cell.output.finish()

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
        stopped = bool(failures) and all(failure.kind is FailureKind.INTERRUPTED for failure in failures)
        return "cancelled" if stopped else "failed"

    @property
    def failed_unseen(self) -> bool:
        """Whether the job failed and no wait has said so. The end of a mesh that was stopped is no failure."""
        if self.waited_for or self.state != "failed":
            return False
        return not isinstance(self.cell.run.future.exception(0), MeshStoppedError)

    @property
    def duration_s(self) -> float:
        """The seconds from its start to its end, or to now."""
        return (self.ended or time.monotonic()) - self.started

    def describe(self) -> str:
        """Write a line for ``%mesh jobs``."""
        left = self.cell.waiting
        on = f", {name_ranks(left)} still at it" if left and len(left) < len(self.cell.ranks) else ""
        bars = [f"\n  {label(ranks)} {bar}" for ranks, bar in self.cell.output.progress] if left else []
        return (
            f"job {self.number}: {self.state}, {format_seconds(self.duration_s)}, {self.cell.what} on "
            f'{name_ranks(self.cell.ranks)} of "{self.mesh}"{on}{"".join(bars)}'
        )

    def describe_end(self) -> str:
        """Write a line for the next cell, once the job has ended."""
        ago = format_seconds(time.monotonic() - (self.ended or 0.0))
        error = self.cell.run.future.exception(0)
        why = f": {str(error).splitlines()[0]}" if error is not None and str(error) else ""
        return f"job {self.number} ({self.cell.what}) {self.state} {ago} ago{why}"


def job_table(jobs: Iterable[Job]) -> Table:
    """Return a row for each job."""
    rows = [
        [
            str(job.number),
            job.state,
            format_seconds(job.duration_s),
            job.cell.what,
            f"{format_ranks(job.cell.ranks)} of {job.mesh}",
            "\n".join(f"{label(ranks)} {bar}" for ranks, bar in job.cell.output.progress) if job.cell.waiting else "",
        ]
        for job in jobs
    ]
    return Table(["job", "state", "time", "cell", "ranks", "progress"], rows, "><><<<")


class Jobs:
    """The jobs of a session by number, and the cells that magics wait for."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self.next_number = 1
        self.foreground: list[RunningCell] = []
        """The cells that magics wait for; one, unless subshells run some too."""

    def add(self, cell: RunningCell, mesh: str, number: int | None = None) -> Job:
        """Give a running cell a number: the next one, or the one that it had in an earlier kernel."""
        job = Job(self.next_number if number is None else number, cell, mesh)
        self.count_from(job.number + 1)
        self._jobs[job.number] = job
        ended = [number for number, old in self._jobs.items() if old.ended is not None]
        for number in ended[:-KEPT]:
            del self._jobs[number]
        return job

    def count_from(self, number: int) -> None:
        """Note that numbers below ``number`` are taken."""
        self.next_number = max(self.next_number, number)

    def all(self) -> list[Job]:
        """Return every job, oldest first."""
        return list(self._jobs.values())

    def running(self) -> list[Job]:
        """Return the jobs that have not ended."""
        return [job for job in self._jobs.values() if job.state == "running"]

    def news(self) -> list[Job]:
        """Return the jobs that have ended, and of which neither a wait nor a later cell has told; each once.

        The person knows of those that were cancelled.
        """
        found = [job for job in self._jobs.values() if job.ended is not None and not job.is_old_news]
        for job in found:
            job.is_old_news = True
        return [job for job in found if not job.waited_for and job.state != "cancelled"]

    def unwaited(self) -> list[Job]:
        """Return the jobs that run, and the failed ones, which a wait must not miss."""
        return [job for job in self._jobs.values() if job.state == "running" or job.failed_unseen]

    def find(self, word: str) -> Job:
        """Return the job with this number.

        Raises: UsageError that names the jobs.
        """
        if not self._jobs:
            raise UsageError("no job yet. Start one: %%mesh --async above a cell")
        if not word.isdigit() or int(word) not in self._jobs:
            known = ", ".join(str(number) for number in self._jobs)
            raise UsageError(f'there is no job "{word}"; jobs: {known}. See them: %mesh jobs')
        return self._jobs[int(word)]
