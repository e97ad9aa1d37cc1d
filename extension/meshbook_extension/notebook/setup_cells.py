"""Cells marked ``%%mesh --setup``: what a rank needs to know that is started later than the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshbook.errors import MeshError
from meshbook.formatting import format_ranks
from meshbook_extension.notebook.targets import RANK, base_ranks, choose

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.mesh.resize import Change


@dataclass(frozen=True)
class Setup:
    """One of them, with the target as it was written."""

    mesh: str
    pairs: Mapping[str, str]
    code: str
    cell_number: int
    line_offset: int
    cell_id: str
    """The front end's name of the cell, where it has one: a cell that is changed and run again takes its own place."""

    def ranks(self, procs: ProcMesh) -> tuple[int, ...]:
        """Those that it is for, in the mesh as it is now. Raises: MeshError where its target is not there any more."""
        return choose(procs, self.pairs).ranks


class Setups:
    """Of all meshes of a notebook, in the order in which they were run."""

    def __init__(self) -> None:
        self._cells: list[Setup] = []
        self._owed: dict[str, set[int]] = {}

    def add(self, setup: Setup) -> None:
        """Keep a cell that has run well."""
        self._cells = [cell for cell in self._cells if not _is_same(cell, setup)]
        self._cells.append(setup)

    def of(self, mesh: str) -> Iterator[Setup]:
        """Return the cells of a mesh."""
        return (cell for cell in self._cells if cell.mesh == mesh)

    def forget(self, mesh: str) -> None:
        """The mesh is no more."""
        self._cells = [cell for cell in self._cells if cell.mesh != mesh]
        self._owed.pop(mesh, None)

    def owe(self, mesh: str, ranks: Collection[int]) -> tuple[int, ...]:
        """``ranks`` have yet to run them; returns all of the mesh that have."""
        self._owed.setdefault(mesh, set()).update(ranks)
        return tuple(sorted(self._owed[mesh]))

    def settle(self, mesh: str) -> None:
        """Nobody has to run them any more."""
        self._owed.pop(mesh, None)

    def follow(self, mesh: str, before: ProcMesh, change: Change) -> None:
        """Follow ranks that have got other numbers."""
        moved = change.moved
        self._owed[mesh] = {moved[rank] for rank in self._owed.get(mesh, ()) if rank in moved}
        kept = []
        for cell in self._cells:
            pairs = follow_ranks(cell.pairs, before, change) if cell.mesh == mesh else cell.pairs
            if pairs is not None:
                kept.append(replace(cell, pairs=pairs))
        self._cells = kept


def _is_same(one: Setup, other: Setup) -> bool:
    if one.mesh != other.mesh:
        return False
    return bool(one.cell_id and one.cell_id == other.cell_id) or (one.code, one.pairs) == (other.code, other.pairs)


def follow_ranks(pairs: Mapping[str, str], before: ProcMesh, change: Change) -> dict[str, str] | None:
    """A target as it is written after ``change``: ``rank=`` means the same processes, an axis the same indices.

    before: the whole mesh until then. Returns: None if none of its ranks is left.
    """
    if RANK not in pairs:
        return dict(pairs)
    ranks = base_ranks(before.ranks, before.ranks, pairs[RANK])
    kept = [change.moved[rank] for rank in ranks if rank in change.moved]
    return {**pairs, RANK: format_ranks(kept)} if kept else None


def view_after(view: ProcMesh, pairs: Mapping[str, str] | None, before: ProcMesh, change: Change) -> ProcMesh | str:
    """A named slice in the changed mesh, or why there is none.

    pairs: as it was cut; None where that is not known: then the same processes.
    """
    if pairs is None:
        ranks: Sequence[int] = [change.moved[rank] for rank in view.ranks if rank in change.moved]
        return change.procs.select(ranks) if ranks else "its ranks ended"
    now = follow_ranks(pairs, before, change)
    if now is None:
        return "its ranks ended"
    try:
        return choose(change.procs, now)
    except MeshError as error:
        return str(error).splitlines()[0]
