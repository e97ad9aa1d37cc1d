"""The next kernel of a notebook finds the meshes that the last one has left, and restores names, views and jobs.

They are attached in the background as soon as the extension is loaded, so that the kernel starts as fast as ever; the
first cell waits for that and prints the meshes that have come back.
"""

from __future__ import annotations

import re
import sys
import threading
import time

from meshbook.calls.call_future import ResumedCall
from meshbook.errors import CallError, CallFailed, MeshError, WorkerLost
from meshbook.formatting import format_duration, format_ranks, format_sizes, group_ranks, name_ranks
from meshbook.mesh import states
from meshbook.mesh.attach import Attachment
from meshbook.mesh.driven import attach
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.sessions import listing
from meshbook.sessions.words import KEY
from meshbook.system.user_folders import log_base
from meshbook_extension.cells.output import open_output
from meshbook_extension.cells.record import CELLS, CellRecord
from meshbook_extension.cells.run import follow, partial_result
from meshbook_extension.cells.running import Job, Jobs, RunningCell, brief
from meshbook_extension.notebook.saves import MeshSaves
from meshbook_extension.notebook.session import NamedSlice, Session
from meshbook_extension.notebook.time_limits import TimeLimits
from meshbook_extension.notebook.waiting import wait_until_done
from meshbook_extension.output.publisher import sink_for
from meshbook_extension.reattach.notebook_state import (
    NotebookState,
    StateWriter,
    Trace,
    decode,
    drop_traces,
    read_traces,
)

_CELL = re.compile(r"cell \d+")
ANSWERS_S = 5.0
"""The time that answers on their way may take."""
_NOTHING = NotebookState("", None, {}, {}, (), {}, 1)


def restore(session: Session, attachment: Attachment, *, again: bool) -> None:
    """Add the meshes of ``attachment`` to the session, report them, and show its calls' outcomes, while a cell runs.

    again: an earlier kernel of this notebook had them.
    """
    notebook_state = decode(attachment.recall(KEY)) or _NOTHING
    session.part(Jobs).count_from(notebook_state.next_job)
    for mesh in attachment.meshes:
        view = notebook_state.meshes.get(mesh.name)
        session.add((view and view.restore(mesh)) or mesh)
        if (limit := notebook_state.limits.get(mesh.name)) is not None:
            session.part(TimeLimits).add(mesh, limit, sink_for(session.shell), session.publisher)
        if again:
            session.returned.add(mesh.name)
    if notebook_state.current in session.meshes:
        session.current = notebook_state.current
    for setup in notebook_state.setups:
        session.setups.add(setup)
    session.errors.take_up(notebook_state.errors)
    session.part(MeshSaves).take_up(notebook_state.saves, notebook_state.regular_saves)
    session.part(CellRecord).take_up(attachment.recall(CELLS))
    gone = _restore_slices(session, attachment, notebook_state)
    ended: list[tuple[ResumedCall, ProcMesh]] = []
    deadline = time.monotonic() + ANSWERS_S
    for call in (call for mesh in attachment.meshes for call in attachment.calls_of(mesh) if call.had_ended):
        wait_until_done(call.future, max(0.0, deadline - time.monotonic()))
    for mesh in attachment.meshes:
        ended += [(call, mesh) for call in attachment.calls_of(mesh) if call.future.done()]
        jobs: dict[ResumedCall, Job] = {}
        procs = session.meshes[mesh.name]
        mark, sizes = " again" if again else "", format_sizes(procs.sizes)
        parts = [f'attached to mesh "{procs.name}"{mark}: {sizes}, {states.device_of(procs)}']
        for call in attachment.calls_of(mesh):
            if not call.future.done():
                cell, number = _cell_of(session, call, mesh), notebook_state.jobs.get(call.id)
                jobs[call] = session.part(Jobs).add(cell, mesh.name, number)
                ranks = name_ranks(call.waiting or call.ranks)
                parts.append(f"{call.what} still runs on {ranks} (job {jobs[call].number})")
        print("; ".join(parts))
        _print_lost_and_stopped(mesh)
        sys.stdout.flush()  # what the calls have printed, which another thread shows, stands below what they are
        for call, job in jobs.items():
            call.listen(job.cell.output.receive)
            follow(session, job)
    if again and notebook_state.cut:
        print(f"  {notebook_state.cut}")
    if gone:
        print(f"  slices that name other ranks by now are gone: {', '.join(gone)}")
        sys.stdout.flush()
    for call, mesh in sorted(ended, key=lambda each: each[0].future.call.id):
        _show_ended(session, call, mesh, notebook_state)


def _restore_slices(session: Session, attachment: Attachment, notebook_state: NotebookState) -> list[str]:
    """Restore named slices; returns the names of slices that cannot be made again."""
    meshes = {mesh.name: mesh for mesh in attachment.meshes}
    gone = []
    for name, saved in notebook_state.slices.items():
        view = saved.view.restore(meshes[saved.mesh]) if saved.mesh in meshes else None
        if view is None:
            gone.append(name)
        else:
            session.slices[name] = NamedSlice(saved.mesh, view, saved.pairs)
    return gone


