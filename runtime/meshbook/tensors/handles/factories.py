"""Tensors that begin on a mesh: laid out from one of this process, or made by the ranks.

    one machine         the whole travels once, through shared memory, and each rank copies its part out of it
    several machines    each is sent the different parts of its ranks, once each

Small tensors, and layouts that are not blocks, are sent whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import Placement
from typing_extensions import Required, TypedDict, Unpack

from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh, mesh_of
from meshbook.tensors.handles.mesh_tensor import MeshTensor, make, new_seed, place
from meshbook.tensors.messages.issued_lines import CodeLine, line_of_caller
from meshbook.tensors.messages.layouts import MeshEnd, ShardingSpec, are_in_blocks, to_placements
from meshbook.tensors.messages.operations import Box, Factory, NewOutput, SentTensor, TensorId, contiguous_strides

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh


def distribute(
    tensor: torch.Tensor,
    mesh: Mesh | ProcMesh,
    sharding_spec: ShardingSpec | None = None,
    *,
    placements: Sequence[Placement] | None = None,
) -> MeshTensor:
    """Lay a tensor of this process out over a mesh; it is whole on every rank by default, else each keeps its part.

    sharding_spec: for each dim of the tensor the axis, or axes, that it is cut along, or None. placements: the same in
    torch's words, one for each axis of the mesh. Sizes need not be divisible.
    Raises: UnknownAxisError; UsageError if the layout does not fit the tensor.
    """
    mesh = mesh_of(mesh)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"a tensor is laid out over a mesh, not a {type(tensor).__name__}: use torch.as_tensor")
    made = lay_out(tensor, mesh, to_placements(mesh, tensor.shape, sharding_spec, placements))
    return made.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


class Layout(TypedDict, total=False):
    """The mesh of a new tensor, its type, and its layout as for `distribute`."""

    mesh: Required[Mesh | ProcMesh]
    dtype: torch.dtype | None
    sharding_spec: ShardingSpec | None
    placements: Sequence[Placement] | None
    requires_grad: bool


def _make(
    function: str, shape: Sequence[int], args: tuple[Any, ...], layout: Layout, *, draws: bool = False
) -> MeshTensor:
    """Raises: UsageError for sizes below zero, or without a mesh; TypeError for an argument that is not known."""
    known = Layout.__required_keys__ | Layout.__optional_keys__
    if unknown := set(layout) - known:
        named = ", ".join(map(repr, sorted(unknown)))
        raise TypeError(f"{function}() on a mesh knows no argument {named}; it knows {', '.join(sorted(known))}")
    if "mesh" not in layout:
        raise UsageError(f"{function} makes a tensor on a mesh: say on which, by {function}(..., mesh=mesh)")
    if any(size < 0 for size in shape):
        raise UsageError(f"{function} with a size below zero: {tuple(shape)}")
    mesh = mesh_of(layout["mesh"])
    placements = to_placements(mesh, shape, layout.get("sharding_spec"), layout.get("placements"))
    dtype = layout.get("dtype") or torch.get_default_dtype()
    made = make(Factory(function, args, dtype, new_seed() if draws else 0), shape, mesh, placements)
    return made.requires_grad_(layout.get("requires_grad", False))  # type: ignore[return-value]


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def zeros(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.zeros` does, laid out as by `distribute`."""
    return _make("zeros", _sizes(size), (_sizes(size),), layout)


empty = zeros
"""A tensor on a mesh in the place of `torch.empty`; its values are zeros."""


def ones(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.ones` does."""
    return _make("ones", _sizes(size), (_sizes(size),), layout)


def full(size: Sequence[int], fill_value: float, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.full` does."""
    layout["dtype"] = layout.get("dtype") or torch.full((), fill_value, device="cpu").dtype
    return _make("full", size, (tuple(size), fill_value), layout)


def arange(*bounds: float, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.arange` does."""
    like = torch.arange(*bounds, dtype=layout.get("dtype"), device="meta")
    layout["dtype"] = like.dtype
    return _make("arange", like.shape, bounds, layout)


def rand(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.rand` does; its values depend on this process's seed, not on the layout."""
    return _make("rand", _sizes(size), (_sizes(size),), layout, draws=True)


def randn(*size: Any, **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.randn` does; see `rand`."""
    return _make("randn", _sizes(size), (_sizes(size),), layout, draws=True)


def randint(low: int, high: int, size: Sequence[int], **layout: Unpack[Layout]) -> MeshTensor:
    """Make a tensor on a mesh as `torch.randint` does; see `rand`."""
    layout["dtype"] = layout.get("dtype") or torch.int64
    return _make("randint", size, (low, high, tuple(size)), layout, draws=True)


CUT_BYTES = 1 << 16
"""Tensors below are sent whole to each host: they travel within the message."""


class Placing(NamedTuple):
    """A tensor of this process that is to be on the ranks, by this number."""

    number: TensorId
    whole: torch.Tensor
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> Placing:
        return cls(mesh.stream.new_numbers(1)[0], as_values(tensor), placements)

    def mesh_tensor(self, mesh: Mesh) -> MeshTensor:
        """Return the tensor's handle: ranks free the tensor when that is gone."""
        return MeshTensor._of(mesh, NewOutput.in_order(self.whole.shape, self.whole.dtype), self.number)


def as_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values alone, in C order. Raises: UsageError for a tensor without values, or memory, of its own."""
    if isinstance(tensor, MeshTensor):
        raise UsageError("this tensor is on a mesh already: tensor.redistribute(spec) or tensor.to_mesh(mesh, spec)")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        raise UsageError(f"only dense tensors with values can be laid out over a mesh, not {tensor.type()}")
    return tensor.detach().contiguous()


def lay_out(tensor: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> MeshTensor:
    """Put a tensor of this process on the ranks, each of which keeps its part."""
    if not are_in_blocks(placements):
        return place(as_values(tensor), mesh, placements)
    placing = Placing.of(tensor, mesh, placements)
    made = placing.mesh_tensor(mesh)
    mesh.stream.flush()
    if mesh.stream.recorder is not None:
        mesh.stream.recorder.note_put("place", placing.number, (placing.whole, placements))
    send_parts([placing], mesh, line_of_caller())
    return made


def send_parts(tensors: Sequence[Placing], mesh: Mesh, line: CodeLine) -> list[Future[Any]]:
    """Send tensors that are laid out in blocks, together; any thread may. line: of the notebook, for errors.

    Returns: futures that are done when all ranks have come as far.
    """
    procs, hosts = mesh.procs, states.by_host(mesh.procs)
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
    """Return the message that these ranks are sent together. boxes: the part that each is to keep."""
    tensor, shape = placing.whole, tuple(placing.whole.shape)
    if whole or tensor.numel() * tensor.element_size() < CUT_BYTES:
        pieces, parts = [tensor], {rank: (0, boxes[rank]) for rank in ranks}
    else:
        different = list(dict.fromkeys(boxes[rank] for rank in ranks))
        pieces = [tensor[tuple(slice(*ends) for ends in box)].contiguous() for box in different]
        every = [tuple((0, end - begin) for begin, end in box) for box in different]
        parts = {rank: (at := different.index(boxes[rank]), every[at]) for rank in ranks}
    return SentTensor(placing.number, placing.placements, shape, contiguous_strides(shape), pieces, parts)
