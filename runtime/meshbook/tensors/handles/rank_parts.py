"""Tensors that code on the ranks has made, each its own, as parts of one: whether they fit, and what they are together.

A dim is cut as `torch.chunk` cuts it. DTensor takes that for granted of parts that it is given, so other sizes would be
read as if they lay elsewhere: they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshbook.errors import UsageError
from meshbook.formatting import name_ranks
from meshbook.tensors.messages.operations import LocalPart
from meshbook.tensors.messages.spec import to_placements
from meshbook.tensors.ranks.tensor_pieces import MeshEnd

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh

TOLD = 4
"""So many ranks are named with what they have."""


def join(name: str, parts: Mapping[int, LocalPart], mesh: Mesh, placements: Sequence[Placement] | None) -> LocalPart:
    """The one tensor of which these are the parts, as that of a rank. parts: without placements where they are plain.

    Raises: UsageError if they make none.
    """
    check_alike(name, parts, "are of different types", lambda part: str(part.dtype))
    check_alike(name, parts, "have different numbers of dims", lambda part: f"shape {list(part.local_shape)}", len_of)
    first = max(parts.values(), key=lambda part: math.prod(part.local_shape))
    if any(part.placements for part in parts.values()):
        check_alike(name, parts, "are not one DTensor", lambda part: _layout(part) if part.placements else "no DTensor")
        shape, layout = first.shape, first.placements
        if placements is not None and to_placements(mesh, shape, None, placements) != layout:
            raise UsageError(f"{name} is a DTensor of {list(layout)}: leave placements out, and redistribute it then")
    elif placements is None:
        raise UsageError(f"{name} is a tensor of each rank's own: say by placements how they make one")
    else:
        layout = to_placements(mesh, first.local_shape, None, placements)
        if odd := [each for each in layout if not isinstance(each, Partial) and type(each) not in (Shard, Replicate)]:
            raise UsageError(f"the ranks' own {name} cannot make a tensor by {odd[0]}: use Shard, Replicate or Partial")
        shape = _shape(parts, mesh, layout)
    _check_sizes(name, parts, mesh, shape, layout)
    return first._replace(placements=layout, shape=shape, strides=_strides(first, shape))


def check_alike(
    name: str,
    parts: Mapping[int, LocalPart],
    fault: str,
    words: Callable[[LocalPart], str],
    key: Callable[[LocalPart], object] | None = None,
) -> None:
    """Raises: UsageError, which tells what ranks have by ``words``, unless all have the same ``key``."""
    if len({(key or words)(part) for part in parts.values()}) > 1:
        raise UsageError(f"the parts of {name} {fault}: {_told({rank: words(part) for rank, part in parts.items()})}")


def len_of(part: LocalPart) -> int:
    return len(part.local_shape)


def _told(said: Mapping[int, str]) -> str:
    """``ranks 0,2: [3, 2]; rank 1: [1, 2]``."""
    ranks: dict[str, list[int]] = {}
    for rank, words in said.items():
        ranks.setdefault(words, []).append(rank)
    told = [f"{name_ranks(some)}: {words}" for words, some in list(ranks.items())[:TOLD]]
    return "; ".join(told) + (f"; and {len(ranks) - TOLD} more" if len(ranks) > TOLD else "")


def _layout(part: LocalPart) -> str:
    return f"shape {list(part.shape)} as {list(part.placements)}"


def _shape(parts: Mapping[int, LocalPart], mesh: Mesh, layout: Sequence[Placement]) -> tuple[int, ...]:
    """What the ranks have together along each dim: of those at the beginning of all axes that do not cut it."""
    sizes, ranks = mesh.shape, mesh.procs.ranks
    found = []
    for dim in range(len_of(next(iter(parts.values())))):
        total = 0
        for position, rank in enumerate(ranks):
            inner, counts = len(ranks), True
            for placement, size in zip(layout, sizes, strict=True):
                inner //= size
                cuts = isinstance(placement, Shard) and placement.dim == dim
                counts &= cuts or position // inner % size == 0
            total += parts[rank].local_shape[dim] if counts else 0
        found.append(total)
    return tuple(found)


def _check_sizes(
    name: str, parts: Mapping[int, LocalPart], mesh: Mesh, shape: Sequence[int], layout: Sequence[Placement]
) -> None:
    if not all(isinstance(each, Partial) or type(each) in (Shard, Replicate) for each in layout):
        return  # a DTensor of parts that are interleaved
    boxes = MeshEnd(mesh.stream.name, mesh.shape, mesh.procs.ranks).boxes(shape, layout)
    wanted = {rank: tuple(end - begin for begin, end in box) for rank, box in boxes.items()}
    odd = {
        rank: f"{list(part.local_shape)}, which should be {list(wanted[rank])}"
        for rank, part in parts.items()
        if part.local_shape != wanted[rank]
    }
    if odd:
        raise UsageError(
            f"the ranks' {name} are no parts of a tensor {list(shape)} as {list(layout)}: {_told(odd)}. A dim is cut "
            "as torch.chunk does, the last parts shorter or empty: send rows between the ranks until they fit, or "
            "bring them here by pull, and use meshbook.distribute"
        )


def _strides(part: LocalPart, shape: Sequence[int]) -> tuple[int, ...]:
    """Those of the whole, with its dims in the order in which the part has them in memory."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (part.local_strides[dim], -dim)):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)
