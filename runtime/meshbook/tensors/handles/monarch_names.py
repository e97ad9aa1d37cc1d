"""Monarch's names for the local view: functions at the top of `meshbook` as they are at the top of ``monarch``.

    import meshbook as monarch

    with procs.activate():
        x = torch.ones(3)
        shown = monarch.inspect(monarch.reduce(x, "gpus", "sum"))

`remote` and `rref` run functions, and endpoints of actors, on the ranks with tensors of their own. Operations of a mesh
run in the order in which they were written, so a `TensorStream`, Monarch's ``Stream``, is a name for a part of a
program, and a borrowed tensor is the tensor itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from meshbook.actor.actor_mesh import ActorMesh, procs_of
from meshbook.actor.router import current_router
from meshbook.concurrency.future import Future, join_futures
from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.distributed_mesh import Mesh
from meshbook.tensors.handles.local_view import LocalMesh, active_mesh, check_own, local_mesh_of, settle, without_mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.operations import NewOutput
from meshbook.tensors.ranks import known_meshes, local_ranks
from meshbook.torch_internals import tree_leaves, tree_map_only

T = TypeVar("T")
Tensor = MeshTensor


class _NoMesh:
    """The object behind ``with no_mesh.activate()``: tensors that begin in the block are this process's."""

    def activate(self) -> contextlib.AbstractContextManager[None]:
        return without_mesh()


no_mesh = _NoMesh()


def get_active_mesh() -> ProcMesh:
    """Return the processes of the innermost ``with procs.activate()``. Raises: UsageError outside of one."""
    mesh = active_mesh()
    if mesh is None:
        raise UsageError("no device mesh is active: with procs.activate() makes one so.")
    return mesh.procs


class Borrow:
    """The context manager that `TensorStream.borrow` returns."""

    def drop(self) -> None:
        """Give the tensor back, which changes nothing: see the module."""

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
        """Make this the stream that `get_active_stream` returns in the block."""
        token = _stream.set(self)
        try:
            yield
        finally:
            _stream.reset(token)

    def borrow(self, tensor: MeshTensor, mutable: bool = False) -> tuple[MeshTensor, Borrow]:
        """Return the tensor, and a context manager that gives it back."""
        return tensor, Borrow()

    def __repr__(self) -> str:
        return f"<Stream({self.name!r})>"

    def __str__(self) -> str:
        return f"stream {self.name!r}"


Stream: type[TensorStream] = TensorStream

_stream: ContextVar[TensorStream] = ContextVar("stream", default=TensorStream("main"))  # noqa: B039, it is never changed


def get_active_stream() -> TensorStream:
    """Return the stream that is active; by default the one called ``main``."""
    return _stream.get()


@contextlib.contextmanager
def coalescing() -> Iterator[None]:
    """Enter a block in which operations are sent in batches, as they are elsewhere."""
    yield


def reduce(
    tensors: T,
    dims: str | Sequence[str] | None = None,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: ProcMesh | Mesh | None = None,
) -> T:
    """Do `MeshTensor.reduce` for each tensor in a structure; the results go to ``mesh``, if there is one."""

    def one(tensor: MeshTensor) -> MeshTensor:
        reduced = tensor.reduce(dims, reduction, scatter=scatter)
        return reduced if mesh is None else reduced.to_mesh(mesh)

    return _each(tensors, one)


def reduce_(tensors: T, dims: str | Sequence[str] | None = None, reduction: str = "sum") -> T:
    """Do `MeshTensor.reduce_` for each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.reduce_(dims, reduction))


def slice_mesh(tensors: T, **axes: int | slice) -> T:
    """Do `MeshTensor.slice_mesh` for each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.slice_mesh(**axes))


def to_mesh(tensors: T, mesh: ProcMesh | Mesh, stream: TensorStream | None = None) -> T:
    """Do `MeshTensor.to_mesh` for each tensor in a structure."""
    return _each(tensors, lambda tensor: tensor.to_mesh(mesh))


def _each(tensors: T, function: Callable[[MeshTensor], MeshTensor]) -> T:
    if not any(isinstance(each, MeshTensor) for each in tree_leaves(tensors)):
        raise UsageError("give mesh tensors, such as begin in a block of procs.activate().")
    mapped: T = tree_map_only(MeshTensor, function, tensors)
    return mapped


def show(obj: object, shard: Mapping[str, int] | None = None, **coordinates: int) -> None:
    """Print the tensors of one rank in a structure, which `inspect` returns."""
    print(inspect(obj, shard, **coordinates))


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor],
    with_respect_to: Sequence[torch.Tensor] = (),
    grad_roots: Sequence[torch.Tensor | None] = (),
) -> Generator[torch.Tensor | None, None, None]:
    """Yield the gradients of the roots with respect to each tensor, in the order given."""
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
    """Make an operation of autograd from a function that returns its result and a function for its gradients."""

    def call(*args: Any) -> Any:
        return _GradFunction.apply(function, *args)  # type: ignore[no-untyped-call]

    return call


