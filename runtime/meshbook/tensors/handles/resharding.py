"""Tensors of a mesh that are made of the ranks' own parts, or that go to another mesh or layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from meshbook.errors import UsageError
from meshbook.formatting import name_ranks
from meshbook.mesh.proc_view import check_numbers, is_renumbered
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.handles.metadata import new_template
from meshbook.tensors.messages.layouts import MeshEnd, strides_as, to_placements
from meshbook.tensors.messages.operations import REDISTRIBUTE, LocalPart, NewOutput, Template, TensorId, TensorPlace
from meshbook.tensors.ranks.known_meshes import Resharding, position_in, take_part
from meshbook.tensors.sending.op_settling import Handle

if TYPE_CHECKING:
    from meshbook.tensors.handles.distributed_mesh import Mesh


LayoutThere: TypeAlias = "tuple[Placement, ...] | Handle"
"""The placements per axis, or the handle of a tensor of the mesh that has them."""


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
    """Return the same values laid out on a mesh. Raises: UsageError for a mesh of other processes."""
    return cast("MeshTensor", _Move.apply(tensor, mesh, layout))  # type: ignore[no-untyped-call]


def _issue(tensor: MeshTensor, mesh: Mesh, layout: LayoutThere) -> MeshTensor:
    source, stream, handle = tensor.mesh, mesh.stream, tensor._handle
    number = stream.new_number()
    wanted = layout.number if isinstance(layout, Handle) else layout
    output = NewOutput.in_order(tensor.shape, tensor.dtype)
    if source is mesh:
        read = [handle.number, *([wanted] if isinstance(wanted, TensorId) else [])]
        stream.issue(_template(wanted if len(read) == 1 else None), read, (), [number])
        made = MeshTensor._of(mesh, output._replace(strides=tuple(tensor.stride())), number)
        if stream.recorder is not None:
            stream.recorder.note_tensors((tensor, made))
        return made
    check_numbers(mesh.procs)
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
    moved = Resharding(ends[0], ends[1], handle.number, number, wanted, output, is_renumbered(source.procs))
    stream.follow("to_mesh", (number,), ranks.execute(take_part, moved), handle)
    return MeshTensor._of(mesh, output, number)


def _ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the ranks of a mesh as they are numbered now. Raises: UsageError where some have left."""
    if not is_renumbered(mesh.procs):
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


TOLD = 4
"""The most groups of ranks that an error names with their parts."""


def join(name: str, parts: Mapping[int, LocalPart], mesh: Mesh, placements: Sequence[Placement] | None) -> LocalPart:
    """Return the description of the one tensor that these parts make, as one rank has it.

    parts: without placements where they are plain tensors. Raises: UsageError if they make none.
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
    return first._replace(placements=layout, shape=shape, strides=strides_as(first.local_strides, shape))


def check_alike(
    name: str,
    parts: Mapping[int, LocalPart],
    fault: str,
    words: Callable[[LocalPart], str],
    key: Callable[[LocalPart], object] | None = None,
) -> None:
    """Raise a UsageError that tells the ranks' parts by ``words``, unless all have the same ``key``."""
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
    """Add up the sizes along each dim, of the ranks at the beginning of all axes that do not cut it."""
    local = torch.tensor([parts[rank].local_shape for rank in mesh.procs.ranks], dtype=torch.int64, device="cpu")
    found = []
    for dim, sizes in enumerate(local.unbind(1)):
        sizes = sizes.view(mesh.shape)
        for axis, placement in enumerate(layout):
            cuts = isinstance(placement, Shard) and placement.dim == dim
            sizes = sizes.sum(axis, keepdim=True) if cuts else sizes.narrow(axis, 0, 1)
        found.append(int(sizes))
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
