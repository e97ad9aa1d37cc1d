"""The local view, in Monarch's words: each rank its own tensor, of one shape and dtype, and operations on all of them.

    with procs.activate():
        x = torch.randn(3, 4) * 2               # on each rank another one
        total = x.reduce("gpus", "sum")         # along an axis of the mesh
    inspect(total, gpus=0)

For the controller this is a mesh of its own: operations travel as those of tensors in parts do, and the two kinds of
tensors are not mixed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, cast

import torch
from torch.distributed.tensor import Placement

from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.extent import Extent
from meshbook.source.location import PACKAGE
from meshbook.tensors.handles.distributed_mesh import Mesh, one_mesh_of
from meshbook.tensors.handles.mesh_tensor import MeshTensor, dispatch
from meshbook.tensors.handles.resharding import check_alike
from meshbook.tensors.messages.layouts import ShardingSpec
from meshbook.tensors.messages.operations import LocalPart, NewOutput
from meshbook.tensors.ranks import local_ranks
from meshbook.tensors.ranks.local_ranks import REDUCTIONS, LocalMove, LocalTensors
from meshbook.tensors.sending.op_stream import OpStream
from meshbook.tensors.sending.recovery import OwnTensorsLost
from meshbook.torch_internals import TorchDispatchMode, tree_leaves


class _LocalStream(OpStream):
    def fetch(self, method: str, number: int) -> Any:
        if method == "whole":
            raise UsageError(
                "each rank has another tensor here, so there is no one value: meshbook.distributed.inspect(tensor) is "
                "that of one rank, tensor.reduce(...) one of all"
            )
        return super().fetch(method, number)


class LocalMesh(Mesh):
    """Processes that have tensors of their own."""

    held_by = LocalTensors
    stream_of = _LocalStream

    def move(
        self,
        tensor: MeshTensor,
        to: Mesh | ProcMesh,
        sharding_spec: ShardingSpec | None,
        placements: Sequence[Placement] | None,
    ) -> MeshTensor:
        """Send each rank of the target the tensor of the rank with its coordinates, along the axes that both have."""
        mesh = local_mesh_of(to)
        if mesh is self and sharding_spec is None and placements is None:
            return tensor
        if sharding_spec is not None or placements is not None:
            raise UsageError("each rank has a tensor of its own, and nothing is laid out: use tensor.reduce(...)")
        return cast("MeshTensor", _LocalMove.apply(tensor, mesh))  # type: ignore[no-untyped-call]

    def join(self, name: str, parts: Mapping[int, LocalPart], placements: Sequence[Placement] | None) -> LocalPart:
        """Check that all ranks' tensors have one shape and dtype, and are no DTensors. Raises: UsageError if not."""
        if placements is not None or any(part.placements for part in parts.values()):
            raise UsageError(f"{name} is to be in parts of one tensor: use meshbook.distributed.Mesh(procs).from_ranks")
        check_alike(name, parts, "differ", lambda part: f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}")
        return next(iter(parts.values()))

    def send(self, tensor: MeshTensor, mesh: LocalMesh) -> MeshTensor:
        base = self.procs.base()
        if (base.session, base.id) != (mesh.procs.session, mesh.procs.id):
            raise UsageError(f"no process group joins {self} and {mesh}, which were spawned apart")
        free = [axis for axis, size in self.axes.items() if size > 1 and mesh.axes.get(axis) != size]
        if free:
            raise UsageError(f"{mesh} does not have the axis {free[0]} of {self}: tensor.slice_mesh({free[0]}=0) first")
        sources = {}
        own = Extent.of(self.axes)
        for at, rank in zip(Extent.of(mesh.axes).points(), mesh.procs.ranks, strict=True):
            nearest = {axis: at.get(axis, 0) % size for axis, size in own.items()}
            sources[rank] = self.procs.ranks[own.rank(nearest)]
        number, shape = mesh.stream.new_number(), tuple(tensor.shape)
        settle(self, mesh)
        self.stream.check([tensor._handle.number])
        move = LocalMove(
            self.stream.name, mesh.stream.name, tensor._handle.number, number, sources, shape, tensor.dtype
        )
        ranks = base.select(sorted({*sources, *sources.values()}))
        mesh.stream.follow("to_mesh", (number,), ranks.execute(local_ranks.take_copy, move), tensor._handle)
        return MeshTensor._of(mesh, NewOutput.in_order(shape, tensor.dtype), number)

    def part(self, tensor: MeshTensor, **axes: Any) -> MeshTensor:
        mesh = local_mesh_of(self.procs.slice(**axes))
        return cast("MeshTensor", _Share.apply(tensor, mesh))  # type: ignore[no-untyped-call]

    def reduce(self, tensor: MeshTensor, axes: str | Sequence[str] | None, reduction: str, scatter: bool) -> MeshTensor:
        names = list(self.axes) if axes is None else [axes] if isinstance(axes, str) else list(axes)
        self.procs.size(names)  # raises UnknownAxisError
        if reduction not in REDUCTIONS:
            raise UsageError(f"{reduction!r} is no reduction: {', '.join(REDUCTIONS)}")
        if scatter and (len(names) > 1 or not tensor.dim() or tensor.shape[0] % self.axes[names[0]]):
            raise UsageError("what is scattered is cut along its first dim into equal parts, along one axis alone")
        return cast("MeshTensor", _Reduce.apply(tensor, names, reduction, scatter))  # type: ignore[no-untyped-call]


