"""A session that was attached becomes the notebook's own again: names, views, jobs, and what happened meanwhile."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

from meshbook.errors import CallError, CallFailed, MeshError, WorkerLost
from meshbook.formatting import format_ranks, format_sizes, group_ranks, name_ranks
from meshbook_extension.cells.output import open_output
from meshbook_extension.cells.run import follow, partial_result
from meshbook_extension.cells.running import Job, Jobs, RunningCell, brief
from meshbook_extension.notebook.session import NamedSlice, Session
from meshbook_extension.notebook.time_limits import TimeLimits
from meshbook_extension.notebook.waiting import wait_until_done
from meshbook_extension.output.publisher import sink_for
from meshbook_extension.reattach.notebook_state import KEY, NotebookState, decode

if TYPE_CHECKING:
    from meshbook.calls.cell_run import ResumedCall
    from meshbook.mesh.attach import Attachment
    from meshbook.mesh.proc_mesh import ProcMesh

_CELL = re.compile(r"cell \d+")
ANSWERS_S = 5.0
"""How long answers that are on their way may take."""
_NOTHING = NotebookState("", None, {}, {}, (), {}, 1)


def restore(session: Session, attachment: Attachment, *, again: bool) -> None:
    """Know the meshes of ``attachment``, say so, and show what came of its calls; while a cell runs.

    again: an earlier kernel of this notebook had them.
    """
    notebook_state = decode(attachment.recall(KEY)) or _NOTHING
    session.part(Jobs).count_from(notebook_state.next_job)
    for mesh in attachment.meshes:
        session.add(_arranged(mesh, notebook_state))
        if (limit := notebook_state.limits.get(mesh.name)) is not None:
            session.part(TimeLimits).add(mesh, limit, sink_for(session.shell), session.publisher)
        if again:
            session.returned.add(mesh.name)
    if notebook_state.current in session.meshes:
        session.current = notebook_state.current
    for setup in notebook_state.setups:
        session.setups.add(setup)
    session.errors.take_up(notebook_state.errors)
    gone = _restore_slices(session, attachment, notebook_state)
    ended: list[tuple[ResumedCall, ProcMesh]] = []
    deadline = time.monotonic() + ANSWERS_S
    for call in (call for mesh in attachment.meshes for call in attachment.calls_of(mesh) if call.had_ended):
        wait_until_done(call.future, max(0.0, deadline - time.monotonic()))
    for mesh in attachment.meshes:
        running = [call for call in attachment.calls_of(mesh) if not call.future.done()]
        ended += [(call, mesh) for call in attachment.calls_of(mesh) if call.future.done()]
        jobs = {call: _make_job(session, call, mesh, notebook_state) for call in running}
        told = [_describe_job(call, job) for call, job in jobs.items()]
        print("; ".join([_headline(session.meshes[mesh.name], again=again), *told]))
        for line in [*_describe_lost(mesh), *_describe_stopped(mesh)]:
            print(f"  {line}")
        sys.stdout.flush()  # what the calls have printed, which another thread shows, stands below what they are
        for call, job in jobs.items():
            call.listen(job.cell.output.receive)
            follow(session, job)
    if gone:
        print(f"  slices that name other ranks by now are gone: {', '.join(gone)}")
        sys.stdout.flush()
    for call, mesh in sorted(ended, key=lambda each: each[0].future.call.id):
        _show_ended(session, call, mesh, notebook_state)


def _headline(procs: ProcMesh, *, again: bool) -> str:
    return f'attached to mesh "{procs.name}"{" again" if again else ""}: {format_sizes(procs.sizes)}, {procs.device}'


def _arranged(mesh: ProcMesh, notebook_state: NotebookState) -> ProcMesh:
    view = notebook_state.meshes.get(mesh.name)
    return (view and view.restore(mesh)) or mesh


def _restore_slices(session: Session, attachment: Attachment, notebook_state: NotebookState) -> list[str]:
    """Returns the names of those that cannot be made again."""
    meshes = {mesh.name: mesh for mesh in attachment.meshes}
    gone = []
    for name, saved in notebook_state.slices.items():
        view = saved.view.restore(meshes[saved.mesh]) if saved.mesh in meshes else None
        if view is None:
            gone.append(name)
        else:
            session.slices[name] = NamedSlice(saved.mesh, view, saved.pairs)
    return gone


def _describe_lost(mesh: ProcMesh) -> list[str]:
    lost = mesh.lost
    if not lost:
        return []
    whose = "its" if len(lost) == 1 else "their"
    return [f"{name_ranks(lost)} ended; why: %mesh status, {whose} last lines: %mesh logs rank={format_ranks(lost)}"]


def _describe_stopped(mesh: ProcMesh) -> list[str]:
    stopped = mesh.stopped_ranks.of(mesh.stopped())
    places = group_ranks((rank, stop.words) for rank, stop in stopped.items())
    return [f"{name_ranks(ranks)} {words}; look: %mesh pdb" for words, ranks in places.items()]


def _cell_of(session: Session, call: ResumedCall, mesh: ProcMesh) -> RunningCell:
    """A cell that has not listened yet to what the call prints."""
    procs = mesh.arrange({"rank": len(call.ranks)}, call.ranks) if len(call.ranks) < len(mesh) else mesh
    return RunningCell(procs, call, open_output(session, procs), call.what)


def _make_job(session: Session, call: ResumedCall, mesh: ProcMesh, notebook_state: NotebookState) -> Job:
    """A call that runs on becomes a job."""
    number = notebook_state.jobs.get(call.id)
    return session.part(Jobs).add(_cell_of(session, call, mesh), mesh.name, number)


def _describe_job(call: ResumedCall, job: Job) -> str:
    return f"{call.what} still runs on {name_ranks(call.waiting or call.ranks)} (job {job.number})"


def _show_ended(session: Session, call: ResumedCall, mesh: ProcMesh, notebook_state: NotebookState) -> None:
    """What a call printed and returned while nobody listened; only cells are worth telling of."""
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
