"""The meshes of tensors that this process is a part of, by name: the controller calls the functions of this module.

A tensor goes to another mesh of the same processes, or to another layout (`take_part`): ranks send each other the
parts that they lack, and no value comes through the controller. The controller does not know how the source lies, and
the ranks of the target may not have the source: the first rank of each mesh tells the others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshbook.errors import UsageError
from meshbook.groups.rank_groups import own_groups
from meshbook.tensors.messages.issued_lines import CodeLine, frame_at
from meshbook.tensors.messages.layouts import MeshEnd, TensorPiece, pieces, within
from meshbook.tensors.messages.operations import Box, LocalPart, NewOutput, TensorId, TensorReference
from meshbook.tensors.ranks.rank_operations import NotMade
from meshbook.tensors.ranks.rank_tensors import RankTensors

meshes: dict[str, RankTensors] = {}
"""The meshes that this process is a part of, by the names that the controller has given them."""


def open_mesh(name: str, axes: Mapping[str, int], ranks: Sequence[int], kind: type[RankTensors], decided: int) -> None:
    """Make the device mesh of these ranks with these axes, or make it again; all of them do.

    decided: as in `ask`.
    """
    for advises in ("_redistribute", "_collective_utils"):  # users of DTensor
        logging.getLogger(f"torch.distributed.tensor.{advises}").setLevel(logging.ERROR)
    groups = own_groups()
    groups.call_on_new_controller(meshes.clear)
    mesh = groups.device_mesh(tuple(axes), tuple(axes.values()), ranks)  # whose groups new ranks find again
    controller = name.rpartition("/")[0]
    for other in [other for other in meshes if other.rpartition("/")[0] != controller]:
        del meshes[other]  # of a former controller, whose handles are gone
    if (known := meshes.get(name)) is not None:
        known.move_to(mesh)
    else:
        meshes[name] = kind(mesh)
    meshes[name].position = list(ranks).index(dist.get_rank())
    meshes[name].give_up_below(decided)


def resolve(reference: TensorReference) -> DTensor:
    """Return a mesh tensor as code on a rank sees it. Raises: UsageError where it is not known."""
    if (found := meshes.get(reference.mesh)) is None:
        raise UsageError(f"a tensor on {reference.shown} is not in this process: send tensor.full_tensor()")
    return found.reference(reference.number)


def ask_at(place: CodeLine, name: str, asked: tuple[int, str, tuple[Any, ...]]) -> Any:
    """Do `ask` in a frame that shows the line of the notebook. asked: the other arguments of `ask`."""
    decided, method, args = asked
    return frame_at(place, f"tensor.{method}")(ask, name, decided, method, *args)


def ask(name: str, decided: int, method: str, *args: Any) -> Any:
    """Call a method of a mesh's `RankTensors`. decided: failures of operations below this number are settled."""
    if (found := meshes.get(name)) is None:
        raise UsageError("this process does not know the mesh of these tensors: heal the mesh, or make another Mesh")
    found.give_up_below(decided)
    if (why := found.why_halted) and method not in ALWAYS:
        raise NotMade(why)  # others wait in an earlier call
    return getattr(found, method)(*args)


def position_in(name: str) -> int | None:
    """Return the position of this process in a mesh, however its rank is numbered now; None where it is not in it."""
    return meshes[name].position if name in meshes else None


def free(name: str, numbers: Sequence[TensorId]) -> None:
    """Free tensors of a mesh whose ranks have other numbers now, which can do nothing else."""
    if (found := meshes.get(name)) is not None:
        found._free(numbers)


def forget(name: str) -> None:
    """Free all tensors of a mesh that goes on under another name."""
    meshes.pop(name, None)


ALWAYS = ("run", "replay", "progress", "undone", "resume", "take", "place", "make", "stepped")
"""Methods that may be called on a halted rank: they do not wait for other ranks, or know that it has halted."""


class Resharding(NamedTuple):
    """A move of a tensor, as all ranks of both meshes are told of it."""

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
    """Send this rank's part to ranks that need it, and put the new part together. Returns: the result, if it failed."""
    me = dist.get_rank()
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
        except NotMade as refused:
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
        there.keep(moved.result, made, LocalPart.of(made, placements, shape, moved.output.strides))
    return {}


def _encode(placements: Sequence[Placement]) -> torch.Tensor:
    dims = [each.dim if isinstance(each, Shard) else -1 for each in placements]
    return torch.tensor(dims, dtype=torch.int64, device="cpu")


def _decode(codes: torch.Tensor) -> tuple[Placement, ...]:
    return tuple(Replicate() if code < 0 else Shard(code) for code in codes.tolist())


def _telling(values: torch.Tensor, by: MeshEnd, to: MeshEnd) -> list[dist.P2POp]:
    """Return the messages by which the first rank of one mesh tells the ranks of another that are not in it."""
    me, teller = dist.get_rank(), by.ranks[0]
    if me == teller:
        return [dist.P2POp(dist.isend, values, rank) for rank in to.ranks if rank not in by.ranks]
    return [dist.P2POp(dist.irecv, values, teller)] if me not in by.ranks else []


def send_pieces(mine: Sequence[TensorPiece], local: torch.Tensor, held: Box, made: torch.Tensor, wanted: Box) -> None:
    """Exchange pieces of a tensor between ranks.

    mine: the pieces that come from this rank or go to it. held, wanted: this rank's own parts.
    """
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
    """Return the memory of a contiguous tensor as bytes: gloo does not know 16-bit integers, for instance."""
    return tensor.view(-1).view(torch.uint8)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
