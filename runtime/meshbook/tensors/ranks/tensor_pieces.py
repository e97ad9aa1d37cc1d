"""Which rank has which part of a tensor, and the pieces that make other parts of it.

parts of the source   |   0   |   1   |     each part of the target is cut where the source's parts end, and each
parts of the target   | 2 | 3   | 1 | 0 |   piece comes from one of its holders, from the rank itself if it is one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement, Shard

from meshbook.system.memory_copies import expect_huge_pages
from meshbook.tensors.messages.operations import Box


class MeshEnd(NamedTuple):
    """A mesh that a tensor comes from, or goes to."""

    name: str
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def boxes(self, shape: Sequence[int], placements: Sequence[Placement]) -> dict[int, Box]:
        """The part of each rank: along each axis what the axes before it left is cut as `torch.chunk` does."""
        found = {}
        for position, rank in enumerate(self.ranks):
            box, inner = [(0, size) for size in shape], len(self.ranks)
            for placement, size in zip(placements, self.sizes, strict=True):
                inner //= size
                at = position // inner % size
                if isinstance(placement, Shard):
                    begin, end = box[placement.dim]
                    step = -(-(end - begin) // size)
                    box[placement.dim] = min(begin + at * step, end), min(begin + (at + 1) * step, end)
            found[rank] = tuple(box)
        return found


class TensorPiece(NamedTuple):
    """What one rank sends another of a tensor; or itself."""

    source: int
    target: int
    box: Box


def pieces(given: Mapping[int, Box], wanted: Mapping[int, Box]) -> Iterator[TensorPiece]:
    """What makes the parts that are wanted; each of them is in one piece for each pair of ranks."""
    holders: dict[Box, list[int]] = {}
    for rank, box in given.items():
        holders.setdefault(box, []).append(rank)
    for index, (target, part) in enumerate(wanted.items()):
        for box, ranks in holders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True))
            if all(begin < end for begin, end in common):
                yield TensorPiece(target if target in ranks else ranks[index % len(ranks)], target, common)


def within(local: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """What lies in a box of a tensor, of a part of it."""
    return local[tuple(slice(a - origin, b - origin) for (origin, _), (a, b) in zip(part, box, strict=True))]


def own_copy(part: torch.Tensor) -> torch.Tensor:
    """In memory of its own, in C order."""
    return new_memory(part.shape, part.dtype, part.device).copy_(part)


def new_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a part that is filled at once."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if made.device.type == "cpu":
        expect_huge_pages(made.data_ptr(), made.nbytes)
    return made
