"""Functions that run on the ranks of a local view, with tensors of their own, and what one rank has of a tensor."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshbook.concurrency.future import Future, join_futures
from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.local_view import LocalMesh, active_mesh, check_own, settle, without_mesh
from meshbook.tensors.handles.mesh_tensor import MeshTensor
from meshbook.tensors.messages.operations import NewOutput
from meshbook.tensors.ranks import local_ranks
from meshbook.torch_internals import tree_leaves, tree_map_only


def remote(
    function: Callable[..., Any] | str | None = None, *, propagate: Callable[..., Any] | str | None = None
) -> Callable[..., Any]:
    """A function that, when it is called, runs on each rank of the mesh of the tensors it is given.

    There they are the rank's own tensors, and what it returns are such tensors again. Given none, it runs on the mesh
    that is active. function: its name, as in ``torch.add``, does as well; without any this is a decorator.
    propagate: the same for shapes, called here with tensors that have no memory: then nothing is waited for;
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
            number, output = mesh.stream.new_number(), NewOutput(tuple(meta.shape), tuple(meta.stride()), meta.dtype)
            outputs[number] = output
            return MeshTensor._of(mesh, output, number)

        made = tree_map_only(torch.Tensor, know, foreseen)
        settle(mesh)
        asked = mesh.procs.execute(local_ranks.call_foreseen, mesh.stream.name, outputs, called, args, kwargs)
        mesh.stream.follow(getattr(called, "__name__", "remote"), list(outputs), asked)
        return made

    return call


def _mesh_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalMesh:
    """Raises: UsageError."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, MeshTensor)]
    mesh = given[0].mesh if given else active_mesh()
    if not isinstance(mesh, LocalMesh):
        raise UsageError(
            "a remote function is given a tensor of the local view, or called in a block of procs.activate(): either "
            "says on what mesh it runs"
        )
    return mesh


def _named(path: str) -> Callable[..., Any]:
    """Raises: UsageError."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise UsageError(f'"{path}" names no function of a module that can be imported here: {error}') from error
    return found


def fetch_shard(obj: Any, shard: Mapping[str, int] | None = None, **coordinates: int) -> Future[Any]:
    """The tensors of one rank, the first one with these coordinates; of each mesh tensor in a structure."""
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


def _ranks_at(mesh: LocalMesh, coordinates: Mapping[str, int]) -> ProcMesh:
    """The first rank with these coordinates."""
    some = mesh.procs.slice(**coordinates)
    return some.select(some.ranks[:1])


def _fetch(tensor: MeshTensor, coordinates: Mapping[str, int]) -> Future[torch.Tensor]:
    if not isinstance(tensor.mesh, LocalMesh):
        raise UsageError("a tensor in parts has one value: use tensor.full_tensor()")
    mesh = tensor.mesh
    one = _ranks_at(mesh, coordinates)
    settle(mesh)
    check_own(tensor, one.ranks)
    asked = one.execute(local_ranks.own_of, mesh.stream.name, tensor._handle.number)
    return asked.then(lambda found: next(iter(found.values())))


def inspect(obj: Any, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """`fetch_shard`, waiting for it."""
    return fetch_shard(obj, shard, **coordinates).get()


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def call_on_shard_and_fetch(
    remote: Callable[..., Any], /, *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
) -> Future[Any]:
    """What a function returns on one rank, to which tensors are its own.

    shard: its coordinates; those that are missing are 0. Raises: UsageError where neither a tensor nor a block of
    ``activate`` says on what mesh.
    """
    mesh = _mesh_of(args, kwargs)
    one = _ranks_at(mesh, dict.fromkeys(mesh.axes, 0) | dict(shard or {}))
    mesh.stream.flush()
    asked = one.execute(getattr(remote, "__wrapped__", remote), *args, **kwargs)
    return asked.then(lambda found: next(iter(found.values())))
