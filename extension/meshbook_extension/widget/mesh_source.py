"""The source of the widget for a mesh: its state, and the actions of the buttons."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshbook.errors import FailureKind, UsageError, group_failures
from meshbook.formatting import format_ranks, group_ranks, name_ranks
from meshbook.groups.deadlock import RankProgress, Verdict, find_stragglers
from meshbook.mesh import states
from meshbook.mesh.peeks import NoValue, peek
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask
from meshbook.stacks.mesh_stacks import RankTold
from meshbook_extension.cells.curves import WatchedNames, picture_of
from meshbook_extension.cells.running import Jobs, RunningCell, job_table
from meshbook_extension.cells.transformers import AutoMode
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.line_reader import merge_bars
from meshbook_extension.widget.feed import ButtonAnswer
from meshbook_extension.widget.snapshot import HELD_S, CellNow, Rates, Snapshot
from meshbook_extension.widget.variables import SUMMARIZE, VARIABLE_HEADS, variable_rows

LOG_LINES = 20
LOG_RANKS = 16
"""The most ranks whose logs are shown at once."""


ASKED_RANKS = 256
"""The largest mesh whose ranks are asked, at each tick, whom they wait for."""
ASK_S = 0.3
PEEK_S = 2.0
_OF_BAR = re.compile(r"\b\d+/\d+\b")


class MeshSource:
    """The source for a mesh of a session, for a part of one, or for the current mesh. Safe from any thread."""

    def __init__(self, session: Session, procs: ProcMesh | None) -> None:
        """procs: the ranks to show; None for those of the mesh that is current at the time."""
        self._session, self._procs = session, procs
        self._moved, self._waited = Rates(), Rates()
        self._whole = procs is not None and session.meshes.get(procs.name) is procs
        self._dismissed: set[int] = set()

    @property
    def procs(self) -> ProcMesh:
        """The ranks shown. A whole mesh is followed when it gets other axes. Raises: MeshError without a mesh."""
        if self._procs is None:
            return self._session.mesh()
        return self._session.meshes.get(self._procs.name, self._procs) if self._whole else self._procs

    def snapshot(self) -> Snapshot:
        """Return the state of the mesh, by one query to the ranks. Raises: MeshError where it cannot be asked."""
        procs = self.procs
        statuses, now = procs.status(), time.monotonic()
        cells = self._cells(procs.name)
        busy = {one.rank: one.busy_s for one in statuses if one.state != "idle"}
        told: Mapping[int, RankTold] = {}
        if busy and 1 < len(procs) <= ASKED_RANKS:
            told = ask(procs.base(), RankTold, "progress", timeout_s=ASK_S)
        pids = {one.rank: one.pid for one in statuses}
        moved = self._moved.per_second({one.rank: (one.pid, one.moved_bytes) for one in statuses}, now)
        waits = {rank: (pids[rank], one.collectives.waited_s) for rank, one in told.items() if rank in pids}
        waited = self._waited.per_second(waits, now)
        deaths = group_ranks((one.rank, one.where) for one in statuses if one.state == "dead")
        failures = ((cell.what, group) for cell in cells for group in group_failures(cell.failures))
        errors = [
            *(error for error in shown(self._session.errors.of(procs.name)) if error.number not in self._dismissed),
            *(
                LoggedError(0, procs.name, "", tuple(ranks), "", cause, "", "", 0.0, FailureKind.LOST)
                for cause, ranks in deaths.items()
            ),
            *shown(LoggedError.of(procs.name, what, equal) for what, equal in failures),
        ]
        steps = _steps(procs, cells, busy)
        return Snapshot(
            name=procs.name,
            device=states.device_of(procs),
            sizes=procs.sizes,
            statuses=statuses,
            interrupted=frozenset(states.interrupted(procs)),
            cells=[_now(cell, busy) for cell in cells],
            errors=errors,
            at=time.time(),
            moved=[round(moved.get(one.rank, 0)) for one in statuses],
            curves=picture_of(self._session.part(WatchedNames), states.metrics(procs)),
            hosts=len(procs.hosts if len(procs) == len(procs.base()) else {one.host for one in statuses}),
            verdict=_judge(told, procs),
            waits=[round(100 * min(1.0, waited[one.rank])) if one.rank in waited else -1 for one in statuses],
            steps=[steps.get(one.rank, "") for one in statuses],
            settled=self._session.errors.settled(procs.name),
            is_auto=self._session.shell is not None and AutoMode.of(self._session.shell).is_on,
        )

    def _cells(self, name: str) -> list[RunningCell]:
        running = [*self._session.part(Jobs).foreground, *(job.cell for job in self._session.part(Jobs).running())]
        return [cell for cell in running if cell.procs.name == name]

    def dismiss(self, number: int) -> None:
        """Show an error no more."""
        self._dismissed.add(number)

    # ---- buttons ---------------------------------------------------------------------------------------------

    def act(self, action: str, ranks: Sequence[int]) -> ButtonAnswer:
        """Do the action of a button, on ``ranks`` where the person has chosen some. Raises: MeshError."""
        procs = self.procs
        known = [rank for rank in ranks if rank in set(procs.ranks)]
        chosen = procs.select(known) if known else procs
        answers: dict[str, Callable[[], ButtonAnswer]] = {
            "interrupt": self._interrupt,
            "heal": self._heal,
            "jobs": self._jobs,
            "pdb": lambda: self._pdb(chosen, bool(known)),
            "stacks": lambda: ButtonAnswer(f"Stacks of {name_ranks(chosen.ranks)}", str(chosen.stacks())),
            "variables": lambda: _variables(chosen),
            "logs": lambda: _logs(chosen),
        }
        return answers[action]()

    def _jobs(self) -> ButtonAnswer:
        jobs = [job for job in reversed(self._session.part(Jobs).all()) if job.mesh == self.procs.name]
        table = job_table(jobs)
        text = "" if jobs else "no job yet. Start one: %%mesh --async"
        return ButtonAnswer("Jobs", text, table=[table.heads, *table.rows])

    def _interrupt(self) -> ButtonAnswer:
        """Interrupt the cell as the notebook's stop button does, and jobs; without a cell, all calls on the ranks."""
        cells = self._cells(self.procs.name)
        foreground = self._session.part(Jobs).foreground
        if not set(foreground) & set(cells) or getattr(self._session.shell, "kernel", None) is None:
            for cell in cells:
                cell.output.hide_interrupts = True
            report = self.procs.base().interrupt()
            touched = report.obeyed or report.stuck or report.skipping
            return ButtonAnswer("Interrupt", str(report) if touched else "nothing runs on the ranks")
        for cell in cells:
            if cell not in foreground:
                cell.run.cancel()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        names = ", ".join(cell.what for cell in cells)
        return ButtonAnswer(
            "Interrupt", f"{names} interrupted on {name_ranks(r for cell in cells for r in cell.waiting)}"
        )

    def _pdb(self, procs: ProcMesh, is_chosen: bool) -> ButtonAnswer:
        """Open the prompt in a cell that waits for the ranks; else return the command to type, which can be copied."""
        stopped = states.stopped(procs)
        ranks = stopped or states.busy(procs)
        if not ranks:
            raise UsageError(f"nothing runs on {name_ranks(procs.ranks)}. A breakpoint() in a cell stops ranks there.")
        foreground = self._session.part(Jobs).foreground
        cell = next((each for each in foreground if each.procs.name == procs.name and {*each.waiting} & {*ranks}), None)
        left = states.stopped_ranks(procs).left
        typed = f"%mesh pdb rank={format_ranks(ranks)}"
        if stopped:
            places = dict.fromkeys(one.where for one in procs.select(stopped).status() if one.where)
            told = f"{name_ranks(stopped)} stopped at {', '.join(places)}"
            if cell is not None and left.isdisjoint(stopped):
                return ButtonAnswer("pdb", f"{told}; the prompt is open below {cell.what}")
            return ButtonAnswer("pdb", f"{told}. The prompt opens by\n\n    {typed}", typed)
        if len(ranks) > 1 and not is_chosen:
            raise UsageError("choose the rank that is to stop first. A breakpoint() in a cell stops ranks there.")
        told = f"{name_ranks(ranks)} {'stops' if len(ranks) == 1 else 'stop'} at the next line of your code"
        if cell is None:
            return ButtonAnswer("pdb", f"{told} by\n\n    {typed}", typed)
        left.difference_update(ranks)
        ask(procs.select(ranks), object, "pdb_break_in")
        return ButtonAnswer("pdb", f"{told}; the prompt opens below {cell.what}")

    def _heal(self) -> ButtonAnswer:
        """Heal the mesh as ``%mesh heal``, but for setup cells, which need the notebook's main thread."""
        notes: list[str] = []
        repaired = self.procs.base().heal(note=notes.append)
        owing = self._session.setups.owe(repaired.mesh, repaired.ranks)
        if owing and any(self._session.setups.of(repaired.mesh)):
            notes.append(f"setup cells have yet to run on {name_ranks(owing)}: %mesh heal")
        elif repaired.ranks:
            whose = "its" if len(repaired.ranks) == 1 else "their"
            notes.append(f"{name_ranks(repaired.ranks)} lost {whose} variables; run the cells that make them there")
        return ButtonAnswer("Heal", "\n  ".join([str(repaired), *notes]))