def _print_lost_and_stopped(mesh: ProcMesh) -> None:
    if lost := mesh.lost:
        whose = "its" if len(lost) == 1 else "their"
        logs = f"%mesh logs rank={format_ranks(lost)}"
        print(f"  {name_ranks(lost)} ended; why: %mesh status, {whose} last lines: {logs}")
    stopped = states.stopped_ranks(mesh).of(states.stopped(mesh))
    for words, ranks in group_ranks((rank, stop.words) for rank, stop in stopped.items()).items():
        print(f"  {name_ranks(ranks)} {words}; look: %mesh pdb")


def _cell_of(session: Session, call: ResumedCall, mesh: ProcMesh) -> RunningCell:
    """Return a cell for the call that does not listen to its output yet."""
    procs = arrange_ranks(mesh, {"rank": len(call.ranks)}, call.ranks) if len(call.ranks) < len(mesh) else mesh
    return RunningCell(session, procs, call, open_output(session, procs, what=call.what), call.what)


def _show_ended(session: Session, call: ResumedCall, mesh: ProcMesh, notebook_state: NotebookState) -> None:
    """Show the output and result of a call that ended meanwhile, if it was a cell."""
    if not _CELL.fullmatch(call.what):
        return
    cell = _cell_of(session, call, mesh)
    call.listen(cell.output.receive)
    number = notebook_state.jobs.get(call.id)
    what = f"{call.what} (job {number})" if number is not None else call.what
    error = call.future.exception(0)
    cell.output.finish()
    if error is None:
        session.keep_result(call.future.result(0))
        print(f"  {what} ended meanwhile: done; its result is in _mesh")
        return
    if isinstance(error, CallError):
        session.keep_result(partial_result(cell.procs, error))
    if isinstance(error, CallFailed):
        why = "; ".join(line.strip() for line in brief(error))
    elif isinstance(error, WorkerLost | MeshError):
        why = str(error).splitlines()[0]
    else:
        why = f"{type(error).__name__}: {error}"
    print(f"  {what} ended meanwhile: failed: {why}")


WAIT_S = 20.0
"""The time that the first cell waits for meshes that are being attached."""


class AutoAttach:
    """The attaching of a notebook's meshes; it does nothing where there is no key of the notebook."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._notebook = session.notebook
        self._attachments: list[Attachment] = []
        self._problems: list[str] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to attach, and report at the first cell."""
        if not self._notebook:
            return
        self._thread = threading.Thread(target=self._attach, name="meshbook.auto_attach", daemon=True)
        self._thread.start()
        self._session.shell.events.register("pre_run_cell", self._tell)

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Wait until all meshes that can be attached are."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _attach(self) -> None:
        """Attach, on a thread of its own."""
        try:
            self._attach_all()
        except Exception as error:  # told at the first cell; the kernel is as good as new
            self._problems.append(f"the meshes of the last kernel could not be looked for: {error}")

    def _attach_all(self) -> None:
        traces = read_traces(self._notebook)
        if not traces:
            return
        known = {saved.id: saved for saved in listing.sessions()}
        for trace in traces:
            saved = known.get(trace.session)
            names = ", ".join(f'"{name}"' for name in trace.meshes)
            notebook_state = saved and decode(saved.recall(KEY))
            if saved is None:
                self._problems.append(_explain_end(trace, names))
            elif saved.is_ours:
                continue  # the extension was loaded anew
            elif saved.owner_pid is not None:
                if notebook_state and notebook_state.notebook == self._notebook:
                    continue  # another kernel of this notebook lives
                self._problems.append(f"mesh {names} belongs to process {saved.owner_pid} now; see %mesh list")
            else:
                try:
                    self._attachments.append(attach(saved))
                except MeshError as error:
                    self._problems.append(f"mesh {names} could not be attached again: {error}")

    def _tell(self, *_info: object) -> None:
        """Restore the attached meshes before the first cell, and report the lost ones."""
        started = time.monotonic()
        if not self.wait():
            waited = format_duration(time.monotonic() - started)
            print(f"the meshes of the last kernel did not answer within {waited}; see %mesh list")
            return
        self._session.shell.events.unregister("pre_run_cell", self._tell)
        for attachment in self._attachments:
            restore(self._session, attachment, again=True)
        if self._problems:
            print("\n".join(self._problems))
            if not self._attachments:
                drop_traces(self._notebook)
        self._attachments, self._problems = [], []
        self._session.part(StateWriter).save()


def _explain_end(trace: Trace, names: str) -> str:
    """Explain why a session is gone, by the last lines of its agents' logs."""
    logs = log_base() / trace.session
    texts = [path.read_text(errors="replace").strip() for path in sorted(logs.glob("agent-*.log"))]
    said = [text.splitlines()[-1] for text in texts if text]
    guess = (
        "its host or its host agent ended, or a kernel stopped it, as a restart of other kernels than Meshbook's does"
    )
    why = said[-1] if said else guess
    return f"mesh {names} of the last kernel has ended: {why}\n  its logs: {logs}    start another: %mesh spawn gpus=4"
