"""Processes that actors have started, as the process that drives the meshes knows them: they end with their owners."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from meshbook.actor.router import Place
from meshbook.concurrency.background import run_in_background
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import MeshError
from meshbook.shape.generations import ranks_now

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh


class _Owned(NamedTuple):
    """rank, generation: the owner's process, as its mesh numbered ranks then."""

    rank: int
    generation: int
    procs: ProcMesh


class OwnedProcs:
    """An actor that is stopped sees to it itself (`meshbook.actor.context.Belongings`); one that is killed cannot."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._lock = threading.Lock()
        self._owned: dict[int, list[_Owned]] = {}
        """By the mesh of the owner."""

    def add(self, owner: Place, procs: ProcMesh) -> None:
        """An actor in the process ``owner`` has started them. On a side thread."""
        known = self._controller.find_mesh(owner.mesh)
        if known is None:  # it has ended meanwhile
            _stop(procs)
            return
        with self._lock:
            before = self._owned.get(owner.mesh)
            alive = [one for one in before or () if one.procs.alive]
            self._owned[owner.mesh] = [*alive, _Owned(owner.rank, known.generation, procs)]
        if before is None:
            known.stopped.add_done_callback(lambda _: self._owner_stopped(owner.mesh))
        if owner.rank in known.lost:
            self.owner_lost(known, [owner.rank])

    def owner_lost(self, mesh: MeshState, ranks: Iterable[int]) -> None:
        """Processes of ``mesh`` have ended: so will what their actors have started. Returns at once."""
        gone = frozenset(ranks)
        with self._lock:
            owned = self._owned.get(mesh.id, [])
            ends = [one for one in owned if ranks_now(mesh.moves, one.generation, [one.rank])[0] in gone]
            if ends:
                self._owned[mesh.id] = [one for one in owned if one not in ends]
        for one in ends:
            run_in_background(functools.partial(_stop, one.procs))

    def _owner_stopped(self, mesh: int) -> None:
        with self._lock:
            owned = self._owned.pop(mesh, [])
        for one in owned:
            run_in_background(functools.partial(_stop, one.procs))


def _stop(procs: ProcMesh) -> None:
    try:
        procs.stop()
    except (MeshError, TimeoutError):
        traceback.print_exc()
