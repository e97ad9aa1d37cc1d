"""The recovery of mesh tensors after ranks were replaced: a part that another rank holds as well is copied from there.

Ranks hold equal parts of a tensor where they have the same place along the axes that it is sharded on. The first of
them that was there before gives its part to all others: also to ranks that lived on, since a write under way when a
rank ended may have been done on some of them only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshbook.errors import MeshError
from meshbook.formatting import group_ranks, name_ranks
from meshbook.shape.extent import Extent
from meshbook.tensors.messages.operations import LocalPart, PartTransfer, TensorId, Undone, Write
from meshbook.tensors.ranks.local_ranks import EachItsOwn
from meshbook.tensors.sending.op_failures import Families
from meshbook.tensors.sending.op_stream import OpStream


class TensorLost(MeshError):
    """A part of a tensor, or all of it, was on ranks that ended, and nowhere else."""

    def __init__(self, ranks: Sequence[int], placements: str) -> None:
        """placements: empty where no rank knows of the tensor any more."""
        super().__init__(tuple(ranks), placements)
        self.ranks, self.placements = tuple(ranks), placements

    def __str__(self) -> str:
        them = "it" if len(self.ranks) == 1 else "them"
        what = f"laid out as {self.placements}, and the part of {name_ranks(self.ranks)} ended with {them}"
        if not self.placements:
            what = f"on {name_ranks(self.ranks)} alone, and ended with {them}"
        return f"this tensor was {what}: make it again, or restore it from a checkpoint"


class OwnTensorsLost(TensorLost):
    """The loss of the own tensors of ranks that ended, in a local view; the other ranks have theirs."""

    def __init__(self, ranks: Sequence[int], living: Sequence[int], number: TensorId) -> None:
        MeshError.__init__(self, tuple(ranks), tuple(living), number)
        self.ranks, self.living, self.placements, self.number = tuple(ranks), tuple(living), "each rank its own", number

    def __str__(self) -> str:
        left = (
            f"; {name_ranks(self.living)} still have theirs: take a part of the mesh without the lost ones "
            "(tensor.slice_mesh, inspect), and to_mesh brings it to all"
        )
        return (
            f"each rank had its own tensor here, and that of {name_ranks(self.ranks)} ended with the process"
            f"{left if self.living else ''}; or make it again"
        )


class TensorLeft(TensorLost):
    """The loss of a tensor that was made before its mesh grew or shrank, and was not restored since."""

    def __str__(self) -> str:
        return (
            "this tensor was made before the mesh changed its size, and was not restored: name it in the state of "
            "meshbook.elastic, or make it again"
        )


class TensorTorn(MeshError):
    """The state of a tensor some of whose parts were written by operations that other parts have not seen."""

    def __str__(self) -> str:
        return (
            "ranks ended while this tensor was being written, so some of its parts are newer than others: overwrite it "
            "(copy_, zero_, fill_), make it again, or restore it from a checkpoint"
        )


class ViewLost(MeshError):
    """The loss of a view across the parts of a tensor, since new ranks do not know its base."""

    def __str__(self) -> str:
        return "ranks were replaced since this view was made, and it lies across the parts of its base: make it again"


def restore(stream: OpStream, axes: Mapping[str, int]) -> tuple[int, set[TensorId]]:
    """Bring the tensors of a mesh to the ranks that have none; a tensor that cannot be brought is lost.

    Returns: the number of tensors that are whole again, and the tensors that are lost or torn.
    """
    told = dict(zip(stream.procs.ranks, stream.ask("parts").get().values(), strict=True))
    held: dict[int, dict[TensorId, LocalPart]] = {rank: parts for rank, (parts, _) in told.items()}
    lost: dict[TensorId, MeshError] = dict.fromkeys(
        (number for _, given_up in told.values() for number in given_up), ViewLost()
    )
    torn: dict[TensorId, MeshError] = {}
    writes = _Writes(stream)
    transfers: list[PartTransfer] = []
    known = {number: part for parts in held.values() for number, part in parts.items()}
    for number in sorted(known.keys() - lost.keys(), key=lambda number: (known[number].shares is not None, number)):
        part, *others = [parts[number] for parts in held.values() if number in parts]
        base = part.shares and part.shares[0]
        if base in lost:
            lost[number] = lost[base]
            continue
        if any(each.placements != part.placements or (each.shares and each.shares[0]) != base for each in others):
            lost[number] = TensorLost(stream.procs.ranks, "in several ways")  # changed on some while others died
            continue
        missing: list[int] = []
        found: list[PartTransfer] = []
        sources: set[int] = set()
        for ranks in _equal_parts(part, stream.procs.ranks, axes):
            source = next((rank for rank in ranks if number in held[rank]), None)
            if source is None:
                missing += ranks
            else:
                sources.add(source)
                found += [PartTransfer(number, source, rank, held[source][number]) for rank in ranks if rank != source]
        if missing and any(isinstance(each, EachItsOwn) for each in part.placements):
            lost[number] = OwnTensorsLost(missing, [rank for rank in held if rank not in missing], number)
        elif missing:
            lost[number] = TensorLost(missing, ", ".join(map(repr, part.placements)))
        else:
            transfers += found
            if writes.tear(number, sources):
                torn[number] = TensorTorn()
    gone = stream.sound_tensors() - known.keys() - lost.keys()
    lost.update(dict.fromkeys(gone, TensorLost(stream.procs.ranks, "")))
    given_up = {number: str(error) for number, error in lost.items() if not isinstance(error, OwnTensorsLost)}
    stream.send("transfer", transfers, given_up).get()  # with nothing before it that frees what is to be transferred
    kept = {number for parts in held.values() for number in parts} - lost.keys()
    stream.renew(kept, lost, torn, writes.undone)
    return len(kept - torn.keys()), lost.keys() | torn.keys()


class _Writes:
    """The writes to tensors by operations that not all ranks have done."""

    def __init__(self, stream: OpStream) -> None:
        self._writes = stream.doubtful
        self._undone: dict[int, Sequence[Undone]] = {}
        self.undone: set[Write] = set()
        """The writes that are missing in the parts that all ranks are given."""
        if self._writes:
            self._families = Families(stream.ask("progress", list(self._writes)).get().values())
            told = stream.ask("undone").get().values()
            self._undone = dict(zip(stream.procs.ranks, told, strict=True))

    def tear(self, number: TensorId, sources: Collection[int]) -> bool:
        """Whether a tensor whose parts come from these ranks was written on some of them and not on others."""
        if not self._writes:
            return False
        written = [self._writes[each] for each in self._families.of([number]) if each in self._writes]
        writes = [write for each in written for write in each]
        undone = [{write for write in writes if self._has_not_done(source, write)} for source in sources]
        self.undone.update(*undone)
        return len(sources) > 1 and ([] in written or any(each != undone[0] for each in undone))

    def _has_not_done(self, rank: int, write: Write) -> bool:
        return any(each.has(write) for each in self._undone[rank])


def _equal_parts(part: LocalPart, ranks: Sequence[int], axes: Mapping[str, int]) -> list[list[int]]:
    """Return the ranks, put together where they hold the same of a tensor."""
    cutting = [axis for axis, placement in zip(axes, part.placements, strict=True) if not placement.is_replicate()]
    points = zip(ranks, Extent.of(axes).points(), strict=True)
    return list(group_ranks((rank, tuple(at[axis] for axis in cutting)) for rank, at in points).values())
