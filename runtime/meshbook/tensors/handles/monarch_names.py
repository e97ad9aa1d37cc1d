"""Monarch's names for the local view, at the top of `meshbook` as they are at the top of ``monarch``.

    import meshbook as monarch

    with procs.activate():
        x = torch.ones(3)
        shown = monarch.inspect(monarch.reduce(x, "gpus", "sum"))

Operations of a mesh run in the order in which they were written, so a `TensorStream`, Monarch's ``Stream``, is a name
for a part of a program, and what it borrows is the tensor itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.local_view import active_mesh, without_mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.handles.remote_calls import inspect
from meshbook.torch_internals import tree_leaves, tree_map_only

T = TypeVar("T")
Tensor = MeshTensor


class _NoMesh:
    """``with no_mesh.activate()``: tensors that begin there are this process's, within a block of ``activate`` too."""

    def activate(self) -> contextlib.AbstractContextManager[None]:
        return without_mesh()


no_mesh = _NoMesh()


def get_active_mesh() -> ProcMesh:
    """The processes of the innermost ``with procs.activate()``. Raises: UsageError outside of one."""
    mesh = active_mesh()
    if mesh is None:
        raise UsageError("no device mesh is active: with procs.activate() makes one so.")
    return mesh.procs


class Borrow:
    """Of `TensorStream.borrow`; a context manager."""

    def drop(self) -> None:
        """Give it back, which changes nothing: see the module."""

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()


class TensorStream:
    """A name for some of the operations of a program."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """In the block, `get_active_stream` says so."""
        token = _stream.set(self)
        try:
            yield
        finally:
            _stream.reset(token)

    def borrow(self, tensor: MeshTensor, mutable: bool = False) -> tuple[MeshTensor, Borrow]:
        """The tensor, and what gives it back."""
        return tensor, Borrow()

    def __repr__(self) -> str:
        return f"<Stream({self.name!r})>"

    def __str__(self) -> str:
        return f"stream {self.name!r}"


Stream: type[TensorStream] = TensorStream

_stream: ContextVar[TensorStream] = ContextVar("stream", default=TensorStream("main"))  # noqa: B039, it is never changed


def get_active_stream() -> TensorStream:
    """The stream that is active; by default the one called ``main``."""
    return _stream.get()


@contextlib.contextmanager
def coalescing() -> Iterator[None]:
    """Operations are sent in batches, in such a block as elsewhere."""
    yield


def reduce(
    tensors: T,
    dims: str | Sequence[str] | None = None,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: ProcMesh | Mesh | None = None,
) -> T:
    """`MeshTensor.reduce` of each tensor in a structure; the results go to ``mesh``, if there is one."""

    def one(tensor: MeshTensor) -> MeshTensor:
        reduced = tensor.reduce(dims, reduction, scatter=scatter)
        return reduced if mesh is None else reduced.to_mesh(mesh)

    return _each(tensors, one)


def reduce_(tensors: T, dims: str | Sequence[str] | None = None, reduction: str = "sum") -> T:
    """`MeshTensor.reduce_` of each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.reduce_(dims, reduction))


def slice_mesh(tensors: T, **axes: int | slice) -> T:
    """`MeshTensor.slice_mesh` of each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.slice_mesh(**axes))


def to_mesh(tensors: T, mesh: ProcMesh | Mesh, stream: TensorStream | None = None) -> T:
    """`MeshTensor.to_mesh` of each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.to_mesh(mesh))


def _each(tensors: T, function: Callable[[MeshTensor], MeshTensor]) -> T:
    if not any(isinstance(each, MeshTensor) for each in tree_leaves(tensors)):
        raise UsageError("give mesh tensors, such as begin in a block of procs.activate().")
    mapped: T = tree_map_only(MeshTensor, function, tensors)
    return mapped


def show(obj: object, shard: Mapping[str, int] | None = None, **coordinates: int) -> None:
    """Print the tensors of one rank in a structure; `inspect` gives them."""
    print(inspect(obj, shard, **coordinates))


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor],
    with_respect_to: Sequence[torch.Tensor] = (),
    grad_roots: Sequence[torch.Tensor | None] = (),
) -> Generator[torch.Tensor | None, None, None]:
    """The gradients of the roots with respect to each tensor, in the order given."""
    ends = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    begins = list(grad_roots) or [None] * len(ends)
    yield from torch.autograd.grad(ends, list(with_respect_to), begins, allow_unused=True)


class _GradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Any, Callable[..., Any]]], *args: Any) -> Any:
        result, ctx.then = function(*args)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = ctx.then(*gradients)
        return None, *(given if isinstance(given, tuple) else (given,))


def grad_function(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """An operation of autograd, made of a function that returns its result and what computes gradients later."""

    def call(*args: Any) -> Any:
        return _GradFunction.apply(function, *args)  # type: ignore[no-untyped-call]

    return call