def _judge(told: Mapping[int, RankTold], procs: ProcMesh) -> Verdict | None:
    """Return who holds others up for long enough to be told, of the ranks shown."""
    verdict = find_stragglers({rank: RankProgress("", one.collectives) for rank, one in told.items()})
    if verdict is None or verdict.since_s < HELD_S or not {*verdict.odd, *verdict.waiting} & set(procs.ranks):
        return None
    return verdict


def _steps(procs: ProcMesh, cells: Iterable[RunningCell], busy: Mapping[int, float]) -> dict[int, str]:
    """Return the step of each rank while a cell runs: the count of its progress bar, else the step that it logged."""
    steps: dict[int, str] = {}
    began_at = time.time() - max(busy.values(), default=0.0)
    for cell in cells:
        metrics, at = states.metrics(procs), dict.fromkeys(cell.ranks, began_at)
        for name in metrics.names():
            for rank, series in metrics.series(name).items():
                if rank is not None and series.last_time >= at.get(rank, math.inf):
                    at[rank], steps[rank] = series.last_time, f"{series.last_step:g}"
        for ranks, text in cell.output.progress:
            if found := _OF_BAR.search(text):
                steps.update(dict.fromkeys(ranks, found[0]))
    return steps


def _variables(procs: ProcMesh) -> ButtonAnswer:
    values = peek(procs, SUMMARIZE, PEEK_S).values
    missing = [rank for rank in values.ranks if isinstance(values[rank], NoValue)]
    rows = variable_rows({rank: values[rank] for rank in values.ranks if rank not in missing})
    notes = [f"{name_ranks(missing)} did not answer: {values[missing[0]].why}"] if missing else []
    notes += [] if rows else [f"no variables on {name_ranks(procs.ranks)} yet"]
    return ButtonAnswer(f"Variables of {name_ranks(procs.ranks)}", "\n".join(notes), table=[VARIABLE_HEADS, *rows])


def _now(cell: RunningCell, busy: Mapping[int, float]) -> CellNow:
    waiting, ranks = cell.waiting, len(cell.ranks)
    seconds = round(max((busy.get(rank, 0.0) for rank in waiting), default=0.0), 1)
    return CellNow(cell.what, seconds, ranks, ranks - len(waiting), merge_bars(cell.output.progress))


def _logs(procs: ProcMesh) -> ButtonAnswer:
    if len(procs) > LOG_RANKS:
        raise UsageError(f"choose a rank first: logs of {len(procs)} ranks are too many. Or: %mesh logs rank=0-3")
    blocks = [f"rank {rank}\n{text.rstrip()}\n" for rank, text in sorted(procs.logs(LOG_LINES).items()) if text.strip()]
    return ButtonAnswer(f"Logs of {name_ranks(procs.ranks)}", "\n".join(blocks) or "nothing written yet")


def shown(errors: Iterable[LoggedError]) -> list[LoggedError]:
    """Return the errors without those of ranks that were interrupted or ended, whose state says so."""
    return [error for error in errors if error.kind not in (FailureKind.INTERRUPTED, FailureKind.LOST)]
