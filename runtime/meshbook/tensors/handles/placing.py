"""Tensors of this process become mesh tensors: each rank keeps its own part, and each host is sent what its ranks keep.

    one machine         the whole travels once, through shared memory, and each rank copies its part out of it
    several machines    each is sent the different parts of its ranks, once each

Small tensors, and layouts that are not blocks, are sent whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.tensors.handles.mesh_tensor import MeshTensor, place
from meshbook.tensors.messages.issued_lines import CodeLine, line_of_caller
from meshbook.tensors.messages.operations import Box, NewOutput, SentTensor, TensorId
from meshbook.tensors.messages.spec import contiguous_strides
from meshbook.tensors.ranks.tensor_pieces import MeshEnd

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh

CUT_BYTES = 1 << 16
"""Tensors below are sent whole to each host: they travel within the message."""


class Placing(NamedTuple):
    """A tensor of this process that is to be on the ranks, by this number."""

    number: TensorId
    whole: torch.Tensor
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> Placing:
        return cls(mesh.stream.new_number_aside(), as_values(tensor), placements)

    def mesh_tensor(self, mesh: Mesh) -> MeshTensor:
        """Its handle: the tensor is freed on the ranks when that is gone."""
        shape = tuple(self.whole.shape)
        return MeshTensor._of(mesh, NewOutput(shape, contiguous_strides(shape), self.whole.dtype), self.number)


def as_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone, in C order. Raises: UsageError for what has none here, or no memory of its own."""
    if isinstance(tensor, MeshTensor):
        raise UsageError("this tensor is on a mesh already: tensor.redistribute(spec) or tensor.to_mesh(mesh, spec)")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        raise UsageError(f"only dense tensors with values can be laid out over a mesh, not {tensor.type()}")
    return tensor.detach().contiguous()


def lay_out(tensor: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> MeshTensor:
    """A tensor of this process on the ranks, each its part."""
    if not _is_in_blocks(placements):
        return place(as_values(tensor), mesh, placements)
    placing = Placing.of(tensor, mesh, placements)
    made = placing.mesh_tensor(mesh)
    mesh.stream.flush()
    if mesh.stream.recorder is not None:
        mesh.stream.recorder.note_put("place", placing.number, (placing.whole, placements))
    send([placing], mesh, line_of_caller())
    return made


def send(tensors: Sequence[Placing], mesh: Mesh, line: CodeLine) -> list[Future[Any]]:
    """Send tensors that are laid out in blocks, together; any thread may. line: of the notebook, for errors.

    Returns: done when all ranks have come as far.
    """
    procs, hosts = mesh.procs, mesh.procs.by_host()
    together = len(hosts) == 1 or all(host.is_here for host in hosts)
    groups = [(procs, procs.ranks)] if together else [(procs.select(host.ranks), host.ranks) for host in hosts]
    end = MeshEnd(mesh.stream.name, mesh.shape, procs.ranks)
    boxes = [end.boxes(each.whole.shape, each.placements) for each in tensors]
    sent = [
        (some, [for_ranks(*each, ranks, together) for each in zip(tensors, boxes, strict=True)])
        for some, ranks in groups
    ]
    return mesh.stream.give([each.number for each in tensors], sent, line)


def for_ranks(placing: Placing, boxes: Mapping[int, Box], ranks: Sequence[int], whole: bool) -> SentTensor:
    """What these ranks are sent together. boxes: what each is to keep."""
    tensor, shape = placing.whole, tuple(placing.whole.shape)
    if whole or tensor.numel() * tensor.element_size() < CUT_BYTES:
        pieces, parts = [tensor], {rank: (0, boxes[rank]) for rank in ranks}
    else:
        different = list(dict.fromkeys(boxes[rank] for rank in ranks))
        pieces = [tensor[tuple(slice(*ends) for ends in box)].contiguous() for box in different]
        every = [tuple((0, end - begin) for begin, end in box) for box in different]
        parts = {rank: (at := different.index(boxes[rank]), every[at]) for rank in ranks}
    return SentTensor(placing.number, placing.placements, shape, contiguous_strides(shape), pieces, parts)


def _is_in_blocks(placements: Sequence[Placement]) -> bool:
    return all(type(each) in (Shard, Replicate) for each in placements)