class _LocalMove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, mesh: LocalMesh) -> MeshTensor:
        ctx.origin = tensor.mesh
        return cast("LocalMesh", tensor.mesh).send(tensor, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: MeshTensor) -> Any:
        mesh = cast("LocalMesh", gradient.mesh)
        copied = [axis for axis, size in mesh.axes.items() if ctx.origin.axes.get(axis, 1) != size]
        if copied:  # what went to many ranks is given the sum of what they say
            gradient = mesh.part(mesh.reduce(gradient, copied, "sum", False), **dict.fromkeys(copied, 0))
        return cast("LocalMesh", gradient.mesh).send(gradient, ctx.origin), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, names: list[str], reduction: str, scatter: bool) -> MeshTensor:
        ctx.how = names, reduction, scatter
        stream, handle = tensor.mesh.stream, tensor._handle
        settle(tensor.mesh)
        stream.check([handle.number])
        shape = list(tensor.shape)
        sizes = [tensor.mesh.axes[name] for name in names]
        if reduction == "stack":
            shape = [*sizes, *shape]
        if scatter:
            shape[0] //= sizes[0]
        like = torch.empty(1, dtype=tensor.dtype, device="cpu")
        dtype = torch.result_type(like, 1.0) if reduction == "avg" else tensor.dtype
        number = stream.new_number()
        stream.put("reduce", number, handle.number, names, reduction, scatter)
        return MeshTensor._of(tensor.mesh, NewOutput.in_order(shape, dtype), number)

    @staticmethod
    def backward(ctx: Any, gradient: MeshTensor) -> Any:
        names, reduction, scatter = ctx.how
        if scatter or reduction not in ("sum", "avg"):
            raise UsageError(f"reduce({reduction!r}{', scatter=True' * scatter}) has no gradient: sum and avg have")
        return gradient.mesh.reduce(gradient, names, reduction, False), None, None, None