def remote(
    function: Callable[..., Any] | str | None = None, *, propagate: Callable[..., Any] | str | None = None
) -> Callable[..., Any]:
    """Make a function that runs on each rank of the mesh of the tensors that it is given.

    On the ranks these are the rank's own tensors, and so are the tensors that the function returns. Without tensors it
    runs on the active mesh. function: may be a name, as ``torch.add``; without one this is a decorator.
    propagate: a function with the same shapes, called here with tensors without memory, so that nothing is waited for;
    ``"mocked"`` is the function itself, other words of Monarch's wait. Raises: UsageError without a mesh.
    """
    if function is None:
        return functools.partial(remote, propagate=propagate)
    called = _named(function) if isinstance(function, str) else function
    foresee = called if propagate == "mocked" else propagate if callable(propagate) else None

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        mesh = _mesh_of(args, kwargs)
        if foresee is None:
            return mesh.execute(called, *args, **kwargs)
        on_meta = tree_map_only(MeshTensor, _without_memory, (args, kwargs))
        with without_mesh():
            foreseen = foresee(*on_meta[0], **on_meta[1])
        outputs: dict[int, NewOutput] = {}

        def know(meta: torch.Tensor) -> MeshTensor:
            number = mesh.stream.new_number()
            outputs[number] = output = NewOutput.of(meta)
            return MeshTensor._of(mesh, output, number)

        made = tree_map_only(torch.Tensor, know, foreseen)
        settle(mesh)
        asked = mesh.procs.execute(local_ranks.call_foreseen, mesh.stream.name, outputs, called, args, kwargs)
        mesh.stream.follow(getattr(called, "__name__", "remote"), list(outputs), asked)
        return made

    return call


def _mesh_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalMesh:
    """Return the mesh of the tensors, or the active one. Raises: UsageError without either."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, MeshTensor)]
    mesh = given[0].mesh if given else active_mesh()
    if not isinstance(mesh, LocalMesh):
        raise UsageError(
            "a remote function is given a tensor of the local view, or called in a block of procs.activate(): either "
            "says on what mesh it runs"
        )
    return mesh


def _named(path: str) -> Callable[..., Any]:
    """Import a function by its name. Raises: UsageError."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise UsageError(f'"{path}" names no function of a module that can be imported here: {error}') from error
    return found


def fetch_shard(obj: Any, shard: Mapping[str, int] | None = None, **coordinates: int) -> Future[Any]:
    """Fetch the tensors of one rank, the first with these coordinates, for each mesh tensor in a structure.

    Of a tensor that is laid out on a mesh it is the rank's part, or its replica.
    """
    at = {**(shard or {}), **coordinates}
    tensors = [each for each in tree_leaves(obj) if isinstance(each, MeshTensor)]
    if not tensors:
        raise UsageError("there is no mesh tensor to fetch from a rank")
    asked = [_fetch(tensor, at) for tensor in tensors]
    if obj is tensors[0]:
        return asked[0]
    return join_futures(asked).then(lambda found: _filled(obj, found))


def _filled(obj: Any, found: Sequence[torch.Tensor]) -> Any:
    left = iter(found)
    return tree_map_only(MeshTensor, lambda _: next(left), obj)


def _ranks_at(mesh: Mesh, coordinates: Mapping[str, int]) -> ProcMesh:
    """Return the first rank with these coordinates."""
    some = mesh.procs.slice(**coordinates)
    return some.select(some.ranks[:1])


def _fetch(tensor: MeshTensor, coordinates: Mapping[str, int]) -> Future[torch.Tensor]:
    mesh = tensor.mesh
    one = _ranks_at(mesh, coordinates)
    if not isinstance(mesh, LocalMesh):
        if (error := mesh.stream.why_not(tensor._handle.number)) is not None:
            raise error
        part = one.execute(known_meshes.ask, mesh.stream.name, 0, "local", tensor._handle.number)
        return part.then(lambda found: found.values()[0])
    settle(mesh)
    check_own(tensor, one.ranks)
    asked = one.execute(local_ranks.own_of, mesh.stream.name, tensor._handle.number)
    return asked.then(lambda found: next(iter(found.values())))


def inspect(obj: Any, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """Fetch the tensors of one rank as `fetch_shard` does, and wait for them."""
    return fetch_shard(obj, shard, **coordinates).get()


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def call_on_shard_and_fetch(
    remote: Callable[..., Any], /, *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
) -> Future[Any]:
    """Call a function on one rank, to which tensors are its own; return the future of its answer.

    shard: the rank's coordinates; missing ones are 0. Raises: UsageError where neither a tensor nor a block of
    ``activate`` says on which mesh.
    """
    mesh = _mesh_of(args, kwargs)
    one = _ranks_at(mesh, dict.fromkeys(mesh.axes, 0) | dict(shard or {}))
    mesh.stream.flush()
    asked = one.execute(getattr(remote, "__wrapped__", remote), *args, **kwargs)
    return asked.then(lambda found: next(iter(found.values())))


def rref(actors: ActorMesh[Any], endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an endpoint on every actor; the tensors that it returns are each rank's own, in the local view.

    Tensors of that view among the arguments are, for each actor, those of its rank. Raises: UsageError where the mesh
    is not driven here.
    """
    procs = procs_of(actors)
    if not isinstance(procs, ProcMesh):
        raise UsageError("rref is called where the mesh is driven, in the notebook or the script; on ranks use call.")
    return local_mesh_of(procs).execute(_call_here, actors, endpoint, *args, **kwargs)


def _call_here(actors: ActorMesh[Any], endpoint: str, *args: Any, **kwargs: Any) -> Any:
    """Call the actor that lives on this rank."""
    here = actors.select([current_router().place.rank])
    return getattr(here, endpoint).call_one(*args, **kwargs).get()
