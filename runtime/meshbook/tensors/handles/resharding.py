"""A tensor goes to another mesh, or to another layout: asked for here, done by the ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch.distributed.tensor import Placement

from meshbook.errors import UsageError
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.handles.metadata import new_template
from meshbook.tensors.messages.operations import REDISTRIBUTE, NewOutput, Template, TensorId, TensorPlace
from meshbook.tensors.messages.spec import contiguous_strides
from meshbook.tensors.ranks.exchanges import Resharding, take_part
from meshbook.tensors.ranks.known_meshes import position_in
from meshbook.tensors.ranks.tensor_pieces import MeshEnd
from meshbook.tensors.sending.numbered_tensors import Handle

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh

LayoutThere: TypeAlias = "tuple[Placement, ...] | Handle"
"""A placement per axis, or those that another tensor of the mesh has."""


class _Move(torch.autograd.Function):
    """The gradient goes back to where the tensor came from, and lies as the tensor does."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, mesh: Mesh, layout: LayoutThere) -> MeshTensor:
        ctx.origin = tensor.mesh, tensor._handle
        return _issue(tensor, mesh, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return move(cast("MeshTensor", gradient), *ctx.origin), None, None


def move(tensor: MeshTensor, mesh: Mesh, layout: LayoutThere) -> MeshTensor:
    """The same values on a mesh, laid out there. Raises: UsageError for a mesh of other processes."""
    return cast("MeshTensor", _Move.apply(tensor, mesh, layout))  # type: ignore[no-untyped-call]


def _issue(tensor: MeshTensor, mesh: Mesh, layout: LayoutThere) -> MeshTensor:
    source, stream, handle = tensor.mesh, mesh.stream, tensor._handle
    number = stream.new_number()
    wanted = layout.number if isinstance(layout, Handle) else layout
    shape = tuple(tensor.shape)
    output = NewOutput(shape, contiguous_strides(shape), tensor.dtype)
    if source is mesh:
        read = [handle.number, *([wanted] if isinstance(wanted, TensorId) else [])]
        stream.issue(_template(wanted if len(read) == 1 else None), read, (), [number])
        made = MeshTensor._of(mesh, output._replace(strides=tuple(tensor.stride())), number)
        if stream.recorder is not None:
            stream.recorder.note_tensors((tensor, made))
        return made
    mesh.procs.check_numbers()
    for each in (source.stream, stream):
        each.settle()  # ranks that have halted do not have what others have: nothing is sent before they go on
    source.stream.check([handle.number])
    base = source.procs.base()
    if (base.session, base.id) != (mesh.procs.session, mesh.procs.id):
        raise UsageError(
            f"no process group joins {source} and {mesh}, which were spawned apart: spawn one mesh and take slices of "
            "it, or bring the values through this process: meshbook.distribute(tensor.full_tensor(), mesh)"
        )
    ends = [MeshEnd(each.stream.name, each.shape, _ranks_of(each)) for each in (source, mesh)]
    ranks = base.select(sorted({*ends[0].ranks, *ends[1].ranks}))
    moved = Resharding(ends[0], ends[1], handle.number, number, wanted, output, source.procs.is_renumbered)
    stream.follow("to_mesh", (number,), ranks.execute(take_part, moved), handle)
    return MeshTensor._of(mesh, output, number)


def _ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """As they are numbered now. Raises: UsageError where some have left."""
    if not mesh.procs.is_renumbered:
        return tuple(mesh.procs.ranks)
    answers = mesh.procs.base().execute(position_in, mesh.stream.name).get().values()
    found = {position: rank for rank, position in enumerate(answers) if position is not None}
    if len(found) < mesh.size():
        raise UsageError(
            f"ranks of {mesh} have left with their parts since it shrank: before it does, take what is to stay to "
            "those who stay, tensor.to_mesh(mesh.slice(...)), and from there to the mesh as it is then"
        )
    return tuple(found[position] for position in range(mesh.size()))


@functools.lru_cache(maxsize=1000)
def _template(placements: tuple[Placement, ...] | None) -> Template:
    """placements: if it is not to lie as another tensor does."""
    return new_template(REDISTRIBUTE, [TensorPlace(0), TensorPlace(1) if placements is None else placements], {})
