"""A tensor goes to another mesh of the same processes, or to another layout: ranks send each other what they lack.

No value comes through the controller. It does not know how the source lies, and the ranks of the target may not have
the source: the first rank of each mesh tells those who need to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook.tensors.messages.operations import Box, LocalPart, NewOutput, TensorId
from meshbook.tensors.messages.spec import contiguous_strides
from meshbook.tensors.ranks import known_meshes, named_operations
from meshbook.tensors.ranks.tensor_pieces import MeshEnd, TensorPiece, pieces, within


class Resharding(NamedTuple):
    """What all ranks of both meshes are told."""

    source: MeshEnd
    target: MeshEnd
    number: TensorId
    result: TensorId
    layout: tuple[Placement, ...] | TensorId
    output: NewOutput
    is_renumbered: bool
    """Whether the source's mesh has grown or shrunk: its groups are no more."""


_FAILED, _UNENDED = -2, -3
UNENDED = (
    "its parts are sums, which ranks can no longer end since the mesh has grown or shrunk: before that, lay it out "
    "with tensor.redistribute(spec)"
)


def take_part(moved: Resharding) -> dict[TensorId, str]:
    """Send what others need of this rank's part, and put the new one together. Returns: the result, if it failed."""
    me, meshes = dist.get_rank(), known_meshes.meshes
    here = meshes[moved.source.name] if me in moved.source.ranks else None
    there = meshes[moved.target.name] if me in moved.target.ranks else None
    why = "what it is to be made of has failed"
    local, codes = torch.empty(0, device="cpu"), torch.full((len(moved.source.sizes),), _FAILED, device="cpu")
    if here is not None:
        try:
            placements = here.layout_of(moved.number)
            tensor = here.reference(moved.number)
            if moved.is_renumbered and list(tensor.placements) != list(placements):
                codes.fill_(_UNENDED)
            else:
                tensor = tensor.redistribute(placements=placements)
                local, codes = tensor.to_local(), _encode(placements)
        except named_operations.NotMade as refused:
            why = str(refused)
    layout = moved.layout
    if isinstance(layout, tuple):
        wanted = _encode(layout)
    elif there is not None:
        wanted = _encode(there.layout_of(layout))
    else:
        wanted = torch.empty(len(moved.target.sizes), dtype=torch.int64, device="cpu")
    one_of = here or there
    assert one_of is not None
    device = one_of.mesh.device_type
    codes, wanted = codes.to(device), wanted.to(device)
    told = [(codes, moved.source, moved.target)]
    if not isinstance(layout, tuple):
        told.append((wanted, moved.target, moved.source))
    _exchange([each for values, by, to in told for each in _telling(values, by, to)])
    if codes.tolist()[:1] in ([_FAILED], [_UNENDED]):
        why = UNENDED if codes.tolist()[0] == _UNENDED else why
        if there is not None:
            there.give_up(moved.result, why)
        return {moved.result: why} if here is not None else {}
    shape, placements = moved.output.shape, _decode(wanted)
    given, parts = moved.source.boxes(shape, _decode(codes)), moved.target.boxes(shape, placements)
    held, part = given.get(me, ()), parts.get(me, ())
    made = torch.empty([end - begin for begin, end in part], dtype=moved.output.dtype, device=device)
    send_pieces([piece for piece in pieces(given, parts) if me in piece[:2]], local, held, made, part)
    if there is not None:
        strides = contiguous_strides(shape)
        there.keep(
            moved.result, made, LocalPart(placements, shape, strides, made.dtype, tuple(made.shape), made.stride())
        )
    return {}


def _encode(placements: Sequence[Placement]) -> torch.Tensor:
    dims = [each.dim if isinstance(each, Shard) else -1 for each in placements]
    return torch.tensor(dims, dtype=torch.int64, device="cpu")


def _decode(codes: torch.Tensor) -> tuple[Placement, ...]:
    return tuple(Replicate() if code < 0 else Shard(code) for code in codes.tolist())


def _telling(values: torch.Tensor, by: MeshEnd, to: MeshEnd) -> list[dist.P2POp]:
    """The first rank of one mesh tells the ranks of another that are not in it."""
    me, teller = dist.get_rank(), by.ranks[0]
    if me == teller:
        return [dist.P2POp(dist.isend, values, rank) for rank in to.ranks if rank not in by.ranks]
    return [dist.P2POp(dist.irecv, values, teller)] if me not in by.ranks else []


def send_pieces(mine: Sequence[TensorPiece], local: torch.Tensor, held: Box, made: torch.Tensor, wanted: Box) -> None:
    """mine: of all pieces those that come from this rank, or go to it. held, wanted: its own parts."""
    me, operations = dist.get_rank(), []
    landed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source, target, box in mine:
        if source == me:
            sent = within(local, held, box)
            if target == me:
                within(made, wanted, box).copy_(sent)
            else:
                operations.append(dist.P2POp(dist.isend, _bytes_of(sent.contiguous()), target))
        else:
            place = within(made, wanted, box)
            buffer = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            operations.append(dist.P2POp(dist.irecv, _bytes_of(buffer), source))
            if buffer is not place:
                landed.append((place, buffer))
    _exchange(operations)
    for place, buffer in landed:
        place.copy_(buffer)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo knows no 16-bit integers, say."""
    return tensor.view(-1).view(torch.uint8)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
