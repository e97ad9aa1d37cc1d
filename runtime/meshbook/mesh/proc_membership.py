"""Which processes a mesh has: ended ones started again, more of them, fewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from meshbook.controller.mesh_state import Repaired
from meshbook.errors import UsageError, WorkerLost
from meshbook.launchers.base import Launcher
from meshbook.mesh.proc_view import ProcView, call_living
from meshbook.mesh.repair import ROUNDS, Note, Repair
from meshbook.mesh.resize import Change, Elastic
from meshbook.mesh.start_progress import StartProgress

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh


class Membership(ProcView):
    """Base of ProcMesh: repairs and changes of its size."""

    def heal(
        self,
        setup: Sequence[str] = (),
        *,
        force: bool = False,
        note: Note | None = None,
        launcher: Launcher | None = None,
        within_s: float | None = None,
    ) -> Repaired:
        """Start the ranks that ended again, with new agents where theirs are lost, and form the groups with all ranks.

        The others keep their state; the new ones have none. They run the cells ``setup``, alone.
        force: also a rank that ends again and again, and those of hosts that are suspect (`suspects`), which are given
        up. note: is told, once, what takes long.
        launcher: starts other hosts in the place of lost ones; by default these come back as they came.
        within_s: as of `HostMesh.spawn_procs`.
        Raises: CrashLoopError, SpawnError, MeshStoppedError, UsageError, all of them `DeviceMeshError`;
        KeyboardInterrupt, and then it can be healed again.
        """
        return self._repair((), setup, force=force, note=note, launcher=launcher, within_s=within_s)

    def respawn(
        self,
        ranks: int | Iterable[int],
        setup: Sequence[str] = (),
        *,
        force: bool = False,
        note: Note | None = None,
        within_s: float | None = None,
    ) -> Repaired:
        """End ``ranks``, busy or not, and start them again in their places, as `heal` does with all that ended."""
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        for rank in chosen:
            self._present().members.point(rank)
        return self._repair(chosen, setup, force=force, note=note, within_s=within_s)

    def _repair(
        self,
        ranks: Sequence[int],
        setup: Sequence[str],
        *,
        force: bool,
        note: Note | None,
        launcher: Launcher | None = None,
        within_s: float | None = None,
    ) -> Repaired:
        progress = StartProgress(self._controller, within_s)
        if (
            isinstance(setup, str)
            or not isinstance(setup, Sequence)
            or not all(isinstance(each, str) for each in setup)
        ):
            raise UsageError(f"setup is a list of cells, each of them a string; {setup!r} is none")
        self._mesh.await_arrival()
        self._mesh.check_usable()  # before its controller is asked, which may have closed
        new: set[int] = set()
        for left in reversed(range(ROUNDS)):
            whole = cast("ProcMesh", self.base())
            repair = Repair(self._controller, self._mesh, whole, progress, note, launcher)
            repaired = repair.run(ranks, setup, force=force)
            new.update(repaired.ranks)
            repaired = self._mesh.last_repair = repaired._replace(ranks=tuple(sorted(new)))
            try:
                told = call_living(self._mesh.after_repairs)
                notes = tuple(dict.fromkeys(each for each in told if isinstance(each, str) and each))
                repaired = self._mesh.last_repair = repaired._replace(notes=notes)
                break
            except WorkerLost:
                if not left or not self._mesh.lost:
                    raise
                ranks, launcher = (), None  # another one has died meanwhile
        return repaired

    @property
    def last_repair(self) -> Repaired | None:
        """The report of the last repair of the whole mesh, whoever asked for it; None before the first."""
        return self._mesh.last_repair

    def grow(self, launcher: Launcher | None = None, /, *, within_s: float | None = None, **more: int) -> ProcMesh:
        """Add indices at the ends of axes: ``grow(gpus=2)``; returns the whole mesh as it is then.

        Who is there keeps its process, its state, and its rank unless new ones come before it. New ranks have no state.
        Along an axis that counts hosts new hosts are started, if the mesh has hosts of its own: by ``launcher``, else
        as its first one was. within_s: as of `HostMesh.spawn_procs`.
        Raises: UsageError while a cell runs, UnknownAxisError, DeviceError, SpawnError: then the mesh is as it was.
        """
        return self.change(grow=more, launcher=launcher, within_s=within_s).procs

    def shrink(self, **fewer: int) -> ProcMesh:
        """Remove indices of axes: ``shrink(gpus=1)``, those of dead ranks first, then from the end; see `grow`.

        Without an axis: go on without the dead ranks, along the axis that loses the fewest others.
        """
        return self.change(shrink=fewer).procs

    def change(
        self,
        *,
        grow: Mapping[str, int] | None = None,
        shrink: Mapping[str, int] | None = None,
        note: Note | None = None,
        launcher: Launcher | None = None,
        within_s: float | None = None,
    ) -> Change:
        """As `grow` or `shrink`, one of the two; says also which rank became which."""
        progress = StartProgress(self._controller, within_s)
        elastic = Elastic(self._controller, self._mesh, cast("ProcMesh", self._present()), progress, note)
        return elastic.grow(grow, launcher) if grow is not None else elastic.shrink(shrink or {})
