"""What becomes of mesh tensors when ranks were replaced: a part that another rank holds as well is copied from there.

Ranks hold equal parts of a tensor where they have the same place along the axes that it is sharded on. The first of
them that was there before gives its part to all others: also to those that lived on, since what was being written when
a rank ended may have been written on some of them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshbook.errors import MeshError
from meshbook.formatting import name_ranks
from meshbook.tensors.op_stream import OpStream
from meshbook.tensors.operations import LocalPart, PartTransfer, TensorId


class TensorLost(MeshError):
    """A part of a tensor was on ranks that ended, and nowhere else."""

    def __init__(self, ranks: Sequence[int], placements: str) -> None:
        super().__init__(tuple(ranks), placements)
        self.ranks, self.placements = tuple(ranks), placements

    def __str__(self) -> str:
        return (
            f"this tensor was laid out as ({self.placements}), and the part of {name_ranks(self.ranks)} ended with "
            "them: make it again, or restore it from a checkpoint"
        )


def restore(stream: OpStream, axes: Mapping[str, int]) -> None:
    """Bring the tensors of a mesh to the ranks that have none; those that cannot be brought are lost."""
    held: dict[int, dict[TensorId, LocalPart]] = dict(
        zip(stream.procs.ranks, stream.ask("parts").get().values(), strict=True)
    )
    transfers: list[PartTransfer] = []
    lost: dict[TensorId, MeshError] = {}
    for number in sorted(set().union(*held.values())):
        part = next(parts[number] for parts in held.values() if number in parts)
        missing: list[int] = []
        for ranks in _equal_parts(part, stream.procs.ranks, axes):
            source = next((rank for rank in ranks if number in held[rank]), None)
            if source is None:
                missing += ranks
            else:
                given = held[source][number]
                transfers += [PartTransfer(number, source, rank, given) for rank in ranks if rank != source]
        if missing:
            lost[number] = TensorLost(missing, ", ".join(map(repr, part.placements)))
            transfers = [each for each in transfers if each.number != number]
    stream.ask("transfer", transfers).get()
    stream.lose(lost)


def _equal_parts(part: LocalPart, ranks: Sequence[int], axes: Mapping[str, int]) -> list[list[int]]:
    """The ranks, put together where they hold the same of a tensor."""
    places = torch.arange(len(ranks)).view(tuple(axes.values()))
    found: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(ranks):
        at = (places == position).nonzero()[0].tolist()
        held = tuple(at[axis] for axis, placement in enumerate(part.placements) if not placement.is_replicate())
        found.setdefault(held, []).append(rank)
    return list(found.values())