class _Share(torch.autograd.Function):
    """The tensors of a mesh, known as tensors of a part of it as well. Elsewhere the gradient is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, mesh: LocalMesh) -> MeshTensor:
        ctx.origin = tensor.mesh
        number, shape = mesh.stream.new_number(), tuple(tensor.shape)
        source = tensor.mesh.stream
        settle(tensor.mesh, mesh)
        check_own(tensor, mesh.procs.ranks)
        names = source.name, mesh.stream.name, tensor.mesh.procs.ranks
        shared = mesh.procs.execute(local_ranks.share, *names, tensor._handle.number, number, shape, tensor.dtype)
        mesh.stream.follow("slice_mesh", (number,), shared, tensor._handle)
        return MeshTensor._of(mesh, NewOutput.of(tensor), number)

    @staticmethod
    def backward(ctx: Any, gradient: MeshTensor) -> Any:
        return _Share.apply(gradient, ctx.origin), None  # type: ignore[no-untyped-call]


def local_mesh_of(procs: ProcMesh | Mesh) -> LocalMesh:
    """Return the mesh of the local view of these processes, made when there is none."""
    if isinstance(procs, LocalMesh):
        return procs
    return one_mesh_of(procs, LocalMesh)


class _Activation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors that begin in this process begin on each rank."""

    def __init__(self, mesh: LocalMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if _active.get() is not self._mesh:
            return func(*args, **named)
        begins = "device" in named or "pin_memory" in {argument.name for argument in func._schema.arguments}
        if not begins or any(isinstance(each, torch.Tensor) for each in tree_leaves((args, named))):
            return func(*args, **named)
        elsewhere = torch.device(named.get("device") or "cpu").type == "meta" or named.get("generator") is not None
        if elsewhere or _is_own_code():
            return func(*args, **named)
        return dispatch(func, args, {**named, "device": torch.device("cpu")}, self._mesh)


_TORCH = f"{torch.__path__[0]}/"


def _is_own_code() -> bool:
    """Whether this package makes the tensor, to receive a value, say."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


@contextmanager
def activate(procs: ProcMesh | Mesh) -> Iterator[None]:
    """Have tensors that begin in this block begin on each rank of the mesh: ``torch.zeros``, ``nn.Linear``."""
    mesh = local_mesh_of(procs)
    with _activated(mesh), _Activation(mesh):
        yield


_active: ContextVar[LocalMesh | None] = ContextVar("active_mesh", default=None)


@contextmanager
def _activated(mesh: LocalMesh | None) -> Iterator[None]:
    token = _active.set(mesh)
    try:
        yield
    finally:
        _active.reset(token)


def active_mesh() -> LocalMesh | None:
    """Return the mesh on which tensors begin here and now; None where they are this process's."""
    return _active.get()


@contextmanager
def without_mesh() -> Iterator[None]:
    """Have tensors that begin in this block be this process's, within a block of `activate` too."""
    with _activated(None):
        yield


def rank_tensor(procs: ProcMesh | Mesh, dim: str | Sequence[str]) -> MeshTensor:
    """Return each rank's index along an axis, or along several as one, the last fastest. Raises: UnknownAxisError."""
    mesh, names = local_mesh_of(procs), [dim] if isinstance(dim, str) else list(dim)
    mesh.procs.size(names)
    points, among = Extent.of(mesh.axes).points(), Extent(names, [mesh.axes[name] for name in names])
    numbers = {
        rank: among.rank({name: at[name] for name in names}) for at, rank in zip(points, mesh.procs.ranks, strict=True)
    }
    return cast("MeshTensor", mesh.execute(local_ranks.own_number, numbers))


def settle(*meshes: Mesh) -> None:
    """Wait until the ranks have done all that was issued: a rank that has halted lacks the tensors that others have."""
    for mesh in meshes:
        mesh.stream.settle()


def check_own(tensor: MeshTensor, ranks: Sequence[int]) -> None:
    """Raise the error of these ranks' own tensors, if they have one; that other ranks have lost theirs is none."""
    number = tensor._handle.number
    try:
        tensor.mesh.stream.check([number])
    except OwnTensorsLost as lost:
        if lost.number != number or not set(ranks).isdisjoint(lost.ranks):  # else it is of a tensor made of that one
            raise
