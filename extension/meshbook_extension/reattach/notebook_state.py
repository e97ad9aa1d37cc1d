"""The state that a notebook leaves for its next kernel: arranged meshes, slices, setup cells, numbers of jobs.

It is remembered with the session that the meshes belong to, so it lives exactly as long. A *trace*
outside of the session tells the next kernel which meshes there were, should they have ended meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from meshbook.errors import FailureKind
from meshbook.formatting import name_ranks, utf8_text
from meshbook.mesh.driven import own_sessions
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.sessions.words import KEY
from meshbook.system.user_folders import private_folder, read_private, state_base, write_private
from meshbook.wire.messages import utf8_data
from meshbook_extension.cells.running import Jobs
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.notebook.saves import LastSave, MeshSaves, RegularSave
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import Setup
from meshbook_extension.notebook.time_limits import Limit, TimeLimits
from meshbook_extension.output.publisher import kernel_of

CUT_S, RECENT_S = 0.5, 2.0
"""The time that an interrupted cell has to end before its kernel does; the age of an interrupt that came with that."""


class View(msgspec.Struct, frozen=True):
    """Members of a mesh as they are arranged."""

    sizes: dict[str, int]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, procs: ProcMesh) -> View:
        return cls(procs.sizes, procs.ranks)

    def restore(self, mesh: ProcMesh) -> ProcMesh | None:
        """Return the view of ``mesh``; None if the mesh has other ranks by now."""
        known = set(mesh.ranks)
        return arrange_ranks(mesh, self.sizes, self.ranks) if known.issuperset(self.ranks) else None


class SavedSlice(msgspec.Struct, frozen=True):
    """A named part of a mesh."""

    mesh: str
    view: View
    pairs: dict[str, str] | None
    """The target as it was written."""


class NotebookState(msgspec.Struct, frozen=True):
    """The state of a notebook's session, of which it mostly has one."""

    notebook: str
    """The notebook's key; empty where there is none."""
    current: str | None
    meshes: dict[str, View]
    slices: dict[str, SavedSlice]
    setups: tuple[Setup, ...]
    """Cells for ranks that are started later, in the order in which they were run."""
    jobs: dict[int, int]
    """The number of each job by the output id of its cell."""
    next_job: int
    limits: dict[str, Limit] = {}
    """The limits of meshes that stop by themselves."""
    errors: tuple[LoggedError, ...] = ()
    """The last failures of the session's ranks."""
    saves: dict[str, LastSave] = {}
    regular_saves: dict[str, RegularSave] = {}
    """The last save of each mesh, and those that are due from time to time."""
    cut: str = ""
    """The cell that the end of the kernel has interrupted, and where, in words."""


class Trace(msgspec.Struct, frozen=True):
    """The trace of a notebook's session."""

    session: str
    meshes: dict[str, dict[str, int]]
    """The sizes of each mesh by its name."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(NotebookState).decode
_decode_traces = msgspec.json.Decoder(list[Trace]).decode


def encode(value: object) -> bytes:
    """Return JSON; a cell or a notebook's name may have text that is not UTF-8."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(utf8_data(value))


def decode(data: bytes | None) -> NotebookState | None:
    """Return the state; None for one that another version has written."""
    with contextlib.suppress(msgspec.DecodeError):
        return _decode(data or b"")
    return None


def notebook_key(shell: InteractiveShell) -> str:
    """Return a key that the next kernel of the same notebook has too; empty without a kernel.

    Jupyter's server puts the notebook's path into JPY_SESSION_NAME; elsewhere a restarted kernel keeps its connection
    file.
    """
    if kernel_of(shell) is None:
        return ""
    if name := os.environ.get("JPY_SESSION_NAME"):
        return name
    from ipykernel.connect import get_connection_file

    try:
        return str(get_connection_file())
    except RuntimeError:  # embedded: there is no kernel application
        return ""


class StateWriter:
    """The writer of a session's `NotebookState` when something has changed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.notebook = session.notebook
        self._written: dict[str, NotebookState] = {}
        self._traces: list[Trace] | None = None
        self._cut = ""
        self._closed = False

    def close(self, *, leave: bool) -> None:
        """Write no more, as the kernel ends: a cell that ends later must not remove meshes that are left to the next.

        leave: whether they are; else the trace goes, since the next kernel need not be told that they have ended.
        """
        if leave:
            self._note_cut()
            self.save()
        self._closed = True
        if not leave:
            drop_traces(self.notebook)

    def _note_cut(self) -> None:
        """Note the cell that is interrupted as the kernel ends: Jupyter's restart sends an interrupt first."""
        session = self._session
        for cell in session.part(Jobs).foreground:
            cell.run.future.wait(CUT_S)
            session.errors.note(cell.procs.name, cell.what, cell.failures)
        for last in session.errors.all()[-1:]:
            if last.kind is FailureKind.INTERRUPTED and time.time() - last.at < RECENT_S:
                self._cut = f"{last.what} was interrupted by the restart on {name_ranks(last.ranks)} {last.evalue}"

    def save(self, *_: object) -> None:
        """Write the state if it is new; called after each cell, and when a job begins."""
        if self._closed:
            return
        folders = [folder for folder in own_sessions() if folder.state.meshes]
        for folder in folders:
            made = self._make(folder.id)
            if self._written.get(folder.id) != made:
                folder.remember(KEY, encode(made))
                self._written[folder.id] = made
        self._leave_traces(
            [Trace(folder.id, {mesh.name: mesh.sizes for mesh in folder.state.meshes.values()}) for folder in folders]
        )

    def _make(self, id: str) -> NotebookState:
        session, limits = self._session, self._session.part(TimeLimits)
        meshes = {name: procs for name, procs in session.meshes.items() if procs.session == id and procs.alive}
        slices = {
            name: SavedSlice(named.mesh, View.of(named.view), None if named.pairs is None else dict(named.pairs))
            for name, named in session.slices.items()
            if named.mesh in meshes
        }
        return NotebookState(
            notebook=self.notebook,
            current=session.current,
            meshes={name: View.of(procs) for name, procs in meshes.items()},
            slices=slices,
            setups=tuple(setup for name in meshes for setup in session.setups.of(name)),
            jobs={job.cell.run.id: job.number for job in session.part(Jobs).running() if job.mesh in meshes},
            next_job=session.part(Jobs).next_number,
            errors=session.errors.saved(meshes),
            saves={name: last for name, last in session.part(MeshSaves).last.items() if name in meshes},
            regular_saves={name: plan for name, plan in session.part(MeshSaves).regular.items() if name in meshes},
            cut=self._cut,
            limits={name: limit for name, procs in meshes.items() if (limit := limits.of(procs)) != Limit()},
        )

    def _leave_traces(self, traces: list[Trace]) -> None:
        if not self.notebook or traces == self._traces:
            return
        path = _trace_path(self.notebook)
        if traces:
            write_private(path, encode(traces))
        elif self._traces is not None:
            path.unlink(missing_ok=True)
        self._traces = traces


def read_traces(notebook: str) -> list[Trace]:
    """Return the traces of sessions that the last kernel of the notebook had, living or not."""
    with contextlib.suppress(msgspec.DecodeError):
        return _decode_traces(read_private(_trace_path(notebook)) or b"")
    return []


def drop_traces(notebook: str) -> None:
    """Remove the notebook's trace."""
    if notebook:
        _trace_path(notebook).unlink(missing_ok=True)


def _trace_path(notebook: str) -> Path:
    name = hashlib.sha256(utf8_text(notebook).encode()).hexdigest()[:16]
    return private_folder(state_base() / "notebooks") / name
