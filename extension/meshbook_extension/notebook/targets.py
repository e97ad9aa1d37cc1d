"""The ranks that a command means: ``gpus=0``, ``gpus=0:4:2``, ``gpus=0,2``, ``gpus=:``, ``rank=...``, or a name.

Axis indices are as in NumPy: negative ones count from the end, slices stop before their end. ``rank=`` takes the same
forms over base ranks, which members keep in every view. Ranges as the output labels write them (``rank=0-2,5``) are
understood too, and include their end. Cells marked ``%%mesh --setup`` keep their target as it was written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshbook.errors import MeshError, RankError, UnknownAxisError, UsageError
from meshbook.formatting import format_ranks, format_sizes, name_ranks
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.resize import Change

RANK = "rank"
FORMS = """\
AXIS=.. is axis=i, axis=a:b, axis=a:b:c, axis=i,j or axis=: for each axis that you name; rank=.. takes the same forms.
SLICE is a name given by %mesh slice."""

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
_SPAN = re.compile(r"(\d+)-(\d+)")
_INDEX = re.compile(r"-?\d+")


class UnknownTargetAxis(UnknownAxisError):
    """A target on an axis that the mesh does not have; the text suggests a similar one."""

    def __init__(self, axis: str, sizes: Mapping[str, int], text: str) -> None:
        super().__init__(axis, sizes)
        self.args = (axis, dict(sizes), text)
        self.text = text

    def __str__(self) -> str:
        near = difflib.get_close_matches(self.axis, [*self.sizes, RANK], n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}={self.text}?" if near else ""
        return f'unknown axis "{self.axis}"; this mesh has {format_sizes(self.sizes)}.{hint}'


def parse_selector(axis: str, text: str, size: int) -> int | slice | list[int]:
    """Read the selection of one axis, ``axis=text``.

    size: of the axis, to count from its end and to expand ranges.
    Returns: an int for a lone index (the axis is dropped), a slice, or a list of distinct indices in order.
    Raises: UsageError for text that is none of the forms, RankError for an index outside the axis.
    """
    parts = text.split(",")
    if len(parts) == 1:
        if _INDEX.fullmatch(text):
            return _index(axis, int(text), size)
        found = _SLICE.fullmatch(text)
        if found:
            return _slice(axis, text, size, found)
    chosen: list[int] = []
    for part in parts:
        found = _SLICE.fullmatch(part)
        span = _SPAN.fullmatch(part)
        if found:
            chosen += range(size)[_slice(axis, part, size, found)]
        elif span:
            chosen += range(_index(axis, int(span[1]), size), _index(axis, int(span[2]), size) + 1)
        elif _INDEX.fullmatch(part):
            chosen.append(_index(axis, int(part), size))
        else:
            raise UsageError(
                f"{axis}={text} is no index. Write {axis}=0, {axis}=0:2, {axis}=0,2 or {axis}=: (all of it)."
            )
    if not chosen:
        raise RankError(text, axis, size)
    return sorted(set(chosen))


def choose(view: ProcMesh, pairs: Mapping[str, str]) -> ProcMesh:
    """Return the part of ``view`` that ``axis=value`` pairs name; without pairs all of it.

    Raises: UnknownAxisError, RankError, UsageError.
    """
    sizes = dict(view.sizes)
    for axis in pairs:
        if axis not in sizes and axis != RANK:
            raise UnknownTargetAxis(axis, sizes, pairs[axis])
    chosen = {axis: parse_selector(axis, text, sizes[axis]) for axis, text in pairs.items() if axis != RANK}
    part = view.slice(**chosen) if chosen else view
    if RANK in pairs:
        part = part.select(base_ranks(part.ranks, view.ranks, pairs[RANK]))
    return part


def one_rank(procs: ProcMesh, text: str) -> int:
    """Return the rank of ``3`` or ``rank=3``. Raises: UsageError unless it is a member of ``procs``."""
    digits = text.removeprefix(f"{RANK}=")
    if not digits.isdigit() or int(digits) not in procs.ranks:
        raise UsageError(f'"{text}" is no rank of this mesh, which has {name_ranks(procs.ranks)}. Say one: 0.')
    return int(digits)


def base_ranks(members: tuple[int, ...], all_members: tuple[int, ...], text: str) -> list[int]:
    """Return the base ranks that ``rank=text`` names; those named singly must be members."""
    size = max(all_members) + 1
    selector = parse_selector(RANK, text, size)
    wanted = list(range(size)[selector]) if isinstance(selector, slice) else selector
    wanted = [wanted] if isinstance(wanted, int) else wanted
    inside = [rank for rank in wanted if rank in set(members)]
    outside = sorted(set(wanted) - set(inside))
    if outside and not (isinstance(selector, slice) and inside):
        verb = "is" if len(outside) == 1 else "are"
        raise UsageError(f"{name_ranks(outside)} {verb} not in this target, which has {name_ranks(members)}.")
    return inside


def _index(axis: str, index: int, size: int) -> int:
    if not -size <= index < size:
        raise RankError(index, axis, size)
    return index % size


def _slice(axis: str, text: str, size: int, found: re.Match[str]) -> slice:
    start, stop, step = (int(part) if part else None for part in found.groups())
    if step is not None and step < 1:
        raise UsageError(f"{axis}={text}: the step is at least 1.")
    if not range(size)[start:stop:step]:
        raise RankError(text, axis, size)
    return slice(start, stop, step)


@dataclass(frozen=True)
class Setup:
    """A cell marked ``%%mesh --setup``, with the target as it was written."""

    mesh: str
    pairs: Mapping[str, str]
    code: str
    cell_number: int
    line_offset: int
    cell_id: str
    """The front end's name of the cell, where it has one: a cell that is changed and run again takes its own place."""

    def ranks(self, procs: ProcMesh) -> tuple[int, ...]:
        """Return the cell's ranks in the mesh as it is now. Raises: MeshError where its target is gone."""
        return choose(procs, self.pairs).ranks


class Setups:
    """The setup cells of all meshes of a notebook, in the order in which they were run."""

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
        """Forget the cells of a mesh that was stopped."""
        self._cells = [cell for cell in self._cells if cell.mesh != mesh]
        self._owed.pop(mesh, None)

    def owe(self, mesh: str, ranks: Collection[int]) -> tuple[int, ...]:
        """Note that ``ranks`` have yet to run the setup cells; returns all ranks of the mesh that owe a run."""
        self._owed.setdefault(mesh, set()).update(ranks)
        return tuple(sorted(self._owed[mesh]))

    def settle(self, mesh: str) -> None:
        """Note that no rank has to run the cells any more."""
        self._owed.pop(mesh, None)

    def follow(self, mesh: str, before: ProcMesh, change: Change) -> None:
        """Follow ranks whose numbers have changed."""
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
    """Return a target as written after ``change``: ``rank=`` means the same processes, an axis the same indices.

    before: the whole mesh until then. Returns: None if none of its ranks is left.
    """
    if RANK not in pairs:
        return dict(pairs)
    ranks = base_ranks(before.ranks, before.ranks, pairs[RANK])
    kept = [change.moved[rank] for rank in ranks if rank in change.moved]
    return {**pairs, RANK: format_ranks(kept)} if kept else None


def view_after(view: ProcMesh, pairs: Mapping[str, str] | None, before: ProcMesh, change: Change) -> ProcMesh | str:
    """Return a named slice in the changed mesh, or the reason why there is none.

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
